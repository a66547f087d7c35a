#!/usr/bin/env bash
# A few pairs of nodes of tools/exact.py, so that what scripts/prove-exact runs in full stays in order.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

need_python_grpc exact
python_stubs "$work/stubs"

every_route_gives_the_same_bits() {
    expect_exit 0 /usr/bin/python3 "$SOURCE/tests/tools/exact.py" "$BUILD" "$work/stubs" \
        "$BUILD/tests/tiny/tiny-d64-q4_1.gguf" --every 7 --lengths 1,16,17,63,64,65,257
    cat "$work/out"
    expect out 'KV in f16,f32,q8: all logits equal'
}

run_tests every_route_gives_the_same_bits
