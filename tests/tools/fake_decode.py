#!/usr/bin/env python3
"""A decode service without a model, for tests of its clients.

    fake_decode.py STUBS PORT_FILE CANCELLED_FILE

STUBS is the folder where protoc --python_out has put baton/v1.  The prompt says what happens:
    request     the request comes back as JSON, in one delta
    words       started, three deltas, finished with every number different
    short       one token, with the numbers of a prompt that was hardly worth a call
    lacking     UNIMPLEMENTED
    broken      a delta, then RESOURCE_EXHAUSTED
    unfinished  a delta, then the end
    flood       deltas without end; CANCELLED_FILE is written when the call is cancelled

Of snapshots, the session says it:
    big         progress to a half, and done, with 8 GiB written in 4 seconds
    endless     progress without end; CANCELLED_FILE as above
    other       DATA_LOSS
It lists 1,001 of them, in two replies; two begin with abcd1.
"""
import os
import sys
import time
from concurrent import futures

sys.path.insert(0, sys.argv[1])
import grpc
from google.protobuf import json_format
from baton.v1 import common_pb2, decode_pb2 as pb, operator_pb2, snapshot_pb2


def delta(text, ids=(), **rest):
    return pb.GenerateReply(delta=pb.Delta(text=text, ids=ids, **rest))


def prompt_of(request):
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return request.text
    if kind == "chat":
        return request.chat.messages[-1].content
    return "request"


def finished():
    usage = common_pb2.Usage(prompt_tokens=41, reused_tokens=10, prefill_reused_tokens=4, received_tokens=31,
                             local_tokens=2, generated_tokens=5, dropped_bytes=3, frames=6, bytes=7_000_000_001)
    timings = common_pb2.Timings(queue_ns=1_000_000, prefill_queue_ns=2_000_000, prefill_ns=27_000_000,
                                 local_prefill_ns=0, exposed_transfer_ns=1_350_000, first_token_ns=40_000_000,
                                 decode_ns=100_000_000)
    return pb.GenerateReply(finished=pb.Finished(reason=pb.FINISH_STOP, usage=usage, timings=timings, stopped_by="###",
                                                 fallback="a reason"))


def finished_short():
    usage = common_pb2.Usage(prompt_tokens=41, reused_tokens=10, received_tokens=30, local_tokens=1,
                             generated_tokens=1, frames=1, bytes=700)
    return pb.GenerateReply(finished=pb.Finished(
        reason=pb.FINISH_LENGTH, usage=usage, timings=common_pb2.Timings(prefill_ns=27_000_000),
        fallback="a rest of 1 positions is under --remote-min 2"))


def close_session(request, context):
    if request.name != "mine":
        context.abort(grpc.StatusCode.NOT_FOUND, request.name)
    return pb.CloseSessionReply()


def audit(request, context):
    pages = common_pb2.Pages(total=9, free=4, live=5, reserved=2, evictable=3)
    return operator_pb2.AuditReply(fault="page 7 \x1b[1m has 2 references; counted 1", pages=pages, contexts=6, entries=8,
                                   nodes=10, bookkeeping_bytes=1234567890123, took_ns=1500000)


def note_cancelled():
    with open(sys.argv[3], "w") as f:
        f.write("cancelled\n")


def generate(request, context):
    prompt = prompt_of(request)
    yield pb.GenerateReply(started=pb.Started(prompt_tokens=41, reused_tokens=10, dropped_bytes=3,
                                              prefill="10.0.0.1:7101"))
    if prompt == "request":
        yield delta(json_format.MessageToJson(request))
    elif prompt == "words":
        yield delta("One ", [11, 12], logprobs=[-0.5, -0.25], logits_digests=[1, 2**64 - 1])
        yield delta("", [13])
        yield delta("zwei \u2603", [14, 15])
    elif prompt == "short":
        yield delta("One", [11])
        yield finished_short()
        return
    elif prompt == "lacking":
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "unknown method")
    elif prompt == "broken":
        yield delta("half", [1])
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no KV pages: 3 of 9 free\x1b[2J")
    elif prompt == "unfinished":
        yield delta("half", [1])
        return
    elif prompt == "flood":
        context.add_callback(note_cancelled)  # called when the call has ended
        while context.is_active():
            yield delta("more\n", [1])
            time.sleep(0.01)
        return
    yield finished()


def save(request, context):
    if request.session == "endless":
        context.add_callback(note_cancelled)
        while context.is_active():
            yield snapshot_pb2.SnapshotReply(progress=snapshot_pb2.SnapshotProgress(done=1, total=10))
            time.sleep(0.01)
        return
    if request.session != "big":
        context.abort(grpc.StatusCode.DATA_LOSS, "frame 3: its CRC does not hold\x1b[2J")
    for done in (0, 2**32):
        yield snapshot_pb2.SnapshotReply(progress=snapshot_pb2.SnapshotProgress(done=done, total=2**33))
    snapshot = snapshot_pb2.Snapshot(id=bytes(range(16)), session="big", positions=9000, base_position=1000, depth=3)
    yield snapshot_pb2.SnapshotReply(done=snapshot_pb2.SnapshotDone(snapshot=snapshot, bytes=2**33, ns=4 * 10**9))


def list_snapshots(request, context):
    ids = [bytes([0, 0, i >> 8, i & 255]) + bytes(12) for i in range(999)]
    ids += [bytes.fromhex("abcd1000") + bytes(12), bytes.fromhex("abcd1100") + bytes(12)]
    ids = [i for i in ids if i > request.after]
    return snapshot_pb2.ListSnapshotsReply(
        snapshots=[snapshot_pb2.Snapshot(id=i, positions=5, file_bytes=3 * 2**20, depth=1) for i in ids[:1000]],
        more=len(ids) > 1000)


def delete(request, context):
    if request.id[:4] != bytes.fromhex("abcd1100"):
        context.abort(grpc.StatusCode.NOT_FOUND, request.id.hex())
    return snapshot_pb2.DeleteSnapshotReply()


def main():
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("baton.v1.Decode", {
        "Generate": grpc.unary_stream_rpc_method_handler(
            generate, request_deserializer=pb.GenerateRequest.FromString,
            response_serializer=pb.GenerateReply.SerializeToString),
        "CloseSession": grpc.unary_unary_rpc_method_handler(
            close_session, request_deserializer=pb.CloseSessionRequest.FromString,
            response_serializer=pb.CloseSessionReply.SerializeToString)}),))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("baton.v1.Operator", {
        "Audit": grpc.unary_unary_rpc_method_handler(
            audit, operator_pb2.AuditRequest.FromString, operator_pb2.AuditReply.SerializeToString),
    }),))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("baton.v1.Snapshots", {
        "Save": grpc.unary_stream_rpc_method_handler(
            save, snapshot_pb2.SaveRequest.FromString, snapshot_pb2.SnapshotReply.SerializeToString),
        "List": grpc.unary_unary_rpc_method_handler(
            list_snapshots, snapshot_pb2.ListSnapshotsRequest.FromString,
            snapshot_pb2.ListSnapshotsReply.SerializeToString),
        "Delete": grpc.unary_unary_rpc_method_handler(
            delete, snapshot_pb2.DeleteSnapshotRequest.FromString,
            snapshot_pb2.DeleteSnapshotReply.SerializeToString),
    }),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with open(sys.argv[2] + ".new", "w") as f:
        f.write(f"{port}\n")
    os.rename(sys.argv[2] + ".new", sys.argv[2])
    server.wait_for_termination()


main()
