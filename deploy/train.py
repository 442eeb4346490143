"""``penstock train run.toml``: the trainer of a run, with a live panel and a report at the end.

With ``--local`` every service runs on this machine. Without, the other services run elsewhere, and what the run lacks
on NATS and S3 is created, if this user may. On a terminal the panel is shown, and the trainer's output goes to
``runs/<id>/logs/trainer.log``; elsewhere an attached trainer writes to this process's output, as in a container. A
trainer that a signal killed, or that by its log ended for an error of the hardware that can be transient, is started
again and resumes; so is an attached one in an outage of NATS or the object store, for up to an hour. A run that cannot
be watched is trained all the same. Of several nodes the first does this; the others become their torchrun.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from penstock.console import launch
from penstock.console.cli.options import LocalOptions
from penstock.console.launch import JOIN_S, Nodes
from penstock.console.live.panel import LivePanel
from penstock.console.report import report
from penstock.console.report.run_summary import RunSummary
from penstock.deploy import resumption
from penstock.deploy.bootstrap import bootstrap
from penstock.deploy.early_checks import check_inputs, missing_rewards
from penstock.deploy.local import connection_environment, stop_on_signals
from penstock.deploy.local_run import TRAINER, LocalRun, death_signal, seal_run_file
from penstock.deploy.placement.run_placement import RunPlacement, place_run
from penstock.deploy.plan.memory.report import RankMemory
from penstock.deploy.processes.child import Child, exit_status
from penstock.deploy.processes.page_and_trackers import PageProcess, TrackerProcesses
from penstock.deploy.processes.supervise import Supervisor
from penstock.protocol import logs, streams
from penstock.protocol.config.connection import RunSettings
from penstock.protocol.config.run_file import load, split_arguments
from penstock.protocol.errors import BlobStoreRefused, BusRefused, MissingStream, PenstockError
from penstock.protocol.hardware_errors import GPU_MEMORY, HardwareFault
from penstock.protocol.process_end import error_text
from penstock.protocol.record import run_folder
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.trainer.algorithm.summary_line import summary_line
from penstock.trainer.commands.train import OUTAGE
from penstock.trainer.data.data_order import known_steps
from penstock.trainer.recovery import resume_checks
from penstock.trainer.settings import TrainerSettings

_POLL_S = 0.2
_STOPPED_ON_REQUEST = 130
_CONNECT_S = 20.0
_EXPLAINED_ERROR = 2  # as the trainer's exit code for an error that is explained
_STARTED_S = 60.0  # an outage sooner after the start of this command ends it: an address may be wrong
_APART_S = 900.0  # exits that are further apart belong to two outages; one trainer needs up to five minutes to give up
_OUTAGE_S = 3600.0  # how long the trainer is started again while NATS or the object store does not answer


def train_local(arguments: Sequence[str], options: LocalOptions, *, as_json: bool, again: Sequence[str]) -> int:
    """Run until the trainer exits; returns its exit code, 130 when it was stopped on request.

    ``again`` are the arguments of `penstock train` that resume the run. Raises DeployError, and ConfigError.
    """
    logs.configure("local-run", level="warning")
    stop_requested = stop_on_signals()
    try:
        trackers = TrackerProcesses(arguments, os.environ)
    except PenstockError as err:
        say(str(err))
        return 1
    with trackers:
        return _train_local(arguments, options, trackers, stop_requested, as_json=as_json, again=again)


def _train_local(
    arguments: Sequence[str],
    options: LocalOptions,
    trackers: TrackerProcesses,
    stop_requested: threading.Event,
    *,
    as_json: bool,
    again: Sequence[str],
) -> int:
    folder: Path | None = None  # once the run is being started
    try:
        with contextlib.ExitStack() as stack:
            run = stack.enter_context(
                LocalRun(arguments, num_workers=options.workers, reward_files=options.serve, tls=options.tls)
            )
            page = stack.enter_context(PageProcess(run.folder, is_wanted=options.page, as_json=as_json))
            if finished := resume_checks.finished_notice(run.settings):
                return say_finished(run.folder, finished, as_json=as_json)
            run.check()
            for note in [*resumption.start_notes(arguments, os.environ), *missing_rewards(run.settings, options.serve)]:
                print(note, file=sys.stderr)
            run_folder.begin(folder := run.folder)
            print(f"run {run.run_id}: logs in {run.folder / 'logs'}", file=sys.stderr)
            print(f"algorithm {run.algorithm}", *run.placed.placement.lines(), sep="\n", file=sys.stderr)
            page.start()
            run.start_services()
            print(f"live page: {page.notice()}", file=sys.stderr)
            trackers.start(connection_environment(run.nats, run.s3))
            code, summary = _watch_local(run, page, trackers, stop_requested, quiet=as_json)
            if code == 0:
                trackers.wait_until_read()
            trainer = run.newest_trainer
            log_tail, fault = run.log_tail(TRAINER), trainer and trainer.fault()
    except PenstockError as err:
        say(str(err))
        if folder is not None:
            run_folder.write_failure(folder, str(err))
        return 1
    if code is None:
        say(resumption.ended("stopped", again))
        return _STOPPED_ON_REQUEST
    if code:
        say(f"the trainer ended with exit code {code}; its log ends with\n{log_tail}{fault_note(run.settings, fault)}")
        say_diagnoses(summary)
        run_folder.write_failure(run.folder, (trainer and trainer.reason()) or f"exit code {code}", log_tail)
        return exit_status(code)
    say(f"{run.usage.wall_s:.1f} s of wall time, {run.usage.cpu_s:.1f} s of CPU time")
    write_report(run.folder, summary, as_json=as_json)
    if run_folder.is_pause_requested(run.folder):
        say(resumption.ended("paused", again))
    for line in trackers.finish():
        say(line)
    return 0


def say(text: str) -> None:
    print(error_text(f"penstock train: {text}"), file=sys.stderr)


def say_diagnoses(summary: RunSummary) -> None:
    for found in summary.diagnoses:
        say(f"problem: {found.what} {found.cause} {found.cure}")


def write_report(folder: Path, summary: RunSummary, *, as_json: bool) -> None:
    following = next_steps(folder)
    path = report.write(folder, summary, next_steps=following)
    print(f"report: {path}", *(f"next: {line}" for line in following), sep="\n", file=sys.stderr)
    if as_json:
        print(summary.to_line())


def say_finished(folder: Path, notice: str, *, as_json: bool) -> int:
    say(notice)
    if as_json and (summary := report.stored_summary(folder)):
        print(summary.to_line())
    return 0


def next_steps(folder: Path) -> list[str]:
    if folder.parent == Path("runs").absolute():
        return [f"penstock chat {folder.name}", f"penstock runs show {folder.name}"]
    return [f"penstock chat {folder.name} --model {folder / 'model'}"]


def _watch_local(
    run: LocalRun, page: PageProcess, trackers: TrackerProcesses, stop_requested: threading.Event, *, quiet: bool
) -> tuple[int | None, RunSummary]:
    with Bus.connect(run.nats, name="local-run") as bus:
        mode = "quiet" if quiet else "auto"
        with LivePanel(run.run_id, bus, total_steps=run.total_steps, mode=mode, folder=run.folder) as panel:
            run.on_incident(panel.note)
            trackers.on_incident(panel.note)
            run.start_trainer()
            code = None
            while code is None and not stop_requested.is_set():
                code = run.wait(_POLL_S)
                if problem := run.new_disk_problem() or page.new_problem():
                    panel.note(problem)
        return code, panel.summary()


def train_attached(arguments: Sequence[str], nodes: Nodes | None, *, as_json: bool, again: Sequence[str]) -> int:
    """Run until the trainer exits; returns its exit code, 2 for an error that is explained on stderr.

    ``again`` are the arguments of `penstock train` that resume the run.
    """
    logs.configure("train", level="warning")
    claims = contextlib.ExitStack()
    try:
        placed = _placed_trainer(arguments, nodes)
        claims.enter_context(placed.claimed())
        arguments = [*arguments, *placed.overrides]
        files, overrides = split_arguments(arguments)
        loaded = load(TrainerSettings, files=files, overrides=overrides, environ=os.environ)
        settings, steps = loaded.settings, known_steps(loaded)
        command = launch.trainer(settings.trainer.num_ranks, "train", *arguments, nodes=nodes)
        launch.give_ranks_threads(command)
        if nodes is not None:
            meeting = f"the nodes meet at {nodes.rdzv}, within {JOIN_S} s"
            print(f"node {nodes.rank} of {nodes.count}: {meeting}", file=sys.stderr)
            if not nodes.is_first:
                launch.replace_process(command)
        if finished := resume_checks.finished_notice(settings):
            return say_finished(settings.run.folder.absolute(), finished, as_json=as_json)
        check_inputs(settings)
        with TrackerProcesses(arguments, os.environ) as trackers:
            algorithm = summary_line(settings.algorithm, max_staleness=settings.rollout.max_staleness)
            print(f"algorithm {algorithm}", file=sys.stderr)
            for note in resumption.start_notes(arguments, os.environ):
                print(note, file=sys.stderr)
            create_what_is_missing(settings)
            run_folder.begin(settings.run.folder)
            seal_run_file(arguments, settings.run.folder)
            with run_folder.hold_lock(settings.run.folder), AttachedTrainer(command, settings.run) as trainer:
                placed.write(settings.run.folder)
                trackers.start()
                if trainer.is_logged:
                    print(f"run {settings.run.id}: the trainer's log is {trainer.log}", file=sys.stderr)
                code, summary = _watch_attached(trainer, trackers, settings, steps, quiet=as_json)
            # a signal that came after the last step stopped nothing
            is_done = code == 0 or (trainer.stop_requested and resume_checks.finished_notice(settings) is not None)
            if is_done and summary is not None:
                write_report(settings.run.folder.absolute(), summary, as_json=as_json)
                for line in trackers.finish():
                    say(line)
    except PenstockError as err:
        say(str(err))
        return _EXPLAINED_ERROR
    finally:
        claims.close()
    if ending := _ending(trainer, code, settings, again, is_done=is_done):
        say(ending)
    return exit_status(code)


def _placed_trainer(arguments: Sequence[str], nodes: Nodes | None) -> RunPlacement:
    """Return where this node's ranks go, print it, and let the processes that start from here see these GPUs alone."""
    placed = place_run(arguments, os.environ, role="trainer", nodes=1 if nodes is None else nodes.count, fetch=True)
    os.environ.update(placed.of_trainer())
    for line in placed.placement.lines():
        print(line, file=sys.stderr)
    return placed


def _ending(
    trainer: AttachedTrainer, code: int, settings: TrainerSettings, again: Sequence[str], *, is_done: bool
) -> str:
    if trainer.stop_requested and not is_done:
        return resumption.ended("stopped", again)
    if code == 0 and run_folder.is_pause_requested(settings.run.folder):
        return resumption.ended("paused", again)
    if code and not trainer.is_logged:
        run_folder.write_failure(settings.run.folder, f"the trainer ended with exit code {code}; its output says why")
    elif code:
        log_tail, note = trainer.child.log_tail(), fault_note(settings, trainer.child.fault())
        run_folder.write_failure(settings.run.folder, trainer.child.reason() or f"exit code {code}", log_tail)
        return f"the trainer ended with exit code {code}; its log ends with\n{log_tail}{note}"
    return ""


def fault_note(settings: TrainerSettings, fault: HardwareFault | None) -> str:
    """Return lines that name an error of the hardware; of GPU memory with the estimate of `penstock plan`."""
    if fault is None:
        return ""
    advice = ""
    if fault.name == GPU_MEMORY and (limit := fault.usable_bytes):
        try:
            advice = f"\npenstock plan: {RankMemory(settings, limit=limit, on_gpu=True).advice()}"
        except PenstockError as err:
            advice = f"\npenstock plan has no estimate: {err}"
    return f"\n{fault.text()}{advice}"


def create_what_is_missing(settings: TrainerSettings) -> None:
    run_id, blobs = settings.run.id, Blobs(settings.s3)
    with Bus.connect(settings.nats, name="train", deadline_s=_CONNECT_S) as bus:
        try:
            blobs.check(run_id)
            bus.key_value(streams.state_bucket(run_id).bucket).wait()
            bus.consumer_state(streams.consumers(run_id)[0]).wait()
        except (MissingStream, BlobStoreRefused) as missing:
            try:
                bootstrap(bus, blobs, run_id, settings.retention.limits())
            except (BusRefused, BlobStoreRefused):
                raise missing from None  # it names the command; someone with the rights runs it
            print(f"run {run_id}: created its streams and buckets at {bus.url}", file=sys.stderr)


class AttachedTrainer:
    """The trainer as a child process that is started again after a signal killed it. Use it as a context manager."""

    def __init__(self, command: Sequence[str], run: RunSettings) -> None:
        self.is_logged = sys.stderr.isatty()
        self.stop_requested = False
        self.log = run.folder.absolute() / "logs" / f"{TRAINER}.log"
        self.child = Child(
            TRAINER, command, log=self.log, death_signal=death_signal(command), inherit_output=not self.is_logged
        )
        self._supervisor = Supervisor(on_event=lambda _: None)
        self._started = time.monotonic()
        self._outage_since = self._outage_seen = -_APART_S  # the first and the last exit of an outage

    def __enter__(self) -> AttachedTrainer:
        try:
            self.child.start()
        except BaseException:
            self._supervisor.close()
            raise
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._forward)
        self._supervisor.watch(self.child, self.child.relaunch, is_crash=self._is_crash)
        return self

    def __exit__(self, *_: object) -> None:
        self._supervisor.close()
        self.child.kill()

    def wait(self, deadline_s: float) -> int | None:
        """Wait for the exit code; None after ``deadline_s``. Raises DeployError when it was killed too often."""
        exited = self._supervisor.wait_exit(deadline_s)
        # with a request to stop, the signal may have come between a crash and the restart
        return self.child.returncode if exited or (self.stop_requested and not self.child.alive) else None

    def on_incident(self, note: Callable[[str], object]) -> None:
        """Call ``note`` for every crash and restart from now on, on the supervisor's thread."""
        self._supervisor.on_incident(note)

    def _is_crash(self, code: int) -> bool:
        """Return True for an exit after which the trainer is started again: by a signal, or in an outage."""
        if self.stop_requested:
            return False
        if code != OUTAGE:
            return self.child.may_continue
        now = time.monotonic()
        if now - self._outage_seen > _APART_S:
            self._outage_since = now
        self._outage_seen = now
        return now - self._started > _STARTED_S and now - self._outage_since < _OUTAGE_S

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        """Pass the signal on: the first makes the trainer write a checkpoint and stop, the second ends it at once."""
        self.stop_requested = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child.pid, number)


def _watch_attached(
    trainer: AttachedTrainer, trackers: TrackerProcesses, settings: TrainerSettings, steps: int | None, *, quiet: bool
) -> tuple[int, RunSummary | None]:
    """Show the run until the trainer exits; the summary is None when the run cannot be watched."""
    with contextlib.ExitStack() as watching:
        panel = None
        try:
            bus = watching.enter_context(Bus.connect(settings.nats, name="watch", deadline_s=_CONNECT_S))
            mode = "quiet" if quiet else "auto" if trainer.is_logged else "plain"
            folder = settings.run.folder.absolute()
            panel = LivePanel(settings.run.id, bus, total_steps=steps, mode=mode, folder=folder, lines_every=1)
            watching.enter_context(panel)
            trainer.on_incident(panel.note)
            trackers.on_incident(panel.note)
        except PenstockError as err:
            panel = None
            say(f"the run is trained, but not watched, and gets no report: {err}")
        while (code := trainer.wait(_POLL_S)) is None:
            pass
    return code, None if panel is None else panel.summary()


if __name__ == "__main__":
    from penstock.console.cli.main import run_verb

    run_verb("train")
