"""A local run on a nats-server with the run's generated rights: each service connects with its own role's login."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.deploy.local import connection_environment
from penstock.deploy.local_run import REWARD, TRAINER, LocalRun
from penstock.deploy.make_secrets import make_secrets
from penstock.deploy.nats_config import nats_config
from penstock.deploy.processes.child import Child
from penstock.deploy.processes.servers import NatsServer, S3Server
from penstock.deploy.processes.supervise import ProcessEvent, RestartRule, Supervisor
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.transport.blobs import Blobs

# Processes are killed so often on purpose that the default rule would stop restarting them.
RULE = RestartRule(max_crashes=20)


class SecuredNats(NatsServer):
    """nats-server with the configuration of `deploy/nats_config.py` for one run, on a free port of the loopback."""

    def __init__(self, folder: Path, run_id: str, *, log: Path) -> None:
        """Make the passwords of all roles in ``folder``."""
        super().__init__(folder / "nats", log=log)
        self.secrets = folder / "secrets"
        self._run_id = run_id
        make_secrets(self.secrets)

    def login(self, role: str) -> NatsSettings:
        """Return how a role connects."""
        return NatsSettings(url=self.settings.url, user=role, password_file=self.secrets / f"nats_{role}")

    def _new_child(self) -> Child:
        child = super()._new_child()
        text = nats_config((self._run_id,))
        for old, new in (
            ('include "passwords.conf"', (self.secrets / "nats_passwords.conf").read_text()),
            ("listen: 0.0.0.0:4222", f'listen: "127.0.0.1:{self.port or -1}"\nports_file_dir: "{self.store}"'),
            ("http: 127.0.0.1:8222", 'http: "127.0.0.1:-1"'),
            ("store_dir: /data/jetstream", f'store_dir: "{self.store}/jetstream-store"'),
        ):
            assert text.count(old) == 1, f"{old} in the generated configuration"
            text = text.replace(old, new)
        (self.store / "nats.conf").write_text(text)
        return child


class Servers:
    """nats-server and S3 server, restarted when they are killed. Use as a context manager."""

    def __init__(self, folder: Path, run_id: str, on_event: Callable[[ProcessEvent], None]) -> None:
        """Prepare; nothing runs before the block is entered."""
        self.nats = SecuredNats(folder, run_id, log=folder / "logs" / "nats-server.log")
        self.s3 = S3Server(folder / "objects", log=folder / "logs" / "s3-server.log")
        self.supervisor = Supervisor(rule=RULE, on_event=on_event)

    def __enter__(self) -> Servers:
        for server in (self.nats, self.s3):
            server.start()
            self.supervisor.watch(server.child, server.relaunch)
        Blobs(self.s3.settings).ensure_bucket()
        return self

    def __exit__(self, *_: object) -> None:
        self.supervisor.close()
        self.nats.stop()
        self.s3.stop()


class SecuredRun(LocalRun):
    """A run whose services use the login of their own role."""

    def __init__(self, arguments: Sequence[str], servers: Servers, *, reward_files: Sequence[Path]) -> None:
        """Use servers that are running; the streams are created as administrator."""
        environ = {**os.environ, **connection_environment(servers.nats.login("admin"), servers.s3.settings)}
        super().__init__(arguments, reward_files=reward_files, environ=environ, rule=RULE)
        self._servers = servers

    def _service(self, name: str, command: Sequence[str], **options: int) -> Child:
        admin, role = (
            self.nats,
            "rollout" if name.startswith("worker-") else name if name in {TRAINER, REWARD} else "viewer",
        )
        self.nats = self._servers.nats.login(role)
        try:
            return super()._service(name, command, **options)
        finally:
            self.nats = admin


def s3_settings(servers: Servers) -> S3Settings:
    """Return how everything connects to the object store: S3 has one login for all roles."""
    return servers.s3.settings
