"""The Grafana dashboards: generated, complete, and every query is one that Prometheus parses and our metrics answer."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from tests.servers import require_package

from penstock.deploy.monitoring import dashboards
from penstock.protocol.metrics.table import METRICS, Metric

FILES = sorted((dashboards.FOLDER / "grafana" / "dashboards").glob("*.json"))
OF_PROMETHEUS = {"le", "quantile", "job", "instance", "run"}


def queries() -> list[str]:
    """Every query of every file, as Grafana would send it."""
    found = []
    for file in FILES:
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel.get("targets", []):
                found.append(target["expr"].replace("$run", ".*").replace("$__rate_interval", "1m"))
    return found


def metric_of(name: str) -> Metric:
    return METRICS.get(name) or METRICS[re.sub(r"_(bucket|sum|count)$", "", name)]


def test_the_files_are_what_the_tables_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is out of date; a file that was edited or left over is named, and written or removed."""
    assert dashboards.main(["--check"]) == 0
    wanted = dashboards.files()
    assert dashboards.outdated(tmp_path, wanted) == sorted(wanted)
    monkeypatch.setattr(dashboards, "FOLDER", tmp_path)
    assert dashboards.main([]) == 0
    edited = next(iter(wanted))
    (tmp_path / edited).write_text("edited")
    (tmp_path / "grafana" / "dashboards" / "old.json").write_text("{}")
    assert dashboards.outdated(tmp_path, wanted) == sorted(["grafana/dashboards/old.json", edited])
    assert dashboards.main(["--check"]) == 1
    assert dashboards.main([]) == 0
    assert dashboards.outdated(tmp_path, wanted) == []


def test_prometheus_parses_every_query(tmp_path: Path) -> None:
    require_package("promtool", "prometheus")
    found = queries()
    assert len(found) > 100
    rules = [{"record": f"q{number}", "expr": text} for number, text in enumerate(found)]
    file = tmp_path / "queries.yml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    checked = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert f"{len(found)} rules found" in checked.stdout


def test_queries_name_metrics_and_labels_that_there_are() -> None:
    """Each query reads metrics of the table, by labels that these have, and only of the chosen run."""
    for text in queries():
        names = re.findall(r"penstock_\w+", text)
        metrics = [metric_of(name) for name in names]
        assert metrics, text
        assert text.count('run=~".*"') == len(names), text
        labels = {label for metric in metrics for label in metric.labels} | OF_PROMETHEUS
        selected = re.findall(r"[{,]\s*(\w+)\s*[=!]", text)
        grouped = [
            name for names in re.findall(r"\b(?:by|on|group_left) \(([^)]*)\)", text) for name in names.split(",")
        ]
        assert {name.strip() for name in (*selected, *grouped) if name.strip()} <= labels, text


def test_every_metric_is_on_a_dashboard() -> None:
    shown = {metric_of(name).name for text in queries() for name in re.findall(r"penstock_\w+", text)}
    assert shown == set(METRICS)


def test_panels_say_what_they_show_and_do_not_overlap() -> None:
    """Each panel has a title of its own in its dashboard, description and unit; panels lie beside each other."""
    assert [file.stem for file in FILES] == sorted(board.uid for board in dashboards.read_boards())
    for file in FILES:
        placed = json.loads(file.read_text())["panels"]
        drawn = [panel for panel in placed if panel["type"] != "row"]
        assert len({panel["title"] for panel in drawn}) == len(drawn), file
        assert len({panel["id"] for panel in placed}) == len(placed)
        for panel in drawn:
            assert panel["description"].endswith(".")
            assert panel["fieldConfig"]["defaults"]["unit"]
        cells = [
            (x, y)
            for panel in placed
            for place in [panel["gridPos"]]
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        assert len(cells) == len(set(cells))
        assert all(0 <= x < 24 for x, _y in cells)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("penstock_queue_pending", ["penstock_queue_pending"]),
        ("penstock_rollout_packs_total", ["sum by (outcome) (rate(penstock_rollout_packs_total[$__rate_interval]))"]),
        ("penstock_rollout_packs_held", ["penstock_rollout_packs_held * on (job, instance) group_left (worker) penstock_service_info"]),
        ("penstock_reward_pack_seconds", ["penstock_reward_pack_seconds"]),
    ],
)  # fmt: skip
def test_the_query_of_a_metric_follows_from_its_kind(name: str, expected: list[str]) -> None:
    """Counters as rates, gauges as they are, with the worker's name where only the target knows it."""
    assert [query.expr for query in dashboards.panel_of("title", name).queries] == expected


def test_the_run_is_chosen_in_every_selector() -> None:
    """A selector with and one without labels get the run; a histogram has three quantiles."""
    query = dashboards.Query('a_total + penstock_x{role="r"} / penstock_y_bucket', "")
    assert query.of_run() == 'a_total + penstock_x{run=~"$run", role="r"} / penstock_y_bucket{run=~"$run"}'
    assert len(dashboards.panel_of("title", "penstock_reward_request_seconds").queries) == 3
