"""The worker of the plane benchmark: packs stored and announced by the rollout service's own code, several at a time.

A separate process, which imports no more than a worker does. With ``hop`` off it announces its groups as scored
itself: no reward service, one hop from producer to consumer.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.plane.groups import NUM_TEMPLATES, Case, make_template

from penstock.protocol import subjects
from penstock.protocol.activity import Activity
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.facts import GroupGenerated, GroupScored, ScoredGroup
from penstock.protocol.trajectory import Group
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.fact_publisher import Receipt
from penstock.protocol.transport.pending import Pending
from penstock.rollout_service.metrics import WorkerMetrics
from penstock.rollout_service.packs.announce_pack import PackAnnouncer

RUN_ID = "bench"
IN_FLIGHT = 8  # packs that a worker stores and announces concurrently


@dataclass(frozen=True, slots=True)
class _Given:
    """A delivery without acknowledgement: the benchmark starts at the put."""

    traceparent: str = ""
    num_delivered: int = 1


@dataclass(frozen=True, slots=True)
class _Received:
    pack_id: str
    split: str = "train"
    delivery: _Given = _Given()


class _ScoredAtOnce:
    """Replace the bus: announce every generated pack as scored."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def publish(self, _subject: str, fact: GroupGenerated, *, msg_id: str, **how: Any) -> Pending[Receipt]:
        groups = tuple(
            ScoredGroup(generated=group, rewards=(0.0,) * len(group.completion_tokens), scorer="none")
            for group in fact.groups
        )
        scored = GroupScored(**{**dict(fact), "groups": groups})
        return self._bus.publish(subjects.scored(fact.run_id, "train"), scored, msg_id=msg_id, **how)


async def _announce_all(announcer: PackAnnouncer, case: Case, num_packs: int, templates: Sequence[Group]) -> None:
    numbers = iter(range(num_packs))

    async def announce_some() -> None:
        for number in numbers:
            first = number * case.groups_per_pack
            groups = [
                replace(templates[n % len(templates)], group_id=f"e0.p{n}.a0")
                for n in range(first, first + case.groups_per_pack)
            ]
            await announcer.announce(_Received(f"pack-{number}"), groups)  # type: ignore[arg-type]

    await asyncio.gather(*(announce_some() for _ in range(IN_FLIGHT)))


def main() -> None:
    """Print "ready", wait for a line on stdin, announce all packs, print the measurements."""
    given = json.loads(sys.argv[1])
    case, num_packs = Case(**given["case"]), given["count"]
    templates = [make_template(case.size, seed) for seed in range(NUM_TEMPLATES)]
    with Bus.connect(NatsSettings(**given["nats"]), name="bench-worker") as bus:
        announcer = PackAnnouncer(
            bus=bus if case.hop else _ScoredAtOnce(bus),  # type: ignore[arg-type]
            blobs=Blobs(S3Settings(**given["s3"])),
            activity=Activity(),
            metrics=WorkerMetrics(),
            run_id=RUN_ID,
            worker_id="w0",
        )
        gc.freeze()  # as the service does
        print("ready", flush=True)
        sys.stdin.readline()
        started, cpu = time.time(), time.process_time()
        asyncio.run(_announce_all(announcer, case, num_packs, templates))
        print(json.dumps({"started": started, "cpu_s": time.process_time() - cpu}), flush=True)


if __name__ == "__main__":
    main()
