#!/usr/bin/env bash
# --kv-precision of both nodes: what a node serves is said, what it cannot is refused by name.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

tiny=$BUILD/tests/tiny

status_names_the_precision_that_is_served() {
    trap stop_nodes EXIT
    for precision in f16 f32 q8; do
        for node in prefill decode; do
            start_node "$node" "$BUILD/$node/baton-$node" --model "$tiny/tiny-d64-q4_1.gguf" --kv-bytes 16M \
                --kv-precision "$precision"
            expect "$node.log" " kv_precision=$precision "
        done
        expect_exit 0 "$baton" status --to "$address"
        expect out "^kv .* heads of 64, $precision$"
    done
}

heads_that_are_not_whole_32s_refuse_q8_by_name() {
    for node in prefill decode; do
        expect_exit 2 "$BUILD/$node/baton-$node" --model "$tiny/tiny-q4_1.gguf" --kv-precision q8
        expect err '--kv-precision q8: head_dim is 16: precision q8 needs a multiple of 32$'
    done
}

a_precision_that_is_not_there_is_a_wrong_command_line() {
    for node in prefill decode; do
        expect_exit 2 "$BUILD/$node/baton-$node" --model "$tiny/tiny-q4_1.gguf" --kv-precision q4
        expect err '--kv-precision "q4": must be one of f16, f32, q8$'
    done
}

run_tests status_names_the_precision_that_is_served \
    heads_that_are_not_whole_32s_refuse_q8_by_name \
    a_precision_that_is_not_there_is_a_wrong_command_line
