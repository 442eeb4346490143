"""The loop of a training on given answers: steps, validations, checkpoints, the result; the same call on every rank.

    resume ─▶ ( step ─▶ validate when due ─▶ checkpoint when due ) × num_steps ─▶ validate ─▶ write the result

A step uses the next positions of the data's order, which follows from the seed, so a checkpoint holds the number of steps and
no list of rows: a resumed training makes the same steps as one that was never interrupted.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog

from penstock.fine_tuning import training_folder
from penstock.fine_tuning.session import Plan, section_of
from penstock.fine_tuning.training_folder import (
    BackgroundCheckpoints,
    Result,
    TrainingFolder,
    TrainingState,
    move_result,
    write_result,
)
from penstock.trainer.commit import CheckpointSchedule
from penstock.trainer.data.pairs import PairSet
from penstock.trainer.data.turns import TurnSet
from penstock.trainer.errors import TrainingDiverged
from penstock.trainer.learner.policy import Policy
from penstock.trainer.learner.step_metrics import StepMetrics
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.ranks import Ranks
from penstock.trainer.settings import TrainerSettings
from penstock.trainer.telemetry.metrics import layer_fields

log = structlog.get_logger("trainer.fine_tuning")

progress_log = structlog.get_logger("trainer.progress")
_LINES_PER_JOB = 10
R = TypeVar("R", TurnSet, PairSet)


@dataclass(frozen=True, slots=True)
class Best:
    step: int | None = None
    loss: float = math.inf
    num_since: int = 0  # validations since then

    def after(self, step: int, loss: float) -> Best:
        """Return the state after another validation; raises TrainingDiverged for a loss that is no number."""
        if not math.isfinite(loss):
            raise TrainingDiverged(
                f"the validation loss after step {step} is {loss}; lower the learning rate, and start again from the last "
                "checkpoint, or with trainer.resume=false from the beginning"
            )
        return Best(step, loss) if loss < self.loss else replace(self, num_since=self.num_since + 1)

    def ends(self, limit: int) -> bool:
        """Return True if ``limit`` validations in a row were not better; never for 0."""
        return 0 < limit <= self.num_since


@dataclass(frozen=True, slots=True)
class Made:
    metrics: StepMetrics
    num_tokens: int  # trained
    reported: Mapping[str, float]  # further fields of the step's line


class Task(ABC, Generic[R]):
    """What is trained, on which rows; every method is called on all ranks."""

    changed_config: Mapping[str, Any] | None = None  # what differs in the result's config.json from that of model.path

    def __init__(
        self, policy: Policy, rows: R, held_out: R | None, settings: TrainerSettings, dims: ParallelDims
    ) -> None:
        self.policy, self.rows, self.held_out = policy, rows, held_out
        self.settings, self.dims = settings, dims
        self.budget_tokens = settings.trainer.micro_batch_tokens  # of a micro-batch

    @abstractmethod
    def step(self, rows: Sequence[int]) -> Made: ...

    @abstractmethod
    def validate(self) -> Mapping[str, float]:
        """Return metrics of the held-out rows, among them ``loss``."""


def train(
    settings: TrainerSettings,
    ranks: Ranks,
    stop: threading.Event,
    name: str,
    open_rows: Callable[[TrainerSettings, Sequence[Path], ParallelDims], R],
    open_task: Callable[[Plan, R, R | None], Task[R]],
) -> Result | None:
    """Train ``model.path`` on the rows of the section ``name`` on every rank; None if ``stop`` was set first."""
    dims, section = ParallelDims(ranks, settings.trainer.layout), section_of(settings, name)
    place = settings.run.folder / f"{name}-training"
    with closing(TrainingFolder(place)) if dims.writes_files else nullcontext() as folder:  # before anything is loaded
        if folder is not None:
            folder.write_settings(settings.model_dump(mode="json", include={"run", "model", "data", "trainer", name}))
        rows = open_rows(settings, section.files or settings.data.train_files, dims)
        held_out = open_rows(settings, section.eval_files, dims) if section.eval_files else None
        plan = Plan(settings, name, dims, rows, held_out)
        return Training(plan, open_task(plan, rows, held_out), folder, stop).run()


class Training:
    def __init__(self, plan: Plan, task: Task[Any], folder: TrainingFolder | None, stop: threading.Event) -> None:
        """Hold the parts; ``folder`` is that of rank 0, None on the others. ``stop`` asks for a checkpoint and an end."""
        self._plan, self._task, self._folder = plan, task, folder
        self._stop = stop
        self._dims = plan.dims
        self._best = Best()
        self._step = 0
        self._validated_at = -1
        self._num_tokens = 0
        self._seconds = 0.0
        self._losses: list[float] = []  # the first and the last
        self._progress = ProgressLine(plan.name, plan.length.num_steps)
        every, trainer = plan.section.checkpoint_every or plan.length.num_steps + 1, plan.settings.trainer
        self._schedule = CheckpointSchedule(every_steps=every, every_s=trainer.checkpoint_every_s, now=time.monotonic())
        self._checkpoints = BackgroundCheckpoints(
            task.policy, plan.dims, keep=trainer.keep_checkpoints, on_committed=self._schedule.committed
        )
        self._newest_state: TrainingState | None = None  # of the checkpoint that was begun last (rank 0)

    def run(self) -> Result | None:
        """Train to the end and write the result; None if a stop or a pause was requested first, with everything in a checkpoint."""
        try:
            return self._run()
        finally:
            self._checkpoints.thread.close()

    def _run(self) -> Result | None:
        self._resume()
        is_over, every = self._best.ends(self._plan.section.early_stop), self._plan.section.eval_every
        while self._step < self._plan.length.num_steps and not is_over:
            self._make_step()
            if self._task.held_out is not None and every > 0 and self._step % every == 0:
                is_over = self._validate()
            if self._step < self._plan.length.num_steps and not is_over and self._checkpoint_or_stop():
                return None
        if self._task.held_out is not None and self._validated_at != self._step:
            self._validate()
        return self._write_result()

    def _make_step(self) -> None:
        started = time.monotonic()
        positions = self._plan.length.positions(self._step)
        made = self._task.step([self._plan.order.at(position).prompt for position in positions])
        self._step += 1
        seconds = time.monotonic() - started
        self._seconds += seconds
        self._num_tokens += made.num_tokens
        self._losses = [*self._losses[:1], made.metrics.loss]
        if self._folder is not None:
            self._report(self._folder, made, seconds)

    def _report(self, folder: TrainingFolder, made: Made, seconds: float) -> None:
        metrics = made.metrics
        speed = self._num_tokens / max(self._seconds, 1e-9)
        fields = {
            "step": self._step, "epoch": self._plan.length.epoch_after(self._step), "loss": metrics.loss,
            "grad_norm": metrics.grad_norm, "lr": metrics.lr, "tokens_trained": made.num_tokens, **made.reported,
            **layer_fields(metrics.layers),
            "step_s": seconds,
        }  # fmt: skip
        folder.write("step", fields)
        accuracy = made.reported.get("rewards/accuracies")
        shown = {} if accuracy is None else {"accuracies": accuracy}
        self._progress.show(self._step, loss=metrics.loss, **shown, lr=metrics.lr, tokens_per_s=speed)

    def _validate(self) -> bool:
        started = time.monotonic()
        metrics = self._task.validate()
        self._validated_at = self._step
        self._best = self._best.after(self._step, metrics["loss"])
        is_best = self._best.step == self._step
        ends = self._best.ends(self._plan.section.early_stop)
        if self._folder is not None:
            fields = {f"eval_{name}": value for name, value in metrics.items()}
            self._folder.write(
                "eval", {"step": self._step, **fields, "is_best": is_best, "eval_s": time.monotonic() - started}
            )
            shown = {name: round(value, 6) for name, value in fields.items()}
            log.info("validated", step=self._step, **shown, best_step=self._best.step)
        if is_best and self._plan.section.keep_best:
            self._export(self._best_folder())
        if ends and self._step < self._plan.length.num_steps and self._folder is not None:
            log.info("stopped early", step=self._step, best_step=self._best.step, best_loss=self._best.loss)
        return ends

    def _checkpoint_or_stop(self) -> bool:
        """Begin a checkpoint when rank 0 says so; returns True if the training is to stop, after waiting for it."""
        started = time.monotonic()
        choice = None
        if self._folder is not None:
            self._checkpoints.thread.check()
            stops = self._stop.is_set() or self._folder.is_pause_requested
            is_due = self._schedule.is_due(self._step, started, is_writing=self._checkpoints.thread.is_busy)
            if is_due or stops:
                self._wait_for_checkpoint(self._folder)  # before any rank makes its next copy
            choice = [is_due, stops]
        is_due, stops = self._dims.ranks.broadcast(choice)
        if is_due or stops:
            self._newest_state = None if self._folder is None else self._state(self._folder)
            root = None if self._folder is None else self._folder.checkpoints
            self._checkpoints.begin(root, self._newest_state)
            self._schedule.written(started=started, now=time.monotonic())
        if stops and self._folder is not None:
            self._wait_for_checkpoint(self._folder)
        return stops

    def _wait_for_checkpoint(self, folder: TrainingFolder) -> None:
        self._checkpoints.thread.wait()
        if self._newest_state is not None:
            folder.keep_best({step for step in (self._newest_state.best_step, self._best.step) if step is not None})

    def _state(self, folder: TrainingFolder) -> TrainingState:
        return TrainingState(
            step=self._step,
            num_ranks=self._dims.ranks.num_ranks,
            settings=dict(self._plan.fixed),
            data=dict(self._plan.data),
            metrics_bytes=folder.metrics_bytes,
            best_step=self._best.step,
            best_loss=None if self._best.step is None else self._best.loss,
            num_since_best=self._best.num_since,
            num_tokens=self._num_tokens,
            seconds=self._seconds,
            first_loss=self._losses[0] if self._losses else None,
            last_loss=self._losses[-1] if self._losses else None,
        )

    def _resume(self) -> None:
        checkpoint: list[str] | None = None
        if self._folder is not None:
            newest = self._newest(self._folder)
            self._folder.rewind(newest[1].metrics_bytes if newest else 0)
            checkpoint = [] if newest is None else [str(newest[0].absolute()), newest[1].model_dump_json()]
        place = self._dims.ranks.broadcast(checkpoint)
        if not place:
            return
        state = TrainingState.model_validate_json(place[1])
        self._task.policy.load(Path(place[0]))
        self._step, self._num_tokens, self._seconds = state.step, state.num_tokens, state.seconds
        self._best = Best(
            state.best_step, math.inf if state.best_loss is None else state.best_loss, state.num_since_best
        )
        self._losses = [loss for loss in (state.first_loss, state.last_loss) if loss is not None]
        if self._folder is not None:
            log.info(
                "resumed",
                step=self._step,
                of=self._plan.length.num_steps,
                checkpoint=place[0],
                ranks_before=state.num_ranks,
            )

    def _newest(self, folder: TrainingFolder) -> tuple[Path, TrainingState] | None:
        if not self._plan.settings.trainer.resume:
            training_folder.remove_all(folder.checkpoints)
            return None
        newest = training_folder.newest(folder.checkpoints)
        if newest is not None:
            training_folder.check_same(newest[1], newest[0], settings=self._plan.fixed, data=self._plan.data)
        return newest

    def _best_folder(self) -> Path | None:
        return None if self._folder is None or self._best.step is None else self._folder.best(self._best.step)

    def _export(self, folder: Path | None) -> None:
        settings, task = self._plan.settings, self._task
        verify = settings.trainer.verify_export
        write_result(
            task.policy, self._dims, folder, like=settings.model.path, changed=task.changed_config, verify=verify
        )

    def _write_result(self) -> Result:
        plan = self._plan
        if self._folder is not None:
            self._checkpoints.thread.wait()
        uses_best = plan.section.keep_best and self._best.step != self._step
        best = self._best_folder()
        if not uses_best:
            self._export(plan.output if self._folder is not None else None)
        elif best is not None:
            move_result(best, plan.output)
        step = self._best.step if uses_best and self._best.step is not None else self._step
        result = Result(plan.output, self._step, step, self._num_tokens, self._losses[0], self._losses[-1])
        if self._folder is not None:
            log.info("written", folder=str(plan.output), weights_of_step=step)
            self._folder.keep_best(())
            self._folder.finish({**asdict(result), "folder": str(plan.output.absolute())})
            training_folder.remove_all(self._folder.checkpoints)
        return result


class ProgressLine:
    def __init__(self, job: str, num_steps: int) -> None:
        self._job, self._num_steps = job, num_steps
        self._rewrites = sys.stderr.isatty()
        self._started = time.monotonic()

    def show(self, step: int, **metrics: float | str) -> None:
        last = step == self._num_steps
        if self._rewrites:
            left_s = (time.monotonic() - self._started) / max(step, 1) * (self._num_steps - step)
            shown = metrics if last else {**metrics, "eta": f"{left_s:.0f} s"}
            text = " ".join(f"{name} {_short(value)}" for name, value in shown.items())
            sys.stderr.write(f"\r\x1b[K{self._job} {step}/{self._num_steps} {text}" + ("\n" if last else ""))
            sys.stderr.flush()
        elif last or step % max(1, self._num_steps // _LINES_PER_JOB) == 0:
            progress_log.info(self._job, step=step, of=self._num_steps, **{k: _rounded(v) for k, v in metrics.items()})


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _rounded(value: float | str) -> float | str:
    return value if isinstance(value, str) else float(_short(value))
