"""The network between the hosts, in user space: passes on, delays, slows down or drops every IP packet.

    python -m tests.rigs.cluster.wire NAME=ADDRESS[@NAMESPACE] ...

Each host has one TUN device, ``eth0`` in its namespace (or ``NAME`` in the main one), of which this process has the other end. Rules
come as lines of JSON on stdin: ``[[from, to, {"cut": true, "loss": 0.1, "delay_s": 0.1, "bytes_per_s": 100000}], ...]``, for one
direction each; a line replaces all rules before it and is answered with ``ok``. A kernel with netem would do the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import json
import os
import random
import selectors
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU = 9000
_QUEUE_S = 2.0  # what would wait longer for a slow link is dropped, as a full queue of a router does
_NICENESS = -15  # no network waits for the CPU of its hosts
_BATCH = 64  # packets of one host in a row


@dataclass(frozen=True, slots=True)
class Rule:
    """What happens to packets in one direction between two hosts."""

    cut: bool = False
    loss: float = 0.0
    delay_s: float = 0.0
    bytes_per_s: float = 0.0


class Wire:
    def __init__(self, hosts: list[str]) -> None:
        self._devices: dict[bytes, int] = {}  # by address
        self._addresses: dict[str, bytes] = {}
        self._rules: dict[tuple[bytes, bytes], Rule] = {}
        self._free_at: dict[tuple[bytes, bytes], float] = {}
        self._late: list[tuple[float, int, int, bytes]] = []  # heap: when, tie-breaker, device, packet
        self._num_late = 0
        self._random = random.Random(1)
        self._selector = selectors.DefaultSelector()
        for host in hosts:
            name, _, where = host.partition("=")
            address, _, namespace = where.partition("@")
            self._addresses[name] = socket.inet_aton(address)
            self._devices[self._addresses[name]] = _device(name, address, namespace)
        for source, device in self._devices.items():
            self._selector.register(device, selectors.EVENT_READ, source)
        os.set_blocking(sys.stdin.fileno(), False)
        self._selector.register(sys.stdin, selectors.EVENT_READ, None)
        self._input = b""

    def run(self) -> None:
        """Pass packets on until stdin is closed."""
        while True:
            wait_s = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            for key, _ in self._selector.select(wait_s):
                if key.data is None:
                    if not self._read_rules():
                        return
                else:
                    self._read_packets(key.fd, key.data)
            now = time.monotonic()
            while self._late and self._late[0][0] <= now:
                _, _, device, packet = heapq.heappop(self._late)
                _write(device, packet)

    def _read_rules(self) -> bool:
        data = os.read(sys.stdin.fileno(), 1 << 20)
        self._input += data
        while b"\n" in self._input:
            line, _, self._input = self._input.partition(b"\n")
            self._rules = {
                (self._addresses[source], self._addresses[target]): Rule(**rule)
                for source, target, rule in json.loads(line)
            }
            self._free_at.clear()
            print("ok", flush=True)
        return bool(data)

    def _read_packets(self, device: int, source: bytes) -> None:
        for _ in range(_BATCH):
            try:
                packet = os.read(device, 65_536)
            except BlockingIOError:
                return
            except OSError:  # its host was removed
                self._selector.unregister(device)
                return
            target = packet[16:20]
            to = self._devices.get(target)
            if packet[0] >> 4 != 4 or to is None:
                continue
            rule = self._rules.get((source, target))
            if rule is None:
                _write(to, packet)
            else:
                self._pass(rule, (source, target), to, packet)

    def _pass(self, rule: Rule, link: tuple[bytes, bytes], to: int, packet: bytes) -> None:
        if rule.cut or (rule.loss and self._random.random() < rule.loss):
            return
        now = time.monotonic()
        at = now
        if rule.bytes_per_s:
            at = max(now, self._free_at.get(link, 0.0)) + len(packet) / rule.bytes_per_s
            if at - now > _QUEUE_S:
                return
            self._free_at[link] = at
        at += rule.delay_s
        if at <= now:
            _write(to, packet)
        else:
            self._num_late += 1
            heapq.heappush(self._late, (at, self._num_late, to, packet))


def _device(name: str, address: str, namespace: str) -> int:
    made = f"pw{os.getpid() % 100_000}{name}"[:15]
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH14s", made.encode(), _IFF_TUN | _IFF_NO_PI, b""))
    inside = [] if not namespace else ["-n", namespace]
    if namespace:
        _ip("link", "set", made, "netns", namespace, "name", "eth0")
    own = "eth0" if namespace else made
    _ip(*inside, "addr", "add", f"{address}/24", "dev", own)
    _ip(*inside, "link", "set", own, "mtu", str(_MTU), "up")
    return device


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


def _write(device: int, packet: bytes) -> None:
    with contextlib.suppress(OSError):  # the host's queue is full, or it is gone: a packet may be lost
        os.write(device, packet)


if __name__ == "__main__":
    os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    wire = Wire(sys.argv[1:])
    print("ok", flush=True)
    wire.run()
