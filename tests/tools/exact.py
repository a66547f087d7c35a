#!/usr/bin/env python3
"""The same prompt gives the same logits on every route, seen from outside.

Starts pairs of nodes, each end with settings of its own, and asks each pair the same prompts: computed by
the decode node alone, through the prefill node, again from the prefix trees, and all at once beside
others.  Every token id and every logits digest of every step must equal those of the first pair asked,
whose decode node does it alone.  Needs Debian's python3-grpcio and python3-protobuf.

    exact.py BUILD STUBS MODEL [--cover pairs|full] [--lengths N,N,...] [--kernels NAME,...]
             [--precisions NAME,...] [--tokens N]

`pairs` is a cover of every pair of settings; `full` every combination of chunk, page, threads, kernels and
precision at the prefill end, with another combination at the decode end each time.
"""

import argparse
import itertools
import os
import random
import subprocess
import sys
import tempfile
import time

FACTORS = {
    "chunk": [1, 7, 64, 512],
    "page": [16, 64, 256],
    "threads": [1, 2],
}
PRECISIONS = ["f16", "f32", "q8"]
# Borders of pages, chunks, frames and attention segments, one to either side, and the shortest.
LENGTHS = [1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513]


class Wrong(Exception):
    pass


class Node:
    def __init__(self, folder, program, args):
        self.log = open(os.path.join(folder, "node.log"), "a")
        port_file = os.path.join(folder, "port")
        if os.path.exists(port_file):
            os.unlink(port_file)
        self.process = subprocess.Popen(
            [program, "--listen", "127.0.0.1:0", "--port-file", port_file, "--grace", "500"] + args,
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        end = time.monotonic() + 60
        while not (os.path.exists(port_file) and os.path.getsize(port_file)):
            if self.process.poll() is not None or time.monotonic() > end:
                raise Wrong("%s did not start: %s" % (program, open(self.log.name).read()[-2000:]))
            time.sleep(0.01)
        self.address = "127.0.0.1:" + open(port_file).read().strip()

    def stop(self):
        self.process.terminate()
        try:
            rc = self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise Wrong("a node did not stop within 20 s of SIGTERM")
        self.log.close()
        if rc != 0:
            raise Wrong("a node exited with %d after SIGTERM" % rc)


def settings_text(s):
    return " ".join("%s=%s" % item for item in sorted(s.items()))


def arguments(s, model):
    return ["--model", model, "--chunk", str(s["chunk"]), "--page", str(s["page"]),
            "--threads", str(s["threads"]), "--kernels", s["kernels"], "--kv-precision", s["precision"],
            "--kv-bytes", "256M", "--log-level", "warn"]


def cover_pairs(factors, rng):
    """Rows that hold every pair of values of any two factors: greedy, a hundred tries a row."""
    names = list(factors)
    todo = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]}
    rows = []
    while todo:
        (a, x), (b, y) = min(todo, key=repr)
        best, gain = None, -1
        for _ in range(100):
            row = {n: rng.choice(factors[n]) for n in names}
            row[a], row[b] = x, y
            got = sum(1 for p in itertools.combinations([(n, row[n]) for n in names], 2) if p in todo)
            if got > gain:
                best, gain = row, got
        rows.append(best)
        todo -= set(itertools.combinations([(n, best[n]) for n in names], 2))
    return rows


def pairs_of_nodes(kernels, precisions, cover):
    """Settings of (prefill, decode), in the order they are tried."""
    rng = random.Random(7)
    end = dict(FACTORS, kernels=kernels)
    if cover == "full":
        cells = [dict(zip(end, values)) for values in itertools.product(*end.values())]
        others = cells[:]
        rng.shuffle(others)
        for precision in precisions:
            for p, d in zip(cells, others):
                yield dict(p, precision=precision), dict(d, precision=precision)
        return
    both = {"%s.%s" % (side, n): v for side in "pd" for n, v in end.items()}
    both["precision"] = precisions
    for row in cover_pairs(both, rng):
        yield tuple(dict({n: row[side + "." + n] for n in end}, precision=row["precision"]) for side in "pd")


class Prover:
    def __init__(self, options):
        self.options = options
        self.golden = {}
        self.requests = 0
        self.reused = 0
        self.received = 0
        rng = random.Random(1)
        self.ids = None
        self.rng = rng

    def start(self, stub, prompt, route, salt, tokens):
        return stub.Generate(decode_pb2.GenerateRequest(
            tokens=decode_pb2.TokenIds(ids=prompt), route=route, salt=salt, max_tokens=tokens,
            ignore_end=True, logits_digest=True), timeout=120)

    def finish(self, call):
        ids, digests, finished = [], [], None
        for reply in call:
            event = reply.WhichOneof("event")
            if event == "delta":
                ids += reply.delta.ids
                digests += reply.delta.logits_digests
            elif event == "finished":
                finished = reply.finished
        if finished is None:
            raise Wrong("the stream ended without `finished`")
        self.requests += 1
        self.reused += finished.usage.reused_tokens + finished.usage.prefill_reused_tokens
        self.received += finished.usage.received_tokens
        return list(zip(ids, digests)), finished

    def compare(self, what, precision, length, got):
        want = self.golden.setdefault((precision, length), got)
        if got != want:
            at = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), min(len(got), len(want)))
            raise Wrong("%s, %d tokens: step %d is %s, not %s" %
                        (what, length, at, got[at:at + 1], want[at:at + 1]))

    def check_one(self, stub, what, s, length, route, salt, hit):
        got, finished = self.finish(self.start(stub, self.ids[:length], route, salt, self.options.tokens))
        u = finished.usage
        what = "%s, route %s%s" % (what, decode_pb2.Route.Name(route), ", warm" if hit else "")
        self.compare(what, s["precision"], length, got)
        if finished.fallback:
            raise Wrong("%s, %d tokens: fell back: %s" % (what, length, finished.fallback))
        # A hit must be one, all of the prompt but for a token whose logits are not kept; and what was asked
        # of the prefill node must have come from it.
        if hit and u.reused_tokens < length - 1:
            raise Wrong("%s, %d tokens: %d reused" % (what, length, u.reused_tokens))
        if not hit and u.reused_tokens != 0:
            raise Wrong("%s, %d tokens: %d reused, in a namespace of its own" % (what, length, u.reused_tokens))
        if route == decode_pb2.ROUTE_PREFILL and u.received_tokens + u.reused_tokens != length:
            raise Wrong("%s, %d tokens: %d received, %d reused" % (what, length, u.received_tokens, u.reused_tokens))

    def check_pair(self, stub, p, d):
        what = "prefill %s; decode %s" % (settings_text(p), settings_text(d))
        local, remote = decode_pb2.ROUTE_LOCAL, decode_pb2.ROUTE_PREFILL
        for length in self.options.lengths:
            for route in (local, remote):
                salt = b"%d-%d" % (length, route)
                self.check_one(stub, what, d, length, route, salt, hit=False)
                self.check_one(stub, what, d, length, local, salt, hit=True)
        # One namespace for all lengths, shortest first and longest first: prefixes of every length are
        # found at either end.
        for order, name in ((self.options.lengths, b"up"), (self.options.lengths[::-1], b"down")):
            for i, length in enumerate(order):
                got, _ = self.finish(self.start(stub, self.ids[:length], remote if i % 2 else local, name,
                                                self.options.tokens))
                self.compare(what + ", shared prefixes", d["precision"], length, got)
        # All at once, each beside strangers and beside its own prefixes.
        calls = [(length, self.start(stub, self.ids[:length], route, salt, self.options.tokens))
                 for length in self.options.lengths for route, salt in ((local, b"x"), (remote, b"y"))]
        strangers = [self.start(stub, self.ids[i:i + 40], local, b"z", 12) for i in range(1, 4)]
        for length, call in calls:
            self.compare(what + ", beside others", d["precision"], length, self.finish(call)[0])
        for call in strangers:
            self.finish(call)

    def run(self):
        o = self.options
        kernels = o.kernels.split(",") if o.kernels else kernel_sets(o.build, o.model)
        precisions = o.precisions.split(",") if o.precisions else kv_precisions(o.build, o.model)
        pairs = list(pairs_of_nodes(kernels, precisions, o.cover))
        if o.every > 1:
            pairs = pairs[::o.every]
        with tempfile.TemporaryDirectory(prefix="baton-exact-") as folder:
            for n, (p, d) in enumerate(pairs):
                prefill = Node(folder, o.build + "/prefill/baton-prefill", arguments(p, o.model))
                decode = Node(folder, o.build + "/decode/baton-decode", arguments(d, o.model) +
                              ["--prefill", prefill.address, "--remote-min", "1", "--queue", "256"])
                try:
                    with grpc.insecure_channel(decode.address) as channel:
                        stub = Stub(channel)
                        self.choose_ids(stub)
                        self.check_pair(stub, p, d)
                finally:
                    decode.stop()
                    prefill.stop()
                if o.verbose:
                    print("%d/%d equal: prefill %s; decode %s" % (n + 1, len(pairs), settings_text(p), settings_text(d)),
                          flush=True)
        print("%d pairs of nodes, %d requests, %d lengths, kernels %s, KV in %s: all logits equal "
              "(%d positions came over the wire, %d were found in trees)" %
              (len(pairs), self.requests, len(o.lengths), ",".join(kernels), ",".join(precisions), self.received,
               self.reused))

    def choose_ids(self, stub):
        if self.ids is None:
            n_vocab = stub.Describe(decode_pb2.DescribeRequest()).n_vocab
            self.ids = [self.rng.randrange(n_vocab) for _ in range(max(self.options.lengths) + 64)]


class Stub:
    def __init__(self, channel):
        self.Generate = channel.unary_stream(
            "/baton.v1.Decode/Generate", request_serializer=decode_pb2.GenerateRequest.SerializeToString,
            response_deserializer=decode_pb2.GenerateReply.FromString)
        self.Describe = channel.unary_unary(
            "/baton.v1.Decode/Describe", request_serializer=decode_pb2.DescribeRequest.SerializeToString,
            response_deserializer=decode_pb2.DescribeReply.FromString)


def kernel_sets(build, model):
    """Those that this machine can run; the others are said by name."""
    can = []
    for name in ("plain", "avx2", "avx512"):
        with tempfile.TemporaryDirectory() as folder:
            try:
                Node(folder, build + "/prefill/baton-prefill", ["--model", model, "--kernels", name,
                                                               "--kv-bytes", "16M"]).stop()
                can.append(name)
            except Wrong as e:
                if "--kernels" not in str(e) and "kernel" not in str(e):
                    raise
                print("SKIP exact_%s: this machine cannot run the kernel set %s" % (name, name))
    return can


def kv_precisions(build, model):
    """Those that the model's heads allow."""
    can = []
    for name in PRECISIONS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                Node(folder, build + "/prefill/baton-prefill", ["--model", model, "--kv-precision", name,
                                                               "--kv-bytes", "16M"]).stop()
                can.append(name)
            except Wrong as e:
                if "head_dim" not in str(e):
                    raise
                print("SKIP exact_%s: the heads of this model are not whole 32s" % name)
    return can


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("build")
    p.add_argument("stubs")
    p.add_argument("model")
    p.add_argument("--cover", choices=("pairs", "full"), default="pairs")
    p.add_argument("--every", type=int, default=1, help="of the cover, take every N-th pair of nodes")
    p.add_argument("--lengths", type=lambda s: [int(n) for n in s.split(",")], default=LENGTHS)
    p.add_argument("--kernels", help="instead of all that this machine can run")
    p.add_argument("--precisions", help="instead of all that the model's heads allow")
    p.add_argument("--tokens", type=int, default=4, help="tokens generated for each prompt")
    p.add_argument("--verbose", action="store_true", help="a line for each pair of nodes")
    options = p.parse_args()
    global grpc, decode_pb2
    sys.path.insert(0, options.stubs)
    import grpc
    from baton.v1 import decode_pb2
    try:
        Prover(options).run()
    except Wrong as e:
        print("WRONG: %s" % e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
