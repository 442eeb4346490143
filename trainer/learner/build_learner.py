"""Builds the learner of a run from its settings: policy, reference and critic under DeepSpeed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from penstock.protocol.groups import derived_seed
from penstock.trainer.algorithm.estimators.gae import gae
from penstock.trainer.algorithm.objective import build_objective
from penstock.trainer.algorithm.token_credit import TokenCredit
from penstock.trainer.data.data_order import DataOrder
from penstock.trainer.data.pairs import PairSet
from penstock.trainer.learner.critic import Critic, Regression, load_critic
from penstock.trainer.learner.image_reader import image_reader
from penstock.trainer.learner.learner import Learner
from penstock.trainer.learner.load_model import load_policy, load_reference
from penstock.trainer.learner.micro_batches import PackStore
from penstock.trainer.learner.pair_planner import MixedPairs, PairPlanner
from penstock.trainer.learner.policy import Policy
from penstock.trainer.learner.reference import ReferencePolicy, RemoteReference, WithoutAdapter
from penstock.trainer.learner.trainable import Optimisation, optimisation
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.settings import TrainerSettings


def build_learner(
    settings: TrainerSettings,
    dims: ParallelDims,
    packs: PackStore,
    pairs: PairSet | None = None,
    *,
    adapter: Path | None = None,
) -> Learner:
    """Load the networks that the settings name, and wrap them in DeepSpeed; called on every rank with the same settings.

    Ranks fetch groups from ``packs``; ``pairs`` are those that are trained on beside the groups (`open_mixed_pairs`). The adapters
    begin with those in the folder ``adapter``; None: from their first values.
    """
    trainer = settings.trainer
    how = replace(
        optimisation(settings, trainer, trainer.steps - settings.critic.head_start_steps),
        router_replay=trainer.router_replay,
        train_vision_tower=settings.model.train_vision_tower,
        skip_above=trainer.skip_step_above_grad_norm,
        skip_after=trainer.skip_step_after,
    )
    # Seed 0 leaves torch's own start, with which the records of earlier releases are replayed.
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
    return Learner(policy, dims, packs, build_objective(algorithm), reference, critic, mixed, images)


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
        Regression(
            updates=chosen.updates,
            form=chosen.loss,
            coefficient=chosen.loss_coefficient,
            clip=chosen.value_clip,
            head_start_steps=chosen.head_start_steps,
        ),
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
