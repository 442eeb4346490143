"""When held-out prompts are evaluated: at the start, every so many steps, at the end; does nothing without any."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.protocol.versions import PolicyVersion
from penstock.trainer.eval_settings import EvalSettings
from penstock.trainer.evaluation.evaluate import Evaluator


class EvaluationSchedule:
    """Starts evaluations and waits for them; for the training thread only."""

    def __init__(
        self, evaluator: Evaluator | None, settings: EvalSettings, names: Sequence[str], *, num_steps: int
    ) -> None:
        """``evaluator`` is None for a run without held-out prompts; ``num_steps`` are those of the whole run.

        ``names`` are the sources that are evaluated, each with its own interval in ``settings``.
        """
        self._evaluator = evaluator
        self._settings = settings
        self._names = tuple(names)
        self._num_steps = num_steps
        self._newest: PolicyVersion | None = None  # started last in this session
        self._unfinished: list[str] = []  # sources on which an earlier session began to evaluate the first version

    @property
    def is_enabled(self) -> bool:
        """Whether there are held-out prompts."""
        return self._evaluator is not None

    def is_due_at_start(self, step: int) -> bool:
        """Return True if the weights before the first step are evaluated."""
        return self._evaluator is not None and self._settings.at_start and step == 0

    def is_due(self, step: int) -> bool:
        """Return True if the weights after ``step`` are evaluated, on any source."""
        return bool(self._due(step))

    def _due(self, step: int) -> list[str]:
        """Return the sources that the weights after ``step`` are evaluated on."""
        if self._evaluator is None:
            return []
        if self.is_due_at_start(step) or (step == self._num_steps and self._settings.at_end):
            return list(self._names)
        every = {name: self._settings.of(name).every for name in self._names}
        return [name for name, steps in every.items() if steps > 0 and step % steps == 0]

    def is_newest(self, version: PolicyVersion) -> bool:
        """Return True if the evaluation that was started last is of ``version``."""
        return self._newest == version

    def resume(self, version: PolicyVersion, *, now: PolicyVersion, step: int) -> bool:
        """Continue evaluations of an earlier session; return True if one of the checkpoint's weights is unfinished.

        ``version`` is the number of these weights in the checkpoint, ``now`` in this session.
        """
        if self._evaluator is None:
            return False
        self._unfinished = self._evaluator.resume(version, now=now, step=step)
        return bool(self._unfinished)

    def start(self, version: PolicyVersion, step: int) -> None:
        """Start the evaluations that an earlier session left unfinished, else those that are due; results are reported later."""
        assert self._evaluator is not None
        self._evaluator.start(version, step, self._unfinished or self._due(step))
        self._unfinished = []
        self._newest = version

    def wait_for_newest(self, should_stop: Callable[[], bool]) -> None:
        """Wait until the evaluation that was started last has ended; raises EvaluationFailed."""
        assert self._evaluator is not None
        assert self._newest is not None
        self._evaluator.wait(self._newest, should_stop)

    def wait_for_all(self, should_stop: Callable[[], bool]) -> None:
        """Wait until no evaluation is under way."""
        assert self._evaluator is not None
        self._evaluator.wait_for_all(should_stop)
