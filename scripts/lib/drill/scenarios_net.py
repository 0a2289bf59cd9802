"""Scenarios of the network: a pair or a node is cut off, packets come late or not at all."""
import time

from .cluster import says_gone
from .scenarios import ROUTER_FAULT, scenario

NET = {"config": "net", "answer": (20, 160), "prompt": (300, 1200), "clients": 8}


def cut_seen(run, kind, since, pairs):
    """pairs: (who has to notice, whom)."""
    for observer, name in pairs:
        run.expect_line(kind, f"{name} from {observer}", since, observer, says_gone(observer, name))


@scenario("pair-cut", "the network between one prefill and one decode node is cut for 4 s; other pairs go on", **NET)
def pair_cut(run):
    prefill, decode = run.pick("prefill"), run.pick("decode")
    since = run.net.cut(prefill, decode)
    cut_seen(run, "cut", since, [(decode, prefill), (prefill, decode)])
    run.sleep(2.0)
    lost = [f"{line.name}: {line.text}" for line in run.cluster.logs.read() if line.t >= since and (
        " is gone" in line.text or "link lost" in line.text or "is let go" in line.text)]
    other = [text for text in lost if not (text.startswith(f"{decode}: {prefill}:") or (
        text.startswith(f"{prefill}: ") and decode in text))]
    if other:
        run.result.breach(f"the cut of {prefill} and {decode} was felt elsewhere: {other[:3]}")
    run.whole_since(run.net.heal())


@scenario("stopped-then-cut", "a decode node wakes from a stop, then loses one pair amid puts; TCP's next try meets a new pair",
          **{**NET, "prompt": (1500, 2000), "answer": (2, 8), "clients": 16, "pause": 0.0})
def stopped_then_cut(run):
    prefill, decode = run.pick("prefill"), run.pick("decode")
    for _ in range(2):
        run.stop(decode)
        run.sleep(2.6, 3.0)
        run.wake(decode)
        run.sleep(0.5, 1.0)
        run.net.cut(prefill, decode)
        run.sleep(2.2, 3.2)
        run.whole_since(run.net.heal())
        run.sleep(4.0)


@scenario("prefill-cut", "a prefill node is cut off from everyone for 4 s", **NET)
def prefill_cut(run):
    node_cut(run, run.pick("prefill"))


@scenario("decode-cut", "a decode node is cut off from everyone for 4 s amid streams", **NET)
def decode_cut(run):
    node_cut(run, run.pick("decode"))


def node_cut(run, name):
    since = run.net.cut(name)
    others = run.cluster.observers(name)
    cut_seen(run, "cut", since, [(other, name) for other in others] + [(name, other) for other in others])
    run.sleep(2.0)
    run.whole_since(run.net.heal())


@scenario("router-cut-from-decode", "only the way between the router and a decode node is cut for 4 s", **NET)
def router_cut_from_decode(run):
    name = run.pick("decode")
    since = run.net.cut("router", name)
    cut_seen(run, "cut", since, [("router", name), (name, "router")])
    run.sleep(2.0)
    run.whole_since(run.net.heal())


@scenario("router-cut", "the router is cut off from every node for 4 s", **{**NET, "allow": ROUTER_FAULT})
def router_cut(run):
    cuts = {name: run.net.cut("router", name) for name in run.cluster.names}
    for name, since in cuts.items():
        cut_seen(run, "cut", since, [(name, "router"), ("router", name)])
    run.sleep(1.0)
    run.whole_since(run.net.heal())


@scenario("restarted-behind-a-cut", "a node is cut off, dies and comes back behind the cut; then the cut heals", **NET)
def restarted_behind_a_cut(run):
    for role in ("prefill", "decode"):
        name = run.pick(role)
        others = run.cluster.observers(name)
        since = run.net.cut(name)
        time.sleep(0.3)
        run.cluster.kill(name)
        run.cluster.start(name)
        cut_seen(run, "cut", since, [(other, name) for other in others])
        run.sleep(1.0, 2.0)
        run.whole_since(run.net.heal())


@scenario("router-restarted-behind-a-cut", "the router dies and comes back while no node can hear of it",
          **{**NET, "allow": ROUTER_FAULT})
def router_restarted_behind_a_cut(run):
    cuts = {name: run.net.cut("router", name) for name in run.cluster.names}
    time.sleep(0.3)
    run.cluster.kill("router")
    run.cluster.start("router")
    for name, since in cuts.items():
        cut_seen(run, "cut", since, [(name, "router")])
    run.sleep(1.0)
    run.whole_since(run.net.heal())


@scenario("far", "every pair is 150 ms apart for 6 s, as between continents", **NET)
def far(run):
    spoil(run, delay_ms=75.0, seconds=6.0)


@scenario("heavy-loss", "one packet of ten is lost on every pair for 5 s: nothing is wrong, and everything ends",
          **{**NET, "allow": ("error",)})
def heavy_loss(run):
    spoil(run, loss=0.1, false_deaths=True)


@scenario("delay", "every pair is 30 to 50 ms late for 5 s: slow, and nobody is taken for dead", **NET)
def delay(run):
    spoil(run, delay_ms=30.0, jitter_ms=20.0)


@scenario("loss", "one packet of a hundred is lost on every pair for 5 s: slow, and nobody is taken for dead", **NET)
def loss(run):
    spoil(run, loss=0.01)


def spoil(run, seconds=5.0, false_deaths=False, **how):
    names = ["router", *run.cluster.names]
    since = time.time()
    for i, one in enumerate(names):
        for other in names[i + 1:]:
            run.net.slow(one, other, **how)
    run.sleep(seconds)
    gone = [f"{line.name}: {line.text}" for line in run.cluster.logs.read() if line.t >= since and (
        " is gone" in line.text or "link lost" in line.text)]
    if gone and not false_deaths:
        run.result.breach(f"taken for dead: {gone[:3]}")
    run.whole_since(run.net.heal())
