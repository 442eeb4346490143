"""Describe one group as the page shows it: its texts, rewards, turns and tokens, each cut to a bound; without numpy."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.console.report.learning import mean
from penstock.console.web.reading.recorded_groups import Entry, QueryRefused, group_row
from penstock.protocol.errors import PenstockError

if TYPE_CHECKING:
    from penstock.console.web.reading.stored_logprobs import Current
    from penstock.protocol.trajectory import Group, Trajectory


NOT_TRAINED = {
    "dropped": "A dropped group is not trained on: the trainer computes no log-probabilities of its tokens.",
    "evaluated": "An evaluated group is not trained on: the trainer computes no log-probabilities of its tokens.",
    "in_flight": "The group is not trained yet.",
}
NOT_THIS_ONE = "This trajectory was not trained on: it is a baseline, or a filter left it out."
_TOKENIZER = "tokenizer.json"
MAX_TEXT = 20_000  # characters of one text
MAX_TRAJECTORIES = 128  # of one group
MAX_TOKENS = 4096  # of one answer
MAX_MESSAGES = 200  # of one episode's conversation
_MAX_MESSAGES_CHARS = 200_000
TokenTexts = Callable[[Sequence[int]], list[str]]


@dataclass(frozen=True, slots=True)
class Storing:
    setting: object = None  # ``trainer.store_logprobs``; None: the settings do not have it
    num_lost: int = 0  # steps of the newest session that could not be stored

    @classmethod
    def of(cls, config: Mapping[str, Any], num_lost: float | None) -> Storing:
        settings = config.get("settings")
        trainer = settings.get("trainer") if isinstance(settings, dict) else None
        setting = trainer.get("store_logprobs") if isinstance(trainer, dict) else None
        return cls(setting, int(num_lost or 0))


def why_absent(step: int, storing: Storing) -> str:
    if storing.setting == 0:
        return "trainer.store_logprobs is 0: the trainer stored no log-probabilities of its own."
    if storing.setting is None:
        return (
            "The run's settings have no trainer.store_logprobs: its release stored no log-probabilities of the trainer."
        )
    lost = f"the trainer could not store {storing.num_lost} steps of its newest session" if storing.num_lost else ""
    return (
        f"The object store has no log-probabilities of step {step}: "
        f"{lost or 'they were deleted with their packs, or the trainer was killed before it wrote them'}."
    )


def why_not_this_group(step: int, num_groups: int, storing: Storing) -> str:
    """Return why a step stored ``num_groups`` groups, and not this one."""
    why = (
        f"trainer.store_logprobs is {storing.setting}"
        if storing.setting not in (None, "all")
        else "filters left out all of its trajectories, or the step had too many tokens"
    )
    return f"Step {step} stored those of {num_groups} groups, and this one is not among them: {why}."


def reader(folder: Path, config: dict[str, Any]) -> Callable[[Sequence[int]], list[str]] | None:
    """Return what decodes tokens one by one; None without the library `tokenizers`, or a tokenizer on this machine.

    Looks into the run's folder first, then where ``model.path`` of the run's settings is.
    """
    if importlib.util.find_spec("tokenizers") is None:
        return None
    settings = config.get("settings")
    model = settings.get("model") if isinstance(settings, dict) else None
    path = model.get("path") if isinstance(model, dict) else None
    for place in (folder / "model", *([Path(path)] if isinstance(path, str) and path else [])):
        if (place / _TOKENIZER).is_file():
            return _decoder(place)
    return None


@functools.lru_cache(maxsize=4)
def _decoder(folder: Path) -> Callable[[Sequence[int]], list[str]] | None:
    # Costs 20 ms to import, and is an extra of the rollout worker.
    from penstock.protocol.chat_tokenizer import ChatTokenizer  # noqa: PLC0415

    try:
        tokenizer = ChatTokenizer.read(folder)
    except (PenstockError, OSError):
        return None
    return lambda ids: tokenizer.decode_many([[token] for token in ids], skip_special_tokens=False)


def group_document(entry: Entry, group: Group | None, current: Current | None, problem: str = "") -> dict[str, Any]:
    """Return a group with its trajectories; without its pack only what the record says, and the problem."""
    document = group_row(entry) | {"problem": problem, "trajectories": []}
    if group is None or current is None:
        return document
    rows_of = group.rows_of
    shown = rows_of[:MAX_TRAJECTORIES]
    return document | {
        "num_trajectories": len(rows_of),
        "prompt": group.prompt_text[:MAX_TEXT],
        "prompt_tokens": group.num_prompt_tokens,
        "data_source": group.reward.data_source,
        "ground_truth": (group.reward.ground_truth or "")[:MAX_TEXT],
        "reward_name": group.reward.name,
        "environment": group.episodes[0].environment if group.episodes else "",
        "current_problem": current.problem,
        "trajectories": [
            _trajectory(index, entry, group, rows) | {"ratio": current.summary(group, rows)}
            for index, rows in enumerate(shown)
        ],
    }


def _trajectory(index: int, entry: Entry, group: Group, rows: range) -> dict[str, Any]:
    own = [group.trajectories[row] for row in rows]
    logprobs = [value for one in own for value in one.behaviour_logprobs[one.loss_mask].tolist()]
    text = own[0].completion_text
    scored = entry.scored
    document: dict[str, Any] = {
        "index": index,
        "reward": scored.rewards[index] if scored and index < len(scored.rewards) else None,
        "parts": {name: values[index] for name, values in scored.parts.items() if index < len(values)}
        if scored
        else {},
        "finish_reason": group.finish_reasons[index],
        "is_baseline": own[0].is_baseline,
        "completion": text[:MAX_TEXT],
        "is_cut": len(text) > MAX_TEXT,
        "tokens": len(logprobs),
        "rows": [len(one.token_ids) for one in own],
        "logprob_mean": round(mean(logprobs), 5) if logprobs else None,
        "logprob_min": round(min(logprobs), 5) if logprobs else None,
        "versions": sorted({int(run.version) for one in own for run in one.version_runs}),
        "turns": [],
        "messages": [],
    }
    if group.episodes:
        episode = group.episodes[index]
        document |= {
            "status": episode.status,
            "seed": episode.seed,
            "attempt": episode.attempt,
            "messages": _messages(episode.messages),
            "turns": [
                {"number": turn.number, "row": number, "start": turn.start, "end": turn.end, "reward": turn.reward}
                for number, row in enumerate(episode.rows)
                for turn in row.turns
            ][:MAX_MESSAGES],
        }
    return document


def _messages(text: str) -> list[dict[str, str]]:
    """Return the conversation as roles and texts; what is no message is shown as JSON."""
    if len(text) > _MAX_MESSAGES_CHARS:
        return [{"role": "", "content": f"{len(text)} characters of conversation; read the pack to see them"}]
    found = json.loads(text)
    shown = []
    for message in found[:MAX_MESSAGES]:
        is_chat = isinstance(message, dict) and isinstance(message.get("content"), str)
        content = message["content"] if is_chat else json.dumps(message)
        role = str(message.get("role", ""))[:40] if isinstance(message, dict) else ""
        shown.append({"role": role, "content": content[:MAX_TEXT]})
    return shown


def token_document(
    group: Group, current: Current, trajectory: int, row: int, first: int, count: int, texts: TokenTexts | None = None
) -> dict[str, Any]:
    """Return a part of the tokens of one row, as columns. Raises QueryRefused for what the group does not have."""
    rows_of = group.rows_of
    if trajectory >= len(rows_of):
        raise QueryRefused(f"group {group.group_id} has {len(rows_of)} trajectories, from 0; there is no {trajectory}")
    rows = rows_of[trajectory]
    if row >= len(rows):
        raise QueryRefused(
            f"trajectory {trajectory} of {group.group_id} has {len(rows)} rows, from 0; there is no {row}"
        )
    found = group.trajectories[rows[row]]
    end = min(len(found.token_ids), first + min(count, MAX_TOKENS))
    part = slice(min(first, end), end)
    ids = found.token_ids[part].tolist()
    trained = current.columns(group, rows[row])
    return {
        "group_id": group.group_id,
        "trajectory": trajectory,
        "row": row,
        "first": part.start,
        "total": len(found.token_ids),
        "ids": ids,
        "texts": texts(ids) if texts is not None else None,
        "logprobs": [round(value, 5) for value in found.behaviour_logprobs[part].tolist()],
        "loss_mask": found.loss_mask[part].tolist(),
        **{name: trained[name][part] if trained else None for name in ("current_logprobs", "ratios", "outcomes")},
        "current_problem": "" if trained else current.problem or NOT_THIS_ONE,
        "versions": _versions(found)[part],
        "turns": [list(turn[:3]) for turn in group.turns[rows[row]]][:MAX_MESSAGES],
    }


def _versions(row: Trajectory) -> list[int | None]:
    versions: list[int | None] = [None] * len(row.token_ids)
    for version, start, end in row.version_runs:
        versions[start:end] = [int(version)] * (end - start)
    return versions
