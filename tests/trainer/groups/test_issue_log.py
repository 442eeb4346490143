"""What any session of a run issued is known to the next one, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.protocol.packs.task_promise import TaskSettings
from penstock.trainer.errors import CheckpointError
from penstock.trainer.groups import issue_log
from penstock.trainer.groups.issue_log import IssuedBefore, IssuedRange, IssueLog, SessionSettings


def test_the_next_session_knows_what_was_issued(tmp_path: Path) -> None:
    """Positions only grow, later attempts add up over sessions, and those that cannot be used any more are removed."""
    first = IssueLog(tmp_path / "run", "order")
    assert first.before == IssuedBefore()
    first.append(2, ["e0.p0.a0", "e0.p1.a0"])
    first.append(3, ["e0.p1.a1", "e0.p2.a0"])
    first.close()
    second = IssueLog(tmp_path / "run", "order")
    assert second.before == IssuedBefore(3, frozenset({"e0.p1.a1"}))
    second.append(2, ["e0.p0.a1"])  # it resumed an older checkpoint
    second.close()
    third = IssueLog(tmp_path / "run", "order", may_arrive=lambda group_id: group_id == "e0.p0.a1")
    assert third.before == IssuedBefore(3, frozenset({"e0.p0.a1"}))
    assert (tmp_path / "run" / "issued.log").read_text() == "order 3 e0.p0.a1 \n"


def _settings(group_size: int) -> SessionSettings:
    return SessionSettings(
        TaskSettings(group_size, 64, "single_turn"), TaskSettings(1, 32, "maze of two words", with_baseline=True)
    )


def test_the_settings_under_which_groups_were_issued_are_known(tmp_path: Path) -> None:
    """Each session's are recorded; equal ones share a range; a build that recorded none makes its groups' unknown."""
    four, eight = _settings(4), _settings(8)
    IssueLog(tmp_path, "order").append(3, ["e0.p0.a1"])  # by a build that did not record them
    for settings, first, position, later in (
        (four, 2, 5, "e0.p1.a1"),
        (four, 4, 7, "e0.p0.a0"),
        (eight, 6, 9, "e0.p2.a1"),
    ):
        IssueLog(tmp_path, "order", settings=settings, first=first).append(position, [later])
    found = IssueLog(tmp_path, "order", settings=eight, first=9).before
    assert (found.position, found.later) == (9, {"e0.p0.a1", "e0.p1.a1", "e0.p2.a1"})
    assert found.ranges == (
        IssuedRange(None, 0, 3, frozenset({"e0.p0.a1"})),
        IssuedRange(four, 2, 7, frozenset({"e0.p1.a1"})),
        IssuedRange(eight, 6, 9, frozenset({"e0.p2.a1"})),
    )
    sizes = [[s.group_size for s in found.settings_of("", position)] for position in range(10)]
    assert sizes == [[], [], [], [4], [4], [4], [4, 8], [8], [8], []]
    later = [[s.group_size for s in found.settings_of(f"e0.p{n}.a1", None)] for n in range(4)]
    assert later == [[], [4], [8], []]
    assert found.all_settings() == ()
    lines = (tmp_path / "issued.log").read_text().splitlines(keepends=True)
    assert lines[0] == "order 3 e0.p0.a1 \n"  # as the older build wrote it, and would read it
    (tmp_path / "issued.log").write_text("".join(lines[1:]))
    assert IssueLog(tmp_path, "order").before.all_settings() == (four, eight)


def test_settings_that_cannot_be_read_are_unknown(tmp_path: Path) -> None:
    """What follows such a line is not held against the settings of another session."""
    IssueLog(tmp_path, "order", settings=_settings(4)).append(3, [])
    with (tmp_path / "issued.log").open("ab") as file:
        file.write(b'settings order 3 {"train":{"size":1}}\norder 6 \n')
    found = IssueLog(tmp_path, "order").before
    assert [len(found.settings_of("", position)) for position in (2, 5)] == [0, 0]  # the line may be about both
    assert found.position == 6


@pytest.mark.parametrize(
    "torn", [b"order 9", b"order 9 e0.p1.", b"order 9 e0.p1.a1", b"order 9x \n", b"\xff\n", b"\n", b"order\n"]
)
def test_a_line_that_a_crash_cut_short_is_left_out(tmp_path: Path, torn: bytes) -> None:
    """Only whole lines count; what follows is written on a line of its own."""
    log = IssueLog(tmp_path, "order")
    log.append(4, ["e0.p0.a1"])
    with (tmp_path / "issued.log").open("ab") as file:
        file.write(torn)
    found = IssueLog(tmp_path, "order")
    found.append(5, [])
    assert IssueLog(tmp_path, "order").before == IssuedBefore(5, frozenset({"e0.p0.a1"}))
    assert found.before == IssuedBefore(4, frozenset({"e0.p0.a1"}))


def test_what_was_issued_of_other_data_does_not_count(tmp_path: Path) -> None:
    """Positions of another order name other prompts."""
    IssueLog(tmp_path, "order").append(4, ["e0.p0.a1"])
    assert IssueLog(tmp_path, "another").before == IssuedBefore()


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The error has the path and the fix; a group that is not recorded is not published."""
    (tmp_path / "run").write_text("a file in place of the folder")
    with pytest.raises(CheckpointError, match=r"run/issued\.log: .* Free disk space below run\.dir"):
        IssueLog(tmp_path / "run", "order")
    log = IssueLog(tmp_path, "order")
    log.close()
    with pytest.raises(CheckpointError, match="Bad file descriptor"):
        log.append(1, [])


def test_a_long_session_keeps_a_short_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines are replaced by their sum; every later attempt stays, and so does what is written afterwards."""
    monkeypatch.setattr(issue_log, "_MERGE_BYTES", 200)
    log, sizes = IssueLog(tmp_path, "order"), []
    for position in range(1, 101):
        log.append(position, [f"e0.p{position}.a1"] if position % 50 == 0 else [])
        sizes.append((tmp_path / "issued.log").stat().st_size)
    assert max(sizes) <= 200 + len("order 100 e0.p50.a1 ")
    assert IssueLog(tmp_path, "order").before == IssuedBefore(100, frozenset({"e0.p50.a1", "e0.p100.a1"}))


def test_a_line_written_in_part_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that became full: the groups are not published, and the next session does not know them."""
    log = IssueLog(tmp_path, "order")
    log.append(3, [])
    write = issue_log.os.write
    with monkeypatch.context() as full:
        full.setattr(issue_log.os, "write", lambda file, line: write(file, line[: len(line) // 2]))
        with pytest.raises(CheckpointError, match=r"only \d+ of \d+ bytes were written"):
            log.append(4, ["e0.p1.a1"])
    assert IssueLog(tmp_path, "order").before == IssuedBefore(3)
