"""The ranks that train together: rank 0 gives the orders, every rank carries out its part.

Rank 0 calls `step`, `weights`, `snapshot`, `save` and `load`; the others sit in `follow`, which does the same
things in the same order until rank 0 says `dismiss`. Each rank fetches and builds only its own rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import torch
from torch import Tensor

from penstock.protocol import group_pack
from penstock.protocol.trajectory import Group
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.weights.adapter_format import published_name
from penstock.protocol.weights.digest import TensorDigest, weights_digest
from penstock.protocol.weights.layout import BUCKET_BYTES
from penstock.trainer.algorithm.batch import MicroBatch, build
from penstock.trainer.algorithm.corrections.m2po import m2po_limit, m2po_width, moved_along
from penstock.trainer.algorithm.kl import AnyKlForm, kl_estimate
from penstock.trainer.algorithm.objective import PolicyGradient
from penstock.trainer.learner.critic import Critic
from penstock.trainer.learner.policy import Policy, StepFigures
from penstock.trainer.learner.reference import ReferencePolicy
from penstock.trainer.learner.step_plan import ReadyGroup, StepPlan, rows_of
from penstock.trainer.publishing.rank_publisher import Share
from penstock.trainer.publishing.snapshot import Base, Weights
from penstock.trainer.publishing.weight_buckets import Part, part_of, split
from penstock.trainer.ranks import Ranks


class RankGroup:
    """One policy on all ranks, led by rank 0."""

    def __init__(
        self,
        policy: Policy,
        ranks: Ranks,
        blobs: Blobs,
        objective: PolicyGradient,
        reference: ReferencePolicy | None = None,
        critic: Critic | None = None,
    ) -> None:
        """Join; the same call on every rank.

        An objective with a KL term needs the reference, plans whose advantages are rewards a critic.
        """
        self.policy = policy
        self._ranks = ranks
        self._blobs = blobs
        self._objective = objective
        self._reference = reference
        self._critic = critic
        self.bucket_bytes = BUCKET_BYTES  # of what is taken: the unit of comparison, and of an anchor's files
        self._num_taken = 0
        self._hashed: Future[list[TensorDigest]] | None = None  # of the model that was copied last
        self._base: tuple[str | None, Base] | None = None  # as it was copied, and to which dtype

    @property
    def num_ranks(self) -> int:
        """How many processes train together."""
        return self._ranks.num_ranks

    def step(self, plan: StepPlan, groups: Iterable[ReadyGroup]) -> StepFigures:
        """Make one optimizer step (rank 0); ``groups`` are those of the plan, already fetched."""
        self._order("step", plan.to_wire)
        return self._train(plan, _by_place(plan, groups))

    def reference_gaps(self, plan: StepPlan, groups: Iterable[ReadyGroup], form: AnyKlForm) -> list[float]:
        """Return each row's estimated KL from its sampler to the reference, summed over its tokens (rank 0)."""
        self._order("gaps", lambda: [plan.to_wire(), form])
        return self._gaps(plan, _by_place(plan, groups), form)

    def snapshot(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Copy the whole model to the CPU (rank 0), rounded to ``dtype`` when one is given."""
        self._order("snapshot")
        return self.policy.snapshot(dtype)

    def weights(
        self, dtype: torch.dtype | None = None, *, as_adapter: bool = False, wanted: Sequence[int] = ()
    ) -> Weights:
        """Copy what is published of the policy to the CPUs of all ranks, each its own buckets (rank 0).

        The others hold their parts under the same ``taken``, besides those that are still ``wanted``. Whether the
        weights have to be gathered or not, no rank has more than its part and one tensor. ``as_adapter``: the adapters
        upon the model as it was before they learned, all of them on rank 0. A policy that has made no step yet is that model.
        """
        self._num_taken += 1
        order = [self._num_taken, _name_of(dtype), as_adapter, list(wanted), self.bucket_bytes]
        self._order("weights", lambda: order)
        return self._weights(order, None)

    def taken_root(self) -> str:
        """Return the root of the model that was copied last, which threads have hashed since (rank 0)."""
        self._order("taken_root")
        return self._gather_root(self._hashed)

    def save(self, folder: Path) -> None:
        """Write the policy's part of a checkpoint (rank 0); the folder is on storage that all ranks share."""
        self._order("save", lambda: str(folder.absolute()))
        self._save(folder)

    def load(self, folder: Path) -> None:
        """Read the policy's part of a checkpoint (rank 0)."""
        self._order("load", lambda: str(folder.absolute()))
        self._load(folder)

    def dismiss(self) -> None:
        """Tell the other ranks that the run is over (rank 0)."""
        self._order("dismiss")

    def follow(self, share: Share | None = None) -> None:
        """Carry out rank 0's orders until it says that the run is over (all other ranks).

        Parts of what is taken for a publication go to ``share``.
        """
        while True:
            what, detail = self._ranks.broadcast(None)
            match what:
                case "step":
                    plan = StepPlan.from_wire(detail)
                    self._train(plan, self._fetch(plan))
                case "gaps":
                    plan = StepPlan.from_wire(detail[0])
                    self._gaps(plan, self._fetch(plan), detail[1])
                case "snapshot":
                    self.policy.snapshot()
                case "weights":
                    self._weights(detail, share)
                case "taken_root":
                    self._gather_root(self._hashed)
                case "save":
                    self._save(Path(detail))
                case "load":
                    self._load(Path(detail))
                case _:
                    return

    def _order(self, what: str, detail: Callable[[], Any] | None = None) -> None:
        if self._ranks.num_ranks > 1:
            self._ranks.broadcast([what, detail() if detail else None])

    def _weights(self, order: Sequence[Any], share: Share | None) -> Weights:
        taken, dtype, as_adapter, wanted, bucket_bytes = order
        config = self.policy.adapter_config() if as_adapter else None
        if share is not None:
            share.discard(wanted)
        if config is None:
            self._hashed = None  # or the copy before would be kept while this one is made
            part = self._copy(taken, dtype, bucket_bytes, merge=True)
            self._hashed = part.hashed
            if share is not None:
                share.hold(part)
            return Weights(part, whole_root=self.taken_root)
        if self._base is None or self._base[0] != dtype:
            part = self._copy(taken, dtype, bucket_bytes, merge=False)
            self._base = dtype, Base(part, config, root=self._gather_root(part.hashed))
            if share is not None:
                share.hold(part, for_good=True)
        base = self._base[1]
        if self.policy.steps_done == 0:
            return Weights(base.part, whole_root=lambda: base.root)
        factors = {published_name(name): t for name, t in self.policy.adapter_tensors(_dtype_of(dtype)).items()}
        return Weights(part_of(factors, taken=taken, bucket_bytes=sys.maxsize), base)

    def _copy(self, taken: int, dtype: str | None, bucket_bytes: int, *, merge: bool) -> Part:
        layout = self.policy.layout(_dtype_of(dtype), bucket_bytes=bucket_bytes)
        part = Part(layout, split(layout, self._ranks.num_ranks)[self._ranks.rank], taken=taken)
        self.policy.copy_to(part, merge=merge)
        part.seal()
        return part

    def _gather_root(self, hashed: Future[list[TensorDigest]] | None) -> str:
        assert hashed is not None, "weights are copied before their root is asked for"
        rows = msgpack.packb([[d.name, d.dtype, d.shape, d.xxh3] for d in hashed.result()])
        assert rows is not None
        gathered = [row for data in self._ranks.gather(rows) for row in msgpack.unpackb(data)]
        return weights_digest(TensorDigest(name, dtype, tuple(shape), xxh3) for name, dtype, shape, xxh3 in gathered)

    def _train(self, plan: StepPlan, groups: Mapping[tuple[int, int], Group]) -> StepFigures:
        mine = plan.micro_batches[self._ranks.rank]
        objective = self._objective.with_kl(plan.kl_coefficient)
        priced = self._critic.kl_form if self._critic is not None and plan.token_kl > 0.0 else None
        batches = [self._complete(build(rows_of(plan, rows, groups)), objective, priced) for rows in mine]
        if self._critic is None:
            return self.policy.train_step(self._bounded(batches), objective, self._reference)
        credited = self._critic.credit(batches, plan.token_kl)
        waits = self._critic.policy_waits(self.policy.steps_done)
        move = self.policy.measure_step if waits else self.policy.train_step
        figures = move(self._bounded(credited.micro_batches), objective, self._reference)
        return replace(figures, critic=self._critic.learn(credited))

    def _bounded(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Give micro-batches the limit that their batch as a whole sets, where there is one."""
        if self._objective.m2po_budget is None:
            return batches
        limit = self._drift_limit(batches, self._objective.m2po_budget, self._objective.m2po_form)
        return [replace(batch, drift_limit=limit) for batch in batches]

    def _gaps(self, plan: StepPlan, groups: Mapping[tuple[int, int], Group], form: AnyKlForm) -> list[float]:
        if self._reference is None:
            raise ValueError("the KL to the reference was asked for, and no reference is loaded")
        gaps = [0.0] * len(plan.rows)
        for numbers in plan.micro_batches[self._ranks.rank]:
            batch = build(rows_of(plan, numbers, groups))
            if form == "full":
                kl = self.policy.full_kl(batch, self._reference).cpu().double()
            else:
                kl = kl_estimate(batch.behaviour_logprobs, self._reference.logprobs(batch), form).double()
            for number, gap in zip(numbers, batch.sequences.sum(kl).tolist(), strict=False):  # no rows: one empty
                gaps[number] = gap
        return self._ranks.sum(gaps)

    def _drift_limit(self, batches: Sequence[MicroBatch], budget: float, form: str) -> float:
        """Look at the whole batch, over all ranks, for how far a token may have moved."""
        squares = []
        for batch in batches:
            log_ratio = self.policy.logprobs(batch).cpu() - batch.behaviour_logprobs
            squares.append(log_ratio.square()[moved_along(log_ratio, batch.advantages)])
        find = m2po_width if form == "clip" else m2po_limit
        return find(torch.cat(squares), budget, self._ranks.sum)

    def _complete(self, batch: MicroBatch, objective: PolicyGradient, priced: AnyKlForm | None) -> MicroBatch:
        """Add what other policies make of the tokens; ``priced`` is the form of a KL in every token's reward."""
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
        if self._critic is not None:
            self._critic.save(folder)
        self.policy.save(folder)

    def _load(self, folder: Path) -> None:
        if self._critic is not None:
            self._critic.load(folder)
        self.policy.load(folder)

    def _fetch(self, plan: StepPlan) -> dict[tuple[int, int], Group]:
        """Fetch the groups that this rank's rows belong to, and no others."""
        wanted: dict[int, set[int]] = {}
        for number in (row for rows in plan.micro_batches[self._ranks.rank] for row in rows):
            wanted.setdefault(plan.rows[number].pack, set()).add(plan.rows[number].row_group)
        found = {}
        for pack, row_groups in wanted.items():
            order = sorted(row_groups)
            groups = group_pack.decode(self._blobs.get(plan.packs[pack]), order)
            found |= {(pack, row_group): group for row_group, group in zip(order, groups, strict=True)}
        return found


def _name_of(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _dtype_of(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _by_place(plan: StepPlan, groups: Iterable[ReadyGroup]) -> dict[tuple[int, int], Group]:
    """Key groups that are here already by pack number and row group."""
    numbers = {reference.key: number for number, reference in enumerate(plan.packs)}
    return {(numbers[g.pack.key], g.scored.generated.row_group): g.group for g in groups}
