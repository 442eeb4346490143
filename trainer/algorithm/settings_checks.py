"""Refuse keys of [algorithm] that contradict one another; imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.trainer.algorithm.corrections.m2po import m2po

if TYPE_CHECKING:
    from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings


def check_teacher(algorithm: AlgorithmSettings) -> None:
    if algorithm.distill_clip is not None and algorithm.distill_form == "forward":
        raise ValueError(
            "algorithm.distill_clip bounds an advantage, and algorithm.distill_form = forward adds none; leave it out"
        )
    if algorithm.advantage == "zero":
        if not algorithm.distill_coefficient:
            raise ValueError(
                "algorithm.advantage = zero learns nothing from rewards; set algorithm.distill_coefficient and [teacher], or "
                "another algorithm.advantage"
            )
        if algorithm.dynamic_sampling or any(part.value.reads_advantage for part in algorithm.parts.filters):
            raise ValueError(
                "algorithm.advantage = zero with algorithm.dynamic_sampling or a filter of advantages would leave out every "
                "group; turn it off"
            )
    if algorithm.reference_device == "remote":
        for key in ("kl_form", "reward_kl_form"):
            if algorithm.needs_reference and getattr(algorithm, key) == "full":
                raise ValueError(
                    f"algorithm.{key} = full needs whole distributions, of which a remote reference sends none; set another form"
                )
        if algorithm.reference_path is not None:
            raise ValueError(
                "algorithm.reference_path loads a model, and algorithm.reference_device = remote loads none; leave one out"
            )


def check_passes(algorithm: AlgorithmSettings) -> None:
    if algorithm.stop_kl is not None and algorithm.epochs == 1:
        raise ValueError(
            f"algorithm.stop_kl = {algorithm.stop_kl} does nothing with algorithm.epochs = 1: it leaves out further passes over "
            "a batch; raise algorithm.epochs, or remove algorithm.stop_kl"
        )
    idle = "stop_kl" if algorithm.stop_kl is not None else "" if algorithm.parts.loss.value.uses_ratio else "loss"
    if algorithm.anchor == "interpolated" and idle:
        raise ValueError(
            f"algorithm.ratio_anchor = interpolated with algorithm.{idle} = {getattr(algorithm, idle)}: it computes no policy before the "
            'batch, and is the denominator of a ratio; set algorithm.ratio_anchor = "auto", or another value there'
        )
    if algorithm.many_updates and not algorithm.parts.loss.value.uses_ratio:
        key, value = ("epochs", algorithm.epochs) if algorithm.epochs > 1 else ("minibatches", algorithm.minibatches)
        raise ValueError(
            f"algorithm.{key} = {value} with algorithm.loss = {algorithm.loss}, which has no ratio: after the first optimizer "
            "step on a batch its gradient would be that of another policy than the one that sampled, and nothing would "
            f'limit it; set algorithm.loss = "ppo_clip", or algorithm.{key} = 1'
        )


def refuse_parts_that_disagree(algorithm: AlgorithmSettings) -> None:
    parts = algorithm.parts
    for part in parts.filters:
        if algorithm.has_critic and part.value.reads_advantage:
            raise ValueError(
                f"algorithm.{part.value.switch or 'filters'} reads the advantage of a whole trajectory, and with "
                f"algorithm.advantage = {algorithm.advantage} every token has its own; leave it off, or choose another "
                "algorithm.advantage"
            )
    if algorithm.options_of(m2po).m2po_form == "clip" and algorithm.loss != "ppo_clip":
        raise ValueError(
            f"algorithm.m2po_form = clip sets the clip of ppo_clip, and algorithm.loss = {algorithm.loss} has another; "
            'set algorithm.loss = "ppo_clip", or algorithm.m2po_form = "mask"'
        )
    shaping = [key for key in ("reward_norm", "reward_scaling") if getattr(algorithm, key) != "none"]
    if parts.estimator.value.by_turn and shaping:
        raise ValueError(
            f"algorithm.{shaping[0]} changes the rewards of whole episodes, and algorithm.advantage = {algorithm.advantage} "
            "adds up those of their turns; leave it off, or choose another algorithm.advantage"
        )
    for correction in parts.corrections:
        if correction.value.repeats_ratio and parts.loss.value.uses_ratio and algorithm.anchor == "behaviour":
            switch = correction.value.switch
            key = (
                f"{switch} = {getattr(algorithm, switch)}"
                if switch and not correction.digest
                else f"corrections = {correction.name}"
            )
            raise ValueError(
                f"algorithm.{key} would weigh the ratio of {algorithm.loss} twice: against the "
                'sampler the loss holds the weight already; set algorithm.ratio_anchor = "proximal", or '
                'algorithm.loss = "reinforce"'
            )
