"""A teacher's log-probabilities in packs: they round-trip, beside groups without; impossible ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tests.episodes import forked, group_of, one_turn
from tests.protocol.packs.written_packs import task_of
from tests.trainer.groups.stored_groups import invent_group, taught

from penstock.protocol.errors import PackError
from penstock.protocol.packs import group_pack, pack_bounds
from penstock.protocol.packs.task_promise import TaskPromise, TaskSettings
from penstock.protocol.token_annotations import TeacherRow, TeacherScores
from penstock.protocol.trajectory import Group


def group(number: int = 0, *, baseline: bool = False) -> Group:
    found = invent_group(f"e0.p{number}.a0", version=1, size=3, seed=number)
    if not baseline:
        return found
    return replace(found, trajectories=(*found.trajectories[:2], replace(found.trajectories[2], is_baseline=True)))


@pytest.mark.parametrize("top_k", [0, 1, 5])
def test_a_pack_gives_back_what_the_teacher_said(top_k: int) -> None:
    """Of each sampled token, with its identity; a group without a teacher and a baseline beside them have none."""
    groups = [taught(group(0), top_k), group(1), taught(group(2, baseline=True), top_k)]
    data = group_pack.encode(groups)
    found = group_pack.decode(data, vocab_size=60, described=[one.summary(n) for n, one in enumerate(groups)])
    assert [one.teacher_top_k for one in found] == [top_k, None, top_k]
    for before, after in zip(groups, found, strict=True):
        if before.teacher is None:
            continue
        assert after.teacher is not None
        assert after.teacher.model == "teacher@7"
        for one, other in zip(before.teacher.rows, after.teacher.rows, strict=True):
            assert one.logprobs.tobytes() == other.logprobs.tobytes()
            assert (one.top_ids == other.top_ids).all()
            assert one.top_logprobs.tobytes() == other.top_logprobs.tobytes()
    assert len(found[2].teacher.rows[2].logprobs) == 0  # type: ignore[union-attr]
    assert group_pack.decode_texts(data, [0])[0].group_id == groups[0].group_id


def test_episodes_have_a_teacher_too() -> None:
    """Of each row the tokens that are trained in it, whatever rows share."""
    whole = taught(group_of(forked(0), one_turn(1)), 2)
    (found,) = group_pack.decode(group_pack.encode([whole]), vocab_size=60, described=[whole.summary(0)])
    assert whole.teacher is not None
    assert found.teacher is not None
    assert len(found.episodes) == 2
    counts = [len(row.logprobs) for row in found.teacher.rows]
    assert counts == [int(row.loss_mask.sum()) for row in found.trajectories]
    assert [row.top_ids.tolist() for row in found.teacher.rows] == [row.top_ids.tolist() for row in whole.teacher.rows]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda row: replace(row, logprobs=np.full_like(row.logprobs, np.nan)), "not finite"),
        (lambda row: replace(row, logprobs=row.logprobs + 9.0), "above 0"),
        (lambda row: replace(row, top_logprobs=np.zeros_like(row.top_logprobs)), "have a probability of 5"),
        (lambda row: replace(row, top_ids=row.top_ids + 60), "is none of a vocabulary of 60"),
        (lambda row: replace(row, top_ids=np.zeros_like(row.top_ids)), "the same token twice"),
        (lambda row: TeacherRow(row.logprobs[:-1], row.top_ids[:-1], row.top_logprobs[:-1]), "log-probabilities of"),
    ],
)
def test_what_no_teacher_can_say_is_refused(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[TeacherRow], TeacherRow], words: str
) -> None:
    """By who writes a pack and by who reads one that a hostile worker wrote."""
    whole = taught(group(), 5)
    assert whole.teacher is not None
    hostile = replace(whole, teacher=replace(whole.teacher, rows=tuple(map(change, whole.teacher.rows))))
    if "vocabulary" not in words:  # who writes does not know it
        with pytest.raises(PackError, match=words):
            group_pack.encode([hostile])
    with monkeypatch.context() as unchecked:
        unchecked.setattr(TeacherScores, "check", lambda *_: None)
        data = group_pack.encode([hostile])
    with pytest.raises(PackError, match=words):
        group_pack.decode(data, vocab_size=60)


def test_a_group_that_lacks_its_teacher_breaks_the_promise_of_its_task() -> None:
    """A worker whose run file has no teacher, or another one, is found out when its group is read."""
    plain = group()
    task = task_of(plain, teacher_top_k=2)
    promise = TaskPromise.of(task)
    promise.check(taught(plain, 2))
    for other in (plain, taught(plain, 3)):
        with pytest.raises(
            PackError, match=r"its task asked for a teacher's log-probabilities with 2 .* section \[teacher\]"
        ):
            promise.check(other)
    assert TaskSettings.of(task).teacher_top_k == 2


def test_a_pack_may_be_larger_by_what_the_teacher_says() -> None:
    """And by no more: the limit grows with the tokens that the message names and the teacher's for each."""
    one = group().summary(0).model_copy(update={"completion_tokens": (10_000, 10_000, 10_000)})
    plain = pack_bounds.max_bytes([one])
    assert pack_bounds.max_bytes([one.model_copy(update={"teacher_top_k": 0})]) == plain + 16 * 30_000
    assert pack_bounds.max_bytes([one.model_copy(update={"teacher_top_k": 20})]) == plain + 16 * 41 * 30_000
