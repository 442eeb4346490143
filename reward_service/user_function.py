"""A user's own reward file: found, loaded, and called in the way it was written for.

| style            | told by the parameter | called                                                        |
|------------------|-----------------------|---------------------------------------------------------------|
| verl, ROLL       | ``solution_str``      | once a completion: ``compute_score(data_source, solution_str, ground_truth, extra_info)`` |
| TRL              | ``completions``       | once a group: lists of the same length, one for every column of the row |
| callable class   | either, of ``__call__`` | as above; a class is built once, without arguments           |

Any of them may be ``async``. What a call raises, and anything it returns that is not a finite number,
becomes the error of its score, with the file and line: never a 0.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from reward_service.errors import UserFileError
from reward_service.wire import MAX_PARTS, GroupToScore, Score

_PREFERRED = ("compute_score", "reward_function", "reward_func", "reward")
_PER_COMPLETION = ("data_source", "solution_str", "ground_truth", "extra_info")


@dataclass(frozen=True, slots=True)
class UserReward:
    """A loaded reward and how it is called."""

    name: str
    function: Callable[..., Any]
    parameters: tuple[str, ...]  # by name; all of them when takes_any
    takes_any: bool  # has **kwargs
    per_group: bool
    file: Path

    async def score(self, group: GroupToScore) -> list[Score]:
        """Return one score for every completion; what goes wrong is in the scores."""
        if self.per_group:
            return await self._whole_group(group)
        return [await self._one(group, completion) for completion in group.completions]

    async def _one(self, group: GroupToScore, completion: str) -> Score:
        given = {
            "data_source": group.data_source,
            "solution_str": completion,
            "ground_truth": group.ground_truth,
            "extra_info": group.extra_info,
            "prompt": group.prompt,
        }
        try:
            return _score_of(await self._call(given))
        except (Exception, SystemExit) as err:  # noqa: BLE001 the user's code may raise anything; it becomes the score's error
            return Score(error=self._explain(err))

    async def _whole_group(self, group: GroupToScore) -> list[Score]:
        size = len(group.completions)
        row = {"data_source": group.data_source, "ground_truth": group.ground_truth}
        row |= group.extra_info if isinstance(group.extra_info, dict) else {"extra_info": group.extra_info}
        given: dict[str, Any] = {column: [value] * size for column, value in row.items()}
        given |= {"prompts": [group.prompt] * size, "completions": list(group.completions)}
        given.setdefault("extra_info", [group.extra_info] * size)
        try:
            values = await self._call(given)
            if isinstance(values, str | dict) or len(values) != size:
                raise ValueError(f"{self.name} must return a list of {size} scores, it returned {str(values)[:100]!r}")
            return [self._checked(value) for value in values]
        except (Exception, SystemExit) as err:  # noqa: BLE001 as above
            return [Score(error=self._explain(err))] * size

    def _checked(self, value: Any) -> Score:
        try:
            return _score_of(value)
        except (TypeError, ValueError) as err:
            return Score(error=self._explain(err))

    async def _call(self, given: dict[str, Any]) -> Any:
        wanted = given if self.takes_any else {name: given[name] for name in self.parameters if name in given}
        result = self.function(**wanted)
        return await result if inspect.isawaitable(result) else result

    def _explain(self, err: BaseException) -> str:
        """Say what was raised and where in the user's file."""
        frames = [frame for frame in traceback.extract_tb(err.__traceback__) if Path(frame.filename) == self.file]
        where = f" ({self.file.name}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
        return f"{type(err).__name__}: {err}{where}"[:1000]


def load(file: Path, function: str | None = None) -> UserReward:
    """Load a file and find its reward function (``function``, when it has several).

    Raises UserFileError saying what is wrong with the file, and where.
    """
    module = _import(file.resolve())
    name, found = _choose(module, file, function)
    called = _built(found, file, name)
    parameters = inspect.signature(called).parameters
    per_group = "completions" in parameters
    if not per_group and "solution_str" not in parameters:
        raise UserFileError(
            f"{file}: {name}({', '.join(parameters)}) is not a reward function; it needs a parameter 'solution_str' "
            "(compute_score(data_source, solution_str, ground_truth, extra_info=None)) "
            "or 'completions' (f(prompts, completions, **columns))"
        )
    _refuse_unfillable(file, name, parameters, per_group=per_group)
    return UserReward(
        name=name,
        function=called,
        parameters=tuple(parameters),
        takes_any=per_group and any(p.kind is p.VAR_KEYWORD for p in parameters.values()),
        per_group=per_group,
        file=file.resolve(),
    )


def _import(file: Path) -> ModuleType:
    if not file.is_file():
        raise UserFileError(f"{file}: no such file")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise UserFileError(f"{file}: not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses and pickling libraries look a class's module up there
    sys.path.insert(0, str(file.parent))  # it may import its neighbours, as when run by hand
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as err:
        frames = [frame for frame in traceback.extract_tb(err.__traceback__) if Path(frame.filename) == file]
        line = f", line {frames[-1].lineno}" if frames else ""
        raise UserFileError(f"{file}{line}: cannot be loaded: {type(err).__name__}: {err}") from err
    return module


def _choose(module: ModuleType, file: Path, wanted: str | None) -> tuple[str, Any]:
    if wanted is not None:
        found = getattr(module, wanted, None)
        if not callable(found):
            raise UserFileError(f"{file}: no callable {wanted!r} in it")
        return wanted, found
    own = {name: value for name, value in vars(module).items() if _is_own(name, value, module)}
    for name in _PREFERRED:
        if name in own:
            return name, own[name]
    fitting = {name: value for name, value in own.items() if _fits(value)}
    built = {type(value) for value in fitting.values()}
    fitting = {name: value for name, value in fitting.items() if value not in built}  # the object, not its class
    if len(fitting) == 1:
        return next(iter(fitting.items()))
    if not fitting:
        raise UserFileError(f"{file}: no reward function in it; define compute_score(data_source, solution_str, ...)")
    raise UserFileError(f"{file}: several reward functions ({', '.join(fitting)}); choose one with --function")


def _built(found: Any, file: Path, name: str) -> Any:
    if not inspect.isclass(found):
        return found
    try:
        return found()
    except TypeError as err:
        raise UserFileError(f"{file}: class {name} must be built without arguments ({err})") from None


def _is_own(name: str, value: Any, module: ModuleType) -> bool:
    """Say whether a name is a callable of this file: defined in it, or an object of a class defined in it."""
    home = (
        getattr(value, "__module__", None)
        if inspect.isroutine(value) or inspect.isclass(value)
        else type(value).__module__
    )
    return not name.startswith("_") and callable(value) and home == module.__name__


def _fits(value: Any) -> bool:
    target = value.__call__ if inspect.isclass(value) else value
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return False
    return "completions" in parameters or "solution_str" in parameters


def _refuse_unfillable(file: Path, name: str, parameters: Any, *, per_group: bool) -> None:
    """Refuse at the start what could never be called; a TRL function's columns are known only row by row."""
    empty = inspect.Parameter.empty
    needed = [
        p.name
        for p in parameters.values()
        if p.default is empty and p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}
    ]
    positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_ONLY]
    unknown = [n for n in needed if n not in {*_PER_COMPLETION, "prompt"}] if not per_group else []
    unknown += [n for n in needed if n in {"completion_ids", "prompt_ids"}] if per_group else []
    if unknown or positional:
        raise UserFileError(
            f"{file}: {name} needs {', '.join(unknown + positional)}, which a reward service cannot give; "
            f"it has {', '.join(_PER_COMPLETION)} and prompt, or whole groups as prompts, completions and the row's columns"
        )


def _score_of(value: Any) -> Score:
    """Turn what a reward returned into a score; raises TypeError or ValueError when it is none."""
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
