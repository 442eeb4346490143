"""Runs the trainer again over a run's stored groups, in their recorded order, and compares every version.

```
record ──▶ settings of each life ──▶ crew ◀── initial model, or a checkpoint of the run
   │                                  │
   └──▶ groups of each step ─ fetch ─▶ learn ──▶ weights_digest == recorded?
```

No queue, worker, reward or publication is involved: packs and the record are read from the object store, the
model from where the run had it. On a CPU the same groups, settings, libraries and machine give the same bits,
so that a version that differs means that one of these is not what it was; all of them are looked at.
A crash of the run leaves no trace here: lives whose settings agree are replayed as one.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.protocol.errors import BlobCorrupt, BlobMissing, ConfigError, PackError
from penstock.protocol.record.checkpoint_state import committed
from penstock.protocol.record.lineage import RecordedLife, RecordedStep
from penstock.protocol.record.stored_record import StoredRecord
from penstock.protocol.transport.blobs import Blobs
from penstock.trainer.assemble import build_rank_group
from penstock.trainer.commit import CHECKPOINTS
from penstock.trainer.groups.stored_groups import ready_groups
from penstock.trainer.learner.planning import Planner, learn
from penstock.trainer.learner.rank_group import RankGroup
from penstock.trainer.ranks import Ranks
from penstock.trainer.recovery import environment_fingerprint
from penstock.trainer.replay.recorded_settings import read_settings, what_steps_read
from penstock.trainer.replay.replay_findings import config_findings, drift, figure_differences, missing_packs
from penstock.trainer.replay.replay_verdict import Difference, Verdict
from penstock.trainer.settings import TrainerSettings


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be replayed: all versions from ``first`` to ``last``; None: as far as the record goes."""

    first: int | None = None
    last: int | None = None
    model: Path | None = None  # where the initial model is now; None: where the run had it
    run_files: tuple[Path, ...] = ()  # to be held against the record


@dataclass(frozen=True, slots=True)
class _Begin:
    """The weights that a replay begins with."""

    version: int
    steps_done: int
    folder: Path | None  # of the checkpoint; None: the initial model
    algorithm: Mapping[str, Any]
    digest: str
    dtype: str  # of the digest
    as_adapter: bool
    words: str


class Replay:
    """Rank 0's part; the other ranks are in `follow`."""

    def __init__(self, record: StoredRecord, blobs: Blobs, ranks: Ranks, folder: Path, wanted: Wanted) -> None:
        """Replay what is ``wanted`` of a record; ``folder`` is the run's own and may hold checkpoints.

        Raises RecordBroken for versions that the record does not have, ConfigError for settings of another build.
        """
        self._record, self._blobs, self._ranks, self._folder, self._wanted = record, blobs, ranks, folder, wanted
        self._last = record.last_version if wanted.last is None else wanted.last
        for version in (wanted.first, wanted.last):
            if version is not None:
                record.maker_of(version)
        self._documents = {life.config.key: blobs.get(life.config) for life in record.lives}
        self._read = {key: read_settings(document, where=key) for key, document in self._documents.items()}
        self._rank_group: RankGroup | None = None
        self._life = record.lives[0]
        self.verdict = Verdict(record.run_id)

    def run(self, on_version: Callable[[int], None] = lambda _: None) -> Verdict:
        """Replay until the end, the first difference, or a pack that is not there; ``on_version`` hears of each."""
        verdict = self.verdict
        verdict.findings += config_findings(
            self._folder / "config.json", self._read[self._record.lives[-1].config.key][1]
        )
        verdict.drift += drift(self._wanted.run_files, self._read[self._record.lives[-1].config.key][1])
        begin = self._beginning()
        items = self._items(begin)
        missing = missing_packs([item for item in items if isinstance(item, RecordedStep)], self._blobs)
        verdict.findings += missing
        if not missing:
            started, cpu = time.monotonic(), time.process_time()
            with tempfile.TemporaryDirectory(prefix="penstock-replay-") as scratch:
                self._go(begin, items, Path(scratch), on_version)
            verdict.wall_s, verdict.cpu_s = time.monotonic() - started, time.process_time() - cpu
        if self._rank_group is not None:
            self._rank_group.dismiss()
        if self._ranks.num_ranks > 1:
            self._ranks.broadcast(None)
        return verdict

    def _beginning(self) -> _Begin:
        """Choose the newest checkpoint at or before the first wanted version, else the initial model."""
        first = self._record.lives[0]
        begin = _Begin(first.version, 0, None, {}, first.weights_digest, "", False, "the initial model")
        told = {chapter.number: chapter for chapter in self._record.told}
        stored = [] if self._wanted.first is None else committed(self._folder / CHECKPOINTS)
        for folder, state in stored:
            chapter = told.get(state.chapter)
            belongs = chapter is not None and chapter.weights_digest == state.weights_digest
            if belongs and begin.version < state.version <= (self._wanted.first or 0):
                what = (state.version, state.step, folder, state.algorithm, state.weights_digest, state.weights_dtype)
                begin = _Begin(*what, state.weights_are == "adapter", f"the checkpoint {folder.name}")
        self.verdict.began_with, self.verdict.began_from = begin.version, begin.words
        return begin

    def _items(self, begin: _Begin) -> list[RecordedLife | RecordedStep]:
        """Return the lives and steps after the beginning, in order, as far as is wanted."""
        items: list[RecordedLife | RecordedStep] = []
        for chapter in self._record.told:
            items += [life for life in chapter.lives if begin.version < life.version <= self._last]
            items += [s for s in chapter.steps if s.step > begin.steps_done and s.made_version <= self._last]
        return items

    def _go(
        self,
        begin: _Begin,
        items: Sequence[RecordedLife | RecordedStep],
        scratch: Path,
        on_version: Callable[[int], None],
    ) -> None:
        life = self._life_of(items[0]) if items else self._record.lives[-1]
        planner = self._enter(life, begin.folder, begin.algorithm)
        for version, step, recorded, figures in self._made(begin, items, scratch, planner):
            if version == begin.version:
                replayed = self._digest(begin.dtype, as_adapter=begin.as_adapter)
            else:
                replayed = self._digest(
                    self._settings.trainer.publish_dtype, as_adapter=self._settings.publishes_adapters
                )
            if replayed != recorded:
                lines = figure_differences(self._folder / "metrics.jsonl", step, figures)
                self.verdict.difference = Difference(version, step, recorded, replayed, lines)
                return
            self.verdict.same.append(version)
            on_version(version)

    def _made(
        self, begin: _Begin, items: Sequence[RecordedLife | RecordedStep], scratch: Path, planner: Planner
    ) -> Iterator[tuple[int, int | None, str, dict[str, Any]]]:
        """Yield each version when its weights are here: its step, its recorded digest, the step's figures."""
        yield begin.version, None, begin.digest, {}
        for item in items:
            planner = self._go_on(self._life_of(item), planner, scratch)
            if isinstance(item, RecordedLife):
                if item.version != item.parent_version:  # published again under a new number
                    yield item.version, None, item.weights_digest, {}
                continue
            try:
                batch = ready_groups(item.packs, item.groups, self._blobs.get)
            except (BlobMissing, BlobCorrupt, PackError) as err:
                self.verdict.findings.append(f"step {item.step}: {err}")
                return
            learned = learn(planner, self._require_rank_group(), batch, item.trained_version)
            self.verdict.count([group.num_tokens for group in batch])
            figures = {name: getattr(learned.figures, name) for name in ("loss", "grad_norm", "lr")}
            yield item.made_version, item.step, item.weights_digest, {**figures, "skipped": dict(learned.plan.skipped)}

    def _go_on(self, life: RecordedLife, planner: Planner, scratch: Path) -> Planner:
        """Pass from one life to the next: as one where their settings agree, else by a checkpoint, as the run did."""
        if life.epoch == self._life.epoch:
            return planner
        before, after = self._read[self._life.config.key][1], self._read[life.config.key][1]
        self._life = life
        if what_steps_read(before) == what_steps_read(after):
            self._compare_surroundings()
            return planner
        folder = scratch / f"epoch{life.epoch}"
        folder.mkdir()
        self._require_rank_group().save(folder)
        return self._enter(life, folder, planner.document())

    def _enter(self, life: RecordedLife, checkpoint: Path | None, algorithm: Mapping[str, Any]) -> Planner:
        """Build the crew with the settings of a life, from a checkpoint or the initial model."""
        if self._rank_group is not None:
            self._rank_group.dismiss()
            self._rank_group = None  # before the next one takes memory
        self._life = life
        order = {
            "settings": self._documents[life.config.key].decode(),
            "model": str(self._wanted.model.absolute()) if self._wanted.model else None,
            "threads": int(life.environment.get(environment_fingerprint.THREADS, torch.get_num_threads())),
        }
        self._rank_group = _crew_by(self._ranks.broadcast(order), self._ranks, self._blobs)
        if checkpoint is not None:
            self._rank_group.load(checkpoint)
        self._compare_surroundings()
        return Planner(self._settings, self._rank_group, algorithm)

    @property
    def _settings(self) -> TrainerSettings:
        return self._read[self._life.config.key][0]

    def _life_of(self, item: RecordedLife | RecordedStep) -> RecordedLife:
        return item if isinstance(item, RecordedLife) else self._record.life_of(item)

    def _require_rank_group(self) -> RankGroup:
        assert self._rank_group is not None
        return self._rank_group

    def _digest(self, dtype: str, *, as_adapter: bool) -> str:
        rank_group = self._require_rank_group()
        as_trained = dtype in ("", "as-trained", rank_group.policy.dtype)
        return rank_group.weights(None if as_trained else getattr(torch, dtype), as_adapter=as_adapter).root()

    def _compare_surroundings(self) -> None:
        for line in environment_fingerprint.differences(
            self._life.environment,
            environment_fingerprint.environment_fingerprint(self._settings.algorithm.extension_digests),
        ):
            if line not in self.verdict.environment_fingerprint:
                self.verdict.environment_fingerprint.append(line)


def follow(ranks: Ranks, blobs: Blobs) -> None:
    """Do what rank 0's `Replay` orders, until it is over."""
    while (order := ranks.broadcast(None)) is not None:
        _crew_by(order, ranks, blobs).follow()


def _crew_by(order: Mapping[str, Any], ranks: Ranks, blobs: Blobs) -> RankGroup:
    settings, _ = read_settings(order["settings"].encode(), where="the record's settings")
    if order["model"] is not None:
        model = settings.model.model_copy(update={"path": Path(order["model"])})
        settings = settings.model_copy(update={"model": model})
    if settings.trainer.num_ranks != ranks.num_ranks:
        raise ConfigError(
            f"the run had trainer.num_ranks = {settings.trainer.num_ranks}, and {ranks.num_ranks} process(es) were started; "
            "`penstock replay` reads it from the run's config.json (torchrun --nproc-per-node N -m trainer replay ...)"
        )
    torch.set_num_threads(order["threads"])
    return build_rank_group(settings, ranks, blobs)
