"""slime's remote reward model: send one completion, receive its reward as any JSON.

slime's ``remote_rm`` (``slime/rollout/rm_hub``) posts ``{"prompt", "response", "label"}`` and takes the
JSON that comes back as the reward: a number, or an object of which ``--reward-key`` names the number.
"""

from __future__ import annotations

import json
from typing import ClassVar, Literal

from pydantic import Field

from penstock.reward_service.endpoints.dialects import foreign_scores
from penstock.reward_service.endpoints.dialects.dialect import BadAnswer, Call, Dialect, DialectKind, Payload
from penstock.reward_service.endpoints.wire import Score


class SlimeDialect(Dialect):
    """What a server behind slime's ``--rm-url`` expects."""

    carries: ClassVar[Literal["groups", "group", "completion"]] = "completion"

    reward_key: str = Field("", max_length=100, description="slime's --reward-key: the key of the score in an object.")

    def request(self, call: Call) -> Payload:
        (group,) = call.groups
        (response,) = group.completions
        body = {"prompt": group.prompt, "response": response, "label": group.ground_truth}
        return Payload(json.dumps(body).encode())

    def read(self, call: Call, answer: bytes) -> list[list[Score]]:
        value = foreign_scores.parse(answer)
        if isinstance(value, dict) and not self.reward_key:
            raise BadAnswer(
                f"answers an object of {len(value)} keys; name the key of its number with the option reward_key"
            )
        return [[foreign_scores.score_of(value, "body", key=self.reward_key)]]


SLIME = DialectKind("slime", SlimeDialect)
