"""Read metrics of learning, data and engine mismatch from step events, and measure success; pure.

Success has one definition for panel, report, plot, list of runs and JSON: held-out prompts show accuracy where the reward says
what is correct, else the mean reward. An evaluation without ``accuracy`` is one of a reward without a threshold of success
(`trainer/evaluation/eval_result.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock.console.report.event_fields import number
from penstock.console.report.run_summary import Spread

Measure = Literal["accuracy", "reward"]
_RECENT_STEPS = 5
# Key of a step event -> label in the report.
LABELS: dict[str, str] = {
    "reward_mean": "reward, mean of the step",
    "loss": "loss",
    "loss_not_finite": "steps whose loss is not a finite number",
    "lr_set": "learning rate set by the schedule",
    "lr": "learning rate used",
    "entropy": "entropy per sampled token, nats",
    "policy_entropy": "entropy of the policy, exact, nats",
    "reward_std": "standard deviation of the reward",
    "zero_signal_groups": "groups without signal (all rewards equal)",
    "completion_tokens_mean": "completion length, tokens",
    "truncated_share": "completions cut at rollout.max_new_tokens",
    "engine_gap": "engine vs trainer, same version: mean difference of log-probabilities",
    "engine_gap_max": "engine vs trainer: largest difference",
    "engine_kl": "engine vs trainer: KL per token (k3)",
    "kl_behaviour": "KL(sampler ‖ policy) per token (k3)",
    "ratio_p1": "ratio policy / sampler, 1st percentile",
    "ratio_p99": "ratio policy / sampler, 99th percentile",
    "chi2_token": "χ² per token",
    "perplexity_ratio": "perplexity, policy / sampler",
    "ess_share": "effective sample size, tokens",
    "ess_share_sequence": "effective sample size, whole sequences",
    "ess_lr": "effective sample size that scaled the learning rate",
    "staleness_mean": "staleness of the sampled tokens, versions",
    "clip_fraction": "tokens clipped",
    "dual_clip_fraction": "tokens bounded by the dual clip",
    "rejected_fraction": "tokens rejected as stale or mismatched",
    "rerouted_fraction": "tokens and layers whose router would choose other experts than the engine's did",
    "pair_loss": "preference loss of the pairs beside the groups",
    "pair_accuracy": "pairs whose chosen answer has the higher reward",
    "pair_margin": "reward of the chosen answer above that of the rejected one",
    "kl_reference": "KL(policy ‖ reference) per token",
    "kl_teacher": "KL(policy ‖ teacher) per token",
    "reward_kl": "KL(sampler ‖ reference) per token, in the reward",
    "kl_coefficient": "coefficient of the KL",
    "grad_norm": "gradient norm before clipping",
    "update_ratio": "norm of the update over that of the weights",
    "updates_left_out": "optimizer steps not made",
    "train_tokens_per_s": "tokens trained per second of the step",
    "flops_per_s": "floating-point operations per second",
    "mfu": "share of the devices' peak (MFU)",
    "explained_variance": "explained variance of the critic",
    "value_loss": "critic loss",
    "critic_grad_norm": "critic gradient norm before clipping",
    "baseline_mean": "reward of the greedy baselines",
}
NESTED = {
    "engine_gap": ("mismatch", "mean_abs"), "engine_gap_max": ("mismatch", "max_abs"), "engine_kl": ("mismatch", "kl_k3"),
    "ratio_p1": ("ratio_percentiles", "1"), "ratio_p99": ("ratio_percentiles", "99"),
}  # fmt: skip
_PART = "reward part "
_ENVIRONMENT = "environment "
_OF_ENVIRONMENTS = {
    "reward_mean": "reward", "turns_mean": "turns", "tokens_mean": "tokens", "cut_share": "cut", "failures": "failures", "episodes": "episodes",
}  # fmt: skip
_BY_LAYERS = {"grad_norm_by_layers": "gradient norm: ", "update_ratio_by_layers": "update ratio: "}
_OWN_LABELS = (_PART, _ENVIRONMENT, *_BY_LAYERS.values())  # names that begin so are labels themselves


@dataclass(frozen=True, slots=True)
class Evaluation:
    step: int
    accuracy: float | None  # None: nothing says which completions are correct
    reward: float | None


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The evaluations of the primary split by one measure, as ``(step, value)`` in order."""

    measure: Measure = "accuracy"
    points: tuple[tuple[int, float], ...] = ()

    @property
    def name(self) -> str:
        return "held-out accuracy" if self.measure == "accuracy" else "held-out mean reward"

    @property
    def before(self) -> float | None:
        return self.points[0][1] if self.points else None

    @property
    def now(self) -> float | None:
        return self.points[-1][1] if self.points else None


def held_out(evaluations: Sequence[Evaluation]) -> HeldOut:
    """Return what the evaluations of one split show; the last one decides by which measure."""
    if evaluations and evaluations[-1].accuracy is None:
        return HeldOut("reward", tuple((e.step, e.reward) for e in evaluations if e.reward is not None))
    return HeldOut("accuracy", tuple((e.step, e.accuracy) for e in evaluations if e.accuracy is not None))


def recent_reward(rewards: Sequence[float]) -> float | None:
    """Return the mean training reward of the last steps: what is called "reward" wherever one number is shown."""
    return known_mean(rewards[-_RECENT_STEPS:])


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def known_mean(values: Sequence[float]) -> float | None:
    return mean(values) if values else None


def read(data: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of one step event by key, with rejections by rule and reward parts; missing ones are left out."""
    values: dict[str, Any] = {name: data.get(name) for name in LABELS if name not in NESTED}
    for name, (outer, inner) in NESTED.items():
        values[name] = _section(data, outer).get(inner)
    loss = data.get("loss")
    if isinstance(loss, float) and number(loss) is None:
        values["loss_not_finite"] = 1.0
    values |= {f"rejected by {rule}": share for rule, share in _section(data, "rejected_by").items()}
    values |= {f"{_PART}{part}": mean for part, mean in _section(data, "reward_parts").items()}
    for environment in (environments := _section(data, "environments")):
        figures = _section(environments, environment)
        values |= {f"{_ENVIRONMENT}{word}: {environment}": figures.get(key) for key, word in _OF_ENVIRONMENTS.items()}
    for section, label in _BY_LAYERS.items():
        values |= {f"{label}{layers}": value for layers, value in _section(data, section).items()}
    return {name: metric for name, value in values.items() if (metric := number(value)) is not None}


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = data.get(name)
    return section if isinstance(section, Mapping) else {}


def spreads(steps: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Return mean, smallest and largest of every metric over the steps that have it."""
    series: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.items():
            series.setdefault(name, []).append(value)
    return {name: _spread(values) for name, values in series.items()}


def _spread(values: Sequence[float]) -> Spread:
    tenth = max(len(values) // 10, 1)
    return Spread(
        mean=mean(values),
        smallest=min(values),
        largest=max(values),
        first=mean(values[:tenth]),
        last=mean(values[-tenth:]),
    )


def rows(metrics: Mapping[str, Spread]) -> Iterable[tuple[str, ...]]:
    for name in (*LABELS, *sorted(set(metrics) - set(LABELS))):
        if name in metrics:
            spread = metrics[name]
            yield (
                LABELS.get(name, name if name.startswith(_OWN_LABELS) else f"tokens {name}"),
                *(f"{v:.4g}" for v in (spread.mean, spread.smallest, spread.largest)),
                *("–" if v is None else f"{v:.4g}" for v in (spread.first, spread.last)),
            )


def reward_parts(metrics: Mapping[str, float]) -> str:
    """Return what the panel shows of the parts of the reward, without the details of a part; "" for none."""
    parts = {name.removeprefix(_PART): mean for name, mean in metrics.items() if name.startswith(_PART)}
    return ", ".join(f"{name} {mean:.2f}" for name, mean in parts.items() if "." not in name)


def panel_learning(metrics: Mapping[str, float]) -> str:
    lr, lr_set = metrics.get("lr"), metrics.get("lr_set")
    parts = [f"loss {metrics['loss']:.3g}"] if "loss" in metrics else []
    if lr is not None:
        is_scaled = lr_set is not None and abs(lr - lr_set) > 0.01 * lr_set
        parts.append(f"lr {lr:.2g}" + (f" (set {lr_set:.2g})" if is_scaled else ""))
    if "completion_tokens_mean" in metrics:
        parts.append(f"{metrics['completion_tokens_mean']:.0f} tokens a completion")
    if metrics.get("truncated_share"):
        parts.append(f"{metrics['truncated_share']:.0%} cut")
    return ", ".join(parts) or "–"


def panel_lines(metrics: Mapping[str, float]) -> tuple[str, str]:
    """Return what the panel shows of one step: how off-policy it was, and how far the engine is off."""
    parts = [
        f"{word} {metrics[name]:{form}}"
        for word, name, form in (
            ("entropy", "entropy", ".2g"), ("KL", "kl_behaviour", ".2g"), ("ESS", "ess_share", ".0%"), ("clipped", "clip_fraction", ".1%"),
            ("rejected", "rejected_fraction", ".1%"), ("explained variance", "explained_variance", ".0%"),
        )
        if name in metrics and not (word == "rejected" and metrics[name] == 0.0)
    ]  # fmt: skip
    gap = metrics.get("engine_gap")
    engine = "–" if gap is None else f"{gap:.2g} mean, {metrics.get('engine_gap_max', gap):.2g} max"
    return ", ".join(parts) or "–", engine
