"""Trains again on a run's stored groups, in their recorded order, and compares every version.

```
record ──▶ settings of each session ──▶ learner ◀── initial model, or a checkpoint of the run
   │                                        │
   └──▶ groups of each step ─── fetch ───▶ learn ──▶ weights_digest == recorded?
```

No queue, worker, reward or publication is involved: packs and the record are read from the object store, the
model from the folder that the run used. On a CPU the same groups, settings, libraries and machine give the same
bits, so a version that differs means that one of these has changed; each is checked. Sessions whose settings agree
are replayed as one, so a crash of the run does not show in its replay.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from penstock.forensics.replay.replay_findings import (
    Difference,
    Verdict,
    config_findings,
    differing_updates,
    drift,
    figure_differences,
    missing_packs,
    signed_versions,
)
from penstock.protocol.errors import BlobCorrupt, BlobMissing, ConfigError, PackError, RecordBroken
from penstock.protocol.record.checkpoint_state import STATE_FILE, committed
from penstock.protocol.record.lineage import RecordedSession, RecordedStep
from penstock.protocol.record.stored_record import StoredRecord
from penstock.protocol.transport.blobs import Blobs
from penstock.trainer.algorithm.chosen_parts import BY_KEY
from penstock.trainer.errors import CheckpointError
from penstock.trainer.groups.pack_reader import ready_groups
from penstock.trainer.learner.learner import Learner, build_learner
from penstock.trainer.learner.pair_planner import open_mixed_pairs
from penstock.trainer.learner.planning import Planner, learn
from penstock.trainer.learner.step_plan import PackStore
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.ranks import Ranks
from penstock.trainer.recovery import run_record_writer
from penstock.trainer.recovery.checkpoint import CHECKPOINTS, verify_files
from penstock.trainer.recovery.resume_checks import read_settings, what_steps_read
from penstock.trainer.recovery.stored_checkpoints import complete_copy
from penstock.trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from penstock.protocol.weights.signature import TrustedKeys  # its library is imported where keys are named

_MAX_THREADS = 4096


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to replay: all versions from ``first`` to ``last``; None: to either end of the record."""

    first: int | None = None
    last: int | None = None
    model: Path | None = None  # folder of the initial model; None: as recorded
    run_files: tuple[Path, ...] = ()  # to compare with the record
    user_code: bool = False  # run the code that the record names by path
    trusted_keys: TrustedKeys | None = None  # one of them has signed the stored weights; None: not verified


@dataclass(frozen=True, slots=True)
class _Start:
    version: int
    steps_done: int
    folder: Path | None  # of the checkpoint; None: the initial model
    algorithm: Mapping[str, Any]
    digest: str
    dtype: str  # of the digest
    as_adapter: bool
    description: str


class Replay:
    """Rank 0's part; the other ranks run `follow`."""

    def __init__(self, record: StoredRecord, blobs: Blobs, ranks: Ranks, folder: Path, wanted: Wanted) -> None:
        """Prepare to replay what is ``wanted``; ``folder`` is the run's folder and may hold checkpoints.

        Raises RecordBroken for versions that the record does not have, ConfigError for settings of another build or, unless
        it is ``wanted``, for user code.
        """
        self._record, self._blobs, self._ranks, self._folder, self._wanted = record, blobs, ranks, folder, wanted
        self._last = record.last_version if wanted.last is None else wanted.last
        for version in (wanted.first, wanted.last):
            if version is not None:
                record.maker_of(version)
        self._documents = {life.config.key: blobs.get(life.config) for life in record.sessions}
        if not wanted.user_code:
            _refuse_code(record.run_id, self._documents)
        self._read = {key: read_settings(document, where=key) for key, document in self._documents.items()}
        self._replayed_roots: dict[int, str] = {}  # by version
        self._learner: Learner | None = None
        self._session = record.sessions[0]
        self.verdict = Verdict(record.run_id)

    def run(self, on_version: Callable[[int], None] = lambda _: None) -> Verdict:
        """Replay to the end, the first difference or a missing pack; calls ``on_version`` with each identical version."""
        verdict = self.verdict
        verdict.findings += config_findings(
            self._folder / "config.json", self._read[self._record.sessions[-1].config.key][1]
        )
        verdict.drift += drift(self._wanted.run_files, self._read[self._record.sessions[-1].config.key][1])
        with tempfile.TemporaryDirectory(prefix="penstock-replay-") as scratch:
            start = self._choose_start(Path(scratch))
            items = self._items(start)
            missing = missing_packs([item for item in items if isinstance(item, RecordedStep)], self._blobs)
            verdict.findings += missing
            started, cpu = time.monotonic(), time.process_time()
            if not missing:
                self._compare(start, items, Path(scratch), on_version)
        if not missing:
            if (keys := self._wanted.trusted_keys) is not None:
                verdict.num_signed, problems = signed_versions(
                    self._record.run_id, self._replayed_roots, self._blobs, keys
                )
                verdict.findings += problems
            verdict.wall_s, verdict.cpu_s = time.monotonic() - started, time.process_time() - cpu
        if self._learner is not None:
            self._learner.dismiss()
        if self._ranks.num_ranks > 1:
            self._ranks.broadcast(None)
        return verdict

    def _choose_start(self, scratch: Path) -> _Start:
        """Return the newest checkpoint at or before the first wanted version, else the initial model.

        What only the object store has of the checkpoint is fetched into ``scratch``.
        """
        first = self._record.sessions[0]
        start = _Start(first.version, 0, None, {}, first.weights_digest, "", False, "the initial model")
        chapters = {chapter.number: chapter for chapter in self._record.chapters}
        stored = [] if self._wanted.first is None else committed(self._folder / CHECKPOINTS)
        for folder, state in stored:
            chapter = chapters.get(state.chapter)
            belongs = chapter is not None and chapter.weights_digest == state.weights_digest
            if belongs and start.version < state.version <= (self._wanted.first or 0):
                what = (state.version, state.step, folder, state.algorithm, state.weights_digest, state.weights_dtype)
                start = _Start(*what, state.weights_are == "adapter", f"the checkpoint {folder.name}")
        if start.folder is not None:
            if start.dtype not in ("", "as-trained") and not isinstance(getattr(torch, start.dtype, None), torch.dtype):
                raise CheckpointError(
                    f"{start.folder / STATE_FILE}: weights_dtype is {start.dtype[:40]!r}, expected a dtype of torch; restore the file"
                )
            state = dict(stored)[start.folder]
            whole = complete_copy(self._blobs, start.folder, state, scratch)
            verify_files(whole, state)
            start = replace(start, folder=whole)
        self.verdict.began_with, self.verdict.began_from = start.version, start.description
        return start

    def _items(self, start: _Start) -> list[RecordedSession | RecordedStep]:
        items: list[RecordedSession | RecordedStep] = []
        for chapter in self._record.chapters:
            items += [life for life in chapter.lives if start.version < life.version <= self._last]
            items += [s for s in chapter.steps if s.step > start.steps_done and s.made_version <= self._last]
        return items

    def _compare(
        self,
        start: _Start,
        items: Sequence[RecordedSession | RecordedStep],
        scratch: Path,
        on_version: Callable[[int], None],
    ) -> None:
        session = self._session_of(items[0]) if items else self._record.sessions[-1]
        planner = self._enter(session, start.folder, start.algorithm)
        for version, step, recorded, figures in self._replayed(start, items, scratch, planner):
            if version == start.version:
                replayed = self._digest(start.dtype, as_adapter=start.as_adapter)
            else:
                replayed = self._digest(
                    self._settings.trainer.publish_dtype, as_adapter=self._settings.publishes_adapters
                )
            if replayed != recorded:
                lines = figure_differences(self._folder / "metrics.jsonl", step, figures)
                self.verdict.difference = Difference(version, step, recorded, replayed, lines)
                return
            self.verdict.same.append(version)
            self._replayed_roots[version] = replayed
            on_version(version)

    def _replayed(
        self, start: _Start, items: Sequence[RecordedSession | RecordedStep], scratch: Path, planner: Planner
    ) -> Iterator[tuple[int, int | None, str, dict[str, Any]]]:
        """Make each version and yield its number, its step, its recorded digest and the step's figures."""
        yield start.version, None, start.digest, {}
        for item in items:
            planner = self._change_session(self._session_of(item), planner, scratch)
            if isinstance(item, RecordedSession):
                if item.version != item.parent_version:  # published again under a new number
                    yield item.version, None, item.weights_digest, {}
                continue
            try:
                batch = ready_groups(item.packs, item.groups, self._blobs.get)
            except (BlobMissing, BlobCorrupt, PackError) as err:
                self.verdict.findings.append(f"step {item.step}: {err}")
                return
            learned = learn(planner, self._require_learner(), batch, item.trained_version, ages=dict(item.ages))
            self.verdict.count([group.num_tokens for group in batch])
            self.verdict.findings += differing_updates(item, learned.updates, learned.left_out)
            figures = {name: getattr(learned.metrics, name) for name in ("loss", "grad_norm", "lr")}
            yield item.made_version, item.step, item.weights_digest, {**figures, "skipped": dict(learned.skipped)}

    def _change_session(self, session: RecordedSession, planner: Planner, scratch: Path) -> Planner:
        """Continue with another session: as is if the settings agree, else through a checkpoint, as the run did."""
        if session.epoch == self._session.epoch:
            return planner
        before, after = self._read[self._session.config.key][1], self._read[session.config.key][1]
        self._session = session
        if what_steps_read(before) == what_steps_read(after):
            self._compare_environment()
            return planner
        folder = scratch / f"epoch{session.epoch}"
        folder.mkdir()
        self._require_learner().save(folder)
        return self._enter(session, folder, planner.document())

    def _enter(self, session: RecordedSession, checkpoint: Path | None, algorithm: Mapping[str, Any]) -> Planner:
        if self._learner is not None:
            self._learner.dismiss()
            self._learner = None  # frees its memory before the next one is built
        self._session = session
        order = {
            "settings": self._documents[session.config.key].decode(),
            "model": str(self._wanted.model.absolute()) if self._wanted.model else None,
            "threads": _num_threads(session),
        }
        self._learner = _build_by_order(self._ranks.broadcast(order), self._ranks, self._blobs)
        if checkpoint is not None:
            self._learner.load(checkpoint)
        self._compare_environment()
        return Planner(self._settings, self._learner, algorithm)

    @property
    def _settings(self) -> TrainerSettings:
        return self._read[self._session.config.key][0]

    def _session_of(self, item: RecordedSession | RecordedStep) -> RecordedSession:
        return item if isinstance(item, RecordedSession) else self._record.session_of(item)

    def _require_learner(self) -> Learner:
        assert self._learner is not None
        return self._learner

    def _digest(self, dtype: str, *, as_adapter: bool) -> str:
        learner = self._require_learner()
        as_trained = dtype in ("", "as-trained", learner.policy.dtype)
        return learner.weights(None if as_trained else dtype, as_adapter=as_adapter).root()

    def _compare_environment(self) -> None:
        for line in run_record_writer.differences(
            self._session.environment,
            run_record_writer.environment_fingerprint(
                {**self._settings.extension_digests, **self._require_learner().data_digests}
            ),
        ):
            if line not in self.verdict.environment_differences:
                self.verdict.environment_differences.append(line)


def _refuse_code(run_id: str, documents: Mapping[str, bytes]) -> None:
    """Raise ConfigError for settings that name code by path: a record may be another person's."""
    names = sorted({name for document in documents.values() for name in named_code(document)})
    if names:
        raise ConfigError(
            f"the record of run {run_id} names user code, which a replay runs: {', '.join(name[:200] for name in names[:8])!r}; "
            "read it, then add --user-code"
        )


def _num_threads(session: RecordedSession) -> int:
    recorded = session.environment.get(run_record_writer.THREADS, str(torch.get_num_threads()))
    if not (recorded.isascii() and recorded.isdigit() and len(recorded) < 6 and 0 < int(recorded) <= _MAX_THREADS):
        raise RecordBroken(
            f"the session of epoch {session.epoch} records {recorded[:40]!r} threads, expected 1 to {_MAX_THREADS}; restore the record"
        )
    return int(recorded)


def follow(ranks: Ranks, blobs: Blobs) -> None:
    while (order := ranks.broadcast(None)) is not None:
        _build_by_order(order, ranks, blobs).follow()


def _build_by_order(order: Mapping[str, Any], ranks: Ranks, blobs: Blobs) -> Learner:
    settings, _ = read_settings(order["settings"].encode(), where="the record's settings")
    if order["model"] is not None:
        settings = with_model(settings, Path(order["model"]))
    torch.set_num_threads(order["threads"])
    return learner_of(settings, ranks, blobs)


def with_model(settings: TrainerSettings, path: Path, *, is_merged: bool = False) -> TrainerSettings:
    """Return settings with another model folder; adapters begin anew on one in which those of a run ``is_merged``."""
    lora = settings.model.lora.model_copy(update={"path": None} if is_merged else {})
    return settings.model_copy(update={"model": settings.model.model_copy(update={"path": path, "lora": lora})})


def learner_of(settings: TrainerSettings, ranks: Ranks, packs: PackStore, adapter: Path | None = None) -> Learner:
    """Build the learner of a run anew; raises ConfigError for another number of processes than the run had."""
    if settings.trainer.num_ranks != ranks.num_ranks:
        raise ConfigError(
            f"the run had trainer.num_ranks = {settings.trainer.num_ranks}, but {ranks.num_ranks} process(es) were started; "
            "use `penstock replay`, which starts the right number, or torchrun --nproc-per-node N -m penstock.forensics.replay"
        )
    dims = ParallelDims(ranks, settings.trainer.layout)
    return build_learner(settings, dims, packs, open_mixed_pairs(settings), adapter=adapter)


def named_code(document: bytes) -> list[str]:
    """Return the user code that settings name by path, which `read_settings` imports and so runs.

    What cannot be read names none; an extension that an installed package registers under a name is not named by path.
    """
    try:
        settings = json.loads(document)["settings"]
        values = [settings["algorithm"].get(key) for key in BY_KEY] + [settings.get("dpo", {}).get("loss")]
        values.append(settings.get("data", {}).get("format"))  # of the pairs that a step trains on too
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    names = [name for value in values for name in (value if isinstance(value, list) else [value])]
    return [name for name in names if isinstance(name, str) and ":" in name]
