#!/usr/bin/env bash
# The documentation against the programs: every option and event is described, no other is, every example runs.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

tiny=$BUILD/tests/tiny/tiny-q4_1.gguf

options_of() {
    "$@" --help | grep -oE '^ +(-., )?--[a-z-]+' | grep -oE -- '--[a-z-]+' | grep -vE -- '^--(help|version)$' | sort
}

# section TITLE: the lines of operations.md under that heading.
section() {
    awk -v t="## $1" '/^## /{on = $0 == t} on' "$SOURCE/docs/operations.md"
}

documented_options() {
    section "$1" | grep -oE '^\| `--[a-z-]+' | grep -oE -- '--[a-z-]+' | sort
}

every_option_of_a_node_is_documented_and_no_other() {
    diff <(options_of "$BUILD/prefill/baton-prefill") <(documented_options 'Options of both nodes') >&2 ||
        fail "docs/operations.md and baton-prefill --help differ"
    diff <(options_of "$BUILD/decode/baton-decode") \
        <({ documented_options 'Options of both nodes'; documented_options 'Options of the decode node'; } | sort) >&2 ||
        fail "docs/operations.md and baton-decode --help differ"
}

every_event_in_the_sources_is_documented_and_no_other() {
    diff <(cat "$SOURCE"/{prefill,decode,node,model,transport}/*.c | tr -d '\n' |
        grep -oE 'node_log\([^"]*"[a-z_]+"' | grep -oE '[a-z_]+"$' | tr -d '"' | sort -u) \
        <(section Log | grep -E '^\| `' | cut -d'|' -f2 | grep -oE '[a-z_]+' | sort -u) >&2 ||
        fail "docs/operations.md and the events in the sources differ"
}

every_link_leads_somewhere() {
    local file target
    while IFS=: read -r file target; do
        target=${target#*(}
        target=${target%)}
        [ -e "$(dirname "$file")/$target" ] || fail "$file: $target does not exist"
    done < <(grep -oE '\]\([^)#:]+\)' "$SOURCE"/README.md "$SOURCE"/docs/*.md)
}

every_folder_of_the_map_exists() {
    local folder
    while read -r folder; do
        [ -d "$SOURCE/$folder" ] || fail "$folder of README's map does not exist"
    done < <(awk '/^## Map/{on = 1} on' "$SOURCE/README.md" | grep -oE '^\|[^|]+\|' | grep -oE '[a-z]+/')
}

every_script_says_how_it_is_used() {
    local script
    for script in "$SOURCE"/scripts/*; do
        [ "$script" != "$SOURCE/scripts/lib.sh" ] || continue
        expect_exit 0 "$script" --help
        expect out "^  scripts/$(basename "$script")( |\$)"
        [ ! -s "$work/err" ] || fail "$script --help said $(cat "$work/err")"
        expect_exit 2 "$script" --bogus
        expect err "^$(basename "$script"): --bogus: no such option\$"
        [ ! -s "$work/out" ] || fail "$script --bogus printed to stdout"
    done
    expect_exit 2 "$SOURCE/scripts/demo" one two
    expect err '^demo: two: one question only'
    expect_exit 2 "$SOURCE/scripts/demo" --model
    expect err '^demo: --model needs a FILE$'
    expect_exit 2 "$SOURCE/scripts/demo" ''
    expect err '^demo: the question is empty$'
}

# example NAME: the code block of README.md under that mark.
example() {
    awk -v m="<!-- example: $1 -->" '$0 == m {found = 1; next} found && /^```/ {if (on) exit; on = 1; next} on' \
        "$SOURCE/README.md"
}

# The model, with a template for chats where there is one.
start_nodes() {
    local model
    model=$(default_model)
    start_node prefill "$BUILD/prefill/baton-prefill" --model "${model:-$tiny}" --threads 1 --kv-bytes 128M
    start_node decode "$BUILD/decode/baton-decode" --model "${model:-$tiny}" --threads 1 --kv-bytes 128M --prefill "$address"
}

the_command_line_example_runs() {
    local code
    code=$(example cli)
    [ -n "$code" ] || fail "README.md has no such example"
    bin=$BUILD expect_exit 0 bash -c "${code//127.0.0.1:7102/$address}"
    [ -s "$work/out" ] || fail "no answer"
    expect err '^  prompt tokens +[1-9]'
    expect err '^  generated +[1-9]'
}

the_python_example_runs_and_says_the_same() {
    python_stubs "$work/stubs"
    example python >"$work/example.py"
    [ -s "$work/example.py" ] || fail "README.md has no such example"
    PATH=$(dirname "$baton"):$PATH expect_exit 0 "$baton" generate --to "$address" --chat --max-tokens 64 'Name three colours.'
    mv "$work/out" "$work/said"
    PYTHONPATH=$work/stubs expect_exit 0 /usr/bin/python3 "$work/example.py" "$address"
    expect out '^\[[1-9][0-9]* tokens\]$'
    # Greedy, so the same words by either client.
    diff <(grep -vE '^\[[0-9]+ tokens\]$' "$work/out") "$work/said" >&2 || fail "the two clients got different answers"
}

tests=(every_option_of_a_node_is_documented_and_no_other
    every_event_in_the_sources_is_documented_and_no_other
    every_link_leads_somewhere
    every_folder_of_the_map_exists
    every_script_says_how_it_is_used)
start_nodes
tests+=(the_command_line_example_runs)
if /usr/bin/python3 -c 'import grpc, google.protobuf' 2>/dev/null && command -v protoc >/dev/null; then
    tests+=(the_python_example_runs_and_says_the_same)
else
    echo "SKIP README's Python example: needs protoc, python3-grpcio and python3-protobuf"
fi
run_tests "${tests[@]}"
