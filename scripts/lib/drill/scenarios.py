"""The scenarios: what is done to a cluster while clients ask."""
import dataclasses
import signal
import time

import kit

SCENARIOS = {}


@dataclasses.dataclass
class Scenario:
    name: str
    text: str
    function: object
    config: str = "sim"          # which cluster it wants
    sim_only: bool = False       # it asks for what the recorded answers of the model do not have
    answer: tuple = (4, 60)      # tokens asked for
    prompt: tuple = (300, 2000)
    leave_share: float = 0.0
    clients: int = 10
    pause: float = 0.03
    allow: tuple = ()            # outcomes of clients that are no breach: "error", "error CODE", "cut", "refused"
    plain: bool = False
    carries: bool = False        # it shows nothing unless an answer that had begun went on elsewhere


def scenario(name, text, **options):
    def keep(function):
        SCENARIOS[name] = Scenario(name, text, function, **options)
        return function
    return keep


ROUTER_FAULT = ("error", "cut", "refused")

# ------------------------------------------------------------------------------------------------ death


@scenario("prefill-killed", "kill -9 of a prefill node; it comes back under its name and port")
def prefill_killed(run):
    name = run.pick("prefill")
    run.kill(name)
    run.sleep(0.5, 1.5)
    run.start(name)


@scenario("decode-killed", "kill -9 of a decode node amid long streams; they go on elsewhere",
          answer=(60, 250), carries=True)
def decode_killed(run):
    name = run.pick_generating()
    run.kill(name)
    run.sleep(0.5, 1.5)
    run.start(name)


@scenario("killed-and-back", "kill -9 and an immediate start under the same name and port, a prefill and a decode node",
          answer=(20, 120))
def killed_and_back(run):
    for role in ("prefill", "decode"):
        name = run.pick(role)
        run.kill(name)
        run.start(name)


@scenario("pair-killed", "kill -9 of a prefill and a decode node at once", answer=(20, 120))
def pair_killed(run):
    names = [run.pick("prefill"), run.pick("decode")]
    for name in names:
        run.kill(name)
    # Neither can tell that the other died.
    for at, (kind, name, when, observers) in enumerate(run.pending):
        run.pending[at] = (kind, name, when, [o for o in observers if o not in names])
    run.sleep(0.5, 1.5)
    for name in names:
        run.cluster.start(name)
    run.whole_since(time.time())


@scenario("router-killed", "kill -9 of the router; it comes back, nodes join it again",
          allow=ROUTER_FAULT)
def router_killed(run):
    run.kill("router")
    run.sleep(0.3, 1.0)
    run.start("router")


@scenario("flapping", "one prefill and one decode node are killed and started again five times in a row",
          answer=(20, 120), allow=("error attempts_exhausted",))
def flapping(run):
    names = [run.pick("prefill"), run.pick("decode")]
    for i in range(10):
        name = names[i % 2]
        run.cluster.kill(name)  # some pairs are not up yet: there is nothing to be seen
        run.cluster.start(name)
        run.sleep(0.3, 0.8)
    run.whole_since(time.time())


@scenario("all-decode-killed", "kill -9 of every decode node: requests end with an error, and soon; then all come back",
          answer=(20, 120), allow=("error",))
def all_decode_killed(run):
    all_killed(run, "decode")


@scenario("all-prefill-killed", "kill -9 of every prefill node, with local prefill off", allow=("error",))
def all_prefill_killed(run):
    all_killed(run, "prefill")


def all_killed(run, role):
    names = [name for name in run.cluster.names if name.startswith(role)]
    for name in names:
        run.kill(name)
    run.sleep(1.0, 2.0)
    for name in names:
        run.cluster.start(name)
    run.whole_since(time.time())


# ------------------------------------------------------------------------------------------------ stop


@scenario("prefill-stopped", "SIGSTOP of a prefill node for 3 s, then SIGCONT")
def prefill_stopped(run):
    stopped(run, run.pick("prefill"))


@scenario("decode-stopped", "SIGSTOP of a decode node for 3 s amid long streams, then SIGCONT",
          answer=(60, 250), carries=True)
def decode_stopped(run):
    stopped(run, run.pick_generating())


def stopped(run, name):
    run.stop(name)
    run.sleep(2.6, 3.4)
    run.wake(name)


@scenario("late-writer", "SIGSTOP of a prefill node for 12 s amid transfers: its slots are others' when it wakes",
          clients=16, pause=0.01)
def late_writer(run):
    name = run.pick("prefill")
    run.stop(name)
    time.sleep(12.0)
    run.wake(name)
    run.sleep(1.0)


@scenario("router-stopped", "SIGSTOP of the router for 3 s, then SIGCONT: nodes leave it and join again",
          allow=ROUTER_FAULT)
def router_stopped(run):
    stopped(run, "router")


@scenario("short-pause", "SIGSTOP for 0.3 s, a prefill and a decode node: nothing is lost, nobody is taken for dead")
def short_pause(run):
    since = time.time()
    for role in ("prefill", "decode"):
        name = run.pick(role)
        run.cluster.stop(name)
        time.sleep(0.3)
        run.cluster.wake(name)
        run.sleep(0.3)
    gone = [line.text for line in run.cluster.logs.read()
            if line.t >= since and (" is gone" in line.text or "link lost" in line.text)]
    if gone:
        run.result.breach(f"a pause of 0.3 s was taken for death: {gone[:3]}")


@scenario("long-pause", "SIGSTOP for 1 s, below the lease: the node finds it was paused and joins anew",
          answer=(20, 120))
def long_pause(run):
    for role in ("prefill", "decode"):
        name = run.pick(role)
        run.cluster.stop(name)
        time.sleep(1.0)
        when = run.cluster.wake(name)
        start = time.monotonic()
        while run.cluster.logs.first(name, "node: this process stood still", when) is None:
            if kit.lost.over(start, 3):
                run.result.breach(f"{name} did not notice that it was paused for 1 s")
                break
            time.sleep(0.02)
            run.cluster.logs.read()
        run.whole_since(when)


@scenario("twin", "a stopped node's name is taken by another process; it wakes and is refused until the other dies",
          answer=(20, 120))
def twin(run):
    name = run.pick("decode")
    run.stop(name)
    time.sleep(2.5)
    since = time.time()
    with run.cluster.daemon(name) as other:
        run.wait_worker(name, other.child.pid)
        run.cluster.wake(name)
        run.expect_line("stop", f"the first {name}", since, "router", f"refused: .*{name} is taken by", wait_s=6.0)
        run.sleep(0.5)
        run.wait_worker(name, other.child.pid)
        when = time.time()
    run.expect_line("death", f"the second {name}", when, "router", rf"{name} \(\w+\) is gone")
    run.whole_since(when)


# ------------------------------------------------------------------------------------------------ being told to end


@scenario("prefill-drained", "SIGTERM of a prefill node; what it has ends well, it exits 0 and comes back")
def prefill_drained(run):
    name = run.pick("prefill")
    run.term(name)
    run.start(name)


@scenario("decode-drained", "SIGTERM of a decode node amid streams; they end well, it exits 0 and comes back",
          answer=(60, 250))
def decode_drained(run):
    name = run.pick("decode")
    run.term(name)
    run.start(name)


@scenario("router-drained", "SIGTERM of the router; what it has ends well, new requests are refused until it is back",
          allow=("error draining", "refused", "error no_ready_node"))
def router_drained(run):
    run.term("router")
    run.start("router")


@scenario("second-signal", "SIGTERM twice: each kind of process ends at once", answer=(200, 400), allow=ROUTER_FAULT)
def second_signal(run):
    for name in (run.pick("prefill"), run.pick("decode"), "router"):
        when = run.cluster.term(name)
        kit.wait_for(f"{name} drains", lambda n=name, w=when: run.cluster.logs.read() and
                     run.cluster.logs.first(n, "service: .* drains", w) is not None)
        start = time.monotonic()
        run.cluster.signal(name, signal.SIGTERM)
        code, seconds = run.cluster.wait_ended(name, 10)
        if code != 0 or not kit.lost.within(f"{name}'s end", start, 1, start + seconds):
            run.result.breach(f"{name} ended with {code}, {seconds:.2f} s after the second SIGTERM")
        run.start(name)


# ------------------------------------------------------------------------------------------------ clients, room


@scenario("clients-leave", "most clients go away, before or after their first token, in every way there is",
          leave_share=0.8, clients=16, pause=0.01)
def clients_leave(run):
    run.sleep(4.0)


@scenario("pool-short", "two decode nodes with few pages: the youngest is preempted and run again", config="pool",
          sim_only=True, prompt=(300, 700), answer=(200, 420), clients=16, plain=True,
          allow=("error preempted", "error queue_full"))
def pool_short(run):
    run.sleep(4.0)
    n = run.cluster.counters()["baton_preemptions_total"]
    if n == 0:
        run.result.breach("nothing was preempted: the scenario shows nothing")


# ------------------------------------------------------------------------------------------------ damage


@scenario("corrupt", "pages and tails are damaged on their way and in the copy, in a build with fault points",
          allow=("error",))
def corrupt(run):
    if not run.cluster.has_fault_points():
        raise kit.Skip("this build has no fault points (meson -Dfault_points=true)")
    def found():
        return run.cluster.counters()["baton_parcel_checksum_failures_total"]
    before = found()
    for _ in range(6):  # an engine that computes hands few parcels over in four seconds
        damage(run, 4.0, 0.1)
        if found() > before:
            return
    run.result.breach("no parcel was found damaged: the scenario shows nothing")


def damage(run, seconds, p):
    run.cluster.arm("prefill", f"put.pages=corrupt,p={p}", f"put.tail=corrupt,p={p}")
    run.cluster.arm("decode", f"accept.copy=corrupt,p={p}")
    run.sleep(seconds)
    run.cluster.arm("prefill", "put.*=off")
    run.cluster.arm("decode", "accept.*=off")


# ------------------------------------------------------------------------------------------------ at random


def random_faults(run, seconds, kinds=None, tell=None):
    """Faults one after the other, at random; at least one node of each role stays."""
    kinds = kinds or ["kill"] * 4 + ["stop"] * 3 + ["pause"] * 2 + ["term"] * 2 + ["router", "two"]
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        kind = run.rng.choice(kinds)
        name = run.pick(run.rng.choice(["prefill", "decode"]))
        run.result.faults[kind] = run.result.faults.get(kind, 0) + 1
        try:
            FAULTS[kind](run, name)
        except kit.Wrong as problem:
            run.result.breach(f"{kind} of {name}: {problem}")
            raise
        run.look()
        if tell:
            tell(kind, name)
        run.sleep(0.2, 1.0)


def fault_router(run, _):
    run.kill("router")
    run.sleep(0.2, 0.8)
    run.start("router")


def fault_kill(run, name):
    run.kill(name)
    run.sleep(0.1, 1.5)
    run.start(name)


def fault_term(run, name):
    run.term(name)
    run.start(name)


def fault_pause(run, name):
    run.cluster.stop(name)
    run.sleep(0.05, 1.2)
    run.whole_since(run.cluster.wake(name))


def fault_two(run, name):
    """One dies and another, of the other role, stops."""
    other = run.pick("decode" if name.startswith("prefill") else "prefill")
    see_death = [one for one in run.cluster.observers(name) if one != other]
    see_stop = [one for one in run.cluster.observers(other) if one != name]
    run.fault("death", name, run.cluster.kill, see_death)
    run.fault("stop", other, run.cluster.stop, see_stop)
    run.sleep(2.2, 3.0)
    run.cluster.start(name)
    run.wake(other)


def fault_cut(run, name):
    """A pair for a while, or all that a node talks to."""
    other = run.pick("decode" if name.startswith("prefill") else "prefill")
    whole = run.rng.random() < 0.4
    since = run.net.cut(name, None if whole else other)
    seers = [(o, name) for o in (run.cluster.observers(name) if whole else [other])]
    run.sleep(2.2, 3.5)
    run.cluster.logs.read()
    for observer, lost in seers:
        run.note_line("cut", f"{lost} from {observer}", since, observer, lost)
    run.whole_since(run.net.heal())


def fault_corrupt(run, _):
    damage(run, run.rng.uniform(0.5, 2.0), 0.05)


FAULTS = {"kill": fault_kill, "stop": stopped, "pause": fault_pause, "term": fault_term, "router": fault_router,
          "two": fault_two, "cut": fault_cut, "corrupt": fault_corrupt}


@scenario("random", "ten seconds of kills, stops, pauses and drains at random", answer=(4, 120), allow=ROUTER_FAULT)
def random_short(run):
    random_faults(run, 10.0)
