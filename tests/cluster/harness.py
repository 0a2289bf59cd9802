"""A cluster of real processes for a test: router, prefill and decode nodes under scripts/cluster, on free ports, in a
folder of its own. Standard library only.

    with Cluster(build, engine="sim", prefill=1, decode=2) as cluster:
        status, headers, body = cluster.post("/v1/chat/completions", {...})
"""
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(TOP, "tests"))
import lost  # noqa: E402  pylint: disable=wrong-import-position
import ports  # noqa: E402  pylint: disable=wrong-import-position

TINY = os.path.join(TOP, "models", "baton-tiny")


class Failure(Exception):
    pass


def check(condition, text):
    if not condition:
        raise Failure(text)


def check_equal(found, wanted, what):
    if found != wanted:
        raise Failure(f"{what}: found {found!r}, want {wanted!r}")


def wait_for(what, condition, seconds=10.0):
    """Asks until the answer is true; what it last said is in the failure. What the machine lost is added."""
    start = time.monotonic()
    while True:
        value = condition()
        if value is True:
            return
        if lost.over(start, seconds):
            raise Failure(f"{what}: not within {seconds} s; last seen {value!r}")
        time.sleep(0.05)


class Stream:
    """A streamed answer, event by event."""

    def __init__(self, connection, answer):
        self.connection, self.answer = connection, answer
        self.events, self.comments = [], 0
        self.done = False   # [DONE] came
        self.broken = None  # the connection was cut: how

    def __iter__(self):
        return self

    def __next__(self):
        while not self.done:
            try:
                line = self.answer.readline()
            except (http.client.HTTPException, OSError) as problem:
                self.broken = repr(problem)
                raise StopIteration from None
            if not line:
                self.broken = self.broken or ("cut" if not self.done else None)
                raise StopIteration
            line = line.rstrip(b"\r\n")
            if line.startswith(b":"):
                self.comments += 1
            elif line == b"data: [DONE]":
                self.done = True
                check_equal(self.answer.read(), b"\n", "bytes behind [DONE]")
                self.close()
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                self.events.append(event)
                return event
            else:
                check_equal(line, b"", "a line of the stream")
        raise StopIteration

    def close(self):
        self.answer.close()
        self.connection.close()

    def rest(self):
        for _ in self:
            pass
        return self

    def text(self, index=0, member=("content", "reasoning_content", "text")):
        """Text of one choice; of chat, reasoning and answer one after the other."""
        text = ""
        for event in self.events:
            for choice in event.get("choices", ()):
                if choice["index"] == index:
                    source = choice.get("delta", choice)
                    text += "".join(source.get(m) or "" for m in member)
        return text

    def finish(self, index=0):
        reasons = [choice["finish_reason"] for event in self.events for choice in event.get("choices", ())
                   if choice["index"] == index and choice["finish_reason"]]
        check(len(reasons) <= 1, f"{len(reasons)} finish reasons of choice {index}")
        return reasons[0] if reasons else None

    def usage(self):
        usages = [event["usage"] for event in self.events if event.get("usage")]
        check(len(usages) <= 1, f"{len(usages)} events with usage")
        return usages[0] if usages else None


class Cluster:
    """What stands still for half a lease joins anew: a machine that takes its processors away for a while is no part of a
    test, so the lease is longer than that, unless it is None: the programs' own."""

    def __init__(self, build, engine="sim", prefill=1, decode=1, extra=(), model=TINY, timeout=60, lease="10s"):
        self.build, self.timeout = os.path.abspath(build), timeout
        self.folder = tempfile.mkdtemp(prefix="baton-cluster-")
        self.port, self.join_port = ports.free(2)
        self.arguments = ["up", "--engine", engine, "--prefill", str(prefill), "--decode", str(decode), "--port",
                          str(self.port), "--join-port", str(self.join_port), "--build", self.build, "--model", model,
                          "--timeout", str(timeout), "--quiet"]
        if lease and not any("--lease=" in option for option in extra):
            extra = [f"router:--lease={lease}", f"node:--lease={lease}", *extra]
        for option in extra:
            self.arguments += ["--extra", option]

    def script(self, *arguments):
        done = subprocess.run([sys.executable, os.path.join(TOP, "scripts", "cluster"), "--dir", self.folder, *arguments],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=self.timeout + 30,
                              check=False)
        if done.returncode:
            raise Failure(f"cluster {' '.join(arguments)}: {done.stdout}\n{self.log()[-6000:]}")
        return done.stdout

    def __enter__(self):
        self.script(*self.arguments)
        return self

    def __exit__(self, kind, value, trace):
        if kind:
            print(self.log()[-12000:], file=sys.stderr)
        try:
            self.script("down")
        finally:
            log = self.log()
            shutil.rmtree(self.folder, ignore_errors=True)
        for sign in ("AddressSanitizer", "runtime error:", "LeakSanitizer", "Assertion"):
            if sign in log and not kind:
                raise Failure(f"{sign} in the log:\n{log[-12000:]}")

    def log(self):
        try:
            with open(os.path.join(self.folder, "log"), errors="replace") as file:
                return file.read()
        except OSError:
            return ""

    # ---- processes

    def kill(self, name):
        self.script("kill", name)

    def start(self, name):
        self.script("start", name)

    def process(self, name):
        """What the supervisor knows of one: pid, exit, up_s."""
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(os.path.join(self.folder, "control"))
            client.sendall(b'{"do": "status"}\n')
            answer = json.loads(client.makefile().readline())
        return next(process for process in answer["processes"] if process["name"] == name)

    # ---- HTTP

    def connect(self, timeout=300):  # of silence: a machine without time is no hang
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def request(self, method, path, body=None, headers=None):
        connection = self.connect()
        try:
            send = {"Content-Type": "application/json", **(headers or {})}
            connection.request(method, path, json.dumps(body).encode() if body is not None else None, send)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def get(self, path):
        status, _, body = self.request("GET", path)
        return status, json.loads(body)

    def post(self, path, body):
        """(status, object) of a request that is answered whole."""
        status, _, data = self.request("POST", path, body)
        return status, json.loads(data)

    def stream(self, path, body):
        """A Stream; the status must be 200."""
        connection = self.connect()
        connection.request("POST", path, json.dumps({**body, "stream": True}).encode(),
                           {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise Failure(f"{path}: {answer.status} {answer.read()!r}")
        check_equal(answer.headers["Content-Type"], "text/event-stream", "Content-Type")
        return Stream(connection, answer)

    # ---- what the cluster says of itself

    def workers(self):
        return self.get("/workers")[1]["workers"]

    def requests(self):
        return self.get("/debug/requests")[1]["requests"]

    def metric(self, name):
        _, _, body = self.request("GET", "/metrics")
        return sum(float(line.split()[-1]) for line in body.decode().splitlines()
                   if line.split(" ")[0].split("{")[0] == name)

    def pages(self, node):
        """/debug/pages of one node."""
        url = urllib.parse.urlsplit("http://" + node["http"])
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=10)
        try:
            connection.request("GET", "/debug/pages")
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def holdings(self):
        """What the living nodes hold, {} where nothing: pages, landing slots and sequences not free."""
        held = {}
        for node in self.workers():
            if node["free_pages"] != node["total_pages"]:
                held[node["id"], "pages"] = node["total_pages"] - node["free_pages"]
            if node["landing_slots_free"] != node["landing_slots_total"]:
                held[node["id"], "slots"] = node["landing_slots_total"] - node["landing_slots_free"]
            if node["running"] or node["queued"]:
                held[node["id"], "requests"] = node["running"] + node["queued"]
        return held

    def check_idle(self, seconds=12):
        """Everything is back: no request lives at the router, and nodes hold nothing. (A slot whose writer may still
        write is revoked and free after at most 10 s.)"""
        wait_for("the router has no requests", lambda: self.requests() == [] or self.requests(), seconds)
        wait_for("nodes hold nothing", lambda: self.holdings() == {} or self.holdings(), seconds)


def main(tests):
    """Runs the tests (functions of a Cluster's build folder) named on the command line, or all; exit 0 or 1."""
    build, names = sys.argv[1], sys.argv[2:]
    lost.watch(build)
    failed = 0
    for test in tests:
        if names and test.__name__ not in names:
            continue
        start = time.monotonic()
        try:
            test(build)
            print(f"ok    {test.__name__} ({time.monotonic() - start:.1f} s)", flush=True)
        except Exception as problem:  # each is reported, and the next one runs
            failed += 1
            print(f"FAIL  {test.__name__}: {type(problem).__name__}: {problem}", flush=True)
    sys.exit(1 if failed else 0)
