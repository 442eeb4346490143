"""The page in a real chromium: every view shows the run's own figures, hostile texts stay texts, a restart is survived."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from tests.console.record import recorded_run as recorded
from tests.console.web.browsing import CHROMIUM, OVERVIEW_CHARTS, VIEWS, Browser, browser
from tests.console.web.conftest import STEPS, Shown
from tests.console.web.shown_run import DROPPED, EPISODES, GROUP_SIZE, GROUPS_A_STEP, HOSTILE, WITHOUT_LOGPROBS
from tests.servers import require_package

from penstock.console.web.access import Role

pytest.importorskip("playwright", reason="playwright is not installed: pip install 'penstock[browser-tests]'")
pytestmark = pytest.mark.slow
GROUP = "e0.p10.a0"
AXE = os.environ.get("PENSTOCK_TEST_AXE", "")


@pytest.fixture(scope="module")
def chromium(shown: Shown) -> Iterator[Browser]:
    require_package(CHROMIUM, "chromium")
    with browser(shown.console, viewport={"width": 1280, "height": 900}) as found:
        yield found


@pytest.fixture(autouse=True)
def no_complaint(chromium: Browser) -> Iterator[None]:
    """After each test the browser's console has no error, and no text of a run was run as a script."""
    chromium.complaints.clear()
    yield
    assert chromium.complaints == []
    assert chromium.page.evaluate("window.broken") is None


def api(shown: Shown, path: str, **query: Any) -> Any:
    with shown.client() as client:
        return client.get(f"/v1/runs/{shown.plain.run_id}/{path}", params=query).raise_for_status().json()


def test_the_list_shows_each_run_with_its_state_and_curve(chromium: Browser, shown: Shown) -> None:
    chromium.go("#/", "runs")
    rows = {row[1]: row for row in chromium.rows("Runs")}
    assert {shown.plain.run_id, shown.hostile.run_id, "only-files"} <= set(rows)
    assert (rows["only-files"][3], rows["only-files"][2]) == (str(recorded.STEPS), "stopped")
    assert chromium.page.locator("svg.spark").count() >= 1
    for run in (shown.plain.run_id, shown.hostile.run_id):
        chromium.page.focus(f'[aria-label="compare {run}"]')
        chromium.page.keyboard.press("Space")
    chromium.page.click("text=Compare")
    chromium.wait("compare")
    assert chromium.rows("Settings that differ") == [["trainer.lr", "2e-05", "1e-05"]]
    keys = chromium.page.locator('[data-chart="Reward"] [data-line]').all_inner_texts()
    assert [key.split(":")[0] for key in keys] == [shown.plain.run_id, shown.hostile.run_id]


def test_the_overview_shows_what_the_api_answers(chromium: Browser, shown: Shown) -> None:
    chromium.open(shown.plain.run_id, "overview")
    found, metrics = api(shown, "summary"), api(shown, "metrics")
    assert chromium.tile("reward") == f"{found['reward']:.3f}"
    assert chromium.tile("step") == f"{STEPS} of {STEPS + 100}"
    assert chromium.tile("held-out accuracy") == f"{found['held_out']['now']:.3f}"
    assert chromium.tile("staleness") == f"{found['staleness_mean']:.2f}"
    assert chromium.tile("groups trained") == f"{found['groups']['trained']:,}"
    for title, name in OVERVIEW_CHARTS:
        shown_last = chromium.page.get_attribute(f'[data-chart="{title}"] [data-last]', "data-last")
        assert float(shown_last or "nan") == metrics["figures"][name]["mean"][-1], title
    for one in found["evaluations"]:
        title = f"Held-out accuracy: {one['split']}"
        assert float(chromium.page.get_attribute(f'[data-chart="{title}"] [data-last]', "data-last") or "nan") == one["points"][-1]["accuracy"]  # fmt: skip
    with chromium.page.expect_download() as download:
        chromium.page.click('[data-chart="Reward"] button:text-is("CSV")')
    saved = Path(download.value.path()).read_text("utf-8").splitlines()[-1].split(",")
    assert (
        float(saved[4]) == float(saved[5]) == metrics["figures"]["reward_mean"]["max"][-1]
    )  # not the band that is drawn
    truncated = next(band for band in found["bands"] if band["name"] == "truncated_share")
    assert truncated["sentence"] in chromium.text('[data-chart="Truncated completions"]')
    assert chromium.page.locator(".chart canvas").count() >= 10


def test_a_training_on_given_answers_shows_its_losses(chromium: Browser, shown: Shown) -> None:
    """In the list instead of rewards, and as curves; no server is missing to it."""
    training = shown.folder / "warm-up" / "sft-training"
    training.mkdir(parents=True)
    lines = [
        {"kind": "step", "at": 1.0 + step, "step": step, "loss": 1.0 / step, "grad_norm": 0.1} for step in range(1, 9)
    ]
    lines.append({"kind": "eval", "at": 20.0, "step": 8, "eval_loss": 0.25})
    (training / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (training / "result.json").write_text("{}")
    chromium.go("#/", "runs")
    row = next(row for row in chromium.rows("Runs") if row[1] == "warm-up")
    assert row[2:6] == ["finished", "8", "loss 0.250", "loss 0.125"]
    chromium.open("warm-up", "overview")
    chromium.page.wait_for_function("() => document.querySelectorAll('nav a').length === 4")  # Runs, and three views
    assert (chromium.tile("state"), chromium.tile("step")) == ("finished", "8")
    for title, last in (("Loss", "0.125"), ("Held-out loss", "0.25")):
        assert chromium.page.get_attribute(f'[data-chart="{title}"] [data-last]', "data-last") == last
    assert "NATS" not in chromium.text()


def test_a_new_step_appears_without_a_reload(chromium: Browser, shown: Shown) -> None:
    chromium.open(shown.plain.run_id, "overview")
    shown.plain.publish_step(STEPS + 1)
    chromium.page.wait_for_function(
        "wanted => document.querySelector('[data-tile=step] b').textContent === wanted",
        arg=f"{STEPS + 1} of {STEPS + 100}",
    )


def test_the_browser_of_trajectories_filters_pages_and_opens_a_group(chromium: Browser, shown: Shown) -> None:
    chromium.open(shown.plain.run_id, "trajectories", "?each=1")
    first = len(chromium.rows("Trajectories"))
    chromium.page.click("text=More")
    chromium.page.wait_for_function(
        "first => document.querySelectorAll('[aria-label=Trajectories] tbody tr').length > first", arg=first
    )
    chromium.page.click("th button:text-is('tokens')")
    tokens = [int(row[4]) for row in chromium.rows("Trajectories")]
    assert (tokens, len(tokens) > 100) == (sorted(tokens), True)
    chromium.open(shown.plain.run_id, "trajectories", "?status=dropped&reason=stale")
    assert [row[2] for row in chromium.rows("Groups")] == ["dropped: stale"]
    assert "older than rollout.max_staleness" in chromium.text()
    chromium.open(shown.plain.run_id, "trajectories")
    assert {row[2] for row in chromium.rows("Groups")} == {"trained"}
    chromium.page.fill("[name=step_from]", "5")
    chromium.page.fill("[name=step_to]", "5")
    chromium.page.keyboard.press("Enter")
    chromium.page.wait_for_function(
        f"() => document.querySelectorAll('[aria-label=Groups] tbody tr').length === {GROUPS_A_STEP}"
    )
    answered = api(shown, "groups", step_from=5, step_to=5)["items"]
    assert [(row[0], row[1], row[6]) for row in chromium.rows("Groups")] == [
        (one["group_id"], "5", one["prompt"]) for one in answered
    ]
    chromium.page.click(f"text={answered[0]['group_id']}")
    chromium.wait("group")
    group = shown.plain.groups[answered[0]["group_id"]]
    assert chromium.page.locator("[data-trajectory] pre").all_inner_texts() == [
        t.completion_text for t in group.trajectories
    ]
    rewards = chromium.page.eval_on_selector_all("[data-reward]", "found => found.map(one => one.dataset.reward)")
    assert list(map(float, rewards)) == list(shown.plain.rewards[group.group_id])


def test_each_token_shows_its_log_probability_version_and_mask(chromium: Browser, shown: Shown) -> None:
    chromium.open(shown.plain.run_id, "group", f"?id={GROUP}&chapter=1&at=1")
    chromium.page.wait_for_selector('.tokens[data-loaded="1.0.0"]')
    found = api(shown, "tokens", group_id=GROUP, trajectory=1)
    spans = chromium.page.locator(".tokens span")
    assert [int(text) for text in spans.all_inner_texts()] == found["ids"]
    spans.nth(3).click()
    text = chromium.text("section[aria-label=Tokens] p[role=status]")
    assert f"id {found['ids'][3]}, log-probability {found['logprobs'][3]}" in text
    assert f"sampled by version {found['versions'][3]}, in the loss" in text
    assert f"before its step {found['current_logprobs'][3]}, ratio {found['ratios'][3]}" in text
    spans.nth(3).focus()
    chromium.page.keyboard.press("ArrowLeft")
    assert "context: not sampled" in chromium.text("section[aria-label=Tokens] p[role=status]")
    assert spans.nth(2).get_attribute("class") == "context chosen"


def test_each_token_is_coloured_by_its_ratio_and_a_click_shows_the_number(chromium: Browser, shown: Shown) -> None:
    """Of every trajectory of a group, as the API answers it; the card has the sum of it. Works on a phone, and by keyboard."""
    chromium.page.set_viewport_size({"width": 390, "height": 844})
    ranges = {"low2": (0.0, 0.8), "low1": (0.8, 0.95), "": (0.95, 1.05), "high1": (1.05, 1.25), "high2": (1.25, 1e9)}
    seen: set[str] = set()
    for at in range(GROUP_SIZE):
        chromium.open(shown.plain.run_id, "group", f"?id={GROUP}&chapter=1&at={at}")
        chromium.page.wait_for_selector(f'.tokens[data-loaded="{at}.0.0"]')
        found = api(shown, "tokens", group_id=GROUP, trajectory=at)
        chromium.page.select_option("[aria-label='Colour by']", "ratio")
        classes = [
            set(one.split()) for one in chromium.page.eval_on_selector_all(".tokens span", "found => found.map(one => one.className)")
        ]  # fmt: skip
        for place, ratio in enumerate(found["ratios"]):
            if ratio is None:
                assert classes[place] == {"context"}
                continue
            low, high = ranges[next(iter(classes[place] - {"clipped"}), "")]
            assert low <= ratio <= high
            assert ("clipped" in classes[place]) == (found["outcomes"][place] == "clipped")
            seen |= classes[place]
        ratio = api(shown, "group", group_id=GROUP)["trajectories"][at]["ratio"]
        assert f"{ratio['num_clipped']}, {ratio['num_rejected']} tokens" in chromium.text(f'[data-trajectory="{at}"]')
    assert seen >= {"clipped", "low2", "high2"}
    chromium.page.locator(".tokens span").nth(len(found["ids"]) - 2).focus()
    chromium.page.keyboard.press("ArrowRight")
    assert f"ratio {found['ratios'][-1]}" in chromium.text("section[aria-label=Tokens] p[role=status]")
    assert "exp(log-probability" in chromium.text("[data-ratio=yes]")
    chromium.page.set_viewport_size({"width": 1280, "height": 900})


@pytest.mark.parametrize("group_id", [DROPPED, f"e0.p{WITHOUT_LOGPROBS * GROUPS_A_STEP}.a0"])
def test_tokens_without_a_ratio_say_why(chromium: Browser, shown: Shown, group_id: str) -> None:
    chromium.open(shown.plain.run_id, "group", f"?id={group_id}&chapter=1&at=0")
    chromium.page.wait_for_selector('.tokens[data-loaded="0.0.0"]')
    found = api(shown, "tokens", group_id=group_id, chapter=1)
    assert chromium.text("[data-ratio=no]") == found["current_problem"]
    chromium.page.select_option("[aria-label='Colour by']", "ratio")
    assert set(chromium.page.eval_on_selector_all(".tokens span", "found => found.map(one => one.className)")) == {"context", ""}  # fmt: skip
    chromium.page.locator(".tokens span").last.click()
    assert "ratio" not in chromium.text("section[aria-label=Tokens] p[role=status]")


def test_a_conversation_is_shown_turn_by_turn(chromium: Browser, shown: Shown) -> None:
    chromium.open(shown.plain.run_id, "group", f"?id={EPISODES}&chapter=1")
    card = chromium.text('[data-trajectory="0"]')
    assert "look up 37" in card
    assert "4 turns" in card
    assert chromium.page.locator('[data-trajectory="0"] button').count() == 3


def test_services_weights_rewards_and_lineage_show_what_the_api_answers(chromium: Browser, shown: Shown) -> None:
    run = shown.plain.run_id
    chromium.open(run, "services")
    services = api(shown, "services")["services"]
    assert [row[0] for row in chromium.rows("Services")] == [service["name"] for service in services]
    assert ["rollout", "cpu_s", "24.500", "24.500", "24.500", "2"] in chromium.rows("Least, mean and greatest")
    chromium.open(run, "weights")
    versions = api(shown, "versions", limit=100)["versions"]
    assert [row[0] for row in chromium.rows("Versions")] == [str(version["version"]) for version in versions]
    assert chromium.rows("Versions")[0][8] == "45 ms (30 ms to 60 ms)"
    assert chromium.rows("Served now")[0][4:] == ["object store 15.0 kB", "not there yet 3", "–"]
    chromium.open("only-files", "dead-letters")
    assert "only-files" in chromium.text(
        "main [role=status]"
    )  # why there are none to show, and no attempt after attempt
    chromium.forget("status of 404")
    chromium.open(run, "rewards")
    rewards = api(shown, "rewards")
    mean = rewards["distribution"]["reward"]["mean"]
    assert f"mean {mean:.3f}" in chromium.text('[data-distribution="reward"]')
    assert chromium.rows("Errors")[0][:3] == ["endpoint_failed", "1", "1"]
    chromium.open(run, "lineage", "?version=3")
    assert [row[0] for row in chromium.rows("Groups")] == [
        one["group_id"] for one in api(shown, "lineage", version=3)["groups"]
    ]
    assert [row[0] for row in chromium.rows("Versions before it")] == ["3", "2", "1", "0"]


def test_a_dead_letter_is_sent_again_from_the_page(chromium: Browser, shown: Shown) -> None:
    run = shown.hostile
    chromium.open(run.run_id, "dead-letters")
    assert chromium.rows("Dead letters")[0][2:5] == ["generated", "endpoint_failed", HOSTILE[0]]
    chromium.page.click("[aria-label='Dead letters'] button")
    chromium.page.click("text=Send it again")
    chromium.page.wait_for_selector("text=1: sent again to generated: e9.p3.a0")
    sent_again = "() => document.querySelector('[aria-label=\"Dead letters\"] tbody tr').cells[7].innerText !== '–'"
    chromium.page.wait_for_function(sent_again)


def test_hostile_texts_are_shown_as_they_are(chromium: Browser, shown: Shown) -> None:
    """In every view, and in the address; nothing is loaded, run or hidden (`no_complaint` looks for scripts that ran)."""
    run = shown.hostile.run_id
    for view in VIEWS:
        chromium.open(run, view)
        tags = "main script, main iframe, main style, main img, main base, main meta, main math, main form[action]"
        assert chromium.page.locator(tags).count() == 0
        assert chromium.page.locator("main [onerror], main [onload], main a[href^='javascript']").count() == 0
    for place in range(5, 5 + len(HOSTILE)):
        chromium.open(run, "group", f"?id=e0.p{place}.a0")
        texts = chromium.page.eval_on_selector_all("[data-trajectory] pre", "all => all.map(one => one.textContent)")
        assert texts == [_escaped(HOSTILE[(place + i) % len(HOSTILE)]) for i in range(4)]
    for text in HOSTILE[:6]:
        chromium.page.goto(f"{chromium.console.url}/#/run/{run}/group?{urlencode({'id': text})}")
        chromium.page.wait_for_selector("main h1")
        assert _escaped(text) in chromium.text("main h1")
        chromium.page.goto(f"{chromium.console.url}/#/run/{urlencode({'': text})[1:]}/overview")
        chromium.page.wait_for_selector("#banner:not([hidden])")
    chromium.forget("Failed to load resource")  # refused: 404, 409, 422


def _escaped(text: str) -> str:
    return "".join(f"\\u{ord(c):04x}" if c in "\u202e\u202c\u0000\u0007\u001b\ufeff" else c for c in text)


def test_the_page_goes_on_after_the_console_was_stopped_and_started_again(chromium: Browser, shown: Shown) -> None:
    """It says that nothing answers, keeps what it shows, and shows new steps when the console is back."""
    chromium.open(shown.plain.run_id, "overview")
    shown.console.stop()
    chromium.page.wait_for_selector("#banner:not([hidden])")
    assert "does not answer" in chromium.text("#banner")
    assert chromium.tile("reward") != "–"
    shown.plain.publish_step(STEPS + 2)
    shown.console.start()
    chromium.page.wait_for_function(
        "wanted => document.querySelector('#banner').hidden && document.querySelector('[data-tile=step] b').textContent === wanted",
        arg=f"{STEPS + 2} of {STEPS + 100}",
    )
    chromium.forget("Failed to load resource")  # while it was stopped


def test_without_a_token_the_page_asks_for_one_and_shows_no_figure(chromium: Browser, shown: Shown) -> None:
    chromium.page.context.clear_cookies()
    chromium.page.goto(f"{chromium.console.url}/#/run/{shown.plain.run_id}/overview")
    chromium.page.reload()
    chromium.page.fill("[name=token]", "wrong")
    chromium.page.click("text=Use it")
    chromium.page.wait_for_selector("text=That token is not known")
    assert "0.8" not in chromium.text()
    chromium.page.fill("[name=token]", shown.console.tokens[Role.RUN])
    chromium.page.click("text=Use it")
    chromium.wait("runs")
    chromium.forget("status of 401")


def test_the_language_is_the_browsers_until_another_is_chosen(chromium: Browser, shown: Shown) -> None:
    chromium.go("#/", "runs")
    try:
        for lang, title in (("zh-CN", "运行"), ("en", "Runs")):
            chromium.page.click("#language")
            chromium.page.wait_for_selector(f"html[lang={lang}]")
            chromium.page.reload()  # it is remembered
            chromium.wait("runs")
            assert (chromium.page.get_attribute("html", "lang"), chromium.text("h1")) == (lang, title)
        with chromium.another(locale="zh-TW") as other:
            other.open(shown.plain.run_id, "overview")
            assert "处被截断。 请增大 rollout.max_new_tokens" in other.text('[data-chart="被截断的回复"]')
            assert other.complaints == []
    finally:
        chromium.page.evaluate("localStorage.clear()")


def test_a_sweep_is_its_runs_with_the_best_first(chromium: Browser, shown: Shown) -> None:
    for rate, typed in ((1e-6, "1e-6"), (3e-5, "3e-5"), (0.0001, "0p0001")):
        folder = shown.folder / f"swept-lr-{typed}-use-critic-true"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"settings": {"trainer": {"lr": rate}, "sft": {"lr": 1e-6}, "critic": {"use_critic": True}}}))  # fmt: skip
        (folder / "metrics.jsonl").write_text(json.dumps({"kind": "eval", "step": 60, "accuracy": rate}) + "\n")
    chromium.go("#/", "runs")
    chromium.page.click("text=Sweeps")
    chromium.wait("sweeps")
    rows = chromium.rows("swept: 3 runs")
    assert [row[:3] for row in rows] == [[f"swept-lr-{typed}-use-critic-true", rate, "true"] for typed, rate in (("0p0001", "0.0001"), ("3e-5", "0.00003"), ("1e-6", "0.000001"))]  # fmt: skip
    assert ["best" in row[3] for row in rows] == [True, False, False]
    assert chromium.page.locator("svg.scatter circle").count() == 6


@pytest.mark.parametrize("locale", ["en", "zh"])
@pytest.mark.parametrize("width", [390, 1440])
def test_every_view_fits_and_is_accessible(chromium: Browser, shown: Shown, locale: str, width: int) -> None:
    """Nothing is wider than the window, long tables scroll in a box; every rule of axe-core, in light and dark: make test-more NAME=axe."""
    run, hostile = shown.plain.run_id, shown.hostile.run_id
    of_runs = [("#/", "runs"), ("#/new", "new"), (f"#/new?copy={run}", "new"), ("#/sweeps", "sweeps"), (f"#/compare?run={run}&run=only-files", "compare")]  # fmt: skip
    addresses = [*of_runs, *((f"#/run/{hostile}/{view}", view) for view in (*VIEWS, "settings", "logs")), (f"#/run/{run}/group?id={GROUP}&at=1", "group")]  # fmt: skip
    with chromium.another(locale=locale, viewport={"width": width, "height": 844}) as window:
        for address, view in addresses:
            window.go(address, view)
            for scheme, background in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(13, 17, 23)")):
                window.page.emulate_media(color_scheme=scheme)
                assert window.page.evaluate("getComputedStyle(document.body).backgroundColor") == background
                if AXE:
                    window.page.evaluate(Path(AXE).read_text("utf-8"))
                    found = "axe.run().then(r => r.violations.map(v => [v.id, v.nodes.map(n => n.html)]))"
                    assert window.page.evaluate(found) == [], f"{address}, {scheme}"
            assert window.page.evaluate("document.documentElement.scrollWidth") <= width, address
