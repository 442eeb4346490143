"""``penstock quickstart``: a language model learns, through every service, while you watch.

    python -m penstock.deploy.quickstart [--seed 0] [--steps 150] [--workers 2] [--engine sglang] [--json] [--no-kill]

1. Makes a tiny model and its data on the spot (`deploy/quickstart_task.py`); nothing is downloaded.
2. Starts nats-server, the S3 server, the reward service and two rollout workers, each its own process,
   and warms the model up on examples meanwhile (`penstock sft`).
3. Trains it with asynchronous GRPO. Half way it kills one worker with SIGKILL: its groups come again.
4. Ends with a report of what happened, in the run's folder.

Everything after step 1 is what `penstock train run.toml --local` does with a run file of yours; the
one written here, ``run.toml`` in the run's folder, is a good one to start from.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.console import launch
from penstock.console.live.panel import LivePanel
from penstock.console.report import report
from penstock.console.report.run_summary import RunSummary
from penstock.deploy import quickstart_task as task
from penstock.deploy import sglang_cpu
from penstock.deploy.child import Child, DeployError
from penstock.deploy.local import end_on_signals
from penstock.deploy.ring import TRAINER, Ring, worker_name
from penstock.deploy.train_local import next_steps
from penstock.protocol import logs, streams
from penstock.protocol.errors import PenstockError
from penstock.protocol.transport.bus import Bus
from penstock.rollout_service.settings import WorkerSettings

GROUPS_PER_STEP = 48
GROUP_SIZE = 8
SFT_STEPS = 60
SFT_BATCH = 128
HELD_OUT = 500
_SFT_DEADLINE_S = 600.0
_POLL_S = 0.2
_KILL_PATIENCE_S = 10.0
_ENDED_ON_REQUEST = 130

_RUN_FILE = """\
# What the quickstart ran. Change it and go on with: penstock train {file} --local run.id=another
[run]
id = "{run_id}"
dir = "{dir}"
seed = {seed}

[model]
path = "{folder}/sft"       # where `penstock sft` put the warmed-up model

[data]
train = "{folder}/data/train.jsonl"
eval = "{folder}/data/eval.jsonl"
max_prompt_tokens = 32

[rollout]
groups_per_step = {groups_per_step}
group_size = {group_size}
groups_per_message = 12     # tiny groups share a message and an object
max_staleness = 2
max_new_tokens = {max_new_tokens}

[algorithm]
name = "grpo"               # with defaults made for samples of older versions, see docs/algorithms.md

[reward]
name = "exact_match"

[trainer]
steps = {steps}
lr = 5e-4
betas = [0.9, 0.98]
warmup_steps = {warmup_steps}
schedule = "linear"

[eval]
every = {eval_every}

[sft]
data = "{folder}/data/sft.jsonl"
steps = {sft_steps}
batch_size = {sft_batch}
lr = 3e-3
betas = [0.9, 0.98]
warmup_steps = 20
output = "{folder}/sft"
"""

_UPDATE_MODE = """\
update_mode = "retract"     # new weights do not wait for what is being generated, which goes on under them
"""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command was told."""

    seed: int
    steps: int
    workers: int
    run_id: str
    folder: Path  # runs/<id>
    as_json: bool
    kill: bool
    engine: str  # "embedded" | "sglang"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the quickstart; returns 0, the trainer's exit code, or 130 when it was ended on request."""
    options = _options(arguments)
    logs.configure("quickstart", level="warning")
    asked_to_end = end_on_signals()
    started = time.monotonic()
    say = _Voice(quiet=options.as_json, started=started)
    try:
        code, summary, usage = _run(options, say, asked_to_end)
    except PenstockError as err:
        print(f"quickstart: {err}\nlogs: {options.folder / 'logs'}\nnext: penstock doctor", file=sys.stderr)
        return 1
    if code is None:
        print("quickstart: ended on request, nothing is left running", file=sys.stderr)
        return _ENDED_ON_REQUEST
    if code:
        return code
    following = _next_steps(options)
    path = report.write(options.folder, summary, next_steps=following)
    _tell(say, summary, path, following)
    if options.as_json:
        total = {"total_wall_s": round(time.monotonic() - started, 2), "total_cpu_s": round(usage, 2)}
        files = {"report": str(path), "model": str(options.folder / "model")}
        print(json.dumps({**json.loads(summary.to_line()), **total, **files}))
    return 0


def _run(options: Options, say: _Voice, asked_to_end: threading.Event) -> tuple[int | None, RunSummary, float]:
    run_file = _make(options, say)
    ring = Ring([str(run_file)], num_workers=options.workers)
    with ring:
        ring.start_services()
        say(
            f"services  nats, S3, reward service and {options.workers} rollout workers start; logs in {ring.log(TRAINER).parent}"
        )
        if not _warm_up(options, run_file, say, asked_to_end):
            return None, RunSummary(run_id=options.run_id), 0.0
        with Bus.connect(ring.nats, name="quickstart") as bus:
            panel = LivePanel(
                options.run_id, bus, total_steps=options.steps, mode="quiet" if options.as_json else "auto"
            )
            with panel:
                ring.tell(lambda event: event.as_incident and panel.note(event.as_incident))
                ring.start_trainer()
                code = _watch(options, ring, bus, panel, asked_to_end)
            summary = panel.summary()
        if code:
            raise DeployError(f"the trainer ended with exit code {code}; its log ends with\n{ring.log_tail(TRAINER)}")
    return code, summary, ring.usage.cpu_s


def _make(options: Options, say: _Voice) -> Path:
    data = options.folder / "data"
    num_train = options.steps * GROUPS_PER_STEP
    task.write_data(data, seed=options.seed, num_sft=SFT_STEPS * SFT_BATCH, num_train=num_train, num_eval=HELD_OUT)
    num_parameters = task.write_model(options.folder / "start", seed=options.seed)
    say(f"model     Qwen3 architecture, {num_parameters:,} parameters, random; task: sort {task.NUM_DIGITS} digits")
    say(f"data      {SFT_STEPS * SFT_BATCH:,} examples, {num_train:,} prompts, {HELD_OUT} held out; all in {data}")
    run_file = options.folder / "run.toml"
    run_file.write_text(
        _RUN_FILE.format(
            file=run_file,
            run_id=options.run_id,
            dir=options.folder.parent,
            folder=options.folder,
            seed=options.seed,
            steps=options.steps,
            warmup_steps=min(10, options.steps // 2),
            groups_per_step=GROUPS_PER_STEP,
            group_size=GROUP_SIZE,
            max_new_tokens=task.MAX_NEW_TOKENS,
            eval_every=max(1, options.steps // 6),
            sft_steps=SFT_STEPS,
            sft_batch=SFT_BATCH,
        )
        + _engine_sections(options.engine)
    )
    return run_file


def _engine_sections(engine: str) -> str:
    """Return what the run file says about the engine; raises ConfigError when there is no SGLang to be started."""
    if engine == "embedded":
        return ""
    return f'\n[worker]\nengine = "{engine}"\n{_UPDATE_MODE}\n{sglang_cpu.section_toml()}'


def _warm_up(options: Options, run_file: Path, say: _Voice, asked_to_end: threading.Event) -> bool:
    """Run `penstock sft` to its end; False when the person asked to end first."""
    started = time.monotonic()
    command = launch.module("penstock.trainer", "sft", str(run_file), f"model.path={options.folder / 'start'}")
    environ = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    child = Child("sft", command, log=options.folder / "logs" / "sft.log", environ=environ)
    child.start()
    while child.alive and not asked_to_end.wait(0.1):
        if time.monotonic() - started > _SFT_DEADLINE_S:
            child.kill()
            raise child.failure(f"did not end within {_SFT_DEADLINE_S:.0f} s")
    if child.alive:
        child.stop()
        return False
    if child.wait(1.0):
        raise child.failure("failed")
    say(f"warm-up   {SFT_STEPS} supervised steps on {SFT_BATCH} examples each, {time.monotonic() - started:.1f} s")
    return True


def _watch(options: Options, ring: Ring, bus: Bus, panel: LivePanel, asked_to_end: threading.Event) -> int | None:
    """Wait for the trainer, killing a worker half way; None when the person asked to end."""
    to_kill = options.kill
    while (code := ring.wait(_POLL_S)) is None and not asked_to_end.is_set():
        if to_kill and panel.snapshot().step >= options.steps // 2:
            to_kill = False
            _wait_until_all_hold_work(ring.run_id, bus, options.workers)
            pid = ring.kill(worker_name(0))
            panel.note(f"killed {worker_name(0)} (pid {pid}) on purpose with SIGKILL; its groups will come again")
    return code


def _wait_until_all_hold_work(run_id: str, bus: Bus, num_workers: int) -> None:
    """Wait for a moment in which every worker has a pack in hand, so that the kill is one that hurts.

    Each holds at most ``worker.packs_in_flight``. The wait ends after some seconds all the same:
    workers that wait for the trainer hold nothing.
    """
    consumer = streams.tasks_consumer(run_id, "train")
    most_of_the_others = (num_workers - 1) * WorkerSettings.model_fields["packs_in_flight"].default
    give_up = time.monotonic() + _KILL_PATIENCE_S
    while bus.consumer_state(consumer).wait().num_ack_pending <= most_of_the_others:
        if time.monotonic() > give_up:
            return
        time.sleep(_POLL_S / 20)


def _tell(say: _Voice, summary: RunSummary, path: Path, following: Sequence[str]) -> None:
    before, after = summary.accuracy_before, summary.accuracy_after
    say("")
    if before is not None and after is not None:
        say(f"accuracy  {before:.3f} -> {after:.3f} on the same {summary.eval_prompts} held-out problems")
    dropped = sum(summary.groups.dropped.values())
    say(f"groups    {summary.groups.issued:,} issued, {summary.groups.trained:,} trained, {dropped} dropped")
    say(f"report    {path}")
    for line in following:
        say(f"next      {line}")


def _next_steps(options: Options) -> list[str]:
    chat, *rest = next_steps(options.folder)
    return [
        f"{chat} --prompt 'sort 31415926'",
        *rest,
        f"penstock train {options.folder / 'run.toml'} --local run.id=mine trainer.lr=3e-4",
        "penstock reward serve examples/my_reward.py",
    ]


class _Voice:
    """Speaks to the person, with the time since the start; silent when a machine listens."""

    def __init__(self, *, quiet: bool, started: float) -> None:
        self._quiet = quiet
        self._started = started

    def __call__(self, text: str) -> None:
        if not self._quiet:
            print(f"{time.monotonic() - self._started:5.1f} s  {text}" if text else "", flush=True)


def _options(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog="penstock quickstart",
        description="A tiny language model learns to sort digits, through every service, on this machine. "
        "No GPU, no download, about a minute.",
        epilog="Then: penstock chat quickstart",
        allow_abbrev=False,
    )
    parser.add_argument("--seed", type=int, default=0, help="of model, data and sampling (default: 0)")
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps (default: 150)")
    parser.add_argument(
        "--workers", type=int, help="rollout workers (default: 2; 1 with SGLang, which needs more memory)"
    )
    parser.add_argument(
        "--engine",
        choices=("embedded", "sglang"),
        default="embedded",
        help="sglang: a real SGLang server, slowly, on the CPU; needs `make sglang-env` first",
    )
    parser.add_argument("--run", default="quickstart", help="run id; a number is added when it is taken")
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="folder for runs (default: runs)")
    parser.add_argument("--json", action="store_true", help="nothing but one JSON object, as the last line of stdout")
    parser.add_argument("--no-kill", action="store_true", help="leave the workers alone")
    given = parser.parse_args(arguments)
    if given.workers is None:
        given.workers = 2 if given.engine == "embedded" else 1
    if given.seed < 0 or given.steps < 2 or given.workers < 1:
        parser.error("--seed must be 0 or more, --steps 2 or more, --workers 1 or more")
    run_id = _free_run_id(given.dir, given.run)
    return Options(
        seed=given.seed,
        steps=given.steps,
        workers=given.workers,
        run_id=run_id,
        folder=(given.dir / run_id).absolute(),
        as_json=given.json,
        kill=not given.no_kill and given.workers > 1,
        engine=given.engine,
    )


def _free_run_id(folder: Path, wanted: str) -> str:
    """Return ``wanted``, or the first of wanted-2, wanted-3, … whose folder does not exist yet."""
    candidate, number = wanted, 1
    while (folder / candidate).exists():
        number += 1
        candidate = f"{wanted}-{number}"
    return candidate


if __name__ == "__main__":
    sys.exit(main())
