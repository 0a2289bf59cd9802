#!/usr/bin/env python3
"""test_secure: a cluster with a token and with TLS works on all its links, and who lacks either is refused.

    test_secure.py BUILD [TEST...]
"""
import os
import subprocess
import tempfile
import time

from harness import TINY, Cluster, check, check_equal, main, wait_for

COMPLETIONS = "/v1/completions"
TOKEN = "correct-horse-battery"


def ask_both_ways(cluster):
    """Answers over Join and Decode.Serve; with --local-prefill=never over Prefill.Serve, too."""
    body = {"prompt": "a secret", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    status, answer = cluster.post(COMPLETIONS, body)
    check_equal(status, 200, f"answer {answer}")
    stream = cluster.stream(COMPLETIONS, body).rest()
    check(stream.done, f"no [DONE]: {stream.broken}")
    check_equal(stream.text(), answer["choices"][0]["text"], "streamed text")


def node(cluster, log, *options, env=None):
    """A decode node that the supervisor knows nothing of; its log goes to the file."""
    # the supervisor's own token must not reach it
    clean = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    return subprocess.Popen(
        [os.path.join(cluster.build, "decode", "baton-decode"), "--die-with-parent", "--node-id", "stranger", "--router",
         f"127.0.0.1:{cluster.join_port}", "--engine", "sim", "--sim-vocab", "3000", "--pages", "8", *options],
        stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env={**clean, **(env or {})})


def check_refused(cluster, words, *options):
    """The stranger says one of the words of why, never becomes a worker, and the router goes on."""
    with tempfile.TemporaryFile() as log:
        child = node(cluster, log, *options)

        def text():
            log.seek(0)
            return log.read().decode(errors="replace")

        try:
            wait_for(f"the stranger with {options} says why", lambda: any(word in text() for word in words) or text(), 30)
            time.sleep(1)  # it goes on trying
            names = [worker["id"] for worker in cluster.workers()]
            check("stranger" not in names, f"it joined: {names}")
            check_equal(child.poll(), None, f"exit of the stranger, which said {text()}")
            check_equal(cluster.get("/readyz")[0], 200, "/readyz beside the stranger")
            ask_both_ways(cluster)
        finally:
            child.terminate()
            child.wait(30)
        check(TOKEN not in text(), "the token is in the stranger's log")


def test_token(build):
    with Cluster(build, extra=["router:--local-prefill=never", f"router:--cluster-token={TOKEN}",
                               f"node:--cluster-token={TOKEN}"]) as cluster:
        ask_both_ways(cluster)
        check_refused(cluster, ("token",), "--cluster-token=wrong")
        check_refused(cluster, ("token",))
        check(TOKEN not in cluster.log(), "the token is in the log")
        cluster.check_idle()


def test_token_of_environment(build):
    os.environ["BATON_CLUSTER_TOKEN"] = TOKEN
    try:
        with Cluster(build, extra=["router:--local-prefill=never"]) as cluster:
            ask_both_ways(cluster)
            check_refused(cluster, ("token",), "--cluster-token=wrong")
            cluster.check_idle()
    finally:
        del os.environ["BATON_CLUSTER_TOKEN"]


def openssl(folder, *arguments):
    done = subprocess.run(["openssl", *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=60, check=False)
    check_equal(done.returncode, 0, f"openssl {' '.join(arguments)}: {done.stdout}")


def authority(folder, name):
    """An authority, and a certificate of 127.0.0.1 that it signed: NAME-ca.pem, NAME.pem, NAME.key."""
    openssl(folder, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
            "-subj", f"/CN={name} authority", "-keyout", f"{name}-ca.key", "-out", f"{name}-ca.pem")
    openssl(folder, "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}",
            "-keyout", f"{name}.key", "-out", f"{name}.csr")
    with open(os.path.join(folder, "names"), "w", encoding="ascii") as file:
        file.write("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-CA", f"{name}-ca.pem", "-CAkey", f"{name}-ca.key",
            "-CAcreateserial", "-days", "2", "-extfile", "names", "-out", f"{name}.pem")
    return [f"--tls-ca={folder}/{name}-ca.pem", f"--tls-cert={folder}/{name}.pem", f"--tls-key={folder}/{name}.key"]


def test_tls(build):
    with tempfile.TemporaryDirectory(prefix="baton-tls-") as folder:
        ours, others = authority(folder, "ours"), authority(folder, "others")
        extra = ["router:--local-prefill=never", f"router:--cluster-token={TOKEN}", f"node:--cluster-token={TOKEN}"]
        extra += [f"{role}:{option}" for role in ("router", "node") for option in ours]
        with Cluster(build, extra=extra) as cluster:
            ask_both_ways(cluster)
            for options in ([], others, others[1:] + ours[:1]):  # no TLS, another authority, a stranger's certificate
                check_refused(cluster, ("does not answer", "is gone", "refused"), f"--cluster-token={TOKEN}", *options)
            cluster.check_idle()


if __name__ == "__main__":
    main([test_token, test_token_of_environment, test_tls])
