"""A network to break: each process in a namespace of its own, joined by one in the middle, which this script enters.

    router   10.77.0.2 ---+
    node 1   10.77.1.2 ---+--- the middle: forwards; clients ask from here
    node 2   10.77.2.2 ---+

A cut is a routing rule of the middle that drops what goes between two addresses, both ways, without a word to anyone:
what a pulled cable or a dead switch does. Delay and loss of a pair are a detour through a device that this script
serves by hand: every packet is kept for a while, or dropped. (netem would do it for a whole link, and is missing in
many kernels.)
"""
import atexit
import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import re
import select
import socket
import struct
import subprocess
import threading
import time

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454ca, 0x0001, 0x1000
MTU = 9000
TABLE = "177"


class Missing(Exception):
    """No network namespaces here; the text says why."""


def ip(*words):
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing(f"ip {' '.join(words)}: {done.stderr.strip()}")


def write(path, text):
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def sweep():
    """Namespaces of drills that were killed and could not clean up."""
    with contextlib.suppress(OSError):
        for space in os.listdir("/run/netns"):
            match = re.match(r"drill-(\d+)-", space)
            if match and not os.path.exists(f"/proc/{match[1]}"):
                ip("netns", "delete", space)


class Net:
    """names: of the processes, the router first. Must be made by the thread that starts everything else."""

    def __init__(self, names):
        self.names = list(names)
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        self.spaces = {name: f"drill-{os.getpid()}-{name}" for name in self.names}
        self.hosts = {name: f"10.77.{i}.2" for i, name in enumerate(self.names)}
        self.rules, self.wires = [], {}
        self.closing = threading.Event()
        self.thread, self.tun = None, -1
        if self.libc.unshare(CLONE_NEWNET):
            number = ctypes.get_errno()
            os.close(self.outside)
            raise Missing(f"a network namespace needs root: {os.strerror(number)}")
        try:
            sweep()
            self.build()
        except (OSError, Missing) as problem:
            self.close()
            raise Missing(str(problem)) from None
        atexit.register(self.close)

    def build(self):
        ip("link", "set", "lo", "up")
        write("/proc/sys/net/ipv4/ip_forward", "1")
        for kind in ("all", "default"):
            write(f"/proc/sys/net/ipv4/conf/{kind}/rp_filter", "0")
        for i, name in enumerate(self.names):
            space = self.spaces[name]
            ip("netns", "add", space)
            ip("link", "add", f"v{i}", "mtu", str(MTU), "type", "veth",
               "peer", "name", "eth0", "mtu", str(MTU), "netns", space)
            ip("addr", "add", f"10.77.{i}.1/24", "dev", f"v{i}")
            ip("link", "set", f"v{i}", "up")
            ip("-n", space, "addr", "add", f"10.77.{i}.2/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "route", "add", "default", "via", f"10.77.{i}.1")
        self.tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(self.tun, TUNSETIFF, struct.pack("16sH22x", b"wire0", IFF_TUN | IFF_NO_PI))
        ip("link", "set", "wire0", "mtu", str(MTU), "up")
        ip("route", "add", "default", "dev", "wire0", "table", TABLE)
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def close(self):
        """Gives everything back; the thread that made it is outside again."""
        if self.outside < 0:
            return
        self.closing.set()
        if self.thread:
            self.thread.join(2)
        if self.tun >= 0:
            os.close(self.tun)
            self.tun = -1
        self.libc.setns(self.outside, CLONE_NEWNET)
        os.close(self.outside)
        self.outside = -1
        for space in self.spaces.values():
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    def wraps(self):
        """What scripts/cluster is to start each process by."""
        return [f"{name}:ip netns exec {space}" for name, space in self.spaces.items()]

    # ---- faults

    def rule(self, *words):
        ip("rule", "add", *words)
        self.rules.append(words)

    def cut(self, one, other=None):
        """Nothing passes between the two any more; without `other`, between one and all. Returns the wall clock."""
        a, b = self.hosts[one], self.hosts[other] if other else "10.77.0.0/16"
        now = time.time()
        self.rule("priority", "10", "from", a, "to", b, "blackhole")
        self.rule("priority", "10", "from", b, "to", a, "blackhole")
        return now

    def slow(self, one, other, delay_ms=0.0, jitter_ms=0.0, loss=0.0):
        """Both ways between the two: each packet is late, or lost."""
        for a, b in ((one, other), (other, one)):
            self.wires[socket.inet_aton(self.hosts[a]) + socket.inet_aton(self.hosts[b])] = (
                delay_ms / 1000, jitter_ms / 1000, loss)
            self.rule("priority", "20", "iif", f"v{self.names.index(a)}", "from", self.hosts[a], "to", self.hosts[b],
                      "lookup", TABLE)

    def heal(self):
        """Everything passes again."""
        for words in self.rules:
            ip("rule", "del", *words)
        self.rules = []
        return time.time()

    # ---- the detour

    def serve(self):
        """Packets out of the device, and back into it when their time has come, in their order."""
        waiting, n, last = [], 0, {}
        while not self.closing.is_set():
            timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.2
            ready, _, _ = select.select([self.tun], [], [], min(timeout, 0.2))
            now = time.monotonic()
            while ready:
                try:
                    packet = os.read(self.tun, 65536)
                except BlockingIOError:
                    break
                if len(packet) < 20 or packet[0] >> 4 != 4:
                    continue
                delay, jitter, loss = self.wires.get(packet[12:20], (0.0, 0.0, 0.0))
                if random.random() < loss:
                    continue
                due = max(last.get(packet[12:20], 0.0), now + delay + random.uniform(0, jitter))
                last[packet[12:20]] = due
                heapq.heappush(waiting, (due, n, packet))
                n += 1
            while waiting and waiting[0][0] <= now:
                try:
                    os.write(self.tun, heapq.heappop(waiting)[2])
                except BlockingIOError:
                    pass  # a full queue loses packets, as a network does
