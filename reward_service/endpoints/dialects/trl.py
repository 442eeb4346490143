"""TRL's reward function over HTTP: its keyword arguments as a JSON object, its return value as JSON.

TRL calls ``f(prompts, completions, **columns) -> list[float | None]`` and defines no wire format; a server is
one line around the function. TRL also gives token ids and the trainer's state; these exist only in its trainer.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal

from pydantic import Field

from penstock.reward_service.endpoints.dialects import foreign_scores
from penstock.reward_service.endpoints.dialects.dialect import Call, Dialect, DialectKind, Payload
from penstock.reward_service.endpoints.wire import GroupToScore, Score


class TrlDialect(Dialect):
    """One group: prompts, completions and the row's columns, all as lists of equal length."""

    carries: ClassVar[Literal["groups", "group", "completion"]] = "group"

    conversational: bool = Field(
        False, description="Prompts and completions as lists of messages, as TRL gives them for such data sets."
    )

    def request(self, call: Call) -> Payload:
        (group,) = call.groups
        return Payload(json.dumps(columns_of(group, conversational=self.conversational)).encode())

    def read(self, call: Call, answer: bytes) -> list[list[Score]]:
        (group,) = call.groups
        values = foreign_scores.list_of(foreign_scores.parse(answer), len(group.completions), "body")
        return [[foreign_scores.score_of(value, f"body[{place}]") for place, value in enumerate(values)]]


def columns_of(group: GroupToScore, *, conversational: bool = False) -> dict[str, list[Any]]:
    """Return a group as TRL's keyword arguments: every value a list with one item for each completion.

    The columns of ``extra_info`` are separate arguments, as are ``data_source`` and ``ground_truth``;
    ``extra_info`` itself is passed too.
    """
    size = len(group.completions)
    row: dict[str, Any] = {"data_source": group.data_source, "ground_truth": group.ground_truth}
    row |= group.extra_info if isinstance(group.extra_info, dict) else {}
    row.setdefault("extra_info", group.extra_info)
    prompt: Any = [{"role": "user", "content": group.prompt}] if conversational else group.prompt
    texts: list[Any] = list(group.completions)
    if conversational:
        texts = [[{"role": "assistant", "content": text}] for text in texts]
    return {**{name: [value] * size for name, value in row.items()}, "prompts": [prompt] * size, "completions": texts}


TRL = DialectKind("trl", TrlDialect)
