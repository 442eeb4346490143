"""Run the trainer with optimizer steps that take the time of their tokens, asleep: for `benchmarks.asynchrony`.

    python -m tests.rigs.simulated_trainer RUN.TOML [SECTION.KEY=VALUE ...]

The trainer's own loop, issuer, collector, batcher, plan, record, publication and checkpoints run as always. Of a batch only
one trajectory is trained, so that every version has other weights; the rest of the step's time is slept.
`PENSTOCK_SIMULATED_STEP` is JSON: ``token_s``, seconds of a sampled token, ``step_s``, seconds of a step besides, and
``trace``, the file that gets a line for every step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from penstock.trainer.__main__ import main
from penstock.trainer.learner.learner import Learner
from penstock.trainer.learner.step_metrics import StepMetrics
from penstock.trainer.learner.step_plan import ReadyGroup, StepPlan, groups_of

VARIABLE = "PENSTOCK_SIMULATED_STEP"


def simulate_steps(trace: Path, *, token_s: float, step_s: float) -> None:
    compute = Learner._learn

    def learn(
        self: Learner, plan: StepPlan, ready: Iterable[ReadyGroup], keep_rows: int, *, measures: bool = False
    ) -> StepMetrics:
        started = time.monotonic()
        arrived = list(ready)
        groups = groups_of(plan, 0, arrived, self._packs)
        row = plan.micro_batches[0][0][0]
        metrics = compute(self, replace(plan, micro_batches=(((row,),),)), arrived, keep_rows, measures=measures)
        lengths = [
            sum(run.end - run.start for run in trajectory.version_runs)
            for group in groups.values()
            for trajectory in group.trained_rows
        ]
        time.sleep(max(0.0, started + step_s + token_s * sum(lengths) - time.monotonic()))
        with trace.open("a") as lines:
            lines.write(json.dumps({"started": started, "ended": time.monotonic(), "lengths": lengths}) + "\n")
        return metrics

    Learner._learn = learn


if __name__ == "__main__":
    chosen = json.loads(os.environ[VARIABLE])
    simulate_steps(Path(chosen["trace"]), token_s=chosen["token_s"], step_s=chosen["step_s"])
    sys.exit(main(["train", *sys.argv[1:]]))
