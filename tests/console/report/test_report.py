"""The report of a run: three files that agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.console.record import recorded_run as recorded

from penstock.console.live.run_view import RunView
from penstock.console.report import curves, report
from penstock.console.report.run_summary import RunSummary
from penstock.console.tools.runs import describe

NEXT = ["penstock chat sorting", "penstock runs show sorting"]


def text_of(summary: RunSummary) -> str:
    return report.markdown(summary, curves.Curves(), next_steps=(), has_plot=False)


def summary_of(num_steps: int, **figures: Any) -> RunSummary:
    view = RunView(recorded.RUN)
    for number in range(1, num_steps + 1):
        of_step = {name: value(number) if callable(value) else value for name, value in figures.items()}
        view.fold_event(recorded.step(number, recorded.START + number, **of_step))
    return view.summary()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "sorting"
    recorded.write_metrics(folder)
    report.write(folder, recorded.whole_run().summary(), next_steps=NEXT)
    return folder


def test_the_report_is_complete(folder: Path):
    """Accuracy, curve, staleness, overlap, groups, waiting, weights, incidents and next steps are in report.md."""
    text = (folder / "report.md").read_text()
    for expected in (
        "**Accuracy 0.550 → 0.950** on the same 128 held-out prompts, after 60 steps in 0:31",
        "![reward, held-out accuracy, staleness](curve.png)",
        "| tokens trained | 60,000 |",
        "| versions published | 61 |",
        "| 1 | 31,900 | 53% |",
        "58% of the trained tokens were sampled by an older version",
        "| trained | 2880 |",
        "| engine vs trainer, same version: mean difference of log-probabilities | 0.0002 | 0.0002 | 0.0002 |",
        "| ratio policy / sampler, 99th percentile | 1.12 | 1.12 | 1.12 |",
        "| tokens rejected by veto | 0.002 | 0.002 | 0.002 |",
        "| trajectories filtered out: zero_advantage | 120 |",
        "| dropped: stale | 3 |",
        "| trainer | 20% |  | 29.0 |",
        "| rollout-1 | 50 | v60 | 20 ms | 30 ms | 2 |",
        "- 0:14 killed rollout-1 on purpose",
        *NEXT,
    ):
        assert expected in text


def test_the_json_report_holds_summary_and_curves(folder: Path):
    document = json.loads((folder / "report.json").read_text())
    points = document.pop("curves")
    assert RunSummary.model_validate_json(json.dumps(document)).accuracy_after == 0.95
    assert len(points["rewards"]) == recorded.STEPS
    assert points["accuracies"] == [[0, 0.55], [30, 0.81], [60, 0.95]]


def test_the_json_line_has_the_documented_keys():
    line = recorded.whole_run().summary().to_line()
    assert "\n" not in line
    figures = json.loads(line)
    assert {
        "accuracy_before", "accuracy_after", "steps", "groups", "staleness_tokens", "versions_published",
        "tokens_generated", "tokens_trained", "idle_share", "wall_s", "cpu_s",
    } <= figures.keys()  # fmt: skip
    assert {"issued", "generated", "scored", "trained", "dropped"} <= figures["groups"].keys()


def test_the_report_says_why_a_run_does_not_learn():
    """Diagnoses with cause and cure follow the headline, and are in the JSON; a loss of NaN is one."""
    summary = summary_of(30, reward_mean=0.0, reward_std=0.0, truncated_share=0.6)
    text = text_of(summary)
    assert "## What keeps it from learning" in text
    assert "- **The reward was 0.00 for every completion in all 30 steps: nothing is learned.** No completion" in text
    assert [one["key"] for one in json.loads(summary.to_line())["diagnoses"]] == ["constant_reward", "truncated"]
    diverged = summary_of(4, loss=lambda number: float("nan") if number == 3 else 0.5)
    assert [diagnose.key for diagnose in diverged.diagnoses] == ["loss_not_finite"]


def test_loss_rates_entropy_lengths_and_signals_are_reported():
    """They are rows and keys, as are truncation and groups without signal, from the first to the last."""
    figures = {"loss": 0.5, "lr": 1e-4, "lr_set": 2e-4, "truncated_share": 0.125, "completion_tokens_mean": 17.0}
    summary = summary_of(20, **figures, entropy=lambda number: 1.0 / number)
    for row in (
        "| loss | 0.5 | 0.5 | 0.5 | 0.5 | 0.5 |",
        "| learning rate set by the schedule | 0.0002 | 0.0002 |",
        "| learning rate used | 0.0001 | 0.0001 |",
        "| entropy per sampled token, nats | 0.1799 | 0.05 | 1 | 0.75 | 0.05132 |",
        "| groups without signal (all rewards equal) | 0.25 |",
        "| completion length, tokens | 17 |",
        "| completions cut at rollout.max_new_tokens | 0.125 |",
    ):
        assert row in text_of(summary)
    assert {*figures, "entropy", "zero_signal_groups"} <= set(summary.learning)


def test_a_reward_without_a_rule_of_success_is_reported_by_its_mean(tmp_path: Path):
    """Headline, plot, curve and JSON show the held-out mean reward under its name, and no accuracy."""
    view = RunView(recorded.RUN)
    rows = [json.dumps({"kind": "step", "step": 1, "at": recorded.START, "reward_mean": 3.6})]
    for number, reward in ((0, 3.5), (30, 4.0), (60, 5.25)):
        one = recorded.evaluation(number, 0.0, recorded.START + number, split="eval")
        one = one.model_copy(update={"data": {**one.data, "accuracy": None, "reward_mean": reward, "success": ""}})
        view.fold_event(one)
        rows.append(json.dumps({"kind": "eval", "at": one.at, **one.data}))
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    text = report.write(tmp_path, view.summary()).read_text()
    assert "**Held-out mean reward 3.500 → 5.250** on the same 128 held-out prompts" in text
    assert "There is no accuracy" in text
    assert "![reward, held-out mean reward, staleness](curve.png)" in text
    assert view.snapshot(recorded.START).held_out == curves.read(tmp_path).held_out
    assert curves.read(tmp_path).held_out.points == ((0, 3.5), (30, 4.0), (60, 5.25))
    document = json.loads((tmp_path / "report.json").read_text())
    assert (document["accuracy_before"], document["accuracy_after"]) == (None, None)
    assert (document["eval_reward_before"], document["eval_reward_after"]) == (3.5, 5.25)
    assert document["curves"]["accuracies"] == []
    line = describe(tmp_path)
    assert (line.accuracy, line.eval_reward) == (None, 5.25)


def test_what_counts_as_correct_is_in_the_headline():
    """An accuracy is reported with the rule behind it."""
    view = RunView(recorded.RUN)
    view.fold_event(recorded.evaluation(0, 0.5, recorded.START, success="mine ≥ 0.5"))
    view.fold_event(recorded.evaluation(9, 0.75, recorded.START + 9, success="mine ≥ 0.5"))
    text = text_of(view.summary())
    assert "**Accuracy 0.500 → 0.750**" in text
    assert "A completion is correct from mine ≥ 0.5 on." in text


def test_reward_is_the_same_number_everywhere(folder: Path):
    """`penstock runs` and the panel show the mean of the last steps."""
    shown = recorded.whole_run().snapshot(recorded.START + 31).reward_now
    assert shown is not None
    assert describe(folder).reward == pytest.approx(shown)


def test_groups_generated_twice_and_dropped_groups_are_explained():
    summary = recorded.whole_run().summary()
    groups = summary.groups.model_copy(update={"issued": 100, "generated": 112, "dropped": {"duplicate": 12}})
    again = summary.model_copy(update={"groups": groups, "packs_given_back": 2})
    text = text_of(again)
    assert "- duplicate: delivered a second time, and left out" in text
    assert (
        "- 12 groups were generated more than once: NATS redelivers a task whose worker was stopped or killed" in text
    )
    assert "Engines failed 2 messages." in text


def test_the_stored_summary_is_the_one_that_was_written(folder: Path, tmp_path: Path):
    """A finished run's summary is read from its report; reports of older builds have fewer keys."""
    assert report.stored_summary(folder) == recorded.whole_run().summary()
    (tmp_path / "report.json").write_text('{"run_id": "old", "steps": 3, "curves": {}}')
    assert report.stored_summary(tmp_path) == RunSummary(run_id="old", steps=3)
    assert report.stored_summary(tmp_path / "nothing") is None


def test_a_run_without_steps_has_a_report(tmp_path: Path):
    path = report.write(tmp_path / "empty", RunSummary(run_id="empty"))
    assert "0 steps" in path.read_text()
    assert (tmp_path / "empty" / "curve.png").exists()


def test_curves_count_each_step_once(tmp_path: Path):
    rows = [{"kind": "step", "step": n, "reward_mean": r} for n, r in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.5))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert curves.read(tmp_path).rewards == ((1, 0.1), (2, 0.5))


def test_parts_of_the_reward_are_curves_and_rows(folder: Path, tmp_path: Path):
    rows = [
        {"kind": "step", "step": 1, "reward_mean": 0.1},
        {"kind": "step", "step": 2, "reward_mean": 0.2, "reward_parts": {"form": 0.5}},
        {"kind": "step", "step": 3, "reward_mean": 0.3, "reward_parts": {"form": 0.75, "short": -0.1}},
        {"kind": "step", "step": 3, "reward_mean": 0.3, "reward_parts": {"form": 1.0, "short": -0.2}},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert curves.read(tmp_path).parts == {"form": ((2, 0.5), (3, 1.0)), "short": ((3, -0.2),)}
    assert "| reward part form | 0.875 | 0.875 | 0.875 |" in (folder / "report.md").read_text()
