"""Files and folders that a reader finds whole, at any moment."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from penstock.protocol import files


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_a_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    """The new content has the old name, text and bytes alike, and nothing is left beside it."""
    path = tmp_path / "state.json"
    assert files.atomic_write(path, "å") == path
    assert files.atomic_write(path, b"second", sync=True, sync_folder=True).read_bytes() == b"second"
    assert _names(tmp_path) == ["state.json"]


def test_a_secret_has_its_mode_from_the_first_byte_on(tmp_path: Path) -> None:
    """Without a mode the umask decides; a file that a killed process left is not written into."""
    secret = files.atomic_write(tmp_path / "secret", "x", mode=0o600)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    umask = os.umask(0o022)
    try:
        assert stat.S_IMODE(files.atomic_write(tmp_path / "plain", "x").stat().st_mode) == 0o644
    finally:
        os.umask(umask)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    """A target that cannot be replaced stays as it is, and no partial file is left."""
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"):
        files.atomic_write(tmp_path / "folder", "x")
    assert _names(tmp_path) == ["folder"]


def test_a_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    """A block that fails leaves no folder; one that succeeds gives it its name; an existing one is refused."""
    with pytest.raises(ZeroDivisionError), files.new_folder(tmp_path / "model") as partial:
        (partial / "weights").write_bytes(b"x" * (1 // 0))
    assert _names(tmp_path) == []
    with files.new_folder(tmp_path / "model") as partial:
        (partial / "weights").touch()
        assert not (tmp_path / "model").exists()
    assert _names(tmp_path / "model") == ["weights"]
    with pytest.raises(FileExistsError, match="name another folder"), files.new_folder(tmp_path / "model"):
        pass
    assert _names(tmp_path) == ["model"]
