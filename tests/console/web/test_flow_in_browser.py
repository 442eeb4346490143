"""The flow of the platform guide in a real chromium, with a real training: create, start, watch, samples, pause, compare, stop, evaluate, export."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.console.web.browsing import CHROMIUM, Browser, browser
from tests.console.web.control.api import Api
from tests.servers import require, require_package

import penstock
from penstock.console.web.access import Role
from penstock.deploy import quickstart_task

pytest.importorskip("playwright", reason="playwright is not installed: pip install 'penstock[browser-tests]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
_RUN_MS = 300_000
RUN_FILE = """
[model]
path = "{folder}/model"
[data]
train = "{folder}/rows.jsonl"
max_prompt_tokens = 64
[rollout]
max_new_tokens = 12
groups_per_step = 2
group_size = 2
[reward]
name = "exact_match"
[trainer]
lr = 1e-4
steps = 100000
checkpoint_every = 2
"""


@pytest.fixture
def chromium(tmp_path: Path) -> Iterator[Browser]:
    require("nats-server")
    require_package(CHROMIUM, "chromium")
    quickstart_task.write_model(tmp_path / "model", seed=0)
    rows = [{"prompt": f"sort {n}1", "ground_truth": f"1{n}"} for n in range(1, 5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Api(tmp_path / "runs").served() as api, browser(api, viewport={"width": 1440, "height": 900}) as found:
        found.page.context.clear_cookies()  # of the role run, which may not delete
        found.log_in(Role.ADMIN)
        try:
            yield found
        finally:
            with api.client() as client:
                client.post("/v1/runs/flow/stop?force=true")


def _press(chromium: Browser, label: str) -> None:
    chromium.page.click(f"main button:text-is('{label}')")


def _bar(chromium: Browser, text: str) -> None:
    chromium.page.wait_for_selector(f"main :text('{text}')", timeout=_RUN_MS)


def test_a_run_is_made_watched_ended_and_used_from_the_page(
    chromium: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = chromium.page
    chromium.go("#/new", "new")
    page.fill("[name=name]", "flow")
    page.fill("[name=text]", "[modle]\npath = 'x'")
    _press(chromium, "Create")
    page.wait_for_selector("main .bad:has-text('modle')", timeout=_RUN_MS)
    page.fill("[name=text]", RUN_FILE.format(folder=tmp_path))
    _press(chromium, "Create")
    page.wait_for_url(re.compile("#/run/flow/overview"), timeout=_RUN_MS)

    step = "n => Number((document.querySelector('[data-tile=step] b')?.textContent || '0').split(' ')[0].replace(',', '')) >= n"
    page.wait_for_function(step, arg=5, timeout=_RUN_MS)
    assert chromium.page.locator("[data-chart=Reward] canvas").count() == 1
    chromium.open("flow", "trajectories")
    assert len(chromium.rows("Groups")) > 0
    chromium.open("flow", "logs", "?log=launch.log")
    page.wait_for_function("() => document.querySelector('pre').textContent.length > 20")
    chromium.open("flow", "settings")
    page.fill("[name=search]", "trainer.lr")
    assert chromium.rows("Settings")[0][:2] == ["trainer.lr", "0.0001"]

    monkeypatch.setitem(os.environ, "PENSTOCK_CONSOLE_TOKEN", chromium.console.tokens[Role.LOG])
    script = penstock.DualLogger("script", chromium.console.url, wandb_enabled=False)
    for number in range(1, 51):
        script.log_metrics(number, {"reward_mean": number / 50, "my figure": 1.0})
    script.finish()
    assert script.num_lost == 0
    chromium.go("#/", "runs")
    for run in ("flow", "script"):
        page.check(f'[aria-label="compare {run}"]')
    _press(chromium, "Compare")
    page.wait_for_selector("[data-chart=Reward] [data-line=script][data-last='1']")
    page.click("summary:text('Figures')")
    page.check("text=my figure")
    page.wait_for_selector("[data-chart='my figure'] canvas")

    chromium.open("flow", "overview")
    _press(chromium, "Pause")
    _bar(chromium, "Resume")
    _press(chromium, "Resume")
    page.wait_for_selector("main button:text-is('Stop')", timeout=_RUN_MS)
    _press(chromium, "Stop")
    _bar(chromium, "Resume")
    _press(chromium, "Evaluate")
    page.fill("[name=version]", "head")
    page.fill("[name=data]", str(tmp_path / "rows.jsonl"))
    page.keyboard.press("Enter")
    _bar(chromium, "evaluate: done")
    version = max(
        int(one["path"].rpartition("@")[2])
        for one in chromium.page.evaluate("fetch('/v1/runs/flow/checkpoints').then(r => r.json())")
    )
    _press(chromium, "Export")
    page.fill("[name=version]", str(version))
    page.fill("[name=to]", str(tmp_path / "exported"))
    page.keyboard.press("Enter")
    _bar(chromium, "export: done")
    assert (tmp_path / "exported" / "config.json").exists()

    chromium.open("script", "overview")
    _press(chromium, "Delete")
    page.fill("[name=name]", "script")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("#/$"))
    chromium.wait("runs")
    assert [row[1] for row in chromium.rows("Runs")] == ["flow"]
    chromium.forget("Failed to load resource")  # the run file that is refused
    assert chromium.complaints == []
