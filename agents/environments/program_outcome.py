"""What becomes of an episode whose program has ended; pure. `program.py` holds the table."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, FiniteFloat, StringConstraints, ValidationError

from penstock.agents.environments.play_episode import TRUNCATED, Played
from penstock.agents.environments.program_process import Ended
from penstock.agents.proxy.session import EpisodeSession
from penstock.protocol.config.connection import Section
from penstock.rollout_service.errors import EngineError

MAX_RESULT_BYTES = 65_536
_PartName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:#/-]{1,200}$")]


class ProgramResult(Section):
    """The file that a program writes to the path in ``PENSTOCK_RESULT``."""

    reward: FiniteFloat = Field(strict=True)
    parts: dict[_PartName, Annotated[FiniteFloat, Field(strict=True)]] = Field(default_factory=dict, max_length=64)


def outcome(
    ended: Ended,
    result: bytes | None,
    session: EpisodeSession,
    *,
    last_turn: int | None,
    needs_result: bool,
    seconds: tuple[float, float],
) -> Played:
    """Return how an episode ended; its reward is that of ``last_turn``, the last one that is trained.

    ``result``: the result file's bytes; None: there is none. ``seconds``: of the policy, of the program. Raises EngineError.
    """
    played = Played(policy_s=seconds[0], environment_s=seconds[1])
    if session.truncated_by == "expired":
        played.status, played.problem = "expired", "its tokens are of versions too far apart"
    elif ended.status is None:
        played.status, played.time_spent_by = "timeout", "policy" if seconds[0] >= seconds[1] else "tools"
        played.problem = f"not over after {sum(seconds):.1f} s, {seconds[0]:.1f} s of them by the policy{_said(ended)}"
    elif session.truncated_by in TRUNCATED:
        played.status = "truncated"
    elif ended.status == 0:
        played.status = "done"
    elif session.counts["engine_errors"]:
        raise EngineError(
            f"the engine failed in episode {session.id}, and its program ended with {ended.status}{_said(ended)}"
        )
    else:
        how = f"exit status {ended.status}" if ended.status > 0 else f"signal {-ended.status}"
        return Played("failed", problem=f"its program ended with {how}{_said(ended)}")
    if played.status == "expired":
        return played
    if last_turn is None and played.time_spent_by != "tools":
        return Played("failed", problem=f"its program ended without an answer of the policy{_said(ended)}")
    return _with_reward(played, ended, result, last_turn, needs_result=needs_result)


def _with_reward(
    played: Played, ended: Ended, result: bytes | None, last_turn: int | None, *, needs_result: bool
) -> Played:
    if result is None:
        if needs_result and played.status == "done":
            return Played("failed", problem=f"its program wrote no result to PENSTOCK_RESULT{_said(ended)}")
        return played
    try:
        if len(result) > MAX_RESULT_BYTES:
            raise ValueError(f"more than {MAX_RESULT_BYTES} bytes")
        given = ProgramResult.model_validate_json(result)
    except ValidationError as err:
        found = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'file'}: {one['msg']}" for one in err.errors()[:4])
        return Played(
            "failed", problem=f'its program\'s result is not {{"reward": NUMBER, "parts": {{...}}}}: {found[:1000]}'
        )
    except ValueError as err:
        return Played("failed", problem=f"its program's result: {err}")
    if last_turn is not None:
        played.rewards[last_turn] = given.reward
    played.parts.update(given.parts)
    return played


def _said(ended: Ended) -> str:
    return f"; the end of its output:\n{ended.output}" if ended.output else "; it printed nothing"
