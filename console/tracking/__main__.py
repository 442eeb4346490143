"""``python -m penstock.console.tracking RUN LABEL``: the process that writes one run to one of its trackers.

Ends with 0 when the run has ended and all is written, or when it was stopped; with 2 for an error that is explained;
with 1 when the tracker's library failed: then it may be started again, and resumes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from penstock.console.connections import NamedRun
from penstock.console.evaluation_results import FOLDER as EVALUATIONS
from penstock.console.report import curves
from penstock.console.tracking import consumer
from penstock.console.tracking.consumer import Consumer, Job
from penstock.console.tracking.interface import TRACKERS, Destination
from penstock.console.tracking.sources import EvaluationLog, Events, RunStream, TrainingLog
from penstock.console.tracking.trackers import EXPLAINED_CODE, TrackSettings, load_settings
from penstock.protocol import logs
from penstock.protocol.command_line import RunArguments, program
from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.process_end import error_text
from penstock.protocol.transport.bus import Bus

_CONNECT_S = 60.0
_PARENT_POLL_S = 0.5


def write(
    run: str,
    label: str,
    *arguments: RunArguments,
    once: bool = False,
    await_report: bool = False,
    parent: int | None = None,
    training: str = "",
    folder: Path | None = None,
) -> int:
    """Write the run, its ``training`` on given answers (sft, dpo, rm) or the ``evaluations`` in a folder; returns the exit code.

    Ends when the process ``parent``, which started this one, has ended.
    """
    logs.configure(f"tracker-{label}", level="warning")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    if parent is not None:
        threading.Thread(target=_stop_with_parent, args=(parent, stop), daemon=True).start()
    try:
        settings = load_settings(run, arguments, os.environ)
        job = _job(settings, label, arguments, once=once, awaits_report=await_report, training=training, own=folder)
        with consumer.opened(job.folder, label) as file, _opened_events(settings, job, training, stop) as events:
            done = Consumer(job, events, file, stop).work()
    except PenstockError as err:
        print(error_text(f"penstock track: {label}: {err}"), file=sys.stderr)
        return EXPLAINED_CODE if isinstance(err, ConfigError) else 1
    repeated = f", {done.num_repeated} repeated after a resume left out" if done.num_repeated else ""
    print(f"{label}: {done.num_rows} rows written{repeated}", file=sys.stderr)
    return 0


def _stop_with_parent(parent: int, stop: threading.Event) -> None:
    """Have the writing stop once the parent has ended, even by SIGKILL, so that no writer outlives its `penstock track`."""
    while os.getppid() == parent and not stop.wait(_PARENT_POLL_S):
        pass
    stop.set()


@contextmanager
def _opened_events(settings: TrackSettings, job: Job, training: str, stop: threading.Event) -> Iterator[Events]:
    if training:
        kind = EvaluationLog if training == EVALUATIONS else TrainingLog
        yield kind(job.folder, job.run_id, stop)
        return
    with Bus.connect(settings.nats, name="track", deadline_s=_CONNECT_S) as bus:
        yield RunStream(bus, job.run_id)


def _job(
    settings: TrackSettings,
    label: str,
    arguments: Sequence[str],
    *,
    once: bool,
    awaits_report: bool,
    training: str = "",
    own: Path | None = None,
) -> Job:
    tracker = next((candidate for candidate in settings.tracker if candidate.label == label), None)
    if tracker is None:
        raise ConfigError(f'no tracker {label} is set; set tracker = ["{label}"], or a table [[tracker]] with its type')
    kind = TRACKERS.find(tracker.type).value
    logs.configure(f"tracker-{kind.name}", level="warning")  # a kind by import path has a name of its own
    kind.require_installed()
    shared = settings.tracking
    run_id = settings.run.id
    name = (own or curves.training_folder(Path(), training)).name if training else ""  # a run may have all of them
    folder = (own or settings.run.folder / name).absolute()
    chosen = tracker.folder or (shared.folder / run_id / name / label if shared.folder else None)
    destination = Destination(
        run_id=run_id,
        project=tracker.project or shared.project,
        name=tracker.name or shared.name or "-".join(filter(None, (run_id, training))),
        folder=(chosen or folder / "trackers" / label).absolute(),
        is_folder_chosen=chosen is not None,
        group=shared.group,
        entity=shared.entity,
        tags=shared.tags,
        options=tracker.options,
    )
    return Job(
        run_id=run_id,
        folder=folder,
        open=kind.open,
        destination=destination,
        read_samples=(lambda: consumer.read_samples(NamedRun(run_id, arguments), shared.samples))
        if shared.samples and not training
        else None,
        once=once,
        awaits_report=awaits_report,
        on_read=lambda: consumer.read_marker(folder, label).touch(),
    )


main = program("penstock track", write)


if __name__ == "__main__":
    sys.exit(main())
