#!/usr/bin/env bash
# `baton generate` against a decode service that follows a script: what it sends, prints and does when things end early.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

need_python_grpc generate
python_stubs "$work/stubs"
/usr/bin/python3 "$SOURCE/tests/tools/fake_decode.py" "$work/stubs" "$work/port" "$work/cancelled" >"$work/fake.log" 2>&1 &
node_pids+=($!)
for ((i = 0; i < 200; i++)); do
    [ ! -s "$work/port" ] || break
    sleep 0.1
done
[ -s "$work/port" ] || fail "the fake service did not start: $(cat "$work/fake.log")"
to=127.0.0.1:$(cat "$work/port")

the_answer_goes_to_stdout_and_nothing_else() {
    expect_exit 0 "$baton" generate --to "$to" words
    [ "$(cat "$work/out")" = "One zwei ☃" ] || fail "printed: $(cat "$work/out")"
    [ ! -s "$work/err" ] || fail "said: $(cat "$work/err")"
}

the_prompt_may_come_from_stdin() {
    printf words | "$baton" generate --to "$to" - >"$work/out" || fail "exit $?"
    expect out '^One zwei'
}

every_option_reaches_the_request() {
    expect_exit 0 "$baton" generate --to "$to" --chat --system 'Be brief.' --session s-1 --max-tokens 7 \
        --temperature 0.5 --top-k 40 --top-p 0.75 --min-p 0.25 --seed 18446744073709551615 --stop a --stop b \
        --route prefill --special --ignore-end --json --logits-digest request
    /usr/bin/python3 - "$work/out" <<'PY' || fail "see above"
import json, sys
events = [json.loads(line) for line in open(sys.argv[1])]
got = json.loads(events[1]["text"])
want = {"session": "s-1", "chat": {"messages": [{"role": "system", "content": "Be brief."},
        {"role": "user", "content": "request"}]}, "parseSpecial": True, "sampling": {"temperature": 0.5, "topK": 40,
        "topP": 0.75, "minP": 0.25, "seed": "18446744073709551615"}, "maxTokens": 7, "stop": ["a", "b"],
        "ignoreEnd": True, "logitsDigest": True, "route": "ROUTE_PREFILL"}
assert got == want, got
PY
    expect_exit 0 "$baton" generate --to "$to" --ids '0, 17,49151'
    tr -d ' \n' <"$work/out" >"$work/flat"
    expect flat '"tokens":\{"ids":\[0,17,49151\]\}'
    expect_exit 0 "$baton" generate --to "$to" request
    tr -d ' \n' <"$work/out" >"$work/flat"
    expect flat '^\{"text":"request","sampling":\{"topP":1\.0\}\}$'
}

json_is_one_object_a_line_with_every_number() {
    expect_exit 0 "$baton" generate --to "$to" --json words
    /usr/bin/python3 - "$work/out" <<'PY' || fail "see above"
import json, sys
e = [json.loads(line) for line in open(sys.argv[1])]
assert [x["event"] for x in e] == ["started", "delta", "delta", "delta", "finished"], e
assert e[0] == {"event": "started", "prompt_tokens": 41, "reused_tokens": 10, "dropped_bytes": 3,
                "prefill": "10.0.0.1:7101"}, e[0]
assert e[1] == {"event": "delta", "text": "One ", "ids": [11, 12], "logprobs": [-0.5, -0.25],
                "logits_digests": ["0000000000000001", "ffffffffffffffff"]}, e[1]
assert e[3]["text"] == "zwei \u2603" and e[3]["ids"] == [14, 15], e[3]
assert e[4] == {"event": "finished", "reason": "stop", "stopped_by": "###", "fallback": "a reason",
                "usage": {"prompt_tokens": 41, "reused_tokens": 10, "prefill_reused_tokens": 4, "received_tokens": 31,
                          "local_tokens": 2, "generated_tokens": 5, "dropped_bytes": 3, "frames": 6,
                          "bytes": 7000000001},
                "timings": {"queue_ns": 1000000, "prefill_queue_ns": 2000000, "prefill_ns": 27000000,
                            "local_prefill_ns": 0, "exposed_transfer_ns": 1350000, "first_token_ns": 40000000,
                            "decode_ns": 100000000}}, e[4]
PY
}

stats_are_a_table_on_stderr() {
    expect_exit 0 "$baton" generate --to "$to" --stats words
    expect out '^One zwei'
    expect err '^  prompt tokens +41$'
    expect err '^  prefill by +10\.0\.0\.1:7101$'
    expect err '^  reused +10 .* 4 more'
    expect err '^  received +31 '
    expect err '^  computed here +2 '
    expect err '^  left out +3 '
    expect err '^  bytes moved +7000000001 in 6 frames$'
    expect err '^  prefill +27\.0 ms, 1000 tokens/s$'
    expect err '^  exposed transfer +1\.4 ms, 5\.0 % of prefill$'
    expect err '^  first token +40\.0 ms'
    expect err '^  generated +5 tokens, 40\.0 tokens/s$'
    expect err '^  ended by +stop "###"$'
    expect err '^  fallback +"a reason"$'
    # Ordinary policy is no failure; one is not many; what is not known is not said.
    expect_exit 0 "$baton" generate --to "$to" --stats short
    expect err '^  reused +10 '
    expect err '^  computed here +1 because a rest of 1 positions is under --remote-min 2$'
    expect err '^  bytes moved +700 in 1 frame$'
    expect err '^  prefill +27\.0 ms$'
    expect err '^  generated +1 token$'
    expect err '^  ended by +length$'
    expect_not err fallback
}

a_session_can_be_closed() {
    expect_exit 0 "$baton" close --to "$to" mine
    [[ ! -s $work/out && ! -s $work/err ]] || fail "it said something"
    expect_exit 1 "$baton" close --to "$to" other
    expect err '^baton: NOT_FOUND: other$'
}

a_fault_that_an_audit_finds_is_said_and_exits_1() {
    expect_exit 1 "$baton" audit --to "$to"
    expect out '^audit +FAULT$'
    expect out '^pages +9: 4 free, 5 live \(3 evictable\), 2 reserved$'
    expect out '^contexts +6 in use, 8 kept for reuse$'
    expect out '^prefix tree +10 nodes, 1234567890123 bytes$'
    expect out '^took +1\.500 ms$'
    expect err '^baton: audit: page 7 \\x1b\[1m has 2 references; counted 1$'
}

a_service_that_the_node_lacks_is_explained() {
    expect_exit 1 "$baton" generate --to "$to" lacking
    expect err '^baton: UNIMPLEMENTED: .*\(is that a prefill node\? --to wants a decode node\)$'
}

a_status_in_the_middle_is_said_and_what_came_before_stands() {
    expect_exit 1 "$baton" generate --to "$to" broken
    [ "$(cat "$work/out")" = half ] || fail "printed: $(cat "$work/out")"
    # Nothing that a terminal would obey.
    [ "$(cat "$work/err")" = 'baton: RESOURCE_EXHAUSTED: no KV pages: 3 of 9 free\x1b[2J' ] ||
        fail "said: $(cat -v "$work/err")"
}

a_stream_that_just_ends_is_no_success() {
    expect_exit 1 "$baton" generate --to "$to" unfinished
    expect err '^baton: INTERNAL: the stream ended without'
}

a_deadline_ends_the_call() {
    expect_exit 1 "$baton" generate --to "$to" --timeout 0.5 flood
    expect err '^baton: DEADLINE_EXCEEDED: .*--timeout'
}

# wait_cancelled: the service noticed.
wait_cancelled() {
    for ((i = 0; i < 50; i++)); do
        [ ! -e "$work/cancelled" ] || return 0
        sleep 0.1
    done
    fail "the service never saw the cancellation"
}

ctrl_c_cancels_the_call() {
    local pid got=0
    rm -f "$work/cancelled" "$work/out"
    "$baton" generate --to "$to" flood >"$work/out" 2>"$work/err" &
    pid=$!
    for ((i = 0; i < 100; i++)); do
        [ ! -s "$work/out" ] || break
        sleep 0.1
    done
    [ -s "$work/out" ] || fail "nothing was streamed"
    kill -INT "$pid"
    wait "$pid" || got=$?
    [ "$got" -eq 130 ] || fail "exit $got"
    wait_cancelled
}

a_reader_that_is_gone_ends_the_call() {
    local got
    rm -f "$work/cancelled"
    "$baton" generate --to "$to" flood 2>"$work/err" | head -n 3 >"$work/out"
    got=${PIPESTATUS[0]}
    [ "$got" -eq 141 ] || fail "exit $got"
    [ ! -s "$work/err" ] || fail "said: $(cat "$work/err")"
    wait_cancelled
}

text_with_a_nul_is_refused_by_name() {
    printf 'a\0b' | "$baton" generate --to "$to" - 2>"$work/err"
    [ $? -eq 1 ] || fail "exit code"
    expect err 'NUL byte at offset 1'
}

run_tests the_answer_goes_to_stdout_and_nothing_else \
    the_prompt_may_come_from_stdin \
    every_option_reaches_the_request \
    json_is_one_object_a_line_with_every_number \
    stats_are_a_table_on_stderr \
    a_session_can_be_closed \
    a_fault_that_an_audit_finds_is_said_and_exits_1 \
    a_service_that_the_node_lacks_is_explained \
    a_status_in_the_middle_is_said_and_what_came_before_stands \
    a_stream_that_just_ends_is_no_success \
    a_deadline_ends_the_call \
    ctrl_c_cancels_the_call \
    a_reader_that_is_gone_ends_the_call \
    text_with_a_nul_is_refused_by_name
