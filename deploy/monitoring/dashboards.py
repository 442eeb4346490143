"""Write Grafana's dashboards from their tables, `boards.py`.

python -P -m penstock.deploy.monitoring.dashboards            # writes grafana/dashboards/*.json
python -P -m penstock.deploy.monitoring.dashboards --check    # exit code 1 when a file is not up to date
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from penstock.deploy.monitoring.boards import DASHBOARDS, Dashboard, Panel
from penstock.protocol.command_line import Help, program

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


def files() -> dict[str, str]:
    return {
        f"grafana/dashboards/{board.uid}.json": json.dumps(dashboard(board), indent=1) + "\n" for board in DASHBOARDS
    }


def dashboard(board: Dashboard) -> dict[str, Any]:
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
        "panels": _placed(board),
    }  # fmt: skip


def _placed(board: Dashboard) -> list[dict[str, Any]]:
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
    return placed


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
