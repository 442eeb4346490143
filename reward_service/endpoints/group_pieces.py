"""A group cut into what one request of an endpoint's dialect carries, and its scores joined again. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.reward_service.endpoints.endpoint import Endpoint
from penstock.reward_service.endpoints.wire import GroupToScore
from penstock.reward_service.errors import RewardError
from penstock.reward_service.scores import GroupScores, Outcome


def cut(endpoint: Endpoint, group: GroupToScore) -> list[GroupToScore]:
    """Return the pieces of a group, each of which fits into one request."""
    if endpoint.speaker.carries == "completion":
        return [
            group.model_copy(update={"group_id": f"{group.group_id}#{number}", "completions": [text]})
            for number, text in enumerate(group.completions)
        ]
    return [group]


def joined(pieces: Sequence[Outcome]) -> Outcome:
    """Return the outcome of a group from those of its pieces, in order; the first error is the group's."""
    if len(pieces) == 1:
        return pieces[0]
    error = next((piece for piece in pieces if isinstance(piece, RewardError)), None)
    if error is not None:
        return error
    scored = [piece for piece in pieces if isinstance(piece, GroupScores)]
    names = sorted({name for piece in scored for name in piece.parts})
    return GroupScores(
        rewards=tuple(reward for piece in scored for reward in piece.rewards),
        scorer=scored[0].scorer,
        parts={name: tuple(value for piece in scored for value in piece.parts.get(name, (0.0,))) for name in names},
    )
