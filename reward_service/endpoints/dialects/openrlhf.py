"""OpenRLHF's remote reward model (``--remote_rm_url``, ``openrlhf/cli/serve_rm.py``): batches of texts.

``{"query": [prompt and completion], "prompts": [...], "labels": [...]}`` is sent; the response is
``{"rewards": [...]}``, in newer versions with ``scores`` and ``extra_logs``. Training uses ``rewards``.
"""

from __future__ import annotations

import json

from penstock.reward_service.endpoints.dialects import foreign_scores
from penstock.reward_service.endpoints.dialects.dialect import BadAnswer, Call, Dialect, DialectKind, Payload
from penstock.reward_service.endpoints.wire import MAX_PARTS, Score


class OpenRlhfDialect(Dialect):
    """What a server behind OpenRLHF's ``--remote_rm_url`` expects; it has no options."""

    def request(self, call: Call) -> Payload:
        rows = [(group, text) for group in call.groups for text in group.completions]
        body = {
            "query": [group.prompt + text for group, text in rows],
            "prompts": [group.prompt for group, _ in rows],
            "labels": ["" if group.ground_truth is None else group.ground_truth for group, _ in rows],
        }
        return Payload(json.dumps(body).encode())

    def read(self, call: Call, answer: bytes) -> list[list[Score]]:
        value = foreign_scores.parse(answer)
        if not isinstance(value, dict) or "rewards" not in value:
            raise BadAnswer("answers no object with 'rewards'")
        size = sum(len(group.completions) for group in call.groups)
        rewards = foreign_scores.list_of(value["rewards"], size, "rewards")
        columns = {}
        if value.get("scores") is not None:
            columns["scores"] = foreign_scores.list_of(value["scores"], size, "scores")
        logs = value.get("extra_logs")
        for name, column in list(logs.items())[: MAX_PARTS - 1] if isinstance(logs, dict) else ():
            if isinstance(column, list) and name and all(isinstance(item, int | float) for item in column):
                columns[name] = foreign_scores.list_of(column, size, f"extra_logs.{name}")
        scores = []
        for place, reward in enumerate(rewards):
            score = foreign_scores.score_of(reward, f"rewards[{place}]")
            parts = {
                name[:64]: foreign_scores.number(column[place], f"{name}[{place}]")
                for name, column in columns.items()
                if column[place] is not None
            }
            scores.append(score if score.score is None else score.model_copy(update={"parts": parts}))
        return foreign_scores.cut(scores, call.groups)


OPENRLHF = DialectKind("openrlhf", OpenRlhfDialect)
