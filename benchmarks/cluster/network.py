"""Hosts as network namespaces, joined by `wire.py`, and the conditions between them."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from benchmarks.cluster.wire import Rule

_PREFIX = "10.78.0."
_WIRE = Path(__file__).with_name("wire.py")
_ANSWER_S = 20.0
OPERATOR = "op"  # this process: no namespace, and never a fault
Links = dict[tuple[str, str], Rule]


class Network:
    """A namespace and an address for every host; use it as a context manager. Needs root, `ip` and /dev/net/tun."""

    def __init__(self, hosts: Iterable[str]) -> None:
        """Choose names of namespaces that no other process of this machine has."""
        self.hosts = (*hosts, OPERATOR)
        self.addresses = {host: f"{_PREFIX}{number}" for number, host in enumerate(self.hosts, 1)}
        self._namespaces = {host: f"pc{os.getpid()}{host}" for host in self.hosts if host != OPERATOR}
        self._wire: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Network:
        """Make the namespaces and connect them."""
        try:
            for namespace in self._namespaces.values():
                ip("netns", "add", namespace)
                ip("-n", namespace, "link", "set", "lo", "up")
            ends = [
                f"{host}={address}" + (f"@{self._namespaces[host]}" if host != OPERATOR else "")
                for host, address in self.addresses.items()
            ]
            self._wire = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_WIRE), *ends], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            self._expect_ok()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Remove them."""
        if self._wire is not None:
            self._wire.kill()
            self._wire.wait()
            for pipe in (self._wire.stdin, self._wire.stdout):
                if pipe is not None:
                    pipe.close()
        for namespace in self._namespaces.values():
            subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True, timeout=20)

    def inside(self, host: str) -> list[str]:
        """Return the beginning of a command that runs on a host."""
        return ["ip", "netns", "exec", self._namespaces[host]] if host != OPERATOR else []

    def set(self, links: Links) -> None:
        """Set the condition of every link, by direction; links that are not named are whole."""
        assert self._wire is not None
        assert self._wire.stdin is not None
        rules = [[source, target, asdict(rule)] for (source, target), rule in links.items()]
        self._wire.stdin.write(json.dumps(rules).encode() + b"\n")
        self._wire.stdin.flush()
        self._expect_ok()

    def _expect_ok(self) -> None:
        assert self._wire is not None
        assert self._wire.stdout is not None
        ready, _, _ = select.select([self._wire.stdout], [], [], _ANSWER_S)
        if not ready or self._wire.stdout.readline() != b"ok\n":
            raise TimeoutError(
                f"benchmarks.cluster.wire did not answer within {_ANSWER_S:.0f} s (exit code {self._wire.poll()})"
            )


def between(some: Iterable[str], others: Iterable[str], rule: Rule) -> Links:
    """Return a rule for both directions of all links between two sets of hosts."""
    pairs = [(a, b) for a in some for b in others if a != b]
    return {link: rule for a, b in pairs for link in ((a, b), (b, a))}


def ip(*arguments: str) -> None:
    """Run `ip`; raises CalledProcessError."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)
