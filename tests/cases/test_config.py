"""Ports that are taken, addresses of every form, transports that cannot work."""
import os
import re
import socket
import time

import kit
from kit import TINY, Daemon, check, need, wait_for

suite = kit.Suite()


def taken_port():
    holder = socket.socket()
    holder.bind(("127.0.0.1", 0))
    holder.listen(1)
    return holder, holder.getsockname()[1]


def router(build, *options, http=0, grpc=0):
    return Daemon(build, "router", f"--model={TINY}", f"--http-port={http}", f"--grpc-port={grpc}", *options)


def refused_port(daemon, port, why="taken"):
    with daemon:
        start = time.monotonic()
        code = daemon.ends(2)
        need(code > 0, f"exit {code}", daemon.said())
        need(str(port) in daemon.said(), "the port is named", daemon.said())
        need(why in daemon.said(), "and why", daemon.said())
        need("weights" not in daemon.said().lower(), "before any weights are loaded", daemon.said())
        kit.in_time("the end", start, 2)


@suite.case("CFG-01")
def ports_that_are_taken(build):
    holder, port = taken_port()
    with holder:
        refused_port(router(build, http=port), port)
        refused_port(router(build, grpc=port), port)
        for role in ("prefill", "decode"):
            refused_port(Daemon(build, role, f"--http-port={port}"), port)
            refused_port(Daemon(build, role, f"--grpc-port={port}"), port)
            refused_port(Daemon(build, role, "--engine=model", f"--model={TINY}", f"--http-port={port}"), port)
    # UCX binds its own sockets, one a network device
    holder = socket.socket()
    holder.bind(("0.0.0.0", 0))
    holder.listen(1)
    forgiven = {"LSAN_OPTIONS": f"print_suppressions=0:suppressions={os.path.join(os.path.dirname(__file__), 'ucx_port.supp')}"}
    with holder:
        port = holder.getsockname()[1]
        for role in ("prefill", "decode"):
            for options in ([], ["--ucx-tls=tcp"], ["--engine=model", f"--model={TINY}"]):
                refused_port(Daemon(build, role, f"--ucx-tcp-ports={port}-{port}", *options, env=forgiven), port, "in use")
    # two routers on one port, and a second cluster where one runs
    with kit.Cluster(build, "split") as c:
        refused_port(router(build, http=c.address[1]), c.address[1])
        refused_port(router(build, grpc=c.join_port), c.join_port)
        before = c.pids()
        done = c.tool(*c.up_arguments(c.address[1], c.join_port))
        check("the same launch again", done.returncode, 0)
        check("changes nothing", c.pids(), before)
        other = kit.Cluster(build, "split")
        # whose router takes two seconds to begin: the port answers meanwhile, for the first
        slow = os.path.join(other.folder, "slow")
        with open(slow, "w", encoding="ascii") as file:
            file.write('#!/bin/sh\nsleep 2\nexec "$@"\n')
        os.chmod(slow, 0o755)
        done = other.tool(*other.up_arguments(c.address[1], kit.ports.free(1)[0]), "--wrap", f"router:{slow}", timeout=60)
        need(done.returncode != 0 and str(c.address[1]) in done.stderr, "another launch on its port", done)
        wait_for("the script takes the rest down again", lambda: not os.path.exists(os.path.join(other.folder, "control")), 10)
        check("the first goes on", c.chat("x", max_tokens=2).status, 200)


def listening(daemon):
    """(HTTP address, gRPC port) that it says."""
    text = daemon.says("HTTP on" if daemon.name == "router" else "probes on")
    if daemon.name == "router":
        found = re.search(r"HTTP on (\S+):(\d+), nodes join at port (\d+)", text)
    else:
        found = re.search(r"gRPC on \S+ port (\d+), probes on (\S+):(\d+)", text)
        return (found[2], int(found[3])), int(found[1])
    return (found[1], int(found[2])), int(found[3])


@suite.case("CFG-03")
def addresses_of_every_form(build):
    if not os.path.exists("/proc/net/if_inet6"):
        raise kit.Skip("this machine has no IPv6")
    for host, node_host, router_for_nodes in (("::1", "::1", "[::1]"), ("[::1]", "[::1]", "[::1]"),
                                              ("localhost", "localhost", "localhost"), ("127.0.0.1", "127.0.0.1", "127.0.0.1")):
        with router(build, f"--host={host}", "--local-prefill=never") as front:
            (shown, port), join_port = listening(front)
            target = f"--router={router_for_nodes}:{join_port}"
            with Daemon(build, "prefill", f"--host={node_host}", target, "--node-id=p") as prefill, \
                    Daemon(build, "decode", f"--host={node_host}", target, "--node-id=d") as decode:
                address = (shown.strip("[]"), port)
                need(("[" in shown) == (":" in shown), "brackets around IPv6 alone", shown)
                said = prefill.said, decode.said
                wait_for("a ready pair: " + said[1]()[-300:], lambda: kit.get(address, "/readyz").status == 200, 8)
                answer = kit.ask(address, "POST", "/v1/chat/completions",
                                 {"messages": [{"role": "user", "content": "x" * 2000}], "max_tokens": 3})
                check(f"a chat over {host} ({answer.body[:200]!r})", answer.status, 200)
                for worker in kit.get(address, "/workers").json()["workers"]:
                    for kind in ("grpc", "http"):
                        where, _, number = worker[kind].rpartition(":")
                        need(("[" in where) == (":" in where), "brackets", worker[kind])
                        need(where.strip("[]") not in ("::", "0.0.0.0", ""), "no wildcard is handed out", worker[kind])
                        with socket.create_connection((where.strip("[]"), int(number)), 2):
                            pass  # it is reachable
    # A wildcard: an address to hand out must be given, and is then used.
    for wildcard in ("0.0.0.0", "::"):
        with Daemon(build, "decode", f"--host={wildcard}") as node:
            code = node.ends(2)
            need(code > 0 and "advertise-host" in node.said(), f"{wildcard} without --advertise-host", code, node.said())
    with router(build) as front:
        (shown, port), join_port = listening(front)
        with Daemon(build, "decode", "--host=0.0.0.0", "--advertise-host=127.0.0.1", f"--router=127.0.0.1:{join_port}",
                    "--node-id=d"):
            wait_for("it is ready", lambda: kit.get((shown, port), "/readyz").status == 200, 8)
            worker = kit.get((shown, port), "/workers").json()["workers"][0]
            need(worker["grpc"].startswith("127.0.0.1:"), "the advertised address", worker)
    for wrong in ("[::1", "::1]", "300.1.1.1", "no such host", ""):
        with Daemon(build, "decode", f"--host={wrong}") as node:
            code = node.ends(6)
            need(code > 0, f"--host={wrong!r}", code, node.said())
    for wrong in ("[::1]", "::1:8000:x", "127.0.0.1", "127.0.0.1:99999", "127.0.0.1:0x50", ":80"):
        with Daemon(build, "decode", f"--router={wrong}") as node:
            code = node.ends(3)
            need(code > 0 and wrong in node.said(), f"--router={wrong!r}", code, node.said())


@suite.case("CFG-05")
def transports_that_cannot_work(build):
    with kit.Cluster(build, "split", local="auto") as c:
        log = c.log()
        need(re.search(r"prefill-0 is ready: \S+", log), "the transport in use is logged", log[-1500:])
        decode = next(w for w in c.workers() if w["role"] == "decode")
        check("states of pairs", [p["state"] for p in decode["pairs"]], ["ready"])
        need(decode["pairs"][0]["transport"] and decode["pairs"][0]["bandwidth_bytes_per_s"] > 0, "measured", decode["pairs"])
        target = f"--router=127.0.0.1:{c.join_port}"

        def pair_of(name):
            rows = next(w for w in c.workers() if w["role"] == "decode")["pairs"]
            return next((p for p in rows if p["prefill"] == name), None)

        for env, what in (({"UCX_TLS": "nosuch"}, "nosuch"), ({"UCX_NET_DEVICES": "nosuch0", "UCX_TLS": "tcp"}, "nosuch0")):
            for role in ("prefill", "decode"):
                with Daemon(build, role, target, "--node-id=odd", env=env) as node:
                    code = node.ends(4)
                    need(code > 0 and what in node.said(), f"{role} with {env}: exit {code}", node.said())
        for options in (["--ucx-tls=nosuch"], ["--ucx-tls=tcp", "--ucx-net-devices=nosuch0"]):
            with Daemon(build, "decode", target, "--node-id=odd", *options) as node:
                code = node.ends(4)
                need(code > 0 and "nosuch" in node.said(), f"{options}: exit {code}", node.said())
        # `self` reaches nobody else; tcp alone is slow on one host and refused unless allowed. Neither is ever used.
        for env in ({"UCX_TLS": "self"}, {"UCX_TLS": "tcp"}):
            with Daemon(build, "prefill", target, "--node-id=odd", env=env) as node:
                wait_for(f"{env}: decode says why the pair is not ready", lambda: "KV transport" in (
                    (pair_of("odd") or {}).get("text") or ""), 8)
                need("KV transport" in node.said(), "and so does the node", node.said())
                for i in range(4):
                    check("answers", c.chat(f"{i}" + "x" * 3000, max_tokens=3).status, 200)
                    need(pair_of("odd")["state"] != "ready", "the pair never becomes ready", pair_of("odd"))
            wait_for("it is gone", lambda: "odd" not in {w["id"] for w in c.workers()}, 5)
    for script in ("quickstart", "cluster", "check"):
        with open(os.path.join(kit.TOP, "scripts", script), encoding="utf-8") as file:
            text = file.read()
        for pinned in ("UCX_TLS", "UCX_NET_DEVICES", "ucx-tls", "ucx-net-devices"):
            need(pinned not in text, f"scripts/{script} pins {pinned}")


if __name__ == "__main__":
    suite.main()
