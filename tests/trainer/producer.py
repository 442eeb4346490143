"""A thread that replaces rollout worker and reward service, over the real streams and objects.

Groups of `recite` depend on the prompt alone, so that two runs get the same data; those of `Sampler` are sampled from the
published weights, one token each, so that a run can learn.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tests.weights_source import read_version
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.protocol import blob_keys, rewards_offered, streams, subjects
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.facts import GroupScored, Head, TaskIssued, TaskList, decode, encode
from penstock.protocol.groups import BlobRef, ScoredGroup, Task
from penstock.protocol.packs import group_pack
from penstock.protocol.rewards_offered import RewardsOffered
from penstock.protocol.trajectory import Group, Trajectory
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion, VersionRun

Answer = tuple[Group, tuple[float, ...]]
Author = Callable[[Task, PolicyVersion], Answer]


def group_of(task: Task, completions: list[tuple[np.ndarray, np.ndarray]], version: PolicyVersion) -> Group:
    start = len(task.prompt_ids)
    trajectories = []
    for number, (tokens, logprobs) in enumerate(completions):
        ids = np.concatenate([np.array(task.prompt_ids), tokens]).astype(np.int32)
        mask = np.arange(len(ids)) >= start
        padded = np.concatenate([np.zeros(start), logprobs]).astype(np.float32)
        run = VersionRun(version, start, len(ids))
        is_baseline = number == task.group_size
        trajectories.append(Trajectory(ids, mask, padded, (run,), "stop", "", is_baseline, images=task.images))
    return Group(
        group_id=task.group_id, split=task.split, attempt=task.attempt, issued_version=task.issued_version,
        prompt_text=task.prompt_text, num_prompt_tokens=start, reward=task.reward, trajectories=tuple(trajectories),
    )  # fmt: skip


def recite(task: Task, version: PolicyVersion) -> Answer:
    """Completions, log-probabilities and rewards that follow from the prompt alone."""
    random = np.random.default_rng(zlib.crc32(task.prompt_text.encode()))
    completions = []
    size = task.group_size + task.with_baseline
    for _ in range(size):
        length = min(int(random.integers(1, 6)), task.sampling.max_new_tokens)
        completions.append((random.integers(3, 55, size=length), random.normal(-4.0, 0.3, size=length)))
    return group_of(task, completions, version), tuple(float(r) for r in random.integers(0, 2, size=size))


class Sampler:
    """Samples one token for each completion from the published weights; even token ids are rewarded."""

    def __init__(self, producer: ScriptedProducer, model_folder: Path) -> None:
        self._producer = producer
        self._model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder)).eval()
        self._loaded: PolicyVersion | None = None
        self._random = torch.Generator().manual_seed(0)

    def __call__(self, task: Task, version: PolicyVersion) -> Answer:
        if version != self._loaded:
            self._model.load_state_dict(self._producer.weights(version), strict=False)
            self._loaded = version
        with torch.no_grad():
            logits = self._model(torch.tensor([task.prompt_ids])).logits[0, -1]
        logprobs = torch.log_softmax(logits / max(task.sampling.temperature, 1e-4), dim=-1)
        tokens = torch.multinomial(logprobs.exp(), task.group_size, replacement=True, generator=self._random)
        if task.with_baseline:
            tokens = torch.cat([tokens, logprobs.argmax()[None]])
        completions = [(np.array([int(t)]), np.array([float(logprobs[t])])) for t in tokens]
        return group_of(task, completions, version), tuple(float(int(t) % 2 == 0) for t in tokens)


class ScriptedProducer:
    """Answers every task of a run; use as a context manager."""

    def __init__(self, nats: NatsSettings, s3: S3Settings, run_id: str, author: Author = recite) -> None:
        """``author`` answers a task; assign another at any time."""
        self.author = author
        self.num_answered = 0
        self.versions: list[int] = []
        self.limit: int | None = None  # most groups to answer
        self._run_id = run_id
        self._bus = Bus.connect(nats, name="producer")
        self._blobs = Blobs(s3)
        self._manifests: dict[PolicyVersion, BlobRef] = {}
        self._offered_at = float("-inf")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.failure: BaseException | None = None

    def __enter__(self) -> ScriptedProducer:
        self._state = self._bus.key_value(streams.state_bucket(self._run_id).bucket).wait()
        self.renew_offer()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop answering; raise the exception that ended the thread, if one did."""
        self._stop.set()
        self._thread.join(60.0)
        self.close()
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        self._bus.close()

    def renew_offer(self) -> None:
        if time.monotonic() - self._offered_at < rewards_offered.PERIOD_S:
            return
        self._offered_at = time.monotonic()
        registry = self._bus.key_value(streams.registry_bucket().bucket).wait()
        offer = RewardsOffered(
            run_id=self._run_id, replica=f"{self._run_id}-r", at=time.time(), names=("auto", "exact_match"),
            by_source={"sort_digits": "exact_match"}, success={"exact_match": 1.0},
        )  # fmt: skip
        registry.put(rewards_offered.key(offer.replica), encode(offer)).wait()

    def head(self) -> PolicyVersion:
        entry = self._state.get(streams.HEAD_KEY).wait()
        assert entry is not None
        head = decode(entry.value, Head)
        version = PolicyVersion(head.version)
        self._manifests[version] = head.manifest
        return version

    def weights(self, version: PolicyVersion) -> dict[str, torch.Tensor]:
        return read_version(self._blobs, self._run_id, version, self._manifests[version])

    def store(self, message: TaskIssued, answers: list[Answer], version: PolicyVersion) -> GroupScored:
        groups = [group for group, _ in answers]
        key = blob_keys.group_pack(self._run_id, version, message.pack_id, secrets.token_hex(4))
        pack = self._blobs.put(key, group_pack.encode(groups))
        scored = tuple(
            ScoredGroup(generated=group.summary(number), rewards=rewards, scorer="producer")
            for number, (group, rewards) in enumerate(answers)
        )
        return GroupScored(run_id=self._run_id, pack_id=message.pack_id, worker_id="producer", pack=pack, groups=scored)

    def announce(self, scored: GroupScored, msg_id: str = "") -> None:
        subject = subjects.scored(self._run_id, scored.groups[0].generated.split)
        self._bus.publish(subject, scored, msg_id=msg_id or f"s:{scored.pack_id}").wait()

    def _work(self) -> None:
        try:
            inboxes = [
                self._bus.inbox(streams.tasks_consumer(self._run_id, split), TaskIssued).wait()
                for split in ("eval", "train")
            ]
            while not self._stop.is_set():
                self.renew_offer()
                if self.limit is not None and self.num_answered >= self.limit:
                    self._stop.wait(0.05)
                    continue
                for inbox in inboxes:
                    for delivery in inbox.fetch(1, 0.05).wait():
                        self._answer(delivery.fact)
                        delivery.ack().wait()
        except BaseException as err:  # noqa: BLE001  the test raises it
            self.failure = err

    def _answer(self, message: TaskIssued) -> None:
        head = self.head()
        tasks = message.tasks
        if message.tasks_blob is not None:
            tasks = decode(self._blobs.get(message.tasks_blob), TaskList).tasks
        issued = PolicyVersion(tasks[0].issued_version)  # the oldest that a worker may use; the head, if it is unknown
        version = issued if issued in self._manifests else head
        if tasks[0].pinned_version is not None:
            version = PolicyVersion(tasks[0].pinned_version)
        self.announce(self.store(message, [self.author(task, version) for task in tasks], version))
        self.num_answered += len(tasks)
        self.versions.append(version)


def write_run_file(path: Path, *, nats: NatsSettings, s3: S3Settings, sections: dict[str, dict]) -> Path:
    both = {
        "nats": nats.model_dump(mode="json", exclude_none=True),
        "s3": s3.model_dump(mode="json", exclude_none=True),
        **sections,
    }
    lines = []
    for section, values in both.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    path.write_text("\n".join(lines) + "\n")
    return path
