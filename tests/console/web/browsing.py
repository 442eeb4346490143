"""A real chromium, driven by Playwright: opens views of the page and collects what the browser complains about."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from tests.console.web.control.api import Api

from penstock.console.web.access import Role

CHROMIUM = "/usr/bin/chromium"
VIEWS = ("overview", "trajectories", "services", "weights", "rewards", "lineage", "dead-letters")
OVERVIEW_CHARTS = (  # title on the page, name in the API
    ("Reward", "reward_mean"), ("Entropy", "entropy"), ("Clipped tokens", "clip_fraction"),
    ("KL between sampler and policy", "kl_behaviour"), ("Effective sample size", "ess_share"),
    ("Groups with equal rewards", "zero_signal_groups"), ("Truncated completions", "truncated_share"),
    ("Tokens trained per second", "tokens_per_s"), ("Staleness of what was trained", "staleness_mean"),
)  # fmt: skip
_DEADLINE_MS = 30_000


class Browser:
    """One window of a browser that is logged in by a one-time link."""

    def __init__(self, page: Any, console: Api) -> None:
        self.page = page
        self.console = console
        self.complaints: list[str] = []
        page.set_default_timeout(_DEADLINE_MS)
        page.on("console", lambda message: self._note(message.type, message.text))
        page.on("pageerror", lambda error: self._note("error", str(error)))

    def _note(self, kind: str, text: str) -> None:
        if kind in {"error", "warning"}:
            self.complaints.append(f"{kind}: {text}")

    def forget(self, text: str) -> None:
        """Drop the complaints with a text, which are expected."""
        self.complaints = [complaint for complaint in self.complaints if text not in complaint]

    @contextlib.contextmanager
    def another(self, **context: Any) -> Iterator[Browser]:
        own = self.page.context.browser.new_context(**context)
        found = Browser(own.new_page(), self.console)
        found.log_in()
        yield found
        own.close()

    def log_in(self, role: Role = Role.RUN) -> None:
        self.page.goto(f"{self.console.url}/?token={self.console.access.one_time_link(role)}")
        self.wait()

    def open(self, run: str, view: str, query: str = "") -> None:
        self.go(f"#/run/{quote(run)}/{view}{query}", view)

    def go(self, address: str, view: str) -> None:
        self.page.goto(f"{self.console.url}/{address}")
        self.wait(view)

    def wait(self, view: str | None = None) -> None:
        name = f'="{view}"' if view else ""
        self.page.wait_for_selector(f"[data-view{name}][data-ready=yes]", state="attached")

    def text(self, selector: str = "main") -> str:
        return self.page.inner_text(selector)

    def tile(self, name: str) -> str:
        return self.page.inner_text(f'[data-tile="{name}"] b')

    def rows(self, label: str) -> list[list[str]]:
        return self.page.eval_on_selector_all(
            f'[role=region][aria-label="{label}"] > table > tbody > tr',
            "rows => rows.map(row => [...row.cells].map(cell => cell.innerText.trim()))",
        )


@contextlib.contextmanager
def browser(console: Api, **context: Any) -> Iterator[Browser]:
    """A logged-in window; ``context`` are options of a browser context, such as its viewport."""
    sync_playwright = importlib.import_module("playwright.sync_api").sync_playwright  # few machines have the package
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            found = Browser(started.new_context(**context).new_page(), console)
            found.log_in()
            yield found
        finally:
            started.close()
