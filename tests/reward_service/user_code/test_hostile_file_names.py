"""A reward file may have any name: none takes the place of another module, and none is waited for."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import pytest
from tests.deadline import ends_within

from penstock.reward_service.errors import UserFileError
from penstock.reward_service.user_code.user_file import load

FILE = """
from dataclasses import dataclass

@dataclass
class Score:
    value: float = 1.0

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return Score().value
"""


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", sys.modules)
    before = {name: sys.modules.get(name) for name in ("json", "random", "types", "numpy", "penstock", "__main__")}
    monkeypatch.setitem(sys.modules, "json", json)
    for name, module in before.items():
        if module is not None:
            monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    "name",
    [
        *("json.py", "random.py", "types.py", "sys.py", "builtins.py", "__main__.py", "numpy.py", "penstock.py", ".py"),
        *("a b.py", "a.b.py", "é.py", "a\nb.py", "--help.py", "$(id).py", os.fsdecode(b"\xff.py"), "x" * 250 + ".py"),
    ],
)
def test_a_file_of_any_name_is_loaded_beside_the_modules_that_there_are(tmp_path: Path, name: str) -> None:
    """``json.py`` is a reward, and ``import json`` still Python's own; loaded again it is the same reward."""
    file = tmp_path / name
    file.write_text(FILE)
    before = sys.modules.get(file.stem)
    for _ in range(2):
        reward = load(file)
        assert reward.function("", "", None) == 1.0
    assert before is None or sys.modules[file.stem] is before
    assert hasattr(importlib.reload(importlib.import_module("random")), "random")
    assert sys.path.index(str(tmp_path)) > sys.path.index(str(Path(os.__file__).parent))


@pytest.mark.parametrize("what", ["pipe", "folder", "endless", "a NUL", "missing", "x.pyc", "too long"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, what: str) -> None:
    file = tmp_path / "reward.py"
    match what:
        case "pipe":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case "endless":
            file.symlink_to("/dev/zero")
        case "a NUL":
            file = tmp_path / "a\0.py"
        case "x.pyc":
            file = tmp_path / "x.pyc"
            file.write_text(FILE)
        case "too long":
            file = tmp_path / ("x" * 300 + ".py")
        case _:
            pass
    with pytest.raises(UserFileError, match=r"no such file|not a Python file|cannot be loaded"), ends_within(20):
        load(file)
