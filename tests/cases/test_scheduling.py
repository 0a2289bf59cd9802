"""Short prompts behind long ones, and more requests than there is room for. Scaled down to fit two cores."""
import threading
import time

import kit
from kit import check, need, wait_for

suite = kit.Suite()
CHAT = "/v1/chat/completions"

mixed = suite.cluster(extra=["node:--sim-prefill-speed=10000", "node:--chunk=256", "decode:--max-sequences=32",
                             "prefill:--max-sequences=32", "node:--sim-step=5", f"node:--pages={1024 if kit.LONG else 256}"])


def first_token_s(c, i, n_words, **fields):
    """Of the time that the machine gave."""
    start = time.monotonic()
    stream = c.good_stream(f"{i} " + "word " * n_words, max_tokens=4, ignore_eos=True, **fields)
    return kit.given(start, stream.times[0])


@mixed("SCHED-02")
def short_prompts_behind_a_long_one(c):
    """12,000 tokens take 1.2 s to compute; 10 prompts of 20 tokens come behind it while 4 rows decode. (The report's
    numbers: 60,000, 20 and 8, then a steady flow of short ones with another long one.)"""
    n_long, n_short, n_rows = (60000, 20, 8) if kit.LONG else (12000, 10, 4)
    alone = max(first_token_s(c, i, 20) for i in range(4))
    rows = [None] * n_rows

    def decode_row(i):
        rows[i] = c.good_stream(f"row {i}", max_tokens=2000 if kit.LONG else 400, ignore_eos=True)

    threads = [threading.Thread(target=decode_row, args=(i,)) for i in range(n_rows)]
    for thread in threads:
        thread.start()
    wait_for("all rows", lambda: c.decode().metric("baton_batch_rows") == n_rows)
    long_s = []
    long_one = threading.Thread(target=lambda: long_s.append(first_token_s(c, "long", n_long)))
    long_one.start()
    computing = c.prefill() if c.layout == "split" else c.decode()
    wait_for("the long one is computed", lambda: computing.metric("baton_requests_running") > (
        0 if c.layout == "split" else n_rows))
    short = sorted(kit.together([lambda i=i: first_token_s(c, i, 20) for i in range(n_short)]))
    check("the long one is still computed: the short ones overtook it", long_s, [])
    long_one.join()
    for thread in threads:
        thread.join()
    # one chunk of 256 tokens is 26 ms; ten short ones share the device with one such chunk between them
    bound = 4 * alone + 0.6 * kit.PATIENCE
    need(short[-1] < bound, f"slowest short one {short[-1]:.2f} s, bound {bound:.2f} s (alone {alone:.2f} s)")
    need(long_s[0] < n_long / 2000 * kit.PATIENCE, "the long one ends", long_s)
    for stream in rows:
        gaps = sorted(b - a for a, b in zip(stream.times, stream.times[1:]))
        need(gaps[int(0.99 * len(gaps))] < 0.2 * kit.PATIENCE, "99th percentile of the gap between tokens",
             gaps[-5:])

    if kit.LONG:  # one long one within a steady flow of short ones: a bounded number of them overtakes it
        long_one = threading.Thread(target=lambda: long_s.append(first_token_s(c, "another", n_long)))
        long_one.start()
        flow = []
        while long_one.is_alive():
            flow.append(first_token_s(c, f"flow {len(flow)}", 20))
        long_one.join()
        need(max(flow) < bound and long_s[1] < 3 * long_s[0] + 1, "both make progress", max(flow), long_s)


full = suite.cluster(extra=["decode:--max-sequences=4", "decode:--queue=8", "prefill:--max-sequences=4", "prefill:--queue=8",
                            "node:--sim-step=5"])


@full("SCHED-03")
def more_than_there_is_room_for(c):
    n, at_once = (500, 500) if kit.LONG else (200, 100)
    results = []

    def one(i, retries):
        for attempt in range(1 + retries):
            start = time.monotonic()
            body = {"messages": [{"role": "user", "content": f"{i} hello"}], "max_tokens": 20, "ignore_eos": True,
                    "reasoning_effort": "none"}
            answer = c.stream(CHAT, body) if i % 2 else c.post(CHAT, body)
            took = kit.given(start)
            if isinstance(answer, kit.Stream):
                answer.check()
                need(answer.text(), "a good stream has text", answer.events)
                results.append((200, took))
                return
            if answer.status == 200:
                kit.has_shape(answer.json(), "Chat")
                results.append((200, took))
                return
            need(answer.status in (429, 503), "status", answer)
            need(int(answer.header("retry-after")) >= 1, "Retry-After", answer)
            answer.error()
            results.append((answer.status, took))
            if attempt < retries:
                time.sleep(0.1 + 0.01 * (i % 10))  # an SDK's back-off

    n_good = []
    for retries in (0, 2):
        results.clear()
        kit.together([lambda i=i: one(i, retries) for i in range(n)], at_once)
        good = [took for status, took in results if status == 200]
        refused = sorted(took for status, took in results if status != 200)
        n_good.append(len(good))
        need(len(good) >= 12, "those that had room were served", len(good))
        need(refused, "some were refused", len(results))
        need(max(good) < n / 30 * kit.PATIENCE, f"the wait is bounded: {max(good):.2f} s")
        need(refused[len(refused) // 2] < 1 * kit.PATIENCE, f"a refusal is quick: {refused[len(refused) // 2]:.2f} s")
        need(c.decode().metric("baton_requests_queued") <= 8, "the queue is bounded")
    need(n_good[1] > 0.5 * n_good[0], f"good answers under retries {n_good[1]}, without {n_good[0]}")
    check("failed", c.router.metric("baton_requests_failed_total") - c.router.metric("baton_requests_refused_total") <= 0, True)
    check("room again", c.chat("x", max_tokens=2).status, 200)


if __name__ == "__main__":
    suite.main()
