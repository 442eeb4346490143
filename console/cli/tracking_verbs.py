"""The verbs that write metrics: `penstock track` to trackers, `penstock log` to a run."""

from __future__ import annotations

import os
from typing import Annotated

from penstock.console.cli.verb_parts import INSPECT
from penstock.protocol.command_line import Help, RunArguments, RunName, application, typed

app = application()  # its verbs are top-level verbs of `penstock`


@app.command(group=INSPECT)
def track(
    run: RunName,
    *arguments: RunArguments,
    once: Annotated[bool, Help("Write what is there and exit, instead of waiting for the end of the run.")] = False,
) -> int:
    """Write a run's metrics to experiment trackers, from where they stopped until the run ends.

    `penstock train` does it too when its run file sets trackers. Each tracker is written by a process of its own, which
    affects neither the run nor the other trackers. Without tracker=, those that the run was started with.

    Example:  penstock track quickstart tracker=tensorboard
              penstock track my-run 'tracker=["wandb", "mlflow"]' tracking.project=gsm8k
    Then:     tensorboard --logdir runs/quickstart/trackers/tensorboard
    """
    from penstock.console.record import stored_run
    from penstock.console.tracking import trackers

    stored_run.ensure_local_servers(run, arguments, os.environ, typed(), finished_only=not once)
    return trackers.track(run, arguments, os.environ, once=once)


@app.command(group=INSPECT)
def log(run: RunName, *arguments: RunArguments, step: Annotated[int, Help("Optimizer step of the figures.")]) -> int:
    """Add figures of another trainer to a run's metrics: they go where the run's own go, to its trackers.

    The run needs its streams: penstock bootstrap run.id=RUN. From Python: penstock.MetricsLog.

    Example:  penstock log my-run --step 100 train/loss=0.31 eval/accuracy=0.74
    Then:     penstock track my-run tracker=wandb
    """
    from penstock.console.tracking.metrics_log import log_once

    return log_once(run, step, arguments)
