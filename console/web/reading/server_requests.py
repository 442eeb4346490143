"""Ask the servers of a run for the page: dead letters on NATS, endpoints and scores of the reward service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.console import connections, launch
from penstock.console.connections import NamedRun
from penstock.console.tools.dead_letters import DeadLetters, Letter, groups_of, letter_document, refusal
from penstock.console.tools.rewards import RewardService, RewardServiceError
from penstock.console.web.reading.recorded_groups import QueryRefused
from penstock.protocol.errors import BusUnreachable
from penstock.protocol.files import read_regular
from penstock.protocol.record.run_folder import is_lock_held

_MAX_TEXT = 2000  # characters of a text
_MAX_GROUPS = 50  # of one letter
_LIST_S = 3.0
_TEST_S = 20.0


def dead_letters(run: NamedRun, *, before: int | None, limit: int) -> dict[str, Any]:
    with _open(run) as dead:
        state = dead.bus.stream_state(f"{run}-dead").wait()
        end = state.last_sequence if before is None else min(before - 1, state.last_sequence)
        after = max(end - limit, state.first_sequence - 1, 0)
        letters = dead.read(after=after, most=end - after) if end > after else []
        return {
            "letters": [_document(letter) for letter in reversed(letters) if letter.number <= end],
            "unreadable": {
                str(number): reason[:_MAX_TEXT] for number, reason in dead.unreadable.items() if number <= end
            },
            "next": after + 1 if after >= state.first_sequence else None,
            "num_letters": state.num_messages,
        }


def dead_letter(run: NamedRun, number: int) -> dict[str, Any]:
    with _open(run) as dead:
        letter = _find(dead, number)
        groups, problem = groups_of(letter.fact, dead.blobs)
        reason = refusal(letter, dead.progress(), run=run.id)
        return _document(letter) | {
            "groups": [_cut(group) for group in groups[:_MAX_GROUPS]],
            "problem": problem[:_MAX_TEXT],
            "cannot_be_sent_again": reason,
            "notes": dead.problems,
        }


def resend_dead_letter(run: NamedRun, number: int, *, once_more: bool) -> dict[str, Any]:
    """Send one letter again. Raises as `dead_letters`, and QueryRefused with the reason why it cannot be."""
    with _open(run) as dead:
        letter = _find(dead, number)
        reason = refusal(letter, dead.progress(), run=run.id, once_more=once_more)
        if reason is not None:
            raise QueryRefused(f"dead letter {number} of run {run} was not sent: {reason}")
        dead.send(letter)
        return {"id": number, "stage": letter.fact.stage, "group_ids": list(letter.fact.group_ids)[:_MAX_GROUPS]}


def _open(run: NamedRun) -> DeadLetters:
    url = run.settings.nats.url
    if not connections.may_answer(url):
        raise BusUnreachable(f"NATS of run {run} does not answer at {url}; start its servers, or set nats.url")
    return DeadLetters(run)


def _find(dead: DeadLetters, number: int) -> Letter:
    for letter in dead.read(after=number - 1, most=1):
        if letter.number == number:
            return letter
    if number in dead.unreadable:
        raise QueryRefused(
            f"dead letter {number} of run {dead.run} cannot be read by this build: {dead.unreadable[number]}"
        )
    raise QueryRefused(f"run {dead.run} has no dead letter {number}; list them again")


def _document(letter: Letter) -> dict[str, Any]:
    document = letter_document(letter) | {"detail": letter.fact.detail[:_MAX_TEXT]}
    return document | {"group_ids": document["group_ids"][:_MAX_GROUPS], "num_groups": len(letter.fact.group_ids)}


def _cut(group: dict[str, Any]) -> dict[str, Any]:
    cut = {}
    for name, value in group.items():
        if isinstance(value, str):
            cut[name] = value[:_MAX_TEXT]
        elif isinstance(value, list):
            cut[name] = [
                element[:_MAX_TEXT] if isinstance(element, str) else element for element in value[:_MAX_GROUPS]
            ]
        else:
            cut[name] = value
    return cut


def service_url(folder: Path, url: str | None) -> str:
    """Return the URL of a run's reward service: the one that was set, that of a local run which goes on, else the default one."""
    if url is not None or not is_lock_held(folder):
        return url or launch.REWARD_URL
    try:
        return f"http://127.0.0.1:{int(read_regular(folder / launch.REWARD_PORT_FILE))}"
    except (OSError, ValueError):
        return launch.REWARD_URL


def reward_endpoints(url: str, token_file: Path | None) -> dict[str, Any]:
    """Return the rewards and endpoints of a reward service; ``problem`` says why there are none."""
    if not connections.may_answer(url):
        return {"url": url, "rewards": [], "endpoints": [], "problem": f"no reward service answers at {url}"}
    service = RewardService(url, token_file, answer_s=_LIST_S)
    try:
        listed = service.call("GET", "/v1/rewards")["rewards"]
        registered = service.call("GET", "/v1/endpoints")
    except (RewardServiceError, KeyError, TypeError) as err:
        return {"url": url, "rewards": [], "endpoints": [], "problem": str(err)}
    return {"url": url, "rewards": listed[:500], "endpoints": registered[:200], "problem": ""}


def score_groups(url: str, token_file: Path | None, body: dict[str, Any]) -> Any:
    return RewardService(url, token_file, answer_s=_TEST_S).call("POST", "/v1/score", body)
