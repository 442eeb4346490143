"""The live page against real runs in a real chromium, while processes are killed. `make proof-page`.

    python -m benchmarks.proofs.page [--steps 240] [--pairs 2] [--seed 0]

Local runs of the quickstart's task (an untrained model: what it learns does not matter here):

1. The page is open while the trainer, NATS, the S3 server and the console are killed with SIGKILL, three times each in random order and
   at random moments: after each kill the same page, never reloaded, shows steps that were made after it. At the end the audit must close, and each panel is
   compared with what the API answers about this run.
2. Pairs of a run with up to twelve random kills of the console, a tracker and the browser, and one without page, tracker and kills. The
   audit of each must close; the wall times of both are printed. Console, tracker and browser run at the lowest priority here: starting
   them takes seconds of CPU, which on a machine of few cores would be the trainer's.

The browser's console may have one kind of error: "Failed to load resource", while a server is down. The browser writes it itself for
each request without an answer or with a 503, and no script of a page can prevent it. Any other error or warning fails the proof.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from tests.console.web.browsing import CHROMIUM, Browser

from penstock.deploy import quickstart, quickstart_task
from penstock.deploy.local_run import TRAINER, LocalRun
from penstock.deploy.processes.child import Child

_DEADLINE_S = 300.0
_KILLS_OF_EACH = 3
_PAUSE_S = 3.0  # before a kill, at most: the kills come at any moment of a step
_PENSTOCK = [sys.executable, "-P", "-m", "penstock"]
_LAST = 19  # niceness of what a run does not need
_WHILE_DOWN = re.compile(r"error: Failed to load resource: (net::ERR_\w+|the server responded with a status of 503.*)")
_STEP_TILE = "(document.querySelector('[data-tile=step] b') || {}).textContent || ''"


class Console:
    """`penstock console` on one port, which is killed and started anew; every browser logs in with the same token."""

    def __init__(self, base: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._base = base
        self.start()
        directory = f"run.dir={base / 'runs'}"
        made = [*_PENSTOCK, "console", "token", f"proof-{self._port}", "--role", "read", directory]
        self.token = subprocess.run(made, capture_output=True, text=True, check=True).stdout.strip()

    def start(self) -> None:
        command = [*_PENSTOCK, "console", "--port", str(self._port), "--json", f"run.dir={self._base / 'runs'}"]
        with (self._base / "console.log").open("a") as log:
            self._process = subprocess.Popen(
                ["nice", "-n", str(_LAST), *command], stdout=subprocess.PIPE, stderr=log, text=True, cwd=self._base
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the console did not start: {self._base / 'console.log'}"
        self.url = json.loads(line)["url"]

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


class Window:
    """A chromium with one window on the overview of a run."""

    def __init__(self, console: Console, run_id: str) -> None:
        from playwright.sync_api import sync_playwright  # of the extra browser-tests

        before = set(psutil.Process().children(recursive=True))
        self._playwright = sync_playwright().start()
        for process in set(psutil.Process().children(recursive=True)) - before:
            process.nice(_LAST)  # Playwright's driver, which starts the browser
        self._chromium = self._playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        self.page = self._chromium.new_context(viewport={"width": 1280, "height": 900}).new_page()
        self.browser = Browser(self.page, console)  # type: ignore[arg-type]  # of the console it uses the address alone
        self.page.set_default_timeout(_DEADLINE_S * 1000)
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


def main() -> int:
    """Run the proof."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    steps, chance = options.steps, random.Random(options.seed)
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {text}", flush=True)

    with tempfile.TemporaryDirectory(prefix="penstock-page-") as folder:
        base = Path(folder)
        restarts_and_panels(base, steps, chance, say)
        for pair in range(options.pairs):
            walls: dict[str, float] = {}
            for name in ("kills", "quiet") if pair % 2 == 0 else ("quiet", "kills"):
                run_id = f"{name}-{pair}"
                walls[name] = (random_kills if name == "kills" else quiet)(base, run_id, steps, chance, say)
            say(
                f"pair {pair}, wall time of {steps} steps: {walls['kills']:.1f} s with kills, {walls['quiet']:.1f} s without page, "
                f"tracker and kills; load average {os.getloadavg()[0]:.1f}"
            )
    return 0


@contextlib.contextmanager
def training(base: Path, run_id: str, steps: int) -> Iterator[LocalRun]:
    """A local run of the quickstart's task on an untrained model; started, but for its trainer."""
    folder = base / "runs" / run_id
    options = quickstart.Options(
        seed=0, steps=steps, workers=1, folder=folder, run_id=run_id, as_json=True, kill=False, engine="embedded"
    )
    num_train = steps * quickstart.GROUPS_PER_STEP
    quickstart_task.write_data(folder / "data", seed=0, num_sft=1, num_train=num_train, num_eval=50)
    quickstart_task.write_model(folder / "sft", seed=0)
    file = folder / "run.toml"
    file.write_text(quickstart.run_file_text(options, file).replace("[trainer]\n", "[trainer]\ncheckpoint_every = 5\n"))
    with LocalRun([str(file)], num_workers=1) as run:
        run.start_services()
        yield run


def quiet(base: Path, run_id: str, steps: int, chance: random.Random, say: Callable[[str], None]) -> float:
    """A run without page, tracker and kills; returns its wall seconds."""
    with training(base, run_id, steps) as run:
        begun = time.time()
        run.start_trainer()
        code = run.wait(_DEADLINE_S * 3)
        assert code == 0, f"the trainer ended with {code}\n{run.log_tail(TRAINER)}"
        audit(base, run_id)
        return last_written(base, run_id) - begun


def restarts_and_panels(base: Path, steps: int, chance: random.Random, say: Callable[[str], None]) -> None:
    """The first run."""
    order = [TRAINER, "nats-server", "s3-server", "console"] * _KILLS_OF_EACH
    chance.shuffle(order)
    with training(base, "restarts", steps) as run:
        run.start_trainer()
        console = Console(base)
        window = Window(console, "restarts")
        try:
            window.wait_for_step(2)
            for name in order:
                time.sleep(chance.uniform(0.0, _PAUSE_S))
                before = window.step()
                if name == "console":
                    console.kill()
                    window.page.wait_for_selector("#banner:not([hidden])")
                    console.start()
                else:
                    run.kill(name)
                killed_at = time.monotonic()
                made = max(before, steps_of(base, "restarts"))
                assert made < steps - 10, f"the run is nearly over at the kill of {name}; take more --steps"
                window.wait_for_step(made + 2)  # one step may have been under way
                window.page.wait_for_selector("#banner[hidden]", state="attached")
                say(
                    f"killed {name} at step {before}: the open page, not reloaded, showed step {window.step()} after "
                    f"{time.monotonic() - killed_at:.1f} s"
                )
            code = run.wait(_DEADLINE_S * 3)
            assert code == 0, f"the trainer ended with {code}\n{run.log_tail(TRAINER)}"
            window.wait_for_step(steps)
            while_down = window.browser.complaints[:]
            wrong = [one for one in while_down if not _WHILE_DOWN.fullmatch(one)]
            assert not wrong, wrong
            window.browser.complaints.clear()
            num_compared = compare_panels(window)
            assert window.browser.complaints == [], window.browser.complaints
            audit(base, "restarts")
            say(
                f"{len(order)} kills; {num_compared} figures of eight panels are those of the API; the audit closes; {len(while_down)} requests "
                "failed while a server was down, and the browser's console has no other error"
            )
        finally:
            window.close()
            console.kill()


def compare_panels(window: Window) -> int:
    """Compare each panel with the API after the last step; returns the number of compared values."""
    compared = 0

    def same(shown: object, expected: object, what: str) -> None:
        nonlocal compared
        assert shown == expected, f"{what}: the page shows {shown!r}, the API answers {expected!r}"
        compared += len(expected) if isinstance(expected, list) else 1

    browser, run = window.browser, window.run_id
    browser.open(run, "overview")
    found, metrics = window.api("summary"), window.api("metrics", points=500)
    same(browser.tile("step"), f"{found['step']} of {found['total_steps']}", "step")
    same(float(browser.tile("reward").replace(",", "")), round(found["reward"], 3), "reward")
    same(browser.tile("groups trained"), f"{found['groups']['trained']:,}", "groups trained")
    for title, name in (
        ("Reward", "reward_mean"), ("Entropy", "entropy"), ("Clipped tokens", "clip_fraction"),
        ("KL between sampler and policy", "kl_behaviour"), ("Effective sample size", "ess_share"),
        ("Degenerate groups", "zero_signal_groups"), ("Truncated completions", "truncated_share"),
        ("Tokens trained per second", "tokens_per_s"), ("Staleness of what was trained", "staleness_mean"),
    ):  # fmt: skip
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
    same([row[0] for row in browser.rows("Services")], [one["name"] for one in services], "services")
    browser.open(run, "weights")
    versions = window.api("versions", limit=100)["versions"]
    same([row[0] for row in browser.rows("Versions")], [str(one["version"]) for one in versions], "versions")
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


def random_kills(base: Path, run_id: str, steps: int, chance: random.Random, say: Callable[[str], None]) -> float:
    """A run with up to twelve kills at random; returns its wall seconds."""
    order = ["console", "tracker", "browser"] * 4
    chance.shuffle(order)
    track = ["nice", "-n", str(_LAST), *_PENSTOCK, "track", run_id, "tracker=tensorboard", f"run.dir={base / 'runs'}"]
    with training(base, run_id, steps) as run:
        console = Console(base)
        tracker = Child("tracker", track, log=base / "tracker.log")
        begun, killed = time.time(), list[str]()
        run.start_trainer()
        tracker.start()
        window = Window(console, run_id)
        try:
            for number, name in enumerate(order):
                at = 2 + number * (steps - 4) // len(order)
                wait(lambda at=at: steps_of(base, run_id) >= at, f"step {at}")
                if steps_of(base, run_id) >= steps:  # a busy machine starts a browser more slowly than it trains
                    break
                killed.append(name)
                if name == "console":
                    console.kill()
                    console.start()
                elif name == "tracker":
                    tracker.kill()
                    tracker = tracker.relaunch()
                else:
                    window.kill()
                    window = Window(console, run_id)
            assert set(killed) == set(order), (
                f"the run was over after the kills of {', '.join(killed)}; take more --steps"
            )
            code = run.wait(_DEADLINE_S * 3)
            assert code == 0, f"the trainer ended with {code}\n{run.log_tail(TRAINER)}"
            window.wait_for_step(steps)
            audit(base, run_id)
            tracker.kill()
            done = subprocess.run([*track, "--once"], capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, done.stderr[-2000:]
            say(
                f"{len(killed)} kills in {steps} steps: {', '.join(killed)}; the page and the tracker have every step, the audit closes"
            )
            return last_written(base, run_id) - begun
        finally:
            window.close()
            console.kill()
            tracker.kill()


def last_written(base: Path, run: str) -> float:
    """Return when a run wrote its last figures, in wall-clock seconds."""
    return float(json.loads((base / "runs" / run / "metrics.jsonl").read_text().splitlines()[-1])["at"])


def steps_of(base: Path, run: str) -> int:
    """Return the newest step in metrics.jsonl."""
    path = base / "runs" / run / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return max((row["step"] for row in map(json.loads, whole.splitlines()) if row["kind"] == "step"), default=0)


def audit(base: Path, run: str) -> None:
    """Audit a run; fails unless its accounting closes."""
    command = [*_PENSTOCK, "audit", run, "--json", f"run.dir={base / 'runs'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    assert json.loads(done.stdout.splitlines()[-1])["closes"], done.stdout


def wait(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition; AssertionError after the deadline."""
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
