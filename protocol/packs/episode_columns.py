"""Columns of a pack that holds episodes, beside those of every pack: from episodes to Arrow, and back; pure.

Each Parquet row is one row of an episode. The values of the episode are repeated in its rows, and its messages are in the
first. The token columns of a row hold what follows the tokens that it shares with its parent, so that these are stored
once; ``version_runs`` and ``turn_spans`` count from the beginning of the whole row. The rows of a group without episodes
in the same pack have the episode number -1.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.protocol.episode import Episode, EpisodeRow, Turn
from penstock.protocol.errors import PackError
from penstock.protocol.packs.pack_bounds import MAX_ROW_TOKENS
from penstock.protocol.packs.pack_rows import Rows, list_of, lists
from penstock.protocol.trajectory import Group, Trajectory

_NONE = -1
FIELDS = tuple(
    pa.field(name, kind, nullable=name == "episode_reward")
    for name, kind in {
        "episode_number": pa.int32(),  # among the episodes of the group that the pack holds; -1: no episode
        "episode_id": pa.string(),
        "episode_index": pa.int32(),
        "episode_attempt": pa.int32(),
        "environment": pa.string(),
        "environment_version": pa.string(),
        "seed": pa.int64(),
        "end_status": pa.string(),
        "time_spent_by": pa.string(),  # "" unless the status is timeout
        "episode_reward": pa.float64(),
        "reward_parts": pa.string(),  # JSON
        "counts": pa.string(),  # JSON
        "messages": pa.string(),  # JSON
        "root": pa.string(),
        "parent_row": pa.int32(),  # of the episode; -1: none
        "prefix_len": pa.int32(),
        "turn_numbers": list_of(pa.int32()),
        "turn_spans": list_of(pa.int32()),  # start, end, start, …
        "turn_rewards": list_of(pa.float64()),
        "turn_states": list_of(pa.string()),
    }.items()
)
MAY_BE_NULL = ("episode_reward",)
TEXT_COLUMNS = ("episode_number", "end_status", "episode_reward", "reward_parts", "messages")  # that a reward needs
_OF_EPISODE = (
    "episode_id", "episode_index", "episode_attempt", "environment", "environment_version", "seed", "end_status",
    "time_spent_by", "episode_reward", "reward_parts", "counts",
)  # fmt: skip


def shared_tokens(group: Group) -> list[int]:
    """Return for each row of a group how many of its first tokens are stored with another row."""
    if not group.episodes:
        return [0] * len(group.trajectories)
    return [row.prefix_len for episode in group.episodes for row in episode.rows]


def columns(groups: Sequence[Group]) -> list[pa.Array]:
    column_values: dict[str, list[Any]] = {field.name: [] for field in FIELDS}
    for values in itertools.chain.from_iterable(map(_row_values, groups)):
        for name, value in values.items():
            column_values[name].append(value)
    return [
        lists(column_values[field.name], field.type.value_type)
        if pa.types.is_list(field.type)
        else pa.array(column_values[field.name], field.type)
        for field in FIELDS
    ]


def _row_values(group: Group) -> Iterator[dict[str, Any]]:
    if not group.episodes:
        empty = {
            field.name: np.empty(0, dtype=field.type.value_type.to_pandas_dtype())
            if pa.types.is_list(field.type)
            else ""
            if pa.types.is_string(field.type)
            else None
            if field.nullable
            else _NONE
            for field in FIELDS
        }
        yield from (empty for _ in group.trajectories)
    for number, episode in enumerate(group.episodes):
        for place, row in enumerate(episode.rows):
            yield {
                "episode_number": number,
                "episode_id": episode.episode_id,
                "episode_index": episode.index,
                "episode_attempt": episode.attempt,
                "environment": episode.environment,
                "environment_version": episode.environment_version,
                "seed": episode.seed,
                "end_status": episode.status,
                "time_spent_by": episode.time_spent_by or "",
                "episode_reward": episode.reward,
                "reward_parts": json.dumps(dict(episode.reward_parts)),
                "counts": json.dumps(dict(episode.counts)),
                "messages": "" if place else episode.messages,
                "root": row.root,
                "parent_row": _NONE if row.parent is None else row.parent,
                "prefix_len": row.prefix_len,
                "turn_numbers": np.array([turn.number for turn in row.turns], dtype=np.int32),
                "turn_spans": np.array([(turn.start, turn.end) for turn in row.turns], dtype=np.int32).reshape(-1),
                "turn_rewards": np.array([turn.reward for turn in row.turns], dtype=np.float64),
                "turn_states": np.array([turn.state for turn in row.turns], dtype=object),
            }


def has_episodes(rows: Rows) -> bool:
    return "episode_number" in rows.table.column_names


@dataclass(frozen=True, slots=True)
class EpisodeSpan:
    """The rows of one episode: ``[start, end)`` among all rows that were read."""

    start: int
    end: int


def spans(rows: Rows) -> list[list[EpisodeSpan]]:
    """Return the episodes of each group; raises PackError unless they are numbered 0, 1, … with their rows together."""
    numbers = rows.values("episode_number")
    groups = []
    for start, end in itertools.pairwise(rows.starts):
        group_numbers = numbers[start:end]
        if group_numbers.count(_NONE) == len(group_numbers):
            groups.append([])
            continue
        starts = [start + i for i, number in enumerate(group_numbers) if not i or number != group_numbers[i - 1]]
        if [numbers[at] for at in starts] != list(range(len(starts))):
            raise PackError(
                f"the rows of a group have the episode numbers {group_numbers[:8]}, expected 0, 1, … each together"
            )
        groups.append([EpisodeSpan(*pair) for pair in itertools.pairwise([*starts, end])])
    return groups


@dataclass(frozen=True, slots=True)
class Sharing:
    parents: list[int]  # among all rows that were read; -1: none
    lengths: list[int]
    totals: list[int]  # tokens of each row, with those that it shares

    @classmethod
    def of(cls, rows: Rows, groups: Sequence[Sequence[EpisodeSpan]], stored: Sequence[int]) -> Sharing:
        """Read the columns; ``stored`` are the tokens that each row stores.

        Raises PackError for a parent that is no earlier row of the episode, or has fewer tokens than are shared, and for
        more tokens together than a reader allocates.
        """
        named, lengths = rows.values("parent_row"), rows.values("prefix_len")
        parents, totals = [_NONE] * len(named), [*stored]
        for span in itertools.chain.from_iterable(groups):
            for row in range(span.start, span.end):
                if named[row] == _NONE and lengths[row] == 0:
                    continue
                parent = span.start + named[row]
                if not (span.start <= parent < row and 0 < lengths[row] <= totals[parent]):
                    raise PackError(
                        f"row {row - span.start} of an episode shares {lengths[row]} tokens with row {named[row]}; expected "
                        "an earlier row with as many"
                    )
                parents[row] = parent
                totals[row] += lengths[row]
        if sum(totals) > MAX_ROW_TOKENS:
            raise PackError(f"the rows stand for {sum(totals)} tokens together, at most {MAX_ROW_TOKENS}")
        return cls(parents, lengths, totals)

    def restore(self, stored: Sequence[np.ndarray], whole: Sequence[np.ndarray], row: int) -> np.ndarray:
        parent = self.parents[row]
        return stored[row] if parent == _NONE else np.concatenate([whole[parent][: self.lengths[row]], stored[row]])

    def context(self, stored: np.ndarray, row: int) -> np.ndarray:
        """Return per-token values of a row with 0 for the shared tokens: they were sampled, if at all, in another row."""
        length = self.lengths[row] if self.parents[row] != _NONE else 0
        return np.concatenate([np.zeros(length, dtype=stored.dtype), stored]) if length else stored


@dataclass(slots=True)
class Episodes:
    rows: Rows
    trajectories: Sequence[Trajectory]
    _columns: dict[str, list[Any]] = field(init=False)

    def __post_init__(self) -> None:
        names = (*_OF_EPISODE, "messages", "root", "parent_row", "prefix_len")
        self._columns = {name: self.rows.values(name) for name in names}

    def build(self, group_id: str, episodes: Sequence[EpisodeSpan]) -> tuple[Episode, ...]:
        return tuple([self._episode(group_id, span) for span in episodes])

    def _episode(self, group_id: str, span: EpisodeSpan) -> Episode:
        value = {name: self._shared(name, span) for name in _OF_EPISODE}
        messages = self._columns["messages"][span.start : span.end]
        if any(messages[1:]):
            raise PackError(f"episode {value['episode_id']}: a row that is not the first has messages")
        return Episode(
            episode_id=value["episode_id"],
            group_id=group_id,
            index=value["episode_index"],
            environment=value["environment"],
            environment_version=value["environment_version"],
            seed=value["seed"],
            status=value["end_status"],
            rows=tuple([self._row(row) for row in range(span.start, span.end)]),
            attempt=value["episode_attempt"],
            time_spent_by=value["time_spent_by"] or None,
            reward=value["episode_reward"],
            reward_parts=named_numbers(value["reward_parts"]),
            messages=messages[0],
            counts=tuple([(name, int(number)) for name, number in named_numbers(value["counts"])]),
        )

    def _shared(self, name: str, span: EpisodeSpan) -> Any:
        values = self._columns[name][span.start : span.end]
        if values.count(values[0]) != len(values):
            raise PackError(f"the rows of one episode differ in {name}: {str(values)[:300]}")
        return values[0]

    def _row(self, row: int) -> EpisodeRow:
        parent = self._columns["parent_row"][row]
        return EpisodeRow(
            trajectory=self.trajectories[row],
            turns=self._turns(row),
            root=self._columns["root"][row],
            parent=None if parent == _NONE else parent,
            prefix_len=self._columns["prefix_len"][row],
        )

    def _turns(self, row: int) -> tuple[Turn, ...]:
        numbers, spans_, rewards, states = (
            self._list(name, row) for name in ("turn_numbers", "turn_spans", "turn_rewards", "turn_states")
        )
        pairs = zip(spans_[::2], spans_[1::2], strict=True)
        return tuple([Turn(n, s, e, r, st) for n, (s, e), r, st in zip(numbers, pairs, rewards, states, strict=True)])

    def _list(self, name: str, row: int) -> list[Any]:
        if name not in self._columns:
            values, at = self.rows.lists(name)
            plain = values.tolist()
            self._columns[name] = [plain[a:b] for a, b in itertools.pairwise(at)]
        return self._columns[name][row]


def named_numbers(text: str) -> tuple[tuple[str, float], ...]:
    numbers = json.loads(text)
    if not isinstance(numbers, dict) or any(type(number) not in (int, float) for number in numbers.values()):
        raise PackError(f"expected a JSON object of numbers, got {text[:200]!r}")
    return tuple(numbers.items())
