"""Models of these tests: tokenizer and chat template, no weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.agents.proxy.agent_model import QWEN25, SMOLLM2, write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template knows no tools."""
    return write_model(tmp_path_factory.mktemp("model"), SMOLLM2)


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template knows tools."""
    return write_model(tmp_path_factory.mktemp("tool-model"), QWEN25)
