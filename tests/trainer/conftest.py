"""A model and a run for all tests of the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.deploy.quickstart_task import write_model
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.trainer.connections import Connections


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model, which no test changes."""
    folder = tmp_path_factory.mktemp("model") / "model"
    write_model(folder, seed=0)
    return folder


@pytest.fixture
def connections(bus: Bus, blobs: Blobs, run_streams: str) -> Connections:
    return Connections(run_streams, bus, blobs)
