#!/usr/bin/env bash
# kvcore as a library of its own: install it, build its example against what was installed, run that.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

cache_value() { sed -n "s/^$1:[A-Z]*=//p" "$BUILD/CMakeCache.txt"; }

cc=$(cache_value CMAKE_C_COMPILER)
sanitize=$(cache_value BATON_SANITIZE)
flags=(-std=c11 -Wall -Wextra -Werror)
case $sanitize in
address) flags+=("-fsanitize=address,undefined") ;;
thread) flags+=(-fsanitize=thread) ;;
esac
prefix=$work/prefix

install_it() {
    expect_exit 0 cmake --install "$BUILD" --component kvcore --prefix "$prefix"
    pc=$(find "$prefix" -name kvcore.pc)
    [ -n "$pc" ] || fail "no kvcore.pc under $prefix"
    export PKG_CONFIG_PATH=${pc%/*}
}

# build_here SOURCE OUT: with nothing but the prefix in sight.
build_here() {
    local cflags libs
    read -ra cflags <<<"$(pkg-config --cflags kvcore)"
    read -ra libs <<<"$(pkg-config --libs kvcore)"
    cp "$1" "$work/main.c"
    (cd "$work" && expect_exit 0 "$cc" "${flags[@]}" "${cflags[@]}" -o "$2" main.c "${libs[@]}") || exit 1
}

only_the_library_its_headers_and_its_description_are_installed() {
    install_it
    (cd "$prefix" && find . -type f | sort) >"$work/out"
    expect out '/libkvcore\.a$'
    expect out '^\./include/kvcore/kvcore\.h$'
    expect out '^\./include/kvcore/kv_store\.h$'
    expect out '/pkgconfig/kvcore\.pc$'
    [ "$(wc -l <"$work/out")" -eq 4 ] || fail "other files are installed too: $(cat "$work/out")"
}

the_headers_include_nothing_but_the_system_and_each_other() {
    install_it
    ! grep -hE '^#include "' "$prefix"/include/kvcore/*.h | grep -v '"kvcore/kvcore.h"' ||
        fail "a header includes a file of ours that is not installed"
    echo '#include <kvcore/kv_store.h>
int main(void) { return kv_strerror(0) == 0 || kv_durability_parse("often") == 0; }' >"$work/least.c"
    build_here "$work/least.c" "$work/least"
    expect_exit 0 "$work/least"
}

the_version_is_the_projects() {
    install_it
    [ "$(pkg-config --modversion kvcore)" = "$(cache_value CMAKE_PROJECT_VERSION)" ] ||
        fail "kvcore.pc says $(pkg-config --modversion kvcore)"
}

the_example_builds_against_the_installed_prefix_and_says_what_it_should() {
    install_it
    build_here "$SOURCE/kvcore/example/branches.c" "$work/branches"
    expect_exit 0 "$work/branches"
    diff - "$work/out" <<END || fail "the example says something else"
matched 99 of 100
one: 101 positions, rows as written
two: 101 positions, rows as written
pages taken 2, copied 2
copy: 101 positions, rows as written
audit passed
END
}

run_tests only_the_library_its_headers_and_its_description_are_installed \
    the_headers_include_nothing_but_the_system_and_each_other \
    the_version_is_the_projects \
    the_example_builds_against_the_installed_prefix_and_says_what_it_should
