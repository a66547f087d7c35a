# Shared by the scripts beside it: `. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"`.  Bash.
# shellcheck shell=bash
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
program=$(basename "$0")
log_dir=        # made by need_log_dir; kept when something failed, not when it was interrupted
ticker=         # process that shows progress
keep_logs=no

say() { printf '%s\n' "$*" >&2; }
die() { say "$program: $*"; exit 1; }

# The comment that a script begins with.
usage() { sed -n '2,/^[^#]/{/^# shellcheck/d;s/^# \{0,1\}//p}' "$0"; }

# refuse WHAT: the command line is wrong.
refuse() {
    say "$program: $*"
    usage >&2
    exit 2
}

# refuse_argument ARGUMENT: one that the script does not take; asks for help are answered.
refuse_argument() {
    case $1 in
    -h | --help) usage; exit 0 ;;
    -*) refuse "$1: no such option" ;;
    *) refuse "$1: no such argument" ;;
    esac
}

# need_log_dir: $log_dir is a folder for logs, removed at the end unless something failed.
need_log_dir() {
    [ -n "$log_dir" ] || log_dir=$(mktemp -d "${TMPDIR:-/tmp}/baton-$program.XXXXXX")
}

# has_failed STATUS: it did not succeed, nor end by a signal or for want of a reader.
has_failed() { case $1 in 0 | 130 | 141 | 143) false ;; esac }

# Scripts that have more to put away define at_exit.
finish() {
    local rc=$?
    trap - EXIT INT TERM
    trap '' PIPE
    stop_ticker
    if declare -F at_exit >/dev/null; then at_exit "$rc" || true; fi
    if [ -n "$log_dir" ]; then
        if [ "$keep_logs" = no ] && ! has_failed "$rc"; then rm -rf "$log_dir"; fi
    fi
    exit "$rc"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 141' PIPE

stop_ticker() {
    [ -n "$ticker" ] || return 0
    kill "$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    ticker=
    if [ -t 2 ]; then printf '\r\033[K' >&2; fi
}

# Shows nothing for two seconds, then the label, and on a terminal the seconds.
start_ticker() {
    local label=$1 owner=$$
    (
        trap - EXIT INT
        trap 'exit 0' TERM
        sleep 2 & wait $!
        [ -t 2 ] || { say "$label ..."; exit 0; }
        for ((s = 2; ; s++)); do
            kill -0 "$owner" 2>/dev/null || exit 0
            printf '\r%s ... %d s' "$label" "$s" >&2
            sleep 1 & wait $!
        done
    ) &
    ticker=$!
}

# step LABEL COMMAND...: run it with its output in a log.  Quiet when it succeeds; progress after two
# seconds; on failure the end of the log and where it is.  Returns the command's status.
step() {
    local label=$1 log rc=0
    shift
    need_log_dir
    log=$log_dir/$(printf '%s' "$label" | tr -c 'A-Za-z0-9\n' '-').log
    start_ticker "$label"
    "$@" >"$log" 2>&1 </dev/null || rc=$?
    stop_ticker
    if [ "$rc" -ne 0 ]; then
        say "$program: $label failed ($rc); the end of $log:"
        tail -n 30 "$log" | sed 's/^/    /' >&2
    fi
    return "$rc"
}

# as_root COMMAND...: directly, or by sudo.
as_root() {
    if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

# build PRESET [TARGET...]: configure and build.
build() {
    local preset=$1
    shift
    cd "$root"
    step "configure $preset" cmake --preset "$preset" ||
        die "the build could not be configured: read the message above; scripts/setup installs what the build needs"
    step "build $preset" cmake --build "build/$preset" ${1:+--target "$@"} ||
        die "the build failed: read the message above; if build/$preset is from an older checkout, remove it"
}
