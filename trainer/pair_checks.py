"""What `algorithm.dpo_coefficient` needs of the other sections of the run file; pure, imports no torch."""

from __future__ import annotations

from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.corrections.m2po import m2po
from penstock.trainer.data_settings import DataSettings
from penstock.trainer.dpo_settings import DpoSettings
from penstock.trainer.rollout_settings import RolloutSettings


def check_pairs(
    chosen: AlgorithmSettings, dpo: DpoSettings, rollout: RolloutSettings, data: DataSettings, *, needs_reference: bool
) -> None:
    """Raise ValueError for pairs beside groups where that is not exact, or where a setting of theirs does nothing.

    ``needs_reference``: the run has a reference policy, for pairs or for a KL.
    """
    named = "algorithm.dpo_coefficient"
    if not chosen.dpo_coefficient:
        return
    if data.from_run is not None:
        raise ValueError(f"{named} trains on pairs of data.train, which is not read with data.from_run; leave one out")
    if rollout.temperature != 1.0:
        raise ValueError(
            f"{named} with rollout.temperature = {rollout.temperature:g}: the trainer divides all its logits by it, and a "
            "preference loss compares log-probabilities at temperature 1; set rollout.temperature = 1"
        )
    if chosen.many_updates:
        key, value = ("epochs", chosen.epochs) if chosen.epochs > 1 else ("minibatches", chosen.minibatches)
        raise ValueError(
            f"{named} with algorithm.{key} = {value}: a step's pairs belong to one optimizer step, and a batch would have several; "
            f"set algorithm.{key} = 1"
        )
    if chosen.has_critic:
        raise ValueError(
            f"{named} with algorithm.advantage = {chosen.advantage}: while the critic learns alone no step is made on pairs, and "
            "it gives no values to them; choose an algorithm without a critic"
        )
    if chosen.options_of(m2po).m2po_budget is not None:
        raise ValueError(
            f"{named} with algorithm.m2po_budget: its limit is found over all micro-batches of a step against the policy that "
            "sampled them, and pairs were sampled by none; leave one out"
        )
    if chosen.distill_coefficient and chosen.distill_form == "forward":
        raise ValueError(
            f"{named} with algorithm.distill_form = forward, which reads a teacher's likeliest tokens of every micro-batch, and "
            'pairs have none; set algorithm.distill_form = "reverse"'
        )
    _check_reference(chosen, dpo, needs_reference=needs_reference)


def _check_reference(chosen: AlgorithmSettings, dpo: DpoSettings, *, needs_reference: bool) -> None:
    named = "algorithm.dpo_coefficient"
    if dpo.reference_path is not None:
        raise ValueError(
            f"dpo.reference_path with {named}: a run has one reference; set algorithm.reference_path instead"
        )
    if dpo.reference == "precomputed":
        raise ValueError(
            f"dpo.reference = precomputed with {named}: a resumed run could not compute it again; leave it out, the reference is "
            "held beside the policy"
        )
    if chosen.reference_device == "remote" and dpo.needs_reference:
        raise ValueError(
            f"algorithm.reference_device = remote with {named}: the model of [teacher] is asked about groups that workers "
            'generate, and not about pairs; set algorithm.reference_device = "same" or "parked"'
        )
    if not needs_reference and (chosen.reference_path is not None or chosen.reference_device != "same"):
        raise ValueError(
            f"algorithm.reference_path and algorithm.reference_device do nothing: there is no KL, and dpo.loss = {dpo.loss} "
            "has no reference; leave them out"
        )
