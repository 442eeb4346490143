"""Rewards that the run file makes of parts (``reward.define``): their parameters checked, their parts put together."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from penstock.protocol.config.connection import Section
from penstock.protocol.config.reward_settings import RewardDefinition, RewardPart, RewardSettings
from penstock.protocol.errors import ConfigError
from penstock.reward_service.registry.built_in import AUTO, BUILT_INS, BY_SOURCE, Graders, scorer
from penstock.reward_service.registry.user_rewards import UserRewards, import_path
from penstock.reward_service.scores import Scorer


def check_settings(reward: RewardSettings) -> None:
    """Check the definitions of a run file and the rewards that it names.

    Raises ConfigError as `check` does, and for a built-in reward that does not work without parameters: no service offers it.
    """
    check(reward.define)
    references = {"reward.name": reward.name} | {
        f"reward.by_source.{name}": reference for name, reference in reward.by_source.items()
    }
    named = [(key, name) for key, name in references.items() if name is not None and name in BUILT_INS]
    problems = [_needs_parameters(key, name) for key, name in named if BUILT_INS[name].default is None]
    if problems:
        raise ConfigError("\n".join(problems))


def _needs_parameters(key: str, name: str) -> str:
    parameters = ", ".join(BUILT_INS[name].parameters.model_fields)
    return (
        f"{key} = {name!r}: this built-in reward needs parameters (of {parameters}). Define a reward "
        f'with them and name that: reward.define.mine.parts.{name} = {{ reward = "{name}", parameters = {{ ... }} }} and {key} = "mine"; '
        "docs/graders.md has an example"
    )


def check(define: Mapping[str, RewardDefinition]) -> dict[str, dict[str, Section]]:
    """Return the parameters of every built-in part, by definition and part.

    Raises ConfigError that lists every error: a built-in's name taken, unknown or wrong parameters, parameters of
    something that is no built-in.
    """
    problems: list[str] = []
    checked: dict[str, dict[str, Section]] = {}
    for name, definition in define.items():
        if name in BUILT_INS or name == AUTO:
            problems.append(f"reward.define.{name}: {name} is a built-in reward; choose another name")
        checked[name] = {}
        for part_name, part in definition.parts.items():
            place = f"reward.define.{name}.parts.{part_name}"
            parameters = _parameters(place, part, problems)
            if parameters is not None:
                checked[name][part_name] = parameters
    if problems:
        raise ConfigError("\n".join(problems))
    return checked


def own_scorers(
    define: Mapping[str, RewardDefinition], graders: Graders, user: UserRewards
) -> dict[str, dict[str, Scorer]]:
    """Return the scorers of the parts that are built in or user code, by definition and part.

    The others (endpoints, auto, a built-in that this machine cannot run) are looked up for every group. Raises
    ConfigError as `check` does.
    """
    made: dict[str, dict[str, Scorer]] = {}
    for name, by_part in check(define).items():
        made[name] = {}
        for part_name, parameters in by_part.items():
            built_in = scorer(BUILT_INS[define[name].parts[part_name].reward], parameters, graders)
            if built_in is not None:
                made[name][part_name] = built_in
        for part_name, part in define[name].parts.items():
            code = user.of(part.reward, part.parameters)
            if code is not None:
                made[name][part_name] = code
    return made


def describe(definition: RewardDefinition) -> str:
    texts = []
    for name, part in definition.parts.items():
        gate = "" if part.needs is None else f", else {part.otherwise:g} where below {part.needs:g}"
        texts.append(f"{part.weight:g} x {name} ({part.reward}{gate})")
    return " + ".join(texts)


def _parameters(place: str, part: RewardPart, problems: list[str]) -> Section | None:
    built_in = BUILT_INS.get(part.reward)
    if built_in is None:
        if part.parameters and import_path(part.reward) is None:
            near = difflib.get_close_matches(part.reward, BUILT_INS, n=1, cutoff=0.6)
            alias = f"; write {BY_SOURCE[part.reward]}" if part.reward in BY_SOURCE else ""
            hint = alias or (f"; did you mean {near[0]}?" if near else "")
            problems.append(
                f"{place}.parameters: only built-in rewards and your own code take parameters, {part.reward} is neither{hint}"
            )
        return None
    try:  # JSON's strictness: a list is a tuple and a text a path, but "5" is no number
        return built_in.parameters.model_validate_json(json.dumps(part.parameters, default=str), strict=True)
    except ValidationError as err:
        problems += [_problem(place, part, error) for error in err.errors(include_url=False)]
        return None


def _problem(place: str, part: RewardPart, error: Any) -> str:
    known = list(BUILT_INS[part.reward].parameters.model_fields)
    key = ".".join(map(str, error["loc"]))
    where = f"{place}.parameters{'.' + key if key else ''}"
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known) or 'none'}"
        return f"{where}: the reward {part.reward} has no such parameter; {hint}"
    if error["type"] == "missing":
        return f"{where}: the reward {part.reward} needs it"
    text = str(error["msg"]).removeprefix("Value error, ").replace("Input should be ", "expected ")
    got = f", got {error['input']!r}" if key else ""
    return f"{where}: {text}{got}"
