"""Rows of Python as files of a run."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.client import data_files
from penstock.protocol.errors import ConfigError


class Dataset:
    def __iter__(self):
        yield {"prompt": "a", "level": np.int64(3), "ids": np.array([1, 2])}
        yield {"prompt": "\u00e9\n", "level": None, "ids": [1.5]}


class Frame:
    """As a `pandas.DataFrame`: its iterator yields the names of columns."""

    def __iter__(self):
        return iter(["prompt"])

    def iterrows(self) -> Any:
        raise NotImplementedError

    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        assert orient == "records"
        return [{"prompt": "a"}]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def test_rows_become_json_lines_named_by_their_digest(tmp_path: Path) -> None:
    """Arrays and numbers of numpy are JSON; the same rows give the same file, others another."""
    path = data_files.write_rows(Dataset(), tmp_path, "train")
    assert rows_of(path) == [
        {"prompt": "a", "level": 3, "ids": [1, 2]},
        {"prompt": "\u00e9\n", "level": None, "ids": [1.5]},
    ]
    assert path.name == f"train-{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}.jsonl"
    assert data_files.write_rows(list(Dataset()), tmp_path, "train") == path
    assert data_files.write_rows(map(dict, Dataset()), tmp_path, "train") == path
    assert data_files.write_rows([{"prompt": "b"}], tmp_path, "train") != path
    assert rows_of(data_files.write_rows(Frame(), tmp_path, "frame")) == [{"prompt": "a"}]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "train: there is no row"),
        ([{"prompt": "a"}, ["b"]], "train: row 1: expected a dictionary, got list"),
        ([{"prompt": object()}], "train: row 0 is not JSON: a value of type object"),
        ([{"prompt": float("nan")}], "train: row 0 is not JSON"),
        (7, "train: expected a path or an iterable of dictionaries, got int"),
        ({"prompt": ["a"]}, "train: expected a path or an iterable of dictionaries, got dict"),
        (["a.jsonl", {"prompt": "b"}], "train: row 0: expected a dictionary, got str"),
    ],
)
def test_what_is_no_row_is_refused_with_its_number(tmp_path: Path, data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        data_files.write_rows(data, tmp_path, "train")
    assert list(tmp_path.iterdir()) == []


def test_paths_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's path becomes absolute; the name of a data set on a hub stays as it is."""
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").touch()
    assert data_files.is_named("a.jsonl")
    assert data_files.is_named([Path("a.jsonl"), "org/name"])
    assert not data_files.is_named([{"prompt": "a"}])
    assert data_files.named(["a.jsonl", "org/name"]) == [str(tmp_path / "a.jsonl"), "org/name"]
