"""What proofs share: a small run in a folder, penstock's commands about it, and steps that are printed as they are checked."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.small_run import PENSTOCK, steps_of

from penstock.deploy.processes.child import Child


def folder_of(name: str) -> Path:
    """Return the folder that the command line names, else a new one; made, and free of nothing."""
    parser = argparse.ArgumentParser(
        description=sys.modules["__main__"].__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="?", help="holds what the proof writes; a new one if left out"
    )
    base = Path(parser.parse_args().folder or tempfile.mkdtemp(prefix=f"{name}-")).absolute()
    base.mkdir(parents=True, exist_ok=True)
    return base


def plain_environ() -> dict[str, str]:
    """Return this process's environment without settings of penstock."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}


class Proof:
    """The steps of a proof in a folder; ``num_failed`` of them do not hold."""

    def __init__(self, base: Path, environ: Mapping[str, str] | None = None, *, deadline_s: float = 300.0) -> None:
        self.base, self.deadline_s = base, deadline_s
        self.environ = dict(os.environ if environ is None else environ)
        self.runs = base / "runs"
        self.num_failed = 0
        self.started: list[Child] = []

    def check(self, what: str, holds: bool) -> None:
        self.num_failed += not holds
        print(f"{'ok ' if holds else 'BAD'} {what}", flush=True)

    def wait(self, what: str, condition: Callable[[], bool], deadline_s: float | None = None) -> bool:
        since = time.monotonic()
        while not (holds := condition()) and time.monotonic() - since < (deadline_s or self.deadline_s):
            time.sleep(0.2)
        self.check(f"{what} after {time.monotonic() - since:.0f} s", holds)
        return holds

    def ask(self, *arguments: str, python: str | Path = sys.executable) -> subprocess.CompletedProcess[str]:
        """Run a command of penstock to its end."""
        return subprocess.run(
            [python, *PENSTOCK[1:], *arguments],
            env=self.environ, cwd=self.base, capture_output=True, text=True, check=False, timeout=self.deadline_s,
        )  # fmt: skip

    def start(
        self, name: str, *arguments: str, before: Sequence[str] = (), python: str | Path = sys.executable
    ) -> Child:
        """Start a command of penstock, with words ``before`` it; its output is in ``<name>.log``."""
        command = [*before, str(python), *PENSTOCK[1:], *arguments]
        child = Child(name, command, log=self.base / f"{name}.log", environ=self.environ)
        child.start()
        self.started.append(child)
        return child

    def stop_all(self) -> None:
        for child in reversed(self.started):
            child.stop()

    def steps(self, run_id: str) -> list[int]:
        return steps_of(self.runs, run_id)

    def end(self) -> int:
        """Print how many steps do not hold; return the exit code."""
        print(f"{self.num_failed} steps of the proof do not hold; {self.base}")
        return int(self.num_failed > 0)
