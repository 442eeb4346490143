"""`[environment.define.NAME]`: environments of several turns with separate options and limits, and how a run mixes them.

Workers read how an environment is played, the trainer which environments it issues groups for, and in which proportions.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from penstock.protocol.config.connection import Section
from penstock.protocol.groups import Identifier

Thinking = Literal["keep", "tool_cycle", "strip"]

MIXTURE = "mixture"  # in place of an environment's name: all that are defined with a weight or data sources


class RequestRules(Section):
    """What is made of the requests of agents."""

    trained_conversations: Literal["all", "main"] = Field(
        "all",
        description="What is trained of a program's requests: all of its conversations, or the main one alone, without side requests (titles, "
        "summaries) and sub-agents.",
    )
    stripped_lines: tuple[str, ...] = Field(
        (r"x-anthropic-[a-z-]+:.*",),
        max_length=32,
        description="Regular expressions of whole lines that are left out of system messages, because they differ in every request: each would "
        "begin a row of its own. The default is the attribution header of Claude Code.",
    )
    unknown_tools: Literal["refuse", "drop"] = Field(
        "refuse",
        description="A tool or item of a kind that only a vendor's server has: the request is refused, or the kind is left out and counted.",
    )
    forced_choice: Literal["refuse", "auto"] = Field(
        "refuse",
        description="tool_choice that forces a call, response_format and other constraints of decoding: the request is refused, or they are "
        "ignored and counted.",
    )

    @field_validator("stripped_lines")
    @classmethod
    def _are_patterns(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as err:
                raise ValueError(f"{pattern!r} is no regular expression: {err}") from None
        return patterns


class EpisodeSettings(RequestRules):
    max_turns: int = Field(16, ge=1, le=65_536, description="Answers of one episode; then it ends as truncated.")
    max_running: int = Field(
        256, ge=1, description="Episodes that a worker plays at once; the others wait, and hold no place in the engine."
    )
    reply_deadline_s: float = Field(
        60.0, gt=0, description="Seconds that the environment may take for one reply; then the episode is restarted."
    )
    episode_deadline_s: float = Field(
        900.0,
        gt=0,
        description="Seconds of one episode. If the policy took most of them, it ends as it is; if the environment did, it is "
        "restarted.",
    )
    attempts: int = Field(
        3,
        ge=1,
        le=100,
        description="How often an episode is begun, with the same seed, before its group is dead-lettered as environment_failed. A "
        "failure is never a reward.",
    )
    keep_after_s: float = Field(
        10.0,
        ge=0,
        description="Episodes that took at least so many seconds are stored as soon as they have ended: if the worker is killed before their "
        "pack is complete, the next one does not play them again.",
    )
    kept_staleness: int = Field(
        1,
        ge=0,
        description="Most versions by which such an episode may be behind when the next worker begins; older ones are played again. "
        "rollout.max_staleness is the most that is trained.",
    )
    thinking: Thinking = Field(
        "keep",
        description="What the policy sees of its earlier reasoning: keep all of it, tool_cycle until the next user message, strip it.",
    )
    answer_format: str = Field(
        "hermes",
        description="How the model writes calls of tools: hermes, qwen_xml, glm, minimax, harmony, llama, mistral, deepseek, kimi_k2, granite, phi, gemma, seed_oss, nemotron, internlm, hunyuan, plain (none), or one of your own.",
    )
    max_answer_tokens: int | None = Field(
        None, ge=1, description="Longest answer, in tokens, where that is less than rollout.max_new_tokens."
    )
    system_prompt: str = Field(
        "",
        max_length=100_000,
        description="Said to the policy before the environment's first message, as a system message or at the beginning of its own. Not "
        "for programs, which write their own messages.",
    )


class EnvironmentDefinition(EpisodeSettings):
    """An environment of the run file."""

    type: str = Field(
        description="The environment that is defined: a built-in, installed or your own one of several turns."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Options of that type (`penstock env list`).")
    weight: int | None = Field(
        None,
        ge=1,
        le=1000,
        description='With rollout.environment = "mixture": its share of the groups is its weight in the sum of all weights, exact in '
        "every run of so many rows.",
    )
    data_sources: tuple[str, ...] = Field(
        (), description='With rollout.environment = "mixture": rows with one of these data_source are all played in it.'
    )


class EnvironmentSettings(Section):
    """Environments by name."""

    define: dict[Identifier, EnvironmentDefinition] = Field(
        default_factory=dict,
        description="Environments of this run, by the name that rollout.environment and eval.environment use.",
    )

    @model_validator(mode="after")
    def _can_be_mixed(self) -> EnvironmentSettings:
        if MIXTURE in self.define:
            raise ValueError(
                f"environment.define.{MIXTURE}: the name stands for all that have a weight; choose another"
            )
        owners: dict[str, str] = {}
        for name, definition in self.define.items():
            if definition.weight is not None and definition.data_sources:
                raise ValueError(f"environment.define.{name}: give a weight or data_sources, not both")
            for source in definition.data_sources:
                if owners.setdefault(source, name) != name:
                    raise ValueError(
                        f"environment.define.{name}.data_sources: {source!r} is among those of {owners[source]} too"
                    )
        return self

    @property
    def weights(self) -> dict[str, int]:
        return {name: definition.weight for name, definition in self.define.items() if definition.weight is not None}

    @property
    def by_source(self) -> dict[str, str]:
        return {source: name for name, definition in self.define.items() for source in definition.data_sources}
