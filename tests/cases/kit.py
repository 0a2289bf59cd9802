"""What the cases share: a client that frames its requests by hand, a checker of event streams, a cluster of real
processes, and the comparison of everything that could leak with its baseline.

Each file test_<group>.py holds the cases of one group. It is run as

    test_<group>.py BUILD_DIR [CASE...]      all cases, or those named

and prints TAP. A case is a function of one cluster; it runs through the split path (router, prefill, decode, local
prefill switched off) and through a lone decode node, and after each the baseline must hold again. CASES_LAYOUTS=split
runs one of the two; CASES_VERBOSE=1 shows the processes' logs of what failed in full. CASES_LONG=1 takes the numbers of
the reports where the default takes smaller ones, so that all of it fits into minutes on two cores.
"""
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback

from wire import *  # noqa: F401,F403  one kit for the cases, in two files
import ports  # noqa: E402  pylint: disable=wrong-import-position

# ------------------------------------------------------------------------------------------------ processes


def is_sanitized(program):
    """Whether it was built with AddressSanitizer, whose quarantine makes memory look used."""
    with open(program, "rb") as file:
        return b"__asan_init" in file.read()


def has_fault_points(build):
    """Whether it can be told to go wrong (meson -Dfault_points=true)."""
    with open(os.path.join(build, "prefill", "baton-prefill"), "rb") as file:
        return b"compute.chunk" in file.read()


def environment():
    """Sanitizers stop at the first error, and keep little of what was freed."""
    env = dict(os.environ, UCX_ERROR_SIGNALS="")
    env["ASAN_OPTIONS"] = env.get("ASAN_OPTIONS", "detect_leaks=0") + ":quarantine_size_mb=4:malloc_context_size=5"
    env["UBSAN_OPTIONS"] = "halt_on_error=1:print_stacktrace=1"
    return env


def parse_metrics(text):
    """{series: value} of a text exposition, and {family: type}."""
    series, types = {}, {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            types[name] = kind
        elif line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            series[name] = float(value)
    return series, types


class Process:
    """One process of a cluster, seen from outside."""

    def __init__(self, name, pid, address):
        self.name, self.pid, self.address = name, pid, address

    def metrics(self):
        answer = get(self.address, "/metrics")
        check(f"/metrics of {self.name}", answer.status, 200)
        return parse_metrics(answer.body.decode())[0]

    def metric(self, name):
        return sum(value for series, value in self.metrics().items() if series.split("{")[0] == name)

    def rss_bytes(self):
        with open(f"/proc/{self.pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    def descriptors(self):
        """What each open descriptor is, without the numbers of sockets and files."""
        kinds = []
        for fd in os.listdir(f"/proc/{self.pid}/fd"):
            with contextlib.suppress(OSError):
                kinds.append(re.sub(r"\[\d+\]", "", os.readlink(f"/proc/{self.pid}/fd/{fd}")))
        return sorted(kinds)

    def alive(self):
        try:
            with open(f"/proc/{self.pid}/stat", encoding="ascii") as file:
                return file.read().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            return False


# Gauges that must return to what they were: whatever is held for a request.
HELD = re.compile(r"baton_(ledger_items\{|requests_(queued|running)|batch_rows|transfers_in_flight|"
                  r"http_(live_requests|live_streams|pending_output_bytes|body_bytes)|.*requests_live)")


LEASE = "10s"


class Cluster:
    """A router and its nodes, started by scripts/cluster on free ports. What stands still for half a lease joins anew, and
    a machine that takes its processors away is no part of a case: unless it asks for None, its lease is longer than that."""

    def __init__(self, build, layout="split", prefill=1, decode=1, engine="sim", script=None, extra=(), model=TINY,
                 host="127.0.0.1", local=None, lease=LEASE):
        self.build, self.layout, self.model, self.engine = build, layout, model, engine
        self.folder = tempfile.mkdtemp(prefix="cases-")
        self.n_prefill = prefill if layout == "split" else 0
        self.n_decode = decode
        options = [f"router:--local-prefill={local or ('never' if layout == 'split' else 'auto')}"]
        if engine == "sim":
            options += ["node:--sim-page-bytes=8192", "node:--sim-tail-bytes=16384", "node:--sim-step=1"]
        if script is not None:
            path = os.path.join(self.folder, "script")
            with open(path, "w", encoding="utf-8") as file:
                file.writelines(json.dumps(entry) + "\n" for entry in script)
            options.append(f"node:--script={path}")
        if lease and not any("--lease=" in option for option in extra):
            options += [f"router:--lease={lease}", f"node:--lease={lease}"]
        self.options = [*options, *extra]
        self.address = (host, 0)
        self.sanitized = is_sanitized(os.path.join(build, "decode", "baton-decode"))

    def tool(self, *arguments, timeout=90):
        return subprocess.run([sys.executable, os.path.join(TOP, "scripts", "cluster"), "--dir", self.folder, *arguments],
                              capture_output=True, text=True, timeout=timeout, env=environment(), check=False)

    def up_arguments(self, port, join_port):
        arguments = ["up", "--quiet", "--build", self.build, "--engine", self.engine, "--model", self.model,
                     "--prefill", str(self.n_prefill), "--decode", str(self.n_decode), "--timeout", "60",
                     "--port", str(port), "--join-port", str(join_port)]
        for option in self.options:
            arguments += ["--extra", option]
        return arguments

    def __enter__(self):
        problem = ""
        for _ in range(3):  # another process may take a port between our look and the router's
            port, join_port = ports.free(2)
            done = self.tool(*self.up_arguments(port, join_port))
            if done.returncode == 0:
                self.address, self.join_port = (self.address[0], port), join_port
                self.find()
                return self
            problem = done.stdout + done.stderr
            if "taken" not in problem:
                break
        log = self.log()
        shutil.rmtree(self.folder, ignore_errors=True)
        raise Wrong(f"the cluster did not start: {problem}\n{log[-3000:]}")

    def __exit__(self, *_):
        with contextlib.suppress(OSError, ValueError):  # where a case has ended the supervisor, nothing is left to end
            self.supervisor({"do": "down"})
            wait_for("the cluster is down", lambda: not os.path.exists(os.path.join(self.folder, "control")), 30)
        self.last_log = self.log()
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self):
        try:
            with open(os.path.join(self.folder, "log"), encoding="utf-8", errors="replace") as file:
                return file.read()
        except OSError:
            return ""

    def supervisor(self, request):
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(60)
            client.connect(os.path.join(self.folder, "control"))
            client.sendall(json.dumps(request).encode() + b"\n")
            data = b""
            while not data.endswith(b"\n"):
                piece = client.recv(65536)
                if not piece:
                    break
                data += piece
        return json.loads(data)

    def start(self, name):
        """Starts a process that has ended, and waits until every node and every pair is ready."""
        self.supervisor({"do": "start", "name": name})
        wait_for(f"all is whole with {name}", self.is_whole, 20)
        self.find()

    def is_whole(self):
        pids = self.pids()
        try:
            workers = self.workers()
        except (OSError, EOFError):
            return False
        pairs = [pair for worker in workers for pair in worker.get("pairs", [])]
        return len(workers) == self.n_prefill + self.n_decode and len(pairs) == self.n_prefill * self.n_decode and all(
            one["state"] == "ready" for one in workers + pairs) and all(w["pid"] == pids[w["id"]] for w in workers)

    def pids(self):
        return {p["name"]: p["pid"] for p in self.supervisor({"do": "status"})["processes"]}

    def workers(self):
        answer = get(self.address, "/workers", self.keys())
        check("/workers", answer.status, 200)
        return answer.json()["workers"]

    def keys(self):
        for option in self.options:
            if option.startswith("router:--api-key="):
                return {"Authorization": "Bearer " + option.partition("=")[2]}
        return {}

    def find(self):
        """Looks up pids and HTTP addresses of all processes."""
        pids = self.pids()
        self.processes = {"router": Process("router", pids["router"], self.address)}
        for worker in self.workers():
            host, _, port = worker["http"].rpartition(":")
            address = (host.strip("[]"), int(port))
            self.processes[worker["id"]] = Process(worker["id"], pids[worker["id"]], address)
        return self.processes

    @property
    def router(self):
        return self.processes["router"]

    @property
    def nodes(self):
        return [p for name, p in self.processes.items() if name != "router"]

    def decode(self, i=0):
        return self.processes[f"decode-{i}"]

    def prefill(self, i=0):
        return self.processes[f"prefill-{i}"]

    # ---- requests

    def ask(self, method, path, body=None, headers=(), timeout=30.0):
        return ask(self.address, method, path, body, {**self.keys(), **dict(headers)}, timeout)

    def post(self, path, body, headers=(), timeout=30.0):
        return self.ask("POST", path, body, headers, timeout)

    def stream(self, path, body, headers=(), timeout=30.0):
        return post_stream(self.address, path, body, {**self.keys(), **dict(headers)}, timeout)

    def chat(self, content="hello", timeout=30.0, **fields):
        """A chat request of one user message, or of the messages given."""
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", {"messages": messages, **fields}, timeout=timeout)

    def chat_stream(self, content="hello", timeout=30.0, **fields):
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        return self.stream("/v1/chat/completions", {"messages": messages, **fields}, timeout=timeout)

    def good_chat(self, content="hello", **fields):
        answer = self.chat(content, **fields)
        check(f"status of a chat ({answer.body!r:.300})", answer.status, 200)
        return has_shape(answer.json(), "Chat")

    def good_completion(self, prompt, **fields):
        answer = self.post("/v1/completions", {"prompt": prompt, **fields})
        check(f"status of a completion ({answer.body!r:.300})", answer.status, 200)
        return has_shape(answer.json(), "Completion")

    def good_stream(self, content="hello", n=1, **fields):
        """A chat stream, checked whole; usage is asked for."""
        stream = self.chat_stream(content, stream_options={"include_usage": True}, n=n, **fields)
        need(isinstance(stream, Stream), "a stream", stream)
        return stream.check("chat", n, include_usage=True)

    def refused(self, path, body, status=400, code=None, param=None):
        """The request is refused alike with and without stream; returns the error."""
        answers = [self.post(path, body)]
        if isinstance(body, dict):
            answers.append(self.stream(path, body))
        for answer in answers:
            need(isinstance(answer, Answer), "a stream began where an error was due", body)
            check(f"status of {encode(body)!r:.200} ({answer.body!r:.200})", answer.status, status)
            error = answer.error()
            if code is not None:
                check(f"code for {encode(body)!r:.200}", error["code"], code)
            if param is not None:
                check(f"param for {encode(body)!r:.200}", error["param"], param)
        return error

    def tokens(self, **body):
        answer = self.post("/tokenize", body)
        check(f"/tokenize of {encode(body)!r:.200} ({answer.body!r:.200})", answer.status, 200)
        return answer.json()["tokens"]

    # ---- what must not change

    def held(self):
        """{process: {gauge: value}} of everything that is held for requests."""
        found = {}
        for process in self.processes.values():
            found[process.name] = {k: v for k, v in process.metrics().items() if HELD.match(k)}
            # the request that asks is one, on its own connection
            for key in found[process.name]:
                if key.startswith("baton_http_live_requests"):
                    found[process.name][key] -= 1
        return found

    def pages_listed(self):
        """What /debug/pages of each node lists as not free."""
        token = next((o.partition("=")[2] for o in self.options if o.startswith("node:--cluster-token=")), None)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return {node.name: list(rows_of(get(node.address, "/debug/pages", headers).json())) for node in self.nodes}

    def baseline(self):
        return Baseline(self)


class Daemon:
    """One program started by hand, with what it says."""

    def __init__(self, build, name, *options, env=None, around=()):
        self.name, self.lines = name, []
        argv = [*around, os.path.join(build, name, f"baton-{name}"), *options]
        if name != "router" and not any(option.startswith("--engine") for option in options):
            argv += ["--engine=sim", f"--sim-vocab={n_ids(TINY)}", "--sim-step=1"]
            for option in ("--sim-page-bytes=8192", "--sim-tail-bytes=16384"):
                if not any(o.startswith(option.split("=")[0]) for o in options):
                    argv.append(option)
        self.child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                                      env={**environment(), **(env or {})})
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.child.stdout), daemon=True)
        self.reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.child.kill()
        self.child.wait()

    def said(self):
        return "".join(self.lines)

    def says(self, text, seconds=5):
        wait_for(f"{self.name} says {text!r}; it said {self.said()[-1500:]}", lambda: text in self.said(), seconds)
        return self.said()

    def ends(self, seconds=2.0):
        """Its exit code, once it ends by itself."""
        wait_for(f"{self.name} ends; it said {self.said()[-1500:]}", lambda: self.child.poll() is not None, seconds)
        code = self.child.wait()
        self.reader.join(10)
        need("Sanitizer" not in self.said() and "runtime error" not in self.said(), "a sanitizer's report", self.said())
        return code


def run_for(argv, seconds, data=b""):
    """(exit code, what it said) of a program that ends by itself, (None, what it said) if it still runs then."""
    start = time.monotonic()
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             env=environment())
    while True:
        try:
            said, _ = child.communicate(data, timeout=0.2)
            return child.returncode, said.decode(errors="replace")
        except subprocess.TimeoutExpired:
            data = None  # it is under way
            if lost.over(start, seconds * PATIENCE):
                child.kill()
                return None, child.communicate()[0].decode(errors="replace")


def n_ids(model):
    """Ids of a model's tokenizer."""
    with open(os.path.join(model, "tokenizer.json"), encoding="utf-8") as file:
        tokenizer = json.load(file)
    return max([*tokenizer["model"]["vocab"].values(), *(t["id"] for t in tokenizer["added_tokens"])]) + 1


def objects_with(members, value):
    """Every object of a listing that has these members, whatever it is nested in."""
    if isinstance(value, dict):
        if members <= value.keys():
            yield value
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from objects_with(members, one)


def rows_of(listing):
    """What a /debug/pages lists as not free."""
    return objects_with({"state", "owner"}, listing)


def ledgers_of(listing):
    """Every ledger of a /debug/pages."""
    return objects_with({"states", "total"}, listing)


class Baseline:
    """What a cluster held when it was idle, to be compared after each case."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.pids = cluster.pids()
        wait_for("an idle cluster", lambda: not self.busy(), 10)
        self.held = cluster.held()
        self.descriptors = {p.name: p.descriptors() for p in cluster.processes.values()}
        self.rss = {p.name: p.rss_bytes() for p in cluster.processes.values()}
        # Sanitizers never give small blocks back; a release build's allocator keeps some too.
        self.rss_slack = (96 if cluster.sanitized else 24) << 20

    def busy(self):
        return [row for rows in self.cluster.pages_listed().values() for row in rows]

    def difference(self):
        """Texts of what differs; empty when all is as before."""
        found = []
        for name, gauges in self.cluster.held().items():
            for key in sorted(set(gauges) | set(self.held[name])):
                if gauges.get(key) != self.held[name].get(key):
                    found.append(f"{name} {key}: was {self.held[name].get(key)}, is {gauges.get(key)}")
        for row in self.busy():
            found.append(f"not free: {row}")
        for process in self.cluster.processes.values():
            now, before = process.descriptors(), list(self.descriptors[process.name])
            added = list(now)
            for kind in before:
                if kind in added:
                    added.remove(kind)
            if added:
                found.append(f"{process.name} has new descriptors: {added}")
        return found

    def check(self, seconds=4.0):
        pids = self.cluster.pids()
        check("pids", pids, self.pids)
        start = time.monotonic()
        while True:
            found = self.difference()
            if not found:
                break
            if lost.over(start, seconds * PATIENCE):
                raise Wrong("not back at the baseline:\n  " + "\n  ".join(found[:30]))
            time.sleep(0.1)
        for process in self.cluster.processes.values():
            grown = process.rss_bytes() - self.rss[process.name]
            need(grown <= self.rss_slack, f"{process.name} has grown by {grown >> 20} MiB")
        answer = self.cluster.chat("A plain request.", max_tokens=4)
        check(f"a plain request afterwards ({answer.body!r:.200})", answer.status, 200)
        wait_for("an idle cluster after the plain request", lambda: not self.difference(), 4)


class Tokenizer:
    """Ids of texts, by the tokenizer of the router as a filter; for scripts that must be there before it runs."""

    def __init__(self, build, model=TINY):
        self.argv = [os.path.join(build, "tests", "model", "tokenize_tool"), os.path.join(model, "tokenizer.json")]

    def ids(self, *texts):
        lines = "".join(json.dumps(text) + "\n" for text in texts)
        done = subprocess.run(self.argv, input=lines, capture_output=True, text=True, timeout=60, check=True,
                              env=environment())
        return [[int(i) for i in line.split()] for line in done.stdout.splitlines()]


def scripted(tokenizer, outputs, **common):
    """Entries of a script: {key: text or ids}. A prompt that has the six digits of the key gets the output. Digits
    are split by threes before anything else, so their ids are the same in every context."""
    keys = tokenizer.ids(*(digits(key) for key in outputs))
    texts = iter(tokenizer.ids(*(o for o in outputs.values() if isinstance(o, str))) if any(
        isinstance(o, str) for o in outputs.values()) else [])
    return [{"when_ids": key, "ids": next(texts) if isinstance(output, str) else output, **common}
            for key, output in zip(keys, outputs.values())]


def digits(key):
    """Six digits for a short name, the same in every run."""
    value = 7
    for letter in key:
        value = (value * 131 + ord(letter)) % 899999
    return str(100000 + value)


# ------------------------------------------------------------------------------------------------ load


def together(jobs, n=None):
    """Runs all jobs at once (or n at a time) in threads; their results in order. The first error is raised."""
    results, errors = [None] * len(jobs), []
    todo = iter(range(len(jobs)))
    lock = threading.Lock()

    def work():
        while True:
            with lock:
                i = next(todo, None)
            if i is None:
                return
            try:
                results[i] = jobs[i]()
            except BaseException as problem:  # pylint: disable=broad-except
                errors.append(problem)

    threads = [threading.Thread(target=work) for _ in range(n or len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


# ------------------------------------------------------------------------------------------------ running cases


class Suite:
    """The cases of one file, run on clusters that they share."""

    def __init__(self):
        self.groups = []
        self.alone = []
        self.waiting = []
        self.lock = threading.Lock()

    def cluster(self, layouts=("split", "lone"), **options):
        """A decorator's maker: cases of it run on one cluster a layout. options: of Cluster; `script` may be a
        function of the build folder."""
        group = {"layouts": layouts, "options": options, "cases": []}
        self.groups.append(group)

        def case(name):
            def keep(function):
                group["cases"].append((name, function))
                return function
            return keep

        return case

    def case(self, name):
        """A case that starts what it needs by itself: function(build)."""
        def keep(function):
            self.alone.append((name, function))
            return function
        return keep

    def beside(self, name):
        """As `case`, for one that does little but wait for a limit of half a minute: it runs while the others do."""
        def keep(function):
            self.waiting.append((name, function))
            return function
        return keep

    def main(self):
        build, wanted = os.path.abspath(sys.argv[1]), sys.argv[2:]
        lost.watch(build)
        self.n, self.failed = 0, 0
        besides = [threading.Thread(target=self.run, args=(name, "", lambda f=function: f(build)))
                   for name, function in self.waiting if not wanted or name in wanted]
        for thread in besides:
            thread.start()
        layouts = os.environ.get("CASES_LAYOUTS", "split,lone").split(",")
        for name, function in self.alone:
            if not wanted or name in wanted:
                self.run(name, "", lambda f=function: f(build))
        for group in self.groups:
            cases = [(n, f) for n, f in group["cases"] if not wanted or n in wanted]
            for layout in group["layouts"]:
                if cases and layout in layouts:
                    self.run_group(build, layout, group["options"], cases)
        for thread in besides:
            thread.join()
        print(f"1..{self.n}", flush=True)
        sys.exit(1 if self.failed else 0)

    def run_group(self, build, layout, options, cases):
        options = dict(options)
        if callable(options.get("script")):
            options["script"] = options["script"](build)
        cluster = Cluster(build, layout, **options)
        try:
            with cluster:
                warm(cluster)
                baseline = cluster.baseline()
                for name, function in cases:
                    self.run(name, layout, lambda f=function: (f(cluster), baseline.check()), cluster)
        except (Wrong, OSError, subprocess.SubprocessError) as problem:
            self.tell(False, ",".join(n for n, _ in cases), layout, 0.0, str(problem))
        for line in getattr(cluster, "last_log", "").splitlines():
            if "Sanitizer" in line or "runtime error:" in line or "assertion" in line.lower():
                self.tell(False, "log", layout, 0.0, line)
                break

    def run(self, name, layout, function, cluster=None):
        start, problem = time.monotonic(), None
        try:
            function()
        except Skip as reason:
            with self.lock:
                self.n += 1
                print(f"ok {self.n} - {name} {layout} # SKIP {reason}", flush=True)
            return
        except Exception as error:  # pylint: disable=broad-except
            where = traceback.extract_tb(error.__traceback__)
            lines = [f"{os.path.basename(f.filename)}:{f.lineno}" for f in where if "/cases/" in f.filename]
            problem = f"{type(error).__name__} at {' '.join(lines[-4:])}: {error}"
            if cluster is not None:
                lines = 400 if os.environ.get("CASES_VERBOSE") else 12
                problem += "\nlog:\n" + "\n".join(cluster.log().splitlines()[-lines:])
        self.tell(problem is None, name, layout, time.monotonic() - start, problem)

    def tell(self, good, name, layout, seconds, problem):
        with self.lock:
            self.n += 1
            self.failed += not good
            print(f"{'ok' if good else 'not ok'} {self.n} - {name} {layout} ({seconds:.1f} s)", flush=True)
            for line in (problem or "").splitlines():
                print("# " + line, flush=True)


def warm(cluster):
    """One request of each kind, so that what is made once is made before the baseline."""
    for _ in range(2):
        cluster.good_chat("A plain request.", max_tokens=4)
        stream = cluster.chat_stream("A plain request.", max_tokens=4, stream_options={"include_usage": True})
        need(isinstance(stream, Stream), "a stream", stream)
        cluster.tokens(prompt="warm")


def kill(pid, number=signal.SIGKILL):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
