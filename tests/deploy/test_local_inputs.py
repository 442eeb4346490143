"""A new local run trains on an input that was made in the store of another local run."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.console.tools.removal import _others_in
from penstock.deploy.local_settings import copy_input, find_input
from penstock.protocol import blob_keys
from penstock.protocol.errors import ConfigError


def make_input(run_folder: Path, name: str, *, complete: bool = True) -> Path:
    objects = run_folder / "store" / "objects" / "penstock"
    keys = [f"{blob_keys.groups_prefix(name)}v1/pack.parquet"]
    if complete:
        keys.append(blob_keys.rescored_input(name, "0" * 64))
    for key in keys:
        (objects / key).parent.mkdir(parents=True, exist_ok=True)
        (objects / key).write_text(key)
    return objects / "runs" / name


def test_an_input_is_copied_into_the_store_of_the_new_run(tmp_path: Path):
    """It is whole, it outlives the run it came from, and it is no reason against removing the new run."""
    first, second = tmp_path / "first", tmp_path / "again"
    source = make_input(first, "first-strict")
    copy_input("first-strict", second)
    copied = second / "store" / "objects" / "penstock" / "runs" / "first-strict"
    files = sorted(path.relative_to(source) for path in source.rglob("*") if path.is_file())
    assert sorted(path.relative_to(copied) for path in copied.rglob("*") if path.is_file()) == files
    assert _others_in(second / "store", "again") == []
    assert _others_in(first / "store", "first") == ["first-strict"]
    assert find_input("first-strict", second) == copied  # a resumed run leaves what it reads as it is
    source.rename(tmp_path / "removed")
    copy_input("first-strict", second)
    assert find_input("first-strict", second) == copied


def test_an_unknown_input_is_answered_with_those_that_there_are(tmp_path: Path):
    """One whose index is not written yet is not there; the nearest name is shown."""
    make_input(tmp_path / "first", "first-strict")
    make_input(tmp_path / "first", "first-early", complete=False)
    with pytest.raises(ConfigError, match=r"found: first-strict; did you mean first-strict\?; make it with"):
        find_input("first-strikt", tmp_path / "second")
    with pytest.raises(ConfigError, match=r"data\.from_run = first-early"):
        copy_input("first-early", tmp_path / "second")
