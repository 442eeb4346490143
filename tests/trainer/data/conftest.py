"""The quickstart's model, which no test changes, and its tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.deploy.quickstart_task import write_model
from penstock.protocol.chat_tokenizer import ChatTokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart") / "model"
    write_model(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> ChatTokenizer:
    return ChatTokenizer.read(model)
