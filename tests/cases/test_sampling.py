"""Sampling: the same bits whatever else runs; ids that are none; several choices."""
import threading
import time

import kit
from kit import Wire, check, frame, need, wait_for

suite = kit.Suite()
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# A sanitised build on a busy machine takes seconds for a chunk: that is no hang.
SMALL = ["node:--max-context=2048", "node:--pages=32", "node:--lease=30s", "router:--lease=30s"]
# The bundled model on the CPU: real arithmetic.
model = suite.cluster(engine="model", extra=SMALL)
PROMPT = "The quick brown fox jumps over the lazy dog. " * 3 + "Then"


def drawn(c, streamed=False, prompt=PROMPT, **fields):
    """The text of a completion with its logprobs: every bit that shows."""
    body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "logprobs": 2, **fields}
    if not streamed:
        choice = c.good_completion(**body)["choices"][0]
        return choice["text"], choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
    stream = c.stream(COMPLETIONS, body).check("completion")
    parts = [p["logprobs"] for p in stream.pieces() if p["logprobs"]]
    return (stream.text(), [x for p in parts for x in p["token_logprobs"]], [x for p in parts for x in p["top_logprobs"]])


WAYS = ({"temperature": 0}, {"temperature": 1, "seed": 7})


@model("SAMP-02")
def the_same_bits_under_load(c):
    alone = [drawn(c, **way) for way in WAYS]
    need(alone[0] != alone[1], "temperature does something")
    for way, wanted in zip(WAYS, alone):
        for i in range(32 if kit.LONG else 2):
            check(f"{way} again", drawn(c, streamed=bool(i % 2), **way), wanted)
    stop = threading.Event()

    def noise(i):
        while not stop.is_set():
            c.post(COMPLETIONS, {"prompt": f"noise {i} " * (3 + 2 * i), "max_tokens": 4, "temperature": 1, "ignore_eos": True,
                                 "seed": i})

    threads = [threading.Thread(target=noise, args=(i,)) for i in range(15 if kit.LONG else 2)]
    for thread in threads:
        thread.start()
    try:
        for i in range(64 if kit.LONG else 2):
            way = WAYS[i % 2]
            check(f"{way} under load", drawn(c, streamed=i > 0, **way), alone[i % 2])
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    found = kit.together([lambda way=way: drawn(c, **way) for way in WAYS * 2])
    check("several at once", found, alone * 2)
    seen = REMEMBERED.setdefault("answers", alone)
    check("the same through the split path and on one node", alone, seen)
    fingerprint = c.good_completion(PROMPT, max_tokens=1)["system_fingerprint"]
    need(isinstance(fingerprint, str) and fingerprint, "system_fingerprint is set", fingerprint)
    for seed in (-1, 0, 2**63 - 1):
        first = drawn(c, temperature=1, seed=seed)
        check(f"seed {seed} again", drawn(c, temperature=1, seed=seed), first)
        need(first != alone[1], "another seed, another draw", seed)
    for seed in (1.5, "7", True, 2**63):
        c.refused(COMPLETIONS, {"prompt": "x", "seed": seed}, 400)


REMEMBERED = {}

chunked = suite.cluster(engine="model", layouts=("split",), extra=[*SMALL, "node:--chunk=16"])


@chunked("SAMP-02-chunks")
def the_same_bits_in_other_chunks(c):
    alone = [drawn(c, **way) for way in WAYS]
    if "answers" not in REMEMBERED:
        raise kit.Skip("runs after SAMP-02, whose answers it must give")
    check("chunks of 16 tokens", alone, REMEMBERED["answers"])


# ------------------------------------------------------------------------------------------------ SAMP-04

case = suite.cluster()


@case("SAMP-04")
def ids_that_are_none(c):
    vocabulary = len_vocabulary(c)
    before = {p.name: p.metrics() for p in c.nodes}
    message = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    for path, body in ((CHAT, message), (COMPLETIONS, {"prompt": "x", "max_tokens": 2})):
        for ids in ([vocabulary], [129280], [150000], [151645], [-1], [2**31], [2**32], [2**32 + 5], [2**53 + 1], [5, -1], ["5"],
                    [5.5], [None], [[5]], 5, "5", {"0": 5}, [5] * 65):
            c.refused(path, {**body, "stop_token_ids": ids}, 400, "invalid_value")
        for bias in ({"999999": 1}, {"-1": 1}, {str(vocabulary): 1}, {"4294967301": 1}, {"9007199254740993": 1}, {"x": 1},
                     {"": 1}, {" 5": 1}, {"5.0": 1}, {"0x5": 1}, {"5": "1"}, {"5": 101}, {"5": -100.5}, {"5": None}, [5], 5):
            c.refused(path, {**body, "logit_bias": bias}, 400, "invalid_value")
        good = {**body, "stop_token_ids": [vocabulary - 1, 0], "logit_bias": {"0": -100, str(vocabulary - 1): 1.5}}
        check("ids that are some", c.post(path, good).status, 200)
    for prompt in ([-1], [vocabulary], [[1, 2], [129280]], [9007199254740993], [2**64], [], [[]], [[1], []], ["a", 1],
                   [1, "a"], [[1], "a"], [["a"]], [[1, "a"]], [None], {"a": 1}, 5, True, [1.5], [[[1]]], ["a", None]):
        c.refused(COMPLETIONS, {"prompt": prompt, "max_tokens": 2}, 400)
    for ids in ([-1], [vocabulary], [2**40], ["a"], [[1]], "x", None):
        check(f"detokenize {ids}", c.post("/detokenize", {"tokens": ids}).status, 400)
    for name, series in before.items():  # nothing of it was ever scheduled (but the two good ones)
        now = c.processes[name].metrics()
        check(f"failures on {name}", {k: v for k, v in now.items() if "failed" in k or "protocol" in k},
              {k: v for k, v in series.items() if "failed" in k or "protocol" in k})
    check("requests that a decode node saw", c.decode().metric("baton_requests_started_total") -
          sum(v for k, v in before["decode-0"].items() if k == "baton_requests_started_total"), 2)
    prompts = ["a", "b c", "d e f"]
    whole = c.good_completion(prompts, max_tokens=6, temperature=0)
    check("order of choices", [choice["index"] for choice in whole["choices"]], [0, 1, 2])
    single = [c.good_completion(prompt, max_tokens=6, temperature=0)["choices"][0]["text"] for prompt in prompts]
    check("a batch answers in the order of its prompts", [choice["text"] for choice in whole["choices"]], single)
    stream = c.stream(COMPLETIONS, {"prompt": prompts, "max_tokens": 6, "temperature": 0}).check("completion", 3)
    check("streamed", [stream.text(i) for i in range(3)], single)
    check("prompt tokens of a batch", whole["usage"]["prompt_tokens"], sum(len(c.tokens(prompt=p)) for p in prompts))
    ids = [c.tokens(prompt=p) for p in prompts]
    by_ids = c.good_completion(ids, max_tokens=6, temperature=0)
    check("by ids", [choice["text"] for choice in by_ids["choices"]], single)


def len_vocabulary(c):
    """From the router itself: the largest id it takes, by bisection."""
    low, high = 1, 1 << 20
    while high - low > 1:
        middle = (low + high) // 2
        if c.post("/detokenize", {"tokens": [middle - 1]}).status == 200:
            low = middle
        else:
            high = middle
    return low


# ------------------------------------------------------------------------------------------------ SAMP-05


@case("SAMP-05")
def several_choices(c):
    ask = {"n": 4, "temperature": 0.8, "seed": 1, "max_tokens": 32}
    whole = c.good_chat("Say something.", **ask)
    check("indexes", [choice["index"] for choice in whole["choices"]], [0, 1, 2, 3])
    prompt_tokens = len(c.tokens(messages=[{"role": "user", "content": "Say something."}]))
    check("the prompt is counted once", whole["usage"]["prompt_tokens"], prompt_tokens)
    texts = [choice["message"].get("reasoning_content") or choice["message"]["content"] for choice in whole["choices"]]
    check("choices differ", len(set(texts)), 4)
    check("the same again", [choice["message"] for choice in c.good_chat("Say something.", **ask)["choices"]],
          [choice["message"] for choice in whole["choices"]])
    stream = c.good_stream("Say something.", **ask)
    check("streamed", [stream.reasoning(i) or stream.text(i) for i in range(4)], texts)
    check("usage, streamed", stream.usage(), whole["usage"])
    one = c.good_chat("Say something.", **{**ask, "n": 1})["choices"][0]["message"]
    check("choice 0 draws with the seed itself", one, whole["choices"][0]["message"])
    # A stop that ends one choice early leaves the others alone.
    plain = {"prompt": "Go on.", "n": 4, "temperature": 0.8, "seed": 1, "max_tokens": 32}
    free = c.good_completion(**plain)["choices"]
    stop = next(free[2]["text"][i:i + 3] for i in range(1, 28)
                if not any(free[2]["text"][i:i + 3] in free[k]["text"] for k in (0, 1, 3))
                and free[2]["text"].find(free[2]["text"][i:i + 3]) == i)
    for streamed in (False, True):
        if streamed:
            cut = c.stream(COMPLETIONS, {**plain, "stop": stop}).check("completion", 4)
            found = [(cut.text(i), cut.finish(i)) for i in range(4)]
        else:
            found = [(k["text"], k["finish_reason"]) for k in c.good_completion(**plain, stop=stop)["choices"]]
        wanted = [(free[i]["text"], free[i]["finish_reason"]) for i in range(4)]
        wanted[2] = (free[2]["text"][:free[2]["text"].index(stop)], "stop")
        check("one choice stops", found, wanted)
    start = time.monotonic()
    error = c.refused(CHAT, {"messages": [{"role": "user", "content": "x"}], "n": 17}, 400, "invalid_value", "n")
    kit.in_time("a refusal", start, 1)
    need("16" in error["message"], "the limit is named", error)
    for n in (0, -1, 1.5, "4", True, 2**40):
        c.refused(CHAT, {"messages": [{"role": "user", "content": "x"}], "n": n}, 400, "invalid_value", "n")
    check("sixteen", len(c.good_chat("x", n=16, max_tokens=2)["choices"]), 16)
    # The client leaves midway.
    cancelled = c.router.metric("baton_requests_cancelled_total")
    for half in (False, True):
        with Wire(c.address) as wire:
            wire.send(frame("POST", CHAT, {"messages": [{"role": "user", "content": "x"}], "n": 4, "max_tokens": 20000,
                                           "ignore_eos": True, "stream": True}))
            wire.head()
            wait_for("four rows", lambda: c.decode().metric("baton_batch_rows") == 4)
            if half:
                wire.reset()
        wait_for("no rows", lambda: c.decode().metric("baton_batch_rows") == 0, 2)
    check("cancelled", c.router.metric("baton_requests_cancelled_total"), cancelled + 2)
    # More samples at once than there are sequences: they take turns, and none hangs.
    jobs = [lambda i=i: (c.good_stream if i % 2 else c.good_chat)(f"many {i}", **{**ask, "seed": i}) for i in range(8)]
    together = kit.together(jobs)
    for i, answer in enumerate(together):
        single = c.good_chat(f"many {i}", **{**ask, "seed": i})
        usage = answer.usage() if i % 2 else answer["usage"]
        check(f"usage of request {i} of 8 at once", usage, single["usage"])


if __name__ == "__main__":
    suite.main()
