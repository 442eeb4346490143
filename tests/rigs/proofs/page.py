"""The live page against real runs in a real chromium, while processes are killed. `make proof NAME=page`.

    python -m tests.rigs.proofs.page [--steps 120] [--pairs 2] [--seed 0] [--only restarts|pairs] [--apart]

Local runs of the quickstart's task (an untrained model: what it learns does not matter here), each paused when it has made its steps and
the kills are done, so that a busy machine, which starts a browser more slowly than it trains, has a longer run:

1. The page is open while the trainer, NATS, the S3 server and the console are killed with SIGKILL, three times each in random order and
   at random moments: after each kill the same page, never reloaded, shows steps that were made after it. At the end the audit must close, and each panel is
   compared with what the API answers about this run.
2. Pairs of a run with twelve kills of the console, a tracker and the browser, in random order and at random moments, and one without page,
   tracker and kills. The audit of each must close. Printed are the wall seconds of both until the last step that both have, the CPU seconds of
   the run's own processes until then, which a busy machine changes less, and their ratios. Console, tracker and browser run at a low
   priority here: starting them takes seconds of CPU, which on a machine of few cores would be the trainer's. With `--apart` they
   have one core of their own, as on another machine, and the run has the others, in both runs of a pair: its wall time then changes only if
   something of the run waits for them.

The browser's console may have one kind of error: "Failed to load resource", while a server is down. The browser writes it itself for
each request without an answer or with a 503, and no script of a page can prevent it. Any other error or warning fails the proof.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.rigs.proofs.page_in_browser import (
    DEADLINE_S,
    LATER,
    Meter,
    Window,
    compare_panels,
    last_step,
    pause,
    training,
)
from tests.rigs.proofs.proof import Console
from tests.servers import wait_for
from tests.small_run import PENSTOCK

from penstock.deploy.local_run import TRAINER
from penstock.deploy.processes.child import Child

_KILLS_OF_EACH = 3
_RANDOM_KILLS_OF_EACH = 4
_PAUSE_S = 3.0  # before a kill, at most: the kills come at any moment of a step
_WHILE_DOWN = re.compile(r"error: Failed to load resource: (net::ERR_\w+|the server responded with a status of 503.*)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="of each run at least")
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("restarts", "pairs"))
    parser.add_argument("--apart", action="store_true", help="console, tracker and browser on a core of their own")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    apart = (set(cores[:-1]), {cores[-1]}) if options.apart else (set(cores), set(cores))
    if not all(apart):
        parser.error("--apart needs two cores")
    steps, chance = options.steps, random.Random(options.seed)
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {text}; load average {os.getloadavg()[0]:.1f}", flush=True)

    with tempfile.TemporaryDirectory(prefix="penstock-page-") as folder:
        base = Path(folder)
        if options.only != "pairs":
            restarts_and_panels(base, steps, chance, say)
        for pair in range(options.pairs if options.only != "restarts" else 0):
            found: dict[str, Meter] = {}
            for name in ("kills", "quiet") if pair % 2 == 0 else ("quiet", "kills"):
                run_id = f"{name}-{pair}"
                found[name] = (random_kills if name == "kills" else quiet)(base, run_id, steps, chance, say, apart)
                steps = found[name].last
            common = min(one.last for one in found.values())
            (wall, cpu), (quiet_wall, quiet_cpu) = found["kills"].until(common), found["quiet"].until(common)
            say(
                f"pair {pair}, {common} steps, with kills and without page, tracker and kills: {wall:.1f} and {quiet_wall:.1f} s of wall time "
                f"(ratio {wall / quiet_wall:.3f}), {cpu:.1f} and {quiet_cpu:.1f} CPU seconds of the run's processes (ratio {cpu / quiet_cpu:.3f})"
            )
    return 0


def quiet(
    base: Path,
    run_id: str,
    steps: int,
    chance: random.Random,
    say: Callable[[str], None],
    apart: tuple[set[int], set[int]],
) -> Meter:
    """A run without page, tracker and kills."""
    os.sched_setaffinity(0, apart[0])
    with training(base, run_id) as run, Meter(base, run) as meter:
        run.start_trainer()
        os.sched_setaffinity(0, apart[1])
        pause(base, run, steps)
        say(f"{last_step(base, run_id)} steps without page, tracker and kills; the audit closes")
        return meter


def restarts_and_panels(base: Path, steps: int, chance: random.Random, say: Callable[[str], None]) -> None:
    order = [TRAINER, "nats-server", "s3-server", "console"] * _KILLS_OF_EACH
    chance.shuffle(order)
    with training(base, "restarts") as run:
        run.start_trainer()
        console = Console(base, role="read", before=LATER)
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
                made = max(before, last_step(base, "restarts"))
                window.wait_for_step(made + 2)  # one step may have been under way
                window.page.wait_for_selector("#banner[hidden]", state="attached")
                say(
                    f"killed {name} at step {before}: the open page, not reloaded, showed step {window.step()} after "
                    f"{time.monotonic() - killed_at:.1f} s"
                )
            pause(base, run, steps)
            window.wait_for_step(last_step(base, "restarts"))
            while_down = window.browser.complaints[:]
            wrong = [one for one in while_down if not _WHILE_DOWN.fullmatch(one)]
            assert not wrong, wrong
            window.browser.complaints.clear()
            num_compared = compare_panels(window)
            assert window.browser.complaints == [], window.browser.complaints
            say(
                f"{len(order)} kills; {num_compared} figures of eight panels are those of the API; the audit closes; {len(while_down)} requests "
                "failed while a server was down, and the browser's console has no other error"
            )
        finally:
            window.close()
            console.kill()


def random_kills(
    base: Path,
    run_id: str,
    steps: int,
    chance: random.Random,
    say: Callable[[str], None],
    apart: tuple[set[int], set[int]],
) -> Meter:
    """A run with twelve kills at random. `apart`: the cores of the run, and those of console, tracker and browser."""
    order = ["console", "tracker", "browser"] * _RANDOM_KILLS_OF_EACH
    chance.shuffle(order)
    track = [*PENSTOCK, "track", run_id, "tracker=tensorboard", f"run.dir={base / 'runs'}"]
    os.sched_setaffinity(0, apart[0])
    with training(base, run_id) as run, Meter(base, run) as meter:
        run.start_trainer()
        os.sched_setaffinity(0, apart[1])  # of this thread, and of what it starts from here on
        console = Console(base, role="read", before=LATER)
        tracker = Child("tracker", [*LATER, *track], log=base / "tracker.log")
        tracker.start()
        window = Window(console, run_id)
        try:
            wait_for(lambda: last_step(base, run_id) >= 1, "the first step", DEADLINE_S)
            for name in order:
                time.sleep(chance.uniform(0.0, 2 * _PAUSE_S))
                if name == "console":
                    console.kill()
                    console.start()
                elif name == "tracker":
                    tracker.kill()
                    tracker = tracker.relaunch()
                else:
                    window.kill()
                    window = Window(console, run_id)
            killed_until = last_step(base, run_id)
            pause(base, run, max(steps, killed_until))
            made = last_step(base, run_id)
            window.wait_for_step(made)
            tracker.kill()
            done = subprocess.run([*track, "--once"], capture_output=True, text=True, timeout=600, check=False)
            assert done.returncode == 0, done.stderr[-2000:]
            say(
                f"{len(order)} kills in the first {killed_until} of {made} steps: {', '.join(order)}; the page and the tracker have every step, "
                "the audit closes"
            )
            return meter
        finally:
            window.close()
            console.kill()
            tracker.kill()


if __name__ == "__main__":
    sys.exit(main())
