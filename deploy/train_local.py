"""``penstock train run.toml --local``: every service of one run on this machine, with a live panel and a report at the end."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from penstock.console.cli.options import LocalOptions
from penstock.console.live.panel import LivePanel
from penstock.console.report import report
from penstock.console.report.run_summary import RunSummary
from penstock.deploy import resumption
from penstock.deploy.early_checks import missing_rewards
from penstock.deploy.local import connection_environment, stop_on_signals
from penstock.deploy.local_run import TRAINER, LocalRun
from penstock.deploy.processes.child import exit_status
from penstock.deploy.processes.page_process import PageProcess
from penstock.deploy.processes.tracker_processes import TrackerProcesses
from penstock.protocol import logs
from penstock.protocol.errors import PenstockError
from penstock.protocol.record import run_folder
from penstock.protocol.transport.bus import Bus
from penstock.trainer.recovery import resume_checks

_POLL_S = 0.2
_STOPPED_ON_REQUEST = 130


def train_local(arguments: Sequence[str], options: LocalOptions, *, as_json: bool, again: Sequence[str]) -> int:
    """Run until the trainer exits; returns its exit code, 130 when it was stopped on request.

    ``again`` are the arguments of `penstock train` that resume the run. Raises DeployError, and ConfigError for the run file.
    """
    logs.configure("local-run", level="warning")
    stop_requested = stop_on_signals()
    try:
        trackers = TrackerProcesses(arguments, os.environ)
    except PenstockError as err:
        say(str(err))
        return 1
    with trackers:
        return _train(arguments, options, trackers, stop_requested, as_json=as_json, again=again)


def _train(
    arguments: Sequence[str],
    options: LocalOptions,
    trackers: TrackerProcesses,
    stop_requested: threading.Event,
    *,
    as_json: bool,
    again: Sequence[str],
) -> int:
    """Run until the trainer exits, write the report, and wait a little for the trackers; returns the exit code."""
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
            run_folder.withdraw_pause(run.folder)
            print(f"run {run.run_id}: logs in {run.folder / 'logs'}", file=sys.stderr)
            print(f"algorithm {run.algorithm}", file=sys.stderr)
            page.start()
            run.start_services()
            print(f"live page: {page.notice()}", file=sys.stderr)
            trackers.start(connection_environment(run.nats, run.s3))
            code, summary = _watch(run, page, trackers, stop_requested, quiet=as_json)
            if code == 0:
                trackers.wait_until_read()
            log_tail = run.log_tail(TRAINER)
    except PenstockError as err:
        say(str(err))
        return 1
    if code is None:
        say(resumption.stopped("train", again))
        return _STOPPED_ON_REQUEST
    if code:
        say(f"the trainer ended with exit code {code}; its log ends with\n{log_tail}")
        return exit_status(code)
    say(f"{run.usage.wall_s:.1f} s of wall time, {run.usage.cpu_s:.1f} s of CPU time")
    write_report(run.folder, summary, as_json=as_json)
    if run_folder.is_pause_requested(run.folder):
        say(resumption.paused("train", again))
    for line in trackers.finish():
        say(line)
    return 0


def say(text: str) -> None:
    """Print a line of `penstock train`, which is not the trainer's."""
    print(f"penstock train: {text}", file=sys.stderr)


def write_report(folder: Path, summary: RunSummary, *, as_json: bool) -> None:
    """Write the report, print its path and what to type next, and with ``as_json`` the summary on stdout."""
    following = next_steps(folder)
    path = report.write(folder, summary, next_steps=following)
    print(f"report: {path}", *(f"next: {line}" for line in following), sep="\n", file=sys.stderr)
    if as_json:
        print(summary.to_line())


def say_finished(folder: Path, notice: str, *, as_json: bool) -> int:
    """Print that the run has nothing to do, and with ``as_json`` the summary in its report; returns 0."""
    say(notice)
    if as_json and (summary := report.stored_summary(folder)):
        print(summary.to_line())
    return 0


def next_steps(folder: Path) -> list[str]:
    if folder.parent == Path("runs").absolute():
        return [f"penstock chat {folder.name}", f"penstock runs show {folder.name}"]
    return [f"penstock chat {folder.name} --model {folder / 'model'}"]


def _watch(
    run: LocalRun, page: PageProcess, trackers: TrackerProcesses, stop_requested: threading.Event, *, quiet: bool
) -> tuple[int | None, RunSummary]:
    """Start the trainer and show the run until it exits; the code is None when a stop was requested."""
    with Bus.connect(run.nats, name="local-run") as bus:
        panel = LivePanel(
            run.run_id, bus, total_steps=run.total_steps, mode="quiet" if quiet else "auto", folder=run.folder
        )
        with panel:
            run.listen(lambda event: event.as_incident and panel.note(event.as_incident))
            trackers.on_incident(panel.note)
            run.start_trainer()
            code = None
            while code is None and not stop_requested.is_set():
                code = run.wait(_POLL_S)
                if problem := run.new_disk_problem() or page.new_problem():
                    panel.note(problem)
        return code, panel.summary()


if __name__ == "__main__":
    from penstock.console.cli.main import run_verb

    run_verb("train", "--local")
