"""The proof of the page: a run that is paused when it has made its steps, a console and a chromium that can be killed, and the panels."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from tests.console.web.browsing import CHROMIUM, OVERVIEW_CHARTS, Browser
from tests.rigs.proofs.proof import Console
from tests.servers import wait_for
from tests.small_run import report_of, steps_of

from penstock.deploy import quickstart, quickstart_task
from penstock.deploy.local_run import TRAINER, LocalRun
from penstock.protocol.record import run_folder

DEADLINE_S = 900.0
_RUN_S = 1800.0  # for the steps of a run
_STEPS = 20_000  # more than a run makes before it is paused
_PROMPTS = 20_000
_SAMPLE_S = 0.5


class Meter:
    """When a run made each step, and the CPU seconds of its processes by then; a context manager that samples on a thread."""

    def __init__(self, base: Path, run: LocalRun) -> None:
        self._base = base
        self._run = run
        self._cpu_s: dict[int, float] = {}  # of each process id, when it was sampled last
        self._at: dict[int, tuple[float, float]] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._begun = time.monotonic()

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._closed.wait(_SAMPLE_S):
            for process in self._run.processes():
                with contextlib.suppress(psutil.Error):
                    times = psutil.Process(process.pid).cpu_times()
                    self._cpu_s[process.pid] = sum(times[:4])  # its own and its children's, user and system
            if step := last_step(self._base, self._run.run_id):
                self._at.setdefault(step, (time.monotonic() - self._begun, sum(self._cpu_s.values())))

    def until(self, step: int) -> tuple[float, float]:
        """Return the wall and CPU seconds until a step was seen."""
        return self._at[min(one for one in self._at if one >= step)]

    @property
    def last(self) -> int:
        return max(self._at)


@contextlib.contextmanager
def training(base: Path, run_id: str) -> Iterator[LocalRun]:
    """A local run of the quickstart's task on an untrained model; started, but for its trainer."""
    folder = base / "runs" / run_id
    options = quickstart.Options(
        seed=0, steps=_STEPS, workers=1, folder=folder, run_id=run_id, as_json=True, kill=False, engine="embedded"
    )
    options.task.write_data(folder / "data", seed=0, num_sft=1, num_train=_PROMPTS, num_eval=50)
    quickstart_task.write_model(folder / "sft", seed=0)
    file = folder / "run.toml"
    file.write_text(quickstart.run_file_text(options, file).replace("[trainer]\n", "[trainer]\ncheckpoint_every = 5\n"))
    with LocalRun([str(file), "eval.every=40"], num_workers=1) as run:
        run.start_services()
        yield run


def last_step(base: Path, run_id: str) -> int:
    return max(steps_of(base / "runs", run_id), default=0)


def pause(base: Path, run: LocalRun, steps: int) -> None:
    """Have a run end once it has made its steps: what is under way is trained first. Its accounting must close."""
    wait_for(lambda: last_step(base, run.run_id) >= steps, f"step {steps}", _RUN_S)
    run_folder.request_pause(run.folder)
    code = run.wait(DEADLINE_S)
    assert code == 0, f"the trainer ended with {code}\n{run.log_tail(TRAINER)}"
    audit = report_of("audit", run.run_id, base / "runs")
    assert audit["closes"], audit


def compare_panels(window: Window) -> int:
    compared = 0

    def same(shown: object, expected: object, what: str) -> None:
        nonlocal compared
        assert shown == expected, f"{what}: the page shows {shown!r}, the API answers {expected!r}"
        compared += len(expected) if isinstance(expected, list) else 1

    browser, run = window.browser, window.run_id
    browser.open(run, "overview")
    found, metrics = window.api("summary"), window.api("metrics", points=500)
    same(browser.tile("step"), f"{found['step']:,} of {found['total_steps']:,}", "step")
    same(float(browser.tile("reward").replace(",", "")), round(found["reward"], 3), "reward")
    same(browser.tile("groups trained"), f"{found['groups']['trained']:,}", "groups trained")
    for title, name in OVERVIEW_CHARTS:
        last = browser.page.get_attribute(f'[data-chart="{title}"] [data-last]', "data-last")
        same(float(last or "nan"), metrics["figures"][name]["mean"][-1], title)
    browser.open(run, "trajectories", f"?step_from={found['step'] - 2}")
    groups = all_groups(window, found["step"] - 2)
    while browser.page.is_visible("button:text-is('More')"):
        before = len(browser.rows("Groups"))
        browser.page.click("button:text-is('More')")
        browser.page.wait_for_function("() => !document.querySelector('form.filters ~ button').disabled")
        assert len(browser.rows("Groups")) >= before
    same([row[0] for row in browser.rows("Groups")], [one["group_id"] for one in groups], "groups")
    group_id = groups[0]["group_id"]
    browser.open(run, "group", f"?id={group_id}&at=0")
    group, tokens = window.api("group", group_id=group_id), window.api("tokens", group_id=group_id, trajectory=0)
    rewards = browser.page.eval_on_selector_all("[data-reward]", "all => all.map(one => Number(one.dataset.reward))")
    same(rewards, [one["reward"] for one in group["trajectories"]], "rewards of a group")
    browser.page.wait_for_selector('.tokens[data-loaded="0.0.0"]')
    same(browser.page.locator(".tokens span").count(), len(tokens["ids"]), "tokens")
    browser.open(run, "fleet")
    services = window.api("workers")["services"]
    same([row[0] for row in browser.rows("Services")], [service["name"] for service in services], "services")
    browser.open(run, "weights")
    versions = window.api("versions", limit=100)["versions"]
    same([row[0] for row in browser.rows("Versions")], [str(version["version"]) for version in versions], "versions")
    browser.open(run, "rewards")
    mean = window.api("rewards")["distribution"]["reward"]["mean"]
    text = re.search(r"mean ([^,]+),", browser.text('[data-distribution="reward"]'))
    same(round(float(text[1]), 3) if text else None, round(mean, 3), "mean reward")
    browser.open(run, "lineage", "?version=3")
    lineage = window.api("lineage", version=3)["groups"]
    same([row[0] for row in browser.rows("Groups")], [one["group_id"] for one in lineage], "groups of version 3")
    browser.open(run, "dead-letters")
    letters = window.api("dead-letters")["letters"]
    same(len(browser.rows("Dead letters")) if letters else 0, len(letters), "dead letters")
    return compared


def all_groups(window: Window, step_from: int) -> list[dict[str, Any]]:
    """Return every group from a step on: an answer may be short, and ``next`` is the cursor of the rest."""
    found, cursor = [], ""
    while True:
        page = window.api("groups", step_from=step_from, cursor=cursor)
        found += page["items"]
        if not (cursor := page["next"] or ""):
            return found


_NICENESS = 19  # of what a run does not need
LATER = ("nice", "-n", str(_NICENESS))
_STEP_TILE = "(document.querySelector('[data-tile=step] b') || {}).textContent || ''"


class Window:
    def __init__(self, console: Console, run_id: str) -> None:
        from playwright.sync_api import sync_playwright  # of the extra browser-tests

        before = set(psutil.Process().children(recursive=True))
        self._playwright = sync_playwright().start()
        for process in set(psutil.Process().children(recursive=True)) - before:
            process.nice(_NICENESS)  # Playwright's driver, which starts the browser
        self._chromium = self._playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        self.page = self._chromium.new_context(viewport={"width": 1280, "height": 900}).new_page()
        self.browser = Browser(self.page, console)  # type: ignore[arg-type]  # of the console it uses the address alone
        self.page.set_default_timeout(DEADLINE_S * 1000)
        self.run_id = run_id
        self.page.goto(console.url)
        self.page.fill("input[name=token]", console.token)
        self.page.click("text=Use it")
        self.browser.wait()
        self.browser.complaints.clear()  # the 401 of before
        self.browser.open(run_id, "overview")

    def api(self, path: str, **query: Any) -> Any:
        answer = self.page.request.get(
            f"{self.browser.console.url}/v1/runs/{self.run_id}/{path}", params=query, timeout=60_000
        )
        assert answer.ok, (path, answer.status, answer.text())
        return answer.json()

    def step(self) -> int:
        return int(self.page.evaluate(_STEP_TILE).replace(",", "").partition(" ")[0] or 0)

    def wait_for_step(self, step: int) -> None:
        self.page.wait_for_function(f"step => parseInt({_STEP_TILE}) >= step", arg=step)

    def kill(self) -> None:
        """SIGKILL the browser, which is a descendant of this process."""
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "chromium" in process.name():
                    process.kill()
        self.close()

    def close(self) -> None:
        with contextlib.suppress(Exception):  # a killed browser answers nothing
            self._chromium.close()
        self._playwright.stop()
