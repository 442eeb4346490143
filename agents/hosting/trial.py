"""Play episodes of an environment without a model, and measure them: ``penstock env test``.

The policies need no model: they answer at random, or by a script.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import random
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from penstock.agents.environments.episode_environment import EpisodeEnvironment
from penstock.agents.environments.over_http.http_environment import Http
from penstock.agents.environments.play import (
    EnvironmentFailed,
    Play,
    Row,
    call,
    checked_messages,
    checked_reply,
    checked_score,
)
from penstock.agents.environments.turn_environment import PlayEnvironment
from penstock.agents.hosting.commands import TrialOptions
from penstock.agents.proxy.answer_formats.answer_format import ANSWER_FORMATS
from penstock.agents.proxy.messages import Message, ToolCall
from penstock.protocol.config.environment_settings import EnvironmentDefinition, EpisodeSettings
from penstock.protocol.config.run_file import load
from penstock.protocol.errors import ConfigError, PenstockError
from penstock.rollout_service.environments.environment import ENVIRONMENTS, Environment, load_environments
from penstock.rollout_service.settings import RolloutSettings

_WORDS = re.compile(r"\w+")
_MAX_WORDS = 200  # of the last message, from its end
_ELEMENTS = 3
End = Literal["done", "truncated", "no answer left", "failed"]


class Policy(Protocol):
    def answer(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Message | None: ...


class RandomPolicy:
    def __init__(self, seed: int) -> None:
        """The same seed gives the same answers to the same messages."""
        self._random = random.Random(seed)  # noqa: S311 - not a secret

    def answer(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Message:
        if tools and self._random.random() < 0.8:
            function = self._random.choice(list(tools))["function"]
            arguments = json.dumps(self._value(function.get("parameters") or {"type": "object"}))
            call_id = f"call_{self._random.getrandbits(48):x}"
            return Message("assistant", tool_calls=(ToolCall(call_id, function["name"], arguments),))
        words = _WORDS.findall(messages[-1].content)[-_MAX_WORDS:] or ["yes"]
        number = str(self._random.randint(0, 100))
        drawn = [self._random.choice(words), self._random.choice(words), number]
        return Message("assistant", self._random.choice(drawn))

    def _value(self, schema: Mapping[str, Any]) -> Any:
        draw = self._random
        if schema.get("enum"):
            return draw.choice(schema["enum"])
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = draw.choice(kind)
        match kind:
            case "object":
                return {name: self._value(subschema) for name, subschema in schema.get("properties", {}).items()}
            case "array":
                return [self._value(schema.get("items") or {}) for _ in range(draw.randint(1, _ELEMENTS))]
            case "integer":
                return draw.randint(int(schema.get("minimum", 0)), int(schema.get("maximum", 100)))
            case "number":
                return round(draw.uniform(schema.get("minimum", 0.0), schema.get("maximum", 100.0)), 2)
            case "boolean":
                return draw.random() < 0.5
            case "null":
                return None
        return draw.choice(["a", "1", "1 + 1"])


class ScriptedPolicy:
    def __init__(self, lines: Sequence[str], answer_format: str) -> None:
        self._lines, self._format = iter(lines), ANSWER_FORMATS.find(answer_format).value
        self._calls = 0

    def answer(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Message | None:
        line = next(self._lines, None)
        if line is None:
            return None
        parsed = self._format.parsed(line, tools)
        self._calls += 1
        ids = (f"call_{self._calls}_{number}" for number in range(len(parsed.calls)))
        calls = [ToolCall(one, call.name, call.arguments) for one, call in zip(ids, parsed.calls, strict=True)]
        return Message("assistant", parsed.content, tool_calls=tuple(calls))


@dataclass(slots=True)
class Trial:
    seed: int
    end: End = "failed"
    problem: str = ""
    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    start_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)  # one for each turn
    end_s: float = 0.0
    digest: str = ""  # of all that was said, and of the rewards


async def play_trial(environment: Environment, policy: Policy, seed: int, row: Row) -> Trial:
    """Play one episode; a failure of the environment is in the trial. Raises ConfigError for one that needs a model."""
    if not isinstance(environment, PlayEnvironment):
        raise ConfigError(f"{environment.name} cannot be tried without a model: it makes no plays")
    trial, settings = Trial(seed), environment.settings
    executor = ThreadPoolExecutor(1, thread_name_prefix="trial")
    play: Play | None = None
    try:
        began = time.perf_counter()
        try:
            play = await environment.begin_play(f"trial.{seed}", 0, seed, row)
        except PenstockError:
            raise
        except Exception as err:
            raise EnvironmentFailed(f"play(): {type(err).__name__}: {err}") from err
        messages = await call(play.start, settings.reply_deadline_s, executor)
        trial.start_s = time.perf_counter() - began
        await _turns(trial, play, policy, checked_messages(messages, is_first=True), settings, executor)
    except (EnvironmentFailed, PenstockError) as err:
        trial.end, trial.problem = "failed", str(err)
    finally:
        began = time.perf_counter()
        if play is not None:
            try:
                await call(play.close, settings.reply_deadline_s, executor)
            except EnvironmentFailed as err:
                trial.problem = trial.problem or f"closing: {err}"
        trial.end_s = time.perf_counter() - began
        executor.shutdown(wait=False)
    return trial


async def _turns(
    trial: Trial, play: Play, policy: Policy, messages: tuple[Message, ...], settings: EpisodeSettings,
    executor: ThreadPoolExecutor,
) -> None:  # fmt: skip
    said = hashlib.sha256(repr(messages).encode("utf-8", "surrogatepass"))
    trial.end = "truncated"
    for _ in range(settings.max_turns):
        answer = policy.answer(messages, play.tools)
        if answer is None:
            trial.end = "no answer left"
            break
        began = time.perf_counter()
        reply = checked_reply(await call(functools.partial(play.step, answer), settings.reply_deadline_s, executor))
        trial.steps_s.append(time.perf_counter() - began)
        said.update(repr((reply.messages, reply.reward, reply.is_done)).encode("utf-8", "surrogatepass"))
        trial.reward += reply.reward
        for name, value in reply.parts.items():
            trial.parts[name] = trial.parts.get(name, 0.0) + value
        if reply.is_done:
            trial.end = "truncated" if reply.is_truncated else "done"
            break
        messages = checked_messages(reply.messages, is_first=False)
    else:
        score = checked_score(await call(play.score, settings.reply_deadline_s, executor))
        said.update(repr(score).encode())
        trial.reward += score
    trial.digest = said.hexdigest()


def summary(policy: str, trials: Sequence[Trial]) -> dict[str, Any]:
    played = [trial for trial in trials if trial.end != "failed"]
    steps = [seconds for trial in trials for seconds in trial.steps_s]
    names = sorted({name for episode in played for name in episode.parts})
    return {
        "policy": policy,
        "episodes": len(trials),
        "ends": {end: sum(trial.end == end for trial in trials) for end in get_args(End)},
        "turns": _spread([len(episode.steps_s) for episode in played]),
        "reward": _spread([episode.reward for episode in played]),
        "parts": {name: _mean([episode.parts.get(name, 0.0) for episode in played]) for name in names},
        "ms": {
            "start": _spread([1000 * episode.start_s for episode in played]),
            "step": _spread([1000 * step for step in steps]),
            "end": _spread([1000 * episode.end_s for episode in played]),
        },
        "problems": list(dict.fromkeys(trial.problem for trial in trials if trial.problem))[:10],
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": _mean(values), "least": min(values, default=0.0), "most": max(values, default=0.0)}


def try_environment(name: str, options: TrialOptions) -> int:
    """Return 1 if an episode failed or could not be repeated; raises ConfigError for wrong arguments."""
    if options.episodes < 1 or options.max_turns < 1:
        raise ConfigError("--episodes and --max-turns must be at least 1")
    environment = _environment(name, options)
    truth, extra_info = _json(options.ground_truth, "--ground-truth"), _object(options.extra_info, "--extra-info")
    row = Row((Message("user", options.prompt),), truth, extra_info, "")
    policies: dict[str, Callable[[int], Policy]] = {"random": RandomPolicy}
    if options.script is not None:
        lines = _lines(options.script)
        policies["scripted"] = lambda _: ScriptedPolicy(lines, options.answer_format)
    seeds = range(options.seed, options.seed + options.episodes)
    trials_by_policy = asyncio.run(_trials(environment, policies, seeds, row))
    again = trials_by_policy.pop("again")[0]
    first = next(trial for trial in trials_by_policy["random"] if trial.seed == again.seed)
    is_repeatable = (again.digest, again.end) == (first.digest, first.end)
    figures = [summary(name, trials) for name, trials in trials_by_policy.items()]
    if options.json:
        sys.stdout.write(json.dumps({"policies": figures, "repeatable": is_repeatable}) + "\n")
    else:
        sys.stdout.write("\n".join(_text(figures, is_repeatable=is_repeatable)) + "\n")
    return int(not is_repeatable or any(figure["ends"]["failed"] for figure in figures))


async def _trials(
    environment: Environment, policies: dict[str, Callable[[int], Policy]], seeds: Sequence[int], row: Row
) -> dict[str, list[Trial]]:
    try:
        trials_by_policy = {
            name: [await play_trial(environment, policy(seed), seed, row) for seed in seeds]
            for name, policy in policies.items()
        }
        seed = next((trial.seed for trial in trials_by_policy["random"] if trial.end != "failed"), seeds[0])
        trials_by_policy["again"] = [await play_trial(environment, policies["random"](seed), seed, row)]
        return trials_by_policy
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
        environment = known[name]
    else:
        env_options = _object(options.options, "--options")
        if name.startswith(("http://", "https://")):
            kind, env_options = "http", {"url": name, "secret_file": options.secret_file, "options": env_options}
        else:
            kind = name
        definition = EnvironmentDefinition(type=kind, options=env_options, max_turns=options.max_turns)  # pyright: ignore[reportCallIssue]
        environment = ENVIRONMENTS.find(kind).value.defined("test", definition)
    if not isinstance(environment, EpisodeEnvironment):
        raise ConfigError(f"{name} is not one of several turns")
    if isinstance(environment, Http):
        environment.connect()
    return environment


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
    for figure in figures:
        ends = ", ".join(f"{count} {end}" for end, count in figure["ends"].items() if count)
        lines.append(f"{figure['policy']}: {figure['episodes']} episodes: {ends}")
        lines += [f"  {name:<7} {_spread_text(figure[name])}" for name in ("turns", "reward")]
        lines += [f"  {name:<7} {value:.3f}" for name, value in figure["parts"].items()]
        lines += [f"  {phase:<7} {_spread_text(figure['ms'][phase])} ms" for phase in ("start", "step", "end")]
        lines += [f"  problem: {text}" for text in figure["problems"]]
    same = "the same episode" if is_repeatable else "ANOTHER EPISODE: everything random must follow from the seed"
    return [*lines, f"same seed, same answers: {same}"]


def _spread_text(values: dict[str, float]) -> str:
    return f"{values['mean']:.2f} (from {values['least']:.2f} to {values['most']:.2f})"
