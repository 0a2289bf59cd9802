"""A router on decode nodes that play a script (scripted_node.c), for the tests of this folder.

    test_X.py ROUTER SCRIPTED_NODE MODEL [TEST...]
"""
import json
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cluster"))
import harness  # noqa: E402
from harness import check, check_equal, wait_for  # noqa: E402

ROUTER, NODE, MODEL = sys.argv[1:4]
N_VOCAB = 2560
BODY = {"prompt": [5, 6, 7], "max_tokens": 40, "temperature": 1, "seed": 11, "ignore_eos": True}


class Setup(harness.Cluster):
    """A router and scripted nodes; nodes is a list of (name, [action...])."""

    def __init__(self, nodes, options=()):
        self.nodes, self.options = nodes, options
        self.port, self.join_port = harness.ports.free(2)
        self.children, self.outputs = [], {}

    def __enter__(self):
        self.errors = tempfile.TemporaryFile("w+")
        self.router = subprocess.Popen([ROUTER, "--http-port", str(self.port), "--grpc-port", str(self.join_port),
                                        "--model", MODEL, "--die-with-parent", *self.options], stderr=self.errors)
        self.children.append(self.router)
        try:
            for name, actions in self.nodes:
                self.join(name, actions)
            wait_for("router is up", self.is_up, 30)
            wait_for("all join", lambda: sum(n["state"] == "ready" for n in self.workers()) == len(self.nodes) or
                     self.workers(), 30)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def is_up(self):
        try:
            return self.get("/healthz")[0] == 200
        except OSError as problem:
            return str(problem)

    def join(self, name, actions, vocabulary=N_VOCAB):
        output = tempfile.TemporaryFile("w+")
        self.outputs[name] = output
        child = subprocess.Popen([NODE, name, str(self.join_port), str(vocabulary), *actions], stdout=output,
                                 stderr=self.errors)
        self.children.append(child)

    def said(self, name, what):
        # The node writes through the same open file: its offset is the node's, and is not touched.
        text = os.pread(self.outputs[name].fileno(), 1 << 24, 0).decode()
        return [line for line in map(json.loads, text[:text.rfind("\n") + 1].splitlines()) if what in line]

    def log(self):
        return os.pread(self.errors.fileno(), 1 << 24, 0).decode(errors="replace")

    def __exit__(self, kind, value, trace):
        nodes_died = [child.args for child in self.children[1:] if child.poll() is not None]
        self.router.terminate()
        try:
            code = self.router.wait(20)
        except subprocess.TimeoutExpired:
            self.router.kill()
            code = "it did not end"
        for child in self.children[1:]:
            child.kill()
            child.wait()
        self.errors.seek(0)
        text = self.errors.read()
        if kind:
            print(text[-8000:], file=sys.stderr)
            return
        check(not nodes_died, f"a node found something wrong: {text[-3000:]}")
        check_equal(code, 0, f"exit of the router: {text[-3000:]}")


def main(tests):
    build = os.path.dirname(os.path.dirname(os.path.abspath(ROUTER)))
    sys.argv = [sys.argv[0], build, *sys.argv[4:]]
    harness.main(tests)
