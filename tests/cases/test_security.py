"""The key guards every route, in every spelling; inner ports are not open to the world."""
import json
import re
import socket
import subprocess
import time

import kit
from kit import Wire, check, frame, need

suite = kit.Suite()
KEY, TOKEN = "sesame-5061", "inner-7302"
case = suite.cluster(layouts=("split", "lone"), extra=[
    f"router:--api-key={KEY}", f"router:--cluster-token={TOKEN}", f"node:--cluster-token={TOKEN}"])
OPEN = ("/healthz", "/livez", "/readyz", "/health", "/metrics")
GUARDED = (("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/v1/models"),
           ("GET", "/v1/models/baton-tiny"), ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/version"),
           ("GET", "/workers"), ("GET", "/debug/requests"))
SPELLINGS = ("/v1//chat/completions", "/V1/chat/completions", "/v1/chat/completions/", "/%76%31/chat/completions",
             "//v1/chat/completions", "/v1/chat/completions?key=" + KEY, "/v1/chat/completions?api_key=" + KEY,
             "/v1/./chat/completions", "/x/../v1/chat/completions", "/v1/chat/completions;a=b", "/nowhere", "/debug/pages",
             "/v1/chat%2fcompletions", "/health/../v1/models", "/metrics/../workers", "/healthz/", "*")
BODY = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


def refused(answer, what):
    check(what, answer.status, 401)
    error = answer.error()
    check(what, (error["type"], error["code"]), ("invalid_request_error", "invalid_api_key"))
    check("WWW-Authenticate", answer.header("www-authenticate"), "Bearer")
    need(KEY.encode() not in answer.body, "the key is not given away")


@case("SEC-01")
def every_route_and_spelling(c):
    wrong = ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer "}, {"Authorization": "Bearer"},
             {"Authorization": f"Basic {KEY}"}, {"Authorization": KEY}, {"Authorization": f"Bearer {KEY}x"},
             {"Authorization": f"Bearer {KEY[:-1]}"}, {"Authorization": f"Bearer {KEY} x"}, {"X-Api-Key": KEY},
             {"Authorization": f"Bearer {TOKEN}"}, {"Authorization": f"Bearer {KEY.upper()}"}, {"Cookie": f"key={KEY}"})
    for headers in wrong:
        for method, path in GUARDED:
            refused(kit.ask(c.address, method, path, BODY if method == "POST" else None, headers), f"{method} {path} {headers}")
    for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"):
        for _, path in GUARDED:
            refused(kit.ask(c.address, method, path, BODY if method in ("POST", "PUT", "PATCH") else None),
                    f"{method} {path} without a key")
        for path in SPELLINGS:
            answer = kit.ask(c.address, method, path, BODY if method in ("POST", "PUT", "PATCH") else None)
            need(answer.status in (400, 401), f"{method} {path}: {answer.status}", answer)
            answer.error()
    check("HEAD", kit.ask(c.address, "HEAD", "/v1/models").status, 401)
    for path in OPEN:
        need(kit.get(c.address, path).status == 200, f"{path} is open", path)
    for method, path in GUARDED:
        answer = c.ask(method, path, BODY if method == "POST" else None)
        need(answer.status in (200, 400), f"{method} {path} with the key", answer)
    for scheme in ("bearer", "BEARER"):
        check(f"scheme {scheme}", kit.get(c.address, "/v1/models", {"Authorization": f"{scheme} {KEY}"}).status, 200)
    for spelling in SPELLINGS[:5]:  # with the key too no spelling reaches another route
        check(f"{spelling} with the key", c.ask("POST", spelling, BODY).status, 404)
    # Two headers, one right: refused, whichever is first.
    for first, second in ((KEY, "wrong"), ("wrong", KEY)):
        with Wire(c.address) as wire:
            wire.send(f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {first}\r\n"
                      f"Authorization: Bearer {second}\r\n\r\n".encode())
            need(wire.answer().status in (400, 401) or first == KEY, "two headers", first, second)
    # A body without a key is not waited for.
    with Wire(c.address) as wire:
        wire.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\nExpect: 100-continue\r\n\r\n")
        answer = wire.answer()
        check("no 100 without a key", (answer.status, answer.interim), (401, []))


@case("SEC-01-nodes")
def nodes_and_inner_ports(c):
    for node in c.nodes:
        for path in ("/debug/pages", "/debug/", "/debug", "/debug/nowhere", "//debug/pages", "/DEBUG/pages",
                     "/debug/pages/", "/%64ebug/pages", "/healthz/../debug/pages"):
            for headers in ({}, {"Authorization": f"Bearer {KEY}"}, {"Authorization": "Bearer "}):
                answer = kit.get(node.address, path, headers)
                need(answer.status in (400, 401, 404), f"{node.name} {path}: {answer.status}", answer)
                answer.error()
                need(answer.status == 401 or path != "/debug/pages", "it asks for the token", answer)
        check("with the token", kit.get(node.address, "/debug/pages", {"Authorization": f"Bearer {TOKEN}"}).status, 200)
        for path in ("/healthz", "/livez", "/readyz", "/metrics"):
            check(f"{node.name} {path}", kit.get(node.address, path).status, 200)
        for method in ("POST", "PUT", "DELETE"):
            answer = kit.ask(node.address, method, "/debug/pages", {})
            need(answer.status in (401, 405), f"{method} of a node", answer)
    # HTTP and gRPC are bound to loopback. (UCX binds to the network that it is told of: docs, "trusted".)
    listening = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True, check=True).stdout
    bound = {}
    for line in listening.splitlines():
        host, _, port = line.split()[3].rpartition(":")
        bound.setdefault(int(port), []).append(host)
    ports = [c.address[1], c.join_port]
    ports += [int(worker[kind].rpartition(":")[2]) for worker in c.workers() for kind in ("http", "grpc")]
    for port in ports:
        need(port in bound, f"port {port} listens", bound)
        for host in bound[port]:
            need(re.fullmatch(r"127\.\d+\.\d+\.\d+|\[::1\]|\[::ffff:127\.[\d.]+\]", host), f"port {port} is bound to {host}")
    log = c.log()
    for secret in (KEY, TOKEN):
        need(secret not in log, "a secret in the log")
        for process in c.processes.values():
            need(secret not in kit.get(process.address, "/metrics").body.decode(), "a secret in the metrics")


@suite.case("SEC-01-token")
def a_node_without_the_token(build):
    """gRPC: a node that has no token, or another, is told so and does not join."""
    with kit.Cluster(build, "lone", extra=[f"router:--cluster-token={TOKEN}", f"node:--cluster-token={TOKEN}"]) as c:
        join_port = c.join_port
        for token in (None, "wrong", "", TOKEN + "x"):
            options = [f"--cluster-token={token}"] if token is not None else []
            with kit.Daemon(build, "decode", "--node-id=stranger", f"--router=127.0.0.1:{join_port}", *options) as node:
                kit.wait_for(f"it is told why, with the token {token!r}", lambda n=node: re.search(
                    "token|unauthenticated|is empty", n.said(), re.I), 5)
                time.sleep(0.3)
                need("stranger" not in {w["id"] for w in c.workers()}, f"it joined with the token {token!r}")
                need(TOKEN not in node.said(), "the token is not given away", node.said())
        check("the cluster goes on", c.chat("x", max_tokens=2).status, 200)


FEW_FILES = 200


@suite.case("descriptors-run-out")
def descriptors_run_out(build):
    """Few descriptors: HTTP clients can't take those that nodes need; a router that nodes can't reach any more says so."""
    with kit.Daemon(build, "router", f"--model={kit.TINY}", "--http-port=0", "--grpc-port=0",
                    around=("prlimit", f"--nofile={FEW_FILES}")) as router:
        said = router.says("nodes join at port", 10)
        http, grpc = (int(re.search(pattern, said)[1]) for pattern in (r"HTTP on \S+:(\d+),", r"join at port (\d+)"))

        def ready():
            answer = kit.ask(("127.0.0.1", http), "GET", "/readyz")
            return answer.status, answer.body.decode()

        flood = [socket.create_connection(("127.0.0.1", http)) for _ in range(2 * FEW_FILES)]
        with kit.Daemon(build, "decode", "--node-id=late", f"--router=127.0.0.1:{grpc}"):
            router.says("decode node late", 10)
            for one in flood:
                one.close()
            kit.wait_for("ready again", lambda: ready()[0] == 200, 10)

            flood = [socket.create_connection(("127.0.0.1", grpc)) for _ in range(2 * FEW_FILES)]
            router.says("stopped accepting", 10)
            for one in flood:
                one.close()
            kit.wait_for("it says that no node can join", lambda: "listener" in ready()[1], 10)
            check("and is not ready", ready()[0], 503)


if __name__ == "__main__":
    suite.main()
