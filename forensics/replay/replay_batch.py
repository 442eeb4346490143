"""Trains again on the batch at which a run stopped by itself, alone, and says whether it fails again.

```
stopped/stepN ──▶ groups, settings ──▶ learner ◀── weights before the step: checkpoint, published version, initial model
                                           │
                                           ├──▶ measure: figures of the batch and of each group
                                           └──▶ learn: the failure, or none
```

Nothing is kept: neither weights nor files. Loss, mismatch, entropy and gradient follow from the weights before the step and the batch,
so the moments of the optimizer, which a published version has not, change none of them. A critic is published nowhere: with one the
weights come from a checkpoint.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.forensics.replay.replay_findings import BatchVerdict, group_metrics
from penstock.forensics.replay.replay_run import Wanted, learner_of, named_code, with_model
from penstock.protocol import blob_keys
from penstock.protocol.config.connection import RunSettings
from penstock.protocol.errors import BlobMissing, ConfigError, MalformedFact, PackError, SignatureRefused, WireError
from penstock.protocol.files import MOST_BYTES, read_regular
from penstock.protocol.groups import BlobRef
from penstock.protocol.record.checkpoint_state import CheckpointState, committed
from penstock.protocol.record.stopped_batch import GROUPS, SETTINGS, StoppedBatch, read_batch
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.export import export_adapter, export_version
from penstock.protocol.weights.manifest import VersionManifest
from penstock.protocol.weights.version_reader import UNUSABLE, WeightReader
from penstock.trainer.algorithm.mismatch import compare_fresh_tokens
from penstock.trainer.algorithm.stop_checks import EngineCheck
from penstock.trainer.errors import EngineMismatch, PolicyCollapsed, TrainingDiverged
from penstock.trainer.groups.batcher import staleness_tokens
from penstock.trainer.learner.learner import Learner
from penstock.trainer.learner.planning import Planner, learn
from penstock.trainer.learner.step_metrics import StepMetrics
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.ranks import Ranks
from penstock.trainer.recovery.checkpoint import CHECKPOINTS, verify_files
from penstock.trainer.recovery.resume_checks import read_settings
from penstock.trainer.recovery.stored_checkpoints import complete_copy
from penstock.trainer.telemetry.metrics import step_fields

if TYPE_CHECKING:
    from penstock.protocol.weights.signature import TrustedKeys  # its library is imported where keys are named


class StoppedPacks:
    """The groups of a saved batch, as every rank reads them from a folder that all of them see."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, ref: BlobRef) -> bytes:
        return read_regular(self._folder / ref.key, MOST_BYTES)


@dataclass(frozen=True, slots=True)
class _Weights:
    described: str
    checkpoint: tuple[Path, CheckpointState] | None = None
    model: Path | None = None  # folder of a published version
    adapter: Path | None = None  # the same, of adapters on the initial model


def fetch_published(
    batch: StoppedBatch, folder: Path, *, store: Blobs, trusted_keys: TrustedKeys | None = None
) -> bool:
    """Write the published version of a batch into a folder, of the newest session that may have made it.

    Returns True for adapters, in PEFT's form, and False for a whole model. Manifests of another run, or that none of
    ``trusted_keys`` has signed, are not used; None: signatures are not verified. Raises ConfigError where no stored version is
    usable.
    """
    version, run_id = PolicyVersion(batch.version), batch.run_id
    store.check(run_id)
    manifests, problems = list[VersionManifest](), list[str]()
    for stat in store.list(blob_keys.weights_prefix(run_id, version)):
        if stat.key.endswith("/manifest.json"):
            try:
                data = store.get_unverified(stat.key)
                if trusted_keys is not None:
                    trusted_keys.verify(data, stat.key)
                manifest = VersionManifest.from_json(data)
                if manifest.run_id == run_id:
                    manifests.append(manifest)
                else:
                    problems.append(f"{stat.key} is of run {manifest.run_id}")
            except (BlobMissing, SignatureRefused, WireError) as err:
                problems.append(str(err))
    known = [manifest for manifest in manifests if manifest.version == version and manifest.epoch <= batch.epoch]
    reader = WeightReader(store, run_id, trusted_keys=trusted_keys)
    for manifest in sorted(known, key=lambda one: one.epoch, reverse=True):
        try:
            export = export_version if manifest.base is None else export_adapter
            export(manifest, folder, reader=reader, blobs=store)
        except UNUSABLE as err:
            problems.append(str(err))
            continue
        return manifest.base is not None
    said = f" ({'; '.join(problems)[:400]})" if problems else ""
    raise ConfigError(
        f"the weights before step {batch.step} of run {run_id} are not available: there is no checkpoint of version {version}, "
        f"and the object store cannot give that version{said}; it keeps trainer.keep_versions of them"
    )


class BatchReplay:
    """Rank 0's part; the other ranks run `follow`."""

    def __init__(self, run: RunSettings, folder: Path, ranks: Ranks, wanted: Wanted) -> None:
        """Read the batch of a run in ``folder`` with its settings.

        Raises ConfigError for a damaged batch, for one of another run, or for code that its settings name by path unless
        it is ``wanted``.
        """
        self._run_folder, self._folder, self._ranks, self._wanted = run.folder, folder, ranks, wanted
        try:
            self._batch, groups = read_batch(folder)
            self._document = read_regular(folder / SETTINGS)
        except FileNotFoundError as err:
            raise ConfigError(
                f"{err.filename}: missing; a batch that an earlier release saved has no settings"
            ) from None
        except (MalformedFact, PackError, OSError) as err:
            raise ConfigError(f"{folder} cannot be read ({err}); restore it") from None
        self._ages = dict(self._batch.ages)
        if self._batch.run_id != run.id:
            raise ConfigError(
                f"{folder} is a batch of run {self._batch.run_id}, not of run {run.id}: the weights before it are that run's; name it, with "
                "the run.dir that holds its folder"
            )
        if (names := named_code(self._document)) and not wanted.user_code:
            raise ConfigError(
                f"the settings of {folder} name user code, which a replay runs: {', '.join(names)[:400]!r}; read it, then add --user-code"
            )
        self._settings, _ = read_settings(self._document, where=str(folder / SETTINGS))
        if any(group.image_processor is not None for group in groups):
            raise ConfigError(
                f"the rows of {folder} have images, which a saved batch does not hold; replay the whole run with `penstock replay`"
            )
        pack = BlobRef(key=GROUPS, size_bytes=(folder / GROUPS).stat().st_size, sha256="0" * 64)
        self._ready = [
            ReadyGroup(scored, pack, group) for scored, group in zip(self._batch.groups, groups, strict=True)
        ]

    def run(self, store: Blobs) -> BatchVerdict:
        """Train on the batch once, and return what was found; raises ConfigError where the weights before it are not stored."""
        with tempfile.TemporaryDirectory(prefix="replay-", dir=self._folder.parent) as scratch:
            weights = self._find_weights(store, Path(scratch))
            learner = self._build(weights)
            planner = Planner(self._settings, learner, self._batch.algorithm)
            plan = planner.plan(self._ready, self._batch.version, self._ages)
            figures = learner.measure(plan, self._ready, keep_rows=len(plan.rows))
            groups = group_metrics(plan, figures, self._ready)
            planner = Planner(self._settings, learner, self._batch.algorithm)  # the first plan has moved its state
            failure, made = self._failure(planner, learner, figures)
        fields = self._fields(figures if made is None else made)
        if made is None:  # no step was made
            fields = {name: value for name, value in fields.items() if name not in ("grad_norm", "lr", "lr_set")}
        if self._ranks.num_ranks > 1:
            self._ranks.broadcast(None)
        return BatchVerdict(
            run_id=self._batch.run_id,
            step=self._batch.step,
            version=self._batch.version,
            recorded=self._batch.reason,
            recorded_error=self._batch.error,
            weights_from=weights.described,
            failure="" if failure is None else str(failure),
            error="" if failure is None else type(failure).__name__,
            figures=fields,
            groups=groups,
        )

    def _failure(
        self, planner: Planner, learner: Learner, measured: StepMetrics
    ) -> tuple[Exception | None, StepMetrics | None]:
        trainer = self._settings.trainer
        try:
            figures = learn(planner, learner, self._ready, self._batch.version, ages=self._ages).metrics
        except TrainingDiverged as err:
            return err, None
        learner.dismiss()
        try:
            check = EngineCheck(limit=trainer.max_mismatch, max_violations=1)
            check.check(compare_fresh_tokens(measured.sums, measured.maxima), self._batch.version)
        except EngineMismatch as err:
            return err, figures
        entropy = measured.sums["surprise"] / max(1.0, measured.sums["tokens"])
        if trainer.min_entropy is not None and not entropy >= trainer.min_entropy:
            return PolicyCollapsed(
                f"the entropy of the sampled tokens is {entropy:.3g} nats per token, below trainer.min_entropy = {trainer.min_entropy:g}"
            ), figures
        return None, figures

    def _fields(self, figures: StepMetrics) -> dict[str, Any]:
        version, least = PolicyVersion(self._batch.version), self._settings.data.least_age
        ages = staleness_tokens(self._ready, version, least=least, ages=self._ages)
        return step_fields(self._batch.step, self._batch.version, figures, self._ready, ages)

    def _find_weights(self, store: Blobs, scratch: Path) -> _Weights:
        version = self._batch.version
        for folder, state in committed(self._run_folder / CHECKPOINTS):
            if state.version == version and state.step == self._steps_before:
                if state.run_id != self._batch.run_id:
                    raise ConfigError(
                        f"{folder} is a checkpoint of run {state.run_id}, not of run {self._batch.run_id}: its weights are others; remove it "
                        "from this run's folder"
                    )
                whole = complete_copy(store, folder, state, scratch)
                verify_files(whole, state)
                return _Weights(f"the checkpoint {folder.name}", checkpoint=(whole, state))
        if self._steps_before == 0:
            return _Weights("the initial model")
        if self._settings.algorithm.has_critic:
            raise ConfigError(
                f"the weights before step {self._batch.step} of run {self._batch.run_id} are not available: a critic is in checkpoints "
                f"only, and there is none of version {version}; with trainer.checkpoint_every = 1 a run has one before every step"
            )
        folder, described = scratch / "model", f"version {version} as it was published"
        if fetch_published(self._batch, folder, store=store, trusted_keys=self._wanted.trusted_keys):
            return _Weights(described, adapter=folder)
        if self._settings.model.lora.rank:  # the optimizer's step is then another one: A is new, and B is 0
            described += ", merged: adapters begin anew on it"
        return _Weights(described, model=folder)

    @property
    def _steps_before(self) -> int:
        return self._batch.step - 1

    def _build(self, weights: _Weights) -> Learner:
        order = {
            "settings": self._document.decode(),
            "model": str(weights.model.absolute()) if weights.model else None,
            "adapter": str(weights.adapter.absolute()) if weights.adapter else None,
            "initial": str(self._wanted.model.absolute()) if self._wanted.model else None,
            "folder": str(self._folder.absolute()),
            "steps_done": self._steps_before,
        }
        learner = _build_by_order(self._ranks.broadcast(order), self._ranks)
        if weights.checkpoint is not None:
            learner.load(weights.checkpoint[0])
        return learner


def follow(ranks: Ranks) -> None:
    while (order := ranks.broadcast(None)) is not None:
        try:
            _build_by_order(order, ranks).follow()
        except TrainingDiverged:  # on all ranks at once: what is looked for
            continue


def _build_by_order(order: Mapping[str, Any], ranks: Ranks) -> Learner:
    settings, _ = read_settings(order["settings"].encode(), where="the saved settings")
    initial = Path(order["initial"]) if order["initial"] else settings.model.path
    settings = with_model(settings, Path(order["model"]) if order["model"] else initial, is_merged=bool(order["model"]))
    if order["model"] and settings.needs_reference and settings.algorithm.reference_path is None:
        algorithm = settings.algorithm.model_copy(update={"reference_path": initial})
        settings = settings.model_copy(update={"algorithm": algorithm})
    adapter = Path(order["adapter"]) if order["adapter"] else None
    learner = learner_of(settings, ranks, StoppedPacks(Path(order["folder"])), adapter)
    learner.policy.steps_done = order["steps_done"]  # pairs and mini-batches follow from it
    return learner
