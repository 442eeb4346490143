"""The tree of an episode → rows to train on, and an account of every sampled token; pure.

A row is the path from a root to a turn that nothing continues. A token that several rows share has the loss mask True in the
first of them alone, and is context in the others. What the agent never saw, or threw away, is in no row and counted by cause.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from penstock.agents.proxy.conversations import main_turns, scored_turn
from penstock.agents.proxy.messages import Message
from penstock.agents.proxy.tree import SampledTurn
from penstock.protocol.episode import MAIN, MAX_JSON_BYTES, EpisodeRow, Turn
from penstock.protocol.images.admission import AdmittedImage
from penstock.protocol.trajectory import Trajectory
from penstock.protocol.versions import VersionRun

Orphaned = Literal["not_delivered", "superseded", "side_request"]


@dataclass(frozen=True, slots=True)
class TurnSpan:
    turn: int
    start: int
    end: int
    is_trained: bool  # False: another row trains them


@dataclass(frozen=True, slots=True, eq=False)
class TreeRow:
    trajectory: Trajectory  # without a text
    spans: tuple[TurnSpan, ...]


@dataclass(frozen=True, slots=True)
class TreeRows:
    rows: tuple[TreeRow, ...]
    num_trained: int
    orphaned_tokens: Counter[str] = field(default_factory=Counter)
    orphaned_turns: Counter[str] = field(default_factory=Counter)
    scored: int | None = None  # the turn whose answer a reward reads
    last: int | None = None  # the last one that is trained


def build_rows(turns: Sequence[SampledTurn], trained_conversations: Literal["all", "main"] = "all") -> TreeRows:
    orphans = _find_orphans(turns)
    if trained_conversations == "main":
        orphans = _side_turns(turns) | orphans
    covered: dict[int, int] = {}  # by turn: so many tokens of its path are in the row of a turn that continues it
    for turn in turns:
        if turn.parent is not None and turn.number not in orphans:
            covered[turn.parent.number] = max(covered.get(turn.parent.number, 0), turn.parent_tokens)
    trained: dict[int, int] = {}  # by turn: so many of its sampled tokens are trained in a row before
    rows = [
        _build_row(turn, trained)
        for turn in turns
        if turn.number not in orphans and covered.get(turn.number, 0) < turn.num_tokens
    ]
    tokens: Counter[str] = Counter()
    for number, cause in orphans.items():
        tokens[cause] += len(turns[number].token_ids)
    scored = scored_turn(turns, trained)
    return TreeRows(
        tuple(rows), sum(trained.values()), tokens, Counter(orphans.values()), scored, max(trained, default=None)
    )


def _side_turns(turns: Sequence[SampledTurn]) -> dict[int, Orphaned]:
    """Return the turns of other conversations than the main one, without those whose tokens it begins with."""
    kept = main_turns(turns)
    for turn in reversed(turns):
        if turn.number in kept:
            kept |= {other.number for other in (turn.parent, turn.follows) if other is not None}
    return {turn.number: "side_request" for turn in turns if turn.number not in kept}


def _find_orphans(turns: Sequence[SampledTurn]) -> dict[int, Orphaned]:
    """Return the turns that are in no row, with the cause; no turn that is in a row continues one of them.

    What the agent went on from is kept. Of answers to one prompt that it did not go on from, the last that it received is kept,
    unless it went on from another.
    """
    continued = {other.number for turn in turns for other in (turn.parent, turn.follows) if other is not None}
    answered = {turn.prompt_key for turn in turns if turn.number in continued}
    last_received = {turn.prompt_key: turn.number for turn in turns if turn.delivered}
    orphans: dict[int, Orphaned] = {}
    for turn in turns:
        if turn.number in continued:
            continue
        if not turn.delivered:
            orphans[turn.number] = "not_delivered"
        elif turn.prompt_key in answered or last_received[turn.prompt_key] != turn.number:
            orphans[turn.number] = "superseded"
    return orphans


def _build_row(last: SampledTurn, trained: dict[int, int]) -> TreeRow:
    length = last.num_tokens
    mask = np.zeros(length, dtype=np.bool_)
    logprobs = np.zeros(length, dtype=np.float32)
    runs: list[VersionRun] = []
    spans: list[TurnSpan] = []
    chain = last.chain()
    for turn, following in zip(chain, [*chain[1:], None], strict=True):
        end = turn.num_tokens if following is None else following.parent_tokens
        start, used = turn.prompt_tokens, end - turn.prompt_tokens
        before = trained.get(turn.number, 0)
        if used > before:
            first = start + before
            mask[first:end] = True
            logprobs[first:end] = turn.logprobs[before:used]
            runs += _moved(turn.version_runs, start, first, end)
            trained[turn.number] = used
        if before:
            spans.append(TurnSpan(turn.number, start, start + min(before, used), is_trained=False))
        if used > before:
            spans.append(TurnSpan(turn.number, start + before, end, is_trained=True))
    trajectory = Trajectory(
        token_ids=last.path(), loss_mask=mask, behaviour_logprobs=logprobs, version_runs=tuple(runs),
        finish_reason=last.finish_reason, completion_text="", images=last.images, experts=last.path_experts(),
    )  # fmt: skip
    return TreeRow(trajectory, tuple(spans))


def _moved(runs: Sequence[VersionRun], offset: int, first: int, end: int) -> list[VersionRun]:
    moved = [VersionRun(run.version, max(run.start + offset, first), min(run.end + offset, end)) for run in runs]
    return [run for run in moved if run.start < run.end]


def stored_rows(made: TreeRows, turns: Sequence[SampledTurn]) -> tuple[EpisodeRow, ...]:
    """Return the rows of an episode as they are stored: turns numbered without gaps, shared beginnings named.

    The first row's completion text is the content of the last answer of the main conversation, which a reward reads.
    """
    trained = [span.turn for row in made.rows for span in row.spans if span.is_trained]
    numbers = {turn: place for place, turn in enumerate(sorted(trained))}
    text = "" if made.scored is None else turns[made.scored].answer.content
    last_row_of: dict[int, int] = {}  # by turn: the last row before that holds it
    rows: list[EpisodeRow] = []
    for row in made.rows:
        chain = [span.turn for span in row.spans]
        parent, prefix_len = _shared(row, made.rows, last_row_of)
        trajectory = row.trajectory if rows else replace(row.trajectory, completion_text=text)
        placed = tuple(Turn(numbers[span.turn], span.start, span.end) for span in row.spans if span.is_trained)
        root = chain[0]
        name = MAIN if not rows or root == made.rows[0].spans[0].turn else f"root:{root}"
        rows.append(EpisodeRow(trajectory, placed, name, parent, prefix_len))
        last_row_of.update(dict.fromkeys(chain, len(rows) - 1))
    return tuple(rows)


def _shared(row: TreeRow, rows: Sequence[TreeRow], last_row_of: Mapping[int, int]) -> tuple[int | None, int]:
    """Return the earlier row that shares the most turns with this one, and how many tokens both begin with."""
    shared = [place for place, span in enumerate(row.spans) if span.turn in last_row_of]
    if not shared:
        return None, 0
    place = shared[-1]
    parent = last_row_of[row.spans[place].turn]
    theirs = next(span for span in rows[parent].spans if span.turn == row.spans[place].turn)
    return parent, min(row.spans[place].end, theirs.end)


def counts_of(counts: Counter[str], made: TreeRows) -> tuple[tuple[str, int], ...]:
    orphans = {f"orphaned_tokens.{cause}": count for cause, count in made.orphaned_tokens.items()}
    orphans |= {f"orphaned_turns.{cause}": count for cause, count in made.orphaned_turns.items()}
    return tuple(sorted((name, count) for name, count in {**counts, **orphans}.items() if count))


def messages_json(messages: Sequence[Message]) -> str:
    written = [json.dumps(message.as_dict(_named), ensure_ascii=False) for message in messages]
    size = 2
    for place in range(len(written) - 1, -1, -1):
        size += len(written[place]) + 2
        if size > MAX_JSON_BYTES:
            written = written[place + 1 :]
            break
    return f"[{', '.join(written)}]"


def _named(image: bytes | AdmittedImage) -> dict[str, str]:
    assert isinstance(image, AdmittedImage)  # the session admits the images of every request
    return {"type": "image", "sha256": image.sha256}
