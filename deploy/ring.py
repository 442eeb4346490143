"""Everything one run needs, on this machine; `deploy/train_local.py` and `deploy/quickstart.py` drive it.

Starts nats-server and the S3 server (unless the run file names others), creates the run's streams,
then starts the reward service, the rollout workers and the trainer at the same time, each a process
of its own with a log in ``runs/<id>/logs``. A worker, the reward service or a server that dies is
started again; the trainer's end is the end of the ring. Whatever ends this process ends them all.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from console import launch
from deploy.bootstrap import ConnectionSettings, bootstrap
from deploy.child import Child, DeployError, adopt_no_more, adopt_orphans, end_orphans
from deploy.local import LocalStack, connection_environment
from deploy.supervise import ProcessEvent, RestartRule, Supervisor, stop_all
from protocol.connection import NatsSettings, S3Settings
from protocol.errors import ConfigError
from protocol.runfile import load, split_arguments
from protocol.transport.blobs import Blobs
from protocol.transport.bus import Bus
from reward_service.settings import RewardSettings
from rollout_service.settings import RolloutSettings
from trainer.settings import TrainerSettings

TRAINER = "trainer"
REWARD = "reward"
_STOP_GRACE_S = 15.0


@dataclass(frozen=True, slots=True)
class ProcessView:
    """One process of the ring as a panel shows it."""

    name: str
    pid: int
    alive: bool
    num_deaths: int
    log: Path


@dataclass(frozen=True, slots=True)
class Usage:
    """What the ring has cost since its start: wall and CPU seconds of all its ended processes and of this one."""

    wall_s: float
    cpu_s: float


class Ring:
    """All processes of one run. Use it as a context manager, which stops what was started."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        num_workers: int = 2,
        environ: Mapping[str, str] | None = None,
        rule: RestartRule | None = None,
    ) -> None:
        """``arguments`` are run files and overrides, as every service takes them.

        Raises ConfigError, naming file and line, when any of the services would refuse them.
        """
        if num_workers < 1:
            raise ConfigError(f"--workers {num_workers}: a ring needs at least one rollout worker")
        self._arguments = _with_absolute_files(arguments)
        self._environ = dict(os.environ if environ is None else environ)
        files, overrides = split_arguments(self._arguments)
        connection = load(ConnectionSettings, files=files, overrides=overrides, environ=self._environ)
        trainer = load(TrainerSettings, files=files, overrides=overrides, environ=self._environ).settings
        reward = load(RewardSettings, files=files, overrides=overrides, environ=self._environ)
        load(RolloutSettings, files=files, overrides=overrides, environ=self._environ)
        self.run_id = trainer.run.id
        self.total_steps = trainer.trainer.steps
        self.folder = trainer.run.folder.absolute()
        self.nats: NatsSettings = connection.settings.nats
        self.s3: S3Settings = connection.settings.s3
        self._own_servers = _own_servers(connection.origins)
        self._choose_reward_port = reward.origins["reward_service.port"] == "default"
        self._num_workers = num_workers
        self._rule = rule
        self._stack: LocalStack | None = None
        self._supervisor: Supervisor | None = None
        self._services: list[Child] = []
        self._started_at = 0.0
        self._stopped_at: float | None = None
        self._cpu_before = 0.0

    def __enter__(self) -> Ring:
        """Nothing is started yet: say `start`, or `start_services` and later `start_trainer`."""
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything; returns when all processes run (their own start-up goes on in parallel).

        Raises PenstockError when a server does not come up; nothing is left running then.
        """
        self.start_services()
        self.start_trainer()

    def start_services(self) -> None:
        """Start everything but the trainer: the workers load what they need and wait for version 0."""
        adopt_orphans()
        self._started_at = time.monotonic()
        self._cpu_before = _cpu_s()
        self._supervisor = Supervisor(rule=self._rule)
        try:
            if self._own_servers:
                self._stack = LocalStack(self.folder / "store", log_folder=self.folder / "logs")
                self._stack.start(self._supervisor)
                self.nats, self.s3 = self._stack.nats, self._stack.s3
            with Bus.connect(self.nats, name="ring") as bus:
                bootstrap(bus, Blobs(self.s3), self.run_id)
            for child in (*self._workers(), self._reward()):
                self._launch(child, again=child.relaunch)
        except BaseException:
            self.stop()
            raise

    def start_trainer(self) -> None:
        """Start the trainer, whose end is the end of the ring."""
        self._launch(self._trainer(), again=None)

    def _launch(self, child: Child, *, again: Callable[[], Child] | None) -> None:
        child.start()
        self._services.append(child)
        self._require_supervisor().watch(child, again)

    def wait(self, deadline_s: float | None = None) -> int | None:
        """Wait for the trainer to end and return its exit code; None when ``deadline_s`` passed first.

        Raises DeployError when another process died so often that it was given up.
        """
        supervisor = self._require_supervisor()
        trainer = supervisor.child(TRAINER)

        def has_ended() -> bool:
            return supervisor.failure is not None or any(e.name == TRAINER and e.kind == "ended" for e in self.events)

        if not supervisor.wait_for(has_ended, deadline_s):
            return None
        if supervisor.failure is not None:
            raise supervisor.failure
        return trainer.returncode

    def stop(self) -> None:
        """End all processes, services first, and reap what they left; idempotent."""
        if self._supervisor is not None:
            self._supervisor.close()
            processes = self._supervisor.processes()
            stop_all([processes.get(child.name, child) for child in self._services], _STOP_GRACE_S)
        if self._stack is not None:
            self._stack.stop()
        end_orphans()
        adopt_no_more()
        self._stopped_at = self._stopped_at or time.monotonic()

    def kill_worker(self, index: int) -> int:
        """SIGKILL a worker and its engine, as a crash or a lost machine would; returns its process id.

        It is noticed, written down in `events` and started again like any other death.
        """
        worker = self._require_supervisor().child(worker_name(index))
        pid = worker.pid
        worker.crash()
        return pid

    @property
    def events(self) -> list[ProcessEvent]:
        """What happened to the processes so far, oldest first."""
        return [] if self._supervisor is None else list(self._supervisor.events)

    def processes(self) -> list[ProcessView]:
        """Return the current state of every process."""
        if self._supervisor is None:
            return []
        deaths = [event.name for event in self.events if event.kind == "died"]
        return [
            ProcessView(name, child.pid, child.alive, deaths.count(name), child.log)
            for name, child in self._supervisor.processes().items()
        ]

    @property
    def usage(self) -> Usage:
        """What it has cost; complete after `stop`, before that without the processes that still run."""
        end = time.monotonic() if self._stopped_at is None else self._stopped_at
        return Usage(wall_s=end - self._started_at, cpu_s=_cpu_s() - self._cpu_before)

    @property
    def reward_url(self) -> str | None:
        """Where the reward service's API listens; None until it does."""
        try:
            return f"http://127.0.0.1:{int(self._reward_port_file.read_text())}"
        except (OSError, ValueError):
            return None

    @property
    def _reward_port_file(self) -> Path:
        return self.folder / "reward.port"

    def log(self, name: str) -> Path:
        """Return the log file of a process."""
        return self.folder / "logs" / f"{name}.log"

    def log_tail(self, name: str) -> str:
        """Return the last lines of a process's log, indented; raises DeployError for an unknown name."""
        return self._require_supervisor().child(name).log_tail()

    def _workers(self) -> list[Child]:
        return [
            self._service(
                worker_name(index),
                launch.module("rollout_service", *self._arguments, f"worker.id={worker_name(index)}"),
            )
            for index in range(self._num_workers)
        ]

    def _reward(self) -> Child:
        self._reward_port_file.unlink(missing_ok=True)
        extra = [f"reward_service.port_file={self._reward_port_file}"]
        if self._choose_reward_port:
            extra.append("reward_service.port=0")
        return self._service(REWARD, launch.module("reward_service", *self._arguments, *extra))

    def _trainer(self) -> Child:
        command = launch.train(self._arguments, self._environ)
        # torchrun must be asked, so that it can end its ranks; a single process needs no asking
        by_torchrun = "torch.distributed.run" in command
        return self._service(TRAINER, command, death_signal=signal.SIGTERM if by_torchrun else signal.SIGKILL)

    def _service(self, name: str, command: Sequence[str], *, death_signal: int = signal.SIGKILL) -> Child:
        environ = {**self._environ, **connection_environment(self.nats, self.s3)}
        # torch takes all cores in every process otherwise, and they wait for one another
        environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // (self._num_workers + 1))))
        return Child(name, command, log=self.log(name), environ=environ, death_signal=death_signal)

    def _require_supervisor(self) -> Supervisor:
        if self._supervisor is None:
            raise DeployError("the ring was not started")
        return self._supervisor


def worker_name(index: int) -> str:
    """Return the name of a worker: its id in messages, its log, its process."""
    return f"worker-{index}"


def _own_servers(origins: Mapping[str, str]) -> bool:
    given = [key for key in ("nats.url", "s3.endpoint") if origins[key] != "default"]
    if len(given) == 1:
        missing = "s3.endpoint" if given == ["nats.url"] else "nats.url"
        raise ConfigError(
            f"{origins[given[0]]}: {given[0]} is given but {missing} is not: name both servers, "
            "or none to have them started here"
        )
    return not given


def _with_absolute_files(arguments: Sequence[str]) -> list[str]:
    files, overrides = split_arguments(arguments)
    return [*(str(file.absolute()) for file in files), *overrides]


def _cpu_s() -> float:
    usages = (resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
