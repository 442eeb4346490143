"""The experts of each token in packs: they round-trip, the prompt's once, and what no router can choose is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tests.episodes import forked, group_of, one_turn
from tests.groups import make_group
from tests.protocol.packs.written_packs import altered, table_of, task_of
from tests.trainer.groups.stored_groups import taught

from penstock.protocol.episode import Episode
from penstock.protocol.errors import PackError
from penstock.protocol.groups import RouterShape, Sampling
from penstock.protocol.packs import group_pack, optional_columns, pack_bounds
from penstock.protocol.packs.task_promise import TaskPromise, TaskSettings
from penstock.protocol.token_annotations import ExpertChoices, dtype_of
from penstock.protocol.trajectory import Group

SMALL = RouterShape(num_layers=3, num_experts=8, top_k=2)
LARGE = RouterShape(num_layers=2, num_experts=300, top_k=4)
ROUTED = Sampling(max_new_tokens=64, routers=SMALL)
PROMPT = (5, 6, 7, 8, 9, 10)


def choices(shape: RouterShape, num_tokens: int, random: np.random.Generator) -> np.ndarray:
    """Return random experts [num_tokens, layers, k], rising along k."""
    order = random.random((num_tokens, shape.num_layers, shape.num_experts)).argsort(-1)[..., : shape.top_k]
    return np.sort(order, axis=-1).astype(dtype_of(shape))


def routed(group: Group, shape: RouterShape, *, seed: int = 0) -> Group:
    """Return a group whose trajectories say which experts computed their tokens: the same for the prompt's."""
    random = np.random.default_rng(seed)
    prompt = choices(shape, group.num_prompt_tokens, random)
    rows = []
    for row in group.trajectories:
        own = choices(shape, len(row.token_ids) - 1 - len(prompt), random)
        rows.append(replace(row, experts=ExpertChoices(shape, np.concatenate([prompt, own]))))
    return replace(group, trajectories=tuple(rows))


def routed_episode(episode: Episode, shape: RouterShape, random: np.random.Generator) -> Episode:
    """Return an episode whose rows say which experts computed their tokens: the same where they begin alike."""
    ids: list[np.ndarray] = []
    for row in episode.rows:
        first = choices(shape, 0, random) if row.parent is None else ids[row.parent][: row.prefix_len]
        own = choices(shape, len(row.trajectory.token_ids) - 1 - len(first), random)
        ids.append(np.concatenate([first, own]))
    rows = [
        replace(row, trajectory=replace(row.trajectory, experts=ExpertChoices(shape, one)))
        for row, one in zip(episode.rows, ids, strict=True)
    ]
    return replace(episode, rows=tuple(rows))


def group(number: int = 0) -> Group:
    return make_group(f"e0.p{number}.a0", size=3, prompt_ids=PROMPT, seed=number)


@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_a_pack_gives_back_which_experts_computed_each_token(shape: RouterShape) -> None:
    """In 8 or 16 bits, with a teacher and without, beside a group that says nothing."""
    groups = [routed(group(0), shape), group(1), taught(routed(group(2), shape), 2)]
    for kept in (groups[:2], groups):
        data = group_pack.encode(kept)
        found = group_pack.decode(data, described=[one.summary(n) for n, one in enumerate(kept)])
        assert [one.routers for one in found] == [shape, None, shape][: len(kept)]
        for before, after in zip(kept, found, strict=True):
            for one, other in zip(before.trajectories, after.trajectories, strict=True):
                assert (one.experts is None) == (other.experts is None)
                if one.experts is not None and other.experts is not None:
                    assert one.experts.ids.dtype == other.experts.ids.dtype
                    np.testing.assert_array_equal(one.experts.ids, other.experts.ids)
        assert group_pack.decode_texts(data, [0])[0].group_id == "e0.p0.a0"
        assert group_pack.decode(data, [1])[0].routers is None


def test_the_choices_of_a_prompt_are_stored_once() -> None:
    """Rows whose first tokens have the same experts as those of the first row refer to it; others do not."""
    whole = routed(group(), SMALL)
    columns = table_of(whole).to_pydict()
    shared, stored = columns["experts_shared"], columns["experts"]
    assert [columns[name][0] for name in ("expert_layers", "expert_top_k", "num_experts")] == [3, 2, 8]
    assert shared[0] == 0
    assert all(count >= len(PROMPT) for count in shared[1:])
    for row, count, one in zip(whole.trajectories, shared, stored, strict=True):
        assert len(one) == (len(row.token_ids) - 1 - count) * SMALL.bytes_per_token
    other = whole.trajectories[1].experts
    assert other is not None
    ids = other.ids.copy()
    ids[2, 0] = [6, 7] if ids[2, 0].tolist() != [6, 7] else [0, 1]
    rows = (whole.trajectories[0], replace(whole.trajectories[1], experts=ExpertChoices(SMALL, ids)))
    changed = replace(whole, trajectories=rows)
    assert table_of(changed)["experts_shared"].to_pylist() == [0, 2]
    (found,) = group_pack.decode(group_pack.encode([changed]))
    assert found.trajectories[1].experts is not None
    np.testing.assert_array_equal(found.trajectories[1].experts.ids, ids)


def test_rows_of_an_episode_share_the_choices_of_the_row_that_they_continue() -> None:
    """They come back, beside groups of other kinds, and what a fork shares with its parent is stored once."""
    random = np.random.default_rng(0)
    episodes = [routed_episode(one, SMALL, random) for one in (forked(), one_turn(2))]
    whole = group_of(*episodes)
    assert whole.routers == SMALL
    shared = table_of(whole)["experts_shared"].to_pylist()
    assert shared[:2] == [0, 5]  # the fork is behind the fifth token of the first row
    assert table_of(taught(whole, 2))["experts_shared"].to_pylist() == shared
    kept = [taught(whole, 2), routed(group(1), LARGE), group(2)]
    found = group_pack.decode(group_pack.encode(kept), described=[one.summary(n) for n, one in enumerate(kept)])
    assert [one.routers for one in found] == [SMALL, LARGE, None]
    for before, after in zip(kept[:2], found[:2], strict=True):
        for one, other in zip(before.trajectories, after.trajectories, strict=True):
            assert one.experts is not None
            assert other.experts is not None
            np.testing.assert_array_equal(one.experts.ids, other.experts.ids)
    with pytest.raises(PackError, match=r"choices of no experts, its task asked for those of 2 of 8 experts"):
        TaskPromise.of(task_of(whole, sampling=ROUTED)).check(group_of(forked(), one_turn(2)))


def test_choices_that_no_reader_would_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By who writes them and by who reads them: a few stored bytes can stand for many, where rows share them."""
    whole = group_of(routed_episode(forked(), SMALL, np.random.default_rng(0)))
    data = group_pack.encode([whole])
    monkeypatch.setattr(optional_columns, "MAX_EXPANDED_BYTES", 6 * (8 + 8 + 3) - 1)
    for refused in (lambda: group_pack.encode([whole]), lambda: group_pack.decode(data)):
        with pytest.raises(PackError, match=r"experts of 19 tokens in 3 rows have 114 bytes, at most 113: 2 of 8"):
            refused()


def _with(ids: np.ndarray, place: tuple[int, ...], expert: int) -> np.ndarray:
    ids[place] = expert
    return ids


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ids: _with(ids, (1, 0, -1), 8), "expert 8, expected one of 0 to 7"),
        (lambda ids: _with(ids, (0, 2), 3), "the same expert twice"),
        (lambda ids: ids[:-1], r"experts of \d+ tokens of \d+, expected \d+: all but the last"),
        (lambda ids: ids.astype(np.uint16), r"uint16 of shape .*, expected uint8"),
        (lambda ids: ids[:, :1], r"of shape \(\d+, 1, 2\), expected uint8 of shape \(tokens, 3, 2\)"),
    ],
)
def test_what_no_router_can_choose_is_refused(change: Callable[[np.ndarray], np.ndarray], words: str) -> None:
    row = routed(group(), SMALL).trajectories[1]
    assert row.experts is not None
    with pytest.raises(PackError, match=words):
        replace(row, experts=ExpertChoices(SMALL, change(row.experts.ids.copy())))


@pytest.mark.parametrize(
    ("column", "change", "words"),
    [
        (
            "experts",
            lambda values: [values[0], values[1][:-1], values[2]],
            r"bytes, expected \d+: 2 of 8 experts in 3 layers",
        ),
        (
            "experts",
            lambda values: [values[0], b"\xff" * len(values[1]), values[2]],
            "expert 255, expected one of 0 to 7",
        ),
        (
            "experts_shared",
            lambda values: [0, 99, 0],
            "shares the experts of 99 tokens with an earlier row, expected 0 to",
        ),
        ("experts_shared", lambda values: [1, *values[1:]], "shares the experts of 1 tokens .* expected 0 to 0"),
        ("expert_layers", lambda values: [0, 0, 0], "experts of tokens in a group of a model without experts"),
        ("expert_layers", lambda values: [3, 2, 3], "differ in expert_layers"),
        ("num_experts", lambda values: [0, 0, 0], "num_experts"),
    ],
)
def test_a_hostile_pack_of_experts_is_refused(column: str, change: Callable[[list], list], words: str) -> None:
    """A worker can write anything; a reader names what does not fit."""
    with pytest.raises(PackError, match=words):
        group_pack.decode(altered(routed(group(), SMALL), column, change))


def test_a_group_that_lacks_its_experts_breaks_the_promise_of_its_task() -> None:
    plain = group()
    task = task_of(plain, sampling=ROUTED)
    promise = TaskPromise.of(task)
    promise.check(routed(plain, SMALL))
    for other, named in ((plain, "no experts"), (routed(plain, LARGE), "4 of 300 experts in 2 layers")):
        with pytest.raises(
            PackError, match=rf"choices of {named}, its task asked for those of 2 of 8 experts in 3 layers"
        ):
            promise.check(other)
    assert TaskSettings.of(task).routers == "2 of 8 experts in 3 layers"


def test_a_group_says_it_of_all_its_trajectories() -> None:
    whole = routed(group(), SMALL)
    with pytest.raises(PackError, match="not the same"):
        replace(whole, trajectories=(*whole.trajectories[:2], replace(whole.trajectories[2], experts=None)))


def test_a_pack_may_be_larger_by_the_experts_of_its_tokens() -> None:
    """And by no more: the limit grows with the tokens that the message names and the bytes of each."""
    one = group().summary(0).model_copy(update={"completion_tokens": (10_000, 10_000, 10_000)})
    plain = pack_bounds.max_bytes([one])
    more = pack_bounds.max_bytes([one.model_copy(update={"routers": SMALL})])
    assert more == plain + 6 * (30_000 + 3 * len(PROMPT))
    episodes = group_of(forked()).summary(0).model_copy(update={"row_tokens": 50_000})
    plain = pack_bounds.max_bytes([episodes])
    assert pack_bounds.max_bytes([episodes.model_copy(update={"routers": SMALL})]) == plain + 6 * 50_000
