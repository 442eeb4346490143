"""Which keys of [algorithm] contradict one another, and the line that names the algorithm of a run; imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.trainer.algorithm.chosen_parts import DEFAULT
from penstock.trainer.algorithm.corrections.m2po import m2po

if TYPE_CHECKING:
    from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings

_PARTS = frozenset({"name", "advantage", "loss", "aggregation", "filters", "group_filters", "corrections", "options"})
_AGAINST_STALENESS = (
    "dual_clip", "stale_negative_weight", "ess_level", "importance", "rejection", "m2po_budget", "opsm_delta", "veto",
    "age_band_cap", "token_tis_cap",
)  # fmt: skip
_UNHARMED_STALENESS = 2  # benchmarks/staleness.md: at two versions of age the plain clip equals on-policy, at four not


def summary_line(algorithm: AlgorithmSettings, *, max_staleness: int) -> str:
    """Return the preset, its parts, and every further setting that is not at its default, by the names of their keys.

    A loss that nothing protects against samples as old as ``max_staleness`` (versions) is pointed out.
    """
    loss = algorithm.parts.loss.value
    options = {name: value for name, value in algorithm.options_of(loss).model_dump().items() if value is not None}
    parts = [f"{algorithm.advantage} advantages", f"{algorithm.loss}{_listed(options)}", algorithm.aggregation]
    parts += [*algorithm.filters, *algorithm.group_filters, *algorithm.corrections]
    others = {
        name: value
        for name, info in type(algorithm).model_fields.items()
        if name not in _PARTS | options.keys() and (value := getattr(algorithm, name)) != info.default
        if value is not None
    }
    line = f"{algorithm.name}: {', '.join(parts)}{_listed(others | algorithm.options, '; ', '')}"
    if max_staleness > _UNHARMED_STALENESS and not _is_protected(algorithm):
        line += (
            f"; nothing protects it from samples up to {max_staleness} versions old: "
            f'see algorithm.name = "{DEFAULT}", or lower rollout.max_staleness'
        )
    if max_staleness > 0 and algorithm.uses_proximal and _weighs_nothing_by_sampler(algorithm):
        line += (
            "; its ratios are to the policy before the batch, so older samples count as new ones: "
            'set algorithm.importance = "token"'
        )
    return line


def _weighs_nothing_by_sampler(algorithm: AlgorithmSettings) -> bool:
    fields = type(algorithm).model_fields
    switches = ("importance", "rejection", "m2po_budget", "opsm_delta", "veto", "age_band_cap")
    return not algorithm.corrections and all(getattr(algorithm, name) == fields[name].default for name in switches)


def _is_protected(algorithm: AlgorithmSettings) -> bool:
    fields = type(algorithm).model_fields
    return (
        algorithm.loss != "ppo_clip"
        or bool(algorithm.corrections)
        or any(getattr(algorithm, name) != fields[name].default for name in _AGAINST_STALENESS)
    )


def _listed(values: dict[str, object], before: str = " (", after: str = ")") -> str:
    return before + ", ".join(f"{name} {_shown(value)}" for name, value in values.items()) + after if values else ""


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


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
        if algorithm.dynamic_sampling or any(one.value.reads_advantage for one in algorithm.parts.filters):
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
    if algorithm.many_updates and not algorithm.parts.loss.value.uses_ratio:
        key, value = ("epochs", algorithm.epochs) if algorithm.epochs > 1 else ("minibatches", algorithm.minibatches)
        raise ValueError(
            f"algorithm.{key} = {value} with algorithm.loss = {algorithm.loss}, which has no ratio: after the first optimizer "
            "step on a batch its gradient would be that of another policy than the one that sampled, and nothing would "
            f'limit it; set algorithm.loss = "ppo_clip", or algorithm.{key} = 1'
        )


def refuse_parts_that_disagree(algorithm: AlgorithmSettings) -> None:
    parts = algorithm.parts
    for one in parts.filters:
        if algorithm.has_critic and one.value.reads_advantage:
            raise ValueError(
                f"algorithm.{one.value.switch or 'filters'} reads the advantage of a whole trajectory, and with "
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
        if correction.value.repeats_ratio and parts.loss.value.uses_ratio and not algorithm.uses_proximal:
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
