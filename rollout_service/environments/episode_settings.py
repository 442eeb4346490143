"""`[environment.define.NAME]`: environments of several turns with options and limits of their own."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from penstock.protocol.config.connection import Section
from penstock.protocol.facts import Identifier
from penstock.rollout_service.proxy.plan_prompt import Thinking


class EpisodeSettings(Section):
    """The limits of an environment's episodes."""

    max_turns: int = Field(16, ge=1, le=65_536, description="Answers of one episode; then it ends as truncated.")
    max_running: int = Field(
        256, ge=1, description="Episodes that a worker plays at once; the others wait, and hold no place in the engine."
    )
    reply_deadline_s: float = Field(
        60.0, gt=0, description="Seconds that the environment may take for one reply; then the episode is begun again."
    )
    episode_deadline_s: float = Field(
        900.0,
        gt=0,
        description="Seconds of one episode. If the policy took most of them, it ends as it is; if the environment did, it is "
        "begun again.",
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
        description="How the model writes calls of tools: hermes, llama, mistral, deepseek, kimi_k2, plain (none), or one of your own.",
    )


class EnvironmentDefinition(EpisodeSettings):
    """An environment of the run file."""

    type: str = Field(
        description="The environment that is defined: a built-in, installed or your own one of several turns."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Options of that type (`penstock env list`).")


class EnvironmentSettings(Section):
    """Environments by name."""

    define: dict[Identifier, EnvironmentDefinition] = Field(
        default_factory=dict,
        description="Environments of this run, by the name that rollout.environment and eval.environment use.",
    )
