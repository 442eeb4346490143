"""What keeps a run from learning, from the figures of its steps."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.console.report.diagnoses import MEANINGS, RunMetrics, diagnose
from penstock.console.report.learning import Evaluation
from penstock.trainer.groups.group_totals import DropReason

SOUND = {
    "reward_mean": 0.5, "reward_std": 0.4, "zero_signal_groups": 0.2, "truncated_share": 0.05, "entropy": 0.6, "ess_share": 0.95,
    "kl_behaviour": 0.002, "engine_gap": 1e-4, "lr": 5e-4, "lr_set": 5e-4, "loss": -0.1,
}  # fmt: skip


def steps(number: int = 40, **figures: float) -> list[dict[str, float]]:
    return [{**SOUND, **figures}] * number


def course(name: str, first: float, last: float) -> list[dict[str, float]]:
    return [{**SOUND, name: first + (last - first) * n / 19} for n in range(20)]


def held_out_runs(accuracies: tuple[float | None, ...], rewards: tuple[float, ...]) -> RunMetrics:
    both = enumerate(zip(accuracies, rewards, strict=True))
    return RunMetrics(course("reward_mean", 0.1, 0.9), evaluations=[Evaluation(10 * n, *of) for n, of in both])


def keys(run: RunMetrics) -> list[str]:
    return [one.key for one in diagnose(run)]


CASES: list[tuple[str, RunMetrics, list[str], str]] = [
    ("sound", RunMetrics(steps()), [], ""),
    ("no steps", RunMetrics([]), [], ""),
    ("figures of an older trainer", RunMetrics([{"reward_mean": 0.1 * n} for n in range(5)]), [], ""),
    ("rewards fail before the first step", RunMetrics([], failing="HTTP 503"), ["reward_fails"], "as rewards fail: HTTP 503"),
    ("nothing ends", RunMetrics(steps(5, truncated_share=1.0)), ["never_ends", "truncated"], "eos_token_id"),
    ("ends at first", RunMetrics([*steps(5), *steps(truncated_share=1.0)]), ["truncated"], "does not end its answers"),
    (
        "another template",
        RunMetrics(steps(20, zero_signal_groups=0.95, truncated_share=0.6, reward_mean=0.01)),
        ["not_understood", "no_signal", "truncated"],
        "another chat template",
    ),
    ("hard, and understood", RunMetrics(steps(5, zero_signal_groups=0.95, reward_mean=0.01)), [], ""),
    ("engine differs, which moves the KL", RunMetrics(steps(engine_gap=0.2, kl_behaviour=0.2)), ["engine_gap"], "numeric formats"),
    ("one step of half the weights", RunMetrics([*steps(1, update_ratio=0.4), *steps(19, ess_share=0.1)]), ["lr_too_high"], "by 40%"),
    ("a spike of the KL", RunMetrics([*steps(9, kl_behaviour=3.0), *steps(11)]), [], ""),
    ("old samples", RunMetrics(steps(kl_behaviour=0.3, staleness_mean=9.0)), ["stale"], "9.0 versions old"),
    ("old samples, corrected", RunMetrics(steps(staleness_mean=9.0)), [], ""),
    ("paid for nothing", held_out_runs((0.5, 0.2, 0.0), (0.1, 0.8, 1.0)), ["hacked"], "held-out accuracy went from 0.50 to 0.10"),
    ("learned by heart", held_out_runs((None,) * 3, (0.5, 0.3, 0.1)), ["memorised"], "held-out mean reward went from 0.50 to 0.20"),
    ("learned", held_out_runs((0.5, 0.7, 0.9), (0.5, 0.7, 0.9)), [], ""),
    ("reference left behind", RunMetrics([*steps(15), *steps(5, kl_reference=0.9)]), ["kl_reference"], "0.9 nats per token"),
    ("longer and longer", RunMetrics(course("completion_tokens_mean", 20.0, 80.0)), ["length_drift"], "from 26 to 74 tokens"),
    ("somewhat longer", RunMetrics(course("completion_tokens_mean", 20.0, 29.0)), [], ""),
    ("entropy, within twenty steps", RunMetrics([*steps(15), *steps(5, entropy=0.01)]), ["entropy"], "from 0.6 to 0.01"),
    ("two steps are too few", RunMetrics(steps(2, reward_mean=0.0, reward_std=0.0)), [], ""),
    (
        "no reward",
        RunMetrics(steps(reward_mean=0.0, reward_std=0.0, zero_signal_groups=1.0)),
        ["constant_reward"],
        "The reward was 0.00 for every completion in all 40 steps",
    ),
    (
        "always the same reward",
        RunMetrics(steps(reward_mean=1.0, reward_std=0.0, zero_signal_groups=1.0)),
        ["constant_reward"],
        "the prompts are too easy",
    ),
    ("two steps, cut", RunMetrics(steps(2, truncated_share=0.9)), [], ""),
    ("one reward among zeros", RunMetrics([*steps(39, reward_mean=0.0, reward_std=0.0), SOUND]), [], ""),
    ("a mean of 0 with rewards of -1 and 1", RunMetrics(steps(reward_mean=0.0, reward_std=1.0)), [], ""),
    ("half without signal", RunMetrics(steps(zero_signal_groups=0.5)), ["no_signal"], "50% of the groups of the last 20"),
    ("half, in the first steps", RunMetrics(steps(5, zero_signal_groups=0.6)), [], ""),
    ("almost half", RunMetrics(steps(zero_signal_groups=0.49)), [], ""),
    ("too easy", RunMetrics(steps(zero_signal_groups=0.8, reward_mean=0.95)), ["no_signal"], "too easy by now"),
    ("too hard", RunMetrics(steps(zero_signal_groups=0.8, reward_mean=0.05)), ["no_signal"], "too hard for it yet"),
    ("groups of one", RunMetrics(steps(zero_signal_groups=1.0)), ["no_signal"], "Raise rollout.group_size"),
    ("cut", RunMetrics(steps(truncated_share=0.25)), ["truncated"], "25% of the completions of the last 20 steps were cut"),
    ("cut long ago", RunMetrics([*steps(truncated_share=0.9), *steps(20)]), [], ""),
    ("entropy", RunMetrics([*steps(20), *steps(20, entropy=0.01)]), ["entropy"], "from 0.6 to 0.01 nats"),
    ("entropy low from the start", RunMetrics(steps(entropy=0.01)), [], ""),
    ("few effective samples", RunMetrics(steps(ess_share=0.3)), ["ess"], "30% of the tokens"),
    ("far from the sampler", RunMetrics(steps(kl_behaviour=0.2)), ["kl"], "0.2 nats per token (KL)"),
    ("engine differs", RunMetrics(steps(engine_gap=0.06)), ["engine_gap"], "0.06 nats per token for the same weights"),
    ("learning rate", RunMetrics(steps(lr=5.2e-5)), ["lr"], "The learning rate used is 5.2e-05, where 0.0005 is set."),
    ("diverged", RunMetrics([*steps(), {"loss_not_finite": 1.0}]), ["loss_not_finite"], "in 1 of 41 steps"),
    ("dropped", RunMetrics(steps(), 100, {"stale": 15, "dead": 5}), ["dropped"], "20 of 100 groups were dropped, 15 of them as"),
    ("few dropped", RunMetrics(steps(), 100, {"stale": 19}), [], ""),
    ("dropped at the start", RunMetrics([], 40, {"stale": 19}), [], ""),
    ("no batch", RunMetrics([], 2900, {"no_signal": 2852}), ["dropped"], "2,852 of 2,900 groups were dropped, 2,852 of them as no_signal"),
    (
        "fell",
        RunMetrics([{**SOUND, "reward_mean": min(n, 100 - n) / 100} for n in range(100)]),
        ["reward_fell"],
        "The reward rose to 0.4",
    ),
    ("rises", RunMetrics([{**SOUND, "reward_mean": n / 100} for n in range(100)]), [], ""),
]  # fmt: skip


@pytest.mark.parametrize(("run", "expected", "text"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_run_that_does_not_learn_is_told_why(run: RunMetrics, expected: list[str], text: str):
    """Each symptom has its own diagnosis, at its threshold and not below; a sound run has none."""
    found = diagnose(run)
    assert [one.key for one in found] == expected
    assert text in " ".join(f"{one.what} {one.cause} {one.cure}" for one in found)


def test_a_diagnosis_names_cause_and_cure():
    found = [one for case in CASES for one in diagnose(case[1])]
    assert {one.key for one in found} == {
        "constant_reward", "no_signal", "truncated", "entropy", "ess", "kl", "engine_gap", "lr", "loss_not_finite", "dropped",
        "reward_fell", "reward_fails", "never_ends", "not_understood", "lr_too_high", "stale", "hacked", "memorised", "kl_reference",
        "length_drift",
    }  # fmt: skip
    assert all(one.what and one.cause and one.cure for one in found)


def test_every_reason_for_which_a_group_is_dropped_is_explained():
    assert MEANINGS.keys() == {str(reason) for reason in DropReason}


@pytest.mark.parametrize("value", [1e308, -1e308, 0.0])
def test_no_figure_ends_the_diagnoses(value: float):
    """Absurd figures of a foreign trainer end neither panel nor report."""
    figures: dict[str, Any] = dict.fromkeys(SOUND, value)
    assert isinstance(keys(RunMetrics([figures] * 100, 1, {"alien": 10**9})), list)
