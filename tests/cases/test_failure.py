"""Processes that die, are told to end, or lose their parent."""
import os
import signal
import socket
import threading
import time

import kit
from kit import Wire, check, frame, need, wait_for

suite = kit.Suite()
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def loop_script(build):
    return [{"ids": kit.Tokenizer(build).ids(" one two three four five six seven eight nine ten")[0], "loop": True}]


def request(i, stream, n_words=600, **fields):
    return {"messages": [{"role": "user", "content": f"{i} " + "word " * n_words}], "stream": stream, "max_tokens": 40,
            "temperature": 0, "ignore_eos": True, **fields}


def ended(answer):
    """Every request has an end: an answer, a whole stream, or an error that says what it is."""
    if isinstance(answer, kit.Stream):
        need(answer.done or answer.error, "a stream without an end", answer.events[-1:])
        return "good" if answer.done else answer.error["code"]
    return "good" if answer.status == 200 else answer.error()["code"]


def send(c, i, stream, **fields):
    body = request(i, stream, **fields)
    return ended(c.stream(CHAT, body) if stream else c.post(CHAT, body))


@suite.case("FAIL-01")
def prefill_nodes_die(build):
    with kit.Cluster(build, "split", prefill=2, extra=["prefill:--sim-prefill-speed=8000", "node:--chunk=128",
                                                       "decode:--max-sequences=32"], local="auto") as c:
        baseline = c.baseline()
        plain = [c.good_chat(**{"content": request(i, False)["messages"], "max_tokens": 40, "temperature": 0,
                                "ignore_eos": True})["choices"] for i in range(12)]
        pid = c.pids()["decode-0"]
        answers = [None] * 12

        def one(i):
            answers[i] = c.post(CHAT, request(i, False))

        threads = [threading.Thread(target=one, args=(i,)) for i in range(12)]
        for thread in threads:
            thread.start()
        wait_for("transfers", lambda: c.prefill(0).metric("baton_transfers_in_flight") > 0)
        c.supervisor({"do": "kill", "name": "prefill-0"})
        for thread in threads:
            thread.join()
        for i, answer in enumerate(answers):
            check(f"request {i} ({answer.body[:200]!r})", answer.status, 200)
            check("its text", answer.json()["choices"], plain[i])
        check("decode is the same process", c.pids()["decode-0"], pid)
        check("decode is healthy", kit.get(c.decode().address, "/readyz").status, 200)
        # Nodes come and go under load.
        stop, found = threading.Event(), []

        def load(k):
            i = 0
            while not stop.is_set():
                found.append(send(c, 100 * k + i, i % 2 == 0, n_words=100))
                i += 1

        threads = [threading.Thread(target=load, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for i in range(150 if kit.LONG else 3):
            c.supervisor({"do": "start", "name": f"prefill-{i % 2}"})
            time.sleep(1)
            c.supervisor({"do": "kill", "name": f"prefill-{(i + 1) % 2}"})
            time.sleep(1)
        for i in range(2):
            c.supervisor({"do": "kill", "name": f"prefill-{i}"})
        time.sleep(0.5)
        stop.set()
        for thread in threads:
            thread.join()
        need(len(found) > 20, "requests under churn", len(found))
        check("ends of requests under churn", sorted(set(found)), ["good"])
        check("with no prefill node left", c.chat("x", max_tokens=2).status, 200)
        wait_for("all is free", lambda: c.router.metric("baton_requests_live") == 0 and c.decode().metric(
            "baton_requests_running") == 0 and not list(kit.rows_of(kit.get(c.decode().address, "/debug/pages").json())), 3)
        check("decode is the same process", c.pids()["decode-0"], baseline.pids["decode-0"])


@suite.case("FAIL-01-never")
def no_prefill_node_and_no_local(build):
    with kit.Cluster(build, "split") as c:
        c.supervisor({"do": "kill", "name": "prefill-0"})
        wait_for("red", lambda: c.ask("GET", "/readyz").status == 503, 4)
        start = time.monotonic()
        for stream in (False, True):
            check("503", send(c, 1, stream), "no_ready_node")
        kit.in_time("two refusals", start, 1)
        done = c.tool("status")
        check(f"scripts/cluster status: {done.stdout}", (done.returncode, "not ready" in done.stdout), (1, True))
        c.supervisor({"do": "start", "name": "prefill-0"})
        wait_for("good again", lambda: send(c, 1, False) == "good", 8)
        check("scripts/cluster status", c.tool("status").returncode, 0)
    check("scripts/cluster status of none", c.tool("status").returncode, 3)


def shm_files():
    return {name for name in os.listdir("/dev/shm") if "ucx" in name}


def is_free(port):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def runs(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@suite.case("FAIL-03")
def the_parent_is_killed(build):
    before = shm_files()
    cluster = kit.Cluster(build, "split")
    with cluster as c:
        c.good_chat("x", max_tokens=2)
        pids = c.pids()
        ports = [c.address[1], c.join_port]
        supervisor = c.supervisor({"do": "status"})["supervisor"]
        kit.kill(supervisor)
        wait_for("children end with their parent", lambda: not any(runs(pid) for pid in pids.values()), 5)
        wait_for("ports are free", lambda: all(is_free(port) for port in ports), 2)
        check("files in /dev/shm", shm_files() - before, set())
        done = c.tool(*c.up_arguments(*ports))
        check(f"starting again at once: {done.stdout} {done.stderr}", done.returncode, 0)
        c.find()
        c.good_chat("x", max_tokens=2)
        # The router alone: nodes stay, and join the next one.
        nodes = {name: pid for name, pid in c.pids().items() if name != "router"}
        c.supervisor({"do": "kill", "name": "router"})
        time.sleep(0.3)
        check("nodes stay", {name: c.pids()[name] for name in nodes}, nodes)
        c.supervisor({"do": "start", "name": "router"})
        wait_for("they join the next router", lambda: good(c), 10)
        check("the same nodes", {name: c.pids()[name] for name in nodes}, nodes)


def good(c):
    try:
        return c.chat("x", max_tokens=2).status == 200
    except OSError:
        return False


def drains(c, name):
    wait_for(f"{name} is not ready any more", lambda: kit.get(c.processes[name].address, "/readyz").status == 503, 2)


def exit_code(c, name):
    return next(p["exit"] for p in c.supervisor({"do": "status"})["processes"] if p["name"] == name)


def streams_while(c, signalled, max_tokens):
    """Ten streams run; signalled() happens in their midst; their ends."""
    wires = [Wire(c.address) for _ in range(10)]
    for i, wire in enumerate(wires):
        wire.send(frame("POST", CHAT, {**request(i, True, n_words=5), "max_tokens": max_tokens}))
    wait_for("ten rows", lambda: c.decode().metric("baton_batch_rows") == 10)
    signalled()
    streams = kit.together([lambda w=wire: kit.read_stream(w) for wire in wires])
    for wire in wires:
        wire.close()
    return streams


@suite.case("FAIL-04")
def told_to_end(build):
    names = ("prefill-0", "decode-0", "router")
    fast = ["node:--sim-step=5", "router:--grace=2s", "node:--grace=2s"]
    with kit.Cluster(build, "split", script=loop_script(build), extra=fast, local="auto") as c:
        for name in names:
            pid = c.pids()[name]

            def end():
                kit.kill(pid, signal.SIGTERM)
                if name != "prefill-0":
                    drains(c, name)
                if name == "router":
                    answer = c.chat("new", max_tokens=2)
                    check("new work", (answer.status, answer.error()["code"], answer.header("connection")),
                          (503, "draining", "close"))
                    need(answer.header("retry-after"), "Retry-After", answer)
                elif name == "decode-0":
                    wait_for("new work is refused", lambda: c.chat("new", max_tokens=2).status == 503, 2)
            for stream in streams_while(c, end, 100):  # half a second more: within the grace
                stream.check()
                check("finish", stream.finish(), "length")
            ended_well(c, name, 5)
            c.start(name)
    # A minute of generation and two seconds of grace: an error event, no [DONE], and the connection is cut.
    with kit.Cluster(build, "split", script=loop_script(build), extra=fast) as c:
        for name in ("decode-0", "router"):
            pid = c.pids()[name]
            start = time.monotonic()
            for stream in streams_while(c, lambda: kit.kill(pid, signal.SIGTERM), 12000):
                need(not stream.done and not stream.whole and stream.error, "an error event, then a cut", stream.events[-1:])
            kit.in_time("a grace of two seconds", start, 8)
            ended_well(c, name, 5)
            c.start(name)
    # A second signal ends it now.
    with kit.Cluster(build, "split", script=loop_script(build), extra=["node:--sim-step=5", "router:--grace=60s",
                                                                      "node:--grace=60s"], local="auto") as c:
        for name in names:
            pid = c.pids()[name]
            with Wire(c.address) as wire:
                wire.send(frame("POST", CHAT, {**request(0, True, n_words=5), "max_tokens": 12000}))
                wire.head()
                kit.kill(pid, signal.SIGTERM)
                if name != "prefill-0":  # which has nothing to wait for
                    drains(c, name)
                    kit.kill(pid, signal.SIGTERM)
                ended_well(c, name, 2)
            c.start(name)


def ended_well(c, name, seconds):
    wait_for(f"{name} ends", lambda: exit_code(c, name) is not None, seconds)
    check(f"exit code of {name}", exit_code(c, name), 0)


if __name__ == "__main__":
    suite.main()
