"""Load a user's reward file and find its reward function; refuse what could never work.

TRL passes ``completions`` as texts for plain prompts and as lists of messages for chat rows, and functions are written for one
of them. Penstock's rows are both, so the function decides: by its attribute ``conversational``, or by its code, in which a
function for messages has the key ``"content"``.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any

from penstock.reward_service.errors import UserFileError
from penstock.reward_service.user_code.user_function import Style, UserReward

_KEY = "content"  # of a message's text: completion[0]["content"]
_PREFERRED = ("compute_score", "reward_function", "reward_func", "reward")
_STANDARD = {
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("stdlib") + "/lib-dynload",
}  # modules of the standard library
_BY_NAME = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
_GIVEN: dict[Style, tuple[str, ...]] = {
    Style.COMPLETION: ("data_source", "solution_str", "ground_truth", "extra_info", "prompt"),
    Style.BATCH: ("data_sources", "solution_strs", "ground_truths", "extra_infos", "prompts"),
    Style.QUERIES: ("queries", "prompts", "labels"),
}


def takes_messages(function: Any) -> bool:
    """Return True for a function that sets ``conversational = True``, or whose code reads the key of a message's text.

    Functions of the same module that it calls are read too. A function written in C, or wrapped by one, takes texts.
    """
    declared = getattr(function, "conversational", None)
    return declared if isinstance(declared, bool) else _reads_content(_python(function), set())


def _reads_content(function: FunctionType | None, seen: set[CodeType]) -> bool:
    if function is None or function.__code__ in seen:
        return False
    seen.add(function.__code__)
    codes = [function.__code__]
    for code in codes:
        if _KEY in code.co_consts:
            return True
        codes += [
            co_const for co_const in code.co_consts if isinstance(co_const, CodeType)
        ]  # comprehensions, inner functions
    named = {name for code in codes for name in code.co_names}
    called = [function.__globals__.get(name) for name in sorted(named)]
    local_functions = [
        _python(callee) for callee in called if getattr(callee, "__module__", None) == function.__module__
    ]
    return any(_reads_content(callee, seen) for callee in local_functions)


def _python(value: Any) -> FunctionType | None:
    if inspect.isclass(value):
        return None
    function = (
        inspect.unwrap(value) if inspect.isroutine(value) else inspect.getattr_static(type(value), "__call__", None)
    )
    function = getattr(function, "__func__", function)
    return function if isinstance(function, FunctionType) else None


def load(file: Path, function: str | None = None, *, conversational: bool | None = None) -> UserReward:
    """Load a file and find its reward function (``function``, when it has several).

    ``conversational``: texts as lists of messages; None: as the function was written (`takes_messages`).
    Raises UserFileError saying what is wrong with the file, and where.
    """
    if not os.path.isfile(file):  # noqa: PTH113  False, not an error, for a name that no file can have
        raise UserFileError(f"{file}: no such file")
    module = _import(file.resolve())
    name, target = _choose(module, file, function)
    return of(target, name, file, conversational=conversational)


def of(
    target: Any, name: str, file: Path, *, conversational: bool | None = None, full_tracebacks: bool = False,
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> UserReward:  # fmt: skip
    """Return what is called for a function, a callable object, or a class that is built without arguments.

    ``file`` may be what stands for the file of a function in a notebook, such as ``<ipython-input-1>``. ``arguments`` are passed to
    every call, by name. Raises UserFileError when it has none of the signatures of a reward function, or does not take the arguments.
    """
    called = _built(target, file, name)
    parameters = inspect.signature(called).parameters
    style = next((style for style in Style if style in parameters), None)
    if style is None:
        raise UserFileError(
            f"{file}: {name}({', '.join(parameters)}) is not a reward function; it needs a parameter 'solution_str' "
            "(compute_score(data_source, solution_str, ground_truth, extra_info=None)), "
            "'solution_strs' (the same in batches), 'completions' (f(prompts, completions, **columns)) "
            "or 'queries' (reward_func(queries, prompts, labels))"
        )
    if conversational and style is not Style.GROUP:
        raise UserFileError(f"{file}: --conversational is for TRL-style functions; {name} takes {style}")
    _refuse_arguments(file, name, parameters, style, arguments)
    given_here = {n: p for n, p in parameters.items() if n not in arguments}
    needed = tuple(n for n, p in given_here.items() if p.default is p.empty and p.kind in _BY_NAME)
    _refuse_unfillable(file, name, given_here, needed, style)
    return UserReward(
        name=name,
        function=called,
        parameters=tuple(parameters),
        needed=needed,
        takes_any=style is Style.GROUP and any(p.kind is p.VAR_KEYWORD for p in parameters.values()),
        style=style,
        file=file.resolve() if file.exists() else file,
        conversational=style is Style.GROUP and takes_messages(called) if conversational is None else conversational,
        full_tracebacks=full_tracebacks,
        arguments=dict(arguments),
    )


def _import(file: Path) -> ModuleType:
    known = sys.modules.get(file.stem)  # ``json.py`` must not replace the module of the standard library
    is_taken = file.stem in sys.stdlib_module_names or (
        known is not None and getattr(known, "__file__", "") != str(file)
    )
    name = f"reward_file_{file.stem}" if is_taken else file.stem
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserFileError(f"{file}: not a Python file (its name must end in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling libraries look a class's module up there
    sys.path.insert(_after_standard_library(), str(file.parent))  # it may import modules of its folder
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as err:
        frames = [frame for frame in traceback.extract_tb(err.__traceback__) if Path(frame.filename) == file]
        line = f", line {frames[-1].lineno}" if frames else ""
        raise UserFileError(f"{file}{line}: cannot be loaded: {type(err).__name__}: {err}") from err
    return module


def _after_standard_library() -> int:
    """Return the place in ``sys.path`` before all installed packages, and after the standard library."""
    positions = [number for number, path in enumerate(sys.path) if path in _STANDARD]
    return max(positions, default=-1) + 1


def _choose(module: ModuleType, file: Path, wanted: str | None) -> tuple[str, Any]:
    if wanted is not None:
        target = getattr(module, wanted, None)
        if not callable(target):
            raise UserFileError(f"{file}: no callable {wanted!r} in it")
        return wanted, target
    candidates = {name: value for name, value in vars(module).items() if _is_own(name, value, module)}
    for name in _PREFERRED:
        if name in candidates:
            return name, candidates[name]
    fitting = {name: value for name, value in candidates.items() if _fits(value)}
    built = {type(value) for value in fitting.values()}
    fitting = {name: value for name, value in fitting.items() if value not in built}  # the object, not its class
    if len(fitting) == 1:
        return next(iter(fitting.items()))
    if not fitting:
        raise UserFileError(f"{file}: no reward function in it; define compute_score(data_source, solution_str, ...)")
    raise UserFileError(f"{file}: several reward functions ({', '.join(fitting)}); choose one with --function")


def _built(target: Any, file: Path, name: str) -> Any:
    if not inspect.isclass(target):
        return target
    try:
        return target()
    except TypeError as err:
        raise UserFileError(f"{file}: class {name} must be built without arguments ({err})") from None


def _is_own(name: str, value: Any, module: ModuleType) -> bool:
    """Return True for a callable of this file: defined in it, or an object of a class defined in it."""
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
    return any(style in parameters for style in Style)


def _refuse_arguments(
    file: Path, name: str, parameters: Mapping[str, inspect.Parameter], style: Style, arguments: Mapping[str, Any]
) -> None:
    reserved = {*_GIVEN.get(style, ("prompts", "completions"))}
    taken = [n for n, p in parameters.items() if p.kind in _BY_NAME and n not in reserved]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if refused := sorted(n for n in arguments if n in reserved or not (n in taken or takes_any)):
        raise UserFileError(
            f"{file}: {name} takes no parameter {', '.join(refused)} from the run file; it takes {', '.join(taken) or 'none'}"
        )


def _refuse_unfillable(
    file: Path, name: str, parameters: Mapping[str, inspect.Parameter], needed: Sequence[str], style: Style
) -> None:
    positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_ONLY]
    given = _GIVEN.get(style)
    unknown = [n for n in needed if (n in {"completion_ids", "prompt_ids"} if given is None else n not in given)]
    if unknown or positional:
        raise UserFileError(
            f"{file}: {name} needs {', '.join(unknown + positional)}, which a reward service cannot give; "
            f"{style} takes {', '.join(given or ('prompts', 'completions', 'the columns of the row'))}"
        )
