"""One line that says which algorithm a run trains with; imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.trainer.algorithm.chosen_parts import DEFAULT

if TYPE_CHECKING:
    from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings

_PARTS = frozenset({"name", "advantage", "loss", "aggregation", "filters", "group_filters", "corrections", "options"})
_BY_SAMPLER = ("corrections", "importance", "rejection", "m2po_budget", "opsm_delta", "veto", "age_band_cap")
_AGAINST_STALENESS = (*_BY_SAMPLER, "dual_clip", "stale_negative_weight", "ess_level", "token_tis_cap")
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
    is_plain = algorithm.loss == "ppo_clip" and not _is_any_set(algorithm, _AGAINST_STALENESS)
    if max_staleness > _UNHARMED_STALENESS and is_plain:
        line += (
            f"; nothing protects it from samples up to {max_staleness} versions old: "
            f'see algorithm.name = "{DEFAULT}", or lower rollout.max_staleness'
        )
    if max_staleness > 0 and algorithm.anchor != "behaviour" and not _is_any_set(algorithm, _BY_SAMPLER):
        line += (
            "; its ratios are not to the sampler, so older samples count as new ones: "
            'set algorithm.importance = "token"'
        )
    return line


def _is_any_set(algorithm: AlgorithmSettings, names: tuple[str, ...]) -> bool:
    fields = type(algorithm).model_fields
    return any(getattr(algorithm, name) != fields[name].default for name in names)


def _listed(values: dict[str, object], before: str = " (", after: str = ")") -> str:
    return before + ", ".join(f"{name} {_shown(value)}" for name, value in values.items()) + after if values else ""


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
