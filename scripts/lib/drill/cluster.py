"""A cluster under drill: what is done to its processes, what they said of each other, and what they hold.

Everything that happens is placed in time by the processes' own log lines: they carry the wall clock in microseconds,
and so does what we do to them, on the same host.
"""
import contextlib
import datetime
import glob
import os
import re
import signal
import threading
import time

import kit

REVOKED_S = 10.0  # a slot whose writer may still write comes back after this, at the latest
LINE = re.compile(r"(\S+) (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6})Z (\w+) ([\w.-]+): (.*)")
BAD_SIGNS = ("Sanitizer", "runtime error:", "ssertion", "is wrong from byte")


class Line:
    def __init__(self, name, when, level, component, text):
        self.name, self.level, self.component, self.text = name, level, component, text
        self.t = datetime.datetime.fromisoformat(when + "+00:00").timestamp()


class Log:
    """The cluster's log as lines. read() takes what is new."""

    def __init__(self, path):
        self.path, self.at, self.rest, self.lines, self.bad = path, 0, "", [], []
        self.lock = threading.Lock()

    def read(self):
        with self.lock, contextlib.suppress(OSError):
            with open(self.path, encoding="utf-8", errors="replace") as file:
                file.seek(self.at)
                text = self.rest + file.read()
                self.at = file.tell()
            *whole, self.rest = text.split("\n")
            for line in whole:
                if any(sign in line for sign in BAD_SIGNS):
                    self.bad.append(line)
                match = LINE.match(line)
                if match:
                    self.lines.append(Line(*match.groups()))
        return self.lines

    def first(self, name, pattern, since):
        """Seconds after `since` at which the process first said so; None if it did not."""
        found = [line.t for line in self.lines
                 if line.name == name and line.t >= since and re.search(pattern, f"{line.component}: {line.text}")]
        return min(found) - since if found else None

    def forget(self, before):
        """Drops old lines: a soak's log is long."""
        with self.lock:
            self.lines = [line for line in self.lines if line.t >= before]


def says_gone(observer, name):
    """What `observer` says when it finds that `name` is gone; None where the two never talk."""
    roles = observer.split("-")[0], name.split("-")[0]
    return {
        ("router", "prefill"): rf"registry: {name} \(\w+\) is gone",
        ("router", "decode"): rf"registry: {name}( \(\w+\) is gone|: the link for requests is lost)",
        ("decode", "prefill"): rf"pairs: {name}: ",
        ("prefill", "decode"): rf"serve: decode node {name} is let go",
        ("decode", "router"): r"(join|serve): router \S+ is gone",
        ("prefill", "router"): r"join: router \S+ is gone",
    }.get(roles)


class Cluster(kit.Cluster):
    """Adds fixed ports (a node comes back under its name and port), signals, and measures."""

    def __init__(self, build, prefill, decode, engine="sim", extra=(), net=None, **options):
        super().__init__(build, "split", prefill=prefill, decode=decode, engine=engine, extra=extra, lease=None, **options)
        self.names = [f"prefill-{i}" for i in range(prefill)] + [f"decode-{i}" for i in range(decode)]
        self.net = net
        self.address = (net.hosts["router"] if net else "127.0.0.1", 0)
        self.shm_before = orphaned_shm()
        ports = kit.ports.free(2 * len(self.names))
        for name in self.names:
            self.options += [f"{name}:--grpc-port={ports.pop()}", f"{name}:--http-port={ports.pop()}"]
            if net:
                self.options.append(f"{name}:--host={net.hosts[name]}")
        self.logs = Log(os.path.join(self.folder, "log"))
        self.down = set()    # names that are dead or stopped, by our hand
        self.touched = set()  # names that a signal was sent to in this scenario
        self.last_pid = {}
        self.first_touch_bytes = 0  # by which memory of the pools may grow that is used for the first time

    def up_arguments(self, port, join_port):
        arguments = super().up_arguments(port, join_port) + ["--host", self.address[0]]
        for wrap in self.net.wraps() if self.net else ():
            arguments += ["--wrap", wrap]
        return arguments

    # ---- what is done to it

    def signal(self, name, number):
        """Sends it, and says when (wall clock)."""
        pid = self.last_pid.get(name) or self.pids()[name]
        self.last_pid[name] = pid
        self.touched.add(name)
        now = time.time()
        kit.kill(pid, number)
        return now

    def kill(self, name):
        self.down.add(name)
        return self.signal(name, signal.SIGKILL)

    def stop(self, name):
        self.down.add(name)
        return self.signal(name, signal.SIGSTOP)

    def wake(self, name):
        self.down.discard(name)
        return self.signal(name, signal.SIGCONT)

    def term(self, name):
        self.down.add(name)
        return self.signal(name, signal.SIGTERM)

    def start(self, name):
        """Starts it again, under the same name and ports."""
        now = time.time()
        if name in self.down:
            self.wait_ended(name, 20)  # a killed process needs time to end, too, and a busy machine has none
        self.down.discard(name)
        answer = self.supervisor({"do": "start", "name": name})
        if "pid" not in answer:
            raise kit.Wrong(f"{name} could not be started: {answer}")
        self.last_pid[name] = answer["pid"]
        return now

    def daemon(self, name):
        """Another process of this name, with ports of its own; started by hand, ended by `with`."""
        role = name.split("-")[0]
        items = (item.partition(":") for item in self.options)
        options = [option for whose, _, option in items if whose in (role, "node")]
        if self.engine == "model":
            options += ["--engine=model", f"--model={self.model}"]
        return kit.Daemon(self.build, role, f"--node-id={name}", f"--router=127.0.0.1:{self.join_port}",
                          "--die-with-parent", *options)

    def wait_ended(self, name, seconds):
        """(exit code, seconds until it ended)."""
        start = time.monotonic()
        while not kit.lost.over(start, seconds):
            row = next(p for p in self.supervisor({"do": "status"})["processes"] if p["name"] == name)
            if row["exit"] is not None:
                return row["exit"], time.monotonic() - start
            time.sleep(0.02)
        raise kit.Wrong(f"{name} has not ended in {seconds:.0f} s")

    # ---- what it says

    def worker_list(self, timeout=2.0):
        """/workers, or [] where the router does not answer."""
        try:
            return kit.ask(self.address, "GET", "/workers", timeout=timeout).json()["workers"]
        except (OSError, EOFError, ValueError, KeyError, kit.Wrong):
            return []

    def not_ready(self):
        """What keeps it from being whole: every node ready, and every pair; "" when nothing does."""
        workers = {worker["id"]: worker for worker in self.worker_list()}
        for name in self.names:
            if name not in workers:
                return f"{name} has not joined"
            if workers[name]["state"] != "ready":
                return f"{name} is {workers[name]['state']}: {workers[name]['reason']}"
        prefills = [name for name in self.names if name.startswith("prefill")]
        for name in set(self.names) - set(prefills):
            ready = {pair["prefill"] for pair in workers[name]["pairs"] if pair["state"] == "ready"}
            if not ready.issuperset(prefills):
                return f"{name} has no ready pair with {', '.join(sorted(set(prefills) - ready))}"
        return ""

    def wait_ready(self, seconds=20.0):
        """Waits until it is whole; the wall clock then."""
        start = time.monotonic()
        while True:
            why = self.not_ready()
            if not why:
                return time.time()
            if kit.lost.over(start, seconds):
                raise kit.Wrong(f"not whole after {seconds:.0f} s: {why}")
            time.sleep(0.03)

    def observers(self, name):
        """Who has to notice that this one is gone."""
        return [other for other in ["router", *self.names]
                if other != name and other not in self.down and says_gone(other, name)]

    def seen(self, name, since, observers):
        """{observer: seconds until it said that `name` is gone, or None}."""
        self.logs.read()
        return {other: self.logs.first(other, says_gone(other, name), since) for other in observers}

    # ---- what it holds

    def leaked(self, seconds=REVOKED_S + 2):
        """(texts of what is not free though nothing runs, seconds until all was)."""
        start = time.monotonic()
        while True:
            held = self.holdings()
            if not held or kit.lost.over(start, seconds):
                return held, time.monotonic() - start
            time.sleep(0.05)

    def holdings(self):
        """Texts: requests of the router, and every thing of a node's ledgers that is not free."""
        found = []
        try:
            found += [f"router: request {r['id']}" for r in
                      kit.get(self.address, "/debug/requests").json()["requests"]]
            probes = self.probes()
            for worker in self.worker_list():
                listing = kit.get(probes[worker["id"]], "/debug/pages").json()
                for ledger in ledgers_of(listing):
                    busy = {state: n for state, n in ledger["states"].items() if state not in ("free", "cached") and n}
                    if sum(ledger["states"].values()) != ledger["total"]:
                        found.append(f"{worker['id']}: {ledger['name']} do not sum to {ledger['total']}")
                    rows = [f"{row['state']}, owner {row['owner']}, {row.get('reason')}" for row in ledger["items"][:3]]
                    found += [f"{worker['id']}: {ledger['name']}: {n} {state} ({'; '.join(rows)})"
                              for state, n in busy.items() for _ in range(n)]
                if worker["queued"] or worker["running"]:
                    found.append(f"{worker['id']}: {worker['queued']} queued, {worker['running']} running")
        except (OSError, EOFError, ValueError, KeyError, kit.Wrong) as problem:
            found.append(f"could not be asked: {problem!r:.200}")
        return found

    def resources(self):
        """{name: {pid, rss_bytes, descriptors, threads}} of every living process."""
        found = {}
        for name, pid in self.pids().items():
            with contextlib.suppress(OSError, TypeError, KeyError):  # KeyError: a zombie has no VmRSS
                with open(f"/proc/{pid}/status", encoding="ascii") as file:
                    status = dict(line.split(":", 1) for line in file if ":" in line)
                found[name] = {"pid": pid, "rss_bytes": int(status["VmRSS"].split()[0]) * 1024,
                               "descriptors": len(os.listdir(f"/proc/{pid}/fd")), "threads": int(status["Threads"])}
        return found

    # ---- fault points, in a build that has them

    def probes(self):
        """{name: address of the HTTP probes} of the nodes that have joined."""
        found = {}
        for worker in self.worker_list():
            host, _, port = worker["http"].rpartition(":")
            found[worker["id"]] = (host.strip("[]"), int(port))
        return found

    def batch_rows(self):
        """{name: rows that it generates} of the decode nodes that answer."""
        found = {}
        for name, address in self.probes().items():
            if name.startswith("decode"):
                with contextlib.suppress(OSError, EOFError, kit.Wrong):
                    series = kit.parse_metrics(kit.get(address, "/metrics").body.decode())[0]
                    found[name] = series.get("baton_batch_rows", 0)
        return found

    def has_fault_points(self):
        with contextlib.suppress(OSError, EOFError, kit.Wrong, StopIteration):
            return kit.get(next(iter(self.probes().values())), "/debug/faults").status == 200
        return False

    def arm(self, role, *orders):
        """Tells the fault points of every node of the role; "NAME=off" forgets. Returns the wall clock."""
        now = time.time()
        for name, address in self.probes().items():
            if name.startswith(role) and name not in self.down:
                answer = kit.ask(address, "POST", "/debug/faults", "\n".join(orders).encode() + b"\n",
                                 {"Content-Type": "text/plain"})
                kit.check(f"fault points of {name} ({answer.body!r:.200})", answer.status, 200)
        return now

    def counters(self):
        """Sums over living nodes of what tells how much was done."""
        names = ("baton_parcels_total", "baton_parcel_checksum_retries_total", "baton_parcel_checksum_failures_total",
                 "baton_stray_messages_total", "baton_protocol_errors_total", "baton_failovers_total",
                 "baton_attempts_retried_total", "baton_preemptions_total")
        found = dict.fromkeys(names, 0.0)
        for address in [self.address, *self.probes().values()]:
            with contextlib.suppress(OSError, EOFError, kit.Wrong):
                series = kit.parse_metrics(kit.get(address, "/metrics").body.decode())[0]
                for name in names:
                    found[name] += series.get(name, 0)
        return found

    def new_orphans(self):
        """Shared memory that nobody has mapped and that was not there before."""
        return sorted(orphaned_shm() - self.shm_before)

    def letters(self):
        """{id: text} of the ids that the sim engine answers with, by the router's own tokenizer, asked once."""
        found = {}
        for one in range(3, 97):
            answer = self.post("/detokenize", {"tokens": [one]})
            kit.check("/detokenize", answer.status, 200)
            value = answer.json()
            found[one] = value.get("prompt", value.get("text"))
        if len(set(found.values())) != len(found) or {len(text) for text in found.values()} != {1}:
            raise kit.Wrong(f"the plain ids are not single characters: {found}")
        return found


def ledgers_of(value):
    if isinstance(value, dict):
        if "states" in value and "total" in value:
            yield value
        else:
            for member in value.values():
                yield from ledgers_of(member)


def orphaned_shm():
    """Names of UCX's files in /dev/shm that no process maps, and ids of SysV segments nobody is attached to."""
    files = set(glob.glob("/dev/shm/ucx*"))
    for maps in glob.glob("/proc/[0-9]*/maps") if files else ():
        with contextlib.suppress(OSError), open(maps, encoding="utf-8", errors="replace") as file:
            text = file.read()
            files = {path for path in files if path not in text}
    segments = set()
    with contextlib.suppress(OSError), open("/proc/sysvipc/shm", encoding="ascii") as file:
        names = file.readline().split()
        for line in file:
            row = dict(zip(names, line.split()))
            if row["nattch"] == "0":
                segments.add(f"sysv segment {row['shmid']}")
    return files | segments


def shm_of(pids):
    """How many shared memory mappings these processes have: a number that must not grow."""
    n = 0
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            n += sum("/SYSV" in line or "/dev/shm/" in line for line in file)
    return n
