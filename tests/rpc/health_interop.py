#!/usr/bin/env python3
"""Asks a server of ours with the gRPC of others: health, token, limits, unknown methods, a stream.

usage: health_interop.py LINK_PEER      exits 77 where grpcio and grpcio-health-checking are missing
"""
import os
import subprocess
import sys
import queue

try:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc
except ImportError:
    # scripts/check --oracle makes this one
    python = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../.venv-clients/bin/python")
    if os.path.exists(python) and "INTEROP_AGAIN" not in os.environ:
        os.execve(python, [python, *sys.argv], {**os.environ, "INTEROP_AGAIN": "1"})
    print("skipped: pip install grpcio grpcio-health-checking")
    sys.exit(77)


def start(program, *arguments):
    peer = subprocess.Popen([program, "0", *arguments], stdout=subprocess.PIPE, text=True)
    return peer, int(peer.stdout.readline())


def code_of(call):
    try:
        call()
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def raw_unary(channel, method, body=b"", **more):
    return channel.unary_unary(method)(body, timeout=5, **more)


def check_health(channel):
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest
    serving = health_pb2.HealthCheckResponse.SERVING
    not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
    assert stub.Check(request(service=""), timeout=5).status == serving
    assert code_of(lambda: stub.Check(request(service="nope"), timeout=5)) == grpc.StatusCode.NOT_FOUND
    seen = []
    watch = stub.Watch(request(service="flip"), timeout=5)
    for response in watch:
        seen.append(response.status)
        if len(seen) == 5:
            watch.cancel()
            break
    assert set(seen) == {serving, not_serving}
    assert all(a != b for a, b in zip(seen, seen[1:])), seen
    unknown = stub.Watch(request(service="nope"), timeout=5)
    assert next(unknown).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    unknown.cancel()


def check_stream(channel):
    outgoing = queue.Queue()
    serve = channel.stream_stream("/test.Peer/Serve")(iter(outgoing.get, None), timeout=20)
    outgoing.put(b"e")
    assert next(serve).startswith(b"hello ")
    for i in range(1000):
        outgoing.put(b"%d" % i)
    for i in range(1000):
        assert next(serve) == b"%d" % i
    outgoing.put(None)
    assert list(serve) == []
    assert serve.code() == grpc.StatusCode.OK


def main():
    peer, port = start(sys.argv[1])
    guarded, guarded_port = start(sys.argv[1], "s3cret")
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            check_health(channel)
            check_stream(channel)
            assert code_of(lambda: raw_unary(channel, "/test.Peer/Nope")) == grpc.StatusCode.UNIMPLEMENTED
            assert code_of(lambda: raw_unary(channel, "/grpc.health.v1.Health/Check", b"\xff\xff")) == \
                grpc.StatusCode.INVALID_ARGUMENT
            too_long = code_of(lambda: raw_unary(channel, "/grpc.health.v1.Health/Check", b"x" * (9 << 20)))
            assert too_long in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL), too_long
            # compressed: refused, not unpacked
            packed = code_of(lambda: raw_unary(channel, "/grpc.health.v1.Health/Check", b"\0" * 1000000,
                                               compression=grpc.Compression.Gzip))
            assert packed in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT), packed
            check_health(channel)
        with grpc.insecure_channel(f"127.0.0.1:{guarded_port}") as channel:
            check_health(channel)
            for token, want in ((None, grpc.StatusCode.UNAUTHENTICATED),
                                ("Bearer wrong", grpc.StatusCode.UNAUTHENTICATED),
                                ("Bearer ", grpc.StatusCode.UNAUTHENTICATED),
                                ("Basic s3cret", grpc.StatusCode.UNAUTHENTICATED),
                                ("s3cret", grpc.StatusCode.UNAUTHENTICATED),
                                ("Bearer s3cret", grpc.StatusCode.UNIMPLEMENTED)):
                metadata = [("authorization", token)] if token is not None else None
                got = code_of(lambda: raw_unary(channel, "/test.Peer/Nope", metadata=metadata))
                assert got == want, (token, got)
    finally:
        peer.kill()
        guarded.kill()
    print("all as expected")


if __name__ == "__main__":
    main()
