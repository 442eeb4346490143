"""The object that every rank holds: it makes the steps of a batch, copies weights, and reads and writes the state.

Rank 0 calls its methods, and all ranks run them (`trainer/rank_orders.py`). Each rank fetches and builds only its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from penstock.protocol.groups import derived_seed
from penstock.protocol.weights.layout import BUCKET_BYTES
from penstock.trainer import crash_points, process_memory
from penstock.trainer.algorithm.batch import MicroBatch
from penstock.trainer.algorithm.corrections.m2po import m2po_limit, m2po_width, moved_along
from penstock.trainer.algorithm.estimators.gae import gae
from penstock.trainer.algorithm.kl import AnyKlForm, kl_estimate
from penstock.trainer.algorithm.objective import PolicyGradient, build_objective
from penstock.trainer.crash_points import CrashPoint
from penstock.trainer.data.data_order import DataOrder
from penstock.trainer.data.pairs import PairSet
from penstock.trainer.learner.critic import Critic, TokenCredit, load_critic
from penstock.trainer.learner.export import export_model
from penstock.trainer.learner.load_model import load_policy, load_reference
from penstock.trainer.learner.pair_planner import MixedPairs, PairPlanner
from penstock.trainer.learner.policy import Observer, Policy
from penstock.trainer.learner.policy_weights import WeightCopies
from penstock.trainer.learner.reference import Reference, ReferencePolicy, RemoteReference, WithoutAdapter
from penstock.trainer.learner.shard_files import CapturedState, CaptureSlot
from penstock.trainer.learner.step_metrics import RowRecorder, StepMetrics, batch_metrics, pass_metrics
from penstock.trainer.learner.step_plan import (
    Capacity,
    PackStore,
    Passes,
    ReadyGroup,
    StepPlan,
    check_taught,
    groups_of,
    micro_batches_of,
    row_by_row,
)
from penstock.trainer.learner.trainable import Optimisation, optimisation
from penstock.trainer.learner.vision import ImageReader, image_reader
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.publishing.rank_publisher import RankPublisher
from penstock.trainer.publishing.weight_buckets import Weights
from penstock.trainer.rank_device import RankDevice
from penstock.trainer.rank_orders import LeaderOnly, RankProgram, on_all_ranks
from penstock.trainer.settings import TrainerSettings


class Learner(RankProgram):
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
        """Build it on every rank with the same networks; an objective with a KL needs the reference."""
        super().__init__(dims.ranks)
        self.policy, self._dims, self._share = policy, dims, dims.rows
        self._packs, self._objective, self._reference = packs, objective, reference
        self._critic, self._pairs, self._images = critic, pairs, images
        self.bucket_bytes = BUCKET_BYTES  # of copies: the unit of comparison, and of a full snapshot's files
        self.captured = CaptureSlot()
        self.device: RankDevice | None = None  # that this rank shares with engines
        self._publisher: RankPublisher | None = None
        self._copies = WeightCopies(policy, dims, self.copied_root)

    def keep_words_on_device(self) -> None:
        """Have copies of the weights compared with words that the device keeps; called before the first copy."""
        self._copies = WeightCopies(self.policy, self._dims, self.copied_root, kept_on_device=True)

    @property
    def num_steps_done(self) -> int:
        return self.policy.steps_done

    @property
    def data_digests(self) -> dict[str, str]:
        return {"pairs of data.train": self._pairs.fingerprint[:16]} if self._pairs is not None else {}

    def capacity(self, budget_tokens: int) -> Capacity:
        return Capacity(budget_tokens, self._share.count, self.policy.pair_cost, self.policy.pads_rows)

    def follow(self, publisher: RankPublisher | None = None) -> None:
        """Carry out rank 0's orders until `dismiss` (all other ranks); copies to publish go to ``publisher``."""
        self._publisher = publisher
        super().follow()

    @on_all_ranks
    def step(self, plan: StepPlan, ready: LeaderOnly[Iterable[ReadyGroup]] = (), *, keep_rows: int = 0) -> StepMetrics:
        """Make the optimizer step or steps of a batch; groups of the plan that are not ``ready`` are fetched.

        A plan without rows makes none: weights and moments stay, schedules go on.
        The metrics keep the log-probabilities of the plan's first ``keep_rows`` rows, whichever rank computes them.
        """
        return self._learn(plan, ready, keep_rows)

    @on_all_ranks
    def measure(
        self, plan: StepPlan, ready: LeaderOnly[Iterable[ReadyGroup]] = (), *, keep_rows: int = 0
    ) -> StepMetrics:
        """Report what a step on a batch would minimise, without making it; of several optimizer steps the first pass.

        Nothing is refused: loss and log-probabilities may be no finite numbers.
        """
        steps_done = self.policy.steps_done
        metrics = self._learn(plan, ready, keep_rows, measures=True)
        self.policy.steps_done = steps_done
        return metrics

    @on_all_ranks
    def reference_gaps(
        self, plan: StepPlan, ready: LeaderOnly[Iterable[ReadyGroup]] = (), *, form: AnyKlForm
    ) -> list[float]:
        """Return each row's estimated KL from its sampler to the reference, summed over its tokens."""
        if self._reference is None:
            raise ValueError("the KL to the reference was requested, and no reference is loaded")
        share = self._share.index
        groups = groups_of(plan, share, ready, self._packs)
        if isinstance(self._reference, RemoteReference):
            check_taught(groups.values(), with_top=False)
        gaps = [0.0] * len(plan.rows)
        for numbers, batch in zip(
            plan.micro_batches[share], micro_batches_of(plan, share, groups, self._images), strict=True
        ):
            if form == "full":
                kl = self.policy.full_kl(batch, self._reference).cpu().double()
            else:
                kl = kl_estimate(batch.behaviour_logprobs, self._reference.logprobs(batch).cpu(), form).double()
            for number, gap in zip(numbers, batch.sequences.sum(kl).tolist(), strict=False):  # no rows: one empty
                gaps[number] = gap
        return self._dims.sum(gaps)

    @on_all_ranks
    def influences(self, plan: StepPlan, ready: LeaderOnly[Iterable[ReadyGroup]] = ()) -> list[float]:
        """Return `Policy.influence` of each trajectory of a plan by `trajectories_alone` at its first row, else 0."""
        share, found = self._share.index, [0.0] * len(plan.rows)
        batches = micro_batches_of(row_by_row(plan), share, groups_of(plan, share, ready, self._packs), self._images)
        for rows in plan.micro_batches[share]:
            found[rows[0]] = self.policy.influence(list(islice(batches, len(rows))))
        return self._dims.sum(found)

    @on_all_ranks
    def snapshot(self) -> dict[str, Tensor]:
        return self.policy.weights.snapshot()

    @on_all_ranks
    def export(self, folder: Path, *, like: Path, verify: bool) -> None:
        """Write the policy as a model folder, as `export_model` does, which also raises."""
        export_model(self.policy, self._dims, folder, like=like, verify=verify)

    @on_all_ranks
    def weights(self, dtype: str | None = None, *, as_adapter: bool = False, wanted: Sequence[int] = ()) -> Weights:
        """Copy what is published of the policy to the CPUs of all ranks, each its buckets, rounded to a ``dtype``.

        The other ranks hold their buckets under the same copy id, besides the copies that are still ``wanted``. From
        the second copy on a thread reads what changed, before the next optimizer step. ``as_adapter`` copies the
        adapters to rank 0, and once the base that they are applied to. Before the first step the base is published.
        """
        return self._copies.copy(
            dtype, self._publisher, as_adapter=as_adapter, wanted=wanted, bucket_bytes=self.bucket_bytes
        )

    @on_all_ranks
    def copied_root(self) -> str:
        """Return the root of the model that was copied last, hashed by threads since; on rank 0."""
        return self._copies.root()

    @on_all_ranks
    def leave_device(self) -> int:
        """Move what is on this rank's device to host memory, and give the device to engines; return one rank's bytes.

        Until `enter_device` nothing but `capture` may be called.
        """
        num_bytes = sum(network.leave_device() for network in self._on_device())
        if self.device is not None:
            self.device.devices.give()
        return num_bytes

    @on_all_ranks
    def enter_device(self) -> None:
        """Wait for this rank's turn on its device, and move everything back; raises DeviceNotFreed."""
        if self.device is not None:
            self.device.wait()
        for network in self._on_device():
            network.enter_device()

    @on_all_ranks
    def capture(self) -> None:
        """Copy every rank's part of a checkpoint in memory, for `CheckpointWriter`."""
        self.captured.put(self._capture())

    @on_all_ranks
    def save(self, folder: Path) -> None:
        """Write the policy's part of a checkpoint; the folder is on storage that all ranks share."""
        self._capture().write(folder)
        self.ranks.barrier()
        process_memory.return_freed_memory()

    @on_all_ranks
    def load(self, folder: Path) -> None:
        """Read the policy's part of a checkpoint."""
        if self._critic is not None:
            self._critic.load(folder)
        self.policy.load(folder)

    def _on_device(self) -> list[Policy | Critic | Reference]:
        held = [self.policy, self._critic, self._reference]
        return [network for network in held if isinstance(network, Policy | Critic | Reference)]

    def _capture(self) -> CapturedState:
        critic = [self._critic.capture()] if self._critic is not None else []
        return CapturedState([*critic, self.policy.capture()])

    def _learn(
        self, plan: StepPlan, ready: Iterable[ReadyGroup], keep_rows: int, *, measures: bool = False
    ) -> StepMetrics:
        share, objective, critic = self._share.index, self._objective.with_kl(plan.kl_coefficient), self._critic
        groups = groups_of(plan, share, ready, self._packs)
        if objective.needs_teacher or isinstance(self._reference, RemoteReference):
            check_taught(groups.values(), with_top=objective.needs_teacher_kl)
        recorder = RowRecorder(plan.micro_batches[share], keep_rows) if keep_rows else None
        priced = critic.kl_form if critic is not None and plan.token_kl > 0.0 else None
        built = micro_batches_of(plan, share, groups, self._images)
        batches: Sequence[MicroBatch] = [self._complete(batch, objective, priced) for batch in built]
        learns_alone = critic is not None and critic.learns_alone(self.policy.steps_done)
        is_empty = not plan.rows and self._pairs is None  # an update without a gradient would still move the weights
        credited = critic.credit(batches, plan.token_kl) if critic is not None else None
        batches = batches if credited is None else credited.micro_batches
        waits = measures or learns_alone or is_empty
        metrics = self._update(batches, plan.passes, objective, recorder, waits=waits)
        if is_empty and not measures and not learns_alone:
            self.policy.skip_update()
        if critic is not None and credited is not None and not measures:
            metrics = replace(metrics, critic=critic.skip(credited) if is_empty else critic.learn(credited))
        kept = None if recorder is None else recorder.gather(self._dims)
        return replace(metrics, work=self.policy.take_work(), kept=kept)

    def _complete(self, batch: MicroBatch, objective: PolicyGradient, priced: AnyKlForm | None) -> MicroBatch:
        if objective.needs_proximal:
            batch = replace(batch, proximal_logprobs=self.policy.logprobs(batch))
        if self._reference is None:
            return batch
        if objective.needs_reference or priced not in (None, "full"):
            batch = replace(batch, reference_logprobs=self._reference.logprobs(batch))
        if priced == "full":
            batch = replace(batch, reference_kl=self.policy.full_kl(batch, self._reference).cpu())
        return batch

    def _update(
        self,
        batches: Sequence[MicroBatch],
        passes: Passes | None,
        objective: PolicyGradient,
        observe: Observer | None,
        *,
        waits: bool = False,
    ) -> StepMetrics:
        """Make the optimizer steps of a batch; with ``waits`` only measure it, in one pass.

        ``observe`` is called in the first pass, which takes the micro-batches in their order.
        """
        take_step = partial(self.policy.train_step, learns=not waits)
        if self._pairs is not None:  # settings allow no other steps with them
            pairs, mixed = self._pairs.prepare(self.policy.steps_done, objective)
            return take_step([*batches, *pairs], mixed, self._reference, observe=observe)
        if passes is None:
            return take_step(self._bounded(batches), objective, self._reference, observe=observe)
        pieces, made = passes.cut(batches), list[list[StepMetrics]]()
        for order in passes.orders[:1] if waits else passes.orders:
            made.append([])
            for number in order:
                bounded = self._bounded(pieces[number])
                watching = observe if len(made) == 1 else None
                made[-1].append(take_step(bounded, objective, self._reference, ends_batch=False, observe=watching))
                crash_points.reach(CrashPoint.UPDATED)
            if passes.is_exceeded(pass_metrics(made[-1]).kl_proximal):  # the same on every rank
                break
        self.policy.end_batch(has_learned=not waits)
        return batch_metrics(made)

    def _bounded(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        if self._objective.m2po_budget is None:
            return batches
        limit = self._drift_limit(batches, self._objective.m2po_budget, self._objective.m2po_form)
        return [replace(batch, drift_limit=limit) for batch in batches]

    def _drift_limit(self, batches: Sequence[MicroBatch], budget: float, form: str) -> float:
        squares = []
        for batch in batches:
            held = self.policy.logprobs(batch).cpu()
            log_ratio = held - batch.behaviour_logprobs
            advantages = self._objective.taught(batch.advantages, held, batch)
            squares.append(log_ratio.square()[moved_along(log_ratio, advantages)])
        find = m2po_width if form == "clip" else m2po_limit
        return find(torch.cat(squares), budget, self._dims.sum)


def build_learner(
    settings: TrainerSettings,
    dims: ParallelDims,
    packs: PackStore,
    pairs: PairSet | None = None,
    *,
    adapter: Path | None = None,
) -> Learner:
    """Load the networks that the settings name, and wrap them in DeepSpeed; called on every rank with equal settings.

    Ranks fetch groups from ``packs``; ``pairs`` are those that are trained on beside the groups (`open_mixed_pairs`).
    The adapters begin with those in the folder ``adapter``; None: from their first values.
    """
    trainer = settings.trainer
    how = replace(
        optimisation(settings, trainer, trainer.steps - settings.critic.head_start_steps),
        router_replay=trainer.router_replay,
        train_vision_tower=settings.model.train_vision_tower,
        skip_above=trainer.skip_step_above_grad_norm,
        skip_after=trainer.skip_step_after,
    )
    # Seed 0 leaves torch's default seed, with which the records of earlier releases are replayed.
    if how.lora is not None and how.lora.dropout and settings.first_seed:
        torch.manual_seed(derived_seed(settings.first_seed, "dropout", dims.ranks.rank))
    policy = load_policy(settings.model.path, how, dims, temperature=settings.rollout.temperature, adapters=adapter)
    algorithm, reference = settings.algorithm, None
    if settings.needs_reference and algorithm.reference_device == "remote":
        reference = RemoteReference()
    elif settings.needs_reference and how.lora is not None and algorithm.reference_path is None:
        reference = WithoutAdapter(policy)
    elif settings.needs_reference:
        reference = load_reference(
            algorithm.reference_path or settings.model.path,
            how,
            policy.device,
            dims,
            temperature=settings.rollout.temperature,
            parked=algorithm.reference_device == "parked",
        )
    critic = _critic(settings, how, dims) if algorithm.has_critic else None
    mixed = _mixed(settings, pairs, policy, dims, reference) if pairs is not None else None
    images = image_reader(packs.get, settings.model.path)
    learner = Learner(policy, dims, packs, build_objective(algorithm), reference, critic, mixed, images)
    if trainer.published_words == "device":
        learner.keep_words_on_device()
    return learner


def _mixed(
    settings: TrainerSettings, pairs: PairSet, policy: Policy, dims: ParallelDims, reference: ReferencePolicy | None
) -> MixedPairs:
    planner = PairPlanner(policy, dims, settings.dpo, budget_tokens=settings.trainer.micro_batch_tokens)
    if settings.dpo.needs_reference and reference is not None:
        planner.use_live(reference)
    order = DataOrder(len(pairs), settings.run.seed, settings.data.shuffle)
    coefficient = settings.algorithm.dpo_coefficient
    return MixedPairs(pairs, planner, order, batch_size=settings.dpo.batch_size, coefficient=coefficient)


def _critic(settings: TrainerSettings, policy: Optimisation, dims: ParallelDims) -> Critic:
    chosen = settings.critic
    how = replace(
        policy,
        lora=None,
        skip_above=None,
        num_steps=settings.trainer.steps * chosen.updates,
        lr=chosen.lr,
        warmup_steps=chosen.warmup_steps * chosen.updates,
        max_grad_norm=chosen.max_grad_norm,
    )
    return load_critic(
        chosen.path or settings.model.path,
        how,
        chosen,
        TokenCredit(
            gamma=chosen.gamma,
            lam=chosen.lam,
            whiten=settings.algorithm.whiten_advantages,
            clip=settings.algorithm.advantage_clip,
            kl_form=settings.algorithm.reward_kl_form,
            whiten_rewards=settings.algorithm.options_of(gae).whiten_rewards,
        ),
        dims,
    )
