"""The fixtures of a worker, for environments that one plays; and models of tokenizer and template, without weights."""

from pathlib import Path

import pytest
from tests.agents.proxy.agent_model import QWEN25, write_model
from tests.rollout_service.conftest import faulty_engine, model, name, start_worker, store, trainer_side  # noqa: F401


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template knows tools; that of `model` knows none."""
    return write_model(tmp_path_factory.mktemp("tool-model"), QWEN25)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the models of a `bench`."""
    return tmp_path_factory.mktemp("models")
