"""The end of a run after evaluations without a better result, and what versions are compared by."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.trainer.data_settings import BestBy, EvalSettings, EvalSource
from penstock.trainer.evaluation.eval_result import EvalResult
from penstock.trainer.evaluation.evaluation_schedule import EarlyStop, stored_scores

DATA = [Path("x.jsonl")]


def test_a_run_ends_after_so_many_evaluations_without_a_better_result() -> None:
    """Equal is not better; a better one starts the count again; the reason names both steps."""
    stop = EarlyStop(2)
    for step, score in ((0, 0.1), (4, 0.3), (8, 0.3), (12, 0.4), (16, 0.2)):
        stop.add(step, "aime pass@8", score)
        assert stop.ended is None
    stop.add(20, "aime pass@8", 0.4)
    end = stop.ended
    assert end is not None
    assert (end.step, end.best_step, end.best, end.evaluations) == (20, 12, 0.4, 2)
    assert end.text == (
        "ended early: the last 2 evaluations, up to step 20, were not better than 0.4 (aime pass@8) of step 12"
    )


def test_without_a_limit_a_run_never_ends_early() -> None:
    stop = EarlyStop(0, [(step, 0.0) for step in range(50)])
    assert (stop.ended, stop.document()) == (None, None)


def test_a_repeated_evaluation_counts_once() -> None:
    stop = EarlyStop(2, [(0, 0.5), (4, 0.4)])
    stop.add(4, "m", 0.3)
    assert stop.ended is None
    stop.add(8, "m", 0.3)
    assert stop.ended is not None


def test_a_resumed_session_counts_the_evaluations_before_it(tmp_path: Path) -> None:
    """By the source and the metric that decide; other rows and torn lines are left out."""
    rows = [
        {"kind": "eval", "split": "eval", "step": 0, "accuracy": 0.5, "reward_mean": 1.0, "pass_at": {"4": 0.7}},
        {"kind": "eval", "split": "other", "step": 0, "accuracy": 0.9},
        {"kind": "step", "step": 1, "reward_mean": 0.1},
        {"kind": "eval", "split": "eval", "step": 4, "accuracy": None, "reward_mean": 2.0},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "ev')
    assert list(stored_scores(path, BestBy("eval"))) == [(0, 0.5), (4, 2.0)]
    assert list(stored_scores(path, BestBy("eval", "accuracy"))) == [(0, 0.5)]
    assert list(stored_scores(path, BestBy("eval", "reward"))) == [(0, 1.0), (4, 2.0)]
    assert list(stored_scores(path, BestBy("eval", "pass@4"))) == [(0, 0.7)]
    assert list(stored_scores(tmp_path / "none", BestBy("eval"))) == []


def test_versions_are_compared_by_the_named_metric() -> None:
    result = EvalResult(
        step=1, version=1, num_prompts=2, num_samples=4, accuracy=0.25, reward_mean=0.3, pass_at={4: 0.5},
        completion_tokens_mean=1.0,
        truncated_share=0.0, eval_s=1.0, success="r ≥ 1", split="aime",
    )  # fmt: skip
    assert result.score_by("") == ("r ≥ 1", 0.25)
    assert result.score_by("accuracy") == ("aime accuracy", 0.25)
    assert result.score_by("reward") == ("mean reward", 0.3)
    assert result.score_by("pass@4") == ("aime pass@4", 0.5)
    assert result.score_by("pass@8") is None


def test_a_source_has_its_own_settings_and_those_of_eval() -> None:
    settings = EvalSettings(
        every=5, temperature=0.5, source={"aime": EvalSource(data=DATA, every=20, samples=8, max_new_tokens=99)}
    )
    aime = settings.of("aime")
    assert (aime.every, aime.samples, aime.temperature, aime.max_new_tokens) == (20, 8, 0.5, 99)
    assert settings.of("eval") is settings
    assert settings.names(has_data_eval=True) == ["eval", "aime"]
    assert settings.best(has_data_eval=True) == BestBy("eval")
    assert settings.best(has_data_eval=False) == BestBy("aime")
    assert EvalSettings().best(has_data_eval=False) is None
