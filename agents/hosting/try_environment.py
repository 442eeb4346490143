"""``penstock env test``: play episodes and print what they were."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.agents.environments.episode_environment import EpisodeEnvironment
from penstock.agents.environments.over_http.http_environment import Http
from penstock.agents.environments.play import Row
from penstock.agents.hosting.commands import TrialOptions
from penstock.agents.hosting.trial import Policy, RandomPolicy, ScriptedPolicy, Trial, play_trial, summary
from penstock.agents.proxy.messages import Message
from penstock.protocol.config.environment_settings import EnvironmentDefinition
from penstock.protocol.config.run_file import load
from penstock.protocol.errors import ConfigError
from penstock.rollout_service.environments.environment import ENVIRONMENTS, Environment, load_environments
from penstock.rollout_service.settings import RolloutSettings


def try_environment(name: str, options: TrialOptions) -> int:
    """Return 1 if an episode failed or could not be repeated; raises ConfigError for wrong arguments."""
    if options.episodes < 1 or options.max_turns < 1:
        raise ConfigError("--episodes and --max-turns must be at least 1")
    environment = _environment(name, options)
    row = Row(
        (Message("user", options.prompt),),
        _json(options.ground_truth, "--ground-truth"),
        _object(options.extra_info, "--extra-info"),
        "",
    )
    policies: dict[str, Callable[[int], Policy]] = {"random": RandomPolicy}
    if options.script is not None:
        lines = _lines(options.script)
        policies["scripted"] = lambda _: ScriptedPolicy(lines, options.answer_format)
    seeds = range(options.seed, options.seed + options.episodes)
    found = asyncio.run(_trials(environment, policies, seeds, row))
    again = found.pop("again")[0]
    first = next(one for one in found["random"] if one.seed == again.seed)
    is_repeatable = (again.digest, again.end) == (first.digest, first.end)
    figures = [summary(name, trials) for name, trials in found.items()]
    if options.json:
        sys.stdout.write(json.dumps({"policies": figures, "repeatable": is_repeatable}) + "\n")
    else:
        sys.stdout.write("\n".join(_text(figures, is_repeatable=is_repeatable)) + "\n")
    return int(not is_repeatable or any(one["ends"]["failed"] for one in figures))


async def _trials(
    environment: Environment, policies: dict[str, Callable[[int], Policy]], seeds: Sequence[int], row: Row
) -> dict[str, list[Trial]]:
    try:
        found = {
            name: [await play_trial(environment, policy(seed), seed, row) for seed in seeds]
            for name, policy in policies.items()
        }
        seed = next((one.seed for one in found["random"] if one.end != "failed"), seeds[0])
        found["again"] = [await play_trial(environment, policies["random"](seed), seed, row)]
        return found
    finally:
        await environment.close()


def _environment(name: str, options: TrialOptions) -> Environment:
    if options.run_file is not None:
        settings = load(RolloutSettings, files=[options.run_file]).settings
        known = load_environments(settings.worker.environments, settings.environment.define)
        if name not in known:
            raise ConfigError(
                f"{options.run_file} defines no environment {name!r}; known are {', '.join(sorted(known))}"
            )
        found = known[name]
    else:
        given = _object(options.options, "--options")
        if name.startswith(("http://", "https://")):
            kind, given = "http", {"url": name, "secret_file": options.secret_file, "options": given}
        else:
            kind = name
        definition = EnvironmentDefinition(type=kind, options=given, max_turns=options.max_turns)  # pyright: ignore[reportCallIssue]
        found = ENVIRONMENTS.find(kind).value.defined("test", definition)
    if not isinstance(found, EpisodeEnvironment):
        raise ConfigError(f"{name} is not one of several turns")
    if isinstance(found, Http):
        found.connect()
    return found


def _lines(file: Path) -> list[str]:
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"--script {file}: not readable ({err})") from None
    if not lines:
        raise ConfigError(f"--script {file}: the file has no answers")
    return lines


def _json(text: str, key: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as err:
        raise ConfigError(f"{key} is not JSON: {err}") from None


def _object(text: str, key: str) -> dict[str, Any]:
    value = _json(text, key)
    if not isinstance(value, dict):
        raise ConfigError(f"{key} must be a JSON object, got {text[:80]!r}")
    return value


def _text(figures: Sequence[dict[str, Any]], *, is_repeatable: bool) -> list[str]:
    lines = []
    for one in figures:
        ends = ", ".join(f"{count} {end}" for end, count in one["ends"].items() if count)
        lines.append(f"{one['policy']}: {one['episodes']} episodes: {ends}")
        lines += [f"  {name:<7} {_spread(one[name])}" for name in ("turns", "reward")]
        lines += [f"  {name:<7} {value:.3f}" for name, value in one["parts"].items()]
        lines += [f"  {phase:<7} {_spread(one['ms'][phase])} ms" for phase in ("start", "step", "end")]
        lines += [f"  problem: {text}" for text in one["problems"]]
    same = "the same episode" if is_repeatable else "ANOTHER EPISODE: everything random must follow from the seed"
    return [*lines, f"same seed, same answers: {same}"]


def _spread(values: dict[str, float]) -> str:
    return f"{values['mean']:.2f} (from {values['least']:.2f} to {values['most']:.2f})"
