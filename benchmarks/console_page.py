"""Measure the page of `penstock console` on a large run, and what an open page costs a run.

    python -m benchmarks.console_page [--steps 10000] [--workers 100] [--groups 13] [--json FILE]
    python -m benchmarks.console_page --overhead [--pairs 4] [--steps 60]

Seconds of each panel's query, first paint, and CPU while the page is open. The run is synthetic: its events, versions, heartbeats and
record are on a local nats-server and S3 server. The steps share 200 packs, so that writing takes a minute; what a query reads is the
same. First paint needs chromium and playwright.

``--overhead``: `penstock quickstart` with the page open in a browser, and without it. Runs of a pair have the same seed and follow one
another, in changing order. Counted are the CPU seconds of the command with all its processes, not those of the browser; those of the
console are shown alone as well. CPU seconds, because a shared machine makes wall times mean little.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from tests.console.record import recorded_run as recorded
from tests.console.web.browsing import CHROMIUM, browser
from tests.console.web.shown_run import ServedConsole, ShownRun, environ_of, served
from tests.groups import make_group

from penstock.console.web.access import Role
from penstock.deploy.bootstrap import bootstrap
from penstock.deploy.local import LocalStack
from penstock.protocol import streams, subjects
from penstock.protocol.facts import encode
from penstock.protocol.groups import BlobRef
from penstock.protocol.record.lineage import RecordedGroup, RecordedStep
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus

_RUN_S = 1200.0
_LINK_S = 120.0


def overhead(pairs: int, steps: int) -> None:
    """Run the pairs, print each and the medians."""
    print(
        "| pair | without, CPU s | with the page, CPU s | difference | the console alone | requests | without, wall s | with, wall s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    differences, shares, walls = [], [], []
    for pair in range(pairs):
        order = (False, True) if pair % 2 == 0 else (True, False)
        found = {with_page: _measure(pair, steps, with_page=with_page) for with_page in order}
        without, seen = found[False], found[True]
        differences.append(100.0 * (seen.cpu_s / without.cpu_s - 1.0))
        shares.append(100.0 * seen.console_s / (seen.cpu_s - seen.console_s))
        walls.append(100.0 * (seen.wall_s / without.wall_s - 1.0))
        print(
            f"| {pair} | {without.cpu_s:.2f} | {seen.cpu_s:.2f} | {differences[-1]:+.1f} % | {seen.console_s:.2f} s, {shares[-1]:.1f} % | "
            f"{seen.requests} | {without.wall_s:.0f} | {seen.wall_s:.0f} |",
            flush=True,
        )
    print(
        f"\nmedians of {pairs} pairs of {steps} steps: CPU {statistics.median(differences):+.1f} % (from "
        f"{min(differences):+.1f} % to {max(differences):+.1f} %); the console alone {statistics.median(shares):.1f} % of the rest of its run; "
        f"wall time {statistics.median(walls):+.1f} %; load average {os.getloadavg()[0]:.1f}"
    )


@dataclass
class Run:
    """What one quickstart took; of an open page how often it asked for the summary, and the CPU seconds of its console."""

    cpu_s: float = 0.0
    wall_s: float = 0.0
    requests: int = 0
    console_s: float = 0.0


def _measure(seed: int, steps: int, *, with_page: bool) -> Run:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "output").open("w+") as output:
        command = [
            sys.executable, "-P", "-m", "penstock", "quickstart", "--json", "--no-kill", "--seed", str(seed), "--steps", str(steps),
            "--dir", folder, "--page" if with_page else "--no-page",
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        run = Run()
        try:
            if with_page:
                run = _look_until_the_end(process, Path(folder))
            deadline = time.monotonic() + _RUN_S
            while (ended := os.wait4(process.pid, os.WNOHANG))[0] == 0:
                if time.monotonic() > deadline:
                    raise SystemExit(f"seed {seed}: the quickstart has not ended after {_RUN_S:.0f} s")
                time.sleep(0.2)
        except BaseException:
            if process.returncode is None:
                process.terminate()
            raise
        process.returncode = os.waitstatus_to_exitcode(ended[1])
        if process.returncode:
            output.seek(0)
            raise SystemExit(f"seed {seed}: the quickstart exited with {process.returncode}\n{output.read()[-3000:]}")
        run.cpu_s, run.wall_s = ended[2].ru_utime + ended[2].ru_stime, time.monotonic() - started
        return run


def _look_until_the_end(process: subprocess.Popen[bytes], runs: Path) -> Run:
    """Keep the overview open in a browser until the command ends."""
    from playwright.sync_api import sync_playwright  # of the extra browser-tests

    link = _link(process, runs / "quickstart" / "logs" / "console.log")
    console = next(one for one in psutil.Process(process.pid).children() if "penstock.console.web" in one.cmdline())
    seen = Run()

    def count(response: object) -> None:
        seen.requests += response.url.endswith("/summary") and response.ok  # type: ignore[attr-defined]

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        page = browser.new_page()
        page.on("response", count)
        page.goto(link, timeout=120_000)
        page.goto(f"{link.partition('/?')[0]}/#/run/quickstart/overview", timeout=120_000)
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            page.wait_for_timeout(300)
            with contextlib.suppress(psutil.NoSuchProcess):
                seen.console_s = max(seen.console_s, sum(console.cpu_times()[:2]))
        browser.close()
    return seen


def _link(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _LINK_S
    while True:
        lines = log.read_text().splitlines() if log.exists() else []
        for line in lines:
            if line.startswith('{"url"') and line.endswith("}"):
                return str(json.loads(line)["link"])
        gone = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if gone is not None or time.monotonic() > deadline:
            raise SystemExit(f"no link in {log}")
        time.sleep(0.1)


RUN = "large"
GROUP_SIZE = 8
_PACKS = 200
_VERSIONS_ADOPTED = 300  # by every worker; the stream keeps the newest 100,000 messages


class LargeRun(ShownRun):
    """A run of many steps whose steps share packs."""

    def __init__(self, bus: Bus, blobs: Blobs, groups_a_step: int) -> None:
        super().__init__(RUN, bus, blobs)
        self._groups_a_step = groups_a_step
        self._shared: dict[int, tuple[BlobRef, tuple[RecordedGroup, ...]]] = {}

    def publish_events(self, steps: int, workers: int) -> None:
        """The events of every step, and what each worker took for the newest versions."""
        for number in range(1, steps + 1):
            self.publish_step(number)
            self.publish(subjects.weights_published(RUN), recorded.published(number))
            if number > steps - _VERSIONS_ADOPTED:
                for worker in range(workers):
                    self.publish(subjects.weights_applied(RUN), recorded.applied(f"rollout-{worker}", number))
        self.flush()

    def beat_all(self, workers: int) -> None:
        """A heartbeat of each worker, of the reward service and of the trainer."""
        live = self.bus.key_value(streams.live_bucket(RUN).bucket).wait()
        first, *_, reward, trainer = recorded.fleet(30)
        beats = [first.model_copy(update={"service_id": f"rollout-{n}"}) for n in range(workers)]
        for one in (*beats, reward, trainer):
            beat = one.model_copy(update={"at": time.time(), "period_s": 3600.0})
            live.put(streams.heartbeat_key(one.role, one.service_id), encode(beat)).wait()

    def _step(self, step: int, *, with_episodes: bool) -> RecordedStep:
        del with_episodes
        place = step % _PACKS
        if place not in self._shared:
            ids = [f"e0.p{place * self._groups_a_step + i}.a0" for i in range(self._groups_a_step)]
            groups = [
                make_group(one, size=GROUP_SIZE, seed=i, prompt_text=f"sort the numbers of {one}")
                for i, one in enumerate(ids)
            ]
            recorded_groups = tuple(
                RecordedGroup(prompt=i, pack=0, scored=self._scored(group, i)) for i, group in enumerate(groups)
            )
            self._shared[place] = self._pack(f"shared{place}", groups), recorded_groups
        pack, recorded_groups = self._shared[place]
        return RecordedStep(
            epoch=1, step=step, trained_version=step - 1, made_version=step, weights_digest="0" * 64, packs=(pack,),
            groups=recorded_groups,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="default: 10,000, of a pair 60")
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--groups", type=int, default=13, help="of a step, of 8 trajectories each")
    parser.add_argument("--open-s", type=float, default=20.0, help="seconds for which the page stays open")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--overhead", action="store_true", help="measure what an open page costs instead")
    parser.add_argument("--pairs", type=int, default=4)
    options = parser.parse_args()
    if options.overhead:
        overhead(options.pairs, options.steps or 60)
        return
    options.steps = options.steps or 10_000
    with tempfile.TemporaryDirectory() as folder, LocalStack(Path(folder) / "store") as stack:
        blobs = Blobs(stack.s3)
        with Bus.connect(stack.nats, name="bench") as bus:
            bootstrap(bus, blobs, RUN)
            run = LargeRun(bus, blobs, options.groups)
            started = time.perf_counter()
            run.publish_events(options.steps, options.workers)
            run.beat_all(options.workers)
            run.publish_dead_letter()
            run.write_record(options.steps)
            trajectories = options.steps * options.groups * GROUP_SIZE
            print(
                f"{options.steps} steps, {options.workers} workers, {trajectories} trajectories, written in {time.perf_counter() - started:.0f} s"
            )
            runs = Path(folder) / "runs"
            runs.mkdir()
            with served(runs, environ_of(stack.nats, stack.s3)) as console:
                found = queries(console, options.steps)
                found |= page(console, options.open_s)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


_PATHS = {  # by what a person sees; {group} is one of the newest
    "overview: summary": "summary",
    "overview: metrics, 500 points": "metrics?points=500",
    "fleet": "workers",
    "weights, 100 versions": "versions?limit=100",
    "rewards": "rewards",
    "trajectories: newest 40 groups with texts": "groups?limit=40",
    "trajectories: one by one, reward 1": "trajectories?limit=40&reward_min=1",
    "trajectories: a text that is nowhere, one request": "groups?prompt=nowhere",
    "group side by side": "group?group_id={group}",
    "tokens": "tokens?group_id={group}",
    "dead letters": "dead-letters",
}


def queries(console: ServedConsole, steps: int) -> dict[str, Any]:
    """Return and print the seconds of each panel's query: the first time, and the median of five."""
    group = f"e0.p{(steps % _PACKS) * 13}.a0"
    found: dict[str, Any] = {}
    headers = {"Authorization": f"Bearer {console.tokens[Role.READ]}"}
    with httpx.Client(base_url=console.url, headers=headers, timeout=120.0, trust_env=False) as client:

        def ask(path: str) -> httpx.Response:
            return client.get(f"/v1/runs/{RUN}/{path}")

        started = time.perf_counter()
        first_s, _ = _timed(lambda: ask("summary").raise_for_status())
        while not ask("summary").json()["is_live"]:
            time.sleep(0.1)
        found["opening"] = {"first_answer_s": first_s, "all_read_s": time.perf_counter() - started}
        print(
            f"{'opening: first answer, all messages read':52} {first_s:7.3f} s, {found['opening']['all_read_s']:.1f} s"
        )
        for name, path in _PATHS.items():
            path = path.format(group=group)
            first, answer = _timed(lambda path=path: ask(path))
            answer.raise_for_status()
            again = [_timed(lambda path=path: ask(path))[0] for _ in range(5)]
            found[name] = {"first_s": first, "median_s": statistics.median(again), "bytes": len(answer.content)}
            print(
                f"{name:52} first {first:7.3f} s   median {found[name]['median_s']:7.3f} s   {len(answer.content):9,} bytes"
            )
        started, num_requests, cursor = time.perf_counter(), 0, ""
        while cursor is not None:
            page_of = ask(f"groups?step_to=5&texts=false&cursor={cursor}").raise_for_status().json()
            num_requests, cursor = num_requests + 1, page_of["next"] if not page_of["items"] else None
        found["trajectories: the first five steps"] = {
            "first_s": time.perf_counter() - started,
            "requests": num_requests,
        }
        print(
            f"{'trajectories: the first five steps':52} first {time.perf_counter() - started:7.3f} s   in {num_requests} requests"
        )
        again_s, _ = _timed(lambda: ask("groups?step_to=5&texts=false"))
        found["trajectories: the first five steps"]["median_s"] = again_s
        status = ask("lineage").status_code
        found["lineage"] = {"status": status}
        print(f"{'lineage of the last version':52} status {status}")
    return found


def page(console: ServedConsole, open_s: float) -> dict[str, Any]:
    """Return and print the first paint of the overview, and the CPU that an open page costs the console."""
    if importlib.util.find_spec("playwright") is None:
        print("first paint: not measured, playwright is not installed")
        return {}
    with browser(console, viewport={"width": 1280, "height": 900}) as window:
        started = time.perf_counter()
        window.open(RUN, "overview")
        ready_s = time.perf_counter() - started
        window.page.reload()
        window.wait("overview")
        paint_ms = window.page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        cpu, wall = time.process_time(), time.perf_counter()
        window.page.wait_for_timeout(open_s * 1000)
        share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    print(
        f"first contentful paint {paint_ms:.0f} ms; overview with all charts {ready_s:.2f} s; CPU of the console while open {share:.1%} of a core"
    )
    return {"first_paint_ms": paint_ms, "overview_ready_s": ready_s, "cpu_share": share}


def _timed(action: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    answer = action()
    return time.perf_counter() - started, answer


if __name__ == "__main__":
    main()
