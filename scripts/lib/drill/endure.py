"""Long sets: rounds of load and random faults, each judged as a scenario is, until there were enough of them.

`--long N` makes hand-offs until N were right, under everything there is: every few rounds another cluster, over shared
memory or through namespaces. `--soak HOURS` keeps one cluster and restarts its nodes; meanwhile memory, descriptors,
threads, shared memory and ledgers are written down.
"""
import csv
import json
import os
import random
import threading
import time

from . import load as clients, run as runs
from .cluster import shm_of
from .scenarios import ROUTER_FAULT, Scenario, random_faults

ROUND_S = 60.0
SAMPLE_S = 10.0
LONG_KINDS = ["kill"] * 5 + ["stop"] * 3 + ["pause"] * 2 + ["term"] * 2 + ["router", "two"]
SOAK_KINDS = ["term"] * 3 + ["kill"]
COLUMNS = ["seconds", "load_average", "requests", "router_rss_mib", "nodes_rss_mib", "worst_node_rss_mib",
           "descriptors", "threads", "shm_mappings", "shm_orphans", "not_free", "live_requests"]
LONG = {"sim": {"answer": (2, 24)}, "net": {"answer": (2, 60)}}
LONG_LOAD = {"clients": 16, "pause": 0.002, "leave_share": 0.02}
SOAK_LOAD = {"answer": (4, 80), "clients": 8, "pause": 0.2, "leave_share": 0.1}


class Sampler:
    """Writes one row every SAMPLE_S, and at idle one more; a thread of its own."""

    def __init__(self, path, cluster, count):
        self.cluster, self.count = cluster, count
        self.start = time.monotonic()
        self.ending, self.lock = threading.Event(), threading.Lock()
        self.file = open(path, "w", newline="", encoding="ascii")
        self.rows = csv.writer(self.file)
        self.rows.writerow(["idle", *COLUMNS])
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self):
        while not self.ending.wait(SAMPLE_S):
            try:
                self.row(False)
            except (OSError, EOFError, ValueError):
                pass  # a process is just being replaced

    def row(self, idle):
        resources = self.cluster.resources()
        nodes = [row["rss_bytes"] for name, row in resources.items() if name != "router"]
        held = self.cluster.holdings()
        values = [
            time.monotonic() - self.start, os.getloadavg()[0], self.count(),
            resources.get("router", {}).get("rss_bytes", 0) / (1 << 20), sum(nodes) / (1 << 20),
            max(nodes, default=0) / (1 << 20), sum(row["descriptors"] for row in resources.values()),
            sum(row["threads"] for row in resources.values()), shm_of(row["pid"] for row in resources.values()),
            len(self.cluster.new_orphans()), sum(not text.startswith("router:") for text in held),
            sum(text.startswith("router:") for text in held)]
        with self.lock:
            self.rows.writerow([int(idle), *(round(value, 2) for value in values)])
            self.file.flush()

    def close(self):
        self.ending.set()
        self.thread.join(5)
        self.file.close()


class Endurance:
    """Rounds, and what they came to. make_cluster(config) gives a cluster that is not started."""

    def __init__(self, args, make_cluster, mix_of, teller):
        self.args, self.make_cluster, self.mix_of, self.teller = args, make_cluster, mix_of, teller
        self.results, self.n_rounds = [], 0
        self.start = time.monotonic()
        self.log = open(args.rounds, "a", encoding="utf-8") if args.rounds else None

    def handoffs(self):
        return sum(result.handoffs for result in self.results)

    def minutes(self):
        return (time.monotonic() - self.start) / 60

    def round(self, name, cluster, state, kinds, seconds=ROUND_S, **options):
        """One round on a cluster that is whole."""
        self.n_rounds += 1
        rng = random.Random(f"{self.args.seed} {name} {self.n_rounds}")
        if cluster.has_fault_points() and "corrupt" not in kinds and "stop" in kinds:
            kinds = [*kinds, "corrupt", "corrupt"]

        def faults(run):
            random_faults(run, seconds, kinds, lambda kind, node: self.teller.now(
                f"{name}, round {self.n_rounds}, {self.minutes():.0f} min: "
                f"{self.handoffs() + len(run.load.verdicts)} hand-offs; last fault: {kind} of {node}"))

        scenario = Scenario(name, "", faults, allow=ROUTER_FAULT, **options)
        mix = self.mix_of(scenario, cluster, state)
        result = runs.run_scenario(scenario, cluster, "sim", mix, rng, scenario.clients,
                                   f"{self.args.seed} {self.n_rounds}")
        self.results.append(result)
        self.teller.run(result, self.n_rounds, f"{self.handoffs()} hand-offs")
        if self.log:
            row = {"round": self.n_rounds, "minutes": round(self.minutes(), 1), **runs.as_dict(result)}
            self.log.write(json.dumps(row) + "\n")
            self.log.flush()
        if result.broken and self.args.keep_log:
            with open(f"{self.args.keep_log}.{name}.{self.n_rounds}", "w", encoding="utf-8") as file:
                file.write(cluster.log())
        cluster.logs.forget(time.time())
        return result

    def finished(self, n):
        return self.handoffs() >= n or (self.args.minutes and self.minutes() >= self.args.minutes)

    def long(self, n):
        """Clusters by turns until n hand-offs were made, or the minutes are over."""
        configs = ["sim", "net"]
        while not self.finished(n):
            config = configs[0]
            configs.append(configs.pop(0))
            cluster = self.make_cluster(config)
            if cluster is None:  # no namespaces here
                configs = ["sim"]
                continue
            kinds = LONG_KINDS + (["cut"] * 5 if cluster.net else [])
            state = {}
            with cluster:
                cluster.wait_ready(60)
                for _ in range(5 if config == "sim" else 3):
                    self.round(f"long-{'shm' if config == 'sim' else 'tcp'}", cluster, state, kinds,
                               **LONG[config], **LONG_LOAD)
                    if self.finished(n):
                        break
            if cluster.net:
                cluster.net.close()
            self.orphans(cluster)

    def soak(self, hours):
        """One cluster, mixed load, a node restarted now and then; every round ends idle."""
        cluster = self.make_cluster("sim")
        state = {}
        with cluster:
            cluster.wait_ready(60)
            sampler = Sampler(self.args.csv, cluster, lambda: sum(result.requests for result in self.results))
            try:
                while self.minutes() < hours * 60:
                    self.round("soak", cluster, state, SOAK_KINDS, **SOAK_LOAD)
                    sampler.row(True)
            finally:
                sampler.close()
        self.orphans(cluster)

    def orphans(self, cluster):
        left = cluster.new_orphans()
        if left:
            self.results[-1].breach(f"shared memory left behind: {', '.join(left[:6])}")
