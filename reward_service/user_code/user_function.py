"""A user's reward function, called in the way it was written for.

| style          | recognised by           | called                                                        |
|----------------|-------------------------|---------------------------------------------------------------|
| verl, ROLL     | ``solution_str``        | once a completion: ``compute_score(data_source, solution_str, ground_truth, extra_info)`` |
| verl, batch    | ``solution_strs``       | once a request: ``compute_score(data_sources, solution_strs, ground_truths, extra_infos)`` |
| TRL            | ``completions``         | once a group: lists of the same length, one for every column of the row |
| OpenRLHF       | ``queries``             | once a request: ``reward_func(queries, prompts, labels)``, a list or ``{"rewards", "scores", "extra_logs"}`` |
| callable class | either, of ``__call__`` | as above; built once, without arguments, its ``setup()`` called before and its ``close()`` after |

Any of them may be ``async``, and may have more parameters, which the run file gives (``parameters`` of a part in ``reward.define``). What a call raises, and anything it returns that is not a finite number,
becomes the error of its score, with the file and line: never a 0.
"""

from __future__ import annotations

import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from penstock.reward_service.endpoints.dialects.dialect import rows_of
from penstock.reward_service.endpoints.dialects.libraries import openrlhf_columns, trl_columns, verl_columns, verl_row
from penstock.reward_service.endpoints.wire import MAX_PARTS, GroupToScore, Score
from penstock.reward_service.errors import UserFileError

_MAX_TRACEBACK = 700  # characters
_MAX_SHOWN = 20  # lines of the file whose exceptions are shown in full


class Style(StrEnum):
    """How a function is called; the value is the parameter that shows it."""

    COMPLETION = "solution_str"
    BATCH = "solution_strs"
    GROUP = "completions"
    QUERIES = "queries"


@dataclass(frozen=True, slots=True)
class UserReward:
    name: str
    function: Callable[..., Any]
    parameters: tuple[str, ...]  # by name; all of them when takes_any
    needed: tuple[str, ...]  # those of them without a default, and without an argument
    takes_any: bool  # has **kwargs
    style: Style
    file: Path
    conversational: bool = False  # TRL: texts as lists of messages (`user_file.takes_messages`)
    arguments: Mapping[str, Any] = field(default_factory=dict)  # the same at every call: the run file's parameters
    full_tracebacks: bool = False  # the error of a score has the traceback from the user's code on
    shown: set[str] = field(default_factory=set, compare=False)  # exceptions shown in full already

    @property
    def batched(self) -> bool:
        return self.style in {Style.BATCH, Style.QUERIES}

    async def open(self) -> None:
        """Call its ``setup()``, if it is an object that has one; raises UserFileError when that raises."""
        try:
            await self._hook("setup")
        except (Exception, SystemExit) as err:
            raise UserFileError(f"{self.file}: setup() of {self.name} failed: {self._explain(err)}") from err

    async def close(self) -> None:
        try:
            await self._hook("close")
        except (Exception, SystemExit) as err:  # noqa: BLE001 the endpoint ends anyway
            sys.stderr.write(f"close() of {self.name}: {self._explain(err)}\n")

    async def _hook(self, name: str) -> None:
        hook = None if inspect.isroutine(self.function) else getattr(self.function, name, None)
        result = hook() if callable(hook) else None
        if inspect.isawaitable(result):
            await result

    async def score_all(self, groups: Sequence[GroupToScore]) -> list[list[Score]]:
        if not self.batched:
            return [await self.score(group) for group in groups]
        rows = rows_of(groups)
        columns = (
            openrlhf_columns(rows)
            if self.style is Style.QUERIES
            else {**verl_columns(rows), "prompts": [group.prompt for group, _ in rows]}
        )
        scores = iter(await self._list_of_scores(columns, len(rows)))
        return [[next(scores) for _ in group.completions] for group in groups]

    async def score(self, group: GroupToScore) -> list[Score]:
        if self.batched:
            return (await self.score_all([group]))[0]
        if self.style is Style.COMPLETION:
            return [await self._one(group, completion) for completion in group.completions]
        columns = trl_columns(group, conversational=self.conversational)
        if missing := [name for name in self.needed if name not in columns]:
            had = ", ".join(sorted(columns))
            shown = ", ".join(f'"{name}": VALUE' for name in missing)
            error = (
                f"{self.name} reads {', '.join(missing)}, and the row has only {had}; add the column to the data, or map one to "
                f"it (data.map). In `penstock reward test`: --extra-info '{{{shown}}}'"
            )
            return [Score(error=error[:1000])] * len(group.completions)
        return await self._list_of_scores(columns, len(group.completions))

    async def _one(self, group: GroupToScore, completion: str) -> Score:
        columns = {**verl_row(group, completion), "prompt": group.prompt}
        try:
            return _score_of(await self._call(columns))
        except (Exception, SystemExit) as err:  # noqa: BLE001 the user's code may raise anything; it becomes the score's error
            return Score(error=self._explain(err))

    async def _list_of_scores(self, columns: dict[str, Any], size: int) -> list[Score]:
        try:
            values, parts = _listed(await self._call(columns), openrlhf=self.style is Style.QUERIES)
            if isinstance(values, str | dict) or len(values) != size:
                raise ValueError(f"{self.name} must return a list of {size} scores, it returned {str(values)[:100]!r}")
            for part, column in parts.items():
                if len(column) != size:
                    raise ValueError(f"{self.name} returned {len(column)} values of {part} for {size} completions")
            named = [{part: column[place] for part, column in parts.items()} for place in range(size)]
            return [self._checked(value, more) for value, more in zip(values, named, strict=True)]
        except (Exception, SystemExit) as err:  # noqa: BLE001 as above
            return [Score(error=self._explain(err))] * size

    def _checked(self, value: Any, parts: dict[str, Any]) -> Score:
        try:
            return _score_of({**parts, "score": value} if parts else value)
        except (TypeError, ValueError) as err:
            return Score(error=self._explain(err))

    async def _call(self, columns: dict[str, Any]) -> Any:
        wanted = columns if self.takes_any else {name: columns[name] for name in self.parameters if name in columns}
        result = self.function(**{**wanted, **self.arguments})
        return await result if inspect.isawaitable(result) else result

    def _explain(self, err: BaseException) -> str:
        """Return the exception with file and line; the traceback is written to stderr once for each line."""
        frames = [frame for frame in traceback.extract_tb(err.__traceback__) if Path(frame.filename) == self.file]
        if not frames:
            return f"{type(err).__name__}: {err}"[:1000]
        where = f"{self.file.name}, line {frames[-1].lineno}, in {frames[-1].name}"
        if len(self.shown) < _MAX_SHOWN and where not in self.shown:
            self.shown.add(where)
            sys.stderr.write(f"{self.name} could not score ({where}); the group is retried:\n")
            sys.stderr.write("".join(traceback.format_exception(err)))
            sys.stderr.flush()
        if self.full_tracebacks:
            return f"{str(f'{type(err).__name__}: {err}')[:300]} ({where[:120]})\n{_traceback_from(err, self.file)}"
        code = f": {frames[-1].line}" if frames[-1].line else ""
        return f"{str(f'{type(err).__name__}: {err}')[:800]} ({where}{code[:120]})"


def _traceback_from(err: BaseException, file: Path) -> str:
    """Return the traceback from the first line of ``file`` on, one line a frame; of a long one its end."""
    place = err.__traceback__
    while place is not None and Path(place.tb_frame.f_code.co_filename) != file:
        place = place.tb_next
    frames = [f"  {frame.filename}:{frame.lineno} {frame.name}: {frame.line}" for frame in traceback.extract_tb(place)]
    return "\n".join(frames)[-_MAX_TRACEBACK:]


def _listed(value: Any, *, openrlhf: bool) -> tuple[Any, dict[str, Any]]:
    if not openrlhf or not isinstance(value, dict):
        return _plain(value), {}
    if "rewards" not in value:
        raise ValueError(f"a dict without 'rewards' was returned: keys {', '.join(map(str, value))[:200]}")
    logs = value.get("extra_logs")
    columns = {**(logs if isinstance(logs, dict) else {}), "scores": value.get("scores")}
    plain = {str(name): _plain(column) for name, column in columns.items()}
    return _plain(value["rewards"]), {name: column for name, column in plain.items() if isinstance(column, list)}


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") and getattr(value, "ndim", 0) else value


def _score_of(value: Any) -> Score:
    parts: dict[str, float] = {}
    if isinstance(value, dict):
        if "score" not in value:
            raise ValueError(f"a dict without 'score' was returned: keys {', '.join(map(str, value))[:200]}")
        numbers = ((str(key), item) for key, item in value.items() if key != "score" and _is_number(item))
        parts = {key[:64]: float(item) for key, item in list(numbers)[:MAX_PARTS]}
        value = value["score"]
    if not _is_number(value):
        raise TypeError(f"a score must be a number, {type(value).__name__} {str(value)[:80]!r} was returned")
    score = float(value)
    if not all(map(math.isfinite, (score, *parts.values()))):
        raise ValueError(f"a score must be finite, {score} was returned (parts: {parts})")
    return Score(score=score, parts=parts)


def _is_number(value: Any) -> bool:
    return not isinstance(value, str | bytes | Sequence) and hasattr(value, "__float__")
