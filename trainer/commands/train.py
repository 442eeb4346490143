"""`python -m penstock.trainer train run.toml [overrides]`: one rank of the trainer, from a run file to an exit code."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence

import structlog

from penstock.protocol import logs
from penstock.protocol.config.run_file import Loaded, config_document, load, split_arguments
from penstock.protocol.errors import BlobStoreUnreachable, BusUnreachable, PenstockError
from penstock.protocol.process_end import error_text
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.trainer.algorithm.summary_line import summary_line
from penstock.trainer.commands.run_command import explained, stop_on_signals
from penstock.trainer.data.data_order import with_steps
from penstock.trainer.data.inputs import resolve_inputs
from penstock.trainer.learner.gguf_model import with_model_folders
from penstock.trainer.recovery import resume_checks
from penstock.trainer.recovery.lease import LeaseWatch, Unchanged
from penstock.trainer.recovery.resume_checks import check_same_model, check_same_ranks
from penstock.trainer.settings import TrainerSettings

log = structlog.get_logger("trainer")

ERROR = 2  # exit code of an error that is explained on stderr
OUTAGE = 75  # the same while NATS or the object store does not answer (EX_TEMPFAIL): a later start resumes the run
_PROBE_S = 5.0


def main(arguments: Sequence[str]) -> int:
    """Train; returns 0, also for a run that is finished already, 130 or 143 after a signal, 2 for an error explained on stderr.

    75 is the exit code while NATS or the object store does not answer.
    """
    files, overrides = split_arguments(arguments)
    loaded = load(TrainerSettings, files=files, overrides=overrides, environ=os.environ)
    logs.configure("trainer")
    settings = with_model_folders(resolve_inputs(loaded.settings))
    # The run record names the files, not an id whose content may change, and the steps that epochs make.
    loaded = with_steps(Loaded(settings, loaded.origins))
    settings = loaded.settings
    check_same_model(settings.run.folder, settings.model.path)
    check_same_ranks(settings.run.folder, settings.trainer.num_ranks)
    if finished := resume_checks.finished_notice(settings):
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"{finished}\n")
        return 0
    if os.environ.get("RANK", "0") != "0":  # rank 0 holds the lease
        return _train(loaded, lambda: None)
    try:
        with LeaseWatch(lambda: Bus.connect(settings.nats, name="trainer-lease"), settings.run.id) as watch:
            return _train(loaded, watch.end)
    except BusUnreachable as err:
        sys.stderr.write(error_text(f"{err}\n"))
        return OUTAGE


def _train(loaded: Loaded[TrainerSettings], watched: Callable[[], Unchanged | None]) -> int:
    settings = loaded.settings
    gc.disable()  # until `process_memory.end_start`
    from penstock.trainer.assemble import train  # noqa: PLC0415  run file errors are reported without importing torch
    from penstock.trainer.ranks import Ranks  # noqa: PLC0415

    ranks = Ranks()
    stop = threading.Event()
    code = 0
    signals = stop_on_signals(stop, is_leader=ranks.is_leader)
    if ranks.is_leader:
        log.info(
            "algorithm chosen", algorithm=summary_line(settings.algorithm, max_staleness=settings.rollout.max_staleness)
        )
    config = (json.dumps(config_document(loaded), indent=1) + "\n").encode()
    try:
        train(settings, config, ranks, stop, watched, environ=os.environ)
        code = 128 + signals[0] if signals else 0
    except Exception as err:
        text = explained(err)
        log.debug("run failed", exc_info=True)
        sys.stderr.write(text)
        code = OUTAGE if ranks.is_leader and _is_outage(settings) else ERROR
    ranks.leave(code)
    return code


def _is_outage(settings: TrainerSettings) -> bool:
    try:
        Bus.connect(settings.nats, name="trainer-probe", deadline_s=_PROBE_S).close()
        Blobs(settings.s3).check(settings.run.id, deadline_s=_PROBE_S)
    except (BusUnreachable, BlobStoreUnreachable):
        return True
    except PenstockError:
        return False
    return False
