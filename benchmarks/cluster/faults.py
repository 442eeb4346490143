"""Which faults there are, and their order: pure, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.cluster.network import Links, between
from benchmarks.cluster.wire import Rule

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
    """Return the condition of the network during a fault."""
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
