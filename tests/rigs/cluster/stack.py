"""NATS of three servers, S3, trainer, reward service and workers, each on its host, with TLS and the roles' logins."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.rigs.cluster.network import GUEST, NATS, REWARD, S3, TRAINER, WORKERS, Network

from penstock.deploy import certificates
from penstock.deploy.make_secrets import make_secrets
from penstock.deploy.nats_config import nats_config
from penstock.deploy.processes.child import Child, DeployError, wait_until
from penstock.deploy.processes.servers import Certificate, S3Server, find_program
from penstock.deploy.processes.supervise import ProcessEvent, RestartRule, Supervisor
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.transport.bus import Bus

_READY_S = 90.0
_S3_PORT = 9000
_CLOCK = Path(__file__).with_name("clock.c")
_RULE = RestartRule(max_crashes=1000)  # they are killed on purpose


class ClusterS3(S3Server):
    """The S3 server of `penstock up`, on its host."""

    def __init__(self, folder: Path, network: Network, secret_key: str, certificate: Certificate) -> None:
        super().__init__(folder / "s3", log=folder / "logs" / "s3.log", secret_key=secret_key, certificate=certificate)
        self._network = network
        self.port = _S3_PORT

    @property
    def settings(self) -> S3Settings:
        address = self._network.addresses[S3]
        return super().settings.model_copy(update={"endpoint": f"https://{address}:{_S3_PORT}"})

    def _new_child(self) -> Child:
        child = super()._new_child()
        child.name = S3
        command = [one.replace(f"127.0.0.1:{_S3_PORT}", f"0.0.0.0:{_S3_PORT}") for one in child.command]
        child.command = [*self._network.inside(S3), *command]
        return child

    def _check_port_is_free(self) -> None:
        """No other process is in the namespace."""

    def _ready(self) -> bool:
        try:
            socket.create_connection((self._network.addresses[S3], _S3_PORT), timeout=2.0).close()
        except OSError:
            return False
        return True


class Stack:
    """All processes of one run; use it as a context manager. ``events`` has each crash and restart."""

    def __init__(self, folder: Path, network: Network, run_file: Path, *, skews: bool) -> None:
        """``skews``: clocks can be set, which needs a C compiler."""
        self.folder, self.network, self._run_file = folder, network, run_file
        self._shim = build_clock(folder) if skews else None
        self._secrets = folder / "secrets"
        self._certificates = folder / "certificates"
        hosts = [network.addresses[name] for name in NATS]
        make_secrets(self._secrets, [f"{address}:6222" for address in hosts])
        names = [*(("nats", address) for address in hosts), ("s3", network.addresses[S3])]
        certificates.write_certificates(self._certificates, names=names)
        self._signing_key, self._trusted_keys = certificates.signing_key(self._certificates)
        self.supervisor = Supervisor(rule=_RULE, on_event=lambda _: None)
        secret_key = (self._secrets / "s3_secret_key").read_text().strip()
        self._s3 = ClusterS3(folder, network, secret_key, certificates.certificate(self._certificates, "s3"))

    def __enter__(self) -> Stack:
        """Start the servers, create the run's streams, start the services."""
        for name in NATS:
            self._watch(self._nats_server(name))
        self._s3.start()
        self.supervisor.watch(self._s3.child, self._s3.relaunch)
        for name in NATS:
            self._wait(f"{name} to answer", lambda name=name: _answers(self.network.addresses[name]))
        done = self.penstock("bootstrap", str(self._run_file), role="admin")
        if done.wait(_READY_S):
            raise done.failure("did not create the run's streams")
        self._watch(self.service(REWARD, "reward", "service", str(self._run_file), "reward_service.port=0"))
        for name in WORKERS:
            self._watch(self.worker(name))
        self._watch(self.service(TRAINER, "train", str(self._run_file)))
        return self

    def __exit__(self, *_: object) -> None:
        self.supervisor.close()
        children = self.supervisor.processes()
        for name in (TRAINER, *WORKERS, GUEST, REWARD, S3, *NATS):
            if name in children:
                children[name].kill()

    @property
    def events(self) -> list[ProcessEvent]:
        return self.supervisor.events

    def login(self, role: str) -> NatsSettings:
        return NatsSettings(
            url=",".join(f"tls://{self.network.addresses[name]}:4222" for name in NATS),
            user=role,
            password_file=self._secrets / f"nats_{role}",
            ca_file=self._certificates / "ca.pem",
            replicas=3,
        )

    @property
    def s3(self) -> S3Settings:
        return self._s3.settings

    def environment(self, role: str) -> dict[str, str]:
        nats, s3 = self.login(role), self.s3
        ours = {
            "NATS__URL": nats.url, "NATS__USER": role, "NATS__PASSWORD_FILE": nats.password_file, "NATS__CA_FILE": nats.ca_file,
            "NATS__REPLICAS": nats.replicas, "S3__ENDPOINT": s3.endpoint, "S3__ACCESS_KEY": s3.access_key,
            "S3__SECRET_KEY_FILE": self._secrets / "s3_secret_key", "S3__CA_FILE": s3.ca_file,
            "TRAINER__SIGNING_KEY_FILE": self._signing_key, "WORKER__TRUSTED_KEYS_FILE": self._trusted_keys,
        }  # fmt: skip
        return {**os.environ, "OMP_NUM_THREADS": "1"} | {f"PENSTOCK_{key}": str(value) for key, value in ours.items()}

    def penstock(self, *arguments: str, role: str) -> Child:
        """Start a verb of penstock on the operator's host."""
        child = Child(
            f"penstock-{arguments[0]}",
            [sys.executable, "-P", "-m", "penstock", *arguments],
            log=self.folder / "logs" / f"{arguments[0]}.log",
            environ=self.environment(role),
        )
        child.start()
        return child

    def service(self, host: str, *arguments: str) -> Child:
        """Start a service on its host, with its role's login and a clock that can be set."""
        role = "rollout" if arguments[0] == "rollout" else host
        environ = self.environment(role)
        if self._shim is not None:
            self.set_clock(host, 0)
            environ |= {"LD_PRELOAD": str(self._shim), "CLOCK_OFFSET_FILE": str(self._clock(host))}
        child = Child(
            host,
            [*self.network.inside(host), sys.executable, "-P", "-m", "penstock", *arguments],
            log=self.folder / "logs" / f"{host}.log",
            environ=environ,
            death_signal=signal.SIGKILL,
        )
        child.start()
        return child

    def worker(self, name: str) -> Child:
        return self.service(name, "rollout", str(self._run_file), f"worker.id={name}")

    def set_clock(self, host: str, offset_s: int) -> None:
        """Let the time of day of a host's service jump, while it runs."""
        number = os.open(self._clock(host), os.O_RDWR | os.O_CREAT, 0o600)
        os.pwrite(number, struct.pack("l", offset_s), 0)
        os.close(number)

    def kill(self, host: str) -> None:
        self.supervisor.child(host).crash()

    def leader(self, bus: Bus, stream: str) -> str:
        """Return the name of the NATS server that leads a stream; raises DeployError when none does."""
        asked = bus._connection.retry(
            lambda: bus._connection.js.stream_info(stream), what=f"leader of {stream}", deadline_s=20.0
        )
        info = bus._connection.call(asked, f"leader of {stream}", 20.0).wait()
        if info.cluster is None or not info.cluster.leader:
            raise DeployError(f"stream {stream} has no leader")
        return info.cluster.leader

    def _clock(self, host: str) -> Path:
        return self.folder / f"clock-{host}"

    def _watch(self, child: Child) -> None:
        self.supervisor.watch(child, child.relaunch)

    def _nats_server(self, name: str) -> Child:
        store = self.folder / name
        store.mkdir(parents=True, exist_ok=True)
        text = nats_config(
            passwords="nats_passwords.conf",
            routes="nats_routes.conf",
            store=str(store / "jetstream"),
            tls=str(self._certificates),
            is_cluster=True,
        )
        limit = "max_file_store: 100GB"
        if text.count(limit) != 1:
            raise DeployError(f"the generated configuration has {text.count(limit)} times {limit!r}, expected one")
        config = self._secrets / f"{name}.conf"  # beside the files that it includes
        config.write_text(text.replace(limit, "max_file_store: 20GB"))
        child = Child(
            name,
            [*self.network.inside(name), find_program("nats-server"), "-c", str(config)],
            log=self.folder / "logs" / f"{name}.log",
            environ={**os.environ, "NATS_SERVER_NAME": name},
            death_signal=signal.SIGTERM,
        )
        child.start()
        return child

    def _wait(self, what: str, condition: Callable[[], object]) -> None:
        if not wait_until(condition, _READY_S, 0.1):
            raise DeployError(f"waited {_READY_S:.0f} s in vain for {what}")


def _answers(address: str) -> bool:
    try:
        socket.create_connection((address, 4222), timeout=2.0).close()
    except OSError:
        return False
    return True


def build_clock(folder: Path) -> Path:
    """Compile `clock.c`; raises DeployError without a C compiler."""
    built = folder / "clock.so"
    try:
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(built), str(_CLOCK)], check=True, timeout=60)
    except (OSError, subprocess.CalledProcessError) as err:
        raise DeployError(
            f"no clock can be moved ({err}): install a C compiler, or leave the kinds of clocks out"
        ) from None
    return built
