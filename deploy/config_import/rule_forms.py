"""The forms of rules: how a key becomes settings that mean the same with other values, or with other keys; pure.

A rule receives the value and the whole file. `protocol/config/foreign_keys.json` says which key has which: the name of
a function of `rules`, or a list of the name of a form and its arguments. Together the outcomes of the rules are a
`Translation`: settings, and one line of the report for each key of the file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from penstock.protocol.config.sources import scalar
from penstock.trainer.optimizer_settings import OptimizerSettings

Kind = Literal["taken", "translated", "ignored", "decide", "unknown", "silent"]
TABLES: dict[str, Any] = json.loads(Path(__file__).with_name("tables.json").read_text(encoding="utf-8"))
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
OFF = "off, as without it"
READ = "read together with"
DIVIDED = "engines and trainer divide the GPUs that `penstock train --local` sees, or as [placement] says"
READS_IMAGES = re.compile(r"(?<![a-z])VL(?![a-z])|[-_]?omni|llava", re.IGNORECASE)  # in the name of a model
MICRO_BATCH: int = OptimizerSettings.model_fields["micro_batch_tokens"].default
_REWARD_FILE = "custom_reward_function.path"  # of verl
Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    kind: Kind
    key: str
    value: Any
    text: str

    @property
    def is_open(self) -> bool:
        return self.kind in ("decide", "unknown")


@dataclass(frozen=True, slots=True)
class Outcome:
    kind: Kind
    settings: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""


@dataclass(slots=True)
class Translation:
    system: str
    settings: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    remarks: dict[str, str] = field(default_factory=dict)
    """What the run file says beside a setting: whose default it is."""

    @property
    def needs_decision(self) -> bool:
        return any(line.is_open for line in self.lines)


def translated(settings: Mapping[str, Any], text: str = "") -> Outcome:
    return Outcome("translated", settings, text)


def set_to(text: str = "", /, **settings: Any) -> Outcome:
    return translated({key.replace("__", "."): value for key, value in settings.items()}, text)


def ignored(text: str) -> Outcome:
    return Outcome("ignored", text=text)


def decide(text: str) -> Outcome:
    return Outcome("decide", text=text)


Rule = Callable[[Any, Values], Outcome]


def first(values: Values, *keys: str, default: Any = None) -> Any:
    return next((values[key] for key in keys if values.get(key) is not None), default)


def is_on(value: Any) -> bool:
    return value is True or str(value).lower() in ("true", "1", "yes", "on")


def is_given(value: Any) -> bool:
    return value not in (None, {}, "")


def if_on(setting: str, value: Any, off: str = OFF) -> Rule:
    return lambda given, values: translated({setting: value}) if is_on(given) else ignored(off)


def chosen(setting: str, ours: Mapping[str, Any], otherwise: str) -> Rule:
    """Return a rule for a key whose values, as texts in lower case, each mean one value of a setting."""
    return lambda given, values: (
        translated({setting: ours[str(given).lower()]}) if str(given).lower() in ours else decide(otherwise)
    )


def as_rule(setting: str, text: str = "") -> Rule:
    return lambda given, values: translated({setting: given}, text)


def only(harmless: Sequence[Any], text: str) -> Rule:
    """Return a rule for a key whose other values cannot be had."""
    return lambda given, values: ignored(OFF) if given in harmless else decide(text)


def cases(*rows: tuple[Mapping[str, Sequence[str]], Mapping[str, Any] | str | None, str]) -> Rule:
    """Return a rule of rows, of which the first counts whose conditions hold.

    A row has its conditions, its settings (``"ask"``, alone or among them: a decision; None: no effect) and its text. A condition has the
    values of a key, this one written ``""``, as texts in lower case: ``"none"`` if it is missing, ``"*"`` for any. The
    value of a setting may be ``"="``, this key's, or ``"=KEY|DEFAULT"``, that of another one.
    """

    def rule(given: Any, values: Values) -> Outcome:
        def of(key: str) -> Any:
            return values.get(key) if key else given

        def value(ours: Any) -> Any:
            key, _, default = ours[1:].partition("|") if isinstance(ours, str) and ours[:1] == "=" else ("", "", "")
            found = of(key) if isinstance(ours, str) and ours[:1] == "=" else ours
            return scalar(default) if found is None and default else found

        def holds(key: str, theirs: Sequence[str]) -> bool:
            return str(of(key)).lower() in theirs or ("*" in theirs and of(key) is not None)

        for conditions, settings, text in rows:
            if all(holds(key, theirs) for key, theirs in conditions.items()):
                if not isinstance(settings, Mapping):
                    return decide(text.replace("{}", str(given))) if settings else ignored(text)
                written = {setting: value(ours) for setting, ours in settings.items() if setting != "ask"}
                return Outcome("decide" if "ask" in settings else "translated", written, text)
        return ignored(OFF)

    return rule


def engine(theirs: str) -> str:
    named = str(theirs).lower()
    return "sglang" if "sglang" in named else "vllm" if "vllm" in named else "embedded"


def engine_option(sglang: str, vllm: str) -> Rule:
    def rule(value: Any, values: Values) -> Outcome:
        chosen = engine(first(values, f"{ROLLOUT}.name", "actor_infer.strategy_args.strategy_name") or "vllm")
        if chosen == "embedded":
            return ignored("an option of another engine than worker.engine")
        return translated({"worker.engine": chosen, sglang if chosen == "sglang" else vllm: value})

    return rule


def with_engine(engine: str, setting: str) -> Rule:
    """Return a rule for an option of one engine, which it turns on, unless the file turns that engine off."""
    return lambda given, values: (
        translated({"worker.engine": engine, setting: given})
        if is_on(values.get(f"use_{engine}", True))
        else ignored(f"use_{engine} is off")
    )


def positive(setting: str, off: str = OFF) -> Rule:
    """Return a rule for a number that only counts above 0: verl's -1 and null mean unset."""
    return lambda given, values: (
        translated({setting: given}) if isinstance(given, (int, float)) and given > 0 else ignored(off)
    )


def share_of_steps(setting: str) -> Rule:
    def rule(value: Any, values: Values) -> Outcome:
        steps = first(values, "trainer.total_training_steps", "max_steps", "num_rollout")
        if not value:
            return ignored(OFF)
        if not isinstance(steps, int) or steps <= 0:
            return decide(f"{setting} is in steps: {value} x trainer.steps")
        return translated({setting: math.ceil(value * steps)}, f"{value} of {steps} steps")

    return rule


def steps_or_share(setting: str) -> Rule:
    """Return a rule for a number of steps that, below 1, is a share of all of them."""
    share = share_of_steps(setting)
    return lambda given, values: (
        share(given, values)
        if isinstance(given, float) and 0 < given < 1
        else translated({setting: int(given)})
        if isinstance(given, (int, float)) and given >= 0
        else ignored(OFF)
    )


def same_as(other: str, text: str) -> Rule:
    """Return a rule for a key that is a question only where it differs from another one."""
    return lambda given, values: ignored(f"as {other}") if values.get(other) == given else decide(text)


def batch_rule(prompts: str, rows: str, default: int | None = None) -> Rule:
    """Return a rule for prompts that are generated together, and trained on in optimizer steps of ``rows``."""

    def rule(value: Any, values: Values) -> Outcome:
        size, per_prompt = values.get(rows, default), 1
        if rows in ("train_batch_size", "global_batch_size"):  # counts completions
            per_prompt = first(values, "n_samples_per_prompt", default=1)
        groups = size // per_prompt if isinstance(size, int) and isinstance(per_prompt, int) and per_prompt else None
        if not isinstance(value, int) or not groups or groups >= value:
            return translated({"rollout.groups_per_step": value})
        return set_to(
            f"{value} prompts in optimizer steps of {groups}",
            rollout__groups_per_step=value,
            algorithm__minibatches=math.ceil(value / groups),
        )

    return rule


def path_in(column: str, default: str, setting: str) -> Rule:
    """Return a rule for the keys that lead to a text inside of the column that ``column`` names."""
    return lambda given, values: translated(
        {
            setting: ".".join(
                [first(values, column, default=default), *map(str, given if isinstance(given, list) else [given])]
            )
        }
    )


def ignore(text: str) -> Rule:
    return lambda given, values: ignored(text)


def ask(text: str) -> Rule:
    """Return a rule for a key that a person decides on; ``{}`` in the text stands for its value."""
    return lambda given, values: decide(text.format(given))


def reward_argument(key: str) -> Rule:
    """Return a rule for an argument of the reward function: its file's rule gives it, where it is named by file."""
    text = f"the function was called with {key}=VALUE: `parameters.{key}` of a part in reward.define (docs/rewards.md)"
    return lambda given, values: (
        ignored("not set")
        if not is_given(given)
        else ignored(f"{READ} {_REWARD_FILE}")
        if values.get(_REWARD_FILE)
        else decide(text)
    )
