"""All processes of one run on this machine; `deploy/train.py` and `deploy/quickstart.py` drive it.

Starts nats-server and the S3 server (unless the run file names others), creates the run's streams,
then starts the reward service, the rollout workers and the trainer at the same time, each a separate
process with a log in ``runs/<id>/logs``. A worker, the reward service, an endpoint or a server that
exits is restarted, and so is a trainer that was killed by a signal, or ended by an error of the hardware that can be
transient (`protocol/hardware_errors.py`): it resumes from the newest checkpoint.
One that keeps exiting ends the run, except a worker while another one runs. A run on a rescored input
(`data.from_run`) has no workers and no reward service, and gets a copy of the input from the store of the run beside it.
When the trainer exits by itself the run is over. All of them stop when this process exits.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.console import launch
from penstock.console.connections import RUN_FILE
from penstock.deploy import local_settings
from penstock.deploy.bootstrap import bootstrap
from penstock.deploy.early_checks import check_engine, check_engine_is_installed, check_inputs, check_metrics_ports
from penstock.deploy.local import LocalStack, connection_environment
from penstock.deploy.placement.run_placement import place_run
from penstock.deploy.processes.child import (
    Child,
    DeployError,
    adopt_orphans,
    end_orphans,
    full_disk,
    release_orphans,
    wait_until,
)
from penstock.deploy.processes.servers import port_is_free
from penstock.deploy.processes.supervise import ProcessEvent, RestartRule, Supervisor, stop_all
from penstock.protocol import seals
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.config.sources import split_arguments
from penstock.protocol.errors import ConfigError
from penstock.protocol.files import read_regular
from penstock.protocol.record import run_folder
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.trainer.algorithm.summary_line import summary_line

TRAINER = "trainer"
REWARD = "reward"
_STOP_GRACE_S = 15.0
_REWARD_DEADLINE_S = 60.0  # until the API of the reward service listens


@dataclass(frozen=True, slots=True)
class Usage:
    """Wall and CPU seconds since the start, of all processes that have exited and of this one."""

    wall_s: float
    cpu_s: float


class LocalRun:
    """All processes of one run. Use it as a context manager, which stops them."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        num_workers: int | None = None,
        reward_files: Sequence[Path] = (),
        environ: Mapping[str, str] | None = None,
        rule: RestartRule | None = None,
        trainer_overrides: Callable[[int], Sequence[str]] = lambda _: (),
        tls: bool = False,
        evaluates: bool = False,
    ) -> None:
        """Check the settings of all services; start nothing. Raises ConfigError, with file and line, also where GPUs do not suffice.

        ``arguments`` are run files and overrides, as every service takes them; each of the Python files ``reward_files`` is
        served as an HTTP endpoint by a process. ``rule`` says when a process that crashes is restarted, ``trainer_overrides``
        gives further overrides for the trainer's n-th session (from 0). ``tls``: servers that are started take encrypted connections
        only. ``num_workers``: None: as the GPUs say, 2 without. ``evaluates``: no trainer follows, so that the engines get its GPUs
        too, and NATS and S3 are started even if the run file names others.
        """
        self._environ = dict(os.environ if environ is None else environ)
        self.placed = place_run(
            arguments, self._environ, role="engines" if evaluates else "both", workers=num_workers, fetch=True
        )
        self._local = local_settings.read_local_settings(
            [*arguments, *self.placed.overrides],
            self._environ,
            num_workers=self.placed.num_workers if num_workers is None else num_workers,
            reward_files=reward_files,
            starts_servers=True if evaluates else None,
            tls=tls,
        )
        self.settings = self._local.trainer
        self.run_id = self.settings.run.id
        self.total_steps = self._local.total_steps
        self.algorithm = summary_line(self.settings.algorithm, max_staleness=self.settings.rollout.max_staleness)
        self.folder = self.settings.run.folder.absolute()
        self.nats: NatsSettings = self._local.connection.nats
        self.s3: S3Settings = self._local.connection.s3
        self._tls = tls
        self._input = self.settings.data.from_run  # then nothing is generated or scored
        self._rule = rule
        self._trainer_overrides = trainer_overrides
        self._num_trainer_sessions = 0
        self._disk_is_full = False
        self._listener: Callable[[ProcessEvent], object] | None = None
        self._stack: LocalStack | None = None
        self._supervisor: Supervisor | None = None
        self._services: list[Child] = []
        self._prepared_trainer: Child | None = None
        self.newest_trainer: Child | None = None
        self._started_at = 0.0
        self._stopped_at: float | None = None
        self._cpu_before = 0.0
        self._lock = contextlib.ExitStack()

    def __enter__(self) -> LocalRun:
        """Start nothing yet: call `start`, or `start_services` and later `start_trainer`."""
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def check(self) -> None:
        """Check what the run reads before anything starts.

        Raises:
            ConfigError: Model, data or rescored input are missing, or the run was begun with another model.
            UnsupportedModel: The workers' engine does not serve the model.
        """
        check_inputs(self.settings)
        if self._input is None:
            check_engine(self.settings, self._local.rollout)
            check_engine_is_installed(self._local.arguments, self._environ)
            check_metrics_ports(self._local.rollout, self._local.num_workers)
        elif self._local.starts_servers:
            local_settings.find_input(self._input, self.folder)

    def start(self) -> None:
        """Start all processes; returns while the services are still starting up.

        Raises PenstockError when a server does not start; no process is left then.
        """
        self.start_services()
        self.start_trainer()

    def start_services(self) -> None:
        self._lock.enter_context(run_folder.hold_lock(self.folder))
        self._lock.enter_context(self.placed.claimed())
        seal_run_file(self._local.arguments, self.folder)
        self.placed.write(self.folder)
        adopt_orphans()
        self._started_at = time.monotonic()
        self._cpu_before = _cpu_s()
        self._supervisor = Supervisor(rule=self._rule, on_event=self._listener)
        try:
            if self._local.starts_servers:
                if self._input is not None:
                    local_settings.copy_input(self._input, self.folder)
                self._stack = LocalStack(self.folder / "store", log_folder=self.folder / "logs", tls=self._tls)
                self._stack.start(self._supervisor)
                self.nats, self.s3 = self._stack.nats, self._stack.s3
            with Bus.connect(self.nats, name="local-run") as bus:
                bootstrap(bus, Blobs(self.s3), self.run_id, self._local.connection.retention.limits())
            self._reward_port_file.unlink(missing_ok=True)
            if self._input is None:
                self._launch(self._reward(), restart=lambda: self._reward().relaunch())
            names = [worker_name(index) for index in range(self._local.num_workers)]
            for index, name in enumerate(names):
                words = launch.module(
                    "penstock.rollout_service",
                    *self._local.arguments,
                    *self._local.worker_overrides,
                    f"worker.id={name}",
                )
                self._launch(self._service(name, words, self.placed.of_worker(index)), replicas=names)
            for child in self._endpoints():
                self._launch(
                    child, is_crash=lambda code, name=child.name: not fails_at_first_start(name, code, self.events)
                )
        except BaseException:
            self.stop()
            raise

    def prepare_trainer(self) -> None:
        """Start a process that imports what the trainer needs and waits until `start_trainer`; for one rank only."""
        if self.settings.trainer.num_ranks == 1:
            self._prepared_trainer = self._trainer(waits=True)
            self._prepared_trainer.start()

    def start_trainer(self) -> None:
        """Start the trainer. It is restarted when a signal or a broken peer ended it; when it exits by itself the run is over."""
        child, self._prepared_trainer = self._prepared_trainer, None
        if child is None or not child.begin():
            child = self._trainer()
        self._launch(child, restart=lambda: self._trainer().relaunch(), is_crash=self._is_trainer_crash)

    def _launch(
        self,
        child: Child,
        *,
        restart: Callable[[], Child] | None = None,
        is_crash: Callable[[int], bool] = lambda _: True,
        replicas: Sequence[str] = (),
    ) -> None:
        self._services.append(child)  # first, so that it is stopped if it cannot be watched
        self._require_supervisor().start(child, restart, is_crash=is_crash, replicas=replicas)

    def wait(self, deadline_s: float | None = None) -> int | None:
        """Wait until the trainer exits and return its exit code; None when ``deadline_s`` passed first.

        Raises DeployError when another process crashed so often that it is not restarted any more.
        """
        supervisor = self._require_supervisor()
        supervisor.child(TRAINER)  # raises when it was not started
        exited = supervisor.wait_exit(deadline_s)
        if exited is None:
            return None
        if not any(event.name == TRAINER and event.kind == "exited" for event in self.events):
            raise exited.failure("could not start")
        return supervisor.child(TRAINER).returncode

    def check_processes(self) -> None:
        """Raise DeployError when a process crashed so often that it is not restarted any more."""
        if (failure := self._require_supervisor().failure) is not None:
            raise failure

    def stop(self) -> None:
        if self._supervisor is not None:
            self._supervisor.close()
            if self._prepared_trainer is not None:
                self._prepared_trainer.kill()
            processes = self._supervisor.processes()
            stop_all([processes.get(child.name, child) for child in self._services], _STOP_GRACE_S)
        if self._stack is not None:
            self._stack.stop()
        end_orphans()
        release_orphans()
        self._lock.close()
        self._stopped_at = self._stopped_at or time.monotonic()

    def kill(self, name: str) -> int:
        """SIGKILL a process and what it started, as a crash or a lost machine would; returns its process id.

        It is recorded in `events` and restarted like after any crash. Raises DeployError for an unknown name.
        """
        child = self._require_supervisor().child(name)
        pid = child.pid
        child.crash()
        return pid

    def listen(self, listener: Callable[[ProcessEvent], object]) -> None:
        """Call ``listener`` for every event from now on, on the supervisor's thread; without one, events are logged."""
        self._listener = listener
        if self._supervisor is not None:
            self._supervisor.on_event = listener

    def on_incident(self, note: Callable[[str], object]) -> None:
        """Call ``note`` for every crash and restart from now on, on the supervisor's thread."""
        self._require_supervisor().on_incident(note)

    @property
    def events(self) -> list[ProcessEvent]:
        return [] if self._supervisor is None else list(self._supervisor.events)

    def processes(self) -> list[Child]:
        return [] if self._supervisor is None else list(self._supervisor.processes().values())

    def new_disk_problem(self) -> str:
        """Return a sentence once when the disk of the run's folder becomes full: then the services wait, and log why."""
        problem = full_disk(self.folder)
        is_new, self._disk_is_full = bool(problem) and not self._disk_is_full, bool(problem)
        return f"{problem}; the services wait for it, see {self.log(TRAINER).parent}" if is_new else ""

    @property
    def usage(self) -> Usage:
        """Wall and CPU time; complete after `stop`, before that without the processes that still run."""
        end = time.monotonic() if self._stopped_at is None else self._stopped_at
        return Usage(wall_s=end - self._started_at, cpu_s=_cpu_s() - self._cpu_before)

    @property
    def reward_url(self) -> str | None:
        """URL of the reward service's API; None until it listens."""
        try:
            return f"http://127.0.0.1:{int(self._reward_port_file.read_text())}"
        except (OSError, ValueError):
            return None

    @property
    def _reward_port_file(self) -> Path:
        return self.folder / launch.REWARD_PORT_FILE

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def log_tail(self, name: str) -> str:
        child = self._require_supervisor().child(name)
        return "\n".join(part for part in (child.log_tail(), full_disk(child.log.parent)) if part)

    def _reward(self) -> Child:
        """Return the reward service; it keeps its port over restarts, because endpoints renew their leases there."""
        extra = [f"reward_service.port_file={self._reward_port_file}"]
        if self._local.chooses_reward_port:
            extra.append(f"reward_service.port={self._last_reward_port()}")
        words = launch.module("penstock.reward_service", *self._local.arguments, *extra)
        return self._service(REWARD, words, self.placed.of_others())

    def _last_reward_port(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            last = int(self._reward_port_file.read_text())
            return last if port_is_free(last) else 0
        return 0

    def _endpoints(self) -> list[Child]:
        if not self._local.reward_files:
            return []
        if not wait_until(lambda: self.reward_url, _REWARD_DEADLINE_S):
            reward = self._require_supervisor().child(REWARD)
            raise reward.failure(f"did not listen within {_REWARD_DEADLINE_S:.0f} s")
        register = ["--register", str(self.reward_url)]
        return [
            self._service(
                endpoint_name(file),
                launch.module("penstock.reward_service", "serve", str(file), *register),
                self.placed.of_others(),
            )
            for file in self._local.reward_files
        ]

    def _trainer(self, *, waits: bool = False) -> Child:
        overrides = self._trainer_overrides(self._num_trainer_sessions)
        self._num_trainer_sessions += 1
        command = launch.trainer_command([*self._local.arguments, *overrides], self._environ)
        if waits:
            command.insert(command.index("train"), "--prepare")
        self.newest_trainer = self._service(TRAINER, command, self.placed.of_trainer(), waits=waits)
        return self.newest_trainer

    def _is_trainer_crash(self, code: int) -> bool:
        return code != 0 and self.newest_trainer is not None and self.newest_trainer.may_continue

    def _service(
        self, name: str, command: Sequence[str], gpus: Mapping[str, str] | None = None, *, waits: bool = False
    ) -> Child:
        stack = None if self._stack is None or self._local.names_keys else self._stack.environment()
        environ = {**self._environ, **(stack or connection_environment(self.nats, self.s3)), **(gpus or {})}
        # else torch uses all cores in every process, and they wait for one another
        num_processes = self.placed.num_processes + self.settings.trainer.num_ranks
        environ.setdefault("OMP_NUM_THREADS", launch.threads_of_process(num_processes))
        return Child(
            name, command, log=self.log(name), environ=environ, death_signal=death_signal(command), waits=waits
        )

    def _require_supervisor(self) -> Supervisor:
        if self._supervisor is None:
            raise DeployError("the run was not started")
        return self._supervisor


def death_signal(command: Sequence[str]) -> signal.Signals:
    """Return the signal for a process whose parent exits: torchrun needs SIGTERM, so that it can stop its ranks."""
    return signal.SIGTERM if "torch.distributed.run" in command else signal.SIGKILL


def fails_at_first_start(name: str, code: int, events: Sequence[ProcessEvent]) -> bool:
    return code > 0 and not any(event.name == name and event.kind == "crashed" for event in events)


def worker_name(index: int) -> str:
    return f"worker-{index}"


def endpoint_name(file: Path) -> str:
    return f"endpoint-{file.stem}"


def _cpu_s() -> float:
    usages = (resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def seal_run_file(arguments: Sequence[str], folder: Path) -> None:
    """Seal the run file that was given if it is the one in the run's folder, so that the console uses the servers it names."""
    path = folder.absolute() / RUN_FILE
    if any(file.absolute() == path for file in split_arguments(arguments)[0]):
        with contextlib.suppress(ConfigError, OSError):  # without a key, or a link: the console asks
            seals.seal(path, read_regular(path))
