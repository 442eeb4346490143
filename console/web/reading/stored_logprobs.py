"""Read the trainer's log-probabilities of a group from S3, and compare them with those of the sampler."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.console.web.reading.recorded_groups import NOT_TRAINED, Entry, Storing, why_absent, why_not_this_group
from penstock.protocol import blob_keys
from penstock.protocol.errors import BlobError, PackError
from penstock.protocol.groups import BlobRef
from penstock.protocol.packs import step_logprobs
from penstock.protocol.packs.step_logprobs import CLIPPED, DUAL_CLIPPED, OUTCOMES, REJECTED, KeptRow, StepLogprobs
from penstock.protocol.trajectory import Group, Trajectory
from penstock.protocol.transport.blobs import Blobs

_CACHE_BYTES = 32 * 1024**2
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Current:
    """The rows of one group that have log-probabilities of the trainer, by their number; ``problem`` says why there are none."""

    rows: Mapping[int, KeptRow] = field(default_factory=dict)
    problem: str = ""

    def columns(self, group: Group, number: int) -> dict[str, list[Any]] | None:
        """Return log-probability, ratio and outcome of every token of a row, None where none was sampled; None: no such row."""
        kept = self.rows.get(number)
        return None if kept is None else _columns(group.trajectories[number], kept)

    def summary(self, group: Group, numbers: range) -> dict[str, Any] | None:
        """Return mean, least and greatest ratio of a trajectory's tokens, and how many the loss clipped or rejected; None: none kept."""
        pairs = [(group.trajectories[number], self.rows[number]) for number in numbers if number in self.rows]
        if not pairs:
            return None
        ratios = np.concatenate([_ratios(row, kept) for row, kept in pairs])
        if not len(ratios):
            return None
        outcomes = np.concatenate([kept.outcomes for _, kept in pairs])
        return {
            "mean": float(f"{ratios.mean():.5g}"),
            "min": float(f"{ratios.min():.5g}"),
            "max": float(f"{ratios.max():.5g}"),
            "num_clipped": int((outcomes & (CLIPPED | DUAL_CLIPPED) > 0).sum()),
            "num_rejected": int((outcomes & REJECTED > 0).sum()),
        }


def _ratios(row: Trajectory, kept: KeptRow) -> npt.NDArray[np.float64]:
    """Return exp(current - behaviour) of each sampled token of a row, [n]."""
    return np.exp(kept.logprobs.astype(np.float64) - row.behaviour_logprobs[row.loss_mask])


def _columns(row: Trajectory, kept: KeptRow) -> dict[str, list[Any]]:
    """Return log-probability, ratio and outcome of every token of a row, None where none was sampled."""
    places = np.flatnonzero(row.loss_mask).tolist()
    columns: dict[str, list[Any]] = {
        name: [None] * len(row.token_ids) for name in ("current_logprobs", "ratios", "outcomes")
    }
    values = zip(places, kept.logprobs.tolist(), _ratios(row, kept).tolist(), kept.outcomes.tolist(), strict=True)
    for place, logprob, ratio, outcome in values:
        columns["current_logprobs"][place] = round(logprob, 5)
        columns["ratios"][place] = float(f"{ratio:.5g}")
        columns["outcomes"][place] = ", ".join(text for bit, text in OUTCOMES.items() if outcome & bit)
    return columns


class RecentObjects(Generic[K, V]):
    """The objects that were used last, at most ``most_bytes`` of them as stored, and always the last one. Not thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def get(self, key: K) -> V | None:
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def put(self, key: K, value: V, num_bytes: int) -> None:
        self._values[key] = value, num_bytes
        while len(self._values) > 1 and sum(size for _, size in self._values.values()) > self._most_bytes:
            self._values.popitem(last=False)


class StoredLogprobs:
    """The objects of one run, the last ones kept in memory. Not thread-safe: its user holds a lock."""

    def __init__(self, run_id: str, blobs: Blobs) -> None:
        self._run_id = run_id
        self._blobs = blobs
        self._cache = RecentObjects[str, StepLogprobs](_CACHE_BYTES)

    def of_group(self, entry: Entry, group: Group, storing: Storing) -> Current:
        """Return what the step of a group stored of it; never raises for what the object store has or has not."""
        if entry.step is None or entry.epoch is None or entry.pack is None:
            return Current(problem=NOT_TRAINED.get(entry.status, "The record has no step of this group."))
        try:
            logprobs = self._read(entry.step, entry.epoch)
            if logprobs is None:
                return Current(problem=why_absent(entry.step, storing))
            versions = entry.trained_version, entry.made_version
            if (logprobs.header.trained_version, logprobs.header.made_version) != versions:
                return Current(problem=f"What is stored of step {entry.step} is of other versions than the record's.")
            rows = logprobs.group(entry.group_id, entry.pack.sha256)
            if rows is None:
                return Current(problem=why_not_this_group(entry.step, len(logprobs.header.groups), storing))
            _check(rows, group)
        except (BlobError, PackError) as err:
            return Current(problem=str(err))
        return Current(rows)

    def _read(self, step: int, epoch: int) -> StepLogprobs | None:
        prefix = blob_keys.step_logprobs_prefix(self._run_id, step, epoch)
        if (cached := self._cache.get(prefix)) is not None:
            return cached
        stats = list(self._blobs.list(prefix))
        if not stats:
            return None
        sha256 = stats[0].key.removeprefix(prefix).removesuffix(".safetensors")
        if len(stats) > 1 or stats[0].key != blob_keys.step_logprobs(self._run_id, step, epoch, sha256):
            raise PackError(f"{len(stats)} objects below {prefix}, where a trainer writes one; remove those of others")
        if (size := stats[0].size_bytes) > step_logprobs.MAX_BYTES:
            raise PackError(f"{stats[0].key} has {size} bytes, and a trainer writes at most {step_logprobs.MAX_BYTES}")
        try:
            reference = BlobRef(key=stats[0].key, size_bytes=size, sha256=sha256)
        except ValueError:
            raise PackError(f"{stats[0].key}: its name is no sha256; remove it") from None
        logprobs = step_logprobs.decode(self._blobs.get(reference), run_id=self._run_id, step=step)
        self._cache.put(prefix, logprobs, size)
        return logprobs


def _check(rows: Mapping[int, KeptRow], group: Group) -> None:
    """Raise PackError unless each row has as many values as the pack has sampled tokens."""
    for number, row in rows.items():
        expected = int(group.trajectories[number].loss_mask.sum()) if number < len(group.trajectories) else None
        if len(row.logprobs) != expected:
            raise PackError(
                f"the log-probabilities of row {number} of group {group.group_id} are {len(row.logprobs)}, and its pack has "
                f"{'no such row' if expected is None else f'{expected} sampled tokens'}; they are of another pack"
            )
