#!/usr/bin/env bash
# `baton snapshot`: command lines, against a node and files of its own, and against a service that follows a script.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

wide=$BUILD/tests/tiny/tiny-wide.gguf
ids=$(seq -s, 1 300)

every_command_has_help() {
    for command in save restore list rm verify compact inspect widen; do
        expect_exit 0 "$baton" snapshot "$command" --help
        expect out "^usage: baton snapshot $command "
        expect out '^ *-h, --help '
        expect_exit 0 "$baton" snapshot --help
        expect out "^  $command "
    done
}

# expect_usage PATTERN ARGUMENT...
expect_usage() {
    local pattern=$1
    shift
    expect_exit 2 "$baton" snapshot "$@"
    [ ! -s "$work/out" ] || fail "$* printed to stdout"
    [ "$(wc -l <"$work/err")" -eq 1 ] || fail "$* said more than a line"
    expect err "^baton: $pattern"
}

a_wrong_command_line_is_named_in_one_line_and_exits_2() {
    expect_usage 'snapshot: which command'
    expect_usage 'snapshot: frobnicate: no such command' frobnicate
    for command in save restore list rm verify compact; do
        expect_usage "snapshot $command: --to HOST:PORT is needed" "$command"
    done
    expect_usage 'snapshot save: which session' save --to h:1
    expect_usage 'snapshot save: 1 argument too many' save --to h:1 a b
    expect_usage 'snapshot restore: which session, or which --id' restore --to h:1
    expect_usage 'snapshot restore: 1 argument too many' restore --to h:1 --id abcd x
    expect_usage 'snapshot rm: which ID' rm --to h:1
    expect_usage 'snapshot inspect: which file' inspect
    expect_usage 'snapshot widen: FILE and OUT are needed' widen a
    expect_usage 'snapshot: "abc" is no id: 4 to 32 digits of 0-9a-f' rm --to 127.0.0.1:1 abc
    expect_usage 'snapshot: "xyzxyz" is no id' verify --to 127.0.0.1:1 xyzxyz
}

a_node_that_is_not_there_exits_3() {
    expect_exit 3 "$baton" snapshot save --to 127.0.0.1:1 s
    expect err '^baton: UNAVAILABLE: '
    expect_exit 3 "$baton" snapshot list --to 127.0.0.1:1
}

# start_store NAME OPTION...
start_store() {
    local name=$1
    shift
    start_node "$name" "$BUILD/decode/baton-decode" --model "$wide" --threads 1 --kv-bytes 48M "$@"
}

a_session_is_saved_listed_verified_and_taken_up_again() {
    trap stop_nodes EXIT
    local id
    start_store one --snapshots "$work/store" --page 64
    expect one.log ' store directory=.* durability=durable snapshots=0 sessions=0 '
    expect_exit 0 "$baton" generate --to "$address" --session s --ids "$ids" --max-tokens 8
    expect_exit 0 "$baton" snapshot save --to "$address" s
    expect out '^saved [0-9a-f]{32} "s": 307 positions, 2\.[0-9] MiB written in [0-9.]+ m?s, [0-9.]+ [KMG]iB/s$'
    [ ! -s "$work/err" ] || fail "said $(cat "$work/err")"
    expect_exit 0 "$baton" snapshot save --to "$address" s
    expect out '^saved already [0-9a-f]{32} "s": 307 positions$'
    expect_exit 0 "$baton" generate --to "$address" --session s --ids 1,2,3 --max-tokens 4
    expect_exit 0 "$baton" snapshot save --leave --to "$address" s
    expect out '"s": 314 positions, 307 of them in 1 file below, '
    expect_exit 0 "$baton" snapshot list --to "$address"
    expect out '^[0-9a-f]{32} +314 +307 +2 +0 f16 .* ago  "s"$'
    id=$(awk 'NR == 2 {print substr($1, 1, 8)}' "$work/out")
    expect_exit 0 "$baton" status --to "$address"
    expect out '^on disk +1 snapshots, 1 sessions that are not in memory, 2\.[0-9] MiB, 1 deleted that others stand on$'
    expect out '^durability +"durable", ".+"$'
    expect out '^sessions +0$'
    expect_exit 0 "$baton" snapshot verify --to "$address" "$id"
    expect out '^whole [0-9a-f]{32}: 314 positions'
    expect_exit 0 "$baton" snapshot verify --all --to "$address"
    [ "$(wc -l <"$work/out")" -eq 1 ] || fail "verified: $(cat "$work/out")"
    expect_exit 0 "$baton" snapshot compact --to "$address" "$id"
    expect out '^compacted [0-9a-f]{32}: 314 positions, '
    expect_exit 0 "$baton" snapshot compact --to "$address" "$id"
    expect out '^stands alone already '
    expect_exit 0 "$baton" snapshot restore --to "$address" --id "$id" --as twin
    expect out "^restored ${id}[0-9a-f]* \"twin\": 314 positions, "
    expect_exit 1 "$baton" snapshot restore --to "$address" --id "$id" --as twin
    expect err '^baton: ALREADY_EXISTS: session: twin is in memory already$'
    expect_exit 1 "$baton" snapshot rm --to "$address" ffffffff
    expect err '^baton: snapshot: no id of the node begins so$'
    stop_nodes
    start_store two --snapshots "$work/store" --page 16
    expect two.log ' store directory=.* snapshots=1 sessions=1 '
    expect_exit 0 "$baton" generate --to "$address" --session s --ids 4,5 --max-tokens 4 --json
    expect out '"reused_tokens":314,.*"local_tokens":3,'
    expect_exit 0 "$baton" close --to "$address" --keep-snapshot s
    expect_exit 0 "$baton" snapshot restore --to "$address" s
    expect_exit 0 "$baton" close --to "$address" s
    expect_exit 0 "$baton" snapshot list --to "$address"
    [ ! -s "$work/out" ] || fail "left: $(cat "$work/out")"
}

# save_file: a snapshot file of a session without a node, its path in $file.
save_file() {
    rm -rf "$work/files"
    start_store save --snapshots "$work/files" --save-on-exit
    expect_exit 0 "$baton" generate --to "$address" --session s --ids "$ids" --max-tokens 8
    kill "$node_pid"
    wait "$node_pid" || fail "exit code of the node"
    node_pids=()
    file=$(echo "$work"/files/*.kv)
    [ -f "$file" ] || fail "no snapshot was saved at exit: $(cat "$work/save.log")"
    expect save.log ' store saved=1 not_saved=0 '
}

a_file_is_inspected_without_a_node() {
    trap stop_nodes EXIT
    save_file
    expect_exit 0 "$baton" snapshot inspect "$file"
    expect out "^$file: snapshot file, 2\.[0-9] MiB \([0-9]+ bytes\)$"
    expect out "^id +$(basename "$file" .kv)$"
    expect out '^kv +2 layers, 8 heads of 128, f16: 8\.0 KiB a position$'
    expect out '^positions +307$'
    expect out '^frames +3 of up to 128 positions$'
    expect out '^section +session, [0-9]+ bytes at [0-9]+$'
    expect out '^root +[0-9a-f]{64}$'
    expect out '^session +"s" of tenant "default": 308 ids, 1 of them without KV$'
    expect_not out verified
    (cd "$work/files" && expect_exit 0 "$baton" snapshot inspect --frames --verify "$(basename "$file")") || exit 1
    expect out '^ +2 +256 +51 '
    expect out '^verified +every byte holds'
    # While a node has the directory, too.
    start_store has --snapshots "$work/files"
    expect_exit 0 "$baton" snapshot inspect --verify "$file"
    expect_exit 0 "$baton" snapshot list --to "$address"
    expect out '"s"$'
}

a_damaged_file_is_named_with_its_part() {
    trap stop_nodes EXIT
    save_file
    cp "$file" "$work/bad.kv"
    printf '\xff\x00\xff' | dd of="$work/bad.kv" bs=1 seek=1300000 conv=notrunc status=none
    expect_exit 0 "$baton" snapshot inspect "$work/bad.kv"
    expect_exit 1 "$baton" snapshot inspect --verify "$work/bad.kv"
    expect err '^baton: .*/bad\.kv: .*frame 1\b'
    truncate -s 100000 "$work/bad.kv"
    mkdir "$work/damaged"
    cp "$work/bad.kv" "$work/damaged/$(basename "$file")"
    start_store damaged --snapshots "$work/damaged"
    expect damaged.log " store left_alone=\"$(basename "$file")\" why=\".+\"\$"
    expect damaged.log ' store directory=.* snapshots=0 sessions=0 retired=0 unreadable=1 '
    expect_exit 0 "$baton" status --to "$address"
    expect out '^on disk .*, 1 unreadable files$'
    expect_exit 1 "$baton" snapshot inspect "$work/bad.kv"
    expect err '^baton: .*/bad\.kv: '
    expect_exit 1 "$baton" snapshot inspect "$work/none.kv"
    expect err '^baton: .*/none\.kv: .*No such file'
    [ ! -e "$work/none.kv" ] || fail "it was made"
    expect_exit 1 "$baton" snapshot inspect "$work/nowhere/none.kv"
    [ ! -e "$work/nowhere" ] || fail "the directory was made"
}

a_widened_file_is_taken_up_at_f32() {
    trap stop_nodes EXIT
    local id
    save_file
    mkdir "$work/wide"
    expect_exit 0 "$baton" snapshot widen "$file" "$work/wide/new"
    expect out "^$work/wide/new: [0-9a-f]{32}, 307 positions, [45]\.[0-9] MiB$"
    id=$(grep -oE '[0-9a-f]{32}' "$work/out")
    expect_exit 1 "$baton" snapshot widen "$file" "$work/wide/new"
    expect err 'new is there already$'
    expect_exit 1 "$baton" snapshot widen --salt 00ff "$file" "$work/wide/other"
    expect err 'namespace: not that of tenant "default" and a salt of 2 bytes'
    expect_exit 1 "$baton" snapshot widen "$work/wide/new" "$work/wide/other"
    expect err 'precision: it is f32 already$'
    [ ! -e "$work/wide/other" ] || fail "a file is left"
    mv "$work/wide/new" "$work/wide/$id.kv"
    start_store wide --snapshots "$work/wide" --kv-precision f32
    expect_exit 0 "$baton" generate --to "$address" --session s --ids 4,5 --max-tokens 4 --json
    expect out '"reused_tokens":307,.*"local_tokens":3,'
}

start_fake() {
    rm -f "$work/port"
    python_stubs "$work/stubs"
    /usr/bin/python3 "$SOURCE/tests/tools/fake_decode.py" "$work/stubs" "$work/port" "$work/cancelled" >"$work/fake.log" 2>&1 &
    node_pids+=($!)
    for ((i = 0; i < 200; i++)); do
        [ ! -s "$work/port" ] || break
        sleep 0.1
    done
    [ -s "$work/port" ] || fail "the fake service did not start: $(cat "$work/fake.log")"
    to=127.0.0.1:$(cat "$work/port")
}

a_bar_moves_on_a_terminal_and_nowhere_else() {
    trap stop_nodes EXIT
    start_fake
    expect_exit 0 "$baton" snapshot save --to "$to" big
    [ ! -s "$work/err" ] || fail "said $(cat "$work/err")"
    expect out '^saved 000102030405060708090a0b0c0d0e0f "big": 9000 positions, 1000 of them in 2 files below, 8\.0 GiB written in 4\.0 s, 2\.0 GiB/s$'
    timeout 60 script -qec "'$baton' snapshot save --to $to big" /dev/null >"$work/out" </dev/null || fail "exit $?"
    expect out 'saving \[############\.\.\.\.\.\.\.\.\.\.\.\.\]  50 %, 4\.0 GiB of 8\.0 GiB, '
    expect out 'saved 000102030405060708090a0b0c0d0e0f'
}

an_error_is_said_and_nothing_that_a_terminal_obeys() {
    trap stop_nodes EXIT
    start_fake
    expect_exit 1 "$baton" snapshot save --to "$to" other
    [ "$(cat "$work/err")" = 'baton: DATA_LOSS: frame 3: its CRC does not hold\x1b[2J' ] || fail "said $(cat -v "$work/err")"
}

ctrl_c_cancels_the_work() {
    trap stop_nodes EXIT
    local pid got=0
    start_fake
    rm -f "$work/cancelled"
    "$baton" snapshot save --to "$to" endless >"$work/out" 2>"$work/err" &
    pid=$!
    sleep 1
    kill -INT "$pid"
    wait "$pid" || got=$?
    [ "$got" -eq 130 ] || fail "exit $got"
    for ((i = 0; i < 50; i++)); do
        [ ! -e "$work/cancelled" ] || return 0
        sleep 0.1
    done
    fail "the service never saw the cancellation"
}

an_id_is_found_by_its_first_digits() {
    trap stop_nodes EXIT
    start_fake
    expect_exit 1 "$baton" snapshot rm --to "$to" abcd1
    expect err '^baton: snapshot: several ids of the node begin so$'
    expect_exit 0 "$baton" snapshot rm --to "$to" abcd11
    expect_exit 0 "$baton" snapshot list --to "$to"
    [ "$(wc -l <"$work/out")" -eq 1002 ] || fail "$(wc -l <"$work/out") lines"
}

tests=(every_command_has_help
    a_wrong_command_line_is_named_in_one_line_and_exits_2
    a_node_that_is_not_there_exits_3
    a_session_is_saved_listed_verified_and_taken_up_again
    a_file_is_inspected_without_a_node
    a_damaged_file_is_named_with_its_part
    a_widened_file_is_taken_up_at_f32)
if /usr/bin/python3 -c 'import grpc, google.protobuf' 2>/dev/null && command -v protoc >/dev/null; then
    tests+=(a_bar_moves_on_a_terminal_and_nowhere_else
        an_error_is_said_and_nothing_that_a_terminal_obeys
        ctrl_c_cancels_the_work
        an_id_is_found_by_its_first_digits)
else
    echo "SKIP snapshot replies that follow a script: needs protoc, python3-grpcio and python3-protobuf"
fi
run_tests "${tests[@]}"
