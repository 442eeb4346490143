"""A real nats-server with a generated configuration, and connections to it as each role."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import signal
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.servers import wait_for

from penstock.deploy.make_secrets import make_secrets
from penstock.deploy.processes.child import Child
from penstock.deploy.processes.servers import find_program
from penstock.protocol.config.connection import NatsSettings
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.tls import client_context

_ANSWER_S = 10.0


class NatsRoles:
    """A nats-server with a configuration of `deploy/nats_config.py`, moved to a free port of the loopback."""

    def __init__(self, folder: Path, config: str) -> None:
        self.one_run = False  # whether the rights are for a single run
        self.secrets = folder / "secrets"
        self.log = folder / "log"
        make_secrets(self.secrets)
        shutil.copy(self.secrets / "nats_passwords.conf", folder / "passwords.conf")
        for old, new in (
            ("listen: 0.0.0.0:4222", f'listen: "127.0.0.1:-1"\nports_file_dir: "{folder}"'),
            ("http: 127.0.0.1:8222", 'http: "127.0.0.1:-1"'),
            ("store_dir: /data/jetstream", f'store_dir: "{folder}/js"'),
            *([("/etc/nats/tls", str(self.secrets / "tls"))] if "tls {" in config else []),
        ):
            assert old in config
            config = config.replace(old, new)
        self._ca_file = self.secrets / "tls" / "ca.pem" if "tls {" in config else None
        (folder / "nats.conf").write_text(config)
        self.server = Child(
            "nats-server",
            [find_program("nats-server"), "-c", str(folder / "nats.conf")],
            log=self.log,
            death_signal=signal.SIGTERM,
        )
        self.server.start()
        ports = folder / f"nats-server_{self.server.pid}.ports"
        wait_for(
            lambda: ports.exists() and ports.read_text().endswith("}"), f"nats-server: {self.server.log_tail()}", 10.0
        )
        self.url = json.loads(ports.read_text())["nats"][0]
        self._buses: dict[str, Bus] = {}

    def settings(self, role: str) -> NatsSettings:
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
            self._buses[role] = Bus.connect(self.settings(role), name=role)
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
        login = {
            "user": role,
            "pass": self.settings(role).secret(),
            "verbose": False,
            "pedantic": False,
            "headers": True,
        }
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
        self.server.stop()
