"""Health that tells the truth, on real processes. Needs a build with -Dfault_points=true: a fault point holds the compute
thread, or keeps a message back, so that a state stays long enough to be looked at.

    test_health.py BUILD_DIR [TEST...]
"""
import os
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cases"))
import kit  # noqa: E402  pylint: disable=wrong-import-position
from kit import check, need, wait_for  # noqa: E402  pylint: disable=wrong-import-position

suite = kit.Suite()
PATH = "/v1/completions"
LEASE_S = 1.5


def arm(process, *specs):
    answer = kit.ask(process.address, "POST", "/debug/faults", "\n".join(specs).encode())
    check(f"arming {specs}: {answer.body!r}", answer.status, 200)


def health(process, path="/healthz"):
    return kit.get(process.address, path).status


def body(n_tokens, max_tokens, **fields):
    return {"prompt": [7 + i % 2000 for i in range(n_tokens)], "max_tokens": max_tokens, "temperature": 0,
            "ignore_eos": True, **fields}


def red_once_stuck(nodes, point):
    """Waits until the point holds one of the nodes, on which alone it stays, and until that is red; the node, and how long
    that took."""
    stuck = wait_for(f"{point} hangs", lambda: next((p for p in nodes if kit.get(
        p.address, "/debug/faults").json()[point]["faults"] > 0), None), 5)
    begun = time.monotonic()
    for other in nodes:
        if other is not stuck:
            arm(other, "*=off")
    wait_for("the node is red", lambda: health(stuck) == 503, LEASE_S + 1)
    return stuck, time.monotonic() - begun


@suite.case("wedged")
def a_wedged_device_is_red(build):
    """A decode step that does not end: within a lease and a tick /healthz of that node is 503, told by the HTTP thread
    that is as well as ever; other nodes stay green; the stream is finished elsewhere; it is green when the step ends."""
    with kit.Cluster(build, "split", prefill=1, decode=2, lease=None) as c:
        wanted = c.post(PATH, body(300, 200)).json()["choices"][0]["text"]
        for i in range(2):
            arm(c.decode(i), "compute.step=delay,ms=5000,after=40,n=1")
        found = []
        reader = threading.Thread(target=lambda: found.append(c.stream(PATH, body(300, 200), timeout=30)))
        reader.start()
        stuck, took = red_once_stuck([c.decode(0), c.decode(1)], "compute.step")
        check("the other decode node", health(c.decode(1) if stuck is c.decode(0) else c.decode(0)), 200)
        check("the prefill node", health(c.prefill()), 200)
        reader.join()
        stream = found[0].check("completion")
        check("text of the stream that moved", stream.text(), wanted)
        wait_for("green when the step has ended", lambda: health(stuck) == 200, 8)
        wait_for("all is free", lambda: not any(c.pages_listed().values()), 12)
        print(f"# red after {took:.1f} s", flush=True)


@suite.case("wedged-prefill")
def a_wedged_chunk_is_red(build):
    with kit.Cluster(build, "split", prefill=2, lease=None) as c:
        wanted = c.post(PATH, body(600, 8)).json()["choices"][0]["text"]
        for i in range(2):
            arm(c.prefill(i), "compute.chunk=delay,ms=5000,n=1")
        found = []
        reader = threading.Thread(target=lambda: found.append(c.post(PATH, body(600, 8), timeout=30)))
        reader.start()
        stuck, _ = red_once_stuck([c.prefill(0), c.prefill(1)], "compute.chunk")
        check("decode is not", health(c.decode()), 200)
        reader.join()
        check("the answer", (found[0].status, found[0].json()["choices"][0]["text"]), (200, wanted))
        wait_for("green when the chunk has ended", lambda: health(stuck) == 200, 8)


@suite.case("long-chunk")
def a_long_chunk_is_no_hang(build):
    """Three seconds in one chunk, through which the counter moves: nobody calls that dead."""
    with kit.Cluster(build, "split", extra=["prefill:--sim-prefill-speed=600", "node:--chunk=2048"], lease=None) as c:
        states, done = [], threading.Event()

        def watch():
            while not done.wait(0.1):
                states.append((health(c.prefill()), health(c.decode())))

        watcher = threading.Thread(target=watch)
        watcher.start()
        answer = c.post(PATH, body(1900, 4), timeout=30)
        done.set()
        watcher.join()
        check("status", answer.status, 200)
        need(len(states) > 10, "looked often enough", len(states))
        check("health while it computed", set(states), {(200, 200)})


@suite.case("dead-peer")
def one_dead_peer_is_not_mine(build):
    with kit.Cluster(build, "split", prefill=2, decode=2) as c:
        c.supervisor({"do": "kill", "name": "prefill-0"})
        c.supervisor({"do": "kill", "name": "decode-0"})
        until = time.monotonic() + 3
        while time.monotonic() < until:
            for process in (c.decode(1), c.prefill(1), c.router):
                for path in ("/healthz", "/readyz"):
                    check(f"{path} of {process.name}", health(process, path), 200)
            time.sleep(0.1)


def owners(node):
    """What /debug/requests names: requests, and their transfers."""
    found = set()
    for request in kit.get(node.address, "/debug/requests").json()["requests"]:
        need(request["state"] and request["age_seconds"] >= 0 and "reason" in request, "a request's entry", request)
        found.update({request["owner"], request.get("transfer", 0)})
    return found


def sums_hold(c, what):
    """In each node: states sum to the total; what is not free is listed, with owner, age and reason; and each owner is a
    request or a transfer that /debug/requests lists, or a preflight (small numbers)."""
    found = {}
    for node in c.nodes:
        known = owners(node)
        ledgers = list(kit.ledgers_of(kit.get(node.address, "/debug/pages").json()))
        known |= owners(node)  # one may have come, or gone, between the two listings
        need(len(ledgers) >= 3, f"ledgers of {node.name}", ledgers)
        for ledger in ledgers:
            where = f"{what}: {ledger['name']} of {node.name}"
            check(f"{where}: sum of the states", sum(ledger["states"].values()), ledger["total"])
            free = next(iter(ledger["states"].values()))
            check(f"{where}: listed", len(ledger["items"]) + ledger["items_left_out"], ledger["total"] - free)
            check(f"{where}: left out", ledger["items_left_out"], 0)
            for item in ledger["items"]:
                need(item["owner"] and item["reason"] and item["age_seconds"] >= 0, f"{where}: an entry", item)
                need(item["owner"] in known, f"{where}: nobody owns it; known are {known}", item)
                found[node.name, ledger["name"], item["state"]] = found.get((node.name, ledger["name"], item["state"]), 0) + 1
    return found


@suite.case("listings")
def listings_are_the_ledgers(build):
    with kit.Cluster(build, "split", extra=["node:--sim-step=2", "router:--transfer-timeout=6s"]) as c:
        check("at rest", sums_hold(c, "at rest"), {})
        # Running: streams whose client does not read stand still for want of credit.
        wires = [kit.Wire(c.address) for _ in range(3)]
        for wire in wires:
            wire.send(kit.frame("POST", PATH, {**body(300, 2000), "stream": True}))
        wait_for("three rows", lambda: c.decode().metric("baton_batch_rows") == 3)
        found = sums_hold(c, "streams run")
        need(found.get(("decode-0", "pages", "live"), 0) >= 6, "pages of three streams", found)
        # In transfer: prefill has computed, and the slots that it needs do not come.
        arm(c.decode(), "ToPrefill.slots=drop")
        waits = threading.Thread(target=lambda: c.post(PATH, body(900, 4), timeout=30))
        waits.start()
        wait_for("slots are granted", lambda: sums_hold(c, "a transfer waits").get(
            ("decode-0", "landing_slots", "granted"), 0) > 0, 4)
        found = sums_hold(c, "a transfer waits")
        need(found.get(("prefill-0", "pages", "live"), 0) == 4, "pages at prefill", found)
        need(found.get(("prefill-0", "tail_buffers", "used"), 0) == 1, "a tail buffer", found)
        arm(c.decode(), "*=off")
        waits.join()
        for wire in wires:
            wire.reset()
        wait_for("nothing is listed", lambda: not any(c.pages_listed().values()), 14)
        check("after all", sums_hold(c, "after all"), {})


if __name__ == "__main__":
    suite.main()
