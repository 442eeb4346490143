"""The report of a run: three files that agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.console.record import recorded_run as recorded

from penstock.console.report import curves, report
from penstock.console.report.run_summary import RunSummary

NEXT = ["penstock chat sorting", "penstock runs show sorting"]


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
        "| trainer | 20% | 29.0 |",
        "| rollout-1 | 50 | v60 | 20 ms | 30 ms | 2 |",
        "- 0:14 killed rollout-1 on purpose",
        *NEXT,
    ):
        assert expected in text


def test_the_json_report_holds_summary_and_curves(folder: Path):
    """report.json is the summary, field by field, with the points of the curves."""
    document = json.loads((folder / "report.json").read_text())
    points = document.pop("curves")
    assert RunSummary.model_validate_json(json.dumps(document)).accuracy_after == 0.95
    assert len(points["rewards"]) == recorded.STEPS
    assert points["accuracies"] == [[0, 0.55], [30, 0.81], [60, 0.95]]


def test_the_plot_is_a_png(folder: Path):
    """curve.png is drawn without a display."""
    data = (folder / "curve.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    assert len(data) > 20_000


def test_the_json_line_has_the_documented_keys():
    """The JSON is one line with every documented key."""
    line = recorded.whole_run().summary().to_line()
    assert "\n" not in line
    figures = json.loads(line)
    assert {
        "accuracy_before", "accuracy_after", "steps", "groups", "staleness_tokens", "versions_published",
        "tokens_generated", "tokens_trained", "idle_share", "wall_s", "cpu_s",
    } <= figures.keys()  # fmt: skip
    assert {"issued", "generated", "scored", "trained", "dropped"} <= figures["groups"].keys()


def test_a_run_without_steps_has_a_report(tmp_path: Path):
    """A run that was stopped before its first step gets a short report, not an error."""
    path = report.write(tmp_path / "empty", RunSummary(run_id="empty"))
    assert "0 steps" in path.read_text()
    assert (tmp_path / "empty" / "curve.png").exists()


def test_curves_skip_a_partial_line(tmp_path: Path):
    """A partial last line of a running or killed trainer is skipped."""
    recorded.write_metrics(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 61, "rew')
    assert len(curves.read(tmp_path).rewards) == recorded.STEPS


def test_curves_of_a_resumed_run_count_each_step_once(tmp_path: Path):
    """Steps repeated after a resume replace the first ones."""
    rows = [{"kind": "step", "step": n, "reward_mean": r} for n, r in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.5))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert curves.read(tmp_path).rewards == ((1, 0.1), (2, 0.5))


def test_parts_of_the_reward_are_curves_and_rows(folder: Path, tmp_path: Path):
    """Every part has a curve, also when it began later, and a row in the report's table."""
    rows = [
        {"kind": "step", "step": 1, "reward_mean": 0.1},
        {"kind": "step", "step": 2, "reward_mean": 0.2, "reward_parts": {"form": 0.5}},
        {"kind": "step", "step": 3, "reward_mean": 0.3, "reward_parts": {"form": 0.75, "short": -0.1}},
        {"kind": "step", "step": 3, "reward_mean": 0.3, "reward_parts": {"form": 1.0, "short": -0.2}},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert curves.read(tmp_path).parts == {"form": ((2, 0.5), (3, 1.0)), "short": ((3, -0.2),)}
    assert "| reward part form | 0.875 | 0.875 | 0.875 |" in (folder / "report.md").read_text()
