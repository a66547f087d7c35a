# Shared by the test scripts beside it.  Bash.
# shellcheck shell=bash
#
# A test is a function whose name is a sentence; run_tests runs each in a subshell, which fail() leaves, and counts.
# BUILD and SOURCE are the build and the source folder, given by ctest as arguments.
set -uo pipefail

BUILD=$1
SOURCE=$2
baton=$BUILD/cli/baton
work=$(mktemp -d)
node_pids=()

stop_nodes() {
    [ ${#node_pids[@]} -gt 0 ] || return 0
    kill "${node_pids[@]}" 2>/dev/null
    for ((i = 0; i < 100; i++)); do
        kill -0 "${node_pids[@]}" 2>/dev/null || break
        sleep 0.1
    done
    kill -9 "${node_pids[@]}" 2>/dev/null
    wait "${node_pids[@]}" 2>/dev/null
    node_pids=()
}

clean_up() {
    stop_nodes
    rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 1' INT TERM

fail() {
    printf 'FAIL: %s\n' "$*" >&2
    exit 1
}

# expect_exit CODE COMMAND...: stdout and stderr go to $work/out and $work/err.
expect_exit() {
    local want=$1 got=0
    shift
    timeout 120 "$@" >"$work/out" 2>"$work/err" </dev/null || got=$?
    [ "$got" -eq "$want" ] || fail "$* exited with $got, not $want:
$(head -c 2000 "$work/out")
$(head -c 2000 "$work/err")"
}

# expect FILE PATTERN: a line of $work/FILE matches.
expect() {
    grep -qE -- "$2" "$work/$1" || fail "no line of $1 matches $2:
$(head -c 2000 "$work/$1")"
}

expect_not() {
    ! grep -qE -- "$2" "$work/$1" || fail "a line of $1 matches $2:
$(head -c 2000 "$work/$1")"
}

# start_node NAME PROGRAM OPTION...: sets $address and $node_pid.
start_node() {
    local name=$1
    shift
    rm -f "$work/$name.port"
    "$@" --listen 127.0.0.1:0 --port-file "$work/$name.port" --grace 1000 >"$work/$name.log" 2>&1 </dev/null &
    node_pid=$!
    node_pids+=("$node_pid")
    for ((i = 0; i < 600; i++)); do
        if [ -s "$work/$name.port" ]; then
            address=127.0.0.1:$(cat "$work/$name.port")
            return 0
        fi
        kill -0 "$node_pid" 2>/dev/null || break
        sleep 0.1
    done
    fail "$name did not start:
$(tail -n 20 "$work/$name.log")"
}

# The default model, or nothing.
default_model() {
    local m=${BATON_MODEL:-${XDG_CACHE_HOME:-${HOME:-}/.cache}/baton/SmolLM2-135M-Instruct.Q4_1.gguf}
    if [ -r "$m" ]; then printf '%s\n' "$m"; fi
}

# need_python_grpc NAME: the whole script is skipped where Debian's Python has no gRPC.
need_python_grpc() {
    command -v protoc >/dev/null && /usr/bin/python3 -c 'import grpc, google.protobuf' 2>/dev/null && return 0
    printf 'SKIP %s: needs protoc, python3-grpcio and python3-protobuf\n' "$1"
    exit 77
}

# python_stubs FOLDER: the messages as Python modules.
python_stubs() {
    mkdir -p "$1"
    (cd "$SOURCE" && protoc -I proto --python_out="$1" proto/baton/v1/*.proto) || fail "protoc"
}

# run_tests NAME...: all of them; exits 1 if any failed.
run_tests() {
    local failed=0 t
    for t in "$@"; do
        # Nodes belong to the script, not to a test, so that the subshell must not put them away.
        if (trap - EXIT; "$t"); then
            printf 'ok %s\n' "$t"
        else
            printf 'not ok %s\n' "$t"
            failed=$((failed + 1))
        fi
    done
    printf '%d tests, %d failed\n' $# "$failed"
    [ "$failed" -eq 0 ]
    exit
}
