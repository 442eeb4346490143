"""A real nats-server with a generated configuration, and connections to it as each role."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.deploy.local import connection_environment
from penstock.deploy.local_run import REWARD, TRAINER, LocalRun
from penstock.deploy.make_secrets import make_secrets
from penstock.deploy.processes.child import Child
from penstock.deploy.processes.servers import HOST, NatsServer
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.tls import client_context

_ANSWER_S = 10.0


class NatsRoles(NatsServer):
    """A nats-server with a configuration of `deploy/nats_config.py` on a free port of the loopback, which it keeps when restarted."""

    def __init__(self, folder: Path, config: str, *, log: Path | None = None) -> None:
        super().__init__(folder / "nats", log=log or folder / "log")
        self.one_run = False  # whether the rights are for a single run
        self.secrets = folder / "secrets"
        self.log = self._log
        make_secrets(self.secrets)
        self._config = config
        self._ca_file = self.secrets / "tls" / "ca.pem" if "tls {" in config else None
        self._buses: dict[str, Bus] = {}

    def _new_child(self) -> Child:
        child = super()._new_child()
        config = self._config
        for old, new in (
            ("listen: 0.0.0.0:4222", f'listen: "{HOST}:{self.port or -1}"\nports_file_dir: "{self.store}"'),
            ("http: 127.0.0.1:8222", f'http: "{HOST}:-1"'),
            ("store_dir: /data/jetstream", f'store_dir: "{self.store}/jetstream-store"'),
            *([("/etc/nats/tls", str(self.secrets / "tls"))] if self._ca_file else []),
        ):
            assert old in config
            config = config.replace(old, new)
        shutil.copy(self.secrets / "nats_passwords.conf", self.store / "passwords.conf")
        (self.store / "nats.conf").write_text(config)
        return child

    @property
    def url(self) -> str:
        return f"{'tls' if self._ca_file else 'nats'}://{HOST}:{self.port}"

    def login(self, role: str) -> NatsSettings:
        return NatsSettings(url=self.url, user=role, password_file=self.secrets / f"nats_{role}", ca_file=self._ca_file)

    @property
    def tls_options(self) -> dict[str, Any]:
        """What `nats.connect` needs for TLS; empty without."""
        if self._ca_file is None:
            return {}
        return {"tls": client_context(self._ca_file, "nats.ca_file"), "tls_handshake_first": True}

    def bus(self, role: str) -> Bus:
        """A connection as the role, by the code that services use."""
        if role not in self._buses:
            self._buses[role] = Bus.connect(self.login(role), name=role)
        return self._buses[role]

    def refused(self, role: str, *, publish: Iterable[str] = (), subscribe: Iterable[str] = ()) -> set[str]:
        """Send an empty message to each subject, and subscribe to others, as the role; returns those the server refuses.

        Uses the client protocol directly: the server reports each refusal, in order, before it answers the PING.
        """
        wanted = {"publish": list(publish), "subscription": list(subscribe)}
        lines = [f"PUB {subject} _INBOX_{role}.answers 0\r\n" for subject in wanted["publish"]]
        lines += [f"SUB {subject} {number}" for number, subject in enumerate(wanted["subscription"], 1)]
        found: set[str] = set()
        for line in self.answers(role, lines):
            if match := re.match(rb"-ERR 'Permissions Violation for (Publish|Subscription) to \"(.*)\"'", line):
                found.add(match[2].decode())
            else:
                assert line.startswith((b"INFO", b"MSG", b"+OK", b"PING")), line
        assert found <= {*wanted["publish"], *wanted["subscription"]}
        return found

    def answers(self, role: str, lines: Iterable[str]) -> list[bytes]:
        """Log in as the role, send lines of the client protocol, and return the server's lines until its PONG or its end."""
        login = {"user": role, "pass": self.login(role).secret(), "verbose": False, "pedantic": False, "headers": True}
        server = urlsplit(self.url)
        with contextlib.ExitStack() as opened:
            plain = opened.enter_context(socket.create_connection((server.hostname, server.port), timeout=_ANSWER_S))
            connection = plain
            if self._ca_file is not None:
                tls = client_context(self._ca_file, "nats.ca_file")
                connection = opened.enter_context(tls.wrap_socket(plain, server_hostname=server.hostname))
            answers = opened.enter_context(connection.makefile("rb"))
            sent = [f"CONNECT {json.dumps(login)}", *lines, "PING"]
            connection.sendall("".join(f"{line}\r\n" for line in sent).encode())
            return list(itertools.takewhile(lambda line: line not in (b"", b"PONG\r\n"), iter(answers.readline, b"")))

    def violations(self) -> list[str]:
        """Lines of the server's log about refused subjects."""
        return [line for line in self.log.read_text().splitlines() if "violation" in line.lower()]

    def close(self) -> None:
        for bus in self._buses.values():
            bus.close()
        self.stop()


class RunOfRoles(LocalRun):
    """A run whose services connect with the NATS user of their own role, to a server with the rights of roles."""

    def __init__(self, arguments: Sequence[str], roles: NatsRoles, s3: S3Settings, **options: Any) -> None:
        environ = {**os.environ, **connection_environment(roles.login("admin"), s3)}
        super().__init__(arguments, environ=environ, **options)
        self._roles = roles

    def _service(
        self, name: str, command: Sequence[str], gpus: Mapping[str, str] | None = None, *, waits: bool = False
    ) -> Child:
        admin = self.nats
        role = "rollout" if name.startswith("worker-") else name if name in {TRAINER, REWARD} else "viewer"
        self.nats = self._roles.login(role)
        try:
            return super()._service(name, command, gpus, waits=waits)
        finally:
            self.nats = admin
