#!/usr/bin/env python3
"""The nodes' wire in the hands of Google's own gRPC and protobuf: a router in Python joins real nodes and drives them.

usage: wire_grpcio.py BUILD-FOLDER PROTO-ROOT      exits 77 where grpcio, protobuf or protoc are missing

Nothing of rpc/ or of protobuf-c is on this side: messages are built from the .proto files at run time, streams are
grpcio's. With BATON_ORACLE_PYTHON it runs under that Python instead of the one that started it.
"""
import collections
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent import futures

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import lost  # noqa: E402  pylint: disable=wrong-import-position

HERE = os.path.dirname(os.path.abspath(__file__))
try:
    import grpc
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
except ImportError:
    for python in (os.environ.get("BATON_ORACLE_PYTHON", ""),
                   os.path.join(HERE, "../../.venv-clients/bin/python")):
        if os.path.exists(python) and "WIRE_AGAIN" not in os.environ:
            os.execve(python, [python, *sys.argv], {**os.environ, "WIRE_AGAIN": "1"})
    print("skipped: pip install grpcio protobuf")
    sys.exit(77)

VOCAB = 1000
SIM = ("--engine sim --sim-step 1 --sim-prefill-speed 200000 --sim-page-bytes 8192 "
       f"--sim-tail-bytes 20480 --sim-vocab {VOCAB}").split()
READY = 2
FAIL_DRAINING, FAIL_CANCELLED = 16, 17
slow = 4  # sanitizers and a busy machine


def load(root):
    """name -> message class, of all of proto/, from protoc's descriptors."""
    protoc = shutil.which("protoc")
    if not protoc:
        print("skipped: protoc is not here")
        sys.exit(77)
    files = sorted(f"proto/{n}" for n in os.listdir(f"{root}/proto") if n.endswith(".proto"))
    with tempfile.NamedTemporaryFile() as out:
        subprocess.run([protoc, f"-I{root}", f"--descriptor_set_out={out.name}", "--include_imports", *files], check=True)
        described = descriptor_pb2.FileDescriptorSet.FromString(out.read())
    pool = descriptor_pool.DescriptorPool()
    for file in described.file:
        pool.Add(file)
    return lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def wait(condition, seconds, what):
    start = time.monotonic()
    while not condition():
        assert not lost.over(start, seconds * slow), f"waited {seconds * slow} s for {what}"
        time.sleep(0.005)


class Router:
    def __init__(self, build, message):
        self.build, self.message = build, message
        self.nodes, self.status, self.arrivals, self.outs, self.processes = {}, {}, collections.defaultdict(list), [], {}
        self.hello = message("baton.Hello")(protocol=2, node_id="router-py", incarnation=77, role=1)
        self.server = grpc.server(futures.ThreadPoolExecutor(16))
        handler = grpc.stream_stream_rpc_method_handler(
            self.join, message("baton.ToRouter").FromString, lambda m: m.SerializeToString())
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("baton.Cluster", {"Join": handler}),))
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def push(self):
        to_node = self.message("baton.ToNode")
        view = to_node.View(generation=len(self.nodes))
        for hello in self.nodes.values():
            peer = view.peers.add(role=hello.role)
            peer.node.node_id, peer.node.incarnation = hello.node_id, hello.incarnation
            peer.grpc.CopyFrom(hello.grpc)
        for out in self.outs:
            out.put(to_node(view=view))

    def join(self, messages, context):
        context.send_initial_metadata((("x-baton-link", "1"),))
        out = queue.Queue()

        def read():
            name = None
            try:
                for m in messages:
                    if m.WhichOneof("what") == "hello":
                        name = m.hello.node_id
                        self.nodes[name] = m.hello
                        out.put(self.message("baton.ToNode")(hello=self.hello))
                        self.outs.append(out)
                        self.push()
                    else:
                        self.status[name] = m.status
                        self.arrivals[name].append(time.monotonic())
            except grpc.RpcError:
                pass
            out.put(None)

        threading.Thread(target=read, daemon=True).start()
        yield from iter(out.get, None)

    def spawn(self, role, name):
        self.processes[name] = subprocess.Popen(
            [f"{self.build}/{role}/baton-{role}", "--node-id", name, "--router", f"127.0.0.1:{self.port}",
             "--die-with-parent", "--chunk", "512", *SIM], stderr=subprocess.DEVNULL)
        wait(lambda: name in self.status, 10, f"{name} to join")


class Link:
    """Decode.Serve."""

    def __init__(self, router, name, hello=None):
        self.router, self.message = router, router.message
        self.out, self.tokens, self.logprobs = queue.Queue(), collections.defaultdict(list), collections.defaultdict(list)
        self.finished, self.failed, self.error, self.next = {}, {}, None, 1
        self.out.put(self.message("baton.ToDecode")(hello=hello or router.hello))
        node = router.nodes[name]
        self.channel = grpc.insecure_channel(f"{node.grpc.host}:{node.grpc.port}")
        self.calls = self.channel.stream_stream("/baton.Decode/Serve",
                                                lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
                                                self.message("baton.FromDecode").FromString)(iter(self.out.get, None))
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        try:
            for m in self.calls:
                what = m.WhichOneof("what")
                if what == "step":
                    for row in m.step.rows:
                        key = row.request, row.sample
                        assert row.first_index == len(self.tokens[key])
                        self.tokens[key].extend(row.ids)
                        self.logprobs[key].extend(row.logprobs)
                elif what == "finished":
                    self.finished[m.finished.request, m.finished.sample] = m.finished
                elif what == "failed":
                    self.failed[m.failed.request] = m.failed
        except grpc.RpcError as error:
            self.error = error

    def start(self, ids, prefill=None, n=1, max_tokens=20, temperature=0.0, logprobs=False, extra=b""):
        request, self.next = self.next, self.next + 1
        to_decode = self.message("baton.ToDecode")
        m = to_decode.Start(request=request, attempt=1, n_ids_total=len(ids), ids=ids[:900], credit=100000)
        m.sampling.temperature, m.sampling.top_p, m.sampling.repetition_penalty = temperature, 1, 1
        m.sampling.seed, m.sampling.n, m.sampling.max_tokens, m.sampling.ignore_eos = 5, n, max_tokens, True
        m.sampling.logprobs, m.sampling.n_top_logprobs = logprobs, 3 if logprobs else 0
        m.deadlines.queue_ms = m.deadlines.prefill_ms = m.deadlines.transfer_ms = 60000
        if prefill:
            m.prefill.node_id, m.prefill.incarnation = prefill, self.router.nodes[prefill].incarnation
        self.out.put(to_decode(start=m).SerializeToString() + extra)
        for at in range(900, len(ids), 900):
            part = self.message("baton.IdsPart")(key=request, attempt=1, first=at, ids=ids[at:at + 900])
            self.out.put(to_decode(ids=part))
        return request

    def end(self, request, n=1):
        wait(lambda: request in self.failed or all((request, i) in self.finished for i in range(n)), 20, "an end")
        if request in self.failed:
            return self.failed[request]
        for i in range(n):
            assert self.finished[request, i].n_generated == len(self.tokens[request, i])
        return [self.tokens[request, i] for i in range(n)]


def check_join(router):
    hello = router.nodes["d0"]
    assert hello.protocol == 2 and hello.role == 3 and router.nodes["p0"].role == 2
    assert len(hello.fingerprint) == 16 and hello.fingerprint == router.nodes["p0"].fingerprint
    assert hello.limits.page_tokens == 256 and hello.limits.vocab_size == VOCAB and hello.incarnation
    seen, start = len(router.arrivals["p0"]), time.monotonic()
    time.sleep(2.1)
    took = time.monotonic() - start
    n = len(router.arrivals["p0"]) - seen
    assert (took - lost.between(start)) / 0.5 - 1.5 < n < took / 0.5 + 2, f"{n} Status in {took:.1f} s, one every 500 ms"
    wait(lambda: [p.state for p in router.status["d0"].pairs] == [READY], 10, "the pair")
    pair = router.status["d0"].pairs[0]
    assert pair.prefill.node_id == "p0" and pair.put_cost_ns > 0 and pair.bandwidth_bytes_per_s > 0


def check_requests(link):
    draw = random.Random(1)
    for length in (1, 255, 256, 257, 512, 1000, 5000):
        ids = [draw.randrange(3, VOCAB) for _ in range(length)]
        split = link.end(link.start(ids, "p0"))
        assert isinstance(split, list) and split == link.end(link.start(ids)), (length, split)
    split = link.end(link.start(ids, "p0", n=3, temperature=0.8), 3)
    assert split == link.end(link.start(ids, n=3, temperature=0.8), 3) and split[0] != split[1]
    request = link.start(ids[:300], "p0", logprobs=True)
    tokens, = link.end(request)
    assert [p.token.id for p in link.logprobs[request, 0]] == tokens
    assert all(len(p.top) == 3 and p.top[0].logprob >= p.top[2].logprob for p in link.logprobs[request, 0])
    usage = link.finished[request, 0].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (300, 20)
    # Field 999 of a later build, in the envelope: skipped.
    assert link.end(link.start(ids[:300], "p0", extra=b"\xba\x3e\x03new")) == [tokens]
    request = link.start(ids, max_tokens=100000)
    time.sleep(0.2)
    link.out.put(link.message("baton.ToDecode")(
        cancel=link.message("baton.ToDecode.Cancel")(request=request, attempt=1, all_samples=True)))
    assert link.end(request).code == FAIL_CANCELLED


def check_refusals(router):
    other = Link(router, "d0", router.message("baton.Hello")(protocol=9, node_id="r9", incarnation=1, role=1))
    wait(lambda: other.error, 5, "the refusal of another protocol")
    assert other.error.code() == grpc.StatusCode.FAILED_PRECONDITION, other.error
    assert "9" in other.error.details() and "2" in other.error.details()
    rubbish = Link(router, "d0")
    rubbish.out.put(b"\xff\xff\xff")
    wait(lambda: rubbish.error, 5, "the end of a link that carries rubbish")
    assert rubbish.error.code() == grpc.StatusCode.FAILED_PRECONDITION, rubbish.error


def check_drain(router, link):
    health, drain = router.message("grpc.health.v1.HealthCheckResponse"), router.message("baton.DrainReply")
    check = lambda: link.channel.unary_unary("/grpc.health.v1.Health/Check", None, health.FromString)(b"", timeout=5).status
    watched = []
    watch = link.channel.unary_stream("/grpc.health.v1.Health/Watch", None, health.FromString)(b"")

    def read():
        try:
            watched.extend(m.status for m in watch)
        except grpc.RpcError:
            pass

    threading.Thread(target=read, daemon=True).start()
    assert check() == 1
    # Without `stop` the process stays, and takes nothing new.
    p0 = router.nodes["p0"].grpc
    reply = grpc.insecure_channel(f"{p0.host}:{p0.port}").unary_unary("/baton.Node/Drain", None, drain.FromString)(
        router.message("baton.DrainRequest")(deadline_ms=5000).SerializeToString(), timeout=30)
    assert reply.drained
    wait(lambda: router.status["p0"].draining, 2, "p0 to say that it drains")
    assert link.end(link.start([5] * 300, "p0")).code == FAIL_DRAINING
    time.sleep(0.5)
    assert router.processes["p0"].poll() is None
    request = link.start([5] * 300, max_tokens=300)
    wait(lambda: link.tokens[request, 0], 5, "tokens")
    reply = link.channel.unary_unary("/baton.Node/Drain", None, drain.FromString)(
        router.message("baton.DrainRequest")(deadline_ms=20000, stop=True).SerializeToString(), timeout=30)
    assert reply.drained and reply.n_left == 0
    assert isinstance(link.end(request), list)
    assert router.processes["d0"].wait(20) == 0
    assert watched == [1, 2], watched


def main():
    build, root = sys.argv[1:3]
    lost.watch(build)
    router = Router(build, load(root))
    router.spawn("prefill", "p0")
    router.spawn("decode", "d0")
    check_join(router)
    link = Link(router, "d0")
    check_requests(link)
    check_refusals(router)
    check_drain(router, link)
    wait(lambda: router.status["p0"].pages_free == router.status["p0"].pages_total, 5, "p0's pages")
    router.processes["p0"].terminate()
    assert router.processes["p0"].wait(20) == 0
    print("google's gRPC and protobuf agree")
    os._exit(0)  # grpcio's threads need no farewell


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
