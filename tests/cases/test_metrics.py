"""Metrics: as many series after any traffic as before, and nothing of users in them."""
import json
import random
import shutil
import subprocess

import kit
from kit import Wire, check, frame, need

suite = kit.Suite()
KEY = "sesame-5061"
SECRET = "Wurstwasser"
case = suite.cluster(extra=[f"router:--api-key={KEY}"])


def series(c):
    return {p.name: sorted(p.metrics()) for p in c.processes.values()}


def odd_text(rng):
    pieces = ['a"b\nc{}', "x\\y", "},{", "é你🙂", "\0", "%n%s", "# HELP x", "le=\"0.5\"", "${HOME}", "../..", str(rng.random())]
    return "".join(rng.choice(pieces) for _ in range(3)) + str(rng.random())


@case("MET-01")
def nothing_of_a_request_makes_a_series(c):
    rng = random.Random(5061)
    c.good_chat("x", max_tokens=2)
    c.chat("x", model="nobody")
    c.ask("GET", "/nowhere")
    before = series(c)
    n = {"n": 0}

    def some(count):
        with Wire(c.address) as wire:
            for i in range(count):
                kind = rng.randrange(4)
                label = "".join(rng.choice("abcXYZ019-_.{}\"'\\=,") for _ in range(12))
                headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": label, "User-Agent": label}
                body = None
                if kind == 0:
                    method, path = "GET", "/" + "".join(rng.choice("abc/%7E~{}=,\"\\'") for _ in range(12)).replace("\"", "")
                elif kind == 1:
                    method, path, body = "POST", "/v1/chat/completions", {
                        "model": odd_text(rng), "user": odd_text(rng), "messages": [{"role": "user", "content": SECRET}]}
                elif kind == 2:
                    method, path, body = "POST", "/v1/chat/completions", {
                        odd_text(rng): 1, "user": odd_text(rng), "messages": [{"role": "user", "content": SECRET + str(i)}],
                        "max_tokens": 1}
                else:
                    method, path = rng.choice(["BREW", "GET", "PATCH"]), "/v1/models/" + label.replace("\"", "")
                wire.send(frame(method, path, body, headers))
                answer = wire.answer()
                if kind == 1:
                    check("an unknown model", (answer.status, answer.error()["code"]), (404, "model_not_found"))
                need(answer.status in (200, 400, 404, 405), "status", answer)
                n["n"] += 1
                if answer.header("connection") == "close":
                    return

    kit.together([lambda: some(40) for _ in range(60)], 4)
    need(n["n"] > 1000, "requests that were made", n)
    after = series(c)
    for name in before:
        check(f"series of {name}", sorted(set(after[name]) - set(before[name])), [])
    error = c.refused("/v1/chat/completions", {"model": 'a"b\nc{}', "messages": [{"role": "user", "content": "x"}]}, 404,
                      "model_not_found")
    need('a"b' in error["message"], "the model is named to who asked", error)
    for process in c.processes.values():
        answer = kit.get(process.address, "/metrics")
        text = answer.body.decode("utf-8")
        need(answer.header("content-type").startswith("text/plain; version=0.0.4"), "content type", answer.headers)
        for word in (SECRET, KEY, 'a"b', "nobody"):
            need(word not in text, f"{word!r} in the metrics of {process.name}")
        need(text.count("\n") < 500, "lines", text.count("\n"))
    log = c.log()
    for word in (SECRET, KEY, "Bearer"):
        need(word not in log, f"{word!r} in the log", [line for line in log.splitlines() if word in line][:3])


@case("MET-01-promtool")
def promtool_finds_nothing(c):
    promtool = shutil.which("promtool")
    if promtool is None:
        raise kit.Skip("promtool is not installed (package prometheus)")
    c.good_stream("x", max_tokens=5)
    c.chat("x", model="nobody")
    for process in c.processes.values():
        text = kit.get(process.address, "/metrics").body
        done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, timeout=60, check=False)
        said = (done.stdout + done.stderr).decode()
        check(f"promtool on {process.name}: {said:.400}", (done.returncode, said.strip()), (0, ""))


if __name__ == "__main__":
    suite.main()
