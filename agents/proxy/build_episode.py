"""The record of an episode that has ended → the episode that is stored; pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

from penstock.agents.proxy.messages import Message
from penstock.agents.proxy.rows import TreeRow, TreeRows
from penstock.agents.proxy.tree import SampledTurn
from penstock.protocol.episode import MAIN, MAX_JSON_BYTES, EpisodeRow, Turn
from penstock.protocol.images.admission import AdmittedImage
from penstock.protocol.trajectory import Trajectory


def stored_rows(made: TreeRows, turns: Sequence[SampledTurn]) -> tuple[EpisodeRow, ...]:
    """Return the rows of an episode as they are stored: turns numbered without gaps, shared beginnings named.

    The first row's completion text is the content of the last answer, which a reward reads.
    """
    trained = [span.turn for row in made.rows for span in row.spans if span.is_trained]
    numbers = {turn: place for place, turn in enumerate(sorted(trained))}
    text = turns[max(trained)].answer.content if trained else ""
    last_row_of: dict[int, int] = {}  # by turn: the last row before that holds it
    rows: list[EpisodeRow] = []
    for row in made.rows:
        chain = [span.turn for span in row.spans]
        parent, prefix_len = _shared(row, made.rows, last_row_of)
        trajectory = Trajectory(
            token_ids=row.token_ids,
            loss_mask=row.loss_mask,
            behaviour_logprobs=row.logprobs,
            version_runs=row.version_runs,
            finish_reason=row.finish_reason,
            completion_text="" if rows else text,
            images=row.images,
            experts=row.experts,
        )
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
    """Return what was counted of an episode: requests, forks by cause, sampled tokens and turns that are in no row."""
    orphans = {f"orphaned_tokens.{cause}": count for cause, count in made.orphaned_tokens.items()}
    orphans |= {f"orphaned_turns.{cause}": count for cause, count in made.orphaned_turns.items()}
    return tuple(sorted((name, count) for name, count in {**counts, **orphans}.items() if count))


def messages_json(messages: Sequence[Message]) -> str:
    """Return a conversation for people and rewards, as the chat completions API writes it; its end if it is too long."""
    written = [
        json.dumps(message.for_template() | _images_named(message) | _calls_as_sent(message), ensure_ascii=False)
        for message in messages
    ]
    size = 2
    for place in range(len(written) - 1, -1, -1):
        size += len(written[place]) + 2
        if size > MAX_JSON_BYTES:
            written = written[place + 1 :]
            break
    return f"[{', '.join(written)}]"


def _images_named(message: Message) -> dict[str, object]:
    """Return the content of a message with images: each by the hash under which it is stored."""
    if not message.parts:
        return {}
    return {
        "content": [
            {"type": "image", "sha256": part.sha256}
            if isinstance(part, AdmittedImage)
            else {"type": "text", "text": part}
            for part in message.parts
        ]
    }


def _calls_as_sent(message: Message) -> dict[str, object]:
    return {"tool_calls": [call.as_dict() for call in message.tool_calls]} if message.tool_calls else {}
