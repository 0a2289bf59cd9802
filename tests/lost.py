"""The time that the machine did not give, for tests in Python: what lost.h is for those in C, by the program that is built
of it. Instants are those of time.monotonic().

    lost.watch(build)                       before the first instant that is asked about; without, nothing is ever lost
    lost.within("the answer", start, 1.0)   whether it is no more than a second since then, beside what was lost
"""
import atexit
import os
import subprocess
import threading
import time


class Clock:
    """The program that ticks."""

    def __init__(self, build):
        self.lock = threading.Lock()
        self.child = subprocess.Popen([os.path.join(build, "tests", "lost")], stdin=subprocess.PIPE,
                                      stdout=subprocess.PIPE, text=True, bufsize=1)
        self.child.stdout.readline()
        atexit.register(self.close)

    def close(self):
        self.child.stdin.close()
        self.child.wait()

    def between(self, start, end):
        with self.lock:
            self.child.stdin.write(f"{int(start * 1e9)} {int(end * 1e9)}\n")
            return int(self.child.stdout.readline()) * 1e-9


_clocks = []


def watch(build):
    if not _clocks:
        _clocks.append(Clock(build))


def between(start, end=None):
    """Seconds that were lost from `start` to `end`, which is now unless it is given."""
    return _clocks[0].between(start, time.monotonic() if end is None else end) if _clocks else 0.0


def within(what, start, limit, end=None):
    """Whether it took at most `limit` seconds beside what was lost; says so where it took more."""
    took = (time.monotonic() if end is None else end) - start
    if took <= limit:
        return True
    lost = between(start, start + took)
    good = took <= limit + lost
    print(f"# {what} took {took:.2f} s, the limit is {limit:g} s and the machine lost {lost:.2f} s: "
          f"{'within' if good else 'too late'}", flush=True)
    return good


def over(start, seconds):
    """Whether `seconds`, beside what was lost, have passed since then: the end of a wait."""
    now = time.monotonic()
    return now - start > seconds and now - start > seconds + between(start, now)
