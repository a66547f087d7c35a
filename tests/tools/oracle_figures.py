#!/usr/bin/env python3
"""Write an oracle's logits in the form that test_engine reads.

    oracle_figures.py ORACLE.py MODEL.gguf IDS.txt > tests/stories260K.oracle.txt

ORACLE.py has Model(path).logits(ids) -> float64 [n, vocab].  Out come every logit of a few positions
("logits POSITION v..."), and of every position its logits summed with the signs of four Walsh
functions ("sums POSITION s s s s"): sign of logit i under mask m is -1 where i & m has odd parity.
"""
import importlib.util
import sys

POSITIONS = (0, 1, 2, 15, 16, 63, 100, 199)
MASKS = (0x000, 0x0F3, 0x155, 0x1B6)


def sign(i, mask):
    return -1.0 if bin(i & mask).count("1") % 2 else 1.0


def main():
    oracle, model, ids = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("oracle", oracle)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with open(ids, encoding="ascii") as f:
        logits = module.Model(model).logits([int(x) for x in f.read().split()])
    print("# Made by tests/tools/oracle_figures.py: float64 logits of stories260K-f32.gguf after each")
    print("# of the ids in stories260K.greedy200.ids.")
    for pos, row in enumerate(logits):
        sums = (sum(sign(i, m) * float(v) for i, v in enumerate(row)) for m in MASKS)
        print("sums", pos, *("%.5f" % s for s in sums))
        if pos in POSITIONS:
            print("logits", pos, *("%.6f" % v for v in row))


main()
