"""The servers of the test session, as a command of `penstock` gets them; and the processes that a command becomes."""

from __future__ import annotations

import pytest

from penstock.console import launch
from penstock.protocol.config.connection import NatsSettings, S3Settings
from tests.console.command import Replaced, server_arguments


@pytest.fixture
def typed(nats_settings: NatsSettings, s3_settings: S3Settings) -> list[str]:
    return server_arguments(nats_settings, s3_settings)


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands by which this process would have been replaced; each raises `Replaced`."""
    commands: list[list[str]] = []

    def replace(command: list[str]) -> None:
        commands.append(command)
        raise Replaced

    monkeypatch.setattr(launch, "replace_process", replace)
    return commands
