#!/usr/bin/env python3
"""run.py BUILD_FOLDER: starts a cluster of the bundled model and runs every client against it.

Each client has the interpreter of the virtual environment that scripts/check --oracle makes for it; without
any of them there is nothing to run: exit 77.
"""
import os
import socket
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
CLIENTS = {"with_openai.py": ".venv-clients", "with_langchain.py": ".venv-clients", "with_litellm.py": ".venv-litellm"}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def main():
    runs = {name: os.path.join(TOP, venv, "bin/python") for name, venv in CLIENTS.items()
            if os.path.exists(os.path.join(TOP, venv, ".complete"))}
    if not runs:
        print("no client is installed: scripts/check --oracle does that")
        return 77
    port, failed = free_port(), 0
    with tempfile.TemporaryDirectory() as folder:
        cluster = [os.path.join(TOP, "scripts/cluster"), "--dir", folder]
        try:
            subprocess.run(cluster + ["up", "--port", str(port), "--join-port", str(free_port()),
                                      "--build", sys.argv[1], "--quiet"], check=True, timeout=180)
            for name, python in runs.items():
                done = subprocess.run([python, os.path.join(HERE, name), "--url", f"http://127.0.0.1:{port}"],
                                      timeout=300)
                if done.returncode != 0:
                    print(f"{name}: exit {done.returncode}")
                    failed += 1
        finally:
            subprocess.run(cluster + ["down"], timeout=60)
    return failed != 0


sys.exit(main())
