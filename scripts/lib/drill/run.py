"""One run of a scenario: a load, what is done meanwhile, and the verdict.

What is promised, in the time that the machine gave (tests/lost.h), and so what is a broken bound:

    a death is seen by everyone who talks to the dead in 1 s, a stop or a cut in 2 s
    no token is wrong, no answer has two ids, wrong usage or wrong logprobs
    every request has an answer or an error inside its deadline
    at idle no ledger holds anything: no page, slot or request is leaked
    no descriptor, thread or shared memory is left behind
    where another node exists, no client sees an error
    every node and every pair is ready again once it may be
"""
import contextlib
import dataclasses
import os
import time

import kit

from . import load as clients
from .cluster import says_gone

BOUNDS_S = {"death": 1.0, "stop": 2.0, "cut": 2.0, "drain": 1.0}
NEVER = float("inf")
RECOVERY_S = 20.0  # a pair that failed is tried again after at most 5 s, and a half


@dataclasses.dataclass
class Seen:
    kind: str
    name: str
    since: float        # wall clock
    seconds: dict       # {observer: s or None}
    lost: dict = dataclasses.field(default_factory=dict)  # {observer: s of them that the machine did not give}, beyond the bound

    def late(self):
        """{observer: s or None} of those that saw it late, though the machine gave them the time."""
        bound, found = BOUNDS_S[self.kind], {}
        for observer, seconds in self.seconds.items():
            if seconds is not None and seconds > bound:
                start = self.since + time.monotonic() - time.time()
                self.lost[observer] = kit.lost.between(start, start + seconds)
            if seconds is None or seconds > bound + self.lost.get(observer, 0.0):
                found[observer] = seconds
        return found

    def worst(self):
        return max((NEVER if s is None else s for s in self.seconds.values()), default=0.0)


@dataclasses.dataclass
class Result:
    scenario: str
    engine: str
    seconds: float = 0.0
    requests: int = 0
    outcomes: dict = dataclasses.field(default_factory=dict)
    handoffs: int = 0
    detection: float = 0.0        # the worst, of all who had to see it
    recovery: float = 0.0         # from "it may come back" to every node and pair ready
    stall: float = 0.0            # the longest silence inside an answer that went on
    idle: float = 0.0             # from the last answer to empty ledgers
    wrong: int = 0
    leaked: int = 0
    unanswered: int = 0
    counters: dict = dataclasses.field(default_factory=dict)  # of the processes that lived through it
    faults: dict = dataclasses.field(default_factory=dict)    # of random ones, how many of each kind
    grown: dict = dataclasses.field(default_factory=dict)
    load_average: float = 0.0
    lost: float = 0.0             # seconds of the run that the machine did not give
    broken: list = dataclasses.field(default_factory=list)
    excused: list = dataclasses.field(default_factory=list)   # beyond a bound, by no more than the machine lost
    seen: list = dataclasses.field(default_factory=list)
    skipped: str = ""

    def carried(self):
        """Answers that had begun and went on at another node, as a router that lived through it counts them."""
        return int(self.counters.get("baton_failovers_total", 0))

    def breach(self, text):
        self.broken.append(text)


def as_dict(result):
    """For JSON, which knows no infinity."""
    def clean(value):
        if isinstance(value, dict):
            return {key: clean(one) for key, one in value.items()}
        if isinstance(value, list):
            return [clean(one) for one in value]
        return None if value == NEVER else round(value, 3) if isinstance(value, float) else value

    return clean(dataclasses.asdict(result))


class Run:
    """What a scenario's function is given."""

    def __init__(self, cluster, load, rng, result):
        self.cluster, self.load, self.rng, self.result = cluster, load, rng, result
        self.net = cluster.net
        self.pending = []  # faults that have yet to be looked up in the log: (kind, name, time, observers)

    def pick(self, role):
        """A node of the role that is not down."""
        return self.rng.choice([n for n in self.cluster.names if n.startswith(role) and n not in self.cluster.down])

    def pick_generating(self, seconds=20.0):
        """The decode node that generates the most rows now; waits until there is one."""
        deadline = time.monotonic() + seconds
        while True:
            rows = {name: n for name, n in self.cluster.batch_rows().items() if name not in self.cluster.down}
            if any(rows.values()):
                return max(sorted(rows), key=rows.get)
            if time.monotonic() > deadline:
                raise kit.Wrong(f"no decode node generates anything in {seconds:.0f} s")
            time.sleep(0.01)

    def answers(self):
        with self.load.lock:
            return sum(verdict.is_answer() for verdict in self.load.verdicts)

    def sleep(self, low, high=None):
        time.sleep(self.rng.uniform(low, high or low))

    # ---- faults

    def fault(self, kind, name, act, observers=None):
        """Does it, and remembers who has to notice."""
        observers = self.cluster.observers(name) if observers is None else observers
        when = act(name)
        self.pending.append((kind, name, when, observers))
        return when

    def kill(self, name):
        return self.fault("death", name, self.cluster.kill)

    def stop(self, name):
        return self.fault("stop", name, self.cluster.stop)

    def wake(self, name):
        """Continues a stopped one, and waits until all is whole."""
        return self.whole_since(self.cluster.wake(name))

    def start(self, name):
        return self.whole_since(self.cluster.start(name))

    def whole_since(self, when):
        seconds = self.cluster.wait_ready(RECOVERY_S) - when
        self.result.recovery = max(self.result.recovery, seconds)
        return seconds

    def term(self, name):
        """Drains it; its exit code must be 0. The router is to stop choosing it at once."""
        when = self.cluster.term(name)
        if name != "router":
            self.expect_line("drain", name, when, "router", rf"registry: {name} (drains|\(\w+\) is gone)")
        code, seconds = self.cluster.wait_ended(name, 40)
        if code != 0:
            self.result.breach(f"{name} ended with {code} after SIGTERM")
        return seconds

    def expect_line(self, kind, name, since, observer, pattern, wait_s=3.0):
        start = time.monotonic()
        while True:
            self.cluster.logs.read()
            seconds = self.cluster.logs.first(observer, pattern, since)
            if seconds is not None or kit.lost.over(start, wait_s):
                return self.note(Seen(kind, name, since, {observer: seconds}))
            time.sleep(0.05)

    def wait_worker(self, name, pid, seconds=8.0):
        """Waits until the node of this name is ready, and is that process."""
        def found():
            return any((w["id"], w["pid"], w["state"]) == (name, pid, "ready") for w in self.cluster.worker_list())
        kit.wait_for(f"{name} is ready as process {pid}", found, seconds)

    def note_line(self, kind, told, since, observer, name):
        """As expect_line, for what the log has to hold by now."""
        self.note(Seen(kind, told, since, {observer: self.cluster.logs.first(observer, says_gone(observer, name), since)}))

    def note(self, seen):
        self.result.seen.append(seen)
        self.result.detection = max(self.result.detection, seen.worst())
        late = seen.late()
        for observer, lost in seen.lost.items():
            if observer not in late:
                self.result.excused.append(f"{seen.kind} of {seen.name} seen by {observer} after "
                                           f"{seen.seconds[observer]:.2f} s, of which the machine lost {lost:.2f}: within")
        if late:
            told = ", ".join(f"{o} {'never' if s is None else f'after {s:.2f} s'}" for o, s in late.items())
            self.result.breach(f"{seen.kind} of {seen.name} seen late: {told}")

    def look(self):
        """Looks up in the log who noticed what."""
        for kind, name, when, observers in self.pending:
            self.note(Seen(kind, name, when, self.cluster.seen(name, when, observers)))
        self.pending = []


def grown(before, now):
    """{"name what": by how much} of processes that are the same ones."""
    found = {}
    for name, row in now.items():
        was = before.get(name)
        if was and was["pid"] == row["pid"]:
            for what in ("descriptors", "threads", "rss_bytes"):
                found[f"{name} {what}"] = row[what] - was[what]
    return found


SLACK = {"descriptors": 3, "threads": 8, "rss_bytes": 64 << 20}  # gRPC's pools of threads breathe


def settle(cluster, before, result, sanitized):
    """Waits for idle, then compares ledgers and resources."""
    held, result.idle = cluster.leaked()
    result.leaked = len(held)
    if held:
        result.breach(f"not free at idle: {'; '.join(held[:6])}")
    start = time.monotonic()
    while True:
        result.grown = grown(before, cluster.resources())
        slack = {**SLACK, "rss_bytes": SLACK["rss_bytes"] + cluster.first_touch_bytes}
        over = {key: n for key, n in result.grown.items() if n > slack[key.split()[1]] and not (
            sanitized and key.endswith("rss_bytes"))}
        if not over or kit.lost.over(start, 5):
            break
        time.sleep(0.1)
    for key, n in over.items():
        result.breach(f"{key} grew by {n}")


# A slow engine is asked until it has given so many whole answers, or for so long.
ENOUGH, ENOUGH_S = {"sim": 0, "cpu": 20}, 15.0


def held_up(lines, since, spared):
    """Names of the processes that stood still for half a lease without our doing: the machine's, and what clients see of it
    is its too, for such a node joins anew. {name: how it said so}"""
    return {line.name: line.text for line in lines
            if line.t >= since and line.name not in spared and "this process stood still" in line.text}


def judge(result, verdicts, allow, held=()):
    """Counts; whatever is not in `allow` is a breach, but where the machine held processes up for longer than they may."""
    for verdict in verdicts:
        name = verdict.outcome + (" " + verdict.code if verdict.code else "")
        result.outcomes[name] = result.outcomes.get(name, 0) + 1
        result.requests += 1
        result.handoffs += verdict.outcome in ("right", "wrong")
        result.stall = max(result.stall, verdict.stall)
        if verdict.outcome == "wrong":
            result.wrong += max(1, verdict.wrong)
            result.breach("; ".join(verdict.other)[:700])
        elif verdict.outcome == "unanswered":
            result.unanswered += 1
        elif verdict.outcome in ("error", "cut", "refused") and verdict.outcome not in allow and name not in allow:
            if held and name in ("error no_ready_node", "error attempts_exhausted"):
                result.excused.append(f"a client saw {name!r}: the machine held up {', '.join(sorted(held))}, "
                                      "who joined anew")
                continue
            result.breach(f"a client saw {name!r} after {verdict.end - verdict.start:.2f} s")
    if result.unanswered:
        result.breach(f"{result.unanswered} requests had neither answer nor error in time")


def run_scenario(scenario, cluster, engine, mix, rng, n_clients, seed):
    """Runs it once on a cluster that is whole."""
    result = Result(scenario.name, engine)
    start, began = time.monotonic(), time.time()
    cluster.touched = set()
    cluster.logs.read()
    n_bad = len(cluster.logs.bad)
    before, counted = cluster.resources(), cluster.counters()
    load = clients.Load(cluster.address, mix, n_clients, seed, scenario.pause, clients.DEADLINE_S[engine])
    run = Run(cluster, load, rng, result)
    try:
        with load:
            run.sleep(0.7, 1.2)
            scenario.function(run)
            run.sleep(0.3)
            until = time.monotonic() + ENOUGH_S
            while run.answers() < ENOUGH[engine] and time.monotonic() < until and scenario.leave_share == 0:
                time.sleep(0.05)
        run.whole_since(time.time())
        settle(cluster, before, result, cluster.sanitized)
    except kit.Skip as reason:
        result.skipped = str(reason)
        return result
    except (kit.Wrong, OSError, EOFError) as problem:
        result.breach(f"{type(problem).__name__}: {problem}")
        with contextlib.suppress(kit.Wrong, OSError, EOFError):
            bring_back(cluster)
    result.counters = {name: n - counted[name] for name, n in cluster.counters().items() if n > counted[name]}
    run.look()
    result.lost = kit.lost.between(start)
    held = held_up(cluster.logs.read(), began, cluster.touched) if result.lost > 0.5 else {}
    judge(result, load.verdicts, scenario.allow, held)
    for line in cluster.logs.bad[n_bad:]:
        result.breach(line)
    if scenario.carries and not result.counters.get("baton_failovers_total"):
        result.breach("no answer that had begun was carried on elsewhere: the scenario shows nothing")
    if not any(name.startswith("right") for name in result.outcomes):
        result.breach("not one request was answered: the scenario shows nothing")
    result.seconds = time.monotonic() - start
    result.load_average = os.getloadavg()[0]
    return result


def bring_back(cluster):
    """After a scenario that broke off: everything runs again, for the next."""
    if cluster.net:
        cluster.net.heal()
    for name in list(cluster.down):
        cluster.wake(name)
    for process in cluster.supervisor({"do": "status"})["processes"]:
        if process["exit"] is not None:
            cluster.start(process["name"])
    cluster.wait_ready(30)
