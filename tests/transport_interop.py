"""Goal: clients that are not ours are served.  Debian's grpcio, without generated code: raw bytes.

Usage: transport_interop.py PORT.  Prints a line for each check; 0: all held, 77: no grpcio."""
import sys

try:
    import grpc
except ImportError:
    print("SKIP interop: python3-grpcio is not installed")
    sys.exit(77)

failed = 0


def check(name, holds):
    global failed
    failed += not holds
    print(("ok   " if holds else "FAIL ") + name)


def status_of(call):
    try:
        list(call())
    except grpc.RpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""


channel = grpc.insecure_channel("127.0.0.1:" + sys.argv[1])


def stream(path, request, **more):
    return channel.unary_stream(path)(request, timeout=20, **more)


def unary(path, request, **more):
    return channel.unary_unary(path)(request, timeout=20, **more)


check("unary", unary("/t.T/Echo", b"from python", metadata=[("x-test", "a value")]) == b"from python")
check("a large message", unary("/t.T/Echo", bytes(range(256)) * 8192) == bytes(range(256)) * 8192)
numbers = [int.from_bytes(m[:4], "little") for m in stream("/t.T/Count", b"1000")]
check("a stream in order", numbers == list(range(1000)))
payloads = list(stream("/t.T/Payload", b"50"))
check("payloads", payloads == [n.to_bytes(4, "little") + bytes([n]) * 65536 for n in range(50)])
check("a status with details", status_of(lambda: stream("/t.T/Fail", "5 nö €".encode()))
      == (grpc.StatusCode.NOT_FOUND, "nö €"))
check("an unknown method", status_of(lambda: stream("/x.Y/Z", b""))
      == (grpc.StatusCode.UNIMPLEMENTED, "unknown method /x.Y/Z"))
code, details = status_of(lambda: stream("/t.T/Count", b"1" * 1000, compression=grpc.Compression.Gzip))
check("gzip is refused by name", code == grpc.StatusCode.UNIMPLEMENTED and "gzip" in details)
code, details = status_of(lambda: stream("/t.T/Count", bytes(5 << 20)))
check("a message over the limit", code == grpc.StatusCode.RESOURCE_EXHAUSTED)
check("a deadline", status_of(lambda: channel.unary_stream("/t.T/Hold")(b"", timeout=0.2))[0]
      == grpc.StatusCode.DEADLINE_EXCEEDED)

call = stream("/t.T/Payload", b"100")
next(call)
call.cancel()
check("a cancel", status_of(lambda: call)[0] == grpc.StatusCode.CANCELLED)

NOT_SERVING, SERVING = b"\x08\x02", b"\x08\x01"
check("health", unary("/grpc.health.v1.Health/Check", b"") == SERVING)
check("health of a service", unary("/grpc.health.v1.Health/Check", b"\x0a\x03t.T") == SERVING)
check("health of another", status_of(lambda: stream("/grpc.health.v1.Health/Check", b"\x0a\x01x"))[0]
      == grpc.StatusCode.NOT_FOUND)
watch = stream("/grpc.health.v1.Health/Watch", b"")
check("a watch", next(watch) == SERVING)
watch.cancel()
channel.close()
sys.exit(1 if failed else 0)
