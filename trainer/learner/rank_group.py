"""The ranks that train together: rank 0 sends orders, and every rank carries out its part.

Rank 0 calls `step`, `weights`, `snapshot`, `export`, `capture`, `save` and `load`; the other ranks run `follow`, which carries out the
same orders in the same order until rank 0 calls `dismiss`. Each rank fetches and builds only its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.protocol.errors import PackError
from penstock.protocol.facts import BlobRef
from penstock.protocol.packs import group_pack
from penstock.protocol.trajectory import Group
from penstock.protocol.weights.layout import BUCKET_BYTES
from penstock.trainer import crash_points, process_memory
from penstock.trainer.algorithm.batch import MicroBatch, build
from penstock.trainer.algorithm.corrections.m2po import m2po_limit, m2po_width, moved_along
from penstock.trainer.algorithm.kl import AnyKlForm, kl_estimate
from penstock.trainer.algorithm.objective import PolicyGradient
from penstock.trainer.crash_points import CrashPoint
from penstock.trainer.learner.captured_state import CapturedState
from penstock.trainer.learner.checkpoint_writer import CaptureSlot
from penstock.trainer.learner.critic import Critic
from penstock.trainer.learner.export import export_model
from penstock.trainer.learner.image_reader import ImageReader
from penstock.trainer.learner.kept_rows import KeptRows, RowRecorder
from penstock.trainer.learner.pairs.mixed_pairs import MixedPairs
from penstock.trainer.learner.passes import Passes
from penstock.trainer.learner.policy import Observer, Policy
from penstock.trainer.learner.reference import ReferencePolicy, RemoteReference
from penstock.trainer.learner.step_figures import StepFigures, batch_figures, pass_figures
from penstock.trainer.learner.step_plan import Capacity, ReadyGroup, StepPlan, rows_of
from penstock.trainer.learner.weight_copies import CopyOrder, WeightCopies, name_of
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.publishing.rank_publisher import RankPublisher
from penstock.trainer.publishing.snapshot import Weights
from penstock.trainer.rank_watch import RankActivity


class PackStore(Protocol):
    """Where packs are: the object store of a run, or the folder of a saved batch."""

    def get(self, ref: BlobRef) -> bytes:
        """Return the bytes of a pack."""
        ...


class RankGroup:
    """One policy on all ranks, led by rank 0."""

    def __init__(
        self,
        policy: Policy,
        dims: ParallelDims,
        packs: PackStore,
        objective: PolicyGradient,
        reference: ReferencePolicy | None = None,
        critic: Critic | None = None,
        pairs: MixedPairs | None = None,
        images: ImageReader | None = None,
    ) -> None:
        """Join the group; the same call on every rank.

        An objective with a KL term needs the reference; plans whose advantages are rewards need a critic. Every step trains on some
        of the ``pairs`` too. Rows with images need a reader of ``images``.
        """
        self.policy = policy
        self._dims = dims
        self._packs = packs
        self._objective = objective
        self._reference = reference
        self._critic = critic
        self._pairs = pairs
        self._images = images
        self.bucket_bytes = BUCKET_BYTES  # of copies: the unit of comparison, and of a full snapshot's files
        self.captured = CaptureSlot()
        self.activity = RankActivity()
        self._num_copies = 0
        self._copies = WeightCopies(policy, dims, self.copied_root)

    @property
    def data_digests(self) -> dict[str, str]:
        """What the weights depend on besides groups and settings, with its digest: rows that a step reads itself."""
        return {"pairs of data.train": self._pairs.fingerprint[:16]} if self._pairs is not None else {}

    def capacity(self, budget_tokens: int) -> Capacity:
        """Return what micro-batches of at most ``budget_tokens`` are cut for."""
        return Capacity(budget_tokens, self._dims.rows.count, self.policy.pair_cost, self.policy.pads_rows)

    def step(self, plan: StepPlan, groups: Iterable[ReadyGroup], *, keep_rows: int = 0) -> StepFigures:
        """Make the optimizer step or steps of a batch (rank 0); ``groups`` are those of the plan, already fetched.

        The figures keep the log-probabilities of the plan's first ``keep_rows`` rows, whichever rank computes them.
        """
        self._order("step", lambda: [plan.to_wire(), keep_rows])
        return self._train(plan, _by_place(plan, groups), keep_rows)

    def measure(self, plan: StepPlan, groups: Iterable[ReadyGroup], *, keep_rows: int = 0) -> StepFigures:
        """Report what a step on a batch would minimise, without making it (rank 0); of several optimizer steps the first pass.

        Nothing is refused: loss and log-probabilities may be no finite numbers.
        """
        self._order("measure", lambda: [plan.to_wire(), keep_rows])
        return self._train(plan, _by_place(plan, groups), keep_rows, measures=True)

    def reference_gaps(self, plan: StepPlan, groups: Iterable[ReadyGroup], form: AnyKlForm) -> list[float]:
        """Return each row's estimated KL from its sampler to the reference, summed over its tokens (rank 0)."""
        self._order("gaps", lambda: [plan.to_wire(), form])
        return self._gaps(plan, _by_place(plan, groups), form)

    def snapshot(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Copy the whole model to the CPU (rank 0), rounded to ``dtype`` when one is given."""
        self._order("snapshot")
        return self.policy.weights.snapshot(dtype)

    def export(self, folder: Path, *, like: Path, verify: bool) -> None:
        """Write the policy as a model folder (rank 0), as `export_model` does, which also raises."""
        self._order("export", lambda: [str(folder.absolute()), str(like), verify])
        export_model(self.policy, self._dims, folder, like=like, verify=verify)

    def weights(
        self, dtype: torch.dtype | None = None, *, as_adapter: bool = False, wanted: Sequence[int] = ()
    ) -> Weights:
        """Copy what is published of the policy to the CPUs of all ranks, each its own buckets (rank 0).

        The other ranks hold their buckets under the same copy id, besides the copies that are still ``wanted``. No rank
        holds more than its buckets and one tensor, even if weights have to be gathered. ``as_adapter`` copies the
        adapters to rank 0, and once the base that they are applied to. Before the first step the base is published.
        """
        self._num_copies += 1
        order = CopyOrder(self._num_copies, name_of(dtype), as_adapter, tuple(wanted), self.bucket_bytes)
        self._order("weights", order.to_wire)
        return self._copies.copy(order, None)

    def copied_root(self) -> str:
        """Return the root of the model that was copied last, hashed by threads since (rank 0)."""
        self._order("copied_root")
        return self._copies.root()

    def capture(self) -> None:
        """Copy every rank's part of a checkpoint in memory, for `CheckpointWriter` (rank 0)."""
        self._order("capture")
        self.captured.put(self._capture())

    def save(self, folder: Path) -> None:
        """Write the policy's part of a checkpoint (rank 0); the folder is on storage that all ranks share."""
        self._order("save", lambda: str(folder.absolute()))
        self._save(folder)

    def load(self, folder: Path) -> None:
        """Read the policy's part of a checkpoint (rank 0)."""
        self._order("load", lambda: str(folder.absolute()))
        self._load(folder)

    def dismiss(self) -> None:
        """End `follow` on the other ranks (rank 0)."""
        self._order("dismiss")

    def follow(self, publisher: RankPublisher | None = None) -> None:
        """Carry out rank 0's orders until `dismiss` (all other ranks).

        The buckets that are copied for a publication go to ``publisher``.
        """
        while True:
            self.activity.begin("waiting for rank 0", self.policy.steps_done)
            what, detail = self._dims.ranks.broadcast(None)
            if what == "dismiss":
                return
            self.activity.begin(what, self.policy.steps_done)
            self._carry_out(what, detail, publisher)

    def _carry_out(self, what: str, detail: Any, publisher: RankPublisher | None) -> None:
        match what:
            case "step" | "measure":
                plan = StepPlan.from_wire(detail[0])
                self._train(plan, self._fetch(plan), detail[1], measures=what == "measure")
            case "gaps":
                plan = StepPlan.from_wire(detail[0])
                self._gaps(plan, self._fetch(plan), detail[1])
            case "snapshot":
                self.policy.weights.snapshot()
            case "export":
                export_model(self.policy, self._dims, Path(detail[0]), like=Path(detail[1]), verify=detail[2])
            case "weights":
                self._copies.copy(CopyOrder.from_wire(detail), publisher)
            case "copied_root":
                self._copies.root()
            case "capture":
                self.captured.put(self._capture())
            case "save":
                self._save(Path(detail))
            case "load":
                self._load(Path(detail))
            case _:
                raise ValueError(f"internal error, please report: unknown order {what!r} of rank 0")

    def _order(self, what: str, detail: Callable[[], Any] | None = None) -> None:
        if self._dims.ranks.num_ranks > 1:
            self.activity.begin(what, self.policy.steps_done)
            self._dims.ranks.broadcast([what, detail() if detail else None])

    def _train(
        self, plan: StepPlan, groups: Mapping[tuple[int, int], Group], keep_rows: int, *, measures: bool = False
    ) -> StepFigures:
        own = plan.micro_batches[self._dims.rows.index]
        recorder = RowRecorder(own, keep_rows) if keep_rows else None
        steps_done = self.policy.steps_done
        figures = replace(self._learn(plan, groups, recorder, measures=measures), work=self.policy.take_work())
        if measures:
            self.policy.steps_done = steps_done
        if recorder is None:
            return figures
        parts = self._dims.gather(recorder.kept.to_bytes())
        return replace(figures, kept=KeptRows.joined([KeptRows.from_bytes(part) for part in parts]))

    def _learn(
        self,
        plan: StepPlan,
        groups: Mapping[tuple[int, int], Group],
        observe: Observer | None,
        *,
        measures: bool,
    ) -> StepFigures:
        own = plan.micro_batches[self._dims.rows.index]
        objective = self._objective.with_kl(plan.kl_coefficient)
        if objective.needs_teacher or isinstance(self._reference, RemoteReference):
            _check_taught(groups.values(), with_top=objective.needs_teacher_kl)
        priced = self._critic.kl_form if self._critic is not None and plan.token_kl > 0.0 else None
        batches = [self._complete(self._build(plan, rows, groups), objective, priced) for rows in own]
        if self._critic is None:
            return self._update(batches, plan.passes, objective, observe, waits=measures)
        credited = self._critic.credit(batches, plan.token_kl)
        waits = measures or self._critic.learns_alone(self.policy.steps_done)
        figures = self._update(credited.micro_batches, plan.passes, objective, observe, waits=waits)
        return figures if measures else replace(figures, critic=self._critic.learn(credited))

    def _update(
        self,
        batches: Sequence[MicroBatch],
        passes: Passes | None,
        objective: PolicyGradient,
        observe: Observer | None,
        *,
        waits: bool = False,
    ) -> StepFigures:
        """Make the optimizer steps of a batch; with ``waits`` only measure it, in one pass.

        ``observe`` is called in the first pass, which takes the micro-batches in their order.
        """
        take_step = self.policy.measure_step if waits else self.policy.train_step
        if self._pairs is not None:  # settings allow no other steps with them
            pairs, mixed = self._pairs.prepare(self.policy.steps_done, objective)
            return take_step([*batches, *pairs], mixed, self._reference, observe=observe)
        if passes is None:
            return take_step(self._bounded(batches), objective, self._reference, observe=observe)
        pieces, made = passes.cut(batches), list[list[StepFigures]]()
        for order in passes.orders[:1] if waits else passes.orders:
            made.append([])
            for number in order:
                bounded = self._bounded(pieces[number])
                watching = observe if len(made) == 1 else None
                made[-1].append(take_step(bounded, objective, self._reference, ends_batch=False, observe=watching))
                crash_points.reach(CrashPoint.UPDATED)
            if passes.is_exceeded(pass_figures(made[-1]).kl_proximal):  # the same on every rank
                break
        self.policy.end_batch(has_learned=not waits)
        return batch_figures(made)

    def _bounded(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Return the micro-batches of an optimizer step with the drift limit of all of them, if the objective has one."""
        if self._objective.m2po_budget is None:
            return batches
        limit = self._drift_limit(batches, self._objective.m2po_budget, self._objective.m2po_form)
        return [replace(batch, drift_limit=limit) for batch in batches]

    def _gaps(self, plan: StepPlan, groups: Mapping[tuple[int, int], Group], form: AnyKlForm) -> list[float]:
        if self._reference is None:
            raise ValueError("the KL to the reference was requested, and no reference is loaded")
        if isinstance(self._reference, RemoteReference):
            _check_taught(groups.values(), with_top=False)
        gaps = [0.0] * len(plan.rows)
        for numbers in plan.micro_batches[self._dims.rows.index]:
            batch = self._build(plan, numbers, groups)
            if form == "full":
                kl = self.policy.full_kl(batch, self._reference).cpu().double()
            else:
                kl = kl_estimate(batch.behaviour_logprobs, self._reference.logprobs(batch), form).double()
            for number, gap in zip(numbers, batch.sequences.sum(kl).tolist(), strict=False):  # no rows: one empty
                gaps[number] = gap
        return self._dims.sum(gaps)

    def _drift_limit(self, batches: Sequence[MicroBatch], budget: float, form: str) -> float:
        """Return how far a token of the whole batch, over all ranks, may have drifted from its behaviour policy."""
        squares = []
        for batch in batches:
            held = self.policy.logprobs(batch).cpu()
            log_ratio = held - batch.behaviour_logprobs
            advantages = self._objective.taught(batch.advantages, held, batch)
            squares.append(log_ratio.square()[moved_along(log_ratio, advantages)])
        find = m2po_width if form == "clip" else m2po_limit
        return find(torch.cat(squares), budget, self._dims.sum)

    def _build(self, plan: StepPlan, numbers: Sequence[int], groups: Mapping[tuple[int, int], Group]) -> MicroBatch:
        """Return a micro-batch whose images are fetched; their patches are computed when it is."""
        rows = rows_of(plan, numbers, groups)
        batch = build(rows)
        if batch.images is None:
            return batch
        if self._images is None:
            raise PackError(
                f"{len(batch.images.images)} images in the rows of {plan.packs[plan.rows[numbers[0]].pack].key}, and the model reads text "
                "alone; train on them with the model that sampled them"
            )
        for processor in {row.images.images.processor for row in rows if row.images is not None}:
            self._images.fetch(batch.images.images, processor)
        return replace(batch, images=replace(batch.images, read=self._images.patches))

    def _complete(self, batch: MicroBatch, objective: PolicyGradient, priced: AnyKlForm | None) -> MicroBatch:
        """Add the other policies' log-probabilities; ``priced`` is the form of a KL in every token's reward."""
        if objective.needs_proximal:
            batch = replace(batch, proximal_logprobs=self.policy.logprobs(batch).cpu())
        if self._reference is None:
            return batch
        if objective.needs_reference or priced not in (None, "full"):
            batch = replace(batch, reference_logprobs=self._reference.logprobs(batch))
        if priced == "full":
            batch = replace(batch, reference_kl=self.policy.full_kl(batch, self._reference).cpu())
        return batch

    def _save(self, folder: Path) -> None:
        self._capture().write(folder)
        self._dims.ranks.barrier()
        process_memory.return_freed_memory()

    def _capture(self) -> CapturedState:
        critic = [self._critic.capture()] if self._critic is not None else []
        return CapturedState([*critic, self.policy.capture()])

    def _load(self, folder: Path) -> None:
        if self._critic is not None:
            self._critic.load(folder)
        self.policy.load(folder)

    def _fetch(self, plan: StepPlan) -> dict[tuple[int, int], Group]:
        """Fetch the groups of this rank's rows, and no others."""
        wanted: dict[int, set[int]] = {}
        for number in (row for rows in plan.micro_batches[self._dims.rows.index] for row in rows):
            wanted.setdefault(plan.rows[number].pack, set()).add(plan.rows[number].row_group)
        found = {}
        for pack, row_groups in wanted.items():
            order = sorted(row_groups)
            groups = group_pack.decode(self._packs.get(plan.packs[pack]), order)
            found |= {(pack, row_group): group for row_group, group in zip(order, groups, strict=True)}
        return found


def _check_taught(groups: Iterable[Group], *, with_top: bool) -> None:
    """Raise PackError for a group that lacks what a teacher says about it: one of a run that had none, trained on again."""
    for group in groups:
        if group.teacher is None or (with_top and not group.teacher.top_k):
            lacks = (
                "no teacher's log-probabilities" if group.teacher is None else "none of the teacher's likeliest tokens"
            )
            raise PackError(
                f"group {group.group_id} has {lacks}, which the algorithm needs; train on groups of a run whose section "
                "[teacher] asked for them"
            )


def _by_place(plan: StepPlan, groups: Iterable[ReadyGroup]) -> dict[tuple[int, int], Group]:
    """Return groups by pack number and row group."""
    numbers = {reference.key: number for number, reference in enumerate(plan.packs)}
    return {(numbers[g.pack.key], g.scored.generated.row_group): g.group for g in groups}
