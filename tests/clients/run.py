#!/usr/bin/env python3
"""run.py BUILD_FOLDER: starts a cluster of the bundled model and runs every client against it; then one whose answer to
everything is three tool calls (case TOOL-04), and one of 5 ms a token that has room for twelve requests (SCHED-03).

Each client has the interpreter of the virtual environment that scripts/check --oracle makes for it; without
any of them there is nothing to run: exit 77.
"""
import json
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [os.path.join(TOP, "tests", "cases"), os.path.join(TOP, "tests")]
import ports  # noqa: E402  pylint: disable=wrong-import-position
CLIENTS = {"with_openai.py": ".venv-clients", "with_langchain.py": ".venv-clients", "with_litellm.py": ".venv-litellm"}


D = "｜DSML｜"
CALLS = (("weather", "Rome"), ("weather", "Oslo"), ("clock", "UTC"))


def scripted(build, folder):
    """The script of a simulated node that always calls three tools."""
    import kit  # pylint: disable=import-outside-toplevel
    rows = "".join(f'<{D}invoke name="{name}">\n<{D}parameter name="where" string="true">{where}</{D}parameter>\n</{D}invoke>\n'
                   for name, where in CALLS)
    ids, = kit.Tokenizer(os.path.abspath(build)).ids(f"</think>\n\n<{D}tool_calls>\n{rows}</{D}tool_calls>")
    path = os.path.join(folder, "script")
    with open(path, "w", encoding="ascii") as file:
        file.write(json.dumps({"ids": ids}) + "\n")
    return path


def main():
    runs = {name: os.path.join(TOP, venv, "bin/python") for name, venv in CLIENTS.items()
            if os.path.exists(os.path.join(TOP, venv, ".complete"))}
    if not runs:
        print("no client is installed: scripts/check --oracle does that")
        return 77
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        script = scripted(sys.argv[1], folder)
        # a sanitised build on a busy machine takes seconds for a chunk: that is no hang
        patient = ["--extra", "router:--lease=30s", "--extra", "node:--lease=30s"]
        sim = [*patient, "--engine", "sim", "--extra", "node:--sim-page-bytes=8192", "--extra", "node:--sim-tail-bytes=16384"]
        three = [*sim, "--extra", f"node:--script={script}"]
        small = [*sim, "--extra", "decode:--max-sequences=4", "--extra", "decode:--queue=8", "--extra", "node:--sim-step=5"]
        for options, arguments, names in ((patient, [], list(runs)), (three, ["--three-calls"], list(runs)),
                                          (small, ["--overload"], [name for name in runs if name == "with_openai.py"])):
            failed += run(runs, names, os.path.join(folder, "cluster"), options, arguments)
    return failed != 0


def run(runs, names, folder, options, arguments):
    """How many clients failed against a cluster with these options."""
    (port, join_port), failed = ports.free(2), 0
    cluster = [os.path.join(TOP, "scripts/cluster"), "--dir", folder]
    try:
        subprocess.run(cluster + ["up", "--port", str(port), "--join-port", str(join_port),
                                  "--build", sys.argv[1], "--quiet", *options], check=True, timeout=180)
        for name in names:
            done = subprocess.run([runs[name], os.path.join(HERE, name), "--url", f"http://127.0.0.1:{port}", *arguments],
                                  timeout=300)
            if done.returncode != 0:
                print(f"{name} {arguments}: exit {done.returncode}")
                failed += 1
    finally:
        subprocess.run(cluster + ["down"], timeout=60)
    return failed


sys.exit(main())
