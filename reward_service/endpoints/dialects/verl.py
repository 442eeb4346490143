"""verl's ``compute_score`` over HTTP: its keyword arguments as a JSON object, its return value as JSON.

verl itself calls a Python function and defines no wire format; these are the arguments its reward managers
pass (``verl/workers/reward_manager``: ``naive`` and ``batch``), so a server is one line around the function:
``compute_score(**await request.json())``.
"""

from __future__ import annotations

import json
from typing import ClassVar, Literal

from penstock.reward_service.endpoints.dialects import foreign_scores
from penstock.reward_service.endpoints.dialects.dialect import Call, Dialect, DialectKind, Payload
from penstock.reward_service.endpoints.wire import Score


class VerlDialect(Dialect):
    """One ``compute_score(data_source, solution_str, ground_truth, extra_info)``; it has no options."""

    carries: ClassVar[Literal["groups", "group", "completion"]] = "completion"

    def request(self, call: Call) -> Payload:
        (group,) = call.groups
        (text,) = group.completions
        body = {
            "data_source": group.data_source,
            "solution_str": text,
            "ground_truth": group.ground_truth,
            "extra_info": group.extra_info,
        }
        return Payload(json.dumps(body).encode())

    def read(self, call: Call, answer: bytes) -> list[list[Score]]:
        return [[foreign_scores.score_of(foreign_scores.parse(answer), "body")]]


class VerlBatchDialect(Dialect):
    """One ``compute_score(data_sources, solution_strs, ground_truths, extra_infos)``; it has no options."""

    def request(self, call: Call) -> Payload:
        rows = [(group, text) for group in call.groups for text in group.completions]
        body = {
            "data_sources": [group.data_source for group, _ in rows],
            "solution_strs": [text for _, text in rows],
            "ground_truths": [group.ground_truth for group, _ in rows],
            "extra_infos": [group.extra_info for group, _ in rows],
        }
        return Payload(json.dumps(body).encode())

    def read(self, call: Call, answer: bytes) -> list[list[Score]]:
        size = sum(len(group.completions) for group in call.groups)
        values = foreign_scores.list_of(foreign_scores.parse(answer), size, "body")
        return foreign_scores.cut(
            [foreign_scores.score_of(value, f"body[{place}]") for place, value in enumerate(values)], call.groups
        )


VERL = DialectKind("verl", VerlDialect)
VERL_BATCH = DialectKind("verl-batch", VerlBatchDialect)
