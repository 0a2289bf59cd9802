"""Every fault point with every action, against a cluster of real processes: two prefill nodes, two decode nodes and a
router over the sim engine. Needs a build with -Dfault_points=true.

    test_points.py BUILD_DIR                    each point with one of its actions, by turns
    test_points.py BUILD_DIR [PATTERN...]       those that match, as 'put.*', '*=cut' or '*' for all; 'NAME=kill' too
    --clusters N                                so many work at the list at the same time (default: 2)

Before anything goes wrong the answers are taken. Then each point is armed in every process for its next passes, the same
requests run, and each must end: with its answer, or with an error, before its deadline. A stream may end early with an
error; what it had said is the beginning of the answer. Never another token. Then all ledgers are at zero again, in the
same processes unless the action ends one, and the same requests are answered. Landing slots that wait for a
writer to fall silent do so while the next fault is drilled; after the last there is none.
"""
import argparse
import collections
import contextlib
import fnmatch
import os
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cases"))
import kit  # noqa: E402  pylint: disable=wrong-import-position
from kit import check, need, wait_for  # noqa: E402  pylint: disable=wrong-import-position

PATH = "/v1/completions"
DEADLINE_S = 21  # of the options below: both queues, prefill, transfer, generation, and the router's margins
OPTIONS = ["router:--queue-timeout=3s", "router:--prefill-timeout=3s", "router:--transfer-timeout=3s",
           "router:--generation-timeout=3s", "router:--attempts=4", "node:--chunk=256", "node:--pages=400",
           "node:--sim-prefill-speed=200000", "decode:--landing-slots=28", "decode:--slots-per-transfer=4"]
NAMES = ("router", "prefill-0", "prefill-1", "decode-0", "decode-1")
# Points that a request passes only after something else went wrong, and what.
CUT = ["link.receive=cut,n=1"]
ALSO = {"*.hello": CUT, "ToNode.*": CUT, "link.open": CUT, "*.preflight": CUT, "ToPrefill.verified": CUT,
        "From*.failed": ["put.pages=fail,n=1"],
        # Two transfers wait for slots, until their time is over.
        "ToPrefill.cancel": ["ToPrefill.slots=drop,n=1"], "FromPrefill.drained": ["ToPrefill.slots=drop,n=1"]}
REVOKED_S, MOST_REVOKED = 11, 16  # ten seconds and a tick; a dozen slots are left, few enough to be fought for
# Points where passes are rare or a fault must hit several: how often it happens.
MANY = {"ToRouter.status": 12, "FromDecode.step": 3, "compute.loop": 6}


def prompt(i, n):
    return [3 + (i * 7919 + k * 31) % 2000 for k in range(n)]


# Short and long prompts, parts of ids, an output longer than a stream's credit; seeded sampling and greedy.
REQUESTS = [{"prompt": prompt(i, n), "max_tokens": most, "temperature": i % 2, "seed": 5 + i, "ignore_eos": True}
            for i, (n, most) in enumerate([(20, 24), (700, 24), (1300, 24), (300, 200), (17000, 8), (600, 24)])]


def text_of(answer):
    return answer.json()["choices"][0]["text"]


class Drill:
    def __init__(self, cluster):
        self.cluster = cluster
        self.wanted = []
        self.may_cut = False  # the router may be killed: whoever is connected sees that

    def armed(self, name):
        process = self.cluster.processes[name]
        return kit.get(process.address, "/debug/faults").json()

    def arm(self, specs, names=NAMES):
        for name in names:
            body = "\n".join(specs).encode()
            answer = kit.ask(self.cluster.processes[name].address, "POST", "/debug/faults", body)
            check(f"arming {specs} at {name}: {answer.body!r}", answer.status, 200)

    def faults(self, point):
        found = {}
        for name in NAMES:
            try:
                found[name] = self.armed(name)[point]["faults"]
            except (OSError, EOFError, kit.Wrong):
                found[name] = None  # it was ended
        return found

    def ask(self, i, stream):
        """(kind, text): whole, or what came before an error."""
        body = REQUESTS[i]
        if not stream:
            answer = self.cluster.post(PATH, body, timeout=DEADLINE_S + 6)
            if answer.status == 200:
                return "good", text_of(answer)
            return answer.error()["code"], ""
        found = self.cluster.stream(PATH, body, timeout=DEADLINE_S + 6)
        if isinstance(found, kit.Answer):
            return found.error()["code"], ""
        need(found.done or found.error or self.may_cut, "a stream that has no end", found.events[-1:])
        return "good" if found.done else found.error["code"] if found.error else "cut", found.text()

    def leave(self, i, after_s):
        """A client that goes away while its prompt is computed or its answer runs."""
        with contextlib.suppress(OSError), kit.Wire(self.cluster.address) as wire:
            wire.send(kit.frame("POST", PATH, {**REQUESTS[i], "stream": True}))
            time.sleep(after_s)
            wire.reset()

    def leave_late(self):
        """One that has seen the beginning of a long answer: its decode node has to be told, however slow all is."""
        with contextlib.suppress(OSError, EOFError, ValueError), kit.Wire(self.cluster.address, DEADLINE_S) as wire:
            wire.send(kit.frame("POST", PATH, {"prompt": prompt(9, 30), "max_tokens": 2500, "stream": True,
                                               "ignore_eos": True}))
            while b'"text"' not in wire.data and b'"error"' not in wire.data and wire.more():
                pass
            wire.reset()

    def requests(self, what):
        """All at once, each as a stream or whole; returns how they ended."""
        ends = [None] * len(REQUESTS)
        wrong = []

        def one(i):
            start = time.monotonic()
            try:
                stream = i % 2 == 1
                end, text = self.ask(i, stream)
                kit.in_time(f"request {i}, which ended with {end}", start, DEADLINE_S)
                if end == "good":
                    check(f"text of request {i}", text, self.wanted[i])
                else:
                    need(self.wanted[i].startswith(text), f"what request {i} said before {end}", text, self.wanted[i])
                ends[i] = end
            except (kit.Wrong, OSError, EOFError, ValueError) as problem:
                if self.may_cut and isinstance(problem, (OSError, EOFError)):
                    ends[i] = "cut"
                    return
                wrong.append(f"{what}: {type(problem).__name__}: {problem}")

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(REQUESTS))]
        threads.append(threading.Thread(target=self.leave_late))
        threads += [threading.Thread(target=self.leave, args=gone) for gone in ((2, 0.01), (4, 0.03), (4, 0.06), (4, 0.1))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        need(not wrong, "\n".join(wrong))
        return ends

    def free(self, all_of_it):
        """Nothing is held anywhere. Slots that wait for their writer to fall silent may do so while the next fault is
        drilled, unless all_of_it: if they are few, and none waits longer than it may."""
        try:
            also = () if all_of_it else ('state="revoked"',)
            held = {name: {k: v for k, v in gauges.items() if v and
                           ("ledger" not in k or not any(s in k for s in ('state="free"', *also)))}
                    for name, gauges in self.cluster.held().items()}
            held = {name: gauges for name, gauges in held.items() if gauges}
            for name, rows in self.cluster.pages_listed().items():
                waits = [row for row in rows if row["state"] == "revoked" and row["age_seconds"] < REVOKED_S]
                if all_of_it or len(waits) > MOST_REVOKED:
                    waits = []
                rows = [row for row in rows if row not in waits]
                if rows:
                    held.setdefault(name, {})["pages"] = rows[:3]
            if held:
                self.held = held
                return False
            return True
        except (OSError, EOFError, kit.Wrong) as problem:
            self.held = repr(problem)
            return False

    def whole(self):
        """All nodes are joined and all pairs ready."""
        try:
            workers = self.cluster.workers()
        except (OSError, EOFError, kit.Wrong):
            return False
        pairs = [p for w in workers if w["role"] == "decode" for p in w["pairs"] if p["state"] == "ready"]
        return len(workers) == 4 and all(w["state"] == "ready" for w in workers) and len(pairs) == 4

    def settle(self, all_of_it=False):
        for name, process in self.cluster.supervisor_exits().items():
            if process is not None:
                self.cluster.supervisor({"do": "start", "name": name})
        wait_for("all nodes and pairs are ready", self.whole, 15)
        self.cluster.find()
        self.held = None
        try:
            wait_for("all is free", lambda: self.free(all_of_it), 14)
        except kit.Wrong as problem:
            raise kit.Wrong(f"{problem}; held: {self.held}") from None

    def drill(self, point, action, ends_process):
        pids = self.cluster.pids()
        before = self.faults(point)
        n = next((n for pattern, n in MANY.items() if fnmatch.fnmatch(point, pattern)), 1 if ends_process else 2)
        specs = [f"{point}={action},n={n},ms={400 if action == 'delay' else 50}"]
        for pattern, also in ALSO.items():
            if fnmatch.fnmatch(point, pattern):
                specs += also
        self.arm(specs)
        self.may_cut = action == "kill"
        ends = self.requests(f"{point}={action}")
        # Links that were cut are dialled again after a moment; if it was not that kind of link, others are cut.
        again = time.monotonic() + 4 * kit.PATIENCE
        deadline = again + 30 * kit.PATIENCE
        while CUT[0] in specs and time.monotonic() < deadline and self.faults(point) == before:
            time.sleep(0.1)
            if time.monotonic() > again:
                self.arm(["link.receive=cut,after=2,n=1"], NAMES[3:])
                ends += self.requests(f"{point}={action}")  # an idle pair says nothing that could be cut
                again = time.monotonic() + 4 * kit.PATIENCE
        for name in NAMES:
            try:
                self.arm(["*=off"], [name])
            except (OSError, EOFError, kit.Wrong):
                need(ends_process, f"{name} is gone")
        after = self.faults(point)
        fired = sum((after[n] or 0) - (before[n] or 0) for n in NAMES if after[n] is not None)
        died = [name for name in NAMES if after[name] is None]
        need(fired > 0 or died, f"{point}={action} never happened")
        self.settle()
        self.may_cut = False
        if not ends_process:
            check("processes", self.cluster.pids(), pids)
        # A pair that failed is shunned for a moment, and a busy machine may lose another heartbeat: soon, not at once.
        wait_for(f"all requests are good after {point}={action}", lambda: set(self.requests("afterwards")) == {"good"}, 30,
                 every=0.5)
        return ends, fired


class Cluster(kit.Cluster):
    def supervisor_exits(self):
        return {p["name"]: p["exit"] for p in self.supervisor({"do": "status"})["processes"]}


def table(build):
    done = subprocess.run([os.path.join(build, "decode", "baton-decode"), "--list-fault-points"], capture_output=True,
                          text=True, timeout=30, check=True)
    return [(line.split()[0], line.split()[1].split(",")) for line in done.stdout.splitlines()]


def chosen(points, patterns):
    """[(point, action)] of what was asked for."""
    for at, (point, actions) in enumerate(points):
        lasting = [a for a in actions if a not in ("kill", "stop")]
        for action in actions:
            # What ends a process costs a restart: by name only. Stopping one is scripts/drill's.
            if action == "stop" or (action == "kill" and not any(p.endswith("=kill") for p in patterns)):
                continue
            if not patterns and action != lasting[at % len(lasting)]:
                continue
            if patterns and not any(fnmatch.fnmatch(f"{point}={action}", p) or fnmatch.fnmatch(point, p)
                                    for p in patterns):
                continue
            yield point, action


class Shift:
    """Clusters that work at the same list, each a fault at a time: most of a fault's time is waiting for clocks."""

    def __init__(self, build, jobs):
        self.build, self.jobs, self.lock = build, collections.deque(jobs), threading.Lock()
        self.n, self.failed = 0, 0

    def tell(self, good, text, told=()):
        with self.lock:
            self.n += 1
            self.failed += not good
            lines = [f"{'ok' if good else 'not ok'} {self.n} - {text}", *("# " + line for line in told)]
            print("\n".join(lines), flush=True)

    def next(self):
        with self.lock:
            return self.jobs.popleft() if self.jobs else None

    def one(self, cluster, drill, point, action):
        """False: the cluster does not come back."""
        start = time.monotonic()
        try:
            ends_process = action in ("kill", "stop") or (point, action) == ("compute.step", "fail")
            ends, fired = drill.drill(point, action, ends_process)
            self.tell(True, f"{point}={action} fired {fired}, ends {sorted(set(ends))} ({time.monotonic() - start:.1f} s)")
            return True
        except (kit.Wrong, OSError, EOFError, KeyError, ValueError, subprocess.SubprocessError) as problem:
            drill.may_cut = False
            told = f"{type(problem).__name__}: {problem}".splitlines()[:40]
            if os.environ.get("CASES_VERBOSE"):
                told += cluster.log().splitlines()[-150:]
            try:
                for name in NAMES:
                    with contextlib.suppress(OSError, EOFError, kit.Wrong):
                        drill.arm(["*=off"], [name])
                drill.settle()
            except (kit.Wrong, OSError, EOFError, KeyError, ValueError):
                told += ["the cluster does not come back; its log ends so:", *cluster.log().splitlines()[-60:]]
                self.tell(False, f"{point}={action}", told)
                return False
            self.tell(False, f"{point}={action}", told)
            return True

    def work(self):
        try:
            with Cluster(self.build, "split", prefill=2, decode=2, extra=OPTIONS, lease=None) as cluster:
                drill = Drill(cluster)
                drill.settle()
                for i in range(len(REQUESTS)):
                    drill.wanted.append(text_of(cluster.post(PATH, REQUESTS[i])))
                check("answers that differ", len(set(drill.wanted)), len(REQUESTS))
                job = self.next()
                while job and self.one(cluster, drill, *job):
                    job = self.next()
                drill.settle(all_of_it=True)
            lines = cluster.last_log.splitlines()
            for i, line in enumerate(lines):
                if "Sanitizer" in line or "runtime error:" in line or "ssertion" in line:
                    self.tell(False, "log", lines[i:i + 60])
                    break
        except (kit.Wrong, OSError, EOFError, KeyError, ValueError, subprocess.SubprocessError) as problem:
            self.tell(False, "a cluster", f"{type(problem).__name__}: {problem}".splitlines()[:60])

    def run(self, n_clusters):
        threads = [threading.Thread(target=self.work) for _ in range(min(n_clusters, len(self.jobs)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for point, action in self.jobs:
            self.tell(False, f"{point}={action}", ["no cluster is left to do it on"])
        print(f"1..{self.n}", flush=True)
        return 1 if self.failed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("patterns", nargs="*")
    parser.add_argument("--clusters", type=int, default=2, help="that work at the same time (default: 2)")
    args = parser.parse_args()
    build = os.path.abspath(args.build)
    kit.lost.watch(build)
    points = table(build)
    for role in ("router", "prefill"):  # one table in all programs
        done = subprocess.run([os.path.join(build, role, f"baton-{role}"), "--list-fault-points"], capture_output=True,
                              text=True, timeout=30, check=True)
        check(f"points of {role}", [line.split()[0] for line in done.stdout.splitlines()], [p for p, _ in points])
    sys.exit(Shift(build, chosen(points, args.patterns)).run(args.clusters))


if __name__ == "__main__":
    main()
