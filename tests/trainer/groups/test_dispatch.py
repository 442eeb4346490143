"""Dispatch: bounded, every prompt once, nothing issued twice, and a restart continues as without it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from penstock.protocol.errors import PackError
from penstock.protocol.facts import MAX_FACT_BYTES, TaskIssued, TaskList, decode, encode
from penstock.protocol.groups import BlobRef, GeneratedGroup, RewardRequest, Sampling, ScoredGroup
from penstock.protocol.packs.task_promise import TaskPromise, TaskSettings
from penstock.protocol.record.lineage import SplitTotals
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.connections import Connections
from penstock.trainer.data.data_order import DataOrder
from penstock.trainer.data.dataset import Prompt
from penstock.trainer.errors import CheckpointError
from penstock.trainer.groups.dispatch import Dispatch, RunGroups
from penstock.trainer.groups.group_states import GroupStates, State
from penstock.trainer.groups.group_totals import Drop, DropReason, GroupTotals
from penstock.trainer.groups.issue import Issuer
from penstock.trainer.groups.issue_log import IssuedBefore, IssuedRange, IssueLog, SessionSettings
from penstock.trainer.groups.prompt_cursor import NOTHING_BEFORE, GroupKey, PromptCursor, order_id
from penstock.trainer.groups.task_packs import (
    choose_groups_per_message,
    evaluation_sampling,
    make_task,
    pack_tasks,
    task_bytes,
    training_sampling,
)
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.settings import EvalSettings, RolloutSettings


def rollout(**changes: object) -> RolloutSettings:
    return RolloutSettings.model_validate({"groups_per_step": 4, "max_staleness": 1, "group_size": 2, **changes})


class Issuing:
    """A cursor and the states of its groups, without a checkpoint or with what earlier sessions issued."""

    def __init__(self, limits: RolloutSettings, order: DataOrder, before: IssuedBefore = NOTHING_BEFORE) -> None:
        self.limits, self.groups = limits, GroupStates()
        self.cursor = PromptCursor(order, "order", self.groups)
        self.cursor.before = before

    @property
    def outstanding(self) -> list[str]:
        return self.cursor.outstanding()

    def plan(self, groups_per_message: int, *, lag: int = 0) -> list[tuple[GroupKey, ...]]:
        return self.cursor.plan(self.limits, groups_per_message, lag=lag)

    def settle(self, group_ids: Iterable[str]) -> None:
        for group_id in group_ids:
            self.groups.drop(Drop(group_id, DropReason.NO_SIGNAL, 0))
            self.cursor.close([group_id])

    def send_back(self, *group_ids: str) -> list[bool]:
        """Drop groups as stale; return of each whether its prompt is issued again."""
        for group_id in group_ids:
            self.groups.drop(Drop(group_id, DropReason.STALE, 0))
        return [self.cursor.queue_again(group_id, max_attempts=self.limits.max_attempts) for group_id in group_ids]

    def refusal(self, group_id: str) -> DropReason | None:
        """Return why a group would not be accepted now; nothing changes."""
        return copy.deepcopy(self.cursor).accept(group_id)


@given(
    st.integers(1, 40),
    st.integers(0, 4),
    st.integers(1, 40),
    st.lists(st.integers(0, 9), max_size=30),
    st.integers(1, 50),
)
def test_outstanding_groups_never_exceed_the_staleness_bound(per_step, staleness, per_message, closings, num_prompts):
    """In any order of training, at most (max_staleness + 1) * groups_per_step groups are outstanding."""
    limits = rollout(groups_per_step=per_step, max_staleness=staleness)
    issuing, issued = Issuing(limits, DataOrder(num_prompts, seed=0)), set[GroupKey]()
    for closing in closings:
        packs = issuing.plan(min(per_message, per_step))
        assert all(0 < len(pack) <= per_message for pack in packs)
        assert issued.isdisjoint(key for pack in packs for key in pack)
        issued.update(key for pack in packs for key in pack)
        assert per_step <= len(issuing.outstanding) <= limits.max_outstanding
        issuing.settle(issuing.outstanding[:closing])


@given(
    st.integers(1, 6),
    st.integers(0, 3),
    st.integers(1, 6),
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40),
)
def test_however_late_versions_are_announced_nothing_trained_in_order_is_too_old(per_step, limit, per_message, acts):
    """Sampled by the version they were issued for and trained in order of arrival, all groups are within the bound."""
    limits = rollout(groups_per_step=per_step, max_staleness=limit)
    issuing = Issuing(limits, DataOrder(7, seed=0))
    queue, version, announced = [], 0, 0
    for trains, announces in acts:
        packs = issuing.plan(min(per_message, per_step), lag=version - announced)
        queue += [(key, announced) for pack in packs for key in pack]
        if trains and len(queue) >= per_step:
            batch, queue = queue[:per_step], queue[per_step:]
            assert all(version - issued_for <= limit for _, issued_for in batch)
            issuing.settle(str(key) for key, _ in batch)
            version += 1
        if announces or not queue:
            announced = version


@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 3))
def test_every_prompt_is_issued_once_per_epoch(num_prompts: int, per_step: int, staleness: int):
    """Issuing and training in turn uses the whole data set before any prompt is issued again."""
    limits = rollout(groups_per_step=per_step, max_staleness=staleness)
    issuing, issued = Issuing(limits, DataOrder(num_prompts, seed=5)), []
    while len(issued) < 3 * num_prompts:
        issued += [key for pack in issuing.plan(per_step) for key in pack]
        issuing.settle(issuing.outstanding[:per_step])
    assert len(set(issued)) == len(issued)
    for epoch in range(3):
        prompts = [key.prompt for key in issued[epoch * num_prompts : (epoch + 1) * num_prompts]]
        assert sorted(prompts) == list(range(num_prompts))


def test_packs_of_a_step_are_whole():
    """A step's groups are cut into packs of the chosen size; the remainder of a bound waits for a whole pack."""
    issuing = Issuing(rollout(groups_per_step=10, max_staleness=1), DataOrder(100, seed=0))
    packs = issuing.plan(4)
    assert [len(pack) for pack in packs] == [4, 4, 2, 4, 4, 2]
    issuing.settle([str(packs[0][0])])
    assert issuing.plan(4) == []
    issuing.settle(str(key) for key in packs[0][1:])
    assert [len(pack) for pack in issuing.plan(4)] == [4]


def test_a_pack_is_cut_short_rather_than_starving_the_trainer():
    """With no staleness allowed, one dropped group is replaced by one group in a separate pack."""
    issuing = Issuing(rollout(groups_per_step=8, max_staleness=0), DataOrder(100, seed=0))
    issuing.settle([str(issuing.plan(8)[0][3])])
    assert [len(pack) for pack in issuing.plan(8)] == [1]
    assert len(issuing.outstanding) == 8


def in_order(num_prompts: int, *, max_attempts: int = 3, before: IssuedBefore = NOTHING_BEFORE) -> Issuing:
    """Two groups a step and none ahead, of prompts that are not shuffled."""
    limits = rollout(groups_per_step=2, max_staleness=0, max_attempts=max_attempts)
    return Issuing(limits, DataOrder(num_prompts, seed=0, shuffle=False), before)


def test_stale_groups_are_issued_again_before_new_prompts_a_bounded_number_of_times():
    """A stale group is issued as the next attempt; after the last one its prompt is skipped."""
    issuing = in_order(10, max_attempts=2)
    issuing.plan(2)
    assert issuing.send_back("e0.p1.a0") == [True]
    assert issuing.plan(2) == [(GroupKey(0, 1, 1),)]
    assert issuing.send_back("e0.p1.a1") == [False]
    document = issuing.cursor.to_document()
    assert [document[f"num_{name}"] for name in ("issued", "issued_again", "given_up")] == [3, 1, 1]


def test_a_group_of_an_earlier_session_counts_once():
    """A group issued after the checkpoint is used when it arrives, and its prompt is not issued again."""
    issuing = in_order(4, before=IssuedBefore(position=2))
    assert issuing.cursor.accept("e0.p1.a0") is None
    assert issuing.refusal("e0.p9.a0") is DropReason.FOREIGN  # no such prompt
    issuing.settle(["e0.p1.a0"])
    assert issuing.refusal("e0.p1.a0") is DropReason.DUPLICATE
    assert [str(key) for pack in issuing.plan(2) for key in pack] == ["e0.p0.a0", "e0.p2.a0"]
    assert not issuing.cursor.ahead
    assert issuing.refusal("e0.p1.a0") is DropReason.DUPLICATE


def test_a_group_that_was_never_issued_is_foreign():
    """Beyond what any session reached, and a later attempt that none issued: neither is used or has an effect."""
    issuing = in_order(8)
    issuing.plan(2)
    issuing.send_back("e0.p1.a0")
    assert issuing.refusal("e0.p2.a0") is DropReason.FOREIGN
    issuing.cursor.before = IssuedBefore(position=4, later=frozenset({"e0.p2.a1"}))
    for group_id in ("e0.p4.a0", "e1.p0.a0", "e0.p0.a1", "e0.p1.a1", "e0.p1.a2", "e0.p3.a1", "e0.p8.a0"):
        assert issuing.refusal(group_id) is DropReason.FOREIGN
    for group_id in ("e0.p2.a0", "e0.p3.a0", "e0.p2.a1"):
        assert issuing.refusal(group_id) is None
    assert issuing.refusal("e0.p1.a0") is DropReason.DUPLICATE
    issuing.settle(["e0.p0.a0"])
    assert issuing.refusal("e0.p0.a0") is DropReason.DUPLICATE


def test_state_of_other_data_is_refused():
    """A checkpoint whose data, order or form differ is refused, with the settings to restore."""
    order = DataOrder(4, seed=0)
    assert len({order_id(order, "a"), order_id(order, "b"), order_id(replace(order, seed=1), "a")}) == 3
    another = PromptCursor(order, "another", GroupStates())
    with pytest.raises(CheckpointError, match=r"prompts of other data .* trainer.resume = false"):
        another.resume(in_order(4).cursor.to_document())
    with pytest.raises(CheckpointError, match=r"expected dispatch_state\.v1"):
        another.resume({})


def prompt(num_tokens: int = 21, text: str = "sort", truth: str = '"1"') -> Prompt:
    return Prompt(0, tuple(range(100_000, 100_000 + num_tokens)), text, RewardRequest(name="auto", ground_truth=truth))


def task(prompt: Prompt, group_id: str = "e0.p0.a0"):
    sampling = Sampling(max_new_tokens=9, stop_token_ids=(2,))
    return make_task(prompt, group_id, sampling=sampling, group_size=8, split="train", issued_version=PolicyVersion(3))


def test_training_and_evaluation_end_at_the_same_strings():
    """Each task carries rollout.stop, in either split; the size of a task counts it."""
    stop = ("</answer>", "停")
    rollout = RolloutSettings(stop=stop, max_new_tokens=9, temperature=0.5)
    training = training_sampling(rollout, [2])
    assert training == Sampling(max_new_tokens=9, temperature=0.5, stop_token_ids=(2,), stop=stop)
    evaluation = evaluation_sampling(EvalSettings(), rollout, [2])
    assert evaluation == Sampling(max_new_tokens=9, temperature=0.0, stop_token_ids=(2,), stop=stop)
    assert evaluation_sampling(EvalSettings(max_new_tokens=4), rollout, [2]).max_new_tokens == 4
    narrow = EvalSettings(temperature=0.6, top_p=0.9, top_k=20)
    assert evaluation_sampling(narrow, rollout, [2]) == evaluation.model_copy(
        update={"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    )
    with_stop = make_task(
        prompt(), "e0.p0.a0", sampling=training, group_size=8, split="train", issued_version=PolicyVersion(3)
    )
    assert task_bytes(with_stop) >= task_bytes(task(prompt())) + len("".join(stop).encode())
    issued = pack_tasks([with_stop]).announced("run")
    assert decode(encode(issued), TaskIssued) == issued


@pytest.mark.parametrize("stop", [[""], ["x" * 201], ["x"] * 17, [5]])
def test_stop_strings_are_bounded(stop: list[str]):
    """Empty, long or many strings are refused before the run."""
    with pytest.raises(ValueError, match="stop"):
        RolloutSettings(stop=stop)  # type: ignore[arg-type]


def test_a_pack_is_a_message_while_it_fits_and_an_object_when_it_does_not():
    """Small tasks are sent inside the message, large ones as a stored list that decodes to the same tasks."""
    small = pack_tasks([task(prompt(), f"e0.p{i}.a0") for i in range(12)])
    message = small.announced("run")
    assert message.tasks == small.tasks
    assert small.pack_id.startswith("e0.p0.a0.n12.")
    assert len(encode(message)) < 12_000
    large = pack_tasks([task(prompt(num_tokens=20_000))])
    assert large.blob is not None
    assert decode(large.blob, TaskList).tasks == large.tasks
    stored = BlobRef(key="k", size_bytes=1, sha256="0" * 64)
    assert large.announced("run", stored).tasks_blob == stored
    with pytest.raises(ValueError, match="store its blob first"):
        large.announced("run")
    with pytest.raises(ValueError, match="it has no blob to store"):
        small.announced("run", stored)


@given(st.integers(1, 3000), st.text(max_size=2000), st.text(max_size=200), st.integers(1, 12))
def test_a_pack_without_a_blob_always_fits_into_a_message(num_tokens: int, text: str, truth: str, count: int):
    """The estimate of a task's size is never below its encoded size."""
    pack = pack_tasks([task(prompt(num_tokens, text, json.dumps(truth)), f"e0.p{i}.a0") for i in range(count)])
    if pack.blob is None:
        assert len(encode(pack.announced("a" * 48))) <= min(MAX_FACT_BYTES, sum(map(task_bytes, pack.tasks)) + 512)


def test_pack_ids_follow_from_their_groups():
    """The same groups have the same pack id, other groups a different one."""
    first = pack_tasks([task(prompt(), "e0.p0.a0"), task(prompt(), "e0.p1.a0")])
    assert first.pack_id == pack_tasks(first.tasks).pack_id
    assert first.pack_id != pack_tasks([task(prompt(), "e0.p0.a0"), task(prompt(), "e0.p2.a0")]).pack_id


@pytest.mark.parametrize(
    ("changes", "prompt_tokens", "bytes_per_task", "expected"),
    [
        ({"groups_per_step": 48, "group_size": 8, "max_new_tokens": 9}, 21, 900, 12),  # the quickstart
        ({"groups_per_step": 32, "group_size": 8, "max_new_tokens": 256}, 200, 2_000, 4),
        ({"groups_per_step": 32, "group_size": 8, "max_new_tokens": 8192}, 1000, 8_000, 1),
        ({"groups_per_step": 48, "group_size": 1, "max_new_tokens": 1}, 10, 8_000, 4),  # by bytes
        ({"groups_per_step": 10, "group_size": 1, "max_new_tokens": 1}, 10, 600, 2),
        ({"groups_per_step": 10, "groups_per_message": 7}, 10, 600, 7),
        ({"groups_per_step": 1}, 10, 600, 1),
    ],
)
def test_small_groups_share_a_message(changes, prompt_tokens, bytes_per_task, expected):
    """The number of groups in a message follows from bytes, tokens and a step's share of a worker."""
    chosen = choose_groups_per_message(rollout(**changes), prompt_tokens=prompt_tokens, bytes_per_task=bytes_per_task)
    assert chosen == expected


def test_an_attempt_that_was_refused_is_not_issued_again_under_its_id():
    """The broker would discard it as a duplicate: the next attempt skips its number, or the prompt is skipped."""
    for max_attempts, again in ((3, [GroupKey(0, 0, 1), GroupKey(0, 1, 2)]), (2, [GroupKey(0, 0, 1)])):
        issuing = in_order(10, max_attempts=max_attempts, before=IssuedBefore(later=frozenset({"e0.p1.a1"})))
        issuing.plan(2)
        issuing.groups.arrive("e0.p1.a0", 1)  # before the attempt of an earlier session, which had dropped it
        assert issuing.cursor.accept("e0.p1.a1") is DropReason.DUPLICATE
        resumed = Issuing(issuing.limits, issuing.cursor.order)
        resumed.groups.issue(issuing.outstanding)
        resumed.cursor.resume(document := json.loads(json.dumps(issuing.cursor.to_document())))
        assert resumed.cursor.to_document() == document
        assert resumed.send_back("e0.p0.a0", "e0.p1.a0") == [True, max_attempts == 3]
        assert resumed.cursor.again == again
        assert not resumed.cursor.refused


def test_the_next_attempt_from_an_earlier_session_supersedes_the_older():
    """A killed session had dropped a group and issued its prompt again: the newer is used, the older closed."""
    issuing = in_order(10, before=IssuedBefore(position=2, later=frozenset({"e0.p1.a1"})))
    issuing.plan(2)
    queued, held = copy.deepcopy(issuing), copy.deepcopy(issuing)
    assert issuing.cursor.accept("e0.p1.a1") is None
    assert issuing.outstanding == ["e0.p0.a0", "e0.p1.a1"]
    assert issuing.refusal("e0.p1.a0") is DropReason.DUPLICATE
    held.groups.arrive("e0.p1.a0", 1)
    assert held.refusal("e0.p1.a1") is DropReason.DUPLICATE
    queued.send_back("e0.p1.a0")  # queued, when its next attempt arrives unasked
    assert queued.cursor.accept("e0.p1.a1") is None
    assert (queued.cursor.again, queued.outstanding) == ([], ["e0.p0.a0", "e0.p1.a1"])


@pytest.mark.parametrize(
    "group_id",
    [
        *("e0.p1", "eval.v1.p2.s0", "e0.p1.a-1", "e0.p1.a0 ", " e0.p1.a0", "e0.p1.a0\n", "e٠.p1.a0"),
        *("e00.p1.a0", "e0.p01.a0", "e0.p1.a00", "e0.p1.a" + "9" * 19, f"e0.p{'9' * 50}.a0"),
    ],
)
def test_a_group_has_one_id(group_id: str) -> None:
    """Anything but e<epoch>.p<prompt>.a<attempt> is foreign; another spelling would be a second group of its prompt."""
    with pytest.raises(ValueError, match="is not the id of a training group"):
        GroupKey.parse(group_id)
    assert GroupKey.parse("e1.p23.a4") == GroupKey(1, 23, 4)


def test_a_refused_forged_attempt_takes_no_attempt_from_its_prompt() -> None:
    """A later attempt that was never issued is foreign, and the next attempt keeps its number."""
    dispatch = dispatch_of(rollout(), num_prompts=8, shuffle=False)
    dispatch.next_packs(PolicyVersion(0))
    for forged in ("e0.p0.a1", "e0.p0.a7", "e3.p0.a0"):
        assert dispatch.accept(forged) is DropReason.FOREIGN
    assert dispatch.drop(Drop("e0.p0.a0", DropReason.STALE, 0))
    assert dispatch.cursor.again == [GroupKey(0, 0, 1)]
    assert dispatch.cursor.may_arrive("e0.p0.a1")
    assert not dispatch.cursor.may_arrive("e0.p9.a1")


class _Prompts(list[Prompt]):
    """Replace the set of prompts of a data file."""

    fingerprint = "of no file"
    num_tokens = 100


def numbered(num_prompts: int) -> list[Prompt]:
    return [replace(prompt(text=f"sort {n}"), index=n) for n in range(num_prompts)]


def dispatch_of(limits: RolloutSettings, *, num_prompts: int = 12, shuffle: bool = True) -> Dispatch:
    order = DataOrder(num_prompts, seed=1, shuffle=shuffle)
    prompts: Any = _Prompts(numbered(num_prompts))
    return Dispatch(prompts, order=order, rollout=limits, stop_token_ids=(2,))


def test_a_second_session_issues_what_the_first_one_would_have() -> None:
    """The same packs, after the same drops, from a stored document."""
    limits = rollout(groups_per_step=48, group_size=8, max_new_tokens=9, max_staleness=2)
    first, second = (dispatch_of(limits, num_prompts=200) for _ in range(2))
    packs = first.next_packs(PolicyVersion(0))
    assert [len(pack.tasks) for pack in packs] == [12] * 12
    assert first.next_packs(PolicyVersion(0)) == []
    done = [task.group_id for pack in packs[:4] for task in pack.tasks]
    assert not any(map(first.accept, done))
    assert first.drop(Drop(done[0], DropReason.STALE, 0))
    for group_id in done[1:]:
        assert first.drop(Drop(group_id, DropReason.NO_SIGNAL, 0, is_final=True))
    document = json.loads(json.dumps(first.cursor.to_document()))
    second.groups.issue(document["outstanding"])
    second.groups.totals = GroupTotals(SplitTotals(issued=document["num_issued"]))
    second.cursor.resume(document)
    assert second.cursor.to_document() == document
    again = first.next_packs(PolicyVersion(1))
    assert second.next_packs(PolicyVersion(1)) == again
    task = again[0].tasks[0]
    assert (task.group_id, task.attempt, task.issued_version) == (done[0].replace("a0", "a1"), 1, 1)
    assert second.accept(done[1]) is DropReason.DUPLICATE


def test_a_prompt_is_read_once_for_its_task() -> None:
    """With its images, which the message needs too: to read and decode them again would double the work of issuing."""
    read: list[int] = []

    class Prompts(_Prompts):
        def __getitem__(self, index: int) -> Prompt:  # type: ignore[override]
            read.append(index)
            return super().__getitem__(index)

    prompts: Any = Prompts(numbered(12))
    dispatch = Dispatch(prompts, order=DataOrder(12, seed=1), rollout=rollout(), stop_token_ids=(2,))
    read.clear()
    issued = [task.group_id for pack in dispatch.next_packs(PolicyVersion(0)) for task in pack.tasks]
    assert sorted(read) == sorted(GroupKey.parse(group_id).prompt for group_id in issued)


def test_what_was_asked_for_is_known_until_the_group_is_closed() -> None:
    """Of a task of this session all is known; of an earlier one's prompt and reward, and recorded settings."""
    first, later = dispatch_of(rollout()), dispatch_of(rollout())
    issued = first.next_packs(PolicyVersion(0))[0].tasks[0]
    assert first.promise(issued.group_id) == TaskPromise.of(issued)
    assert first.promise(issued.group_id).settings[0].group_size == 2
    promise = later.promise(issued.group_id)
    assert (promise.content, promise.split, promise.attempt) == (TaskPromise.of(issued).content, "train", 0)
    assert promise.settings == ()
    assert not promise.is_one_completion
    four, eight = (SessionSettings(TaskSettings(n, 64, "single_turn"), TaskSettings(1, 9, "x")) for n in (4, 8))
    ranges = (IssuedRange(four, 0, 6), IssuedRange(eight, 5, 9, frozenset({"e0.p1.a1"})))
    later.cursor.before = IssuedBefore(9, frozenset({"e0.p1.a1"}), ranges)
    ids = [str(GroupKey(*later.cursor.order.at(position), 0)) for position in range(12)]
    sizes = [[s.group_size for s in later.promise(group_id).settings] for group_id in ids]
    assert sizes == [[4]] * 5 + [[4, 8]] + [[8]] * 3 + [[4, 8]] * 3  # the last three: any of the sessions'
    assert [s.group_size for s in later.promise("e0.p1.a1").settings] == [8]
    again = [task.group_id for task in later.next_packs(PolicyVersion(0))[0].tasks]
    assert [[s.group_size for s in later.promise(group_id).settings] for group_id in again] == [[2, 4]] * len(again)


def test_a_dead_lettered_group_is_held_against_its_task_when_it_arrives() -> None:
    """Its letter may be sent again, after other groups were issued: its size and length are those it was asked for."""
    dispatch = dispatch_of(rollout())
    dead, trained, *_ = (task.group_id for pack in dispatch.next_packs(PolicyVersion(0)) for task in pack.tasks)
    asked_for = dispatch.promise(dead)
    dispatch.drop(Drop(dead, DropReason.DEAD, 0, is_final=True))
    dispatch.drop(Drop(trained, DropReason.NO_SIGNAL, 0, is_final=True))
    assert dispatch.next_packs(PolicyVersion(1))
    assert dispatch.accept(dead) is None
    assert dispatch.promise(dead) == asked_for
    assert asked_for.settings == (TaskSettings(2, 256, "single_turn"),)
    with pytest.raises(PackError, match="1 trajectories, its task asked for 2"):
        dispatch.promise(dead).check_lengths(dead, [9], has_baseline=False)


def test_a_group_of_an_earlier_session_is_held_against_the_settings_it_was_issued_under(tmp_path: Path) -> None:
    """Its size and length are those of that session, whatever the settings are now."""
    first, later = dispatch_of(rollout(group_size=4)), dispatch_of(rollout(group_size=2))
    settings = SessionSettings(TaskSettings(4, 64, "single_turn"), TaskSettings(1, 64, "single_turn"))
    log = IssueLog(tmp_path, first.cursor.order_id, settings=settings, first=0)
    issued = first.next_packs(PolicyVersion(0))[0].tasks[0]
    log.append(first.cursor.position, [issued.group_id])
    later.cursor.before = IssueLog(tmp_path, later.cursor.order_id).before
    promise = later.promise(issued.group_id)
    promise.check_lengths(issued.group_id, [64, 1, 1, 1], has_baseline=False)
    for lengths, baseline, reason in (
        ([9], False, "1 trajectories, its task asked for 4"),
        ([9, 9], False, "2 trajectories, its task asked for 4"),
        ([65, 1, 1, 1], False, "a completion of 65 tokens, its task allows 64"),
        ([9, 9, 9, 9, 9], True, "a baseline, its task asked for none"),
    ):
        with pytest.raises(PackError, match=reason):
            promise.check_lengths(issued.group_id, lengths, has_baseline=baseline)


@given(
    st.integers(0, 3),
    st.lists(st.tuples(st.sampled_from(["arrive", "close", "back", "again", "step"]), st.integers(0, 50)), max_size=40),
)
@examples(40)
def test_a_group_is_late_exactly_while_it_is_under_way_and_too_old_for_the_next_step(limit, acts):
    """Whatever arrived, was closed, came back or was packed again, it says what a search of all groups says."""
    dispatch = dispatch_of(rollout(max_staleness=limit))
    issued: dict[str, PolicyVersion] = {}
    version = PolicyVersion(0)

    def note(packs):
        issued.update((task.group_id, version) for pack in packs for task in pack.tasks)

    note(dispatch.next_packs(version))
    for act, pick in acts:
        outstanding = sorted(dispatch.groups.outstanding())
        chosen = outstanding[pick % len(outstanding)]
        if act == "arrive":
            if dispatch.groups.state(chosen) is State.ISSUED:
                dispatch.groups.arrive(chosen, 1)
                read = GeneratedGroup.model_construct(group_id=chosen)
                nothing: Any = None
                dispatch.groups.offer(ReadyGroup(ScoredGroup.model_construct(generated=read), nothing, nothing))
        elif act == "close":
            dispatch.drop(Drop(chosen, DropReason.NO_SIGNAL, 0, is_final=True))
        elif act == "back":
            dispatch.drop(Drop(chosen, DropReason.STALE, 0))
        elif act == "again":
            note([dispatch.pack_again([chosen], version)])
        else:
            version = PolicyVersion(version + 1)
        if act != "arrive":
            note(dispatch.next_packs(version))
        under_way = set(dispatch.groups.outstanding()) - {g.group_id for g in dispatch.groups.held(State.READY)}
        expected = any(issued[group_id] == version - limit for group_id in under_way)
        assert dispatch.groups.is_late(version) == expected


def test_tasks_name_the_environment_of_the_run_file() -> None:
    """`rollout.environment` is in every task, so that workers choose the environment by it."""
    dispatch = dispatch_of(rollout(groups_per_step=3, max_staleness=0, environment="maze"))
    tasks = [task for pack in dispatch.next_packs(PolicyVersion(0)) for task in pack.tasks]
    assert [task.environment for task in tasks] == ["maze"] * 3


def test_an_unexpected_error_of_the_issuing_thread_is_raised_by_check() -> None:
    """Without a bus the thread ends with AttributeError, and the next `check` raises it."""
    dispatch = dispatch_of(rollout())
    issuer = Issuer(Connections("run", None, None), dispatch, RunGroups(dispatch.groups))  # type: ignore[arg-type]
    issuer.check()
    with issuer:
        issuer.advance(PolicyVersion(0), 10)
        issuer._thread.join(20.0)
    with pytest.raises(AttributeError, match="publish"):
        issuer.check()
