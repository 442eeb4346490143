"""A local run whose services are forked from processes that have imported them, for tests that start or kill many of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.forked import ForkedProcess
from tests.trainer.learner.forks import ForkedTrainer

from penstock.deploy.local_run import LocalRun
from penstock.deploy.processes.child import Child

_TRAINER = "penstock.trainer"
_PRELOADED = {"penstock.reward_service": ("penstock.reward_service.service",), "penstock.rollout_service": ()}


class ForkedService(Child):
    def _popen(self) -> Any:
        module, *arguments = self.command[self.command.index("-m") + 1 :]
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        environ = dict(self._environ or {})
        if module == _TRAINER:
            return ForkedTrainer(arguments, log=self.log, environ=environ)
        return ForkedProcess(
            f"{module}.__main__", *_PRELOADED[module],
            arguments=arguments, log=self.log, environ=environ, new_session=True,
        )  # fmt: skip


class ForkedRun(LocalRun):
    """Starts trainer, workers, reward service and endpoints so that each costs a tenth of what a new interpreter does."""

    def _service(
        self, name: str, command: Sequence[str], gpus: Mapping[str, str] | None = None, *, waits: bool = False
    ) -> Child:
        made = super()._service(name, command, gpus, waits=waits)
        assert not waits
        return ForkedService(name, made.command, log=made.log, environ=made._environ)
