"""Packs of episodes: round trip, shared prefixes stored once, and everything inconsistent refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from tests.episodes import forked, group_of, make_row, one_turn
from tests.groups import make_group
from tests.protocol.packs.written_packs import altered, table_of, task_of

from penstock.protocol.errors import PackError
from penstock.protocol.groups import BlobRef, RewardRequest
from penstock.protocol.packs import group_pack, pack_bounds
from penstock.protocol.packs.task_promise import TaskPromise

FORKED = forked(
    reward_parts=(("found", 1.0), ("format", -0.5)), messages='[{"role": "user"}]', counts=(("retries", 2),)
)
GROUP = group_of(FORKED, one_turn(2, status="timeout", time_spent_by="policy", reward=None))


def test_episodes_come_back_as_they_were_written() -> None:
    """Every field of every episode, row and turn; a group without episodes in the same pack has none."""
    plain = make_group("e0.p1.a0", size=3)
    back, other = group_pack.decode(group_pack.encode([GROUP, plain]), described=[GROUP.summary(0), plain.summary(1)])
    assert not other.episodes
    assert len(other.trajectories) == 3
    for one, two in zip(GROUP.episodes, back.episodes, strict=True):
        plain_fields = [name for name in one.__dataclass_fields__ if name != "rows"]
        assert [getattr(one, name) for name in plain_fields] == [getattr(two, name) for name in plain_fields]
        for row, read in zip(one.rows, two.rows, strict=True):
            assert (row.turns, row.root, row.parent, row.prefix_len) == (
                read.turns,
                read.root,
                read.parent,
                read.prefix_len,
            )
            for name in ("token_ids", "loss_mask", "behaviour_logprobs"):
                assert np.array_equal(getattr(row.trajectory, name), getattr(read.trajectory, name))
            assert row.trajectory.version_runs == read.trajectory.version_runs


def test_a_shared_prefix_is_stored_once() -> None:
    assert [len(ids) for ids in table_of(GROUP)["token_ids"].to_pylist()] == [8, 3, 3, 5]
    assert GROUP.summary(0).row_tokens == 8 + 8 + 3 + 5


def test_a_pack_without_episodes_is_what_it_was() -> None:
    assert table_of(make_group(size=2)).schema.names == group_pack.SCHEMA.names


def test_the_message_counts_episodes() -> None:
    """Two episodes of four rows: two lengths, two reasons, and the oldest version of any sampled token."""
    summary = GROUP.summary(0)
    assert (summary.completion_tokens, summary.finish_reasons) == ((7, 2), ("stop", "length"))
    assert (summary.rows, summary.oldest_version, summary.newest_version) == ((3, 1), 1, 3)
    (texts,) = group_pack.decode_texts(group_pack.encode([GROUP]), [0], described=[summary])
    assert (texts.completions, texts.finish_reasons) == (("thirteen", "other"), ("stop", "length"))
    assert [(one.reward, one.end_status) for one in texts.given] == [(1.0, "done"), (None, "timeout")]
    assert texts.given[0].messages == '[{"role": "user"}]'


ROW = FORKED.rows[0]
INCONSISTENT = {
    "no row": lambda: forked(rows=()),
    "first row of a sub-agent": lambda: forked(rows=(make_row([(0, [5]), (1, [6])], root="sub:x"),)),
    "a turn twice": lambda: forked(
        rows=(ROW, replace(FORKED.rows[2], turns=(FORKED.rows[2].turns[0]._replace(number=1),)))
    ),
    "a turn missing": lambda: forked(rows=(ROW, FORKED.rows[2])),
    "parent of another root": lambda: forked(rows=(ROW, replace(FORKED.rows[1], root="sub:x"))),
    "parent that is later": lambda: forked(rows=(ROW, replace(FORKED.rows[1], parent=1))),
    "prefix beyond the parent": lambda: forked(
        rows=(ROW, make_row([(0, [5, 6, 7, 11, 12, 8, 13, 2, 9]), (1, [4])], first_turn=2, parent=0, prefix_len=9))
    ),
    "other tokens in the prefix": lambda: forked(
        rows=(ROW, make_row([(0, [5, 6, 7, 11, 99, 9]), (1, [14])], first_turn=2, parent=0, prefix_len=5))
    ),
    "sampled token counted twice": lambda: forked(
        rows=(ROW, make_row([(0, [5, 6, 7]), (1, [11, 12]), (0, [9])], first_turn=2, parent=0, prefix_len=5))
    ),
    "prefix without a parent": lambda: replace(ROW, prefix_len=2),
    "turn on context": lambda: replace(ROW, turns=(ROW.turns[0]._replace(start=2, end=4), ROW.turns[1])),
    "sampled token in no turn": lambda: replace(ROW, turns=ROW.turns[:1]),
    "turns out of order": lambda: replace(ROW, turns=ROW.turns[::-1]),
    "turn reward": lambda: make_row([(0, [5]), (1, [6])], rewards=(float("nan"),)),
    "state": lambda: make_row([(0, [5]), (1, [6])], states=("x" * 201,)),
    "first token sampled": lambda: make_row([(1, [6])]),
    "root": lambda: replace(ROW, root="a b"),
    "finish": lambda: replace(ROW, trajectory=replace(ROW.trajectory, finish_reason="")),  # type: ignore[arg-type]
    "second completion text": lambda: forked(rows=(ROW, make_row([(0, [5]), (1, [6])], first_turn=2, text="more"))),
    "baseline rows": lambda: forked(
        rows=(replace(ROW, trajectory=replace(ROW.trajectory, is_baseline=True)), *FORKED.rows[1:])
    ),
    "negative prefix": lambda: replace(FORKED.rows[1], prefix_len=-1),
    "status": lambda: forked(status="ended", reward=None),
    "timeout of nobody": lambda: forked(status="timeout", reward=None),
    "time of no timeout": lambda: forked(time_spent_by="tools"),
    "reward": lambda: forked(reward=float("inf")),
    "reward part": lambda: forked(reward_parts=(("a", float("nan")),)),
    "reward part twice": lambda: forked(reward_parts=(("a", 1.0), ("a", 2.0))),
    "count": lambda: forked(counts=(("a", -1),)),
    "count twice": lambda: forked(counts=(("a", 1), ("a", 2))),
    "name": lambda: forked(group_id="a b"),
    "version of the environment": lambda: forked(environment_version="1" * 201),
    "seed": lambda: forked(seed=-1),
    "messages": lambda: forked(messages="{}"),
    "broken messages": lambda: forked(messages="[" * 100_000),
    "reward of a failure": lambda: forked(status="failed", reward=0.0),
    "failure in a group": lambda: group_of(FORKED, forked(1, status="failed", reward=None)),
    "episode of another group": lambda: group_of(FORKED, one_turn(1, group_id="e0.p9.a0")),
    "places": lambda: group_of(one_turn(1), FORKED),
    "same id": lambda: group_of(FORKED, replace(one_turn(1), episode_id=FORKED.episode_id)),
    "no episode": group_of,
    "other trajectories": lambda: replace(GROUP, trajectories=GROUP.trajectories[:-1]),
}


@pytest.mark.parametrize("what", INCONSISTENT)
def test_an_inconsistent_episode_is_refused(what: str) -> None:
    with pytest.raises(PackError):
        INCONSISTENT[what]()


def test_a_failure_has_no_rows_to_give() -> None:
    assert not forked(status="failed", reward=None, rows=()).is_trainable
    assert not forked(status="timeout", time_spent_by="tools", reward=None).is_trainable


HOSTILE = {
    "episode number": ("episode_number", [0, 0, 0, 2], "episode numbers"),
    "episodes mixed": ("episode_number", [0, 1, 0, 1], "episode numbers"),
    "some rows of none": ("episode_number", [0, 0, -1, -1], "episode numbers"),
    "another episode's parent": ("parent_row", [-1, 0, -1, -2], "shares"),
    "a later parent": ("parent_row", [-1, 1, -1, -1], "shares"),
    "too long a prefix": ("prefix_len", [0, 2**31 - 1, 0, 0], "shares"),
    "negative prefix": ("prefix_len", [0, -5, 0, 0], "shares"),
    "rows that disagree": ("seed", [7, 8, 7, 7], "differ in seed"),
    "messages of a later row": ("messages", ["[]", "[]", "", "[]"], "messages"),
    "reward parts": ("reward_parts", ['{"a": true}'] * 3 + ["{}"], "JSON object of numbers"),
    "odd turn spans": ("turn_spans", [[3, 5, 6], [6, 8], [2, 3], [3, 5]], "zip"),
    "status": ("end_status", ["ended"] * 3 + ["timeout"], "status"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_pack_of_episodes_is_refused(what: str) -> None:
    name, values, found = HOSTILE[what]
    with pytest.raises(PackError, match=found):
        group_pack.decode(altered(GROUP, name, lambda _: values), described=[GROUP.summary(0)])


def test_rows_that_stand_for_too_many_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few stored tokens must not become gigabytes: the sum is bounded before anything is put together."""
    monkeypatch.setattr("penstock.protocol.packs.episode_columns.MAX_ROW_TOKENS", 23)
    with pytest.raises(PackError, match="24 tokens together, at most 23"):
        group_pack.decode(altered(GROUP), described=[GROUP.summary(0)])


@pytest.mark.parametrize("changes", [{"rows": (2, 2)}, {"row_tokens": 25}], ids=str)
def test_a_pack_that_its_message_describes_otherwise_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(PackError, match=next(iter(changes))):
        group_pack.decode(altered(GROUP), described=[GROUP.summary(0).model_copy(update=changes)])


def test_a_reward_reads_no_episode_that_its_message_does_not_name() -> None:
    """The reward service checks the rows too, and that a given reward is finite."""
    data = group_pack.encode([GROUP])
    with pytest.raises(PackError, match="rows"):
        group_pack.decode_texts(data, [0], described=[GROUP.summary(0).model_copy(update={"rows": (2, 2)})])


def test_a_message_names_rows_for_every_episode_or_none() -> None:
    """A message that contradicts itself is malformed; one with too many rows is refused before its pack is fetched."""
    summary = GROUP.summary(0)
    for changes in ({"rows": (4,)}, {"rows": (4, 0)}, {"rows": ()}, {"row_tokens": None}):
        with pytest.raises(ValidationError, match="rows"):
            type(summary).model_validate(summary.model_dump() | changes)
    pack = BlobRef(key="k", size_bytes=1, sha256="0" * 64)
    for changes in ({"rows": (4097, 1)}, {"row_tokens": 2**25 + 1}):
        with pytest.raises(PackError, match="at most"):
            pack_bounds.check_message(pack, [summary.model_copy(update=changes)])


def test_a_group_of_episodes_is_held_against_its_task() -> None:
    """From the least to the group's size of episodes, of this prompt and reward, and of an environment."""
    asked = {"group_size": 3, "min_episodes": 2}
    TaskPromise.of(task_of(GROUP, **asked)).check(GROUP)
    refused = {
        "2 trajectories, its task asked for 3": {"min_episodes": None},
        "asked for 1": {"group_size": 1, "min_episodes": 1},
        "its prompt": {"prompt_text": "look up 38"},
        "what it is to be scored by": {"reward": RewardRequest(name="environment", ground_truth='"83"')},
        "one completion each": {"environment": "single_turn"},
    }
    for found, changes in refused.items():
        with pytest.raises(PackError, match=found):
            TaskPromise.of(task_of(GROUP, **asked | changes)).check(GROUP)


def test_a_given_reward_that_is_not_finite_is_refused_where_texts_are_read() -> None:
    data = altered(GROUP, "episode_reward", lambda _: [float("inf")] * 3 + [0.0])
    with pytest.raises(PackError, match="expected finite"):
        group_pack.decode_texts(data, [0])


def test_messages_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.protocol.episode.MAX_JSON_BYTES", 3)
    with pytest.raises(PackError, match="at most 3"):
        forked(messages="[  ]")
