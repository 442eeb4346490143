"""What the live page costs a run: `penstock quickstart` with the page open in a browser, and without it. `make bench-page-overhead`.

    python -m benchmarks.page_overhead [--pairs 4] [--steps 60]

Runs of a pair have the same seed and follow one another, in changing order. Counted are the CPU seconds of the command with all its
processes: trainer, workers, reward service, servers, and the console where there is one; not those of the browser. CPU seconds, because
a shared machine makes wall times mean little; it changes CPU seconds by some per cent too, so those of the console are shown alone
as well. Prints each pair, and the medians.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from tests.console.web.browsing import CHROMIUM

_RUN_S = 1200.0
_LINK_S = 120.0


def main() -> int:
    """Run the pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    print(
        "| pair | without, CPU s | with the page, CPU s | difference | the console alone | requests | without, wall s | with, wall s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    differences, shares, walls = [], [], []
    for pair in range(options.pairs):
        order = (False, True) if pair % 2 == 0 else (True, False)
        found = {with_page: _measure(pair, options.steps, with_page=with_page) for with_page in order}
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
        f"\nmedians of {options.pairs} pairs of {options.steps} steps: CPU {statistics.median(differences):+.1f} % (from "
        f"{min(differences):+.1f} % to {max(differences):+.1f} %); the console alone {statistics.median(shares):.1f} % of the rest of its run; "
        f"wall time {statistics.median(walls):+.1f} %; load average {os.getloadavg()[0]:.1f}"
    )
    return 0


@dataclass
class Run:
    """What one quickstart took; of an open page how often it asked for the summary, and the CPU seconds of its console."""

    cpu_s: float = 0.0
    wall_s: float = 0.0
    requests: int = 0
    console_s: float = 0.0


def _measure(seed: int, steps: int, *, with_page: bool) -> Run:
    """Run one quickstart."""
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
    """Return the link that the console of a run wrote into its log."""
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


if __name__ == "__main__":
    sys.exit(main())
