"""Panel and report read the metrics that the trainer writes."""

from __future__ import annotations

import math

import torch

from penstock.console.report import learning
from penstock.trainer.algorithm.losses.tokens import Sequences
from penstock.trainer.algorithm.mismatch import mismatch_figures, mismatch_metrics
from penstock.trainer.learner.pair_planner import pair_metrics


def test_critic_metrics_are_shown() -> None:
    """The explained variance is in the panel's line, the loss in the report's table."""
    figures = learning.read({"explained_variance": 0.125, "value_loss": 0.0625, "baseline_mean": 0.5})
    assert "explained variance 12%" in learning.panel_lines(figures)[0]
    table = {name: mean for name, mean, *_ in learning.rows(learning.spreads([figures]))}
    assert table["critic loss"] == "0.0625"
    assert table["reward of the greedy baselines"] == "0.5"


def test_the_trainers_metrics_are_read() -> None:
    logprobs = torch.tensor([-1.0, -0.5, -2.0])
    about = (logprobs, logprobs - 0.1, torch.tensor([0.0, 0.0, 1.0]), Sequences.of_lengths(torch.tensor([2, 1])))
    sums, maxima = ({name: float(value) for name, value in found.items()} for found in mismatch_figures(*about))
    data = mismatch_metrics({**sums, "tokens": 3.0}, maxima)
    found = learning.read(data)
    assert {"engine_gap", "engine_gap_max", "engine_kl", "kl_behaviour", "ratio_p1", "ratio_p99", "chi2_token"} <= set(
        found
    )
    assert abs(found["engine_gap"] - 0.1) < 1e-6
    assert set(found) <= set(learning.LABELS)


def test_the_figures_of_pairs_are_shown() -> None:
    """What a step reports about pairs beside its groups is in the report's table."""
    sums = {"num_chosen": 4.0, "num_rejected": 4.0, "loss": 0.5, "rewards/accuracies": 3.0, "rewards/margins": 8.0}
    beside = {"rewards/chosen": 6.0, "rewards/rejected": -2.0}
    figures = learning.read(pair_metrics({f"pairs/{name}": value for name, value in (sums | beside).items()}))
    table = {name: mean for name, mean, *_ in learning.rows(learning.spreads([figures]))}
    assert table == {
        "preference loss of the pairs beside the groups": "0.5",
        "pairs whose chosen answer has the higher reward": "0.75",
        "reward of the chosen answer above that of the rejected one": "2",
    }


def test_missing_and_nan_metrics_are_left_out() -> None:
    """A metric of a disabled part, one that is not finite, and a section that is no object are not shown."""
    assert learning.read({"grad_norm": float("nan"), "kl_reference": None, "mismatch": None}) == {}
    sections = {"mismatch": [1], "ratio_percentiles": 3, "rejected_by": "x", "reward_parts": {"a": math.inf, "b": 1}}
    assert learning.read({**sections, "grad_norm": 10**400}) == {"reward part b": 1.0}
    assert learning.panel_lines({}) == ("–", "–")


def test_the_panel_shows_the_parts_of_the_reward() -> None:
    """The means of the parts are one line, without nested parts; empty when there are none."""
    figures = learning.read({"reward_parts": {"correct": 0.25, "correct.has_answer": 1.0, "form": 1.0}})
    assert learning.reward_parts(figures) == "correct 0.25, form 1.00"
    assert figures["reward part correct.has_answer"] == 1.0
    assert learning.reward_parts({}) == ""


def test_each_environment_has_its_figures() -> None:
    lake = {"reward_mean": 0.25, "turns_mean": 3, "failures": 1, "cut_share": "x", "versions": {"1": 4}}
    found = learning.read({"environments": {"lake": lake, "broken": None}})
    assert found == {"environment reward: lake": 0.25, "environment turns: lake": 3, "environment failures: lake": 1}
    assert next(iter(learning.rows(learning.spreads([found]))))[0].startswith("environment ")
