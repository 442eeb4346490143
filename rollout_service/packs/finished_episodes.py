"""Episodes that have ended while others of their pack are played, each an object in S3: a killed worker's are not played again.

An episode is stored under its group and attempt, addressed by its content, so nothing is overwritten when two workers play the same.
When a pack is delivered again, the objects of its groups are listed; of two for one place in a group the first by name is used.
They become part of their group's pack as if this worker had played them, and the pack is announced under the same id as ever: once.
After the announcement they are deleted; those of groups that never complete expire with unused packs (`trainer/recovery/group_gc.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Sequence
from dataclasses import fields

import structlog

from penstock.protocol import blob_keys
from penstock.protocol.episode import Episode
from penstock.protocol.errors import ImageRefused, PackError, PenstockError
from penstock.protocol.groups import BlobRef, Task
from penstock.protocol.packs import group_pack
from penstock.protocol.transport.blobs import Blobs, BlobStat
from penstock.protocol.versions import is_fresh
from penstock.rollout_service.engines.engine import Engine
from penstock.rollout_service.environments.environment import build_group, rows_of
from penstock.rollout_service.metrics import WorkerMetrics
from penstock.rollout_service.run_images import RunImages

log = structlog.get_logger("rollout.finished_episodes")

MAX_BYTES = 256 * 1024**2  # of one object: an episode holds at most a few million tokens
_NAME = re.compile(r"(sampled|greedy)\.(\d{1,4})\.([0-9a-f]{64})\.parquet")


class ContinuedEpisode(Episode):
    """An episode that an earlier delivery of its pack had played, perhaps with versions that this worker never loaded."""


class FinishedEpisodes:
    def __init__(
        self, blobs: Blobs, engine: Engine, metrics: WorkerMetrics, *, run_id: str, images: RunImages | None = None
    ) -> None:
        self._blobs = blobs
        self._engine = engine
        self._metrics = metrics
        self._run_id = run_id
        self._images = images
        self._found: dict[tuple[str, str], list[Episode]] = {}  # by group and kind
        self._keys: dict[str, set[str]] = {}  # of stored objects, by group

    async def load(self, tasks: Sequence[Task], *, vocab_size: int | None, max_staleness: dict[str, int]) -> None:
        """Read what earlier deliveries have stored of these tasks.

        ``max_staleness`` has the environments whose episodes are stored, and the most versions by which these may be behind. What
        cannot be read is logged and played again.
        """
        for task in tasks:
            if task.environment not in max_staleness:
                continue
            try:
                keys, read = await asyncio.to_thread(self._stored, task, vocab_size)
            except PenstockError as err:
                log.warning(
                    "finished episodes cannot be read; playing them again", group_id=task.group_id, error=str(err)
                )
                continue
            self._keys.setdefault(task.group_id, set()).update(keys)
            for kind, episode in read:
                is_usable = self._is_usable(task, episode, max_staleness[task.environment])
                if not is_usable or not await self._has_own_images(episode):
                    log.info(
                        "a finished episode has other versions, experts or images than the task needs; playing it again",
                        episode=episode.episode_id,
                        versions=(episode.oldest_version, episode.newest_version),
                    )
                    continue
                same = self._found.setdefault((task.group_id, kind), [])
                if all(earlier.index != episode.index for earlier in same):
                    same.append(episode)

    def take(self, task: Task) -> Sequence[Episode]:
        taken = self._found.pop((task.group_id, _kind(task)), [])
        self._metrics.episodes_continued += len(taken)
        if taken:
            log.info("finished episodes continued", group_id=task.group_id, num_episodes=len(taken))
        return taken

    async def keep(self, task: Task, episode: Episode, *, begun_at: float) -> None:
        runs = [run for row in rows_of(episode) for run in row.version_runs]
        if begun_at <= self._engine.withdrawn_at or any(run.version not in self._engine.applied for run in runs):
            return  # its pack is refused as a whole
        try:
            ref = await asyncio.to_thread(self._write, task, episode)
        except PenstockError as err:
            self._metrics.episodes_not_stored += 1
            log.warning("a finished episode is not stored", episode=episode.episode_id, error=str(err))
            return
        self._keys.setdefault(task.group_id, set()).add(ref.key)
        self._metrics.episodes_stored += 1

    async def forget(self, group_ids: Sequence[str], *, delete: bool) -> None:
        """Let go of groups; ``delete`` their objects too, once their pack is announced."""
        for episode_key in [episode_key for episode_key in self._found if episode_key[0] in group_ids]:
            del self._found[episode_key]
        keys = sorted(key for group_id in group_ids for key in self._keys.pop(group_id, ()))
        if not keys or not delete:
            return
        try:
            await asyncio.to_thread(self._blobs.delete, keys)
        except PenstockError as err:
            log.warning("finished episodes are not deleted; they expire", num_objects=len(keys), error=str(err))

    def _write(self, task: Task, episode: Episode) -> BlobRef:
        data = group_pack.encode([build_group(task, [episode])])
        prefix = blob_keys.finished_episodes_prefix(self._run_id, task.group_id, task.attempt)
        sha256 = hashlib.sha256(data).hexdigest()
        return self._blobs.put(blob_keys.finished_episode(prefix, _kind(task), episode.index, sha256), data)

    def _stored(self, task: Task, vocab_size: int | None) -> tuple[list[str], list[tuple[str, Episode]]]:
        prefix = blob_keys.finished_episodes_prefix(self._run_id, task.group_id, task.attempt)
        stats = sorted(self._blobs.list(prefix), key=lambda stat: stat.key)
        read = (self._read(stat, prefix, task, vocab_size) for stat in stats)
        return [stat.key for stat in stats], [pair for pair in read if pair is not None]

    def _read(self, stat: BlobStat, prefix: str, task: Task, vocab_size: int | None) -> tuple[str, Episode] | None:
        name = _NAME.fullmatch(stat.key.removeprefix(prefix))
        try:
            if name is None or stat.size_bytes > MAX_BYTES:
                raise PackError(f"expected a name like sampled.0.SHA256.parquet, and at most {MAX_BYTES} bytes")
            data = self._blobs.get(BlobRef(key=stat.key, size_bytes=stat.size_bytes, sha256=name[3]))
            (group,) = group_pack.decode(data, [0], vocab_size=vocab_size)
            (episode,) = group.episodes
            said = (group.group_id, group.split, group.attempt, episode.index)
            if said != (task.group_id, task.split, task.attempt, int(name[2])):
                raise PackError(f"it holds group, split, attempt and index {said}")
        except (PenstockError, ValueError) as err:
            log.warning("object ignored: it is not a finished episode of the task", key=stat.key, error=str(err))
            return None
        return name[1], ContinuedEpisode(**{field.name: getattr(episode, field.name) for field in fields(Episode)})

    def _is_usable(self, task: Task, episode: Episode, max_staleness: int) -> bool:
        shapes = [None if row.experts is None else row.experts.shape for row in rows_of(episode)]
        if any(shape != task.sampling.routers for shape in shapes):  # all rows of a group say the same of them
            return False
        if task.pinned_version is not None:
            return episode.oldest_version == episode.newest_version == task.pinned_version
        served = self._engine.version
        return is_fresh(served, episode.oldest_version, max_staleness) if served is not None else False

    async def _has_own_images(self, episode: Episode) -> bool:
        processors = {row.images.processor for row in rows_of(episode) if row.images is not None}
        if not processors:
            return True
        try:
            return self._images is not None and processors == {(await self._images.processor()).sha256}
        except ImageRefused:
            return False  # the model reads none


def _kind(task: Task) -> str:
    return "greedy" if task.sampling.temperature == 0 else "sampled"
