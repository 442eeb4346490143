"""A replay runs no code that the record of somebody else names, unless it is told to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from penstock.forensics.replay.replay_run import Replay, Wanted
from penstock.protocol.config.run_file import config_document, load
from penstock.protocol.errors import ConfigError
from penstock.trainer.learner.optimizer_state import _without_pickled_code
from penstock.trainer.settings import TrainerSettings

EVIL = """
from pathlib import Path
Path("it-ran").touch()
from penstock.trainer.algorithm.losses.reinforce import *
"""


def replay_of(algorithm: dict[str, Any], wanted: Wanted, *, dpo: dict[str, Any] | None = None) -> Replay:
    document = config_document(load(TrainerSettings, overrides=["model.path=model"]))
    document["settings"]["algorithm"] |= algorithm
    document["settings"]["dpo"] |= dpo or {}
    session = SimpleNamespace(config=SimpleNamespace(key="settings"))
    record = SimpleNamespace(run_id="foreign", sessions=[session], last_version=1)
    blobs = SimpleNamespace(get=lambda _: json.dumps(document).encode())
    return Replay(cast(Any, record), cast(Any, blobs), cast(Any, None), Path("foreign"), wanted)


@pytest.mark.parametrize("key", ["loss", "advantage", "filters", "corrections"])
@pytest.mark.parametrize("name", ["evil.py:x", "evil:x", "../evil/evil.py:x", "{here}/evil.py:x", "foreign/\0.py:x"])
def test_code_of_a_record_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, name: str) -> None:
    """Named as a file, as a module, by an absolute path, by one that leads out of the folder: it is listed, not imported."""
    here = tmp_path / "evil"
    here.mkdir()
    monkeypatch.chdir(here)
    (here / "evil.py").write_text(EVIL)
    name = name.format(here=here)
    value = [name] if key in {"filters", "corrections"} else name
    with pytest.raises(ConfigError, match=r"the record of run foreign names user code.*add --user-code"):
        replay_of({key: value}, Wanted())
    assert not Path("it-ran").exists()
    if "\0" not in name:
        with pytest.raises(ConfigError, match="not valid in this build"):  # it has no such attribute
            replay_of({key: value}, Wanted(user_code=True))
        assert Path("it-ran").exists() or name == "evil:x"


@pytest.mark.parametrize("value", ["evil.py:x", ["sigmoid", "evil:x"]])
def test_a_preference_loss_of_a_record_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | list[str]
) -> None:
    """The section [dpo] is read too: a run may train on pairs beside its groups."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text(EVIL)
    with pytest.raises(ConfigError, match=r"the record of run foreign names user code.*add --user-code"):
        replay_of({}, Wanted(), dpo={"loss": value})
    assert not Path("it-ran").exists()


def test_a_record_without_code_needs_no_permission() -> None:
    replay_of({}, Wanted())


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("it-ran",)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_checkpoint_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool) -> None:
    """DeepSpeed reads its files with ``weights_only=False``; within the trainer's load that runs nothing."""
    monkeypatch.chdir(tmp_path)
    torch.save({"module": Payload()}, "states.pt", _use_new_zipfile_serialization=zipped)
    with _without_pickled_code(), pytest.raises(Exception, match="mkdir"):
        torch.load("states.pt", weights_only=False)
    assert not Path("it-ran").exists()
    torch.load("states.pt", weights_only=False)
    assert Path("it-ran").exists()
