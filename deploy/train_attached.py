"""``penstock train run.toml``: the trainer of a run whose other services run elsewhere, with a live panel and a report.

Creates what the run lacks on NATS and S3, if this user may. On a terminal the panel is shown, and the trainer's output goes
to ``runs/<id>/logs/trainer.log``; elsewhere the trainer writes to this process's output, as in a container. A trainer that
a signal killed is started again and resumes; so is one that ended because NATS or the object store does not answer, for up
to an hour. A run that cannot be watched is trained all the same. Of several nodes the first does all this; on the others this
process becomes their torchrun.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType

from penstock.console import launch
from penstock.console.live.panel import LivePanel
from penstock.console.nodes import JOIN_S, Nodes
from penstock.console.report.run_summary import RunSummary
from penstock.deploy import resumption
from penstock.deploy.bootstrap import bootstrap
from penstock.deploy.early_checks import check_inputs
from penstock.deploy.local_run import TRAINER
from penstock.deploy.processes.child import Child, exit_status
from penstock.deploy.processes.supervise import ProcessEvent, Supervisor
from penstock.deploy.processes.tracker_processes import TrackerProcesses
from penstock.deploy.train_local import say, say_finished, write_report
from penstock.protocol import logs, streams
from penstock.protocol.config.connection import RunSettings
from penstock.protocol.config.run_file import load, split_arguments
from penstock.protocol.errors import BlobStoreRefused, BusRefused, MissingStream, PenstockError
from penstock.protocol.record import pause_request, run_lock
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.trainer.algorithm.settings_checks import summary_line
from penstock.trainer.commands.train import OUTAGE
from penstock.trainer.data.data_order import known_steps
from penstock.trainer.recovery import resume_checks
from penstock.trainer.settings import TrainerSettings

_POLL_S = 0.2
_CONNECT_S = 20.0
_ERROR = 2  # as the trainer's own exit code for an error that is explained
_STARTED_S = 60.0  # an outage sooner after the start of this command ends it: an address may be wrong
_APART_S = 900.0  # exits that are further apart belong to two outages; one trainer needs up to five minutes to give up
_OUTAGE_S = 3600.0  # how long the trainer is started again while NATS or the object store does not answer


def train_attached(arguments: Sequence[str], nodes: Nodes | None, *, as_json: bool, again: Sequence[str]) -> int:
    """Run until the trainer exits; returns its exit code, 2 for an error that is explained on stderr.

    ``again`` are the arguments of `penstock train` that resume the run.
    """
    logs.configure("train", level="warning")
    try:
        files, overrides = split_arguments(arguments)
        loaded = load(TrainerSettings, files=files, overrides=overrides, environ=os.environ)
        settings, steps = loaded.settings, known_steps(loaded)
        command = launch.trainer(settings.trainer.num_ranks, "train", *arguments, nodes=nodes)
        if nodes is not None:
            print(
                f"node {nodes.rank} of {nodes.count}: the nodes meet at {nodes.rdzv}, within {JOIN_S} s",
                file=sys.stderr,
            )
            if not nodes.is_first:
                launch.replace_process(command)
        if finished := resume_checks.finished_notice(settings):
            return say_finished(settings.run.folder.absolute(), finished, as_json=as_json)
        check_inputs(settings)
        trackers = TrackerProcesses(arguments, os.environ)
        algorithm = summary_line(settings.algorithm, max_staleness=settings.rollout.max_staleness)
        print(f"algorithm {algorithm}", file=sys.stderr)
        for note in resumption.start_notes(arguments, os.environ):
            print(note, file=sys.stderr)
        create_what_is_missing(settings)
        with trackers:
            pause_request.clear(settings.run.folder)
            with run_lock.hold(settings.run.folder), Trainer(command, settings.run) as trainer:
                trackers.start()
                if trainer.is_logged:
                    print(f"run {settings.run.id}: the trainer's log is {trainer.log}", file=sys.stderr)
                code, summary = _watch(trainer, trackers, settings, steps, quiet=as_json)
            # a signal that came after the last step stopped nothing
            is_done = code == 0 or (trainer.stop_requested and resume_checks.finished_notice(settings) is not None)
            if is_done and summary is not None:
                write_report(settings.run.folder.absolute(), summary, as_json=as_json)
                for line in trackers.finish():
                    say(line)
    except PenstockError as err:
        say(str(err))
        return _ERROR
    if ending := _ending(trainer, code, settings, again, is_done=is_done):
        say(ending)
    return exit_status(code)


def _ending(trainer: Trainer, code: int, settings: TrainerSettings, again: Sequence[str], *, is_done: bool) -> str:
    """Return the last line of a session that did not end its run: how to resume it, or why it failed."""
    if trainer.stop_requested and not is_done:
        return resumption.stopped("train", again)
    if code == 0 and pause_request.is_requested(settings.run.folder):
        return resumption.paused("train", again)
    if code and trainer.is_logged:
        return f"the trainer ended with exit code {code}; its log ends with\n{trainer.log_tail}"
    return ""


def create_what_is_missing(settings: TrainerSettings) -> None:
    """Create the run's bucket, streams and consumers if one of them is missing; raises PenstockError with the command."""
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


class Trainer:
    """The trainer as a child process that is started again after a signal killed it. Use it as a context manager."""

    def __init__(self, command: Sequence[str], run: RunSettings) -> None:
        """Prepare the child; on a terminal its output goes to the log of the run's folder."""
        self.is_logged = sys.stderr.isatty()
        self.stop_requested = False
        self.log = run.folder.absolute() / "logs" / f"{TRAINER}.log"
        by_torchrun = "torch.distributed.run" in command
        self._child = Child(
            TRAINER,
            command,
            log=self.log,
            death_signal=signal.SIGTERM if by_torchrun else signal.SIGKILL,
            inherit_output=not self.is_logged,
        )
        self._note: Callable[[str], object] = lambda _: None
        self._supervisor: Supervisor | None = None
        self._started = time.monotonic()
        self._outage_since = self._outage_seen = -_APART_S  # the first and the last exit of an outage

    def __enter__(self) -> Trainer:
        self._child.start()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._forward)
        self._supervisor = Supervisor(on_event=self._on_event)
        self._supervisor.watch(self._child, self._child.relaunch, is_crash=self._is_crash)
        return self

    def __exit__(self, *_: object) -> None:
        self._require_supervisor().close()
        self._child.kill()

    @property
    def log_tail(self) -> str:
        return self._child.log_tail()

    def wait(self, deadline_s: float) -> int | None:
        """Wait for the exit code; None after ``deadline_s``. Raises DeployError when it was killed too often."""
        supervisor = self._require_supervisor()
        ended = supervisor.wait_for(
            lambda: supervisor.failure is not None or any(e.kind == "exited" for e in supervisor.events), deadline_s
        )
        if supervisor.failure is not None:
            raise supervisor.failure
        if self.stop_requested and not self._child.alive:  # the signal came between a crash and the restart
            return self._child.returncode
        return self._child.returncode if ended else None

    def on_incident(self, note: Callable[[str], object]) -> None:
        """Call ``note`` for every crash and restart from now on, on the supervisor's thread."""
        self._note = note

    def _on_event(self, event: ProcessEvent) -> None:
        if event.as_incident:
            self._note(event.as_incident)

    def _is_crash(self, code: int) -> bool:
        """Return True for an exit after which the trainer is started again: by a signal, or in an outage of at most an hour."""
        if self.stop_requested:
            return False
        if code != OUTAGE:
            return code < 0
        now = time.monotonic()
        if now - self._outage_seen > _APART_S:
            self._outage_since = now
        self._outage_seen = now
        return now - self._started > _STARTED_S and now - self._outage_since < _OUTAGE_S

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        """Pass the signal on: the first makes the trainer write a checkpoint and stop, the second ends it at once."""
        self.stop_requested = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child.pid, number)

    def _require_supervisor(self) -> Supervisor:
        assert self._supervisor is not None, "the trainer was not started"
        return self._supervisor


def _watch(
    trainer: Trainer, trackers: TrackerProcesses, settings: TrainerSettings, steps: int | None, *, quiet: bool
) -> tuple[int, RunSummary | None]:
    """Show the run until the trainer exits; the summary is None when the run cannot be watched."""
    with contextlib.ExitStack() as watching:
        panel = None
        try:
            bus = watching.enter_context(Bus.connect(settings.nats, name="watch", deadline_s=_CONNECT_S))
            mode = "auto" if trainer.is_logged and not quiet else "quiet"
            folder = settings.run.folder.absolute()
            panel = LivePanel(settings.run.id, bus, total_steps=steps, mode=mode, folder=folder)
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
