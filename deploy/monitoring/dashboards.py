"""Write Grafana's dashboards from `boards.toml`, which lists the panels of each.

python -P -m penstock.deploy.monitoring.dashboards            # writes grafana/dashboards/*.json
python -P -m penstock.deploy.monitoring.dashboards --check    # exit code 1 when a file is not up to date
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from penstock.protocol.command_line import Help, program
from penstock.protocol.metrics.table import METRICS, Metric

FOLDER = Path(__file__).parent
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS, _WIDTH, _HEIGHT = 24, 6, 7  # of Grafana's grid; four panels in a line
_SCHEMA = 39  # of the dashboard's JSON: Grafana 10 and later
_DATASOURCE = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
_RUN = {
    "name": "run",
    "type": "query",
    "datasource": _SOURCE,
    "query": {"query": "label_values(penstock_service_info, run)", "refId": "runs"},
    "refresh": 2,  # when the time range changes
    "includeAll": True,
    "allValue": ".*",  # also what has no label `run`: targets that are listed by hand
    "multi": True,
    "current": {"text": "All", "value": "$__all"},
}
_INTERVAL = "$__rate_interval"  # Grafana's: at least four scrapes
_INFO = "penstock_service_info"  # has the worker's name, which samples of one service only do not repeat
_SELECTOR = re.compile(r"\b(penstock_\w+)(?:\{([^}]*)\})?")
_QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression without the choice of a run, and the legend of its series."""

    expr: str
    legend: str

    def of_run(self) -> str:
        """Return the expression with every metric restricted to the run that is chosen in the dashboard; "All" is `.*`."""
        return _SELECTOR.sub(lambda found: f'{found[1]}{{run=~"$run"{", " + found[2] if found[2] else ""}}}', self.expr)


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel; ``needs`` says what must have happened before it has data, empty where every run has some."""

    title: str
    queries: tuple[Query, ...]
    unit: str
    description: str
    needs: str = ""


def panel_of(
    title: str,
    metric: str,
    *,
    expr: str = "",
    legend: str = "",
    queries: Sequence[Mapping[str, str]] = (),
    needs: str = "",
    unit: str = "",
) -> Panel:
    """Return the panel of a metric: by default what its kind is read by, over time.

    A counter is shown as its rate, a histogram or summary by three quantiles, a gauge as it is; what one process of several
    shows is joined with its name. Raises KeyError for a metric that the table does not have.
    """
    known = METRICS[metric]
    chosen = [Query(expr, legend)] if expr else [Query(**query) for query in queries]
    return Panel(title, tuple(chosen or _queries(known)), unit or _unit(known), known.help, needs)


def _queries(metric: Metric) -> Iterator[Query]:
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.labels)
    by = ", ".join(metric.labels)
    if metric.kind == "counter":
        yield Query(f"sum by ({by}) (rate({metric.name}[{_INTERVAL}]))", legend or "all")
    elif metric.kind == "histogram":
        buckets = f"sum by ({', '.join((*metric.labels, 'le'))}) (rate({metric.name}_bucket[{_INTERVAL}]))"
        for q in _QUANTILES:
            yield Query(f"histogram_quantile({q}, {buckets})", f"{legend} p{100 * q:g}".strip())
    elif metric.kind == "summary":
        yield Query(metric.name, f"{legend} p{{{{quantile}}}}".strip())
    elif metric.services != ("trainer",) and "worker" not in metric.labels:
        yield Query(
            f"{metric.name} * on (job, instance) group_left (worker) {_INFO}", f"{{{{worker}}}} {legend}".strip()
        )
    else:
        yield Query(metric.name, legend or "{{run}}")


def _unit(metric: Metric) -> str:
    if metric.kind == "counter":
        return "percentunit" if metric.unit == "s" else f"suffix: {metric.unit}/s"
    known = {"s": "s", "0 to 1": "percentunit", "bytes": "bytes", "": "short", "0 or 1": "bool"}
    return known.get(metric.unit, f"suffix: {metric.unit}")


@dataclass(frozen=True, slots=True)
class Dashboard:
    uid: str
    title: str
    description: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]

    def panels(self) -> Iterator[Panel]:
        for _title, panels in self.rows:
            yield from panels


def read_boards() -> tuple[Dashboard, ...]:
    boards = tomllib.loads(Path(__file__).with_name("boards.toml").read_text(encoding="utf-8"))["dashboard"]
    return tuple(
        Dashboard(
            board["uid"],
            board["title"],
            board["description"],
            tuple((row["title"], tuple(panel_of(**panel) for panel in row["panels"])) for row in board["row"]),
        )
        for board in boards
    )


def files() -> dict[str, str]:
    return {
        f"grafana/dashboards/{board.uid}.json": json.dumps(dashboard(board), indent=1) + "\n" for board in read_boards()
    }


def dashboard(board: Dashboard) -> dict[str, Any]:
    placed: list[dict[str, Any]] = []
    y = 0
    for title, panels in board.rows:
        placed.append(
            {"id": len(placed) + 1, "type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1}}
        )
        y += 1
        for number, panel in enumerate(panels):
            line, column = divmod(number, _COLUMNS // _WIDTH)
            where = {"x": column * _WIDTH, "y": y + line * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            placed.append({"id": len(placed) + 1, "gridPos": where, **_panel(panel)})
        y += _HEIGHT * -(-len(panels) // (_COLUMNS // _WIDTH))
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.description,
        "tags": ["penstock"],
        "schemaVersion": _SCHEMA,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_DATASOURCE, _RUN]},
        "links": [{"type": "dashboards", "title": "Penstock", "tags": ["penstock"], "asDropdown": True, "keepTime": True, "includeVars": True}],
        "panels": placed,
    }  # fmt: skip


def _panel(panel: Panel) -> dict[str, Any]:
    needs = f" Empty without {panel.needs}." if panel.needs else ""
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description + needs,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": {"fillOpacity": 8}}, "overrides": []},
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _SOURCE,
                "expr": query.of_run(),
                "legendFormat": query.legend,
            }
            for number, query in enumerate(panel.queries)
        ],
    }


def outdated(folder: Path, wanted: Mapping[str, str]) -> list[str]:
    stored = {str(path.relative_to(folder)) for path in (folder / "grafana" / "dashboards").glob("*")} | set(wanted)
    return sorted(
        name for name in stored if not (folder / name).exists() or (folder / name).read_text() != wanted.get(name)
    )


def write(*, check: Annotated[bool, Help("Write nothing; exit code 1 when a file is not up to date.")] = False) -> int:
    old = outdated(FOLDER, wanted := files())
    if check:
        for name in old:
            print(
                f"{name} is not what the tables give: python -P -m penstock.deploy.monitoring.dashboards",
                file=sys.stderr,
            )
        return int(bool(old))
    for name in old:
        (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
        if name in wanted:
            (FOLDER / name).write_text(wanted[name])
        else:
            (FOLDER / name).unlink()
        print(f"{'wrote' if name in wanted else 'removed'} {name}")
    return 0


main = program("dashboards", write)


if __name__ == "__main__":
    sys.exit(main())
