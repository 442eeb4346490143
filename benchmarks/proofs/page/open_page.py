"""`penstock console` and a chromium with its page, both of which can be killed."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import psutil
from benchmarks.proofs.page.paused_run import DEADLINE_S, PENSTOCK
from tests.console.web.browsing import CHROMIUM, Browser

LATER = 19  # niceness of what a run does not need
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
        made = [*PENSTOCK, "console", "token", f"proof-{self._port}", "--role", "read", directory]
        self.token = subprocess.run(made, capture_output=True, text=True, check=True).stdout.strip()

    def start(self) -> None:
        command = [*PENSTOCK, "console", "--port", str(self._port), "--json", f"run.dir={self._base / 'runs'}"]
        with (self._base / "console.log").open("a") as log:
            self._process = subprocess.Popen(
                ["nice", "-n", str(LATER), *command], stdout=subprocess.PIPE, stderr=log, text=True, cwd=self._base
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
            process.nice(LATER)  # Playwright's driver, which starts the browser
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
