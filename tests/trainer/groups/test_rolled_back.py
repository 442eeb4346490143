"""Which rolled-back steps a session makes again, of which groups, and how the next one goes on if it is killed meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.trainer.groups.test_batcher import ready

from penstock.protocol.record.lineage import STEP_DIGEST, step_digest
from penstock.protocol.versions import Branch, PolicyVersion
from penstock.trainer.data.data_order import DataOrder
from penstock.trainer.groups.dispatch import RunGroups
from penstock.trainer.groups.group_states import GroupStates
from penstock.trainer.groups.group_totals import DropReason
from penstock.trainer.groups.issue_log import IssuedBefore
from penstock.trainer.groups.prompt_cursor import PromptCursor
from penstock.trainer.groups.rolled_back import read_lines, take_rolled_back


def batch(name: str) -> tuple[str, ...]:
    return tuple(f"{name}{number}".ljust(8, "0") for number in range(2))


def lines(first_step: int, version: int, names: str) -> bytes:
    """Lines of metrics.jsonl: a step for each letter, from a version on."""
    rows = [
        {"kind": "step", "step": first_step + n, "version": version + n,
         STEP_DIGEST: step_digest(1, first_step + n, version + n, version + n + 1, batch(name)).model_dump()}
        for n, name in enumerate(names)
    ]  # fmt: skip
    return b'{"kind": "eval"}\n' + b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def checkpoint(step: int, version: int, **more: Any) -> Any:
    return SimpleNamespace(**{"step": step, "version": version, "abandoned": (), "remade": (), **more})


def batches(names: str) -> tuple[tuple[str, ...], ...]:
    return tuple(map(batch, names))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (lines(11, 10, "abc"), "abc"),
        (lines(12, 10, "abc"), ""),  # not the step after the checkpoint
        (lines(11, 10, "a") + lines(12, 12, "b"), "a"),  # a version is missing
        (lines(11, 10, "ab")[:-40], "a"),  # killed while it wrote the line
        (lines(11, 10, "a") + b'{"kind": "step", "step": 12, "version": 11}\n' + lines(13, 12, "c"), "a"),
        (b"", ""),
    ],
)
def test_consecutive_steps_with_listed_groups_are_made_again(data: bytes, expected: str) -> None:
    found = read_lines(data, steps_done=10)
    assert found.batches == batches(expected)
    assert found.marks == (((None, 10),) if expected else ())


def test_a_session_killed_while_it_makes_steps_again_is_gone_on_from(tmp_path: Path) -> None:
    """The third session makes the rest too, and both sessions before count as made again."""
    at_10 = checkpoint(10, 10)
    assert take_rolled_back(tmp_path, lines(11, 10, "abcd"), at_10).batches == batches("abcd")
    third = take_rolled_back(tmp_path, lines(11, 15, "ab"), at_10)
    assert (third.batches, third.marks) == (batches("abcd"), ((None, 10), (None, 15)))
    fourth = take_rolled_back(tmp_path, b"", at_10)  # killed before its first line
    assert (fourth.batches, fourth.marks) == (third.batches, third.marks)


def test_a_checkpoint_meanwhile_leaves_the_rest(tmp_path: Path) -> None:
    """The second session, which began with 15, committed step 12 as version 17, and was killed after step 13."""
    take_rolled_back(tmp_path, lines(11, 10, "abcd"), checkpoint(10, 10))
    at_12 = checkpoint(12, 17, abandoned=((10, 15),), remade=((15, 10, 2),))
    third = take_rolled_back(tmp_path, lines(13, 17, "c"), at_12)
    assert (third.batches, third.marks) == (batches("cd"), ((15, 10), (None, 17)))


@pytest.mark.parametrize(
    ("second", "at"),
    [
        (lines(11, 15, "af"), checkpoint(10, 10)),  # it made another second step
        (lines(13, 17, "f"), checkpoint(12, 17, abandoned=((10, 15),), remade=((15, 10, 2),))),
        (lines(13, 17, "c"), checkpoint(12, 17, abandoned=((10, 15),), remade=((15, 10, 1),))),  # before the checkpoint
        (lines(9, 8, "f"), checkpoint(8, 8)),  # an older checkpoint, chosen by hand
    ],
)
def test_after_other_steps_only_those_are_made_again(tmp_path: Path, second: bytes, at: Any) -> None:
    take_rolled_back(tmp_path, lines(11, 10, "abcd"), checkpoint(10, 10))
    assert take_rolled_back(tmp_path, second, at).batches == read_lines(second, steps_done=at.step).batches


def test_what_is_forgotten_or_unreadable_is_not_gone_on_with(tmp_path: Path) -> None:
    first = take_rolled_back(tmp_path, lines(11, 10, "abcd"), checkpoint(10, 10))
    first.forget()
    assert take_rolled_back(tmp_path, lines(11, 15, "ab"), checkpoint(10, 10)).batches == batches("ab")
    (tmp_path / "rolled_back.json").write_text("{")
    assert take_rolled_back(tmp_path, lines(11, 15, "ab"), checkpoint(10, 10)).batches == batches("ab")


@pytest.mark.parametrize("is_preferred", [False, True])
def test_an_attempt_that_a_rolled_back_step_had_replaces_an_earlier_one_that_has_arrived(is_preferred: bool) -> None:
    """The killed session dropped the first attempt after its checkpoint, and trained on the second."""
    groups = GroupStates()
    cursor = PromptCursor(DataOrder(4, seed=1), "order", groups)
    cursor.before = IssuedBefore(4, frozenset({"e0.p1.a1"}))
    groups.issue(["e0.p1.a0"])
    groups.arrive("e0.p1.a0", 1)
    groups.offer(first := ready(1, 0))
    refusal = cursor.accept("e0.p1.a1", is_preferred=is_preferred)
    assert refusal == (None if is_preferred else DropReason.DUPLICATE)
    assert list(groups.outstanding()) == ["e0.p1.a1" if is_preferred else "e0.p1.a0"]
    dropped = groups.totals.sums.dropped_tokens
    assert dropped == ({"superseded": first.num_tokens} if is_preferred else {})


def test_the_versions_of_rolled_back_sessions_whose_samples_are_held_are_known() -> None:
    """Their manifests are kept: 6 was rolled back, 4 and 9 were not."""
    groups = RunGroups()
    groups.train.versions.begin_session({}, Branch(PolicyVersion(4), PolicyVersion(9)))
    for number, version in enumerate((4, 6, 9)):
        groups.train.issue([f"e0.p{number}.a0"])
        groups.train.arrive(f"e0.p{number}.a0", 1)
        groups.train.offer(ready(number, version))
    assert groups.sampled_by_abandoned() == {6}
