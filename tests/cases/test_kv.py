"""The KV cache on its way: cancels in every gap, pairs that do not fit, twins, prefill nodes that refuse."""
import contextlib
import json
import os
import random
import shutil
import struct
import tempfile
import threading
import time

import kit
from kit import Daemon, Wire, check, frame, need, wait_for

suite = kit.Suite()
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

# One landing slot a transfer and prompts of several chunks: transfers take their time.
slow = suite.cluster(layouts=("split", "lone"), extra=[
    "prefill:--sim-prefill-speed=20000", "decode:--sim-prefill-speed=20000", "decode:--landing-slots=2",
    "decode:--slots-per-transfer=1", "node:--chunk=256", "node:--pages=64", "prefill:--queue=256", "decode:--queue=256"])


def held(c):
    return any(c.pages_listed().values()) or c.router.metric("baton_requests_live") or any(
        node.metric("baton_requests_queued") + node.metric("baton_requests_running") +
        node.metric("baton_transfers_in_flight") for node in c.nodes)


@slow("KV-02")
def cancels_in_every_gap(c):
    rng = random.Random(50425)
    n_rounds, n, seconds = (4, 300, 60) if kit.LONG else (3, 100, 1.5)
    for round_i in range(n_rounds):
        wires = [Wire(c.address) for _ in range(n)]
        for i, wire in enumerate(wires):
            wire.send(frame("POST", CHAT, {"messages": [{"role": "user", "content": f"{round_i} {i} " + "word " * 1900}],
                                           "max_tokens": 50, "stream": i % 2 == 0}))
        # each client leaves at a moment of its own; the last ones while much still waits
        end = time.monotonic() + seconds
        rng.shuffle(wires)
        for i, wire in enumerate(wires):
            time.sleep(max(0.0, 2 * (end - time.monotonic()) / (n - i) * rng.random()))
            if rng.random() < 0.5:
                wire.reset()
            else:
                wire.close()
        wait_for("all pages are free, with no new traffic", lambda: not held(c), 2)
        start = time.monotonic()
        c.good_chat("probe", max_tokens=2)
        kit.in_time("the probe", start, 2)
    check("failed", c.router.metric("baton_requests_failed_total"), 0)


# ------------------------------------------------------------------------------------------------ KV-03

pair = suite.cluster(layouts=("split",), local="auto")


@pair("KV-03")
def pairs_that_do_not_fit(c):
    """A prefill node of another layout: refused when it says hello, with the values of both, and never used."""
    fits = c.workers()[0]["fingerprint"]
    for option in ("--sim-page-bytes=16384", "--sim-tail-bytes=32768"):
        with Daemon(c.build, "prefill", "--node-id=odd", f"--router=127.0.0.1:{c.join_port}", option) as odd:
            def why():
                rows = {w["id"]: w for w in c.workers()}
                decode = rows["decode-0"]
                states = [p for p in decode["pairs"] if p["prefill"] == "odd"]
                text = odd.said() + c.log()
                return text if ("fingerprint" in odd.said() and "fingerprint" in c.log() and not any(p["state"] == "ready" for p in states)) else None
            text = wait_for("a refusal", why, 6)
            need(fits[:8] in text, "our fingerprint is named", text[-1500:])
            need(fits[:8] in odd.said(), "to both sides", odd.said()[-1500:])
            for i in range(5):
                c.good_chat(f"x {i}", max_tokens=2)
            need(all(p["state"] != "ready" for w in c.workers() if w["role"] == "decode" for p in w["pairs"]
                     if p["prefill"] == "odd"), "the pair never becomes ready", c.workers())
            check("readiness", c.ask("GET", "/readyz").status, 200)
        wait_for("the odd one is gone", lambda: "odd" not in {w["id"] for w in c.workers()}, 5)


@suite.case("KV-03-red")
def red_when_nothing_else_serves(build):
    with kit.Cluster(build, "split") as c:
        c.supervisor({"do": "kill", "name": "prefill-0"})
        with Daemon(build, "prefill", "--node-id=odd", f"--router=127.0.0.1:{c.join_port}", "--sim-page-bytes=16384") as odd:
            wait_for("red", lambda: c.ask("GET", "/readyz").status == 503, 4)
            odd.says("fingerprint", 6)
            time.sleep(0.5)
            answer = c.ask("GET", "/readyz")
            check("still red", answer.status, 503)
            need(answer.json()["reasons"], "and it says why", answer)
            start = time.monotonic()
            answer = c.chat("x", max_tokens=2)
            check("a request", (answer.status, answer.error()["code"]), (503, "no_ready_node"))
            kit.in_time("a refusal", start, 1)


@suite.case("KV-03-revision")
def another_revision_of_the_model(build):
    """One weight of one tensor differs: everything has the same shape, and the pair is refused all the same."""
    patient = ["router:--lease=30s", "node:--lease=30s"]  # a sanitised build takes seconds for a chunk
    with tempfile.TemporaryDirectory() as folder, kit.Cluster(
            build, "split", engine="model", local="auto", extra=[*patient, "node:--max-context=2048", "node:--pages=32"]) as c:
        model = os.path.join(folder, "baton-tiny")
        shutil.copytree(kit.TINY, model)
        shard = os.path.join(model, "model-00002-of-00002.safetensors")
        with open(shard, "r+b") as file:
            header_bytes, = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(header_bytes))
            begin = min(t["data_offsets"][0] for name, t in header.items() if name != "__metadata__")
            file.seek(8 + header_bytes + begin)
            byte, = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
        with Daemon(build, "prefill", "--engine=model", f"--model={model}", "--node-id=odd", "--lease=30s",
                    "--max-context=2048", "--pages=32", f"--router=127.0.0.1:{c.join_port}") as odd:
            odd.says("fingerprint", 20)
            decode = next(w for w in c.workers() if w["role"] == "decode")
            need(all(p["state"] != "ready" for p in decode["pairs"] if p["prefill"] == "odd"), "never ready", decode)
            need(decode["fingerprint"][:8] in odd.said(), "both values are named", odd.said()[-1500:])
            wait_for("by decode too", lambda: "fingerprint" in c.log(), 10)


@suite.case("KV-03-decode")
def decode_nodes_are_of_one_checkpoint(build):
    """A second decode node of another checkpoint does not join; it takes over only what begins after the first has left."""
    with kit.Cluster(build, "lone", extra=["node:--sim-step=20"]) as c:
        before = c.good_chat("x", max_tokens=2)["system_fingerprint"]
        ours = c.workers()[0]["fingerprint"]
        with Daemon(build, "decode", "--node-id=odd", f"--router=127.0.0.1:{c.join_port}", "--sim-page-bytes=16384",
                    "--sim-step=20") as odd:
            odd.says("fingerprint", 6)
            need(ours in odd.said() and ours in c.log(), "both values are named", odd.said()[-1500:])
            need("odd" not in {w["id"] for w in c.workers()}, "it did not join", c.workers())
            made = c.decode().metric("baton_tokens_generated_total")

            def end():
                wait_for("it runs", lambda: c.decode().metric("baton_tokens_generated_total") > made + 10)
                c.supervisor({"do": "kill", "name": "decode-0"})
            stream, _ = kit.together([lambda: c.chat_stream("y", max_tokens=2000, timeout=60), end])
            need(not stream.done and stream.error, "the answer is not ended by another model", stream.events[-1:])
            need(stream.error["code"] in ("no_ready_node", "attempts_exhausted"), "and says why", stream.error)
            wait_for("the other takes over", lambda: c.ask("GET", "/readyz").status == 200, 10)
            after = c.good_chat("x", max_tokens=2)["system_fingerprint"]
            need(after != before, "answers say whose they are", (before, after))


# ------------------------------------------------------------------------------------------------ KV-06

twins = suite.cluster(extra=["node:--pages=40", "decode:--max-sequences=8", "decode:--queue=256", "prefill:--queue=256"])


@twins("KV-06")
def twins_at_once(c):
    prefix = [5 + i % 90 for i in range(512)]
    prompts = [prefix + [10 + i] for i in range(32)]
    alone = [c.good_completion(p, max_tokens=8, temperature=0)["choices"][0]["text"] for p in prompts]
    check("answers differ by the last id", len(set(alone)), 32)
    for _ in range(20 if kit.LONG else 5):
        gate = threading.Barrier(32)

        def one(i):
            body = {"prompt": prompts[i], "max_tokens": 8, "temperature": 0}
            with Wire(c.address) as wire:
                gate.wait()
                wire.send(frame("POST", COMPLETIONS, body))
                answer = wire.answer()
            check(f"status ({answer.body[:200]!r})", answer.status, 200)
            return answer.json()["choices"][0]["text"]

        check("all as they were alone", kit.together([lambda i=i: one(i) for i in range(32)]), alone)


# ------------------------------------------------------------------------------------------------ KV-07


@suite.case("KV-07")
def prefill_refuses(build):
    for options, what in ((["prefill:--max-context=512", "decode:--max-context=4096"], "a smaller limit"),
                          (["prefill:--pages=2", "decode:--pages=64"], "too few pages")):
        for local in ("never", "auto"):
            with kit.Cluster(build, "split", extra=options, local=local) as c:
                baseline = c.baseline()
                for stream in (False, True):
                    start = time.monotonic()
                    answer = (c.chat_stream if stream else c.chat)("word " * 900, max_tokens=4)
                    kit.in_time(f"{what}: an answer", start, 1.5)
                    if local == "auto":
                        need(isinstance(answer, kit.Stream) or answer.status == 200, f"{what}: decode prefills itself", answer)
                    else:
                        need(isinstance(answer, kit.Answer) and answer.status in (400, 503), f"{what}: refused", answer)
                        answer.error()
                baseline.check()


@suite.case("KV-07-half")
def prefill_fails_half_way(build):
    """Its engine fails in the midst of a prompt, of which half the pages are in decode's landing area already."""
    if not kit.has_fault_points(build):
        raise kit.Skip("this build has no fault points")
    for local in ("auto", "never"):
        for stream in (False, True):
            with kit.Cluster(build, "split", local=local, extra=[
                    "node:--chunk=256", "prefill:--sim-prefill-speed=20000",
                    "prefill:--fault-point=compute.chunk=fail,after=4"]) as c:
                parcels = c.decode().metric("baton_parcels_total")
                start = time.monotonic()
                answer = (c.chat_stream if stream else c.chat)("word " * 1900, max_tokens=4, ignore_eos=True)
                kit.in_time("an answer", start, 2)
                need(c.decode().metric("baton_parcels_total") > parcels, "half of it had come")
                if local == "never":
                    need(isinstance(answer, kit.Answer), "an error", answer)
                    need((answer.status, answer.error()["code"]) in ((503, "attempts_exhausted"), (503, "no_ready_node")),
                         "a true reason", answer)
                    check("tokens", c.decode().metric("baton_tokens_generated_total"), 0)
                elif stream:
                    answer.check()
                else:
                    check(f"decode computes it itself ({answer.body[:200]!r})", answer.status, 200)
                if c.pids()["prefill-0"] is None:
                    del c.processes["prefill-0"]  # an engine that failed is not trusted again: the node has ended
                wait_for("all is free", lambda: not held(c), 3)


@suite.case("KV-07-drain")
def prefill_drains_out_of_time(build):
    """SIGTERM to the prefill node, with a grace that runs out in the middle of a prompt."""
    with kit.Cluster(build, "split", extra=["prefill:--sim-prefill-speed=1000", "prefill:--grace=1s"], local="auto") as c:
        pid = c.pids()["prefill-0"]
        with Wire(c.address) as wire:
            wire.send(frame("POST", CHAT, {"messages": [{"role": "user", "content": "word " * 6000}], "max_tokens": 4}))
            wait_for("it computes", lambda: c.prefill().metric("baton_requests_running") == 1)
            start = time.monotonic()
            kit.kill(pid, 15)
            answer = wire.answer()
            check(f"another attempt serves it ({answer.body[:200]!r})", answer.status, 200)
            kit.in_time("another attempt", start, 4)
        wait_for("the node ends", lambda: c.pids()["prefill-0"] is None, 5)
        with contextlib.suppress(KeyError):
            del c.processes["prefill-0"]
        wait_for("all is free", lambda: not held(c), 3)


if __name__ == "__main__":
    suite.main()
