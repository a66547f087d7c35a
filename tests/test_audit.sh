#!/usr/bin/env bash
# `baton audit` of both nodes, idle and while they work.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

tiny=$BUILD/tests/tiny/tiny-wide.gguf
start_node prefill "$BUILD/prefill/baton-prefill" --model "$tiny" --pages 100
prefill=$address
start_node decode "$BUILD/decode/baton-decode" --model "$tiny" --pages 127 --prefill "$prefill" --remote-min 16
decode=$address

an_idle_node_holds_nothing() {
    for node in "$prefill" "$decode"; do
        expect_exit 0 "$baton" audit --to "$node"
        expect out '^audit +all accounts hold$'
        expect out '^pages +([0-9]+): \1 free, 0 live \(0 evictable\), 0 reserved$'
        expect out '^contexts +0 in use, 0 kept for reuse$'
        expect out '^prefix tree +0 nodes, 0 bytes$'
        expect out '^took +[0-9.]+ ms$'
    done
}

what_a_request_left_is_counted_on_both() {
    expect_exit 0 "$baton" generate --to "$decode" --route prefill --max-tokens 40 --ignore-end \
        "$(printf 'word %.0s' {1..100})"
    expect_exit 0 "$baton" audit --to "$prefill"
    expect out '^contexts +0 in use, 1 kept for reuse$'
    expect_exit 0 "$baton" audit --to "$decode"
    expect out '^contexts +0 in use, 1 kept for reuse$'
    expect out '^pages +127: 120 free, 7 live \(7 evictable\), 0 reserved$'
}

audits_hold_while_the_nodes_work() {
    local pids=() i
    for ((i = 0; i < 6; i++)); do
        "$baton" generate --to "$decode" --max-tokens 200 --ignore-end --temperature 1 --seed "$i" \
            "$i $(printf 'word %.0s' {1..60})" >"$work/answer.$i" 2>&1 &
        pids+=("$!")
    done
    for ((i = 0; i < 10; i++)); do
        expect_exit 0 "$baton" audit --to "$decode"
        expect_exit 0 "$baton" audit --to "$prefill"
    done
    for i in "${!pids[@]}"; do
        wait "${pids[$i]}" || fail "request $i: $(cat "$work/answer.$i")"
    done
    expect decode.log ' audit fault="" took_us=[0-9]+$'
}

run_tests an_idle_node_holds_nothing \
    what_a_request_left_is_counted_on_both \
    audits_hold_while_the_nodes_work
