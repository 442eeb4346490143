"""An episode: everything that one policy sampled in one play of an environment, as rows of token ids; pure.

The messages of an episode form a tree. Each leaf that counts is a row: the token ids on the path from a root to it, as
they were sent to the engine and sampled, never tokenised again. Two rows that share the beginning of their path share
it in the store too: the later row names the earlier one (``parent``) and how many tokens are the same (``prefix_len``).

A sampled token is trained once. It is counted in the first row that holds it; in every other row it is context, so its
loss mask there is False. A turn is the tokens of one answer of the policy, without a gap, in one row.

An episode of one row and one turn needs none of this: a group of these is stored without ``Group.episodes``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from penstock.protocol.errors import PackError
from penstock.protocol.groups import FinishReason, ImageRef
from penstock.protocol.trajectory import Trajectory
from penstock.protocol.versions import PolicyVersion

EndStatus = Literal["done", "truncated", "failed", "expired", "timeout"]
TimeSpender = Literal["policy", "tools"]

MAIN = "main"  # the root that the environment started; every other root is a sub-agent or a compacted history
MAX_EPISODE_ROWS = 4096
MAX_TURNS = 65536
MAX_JSON_BYTES = 16 * 1024**2  # of an episode's messages
_STATUSES = ("done", "truncated", "failed", "expired", "timeout")
_NAME = re.compile(r"[A-Za-z0-9_.:#/-]{1,200}")


class Turn(NamedTuple):
    """One answer of the policy: tokens ``[start, end)`` of the row, all sampled and counted in this row."""

    number: int  # place among all turns of the episode, from 0, in the order in which their requests came
    start: int
    end: int
    reward: float = 0.0  # what the environment gave for this turn alone; 0.0 where it gives none
    state: str = ""  # equal for turns that chose in the same situation (a hash of the observation); "": not known


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeRow:
    """One leaf of an episode's tree, with the whole path from its root.

    Raises PackError on construction unless the turns cover exactly the tokens with loss_mask True, in order.
    """

    trajectory: Trajectory  # all T tokens of the path; see below
    turns: tuple[Turn, ...]  # in the order of their tokens, at least one
    root: str = MAIN  # `MAIN`, or the name of a sub-agent or later root: rows of one root begin with the same tokens
    parent: int | None = None  # number of an earlier row of this episode with the same root; None: shares nothing
    prefix_len: int = 0  # the first so many tokens are those of the parent; 0 if and only if parent is None

    # Of the trajectory: token_ids [T] int32; loss_mask [T] True where the policy sampled the token, in this row and not
    # in an earlier one (always False below prefix_len); behaviour_logprobs [T] float32, 0.0 where the mask is False;
    # version_runs cover exactly the tokens with mask True; finish_reason is that of the last turn; completion_text is
    # what a reward reads as the answer, in an episode's first row, "" in the others; is_baseline is equal in all rows.

    def __post_init__(self) -> None:
        position, covered = 0, 0
        for turn in self.turns:
            inside = position <= turn.start < turn.end <= len(self.trajectory.token_ids)
            if not (inside and self.trajectory.loss_mask[turn.start : turn.end].all()):
                raise PackError(
                    f"turn {turn.number} is at {turn.start} to {turn.end}, where not every token is sampled"
                )
            if not (0 <= turn.number < MAX_TURNS and math.isfinite(turn.reward) and len(turn.state) <= 200):
                raise PackError(
                    f"turn {turn.number} with reward {turn.reward} and a state of {len(turn.state)} characters; "
                    f"expected a number below {MAX_TURNS}, a finite reward and at most 200 characters"
                )
            position, covered = turn.end, covered + turn.end - turn.start
        if not self.turns or covered != np.count_nonzero(self.trajectory.loss_mask):
            raise PackError(
                f"{len(self.turns)} turns cover {covered} of {np.count_nonzero(self.trajectory.loss_mask)} sampled "
                f"tokens of a row of {len(self.trajectory.token_ids)}, expected all, in one or more turns"
            )
        if self.trajectory.finish_reason not in ("stop", "length", "abort"):
            got = self.trajectory.finish_reason
            raise PackError(f"a row's finish reason is {got!r}, expected stop, length or abort")
        if self.trajectory.loss_mask[0]:
            raise PackError("the first token of a row is sampled; expected at least one token of context before it")
        if (self.parent is None) != (self.prefix_len == 0) or self.prefix_len < 0:
            raise PackError(f"a row with parent {self.parent} shares {self.prefix_len} tokens; give both or neither")
        if not _NAME.fullmatch(self.root):
            raise PackError(f"a row's root is {self.root[:100]!r}, expected 1 to 200 letters, digits and _.:#/-")


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """One play of an environment by the policy. Raises PackError on construction for anything inconsistent.

    Only a trainable episode goes into a group: `done`, `truncated`, or `timeout` of the policy. The others are redone
    with the same seed, and are missing from their group when no attempt succeeded.
    """

    episode_id: str  # unique in the run, the same in every attempt
    group_id: str
    index: int  # place in the group, 0 to group_size - 1; with a baseline, group_size is the baseline's
    environment: str  # name, as in `Task.environment`
    environment_version: str  # as the environment announced it; "": it has none
    seed: int  # equal for all episodes of a group unless the environment says otherwise
    status: EndStatus
    rows: tuple[EpisodeRow, ...]  # the first one's root is `MAIN`; empty only if it is not trainable
    attempt: int = 0  # how often the episode was begun before
    time_spent_by: TimeSpender | None = None  # who used the time up; set if and only if the status is `timeout`
    reward: float | None = None  # the environment's, for the whole episode; None: a reward endpoint scores it
    reward_parts: tuple[tuple[str, float], ...] = ()  # named components of ``reward``
    messages: str = "[]"  # JSON list of the conversation, for people and for rewards that read it
    counts: tuple[tuple[str, int], ...] = ()  # what the recorder counted: forks by cause, sampled tokens left out, …

    def __post_init__(self) -> None:
        try:
            self._check_values()
            if self.is_trainable:
                _check_rows(self.rows)
            elif self.reward is not None or self.reward_parts:
                raise PackError(f"status {self.status} with a reward of {self.reward}; a failure has no reward")
        except PackError as err:
            raise PackError(f"episode {self.episode_id[:200]} of group {self.group_id[:200]}: {err}") from None

    def _check_values(self) -> None:
        for what, name in (
            ("episode_id", self.episode_id),
            ("group_id", self.group_id),
            ("environment", self.environment),
        ):
            if not _NAME.fullmatch(name):
                raise PackError(f"{what} is {name[:100]!r}, expected 1 to 200 letters, digits and _.:#/-")
        if len(self.environment_version) > 200:
            raise PackError(f"environment_version has {len(self.environment_version)} characters, at most 200")
        if not (0 <= self.index <= 4096 and 0 <= self.attempt < 2**31 and 0 <= self.seed < 2**63):
            raise PackError(
                f"index {self.index}, attempt {self.attempt}, seed {self.seed}; expected 0 to 4096, 31 and 63 bits"
            )
        if self.status not in _STATUSES:
            raise PackError(f"status is {self.status!r}, expected one of {', '.join(_STATUSES)}")
        if (self.status == "timeout") != (self.time_spent_by in ("policy", "tools")):
            raise PackError(
                f"status {self.status} with time spent by {self.time_spent_by}; a timeout names who spent it"
            )
        self._check_named_values()
        _check_messages(self.messages)

    def _check_named_values(self) -> None:
        for name, value in (("reward", self.reward or 0.0), *self.reward_parts):
            if not (_NAME.fullmatch(name) and math.isfinite(value)):
                raise PackError(f"reward part {name[:100]!r} is {value}, expected a name and a finite number")
        for name, count in self.counts:
            if not (_NAME.fullmatch(name) and 0 <= count < 2**53):
                raise PackError(f"count {name[:100]!r} is {count}, expected a name and a number from 0")
        for what, pairs in (("reward part", self.reward_parts), ("count", self.counts)):
            if len({name for name, _ in pairs}) != len(pairs):
                raise PackError(f"a {what} is named twice: {[name for name, _ in pairs][:8]}")

    @property
    def is_trainable(self) -> bool:
        """Whether it ended by the policy's doing, so that its reward says something about the policy."""
        return self.status in ("done", "truncated") or (self.status == "timeout" and self.time_spent_by == "policy")

    @property
    def finish_reason(self) -> FinishReason:
        """Return ``length`` for an episode that was cut off, else ``stop``: what filters of truncated samples read."""
        return "stop" if self.status == "done" else "length"

    @property
    def num_sampled_tokens(self) -> int:
        """Sampled tokens of all rows; each is counted in one of them."""
        return sum(row.trajectory.num_completion_tokens for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, shared beginnings counted in each."""
        return sum(len(row.trajectory.token_ids) for row in self.rows)

    @property
    def oldest_version(self) -> PolicyVersion:
        """Oldest version among all sampled tokens: staleness is measured from it."""
        return min(row.trajectory.oldest_version for row in self.rows)

    @property
    def newest_version(self) -> PolicyVersion:
        return max(row.trajectory.newest_version for row in self.rows)

    @property
    def is_baseline(self) -> bool:
        """Whether it was sampled greedily, to be compared with and never trained on."""
        return self.rows[0].trajectory.is_baseline

    @property
    def turns(self) -> list[Turn]:
        return sorted(turn for row in self.rows for turn in row.turns)


def _check_rows(rows: Sequence[EpisodeRow]) -> None:
    if not 0 < len(rows) <= MAX_EPISODE_ROWS:
        raise PackError(f"{len(rows)} rows, expected 1 to {MAX_EPISODE_ROWS}")
    if rows[0].root != MAIN:
        raise PackError(f"its first row has root {rows[0].root!r}, expected {MAIN!r}")
    for number, row in enumerate(rows):
        if row.trajectory.is_baseline != rows[0].trajectory.is_baseline:
            raise PackError(f"row {number} and row 0 differ in is_baseline")
        if number and row.trajectory.completion_text:
            raise PackError(f"row {number} has a completion text; the first row holds that of the episode")
        if row.parent is not None:
            _check_prefix(rows, number)
    numbers = sorted(turn.number for row in rows for turn in row.turns)
    if numbers != list(range(len(numbers))):
        raise PackError(f"its turns are numbered {numbers[:8]}, expected each from 0 to {len(numbers) - 1} once")


def _check_prefix(rows: Sequence[EpisodeRow], number: int) -> None:
    row = rows[number]
    if row.parent is None or not 0 <= row.parent < number or rows[row.parent].root != row.root:
        raise PackError(f"row {number} has parent {row.parent}, expected an earlier row of root {row.root!r}")
    mine, theirs, length = row.trajectory, rows[row.parent].trajectory, row.prefix_len
    if not np.array_equal(mine.token_ids[:length], theirs.token_ids[:length]):
        raise PackError(f"row {number} does not begin with the first {length} tokens of row {row.parent}")
    if _images_before(mine, length) != _images_before(theirs, length):
        raise PackError(f"row {number} has other images than row {row.parent} in the {length} tokens that they share")
    if mine.loss_mask[:length].any():
        raise PackError(f"row {number} counts a sampled token of row {row.parent} again")


def _images_before(row: Trajectory, length: int) -> list[ImageRef]:
    return [ref for ref in row.images.refs if ref.position < length] if row.images is not None else []


def _check_messages(messages: str) -> None:
    if len(messages) > MAX_JSON_BYTES:
        raise PackError(f"messages have {len(messages)} characters, at most {MAX_JSON_BYTES}")
    try:
        decoded = json.loads(messages)
    except (ValueError, RecursionError) as err:
        raise PackError(f"messages are not JSON: {str(err)[:200]}") from None
    if not isinstance(decoded, list):
        raise PackError(f"messages are a JSON {type(decoded).__name__}, expected a list")
