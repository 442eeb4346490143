"""Hosts as network namespaces, joined by `wire.py`; the faults between them, in an order that is the same for the same seed."""

from __future__ import annotations

import json
import os
import random
import select
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.rigs.cluster.wire import Rule

NATS = ("nats0", "nats1", "nats2")
S3, TRAINER, REWARD = "s3", "trainer", "reward"
WORKERS = ("worker-0", "worker-1")
GUEST = "worker-2"  # joins and leaves in mid-run
SERVICES = (TRAINER, REWARD, *WORKERS)
HOSTS = (*NATS, S3, *SERVICES, GUEST)
_CLIENTS = (*SERVICES, GUEST)
_CUT = Rule(cut=True)
SKEW_S = 120

PARTITIONS = ("worker-NATS", "trainer-S3", "reward-NATS", "NATS-NATS", "trainer-NATS", "worker-S3")
SHAPES = ("loss 10 %", "latency 200 ms", "slow S3")
SKEWS = (f"clock +{SKEW_S} s", f"clock -{SKEW_S} s")
KILLS = (
    "kill a NATS server", "kill the NATS leader", "kill two NATS servers", "kill S3", "kill a worker", "kill the reward service",
    "kill the trainer",
)  # fmt: skip
MEMBERS = ("a worker joins and leaves",)
KINDS = (*PARTITIONS, *SHAPES, *SKEWS, *KILLS, *MEMBERS)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault; ``victim`` is the host that must be productive again, ``others`` more hosts it concerns.

    ``is_long``: it is held for ``--long-s`` seconds.
    """

    kind: str
    victim: str
    others: tuple[str, ...] = ()
    is_long: bool = False


def plan(seed: int, num_faults: int, kinds: Sequence[str] = KINDS) -> list[Fault]:
    """Return faults of all kinds equally often, in a random order; the first partition of each kind is a long one."""
    rng = random.Random(f"cluster {seed}")
    chosen = [kind for _ in range(num_faults // len(kinds)) for kind in kinds]
    chosen += rng.sample(list(kinds), num_faults - len(chosen))
    rng.shuffle(chosen)
    faults = [_fault(kind, rng) for kind in chosen]
    first = {kind: chosen.index(kind) for kind in PARTITIONS if kind in chosen}
    return [replace(fault, is_long=first.get(fault.kind) == number) for number, fault in enumerate(faults)]


def _fault(kind: str, rng: random.Random) -> Fault:
    worker = rng.choice(WORKERS)
    node, *others = rng.sample(NATS, 3)
    victims: dict[str, tuple[str, tuple[str, ...]]] = {
        **dict.fromkeys(("worker-NATS", "worker-S3", "kill a worker"), (worker, (S3,))),
        **dict.fromkeys(("trainer-S3", "trainer-NATS", "kill the trainer"), (TRAINER, (S3,))),
        **dict.fromkeys(("reward-NATS", "kill the reward service"), (REWARD, ())),
        **dict.fromkeys(("NATS-NATS", "kill a NATS server", "kill two NATS servers"), (node, tuple(others))),
        **dict.fromkeys(("slow S3", "kill S3"), (S3, ())),
        **dict.fromkeys(MEMBERS, (GUEST, ())),
        **dict.fromkeys(SKEWS, (rng.choice(SERVICES), ())),
    }
    return Fault(kind, *victims.get(kind, ("all", ())))


def links(fault: Fault) -> Links:
    match fault.kind:
        case "worker-NATS" | "reward-NATS" | "trainer-NATS":
            return between((fault.victim,), NATS, _CUT)
        case "worker-S3" | "trainer-S3":
            return between((fault.victim,), (S3,), _CUT)
        case "NATS-NATS":
            return between((fault.victim,), fault.others, _CUT)
        case "loss 10 %":
            return between(HOSTS, HOSTS, Rule(loss=0.1))
        case "latency 200 ms":
            return between(HOSTS, HOSTS, Rule(delay_s=0.1))  # there and back 200 ms
        case "slow S3":
            return between((S3,), _CLIENTS, Rule(delay_s=0.02, bytes_per_s=200_000.0))
        case _:
            return {}


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
        if self._wire is not None:
            self._wire.kill()
            self._wire.wait()
            for pipe in (self._wire.stdin, self._wire.stdout):
                if pipe is not None:
                    pipe.close()
        for namespace in self._namespaces.values():
            subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True, timeout=20)

    def inside(self, host: str) -> list[str]:
        return ["ip", "netns", "exec", self._namespaces[host]] if host != OPERATOR else []

    def set(self, links: Links) -> None:
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
                f"tests.rigs.cluster.wire did not answer within {_ANSWER_S:.0f} s (exit code {self._wire.poll()})"
            )


def between(some: Iterable[str], others: Iterable[str], rule: Rule) -> Links:
    """Return a rule for both directions of all links between two sets of hosts."""
    pairs = [(a, b) for a in some for b in others if a != b]
    return {link: rule for a, b in pairs for link in ((a, b), (b, a))}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)
