"""The trainer's and the reward service's side of the bus, for tests of a worker: publish, issue, collect."""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file
from torch import Tensor

from penstock.deploy.processes.child import Child
from penstock.deploy.quickstart_task import write_model
from penstock.protocol import streams, subjects
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.facts import (
    DeadLetter,
    GroupGenerated,
    Heartbeat,
    RunEvent,
    TaskIssued,
    WeightsApplied,
    WeightsPublished,
    WeightsRefused,
    decode,
)
from penstock.protocol.groups import BlobRef, Task
from penstock.protocol.packs import group_pack
from penstock.protocol.trajectory import Group
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.delivery import Delivery
from penstock.protocol.transport.inbox import Inbox
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.adapter_format import AdapterConfig, published_name
from penstock.protocol.weights.export import export_version
from penstock.protocol.weights.manifest import VersionManifest
from penstock.protocol.weights.version_reader import WeightReader
from penstock.trainer.publishing.weight_buckets import AdapterBase
from tests import forked
from tests.rollout_service.engines.faulty_engine import FaultyEngine
from tests.servers import secret_file, wait_for
from tests.weights_source import WeightsSource, adapter_base

ADAPTER = AdapterConfig(r=4, lora_alpha=8.0, target_modules=("q_proj", "v_proj", "down_proj"))


class TrainerSide:
    """One run, seen from outside its workers."""

    def __init__(self, bus: Bus, blobs: Blobs, run_id: str, folder: Path) -> None:
        self.bus = bus
        self.blobs = blobs
        self.run_id = run_id
        self.folder = folder
        self.applied: list[WeightsApplied] = []
        self.refused: list[WeightsRefused] = []
        self._source: WeightsSource | None = None
        self.dead: list[DeadLetter] = []
        self.events: list[RunEvent] = []
        bus.tail(
            f"{run_id}-weights", subjects.weights_applied(run_id), WeightsApplied, self.applied.append, from_start=True
        ).wait()
        refused = subjects.weights_refused(run_id)
        bus.tail(f"{run_id}-weights", refused, WeightsRefused, self.refused.append, from_start=True).wait()
        bus.tail(f"{run_id}-dead", subjects.dead(run_id), DeadLetter, self.dead.append, from_start=True).wait()
        bus.tail(f"{run_id}-events", subjects.events(run_id), RunEvent, self.events.append, from_start=True).wait()
        self._generated: Inbox[GroupGenerated] = bus.inbox(streams.generated_consumer(run_id), GroupGenerated).wait()
        self._live = bus.key_value(streams.live_bucket(run_id).bucket).wait()

    def tensors(self, version: int) -> dict[str, Tensor]:
        model = self.folder / f"model-{version}"
        if not model.exists():
            write_model(model, seed=version)
        return load_file(model / "model.safetensors")

    def publish(self, version: int, *, corrupt: str = "", announce: bool = True) -> WeightsPublished:
        """Publish a version of the quickstart's model as the trainer does.

        ``corrupt`` names the end of the keys whose stored bytes differ from those of the manifest.
        Without ``announce`` only the head moves.
        """
        tensors = self.tensors(version)
        if self._source is None:
            self._source = WeightsSource(self.bus, self.blobs, self.run_id, self.folder / f"model-{version}")
        ends = (corrupt,) if corrupt else ()
        return self._source.publish(version, tensors, corrupt=ends, announce=announce)

    def base(self) -> AdapterBase:
        return adapter_base(self.tensors(0), ADAPTER)

    def factors(self, version: int) -> dict[str, Tensor]:
        """The factors that `publish_adapter` gives a version, large enough to change completions."""
        generator = torch.Generator().manual_seed(version)
        found = {}
        for name, weight in self.tensors(0).items():
            layer = name.removesuffix(".weight")
            if layer.endswith(ADAPTER.target_modules):
                for factor, shape in (("A", (ADAPTER.r, weight.shape[1])), ("B", (weight.shape[0], ADAPTER.r))):
                    found[published_name(f"{layer}.lora_{factor}.weight")] = 0.1 * torch.randn(
                        shape, generator=generator
                    )
        return found

    def publish_adapter(self, version: int, *, corrupt: str = "") -> WeightsPublished:
        ends = (corrupt,) if corrupt else ()
        return self.source.publish(version, self.factors(version), base=self.base(), corrupt=ends)

    def root(self, fact: WeightsPublished) -> str:
        return VersionManifest.from_json(self.blobs.get(fact.manifest)).state_root

    def merged(self, fact: WeightsPublished, folder: Path) -> Path:
        """Write the whole model that a version is served as."""
        reader = WeightReader(self.blobs, self.run_id)
        manifest = reader.manifest(fact.manifest, PolicyVersion(fact.version))
        export_version(manifest, folder, reader=reader, blobs=self.blobs)
        return folder

    @property
    def source(self) -> WeightsSource:
        assert self._source is not None
        return self._source

    def announce(self, fact: WeightsPublished) -> None:
        msg_id = f"w:{fact.version}:{secrets.token_hex(8)}"
        self.bus.publish(subjects.weights_published(self.run_id), fact, msg_id=msg_id).wait()

    def issue(self, pack_id: str, tasks: Sequence[Task] = (), *, tasks_blob: BlobRef | None = None) -> None:
        self.publish_task(self.task_issued(pack_id, tasks, tasks_blob=tasks_blob), msg_id=pack_id)

    def task_issued(self, pack_id: str, tasks: Sequence[Task] = (), *, tasks_blob: BlobRef | None = None) -> TaskIssued:
        return TaskIssued(run_id=self.run_id, pack_id=pack_id, tasks=tuple(tasks), tasks_blob=tasks_blob)

    def publish_task(self, fact: TaskIssued, *, msg_id: str) -> None:
        split = fact.tasks[0].split if fact.tasks else "train"
        self.bus.publish(subjects.tasks(self.run_id, split), fact, msg_id=msg_id).wait()

    def collect(self, count: int, deadline_s: float = 180.0) -> list[Delivery[GroupGenerated]]:
        taken: list[Delivery[GroupGenerated]] = []

        def enough() -> bool:
            for delivery in self._generated.fetch(count - len(taken), 0.2).wait():
                taken.append(delivery)
                delivery.ack().wait()
            return len(taken) >= count

        wait_for(enough, f"{count} generated packs", deadline_s)
        return taken

    def collect_groups(self, count: int, deadline_s: float = 180.0) -> list[Group]:
        packs = self.collect(count, deadline_s)
        return [group for pack in packs for group in group_pack.decode(self.blobs.get(pack.fact.pack))]

    def num_tasks(self) -> int:
        """Tasks neither acknowledged nor dead-lettered, as the broker counts them."""
        return self.bus.stream_state(f"{self.run_id}-tasks").wait().num_messages

    def heartbeat(self, worker_id: str) -> Heartbeat | None:
        entry = self._live.get(streams.heartbeat_key("rollout", worker_id)).wait()
        return None if entry is None else decode(entry.value, Heartbeat)

    def wait_applied(self, worker_id: str, version: int, deadline_s: float = 180.0) -> None:
        wait_for(
            lambda: (worker_id, version) in [(fact.worker_id, fact.version) for fact in self.applied],
            f"{worker_id} to apply version {version}",
            deadline_s,
        )


def engine_url(worker: Child) -> str:
    """Return where the newest engine of a worker's own listens, as its log says."""
    return re.findall(r'"url": "([^"]+)"', worker.log_tail(200))[-1]


def num_running(worker: Child) -> int:
    return httpx.get(f"{engine_url(worker)}/v1/loads", timeout=60).json()["loads"][0]["num_running_reqs"]


def attached(engine: FaultyEngine) -> tuple[str, str]:
    """Overrides of a worker whose engine is a server at a URL."""
    return "worker.engine=sglang-url", f"worker.engine_url={engine.url}"


class WorkerRun(TrainerSide):
    """A run with workers: with an embedded engine, or at ``engine``, which has faults on demand."""

    def __init__(
        self, bus: Bus, blobs: Blobs, run_id: str, folder: Path, engine: FaultyEngine, start: Callable[..., Child]
    ) -> None:
        super().__init__(bus, blobs, run_id, folder)
        self.engine, self.start = engine, start

    def attach(self, worker_id: str = "w0", *overrides: str, engine: FaultyEngine | None = None) -> Child:
        return self.start(worker_id, *attached(engine or self.engine), *overrides)


class ForkedWorker(Child):
    def _popen(self) -> Any:
        with forked.children(nested=False):
            return super()._popen()


def worker_process(
    folder: Path, run_id: str, worker_id: str, nats: NatsSettings, s3: S3Settings, *overrides: str
) -> Child:
    command = [
        *(sys.executable, "-m", "penstock.rollout_service"),
        *(f"run.id={run_id}", f"run.dir={folder}", f"worker.id={worker_id}", "worker.retry_delay_s=0.05"),
        f"worker.cache_dir={folder / 'cache'}",  # with "auto" a killed worker leaves its copies in /dev/shm
        *(f"nats.url={nats.url}", f"nats.user={nats.user}", f"nats.password_file={secret_file(nats.secret())}"),
        *(
            f"s3.endpoint={s3.endpoint}",
            f"s3.access_key={s3.access_key}",
            f"s3.secret_key_file={secret_file(s3.secret())}",
        ),
        *overrides,
    ]
    child = ForkedWorker(f"worker {worker_id}", command, log=folder / f"{worker_id}.log")
    child.start()
    return child
