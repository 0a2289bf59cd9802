"""Ports for what a test starts: free now, and nobody else's while the test runs.

A port that was bound to 0 and let go can be anybody's who binds to 0 or connects next, and nodes do both many times
before their router listens. So these lie outside the range that the kernel takes from by itself. A process has a block
of them until it ends, claimed by the name of a socket: tests that run beside each other look at the same names.
"""
import random
import socket

N_BLOCK = 100  # in turn: a port comes back when 99 others were handed out, and only while nobody listens on it


def _blocks():
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        low, high = map(int, file.read().split())
    below, above = (10000, low), (high + 1, 65536)
    first, end = max(below, above, key=lambda span: span[1] - span[0])
    blocks = [range(at, at + N_BLOCK) for at in range(first, end - N_BLOCK + 1, N_BLOCK)]
    random.shuffle(blocks)
    return blocks


class _Block:
    """The ports of this process."""

    def __init__(self):
        for self.ports in _blocks():
            self.name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                self.name.bind(f"\0baton-test-ports-{self.ports[0]}")
                break
            except OSError:
                self.name.close()
        else:
            raise OSError(f"no {N_BLOCK} ports are left outside the kernel's own range")
        self.n_given = 0

    def next(self):
        for _ in self.ports:
            port = self.ports[self.n_given % N_BLOCK]
            self.n_given += 1
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("0.0.0.0", port))
                    return port
                except OSError:
                    pass
        raise OSError(f"all of the ports {self.ports[0]} to {self.ports[-1]} are taken")


_block = []


def free(n):
    """n ports, all different."""
    if not _block:
        _block.append(_Block())
    return [_block[0].next() for _ in range(n)]
