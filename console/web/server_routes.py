"""Serve the routes that ask the servers of a run: its dead letters on NATS, the endpoints and scores of its reward service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Path as PathParameter
from pydantic import BaseModel, ConfigDict, Field

from penstock.console import connections, launch
from penstock.console.connections import NamedRun
from penstock.console.tools.dead_letters import DeadLetters, Letter, groups_of, letter_document, refusal
from penstock.console.tools.rewards import RewardService, RewardServiceError
from penstock.console.web.context import Context, Runner, WebContext
from penstock.console.web.problems import RESPONSES, Problem
from penstock.console.web.reading.recorded_groups import MAX_NUMBER, Limit, QueryRefused, Step
from penstock.console.web.reading.run_reading import RunReading
from penstock.console.web.reading_routes import Reading
from penstock.protocol.errors import BusUnreachable
from penstock.protocol.files import read_regular
from penstock.protocol.record.run_folder import is_lock_held

_REWARD_URL, _REWARD_TOKEN = "PENSTOCK_CONSOLE_REWARD_URL", "PENSTOCK_CONSOLE_REWARD_TOKEN_FILE"
_MAX_TEXT = 2000  # characters of a text
_MAX_GROUPS = 50  # of one letter
_LIST_S = 3.0
_TEST_S = 20.0
Number = Annotated[int, PathParameter(ge=1, le=MAX_NUMBER)]
router = APIRouter(prefix="/v1", tags=["read"], responses=RESPONSES)


class TestedCompletions(BaseModel):
    """Completions of one prompt to score by hand."""

    model_config = ConfigDict(extra="forbid")

    reward: str = Field(min_length=1, max_length=200)
    prompt: str = Field("", max_length=20_000)
    completions: list[Annotated[str, Field(max_length=20_000)]] = Field(min_length=1, max_length=16)
    data_source: str = Field("", max_length=200)
    ground_truth: str | None = Field(None, max_length=20_000)


@router.get("/runs/{run}/rewards")
def rewards(reading: Reading, web: Context) -> dict[str, Any]:
    """Return errors by reason, scorers, the distribution of the newest rewards, and the reward service's endpoints."""
    return reading.rewards() | {"service": _endpoints(*reward_service(reading, web))}


@router.post("/runs/{run}/rewards/test")
def score_by_hand(_: Runner, reading: Reading, web: Context, tested: TestedCompletions) -> dict[str, Any]:
    """Score completions by hand, by the code that scores the run's groups."""
    body = {"reward": tested.reward, "groups": [tested.model_dump(exclude={"reward"})]}
    try:
        return RewardService(*reward_service(reading, web), answer_s=_TEST_S).call("POST", "/v1/score", body)
    except RewardServiceError as err:
        raise Problem(503, str(err)) from None


def reward_service(reading: RunReading, web: WebContext) -> tuple[str, Path | None]:
    """Return the URL of a run's reward service: the one that was set, that of a local run which goes on, else the default one.

    The second value is the file of its token, which is sent to the URL that was set only.
    """
    url, folder = web.environ.get(_REWARD_URL), reading.folder
    file = web.environ.get(_REWARD_TOKEN)
    if url is not None or not is_lock_held(folder):
        return url or launch.REWARD_URL, Path(file) if url and file else None
    try:
        return f"http://127.0.0.1:{int(read_regular(folder / launch.REWARD_PORT_FILE))}", None
    except (OSError, ValueError):
        return launch.REWARD_URL, None


def _endpoints(url: str, token_file: Path | None) -> dict[str, Any]:
    """Return the rewards and endpoints of a reward service; ``problem`` says why there are none."""
    nothing: dict[str, Any] = {"url": url, "rewards": [], "endpoints": []}
    if not connections.may_answer(url):
        return nothing | {"problem": f"no reward service answers at {url}"}
    service = RewardService(url, token_file, answer_s=_LIST_S)
    try:
        listed = service.call("GET", "/v1/rewards")["rewards"]
        registered = service.call("GET", "/v1/endpoints")
    except (RewardServiceError, KeyError, TypeError) as err:
        return nothing | {"problem": str(err)}
    return {"url": url, "rewards": listed[:500], "endpoints": registered[:200], "problem": ""}


@router.get("/runs/{run}/dead-letters")
def dead_letters(reading: Reading, before: Step = None, limit: Limit = 50) -> dict[str, Any]:
    """Return the newest dead letters."""
    with _open(reading.run) as dead:
        state = dead.bus.stream_state(f"{reading.run}-dead").wait()
        end = state.last_sequence if before is None else min(before - 1, state.last_sequence)
        after = max(end - limit, state.first_sequence - 1, 0)
        letters = dead.read(after=after, most=end - after) if end > after else []
        unreadable = {str(number): why[:_MAX_TEXT] for number, why in dead.unreadable.items() if number <= end}
    return {
        "letters": [_document(letter) for letter in reversed(letters) if letter.number <= end],
        "unreadable": unreadable,
        "next": after + 1 if after >= max(state.first_sequence, 1) else None,
        "num_letters": state.num_messages,
    }


@router.get("/runs/{run}/dead-letters/{number}")
def dead_letter(reading: Reading, number: Number) -> dict[str, Any]:
    """Return one dead letter with its prompts and completions."""
    with _open(reading.run) as dead:
        letter = dead.find(number)
        groups, problem = groups_of(letter.fact, dead.blobs)
        reason = refusal(letter, dead.progress(), run=reading.run_id)
    return _document(letter) | {
        "groups": [{name: _cut(value) for name, value in group.items()} for group in groups[:_MAX_GROUPS]],
        "problem": problem[:_MAX_TEXT],
        "cannot_be_sent_again": reason,
        "notes": dead.problems,
    }


@router.post("/runs/{run}/dead-letters/{number}/resend")
def resend(_: Runner, reading: Reading, number: Number, once_more: bool = False) -> dict[str, Any]:
    """Send one dead letter again."""
    with _open(reading.run) as dead:
        letter = dead.find(number)
        reason = refusal(letter, dead.progress(), run=reading.run_id, once_more=once_more)
        if reason is not None:
            raise QueryRefused(f"dead letter {number} of run {reading.run} was not sent: {reason}")
        dead.send(letter)
    return {"id": number, "stage": letter.fact.stage, "group_ids": list(letter.fact.group_ids)[:_MAX_GROUPS]}


def _open(run: NamedRun) -> DeadLetters:
    url = run.settings.nats.url
    if not connections.may_answer(url):
        raise BusUnreachable(
            f"NATS of run {run} does not answer at {url}; of an ended run: penstock dead-letters list {run}"
        )
    return DeadLetters(run)


def _document(letter: Letter) -> dict[str, Any]:
    document = letter_document(letter) | {"detail": letter.fact.detail[:_MAX_TEXT]}
    return document | {"group_ids": document["group_ids"][:_MAX_GROUPS], "num_groups": len(letter.fact.group_ids)}


def _cut(value: Any) -> Any:
    if isinstance(value, list):
        return [_cut(element) for element in value[:_MAX_GROUPS]]
    return value[:_MAX_TEXT] if isinstance(value, str) else value
