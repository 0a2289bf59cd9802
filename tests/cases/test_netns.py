"""All parts over IPv6, in a network of two hosts that this test makes: two network namespaces, the first of which it enters
itself. Needs root; skipped without.

    host a: lan0 fd77::1/64, fe80::a   ------   host b: lan0 fd77::2/64, fe80::b

There is no IPv4 address in it, loopback included.
"""
import contextlib
import ctypes
import os
import re
import subprocess
import sys

import kit
from kit import TINY, Daemon, check, need, wait_for

CLONE_NEWNET = 0x40000000
HOSTS = {host: f"cases-{os.getpid()}-{host}" for host in "ab"}
suite = kit.Suite()
CHAT = "/v1/chat/completions"


def ip(*words):
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def make_network():
    """Both hosts; this process moves to the first."""
    for host, space in HOSTS.items():
        ip("netns", "add", space)
    ip("-n", HOSTS["a"], "link", "add", "lan0", "type", "veth", "peer", "name", "lan0", "netns", HOSTS["b"])
    for host, address in (("a", "fd77::1"), ("b", "fd77::2")):
        where = ("-n", HOSTS[host])
        ip(*where, "link", "set", "lan0", "addrgenmode", "none")
        for device in ("lo", "lan0"):
            ip(*where, "link", "set", device, "up")
        for own in (address, f"fe80::{host}"):
            ip(*where, "addr", "add", f"{own}/64", "dev", "lan0", "nodad")
        with contextlib.suppress(OSError):  # a kernel may have given none
            ip(*where, "addr", "del", "127.0.0.1/8", "dev", "lo")
    libc = ctypes.CDLL(None, use_errno=True)
    space = os.open(f"/run/netns/{HOSTS['a']}", os.O_RDONLY)
    if libc.setns(space, CLONE_NEWNET):
        raise OSError(f"entering a network namespace: {os.strerror(ctypes.get_errno())}")
    os.close(space)


def remove_network():
    for space in HOSTS.values():
        subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def on(host):
    """What a process is started by on a host. (Its /sys is then that host's too: UCX looks for devices there.)"""
    return ["ip", "netns", "exec", HOSTS[host]]


def listening(front):
    text = front.says("HTTP on")
    found = re.search(r"HTTP on (\S+):(\d+), nodes join at port (\d+)", text)
    return found[1], int(found[2]), int(found[3])


def whole_cluster(build, here, other):
    """Router and decode node on one host, prefill node on the other; here and other: their addresses."""
    with Daemon(build, "router", f"--model={TINY}", f"--host={here}", "--http-port=0", "--grpc-port=0",
                "--local-prefill=never") as front:
        shown, port, join_port = listening(front)
        check("brackets", shown, f"[{here}]")
        target = f"--router=[{here}]:{join_port}"
        common = ["--ucx-tls=tcp", "--ucx-net-devices=lan0", "--allow-slow-transport", target]
        with Daemon(build, "decode", f"--host={here}", "--node-id=d", *common, around=on("a")) as decode, \
                Daemon(build, "prefill", f"--host={other}", "--node-id=p", *common,
                       around=on("b")) as prefill:
            address = (here, port)
            try:
                wait_for("a ready pair", lambda: kit.get(address, "/readyz").status == 200, 10)
            except kit.Wrong:
                need(False, "no ready pair", kit.get(address, "/workers").json(), decode.said()[-900:], prefill.said()[-900:])
            body = {"messages": [{"role": "user", "content": "x" * 6000}], "max_tokens": 5, "ignore_eos": True}
            answer = kit.ask(address, "POST", CHAT, body)
            check(f"a chat ({answer.body[:200]!r})", answer.status, 200)
            kit.post_stream(address, CHAT, body).check()
            rows = {w["id"]: w for w in kit.get(address, "/workers").json()["workers"]}
            check("it went over the pair", [(p["prefill"], p["state"]) for p in rows["d"]["pairs"]], [("p", "ready")])
            need("tcp" in rows["d"]["pairs"][0]["transport"], "by the network", rows["d"]["pairs"])
            for name, host in (("d", here), ("p", other)):
                for kind in ("grpc", "http"):
                    where, _, number = rows[name][kind].rpartition(":")
                    check(f"{kind} of {name}", where, f"[{host.replace('%', '%25')}]")
                    need(int(number) > 0, "a port", rows[name])
            for node, name in ((decode, "decode"), (prefill, "prefill")):
                found = re.search(r"probes on (\S+):(\d+)", node.said())
                need(found and found[1].startswith("["), f"brackets in what the {name} node says", node.said()[-500:])
            # The link goes, and comes back: nothing hangs, and the pair heals by itself.
            ip("-n", HOSTS["b"], "link", "set", "lan0", "down")
            wait_for("the router sees it", lambda: kit.get(address, "/readyz").status == 503, 4)
            for stream in (False, True):
                answer = (kit.post_stream(address, CHAT, body) if stream else kit.ask(address, "POST", CHAT, body))
                check("a chat meanwhile", (answer.status, answer.error()["code"]), (503, "no_ready_node"))
            ip("-n", HOSTS["b"], "link", "set", "lan0", "up")
            for own in ("fd77::2", "fe80::b"):  # IPv6 addresses go with the link
                with contextlib.suppress(OSError):
                    ip("-n", HOSTS["b"], "addr", "add", f"{own}/64", "dev", "lan0", "nodad")
            wait_for("the pair is ready again", lambda: kit.get(address, "/readyz").status == 200, 15)
            answer = kit.ask(address, "POST", CHAT, body)
            check(f"a chat after the cut ({answer.body[:200]!r})", answer.status, 200)


@suite.case("CFG-03-ipv6")
def only_ipv6(build):
    whole_cluster(build, "fd77::1", "fd77::2")


@suite.case("CFG-03-scope")
def link_local_with_a_scope(build):
    whole_cluster(build, "fe80::a%lan0", "fe80::b%lan0")


if __name__ == "__main__":
    try:
        make_network()
    except OSError as problem:
        remove_network()
        print(f"1..0 # SKIP {problem}")
        sys.exit(0)
    try:
        suite.main()
    finally:
        remove_network()
