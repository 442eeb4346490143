"""The groups of a run's record as the trajectory browser lists, filters and describes them; without numpy.

A chapter is listed from its newest step to its oldest, then its evaluated, dropped and open groups. Chapters never change,
so the number of a chapter and a place in its list are a cursor that stays valid while the run goes on. A group is described by
its texts, rewards, turns and tokens, each cut to a bound.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from fastapi import Query

from penstock.console.report import diagnoses
from penstock.console.report.event_fields import setting
from penstock.console.report.learning import mean
from penstock.protocol.errors import PenstockError
from penstock.protocol.groups import BlobRef, ScoredGroup
from penstock.protocol.record.lineage import LineageChapter

if TYPE_CHECKING:
    from penstock.console.web.reading.stored_logprobs import Current
    from penstock.protocol.trajectory import Group, Trajectory


Status = Literal["trained", "evaluated", "dropped", "in_flight"]
MAX_NUMBER = 2**53
Step = Annotated[int | None, Query(ge=0, le=MAX_NUMBER)]
Limit = Annotated[int, Query(ge=1, le=100)]
Finite = Annotated[float | None, Query(allow_inf_nan=False)]
MAX_REWARDS = 128  # values of one group that a list shows
_CURSOR = re.compile(r"(\d{1,9})\.(\d{1,9})")
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


class QueryRefused(PenstockError):
    """A request asks for what the console does not read; the text says what to ask instead."""


@dataclass(frozen=True, slots=True)
class Entry:
    group_id: str
    status: Status
    chapter: int
    split: str
    num_tokens: int
    pack: BlobRef | None = None
    reason: str = ""  # why it was dropped
    step: int | None = None
    epoch: int | None = None  # of the trainer session that made the step
    trained_version: int | None = None
    made_version: int | None = None
    use: int = 1
    scored: ScoredGroup | None = None
    staleness: int | None = None

    @property
    def rewards(self) -> tuple[float, ...]:
        return self.scored.rewards if self.scored else ()

    def is_of(self, version: int) -> bool:
        """Return True if this version sampled some of its tokens; False where the record does not say which did."""
        if self.scored is None:
            return self.group_id.startswith(f"eval.v{version}.")
        return self.scored.generated.oldest_version <= version <= self.scored.generated.newest_version


@dataclass(frozen=True)
class GroupQuery:
    """What a list of groups is limited to, and where it begins: the query of a request. None and "" are no limit."""

    each_trajectory: ClassVar[bool] = False  # trajectories are listed, by their own rewards; else groups, by the mean
    step_from: Step = None
    step_to: Step = None
    reward_min: Finite = None
    reward_max: Finite = None
    status: Literal["trained", "evaluated", "dropped", "in_flight", ""] = ""
    reason: Annotated[str, Query(max_length=60)] = ""  # why they were dropped
    split: Annotated[str, Query(max_length=60)] = ""
    version: Step = None  # that sampled
    prompt_number: Step = None
    prompt: Annotated[str, Query(max_length=200)] = ""  # text of the prompt or a completion, in any case of letters
    cursor: Annotated[str, Query(max_length=40)] = ""
    limit: Limit = 50
    texts: bool = True

    def accepts(self, entry: Entry) -> bool:
        """Return True unless the record alone rules a group out; its texts are not known here."""
        for wanted, found in ((self.status, entry.status), (self.reason, entry.reason), (self.split, entry.split)):
            if wanted and wanted != found:
                return False
        if self.prompt_number is not None and f"p{self.prompt_number}" not in entry.group_id.split("."):
            return False
        if not self.may_be_in(entry.step, entry.step) or (self.version is not None and not entry.is_of(self.version)):
            return False
        if self.reward_min is None and self.reward_max is None:
            return True
        if self.each_trajectory:
            return any(map(self.accepts_reward, entry.rewards))
        return bool(entry.rewards) and self.accepts_reward(mean(entry.rewards))

    def accepts_reward(self, reward: float) -> bool:
        low, high = self.reward_min, self.reward_max
        return (low is None or reward >= low) and (high is None or reward <= high)

    def may_be_in(self, first_step: int | None, last_step: int | None) -> bool:
        """Return False if no group of these steps can be accepted; None: it has no step, or a chapter has none."""
        if self.step_from is None and self.step_to is None:
            return True
        if first_step is None or last_step is None:
            return False
        return last_step >= (self.step_from or 0) and (self.step_to is None or first_step <= self.step_to)


class TrajectoryQuery(GroupQuery):
    each_trajectory = True


def entries(chapter: LineageChapter, *, is_last: bool = False) -> Iterator[Entry]:
    """Return the groups of a chapter in the order of the list; those in flight are listed for the last chapter only."""
    for step in reversed(chapter.steps):
        for group in step.groups:
            yield Entry(
                group_id=group.group_id, status="trained", chapter=chapter.number, split=group.scored.generated.split,
                num_tokens=group.num_tokens, pack=step.packs[group.pack] if group.pack < len(step.packs) else None,
                step=step.step, epoch=step.epoch, trained_version=step.trained_version, made_version=step.made_version, use=group.use,
                scored=group.scored, staleness=step.staleness(group),
            )  # fmt: skip
    packs = chapter.closed_packs
    for evaluated in chapter.evaluated:
        pack = packs[evaluated.pack] if evaluated.pack is not None and evaluated.pack < len(packs) else None
        yield Entry(evaluated.group_id, "evaluated", chapter.number, "eval", evaluated.num_tokens, pack)
    for gone in chapter.dropped:
        pack = packs[gone.pack] if gone.pack is not None and gone.pack < len(packs) else None
        yield Entry(gone.group_id, "dropped", chapter.number, gone.split, gone.num_tokens, pack, gone.reason)
    if is_last:
        for split, ids in sorted(chapter.account.in_flight.items()):
            for group_id in ids:
                yield Entry(group_id, "in_flight", chapter.number, split, 0)


def parse_cursor(cursor: str) -> tuple[int, int]:
    match = _CURSOR.fullmatch(cursor)
    if match is None:
        raise QueryRefused(f"cursor {cursor[:40]!r} is none that a list returned; begin again without it")
    return int(match[1]), int(match[2])


def group_row(entry: Entry) -> dict[str, Any]:
    """Return a group as one line of a list, without its texts."""
    row: dict[str, Any] = {
        "group_id": entry.group_id, "status": entry.status, "reason": entry.reason, "split": entry.split, "step": entry.step,
        "meaning": diagnoses.MEANINGS.get(entry.reason, diagnoses.OF_A_FILTER) if entry.reason else "",
        "chapter": entry.chapter, "trained_version": entry.trained_version, "made_version": entry.made_version,
        "tokens": entry.num_tokens, "use": entry.use, "prompt": None,
    }  # fmt: skip
    if entry.scored is None:
        return row
    generated, rewards = entry.scored.generated, entry.scored.rewards
    return row | {
        "rewards": list(rewards[:MAX_REWARDS]),
        "num_trajectories": len(rewards),
        "reward_mean": mean(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "is_degenerate": min(rewards) == max(rewards),
        "reward_name": generated.reward_name,
        "scorer": entry.scored.scorer,
        "issued_version": generated.issued_version,
        "oldest_version": generated.oldest_version,
        "newest_version": generated.newest_version,
        "staleness": entry.staleness,
        "finish_reasons": dict(Counter(generated.finish_reasons)),
    }


def trajectory_rows(entry: Entry, query: GroupQuery) -> list[dict[str, Any]]:
    """Return the trajectories of a group that a query accepts, as lines of a list without texts."""
    if entry.scored is None:
        return []
    generated = entry.scored.generated
    return [
        {
            "group_id": entry.group_id,
            "index": index,
            "status": entry.status,
            "step": entry.step,
            "chapter": entry.chapter,
            "reward": reward,
            "parts": {name: values[index] for name, values in entry.scored.parts.items()},
            "tokens": generated.completion_tokens[index],
            "finish_reason": generated.finish_reasons[index],
            "is_baseline": generated.has_baseline and index == len(entry.scored.rewards) - 1,
            "prompt": None,
            "completion": None,
        }
        for index, reward in enumerate(entry.scored.rewards)
        if query.accepts_reward(reward)
    ]


@dataclass(frozen=True, slots=True)
class Storing:
    setting: object = None  # ``trainer.store_logprobs``; None: the settings do not have it
    num_lost: int = 0  # steps of the newest session that could not be stored

    @classmethod
    def of(cls, config: Mapping[str, Any], num_lost: float | None) -> Storing:
        return cls(setting(config, "trainer", "store_logprobs"), int(num_lost or 0))


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


def token_reader(folder: Path, config: dict[str, Any]) -> Callable[[Sequence[int]], list[str]] | None:
    """Return what decodes tokens one by one; None without the library `tokenizers`, or a tokenizer on this machine.

    Looks into the run's folder first, then where ``model.path`` of the run's settings is.
    """
    if importlib.util.find_spec("tokenizers") is None:
        return None
    path = setting(config, "model", "path")
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
    token_rows = [group.trajectories[row] for row in rows]
    logprobs = [
        value for token_row in token_rows for value in token_row.behaviour_logprobs[token_row.loss_mask].tolist()
    ]
    text = token_rows[0].completion_text
    scored = entry.scored
    document: dict[str, Any] = {
        "index": index,
        "reward": scored.rewards[index] if scored and index < len(scored.rewards) else None,
        "parts": {name: values[index] for name, values in scored.parts.items() if index < len(values)}
        if scored
        else {},
        "finish_reason": group.finish_reasons[index],
        "is_baseline": token_rows[0].is_baseline,
        "completion": text[:MAX_TEXT],
        "is_cut": len(text) > MAX_TEXT,
        "tokens": len(logprobs),
        "rows": [len(token_row.token_ids) for token_row in token_rows],
        "logprob_mean": round(mean(logprobs), 5) if logprobs else None,
        "logprob_min": round(min(logprobs), 5) if logprobs else None,
        "versions": sorted({int(run.version) for token_row in token_rows for run in token_row.version_runs}),
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
    messages = json.loads(text)
    shown = []
    for message in messages[:MAX_MESSAGES]:
        is_chat = isinstance(message, dict) and isinstance(message.get("content"), str)
        content = message["content"] if is_chat else json.dumps(message)
        if is_chat and message.get("tool_calls"):
            content = f"{content}\n{json.dumps(message['tool_calls'])}".lstrip()
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
    token_row = group.trajectories[rows[row]]
    end = min(len(token_row.token_ids), first + min(count, MAX_TOKENS))
    part = slice(min(first, end), end)
    ids = token_row.token_ids[part].tolist()
    trained = current.columns(group, rows[row])
    return {
        "group_id": group.group_id,
        "trajectory": trajectory,
        "row": row,
        "first": part.start,
        "total": len(token_row.token_ids),
        "ids": ids,
        "texts": texts(ids) if texts is not None else None,
        "logprobs": [round(value, 5) for value in token_row.behaviour_logprobs[part].tolist()],
        "loss_mask": token_row.loss_mask[part].tolist(),
        **{name: trained[name][part] if trained else None for name in ("current_logprobs", "ratios", "outcomes")},
        "current_problem": "" if trained else current.problem or NOT_THIS_ONE,
        "versions": _versions(token_row)[part],
        "turns": [list(turn[:3]) for turn in group.turns[rows[row]]][:MAX_MESSAGES],
    }


def _versions(row: Trajectory) -> list[int | None]:
    versions: list[int | None] = [None] * len(row.token_ids)
    for version, start, end in row.version_runs:
        versions[start:end] = [int(version)] * (end - start)
    return versions
