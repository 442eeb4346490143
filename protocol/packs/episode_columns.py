"""Columns of a pack that holds episodes, beside those of every pack: from episodes to Arrow, and back; pure.

Each Parquet row is one row of an episode. The values of the episode are repeated in its rows, and its messages are in
the first. The token columns of a row hold what follows the tokens that it shares with its parent, so that these are
stored once; ``version_runs`` and ``turn_spans`` count from the beginning of the whole row. The rows of a group without
episodes in the same pack have the episode number -1.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.protocol.episode import Episode, EpisodeRow, Turn
from penstock.protocol.errors import PackError
from penstock.protocol.packs.pack_bounds import MAX_ROW_TOKENS
from penstock.protocol.packs.pack_rows import NONE, Column, Rows, StoredRow, column, list_of
from penstock.protocol.trajectory import Trajectory


def named_numbers(text: str) -> tuple[tuple[str, float], ...]:
    numbers = json.loads(text)
    if not isinstance(numbers, dict) or any(type(number) not in (int, float) for number in numbers.values()):
        raise PackError(f"expected a JSON object of numbers, got {text[:200]!r}")
    return tuple(numbers.items())


class _Value(NamedTuple):
    """A column that holds one attribute of an `Episode` or an `EpisodeRow`."""

    column: str
    kind: pa.DataType
    attribute: str
    stored: Callable[[Any], Any] = lambda value: value
    read: Callable[[Any], Any] = lambda value: value


def _as_json(pairs: Sequence[tuple[str, float]]) -> str:
    return json.dumps(dict(pairs))


_OF_EPISODE = (  # repeated in its rows
    _Value("episode_id", pa.string(), "episode_id"),
    _Value("episode_index", pa.int32(), "index"),
    _Value("episode_attempt", pa.int32(), "attempt"),
    _Value("environment", pa.string(), "environment"),
    _Value("environment_version", pa.string(), "environment_version"),
    _Value("seed", pa.int64(), "seed"),
    _Value("end_status", pa.string(), "status"),
    # "" unless the status is timeout
    _Value("time_spent_by", pa.string(), "time_spent_by", lambda who: who or "", lambda text: text or None),
    _Value("episode_reward", pa.float64(), "reward"),
    _Value("reward_parts", pa.string(), "reward_parts", _as_json, named_numbers),
    _Value("counts", pa.string(), "counts", _as_json, lambda text: tuple((n, int(v)) for n, v in named_numbers(text))),
)
_OF_ROW = (
    _Value("root", pa.string(), "root"),
    _Value(  # of the episode
        "parent_row",
        pa.int32(),
        "parent",
        lambda row: NONE if row is None else row,
        lambda row: None if row == NONE else row,
    ),
    _Value("prefix_len", pa.int32(), "prefix_len"),
)
MAY_BE_NULL = ("episode_reward",)
TEXT_COLUMNS = ("episode_number", "end_status", "episode_reward", "reward_parts", "messages")  # that a reward needs


def _column(name: str, kind: pa.DataType, value_of: Callable[[Episode, EpisodeRow], Any]) -> Column:
    nullable = name in MAY_BE_NULL
    if pa.types.is_list(kind):
        absent: Any = np.empty(0, dtype=kind.value_type.to_pandas_dtype())
    else:
        absent = "" if pa.types.is_string(kind) else None if nullable else NONE

    def value(stored: StoredRow) -> Any:
        if stored.episode is None or stored.path is None:
            return absent
        return value_of(stored.episode, stored.path)

    return column(name, kind, value, nullable=nullable)


def _of_turns(dtype: Any, attribute: str) -> Callable[[Episode, EpisodeRow], np.ndarray]:
    return lambda _, row: np.array([getattr(turn, attribute) for turn in row.turns], dtype=dtype)


COLUMNS = (
    column("episode_number", pa.int32(), lambda stored: stored.episode_number),  # of those of the group in the pack
    *(
        _column(value.column, value.kind, lambda episode, _, v=value: v.stored(getattr(episode, v.attribute)))
        for value in _OF_EPISODE
    ),
    _column("messages", pa.string(), lambda episode, row: episode.messages if row is episode.rows[0] else ""),  # JSON
    *(
        _column(value.column, value.kind, lambda _, row, v=value: v.stored(getattr(row, v.attribute)))
        for value in _OF_ROW
    ),
    _column("turn_numbers", list_of(pa.int32()), _of_turns(np.int32, "number")),
    _column(  # start, end, start, …
        "turn_spans",
        list_of(pa.int32()),
        lambda _, row: np.array([(turn.start, turn.end) for turn in row.turns], dtype=np.int32).reshape(-1),
    ),
    _column("turn_rewards", list_of(pa.float64()), _of_turns(np.float64, "reward")),
    _column("turn_states", list_of(pa.string()), _of_turns(object, "state")),
)


@dataclass(frozen=True, slots=True)
class EpisodeSpan:
    """The rows of one episode: ``[start, end)`` among all rows that were read."""

    start: int
    end: int


def spans(rows: Rows) -> list[list[EpisodeSpan]]:
    """Return the episodes of each group; raises PackError unless they are numbered 0, 1, … with their rows together."""
    if not rows.has("episode_number"):
        return [[] for _ in rows.starts[1:]]
    numbers = rows.values("episode_number")
    groups = []
    for start, end in itertools.pairwise(rows.starts):
        group_numbers = numbers[start:end]
        if group_numbers.count(NONE) == len(group_numbers):
            groups.append([])
            continue
        starts = [start + i for i, number in enumerate(group_numbers) if not i or number != group_numbers[i - 1]]
        if [numbers[at] for at in starts] != list(range(len(starts))):
            raise PackError(f"rows of a group have episode numbers {group_numbers[:8]}, expected 0, 1, … each together")
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

        Raises PackError for a parent that is no earlier row of the episode, or has fewer tokens than are shared, and
        for more tokens together than a reader allocates.
        """
        parents, totals = [NONE] * len(stored), [*stored]
        if not any(groups):
            return cls(parents, [0] * len(stored), totals)
        named, lengths = rows.values("parent_row"), rows.values("prefix_len")
        for span in itertools.chain.from_iterable(groups):
            for row in range(span.start, span.end):
                if named[row] == NONE and lengths[row] == 0:
                    continue
                parent = span.start + named[row]
                if not (span.start <= parent < row and 0 < lengths[row] <= totals[parent]):
                    raise PackError(
                        f"row {row - span.start} of an episode shares {lengths[row]} tokens with row {named[row]}; "
                        "expected an earlier row with as many"
                    )
                parents[row] = parent
                totals[row] += lengths[row]
        if sum(totals) > MAX_ROW_TOKENS:
            raise PackError(f"the rows stand for {sum(totals)} tokens together, at most {MAX_ROW_TOKENS}")
        return cls(parents, lengths, totals)

    def restore(self, stored: Sequence[np.ndarray], whole: Sequence[np.ndarray], row: int) -> np.ndarray:
        parent = self.parents[row]
        return stored[row] if parent == NONE else np.concatenate([whole[parent][: self.lengths[row]], stored[row]])

    def context(self, stored: np.ndarray, row: int) -> np.ndarray:
        """Return a row's per-token values with 0 for the shared tokens: another row sampled them, if any."""
        length = self.lengths[row] if self.parents[row] != NONE else 0
        return np.concatenate([np.zeros(length, dtype=stored.dtype), stored]) if length else stored


@dataclass(slots=True)
class Episodes:
    rows: Rows
    trajectories: Sequence[Trajectory]
    _columns: dict[str, list[Any]] = field(init=False)

    def __post_init__(self) -> None:
        names = ("messages", *(value.column for value in (*_OF_EPISODE, *_OF_ROW)))
        self._columns = {name: self.rows.values(name) for name in names}
        for name in ("turn_numbers", "turn_spans", "turn_rewards", "turn_states"):
            values, at = self.rows.lists(name)
            plain = values.tolist()
            self._columns[name] = [plain[a:b] for a, b in itertools.pairwise(at)]

    def build(self, group_id: str, episodes: Sequence[EpisodeSpan]) -> tuple[Episode, ...]:
        return tuple([self._episode(group_id, span) for span in episodes])

    def _episode(self, group_id: str, span: EpisodeSpan) -> Episode:
        values = {value.attribute: value.read(self._shared(value.column, span)) for value in _OF_EPISODE}
        messages = self._columns["messages"][span.start : span.end]
        if any(messages[1:]):
            raise PackError(f"episode {values['episode_id']}: a row that is not the first has messages")
        rows = tuple([self._row(row) for row in range(span.start, span.end)])
        return Episode(group_id=group_id, rows=rows, messages=messages[0], **values)

    def _shared(self, name: str, span: EpisodeSpan) -> Any:
        values = self._columns[name][span.start : span.end]
        if values.count(values[0]) != len(values):
            raise PackError(f"the rows of one episode differ in {name}: {str(values)[:300]}")
        return values[0]

    def _row(self, row: int) -> EpisodeRow:
        values = {value.attribute: value.read(self._columns[value.column][row]) for value in _OF_ROW}
        return EpisodeRow(trajectory=self.trajectories[row], turns=self._turns(row), **values)

    def _turns(self, row: int) -> tuple[Turn, ...]:
        numbers, spans_, rewards, states = (
            self._columns[name][row] for name in ("turn_numbers", "turn_spans", "turn_rewards", "turn_states")
        )
        pairs = zip(spans_[::2], spans_[1::2], strict=True)
        return tuple([Turn(n, s, e, r, st) for n, (s, e), r, st in zip(numbers, pairs, rewards, states, strict=True)])
