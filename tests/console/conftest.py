"""The servers of the test session, as a command of `penstock` gets them."""

from __future__ import annotations

import pytest

from penstock.protocol.config.connection import NatsSettings, S3Settings
from tests.console.command import server_arguments


@pytest.fixture
def typed(nats_settings: NatsSettings, s3_settings: S3Settings) -> list[str]:
    return server_arguments(nats_settings, s3_settings)
