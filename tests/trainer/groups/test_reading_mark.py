"""A pack that was being read when two trainers were killed is known by name to the third."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.protocol.errors import PackError
from penstock.protocol.groups import BlobRef
from penstock.trainer.groups.pack_reader import ReadingMark

PACK = BlobRef(key="runs/r/groups/p.parquet", size_bytes=1, sha256="0" * 64)
OTHER = PACK.model_copy(update={"key": "runs/r/groups/q.parquet"})


def test_the_pack_that_two_trainers_were_killed_with_is_quarantined(tmp_path: Path):
    """Two sessions end with the mark set; the third knows that pack, and no other."""
    for _ in range(2):
        mark = ReadingMark(tmp_path)
        assert not mark.is_quarantined(PACK)
        with mark.cleared_unless_fatal():
            mark.set(OTHER)
        mark.set(PACK)
        mark.close()
    assert ReadingMark(tmp_path).is_quarantined(PACK)
    assert not ReadingMark(tmp_path).is_quarantined(OTHER)


def test_a_refused_pack_leaves_no_mark_and_a_bug_does(tmp_path: Path):
    """A PackError clears the mark; an exception that ends the trainer counts as a trainer that was killed."""
    for error in (PackError, PackError, PackError, ZeroDivisionError, ZeroDivisionError):
        mark = ReadingMark(tmp_path)
        assert not mark.is_quarantined(PACK)
        with pytest.raises(error):
            _read_with(mark, error)
    assert ReadingMark(tmp_path).is_quarantined(PACK)


def test_a_damaged_file_starts_the_count_anew(tmp_path: Path):
    """Counts that do not parse are a warning, not an error that ends the trainer."""
    for content in ("{", "[]", '{"a": "b"}'):
        (tmp_path / "readers_killed.json").write_text(content)
        assert not ReadingMark(tmp_path).is_quarantined(PACK)


def _read_with(mark: ReadingMark, error: type[Exception]) -> None:
    with mark.cleared_unless_fatal():
        mark.set(PACK)
        raise error
