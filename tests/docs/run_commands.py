"""Run the commands of README and docs as a reader would: `make docs-test`.

    python -m tests.docs.run_commands [PAGE ...]

Each page has an empty folder with a tiny model in ``models/Qwen3-0.6B``, generated problems in ``gsm8k/``, the repository's
``examples/``, and a ``run.toml`` unless it writes one. Blocks marked ``<!-- run -->`` are run from top to bottom, every line with the
environment that the lines before left; those marked ``<!-- file: NAME -->`` are written to that file. ``services`` in a mark starts NATS, S3
and the reward service first, ``fresh`` stops what runs and removes its data. Servers stay in the background. The environment makes runs small: `_SMALL`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.deploy import quickstart_task
from tests.docs.pages import PAGES, ROOT, Block, blocks

_DEADLINE_S = 900  # of one command, on a machine with other work too
_READY_S = 240
_API = "http://127.0.0.1:8700"  # of the reward service, as the pages write it
_SMALL = {
    "TRAINER__STEPS": "3", "TRAINER__LEASE_S": "2", "ROLLOUT__MAX_NEW_TOKENS": "9", "ROLLOUT__GROUP_SIZE": "2", "ROLLOUT__GROUPS_PER_STEP": "4",
    "DATA__MAX_PROMPT_TOKENS": "100", "TRAINER__WARMUP_STEPS": "0", "EVAL__EVERY": "0", "EVAL__NUM_PROMPTS": "4", "DATA__SYSTEM_PROMPT": "",
}  # fmt: skip
_SERVERS = (
    "penstock up",
    "penstock reward service",
    "penstock reward serve",
    "penstock rollout",
    "python examples/reward_endpoint.py",
)
# What is run in place of a line: a make target of a repository, and numbers of the long run that is made short here.
_INSTEAD = ((r"^make quickstart.*", "penstock quickstart --steps 12"), (r"^make test\b.*", "true"), (r"--version \d+ --to", "--version 3 --to"),
            (r"--version \d+", "--version 3"), (r"^penstock quickstart$", "penstock quickstart --steps 12"))  # fmt: skip


class Reader:
    """One page in its folder: the environment and the servers that its commands leave."""

    def __init__(self, page: Path, folder: Path) -> None:
        self.page, self.folder = page, folder
        self._environ: dict[str, str] = {
            name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")
        }
        self._environ["PATH"] = f"{ROOT / '.venv' / 'bin'}:{self._environ['PATH']}"
        self._servers: list[subprocess.Popen[bytes]] = []
        _write_files(folder)

    def run(self, block: Block) -> None:
        if "fresh" in block.note:
            self.stop()
            for name in ("runs", "data"):
                shutil.rmtree(self.folder / name, ignore_errors=True)
        if "services" in block.note and not _answers():
            for line in (
                "penstock up",
                ". data/environment",
                "penstock bootstrap run.toml",
                "penstock reward service run.toml",
                "penstock rollout run.toml",
            ):
                self._line(line)
        for command in block.commands():
            self._line(command)

    def stop(self) -> None:
        for server in reversed(self._servers):
            server.send_signal(signal.SIGINT)
            try:
                server.wait(60.0)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()
        self._servers.clear()

    def _line(self, line: str) -> None:
        for pattern, instead in _INSTEAD:
            line = re.sub(pattern, instead, line)
        started = time.monotonic()
        if line.startswith(_SERVERS):
            self._serve(line)
        else:
            self._call(line)
        print(f"  {time.monotonic() - started:6.1f} s  {line.partition('  #')[0]}", flush=True)

    def _call(self, line: str) -> None:
        """Run one line in a shell and keep the variables that it sets."""
        kept = self.folder / ".environ"
        script = f"set -a\n{line}\nstatus=$?\nenv -0 > {kept}\nexit $status"
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self._environ | _small(line),
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            raise CommandFailed(f"{line}\nexit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
        after = {n: value for n, _, value in (one.partition("=") for one in kept.read_text().split("\0"))}
        small = _small(line)
        self._environ |= {n: value for n, value in after.items() if n.startswith("PENSTOCK_") and n not in small}

    def _serve(self, line: str) -> None:
        before = _endpoints()
        log = self.folder / f"server-{len(self._servers)}.log"
        words = line.partition("  #")[0].strip()
        with log.open("wb") as output:
            server = subprocess.Popen(["bash", "-c", f"exec {words}"], cwd=self.folder, env=self._environ | _small(line), stdout=output,
                                      stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
        self._servers.append(server)
        ready: Callable[[], bool] = lambda: True  # noqa: E731 - a worker waits for the trainer, nothing to wait for
        if words.startswith("penstock up"):
            ready = (self.folder / "data" / "environment").exists
        elif words.startswith("penstock reward service"):
            ready = _answers
        elif "rollout" not in words:
            ready = lambda: _endpoints() != before  # noqa: E731
        limit = time.monotonic() + _READY_S
        while not ready():
            if server.poll() is not None or time.monotonic() > limit:
                raise CommandFailed(f"{line}\ndoes not serve; its output:\n{log.read_text()[-3000:]}")
            time.sleep(0.1)


class CommandFailed(Exception):
    """A command of a page failed; the text has its output."""


def main(arguments: Sequence[str]) -> int:
    """Run the pages given, or all; returns 1 when a command failed."""
    pages = [Path(name).resolve() for name in arguments] or list(PAGES)
    if _answers():
        print(f"a reward service listens at {_API} already; stop it first", file=sys.stderr)
        return 1
    num_run = num_not = 0
    failed: list[str] = []
    for page in pages:
        found = [block for block in blocks(page) if block.mark]
        run = [block for block in found if block.mark == "run"]
        for block in found:
            if block.mark == "not run":
                num_not += len(block.commands())
                print(f"{block.where}: not run: {block.note}")
        if not run:
            continue
        with tempfile.TemporaryDirectory(prefix="penstock-docs-") as name:
            reader = Reader(page, Path(name))
            try:
                for block in found:
                    if block.mark == "file":
                        (reader.folder / block.note).write_text(block.text)
                    elif block.mark == "run":
                        print(block.where, flush=True)
                        reader.run(block)
                        num_run += len(block.commands())
            except (CommandFailed, subprocess.TimeoutExpired) as err:
                failed.append(f"{page.relative_to(ROOT)}: {err}")
                print(f"FAILED {err}", flush=True)
            finally:
                reader.stop()
    print(f"{num_run} commands run, {num_not} not run (with reasons), {len(failed)} pages failed")
    return 1 if failed else 0


def _small(line: str) -> dict[str, str]:
    """Return the variables that make a run small; none for a command that makes a run file of its own."""
    if "quickstart" in line or "config show" in line:
        return {}
    return {f"PENSTOCK_{name}": value for name, value in _SMALL.items()}


def _write_files(folder: Path) -> None:
    quickstart_task.write_model(folder / "models" / "Qwen3-0.6B", seed=0)
    (folder / "gsm8k").mkdir()
    for split, numbers in (("train", range(10, 74)), ("test", range(80, 90))):
        rows = [
            {"question": f"sort {n}", "answer": f"the digits in order\n#### {''.join(sorted(str(n)))}"} for n in numbers
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / "gsm8k" / f"{split}.parquet")
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / "run.toml").write_text(
        'run.id = "gsm8k"\nmodel.path = "models/Qwen3-0.6B"\ndata.train = "gsm8k/train.parquet"\ndata.eval = "gsm8k/test.parquet"\n'
        'reward.name = "gsm8k"\n'
    )


def _answers() -> bool:
    return _get("/healthz") is not None


def _endpoints() -> object:
    return _get("/v1/endpoints")


def _get(path: str) -> object:
    try:
        with urllib.request.urlopen(_API + path, timeout=2) as answer:
            found = json.load(answer)
    except (OSError, ValueError):
        return None
    listed = found.get("endpoints", found) if isinstance(found, dict) else found
    return [one.get("endpoint", one).get("name") for one in listed] if isinstance(listed, list) else True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
