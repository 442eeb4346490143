"""``penstock quickstart``: train a tiny language model through every service, with a live panel.

1. Makes a tiny model and the data of a task (`deploy/quickstart_task.py`); nothing is downloaded.
2. Starts nats-server, the S3 server, the reward service and two rollout workers, each a separate process,
   and warms the model up on examples meanwhile (`penstock sft`).
3. Trains it with asynchronous GRPO. Half way it kills one worker with SIGKILL: its groups are redelivered.
4. Writes a report into the run's folder.

Everything after step 1 is what `penstock train run.toml --local` does with your run file; the one
written here, ``run.toml`` in the run's folder, is a good start.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.console import launch
from penstock.console.cli.options import QuickstartOptions
from penstock.console.live.panel import LivePanel
from penstock.console.report import report
from penstock.console.report.run_summary import RunSummary
from penstock.deploy import resumption, sglang_cpu
from penstock.deploy.local import stop_on_signals
from penstock.deploy.local_run import TRAINER, LocalRun, worker_name
from penstock.deploy.processes.child import Child, DeployError, describe_exit
from penstock.deploy.processes.page_and_trackers import PageProcess
from penstock.deploy.quickstart_task import SORT, TASKS, QuickstartTask, write_model
from penstock.deploy.train import next_steps
from penstock.protocol import logs, streams
from penstock.protocol.errors import PenstockError
from penstock.protocol.process_end import error_text
from penstock.protocol.record import run_folder
from penstock.protocol.transport.bus import Bus

_SFT_DEADLINE_S = 600.0
_SFT_STARTS = 3  # it is started again when a signal killed it: out of memory, or by hand
_POLL_S = 0.2
_KILL_DEADLINE_S = 10.0
_STOPPED_ON_REQUEST = 130

_RUN_FILE = Path(__file__).with_name("quickstart.toml.in")  # of str.format

_PACKS_IN_FLIGHT = 2
_UPDATE_MODE = """\
update_mode = "retract"     # new weights are loaded at once; sequences under way continue with them
"""


@dataclass(frozen=True, slots=True)
class Options:
    seed: int
    steps: int
    workers: int
    run_id: str
    folder: Path  # runs/<id>
    as_json: bool
    kill: bool
    engine: str  # "embedded" | "sglang"
    page: bool | None = None  # None: where stdout is a terminal
    task: QuickstartTask = SORT


def quickstart(cli_options: QuickstartOptions) -> int:
    options = _derived(cli_options)
    logs.configure("quickstart", level="warning")
    stop_requested = stop_on_signals()
    started = time.monotonic()
    show = _Progress(quiet=options.as_json, started=started)
    try:
        code, summary, usage = _run(options, show, stop_requested)
    except PenstockError as err:
        print(error_text(f"quickstart: {err}\nlogs: {options.folder / 'logs'}\nnext: penstock doctor"), file=sys.stderr)
        return 1
    if code is None:
        print(f"quickstart: all processes have exited; {_again(options)}", file=sys.stderr)
        return _STOPPED_ON_REQUEST
    if code:
        return code
    chat, *rest = next_steps(options.folder)
    following = [
        f"{chat} --prompt '{options.task.question}'",
        *rest,
        f"penstock train {options.folder / 'run.toml'} --local run.id=mine trainer.lr=3e-4",
        "penstock init",
    ]
    path = report.write(options.folder, summary, next_steps=following)
    name, before, after = options.task.learnt, summary.accuracy_before, summary.accuracy_after
    if after is None:
        name, before, after = "reward", summary.eval_reward_before, summary.eval_reward_after
    show("")
    if before is not None and after is not None:
        show(f"{name:<9} {before:.3f} -> {after:.3f} on the same {summary.eval_prompts} held-out problems")
    dropped = sum(summary.groups.dropped.values())
    show(f"groups    {summary.groups.issued:,} issued, {summary.groups.trained:,} trained, {dropped} dropped")
    show(f"report    {path}")
    for line in following:
        show(f"next      {line}")
    if options.as_json:
        total = {"total_wall_s": round(time.monotonic() - started, 2), "total_cpu_s": round(usage, 2)}
        files = {"report": str(path), "model": str(options.folder / "model")}
        print(json.dumps({**json.loads(summary.to_line()), **total, **files}))
    return 0


def _again(options: Options) -> str:
    if (options.folder / "sft" / "config.json").is_file():
        return resumption.ended("stopped", [os.path.relpath(options.folder / "run.toml"), "--local"])
    return "stopped on request before the training; start it again with: penstock quickstart"


def _run(options: Options, show: _Progress, stop_requested: threading.Event) -> tuple[int | None, RunSummary, float]:
    run_file = _make(options, show)
    run = LocalRun([str(run_file)], num_workers=options.workers)
    page = PageProcess(options.folder, is_wanted=options.page, as_json=options.as_json)
    with run, page:
        page.start()
        run.start_services()
        started = f"nats, S3, reward service and {options.workers} rollout workers are starting"
        show(f"services  {started}; logs in {run.log(TRAINER).parent}")
        show(f"page      {page.notice()}")
        run.prepare_trainer()
        if not _warm_up(options, run_file, show, stop_requested):
            return None, RunSummary(run_id=options.run_id), 0.0
        with Bus.connect(run.nats, name="quickstart") as bus:
            mode = "quiet" if options.as_json else "auto"
            with LivePanel(options.run_id, bus, total_steps=options.steps, mode=mode, folder=options.folder) as panel:
                run.on_incident(panel.note)
                run.start_trainer()
                code = _watch(options, run, page, bus, panel, stop_requested)
            summary = panel.summary()
        if code:
            raise DeployError(f"the trainer ended with exit code {code}; its log ends with\n{run.log_tail(TRAINER)}")
    return code, summary, run.usage.cpu_s


def _make(options: Options, show: _Progress) -> Path:
    data, task = options.folder / "data", options.task
    num_train, num_sft = options.steps * task.groups_per_step, task.sft_steps * task.sft_batch
    task.write_data(data, seed=options.seed, num_sft=num_sft, num_train=num_train, num_eval=task.num_eval)
    num_parameters = write_model(options.folder / "start", seed=options.seed, shape=task.shape)
    show(f"model     Qwen3 architecture, {num_parameters:,} parameters, random; task: {task.does}")
    show(f"data      {num_sft:,} examples, {num_train:,} prompts, {task.num_eval} held out; all in {data}")
    run_file = options.folder / "run.toml"
    run_file.write_text(run_file_text(options, run_file) + _engine_sections(options.engine))
    return run_file


def run_file_text(options: Options, file: Path) -> str:
    warmup_steps, eval_every = min(10, options.steps // 2), max(1, options.steps // 6)
    return _RUN_FILE.read_text(encoding="utf-8").format(
        file=file, options=options, task=options.task, warmup_steps=warmup_steps, eval_every=eval_every
    )


def _engine_sections(engine: str) -> str:
    worker = f"\n[worker]\npacks_in_flight = {_PACKS_IN_FLIGHT}     # more would gain nothing on two cores\n"
    if engine == "embedded":
        return worker
    return f'{worker}engine = "{engine}"\n{_UPDATE_MODE}\n{sglang_cpu.section_toml()}'


def _warm_up(options: Options, run_file: Path, show: _Progress, stop_requested: threading.Event) -> bool:
    """Run `penstock sft`, again when a signal killed it; returns False when a stop was requested first."""
    started = time.monotonic()
    command = launch.module("penstock.fine_tuning", "sft", str(run_file), f"model.path={options.folder / 'start'}")
    environ = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    child = Child("sft", command, log=options.folder / "logs" / "sft.log", environ=environ)
    for kills_left in reversed(range(_SFT_STARTS)):
        code = _exit_code(child, started + _SFT_DEADLINE_S, stop_requested)
        if code is None:
            return False
        if code == 0 and run_folder.is_pause_requested(options.folder):
            show("warm-up   paused")
            return False
        if code == 0:
            show(
                f"warm-up   {options.task.sft_steps} supervised steps on {options.task.sft_batch} examples each, "
                f"{time.monotonic() - started:.1f} s"
            )
            return True
        if code > 0 or not kills_left:
            break
        show(f"warm-up   was killed ({describe_exit(code)}); starting it again from its first step")
    raise child.failure("failed")


def _exit_code(child: Child, deadline: float, stop_requested: threading.Event) -> int | None:
    child.start()
    while child.alive and not stop_requested.wait(0.1):
        if time.monotonic() > deadline:
            child.kill()
            raise child.failure(f"did not exit within {_SFT_DEADLINE_S:.0f} s")
    if child.alive:
        child.stop()
        return None
    return child.wait(1.0)


def _watch(
    options: Options, run: LocalRun, page: PageProcess, bus: Bus, panel: LivePanel, stop_requested: threading.Event
) -> int | None:
    to_kill = options.kill
    while (code := run.wait(_POLL_S)) is None and not stop_requested.is_set():
        if problem := run.new_disk_problem() or page.new_problem():
            panel.note(problem)
        if to_kill and panel.snapshot().step >= options.steps // 2:
            to_kill = False
            _wait_until_all_hold_work(run.run_id, bus, options.workers)
            pid = run.kill(worker_name(0))
            panel.note(f"killed {worker_name(0)} (pid {pid}) on purpose with SIGKILL; its groups will be redelivered")
    return code


def _wait_until_all_hold_work(run_id: str, bus: Bus, num_workers: int) -> None:
    """Wait until every worker holds a pack, so that the kill interrupts work.

    Each holds at most the ``worker.packs_in_flight`` of the run file. The wait ends after some seconds at the latest:
    workers that wait for the trainer hold nothing.
    """
    consumer = streams.tasks_consumer(run_id, "train")
    most_of_the_others = (num_workers - 1) * _PACKS_IN_FLIGHT
    deadline = time.monotonic() + _KILL_DEADLINE_S
    while bus.consumer_state(consumer).wait().num_ack_pending <= most_of_the_others:
        if time.monotonic() > deadline:
            return
        time.sleep(_POLL_S / 20)


class _Progress:
    def __init__(self, *, quiet: bool, started: float) -> None:
        self._quiet = quiet
        self._started = started

    def __call__(self, text: str) -> None:
        if not self._quiet:
            print(f"{time.monotonic() - self._started:5.1f} s  {text}" if text else "", flush=True)


def _derived(cli_options: QuickstartOptions) -> Options:
    task = TASKS[cli_options.task]
    workers = cli_options.workers or (2 if cli_options.engine == "embedded" else 1)
    run_id = _free_run_id(cli_options.dir, cli_options.run)
    return Options(
        seed=cli_options.seed,
        steps=task.steps if cli_options.steps is None else cli_options.steps,
        workers=workers,
        run_id=run_id,
        folder=(cli_options.dir / run_id).absolute(),
        as_json=cli_options.json,
        kill=not cli_options.no_kill and workers > 1,
        engine=cli_options.engine,
        page=cli_options.page,
        task=task,
    )


def _free_run_id(folder: Path, wanted: str) -> str:
    """Return ``wanted``, or the first of wanted-2, wanted-3, … whose folder does not exist yet."""
    candidate, number = wanted, 1
    while (folder / candidate).exists():
        number += 1
        candidate = f"{wanted}-{number}"
    return candidate


if __name__ == "__main__":
    from penstock.console.cli.main import run_verb

    run_verb("quickstart")
