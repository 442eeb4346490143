"""Tasks, and how many of them share one message; pure, but for `TaskPublisher`.

Small groups share a message, because one message and one object per group would cost more than training a tiny model.
A pack too large for a message is stored as an object and announced by reference.

`Mixture` chooses which environment plays a group: exact proportions, in an order that follows from ``run.seed``.
With weights 3 and 1, of every four positions of the data order three are of the first and one is of the second, in a separate
order for each four. A position is played in the same environment in every attempt and after every restart.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.protocol import blob_keys, subjects
from penstock.protocol.config.environment_settings import MIXTURE, EnvironmentSettings
from penstock.protocol.facts import MAX_FACT_BYTES, TaskIssued, TaskList, encode_unbounded
from penstock.protocol.groups import SINGLE_TURN, BlobRef, RouterShape, Sampling, Split, Task, derived_seed
from penstock.protocol.images.admission import AdmittedImage
from penstock.protocol.trace_context import new_trace
from penstock.protocol.transport.fact_publisher import Receipt
from penstock.protocol.transport.loop_thread import Pending
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.connections import Connections
from penstock.trainer.data.dataset import Prompt
from penstock.trainer.data_settings import EvalSettings
from penstock.trainer.errors import MalformedData
from penstock.trainer.settings import RolloutSettings

# Chosen so that a message costs little compared with generating its groups (benchmarks: one message per tiny group
# costs more than training it), and so that a step's groups are spread over the workers.
_TARGET_MESSAGE_BYTES = 32 * 1024
_TARGET_MESSAGE_TOKENS = 16 * 1024
_ASSUMED_WORKERS = 2
_PACKS_PER_WORKER_AND_STEP = 2
_ENVELOPE_BYTES = 512  # run id, pack id and tags around the tasks


class Mixture:
    def __init__(self, settings: EnvironmentSettings, seed: int) -> None:
        shared = math.gcd(*settings.weights.values())
        self._block = [name for name, weight in settings.weights.items() for _ in range(weight // shared)]
        self._by_source: Mapping[str, str] = settings.by_source
        self._seed = seed
        self._shuffled: tuple[int, list[str]] = (-1, [])  # the block that was asked for last

    @classmethod
    def of(cls, settings: EnvironmentSettings, seed: int) -> Mixture | None:
        """Return the mixture of a run file; None if no environment has a weight."""
        return cls(settings, seed) if settings.weights else None

    def name(self, environment: str, position: int, data_source: str) -> str:
        """Return the environment of a row: ``environment``, unless that is the mixture.

        ``position`` is its place in the data order; of a row whose ``data_source`` has an environment it does not matter.
        """
        if environment != MIXTURE:
            return environment
        return self._by_source.get(data_source) or self._weighted(position)

    def _weighted(self, position: int) -> str:
        number, place = divmod(position, len(self._block))
        if self._shuffled[0] != number:
            block = self._block.copy()
            random.Random(derived_seed(self._seed, MIXTURE, number)).shuffle(block)  # noqa: S311 - not a secret
            self._shuffled = (number, block)
        return self._shuffled[1][place]


@dataclass(frozen=True, slots=True)
class TaskPack:
    pack_id: str
    tasks: tuple[Task, ...]
    blob: bytes | None
    images: tuple[AdmittedImage, ...] = ()  # to be stored before the message

    def announced(self, run_id: str, stored: BlobRef | None = None) -> TaskIssued:
        if (self.blob is None) != (stored is None):
            raise ValueError(
                f"pack {self.pack_id}: {'store its blob first' if self.blob else 'it has no blob to store'}"
            )
        if stored is not None:
            return TaskIssued(run_id=run_id, pack_id=self.pack_id, tasks_blob=stored)
        return TaskIssued(run_id=run_id, pack_id=self.pack_id, tasks=self.tasks)


def pack_tasks(tasks: Sequence[Task], images: Iterable[AdmittedImage] = ()) -> TaskPack:
    digest = hashlib.sha256(" ".join(task.group_id for task in tasks).encode()).hexdigest()[:8]
    pack_id = f"{tasks[0].group_id}.n{len(tasks)}.{digest}"
    fits = sum(map(task_bytes, tasks)) <= MAX_FACT_BYTES - _ENVELOPE_BYTES
    blob = None if fits else encode_unbounded(TaskList(tasks=tuple(tasks)))
    return TaskPack(pack_id, tuple(tasks), blob, tuple({image.sha256: image for image in images}.values()))


def training_sampling(
    rollout: RolloutSettings, stop_token_ids: Sequence[int], routers: RouterShape | None = None
) -> Sampling:
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        stop_token_ids=tuple(stop_token_ids),
        stop=rollout.stop,
        routers=routers,
    )


def evaluation_sampling(settings: EvalSettings, rollout: RolloutSettings, stop_token_ids: Sequence[int]) -> Sampling:
    return Sampling(
        max_new_tokens=settings.max_new_tokens or rollout.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        stop_token_ids=tuple(stop_token_ids),
        stop=rollout.stop,
    )


def make_task(
    prompt: Prompt,
    group_id: str,
    *,
    sampling: Sampling,
    group_size: int,
    split: Split,
    issued_version: PolicyVersion,
    attempt: int = 0,
    pinned_version: PolicyVersion | None = None,
) -> Task:
    return Task(
        group_id=group_id,
        prompt_ids=prompt.token_ids,
        prompt_text=prompt.text,
        group_size=group_size,
        sampling=sampling,
        reward=prompt.reward,
        split=split,
        attempt=attempt,
        issued_version=issued_version,
        pinned_version=pinned_version,
        images=prompt.images,
    )


def seeded(task: Task, seed: int) -> Task:
    return task.model_copy(update={"seed": derived_seed(seed, task.split, task.group_id)})


def in_environment(task: Task, prompt: Prompt, environment: str) -> Task:
    if environment == SINGLE_TURN:
        return task
    if prompt.images is not None:
        raise MalformedData(
            f"{task.group_id}: its row has images, and environment {environment} would render the messages without them; use "
            f"environment {SINGLE_TURN} for rows with images"
        )
    messages = json.dumps(prompt.messages, ensure_ascii=False)
    return task.model_copy(update={"environment": environment, "messages": messages})


def task_bytes(task: Task) -> int:
    """Return an upper bound of a task's size in a message: MessagePack takes at most 5 bytes for an int below 2^32."""
    texts = (
        task.prompt_text,
        task.group_id,
        task.environment,
        task.messages,
        task.reward.name,
        task.reward.data_source,
        task.reward.extra_info,
        *task.sampling.stop,
    )
    num_ints = len(task.prompt_ids) + len(task.sampling.stop_token_ids)
    truth = task.reward.ground_truth or ""
    num_images = len(task.images.refs) if task.images is not None else 0
    return 5 * num_ints + sum(len(text.encode()) for text in (*texts, truth)) + 512 + 256 * num_images


def choose_groups_per_message(rollout: RolloutSettings, *, prompt_tokens: float, bytes_per_task: float) -> int:
    if rollout.groups_per_message:
        return rollout.groups_per_message
    tokens_per_group = rollout.started_completions * (prompt_tokens + rollout.max_new_tokens)
    most = min(
        _TARGET_MESSAGE_BYTES / bytes_per_task,
        _TARGET_MESSAGE_TOKENS / tokens_per_group,
        rollout.groups_per_step / (_ASSUMED_WORKERS * _PACKS_PER_WORKER_AND_STEP),
    )
    num_packs = -(-rollout.groups_per_step // max(1, int(most)))
    return -(-rollout.groups_per_step // num_packs)  # packs of a step as equal in size as possible


class TaskPublisher:
    """Publishes packs of one split, after what their messages refer to; for one thread."""

    def __init__(self, connections: Connections, split: Split) -> None:
        self._run_id, self._blobs, self._bus = connections.run_id, connections.blobs, connections.bus
        self._traced, self._subject = connections.traced, subjects.tasks(connections.run_id, split)
        self._stored_images: set[str] = (
            set()
        )  # by this object; their keys are their hashes: a repetition changes nothing

    def publish(self, pack: TaskPack) -> Pending[Receipt]:
        """Store images that are not stored yet and the list of a large pack, and send the message; raises BlobError."""
        started, traceparent = time.time(), new_trace()
        for image in pack.images:
            if image.sha256 not in self._stored_images:
                self._blobs.put(blob_keys.image(self._run_id, image.sha256), image.data)
                self._stored_images.add(image.sha256)
        stored = self._blobs.put(blob_keys.task_list(self._run_id, pack.pack_id), pack.blob) if pack.blob else None
        message = pack.announced(self._run_id, stored)
        pending = self._bus.publish(self._subject, message, msg_id=pack.pack_id, traceparent=traceparent)
        self._traced.issued(traceparent, pack.tasks, pack_id=pack.pack_id, started=started)
        return pending
