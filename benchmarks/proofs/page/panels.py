"""Each panel of the page compared with what the API answers."""

from __future__ import annotations

import re
from typing import Any

from benchmarks.proofs.page.open_page import Window
from tests.console.web.browsing import OVERVIEW_CHARTS


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
