"""Groups of environments, played with an engine that answers with texts; and an environment that does what a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tests.agents.proxy.agent_model import Engine

from penstock.agents.environments.play import Play, Reply, Row
from penstock.agents.environments.turn_environment import TurnEnvironment
from penstock.agents.proxy.messages import Message
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.environment_settings import EnvironmentDefinition
from penstock.protocol.episode import Episode
from penstock.protocol.groups import RewardRequest, Sampling, Task
from penstock.rollout_service.environments.environment import Environment


def task_of(
    text: str = "get 37", *, size: int = 1, reward: str = "environment", group: str = "r:0:1", **more: Any
) -> Task:
    return Task(
        group_id=group, prompt_ids=(1,), prompt_text=text, group_size=size, sampling=Sampling(max_new_tokens=256),
        reward=RewardRequest(name=reward, **more), split="train", environment="mine", issued_version=3,
        messages=json.dumps([{"role": "user", "content": text}]),
    )  # fmt: skip


def engine_of(model: Path, script: Sequence[str] = (), kind: type[Engine] = Engine, **more: Any) -> Engine:
    return kind(ChatTokenizer.read(model), script=[f"{text}<|im_end|>" for text in script], **more)


async def rolled(environment: Environment, engine: Engine, task: Task | None = None) -> Any:
    """Play one task, close the environment, and return what became of the group."""
    try:
        (group,) = await environment.rollout([task or task_of()], engine)
    finally:
        await environment.close()
    return group


def playing(model: Path, environment: Environment, **settings: Any) -> Any:
    """Return an environment as a run file defines it."""
    mine = environment.defined("mine", EnvironmentDefinition(type=environment.name, **settings))
    mine.use_model(model, 8192)
    return mine


def play(
    model: Path, environment: Environment, script: Sequence[str], task: Task | None = None, engine: Engine | None = None,
    **settings: Any,
) -> tuple[Any, Engine]:  # fmt: skip
    """Define an environment and play one task; return what became of the group, and the engine."""
    engine = engine or engine_of(model, script)

    async def run() -> Any:
        return await rolled(playing(model, environment, **settings), engine, task)

    return asyncio.run(run()), engine


def said(episode: Episode) -> list[tuple[str, str]]:
    return [(load["role"], load.get("content") or "") for load in json.loads(episode.messages)]


def results(episode: Episode) -> list[str]:
    return [content for role, content in said(episode) if role == "tool"]


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def check_exact(episode: Episode, engine: Engine, model: Path, script: Sequence[str]) -> None:
    """Assert that an episode is one row whose trained tokens are those that were sampled, under the tokens that the engine was given."""
    (row,) = episode.rows
    tokens, tokenizer = row.trajectory, ChatTokenizer.read(model)
    assert len(row.turns) == len(engine.prompts) == len(script)
    for turn, prompt, text in zip(row.turns, engine.prompts, script, strict=True):
        assert tokens.token_ids[: turn.start].tolist() == prompt
        assert tokens.token_ids[turn.start : turn.end].tolist() == tokenizer.encode(f"{text}<|im_end|>")
    assert np.count_nonzero(tokens.loss_mask) == sum(turn.end - turn.start for turn in row.turns)


class Script(TurnEnvironment):
    """Counts its plays; each step does what it is told, and so does the score of an episode that the run ends."""

    name = "script"

    def __init__(
        self,
        *steps: Callable[[], Any],
        start: Callable[[], Any] | None = None,
        score: Callable[[], float] | None = None,
    ) -> None:
        super().__init__()
        self.steps, self.first, self.score = steps, start, score
        self.seeds: list[int] = []
        self.closed: list[int] = []
        self.asked = 0  # for a score

    def play(self, seed: int, row: Row, options: Any) -> Play:
        self.seeds.append(seed)
        return ScriptPlay(self, row) if self.score is None else ScoredPlay(self, row)


class ScriptPlay(Play):
    def __init__(self, owner: Script, row: Row) -> None:
        self.owner, self.row, self.at = owner, row, 0

    def start(self) -> Any:
        return self.row.messages if self.owner.first is None else self.owner.first()

    def step(self, answer: Message) -> Any:
        self.at += 1
        return self.owner.steps[min(self.at, len(self.owner.steps)) - 1]()

    def close(self) -> None:
        self.owner.closed.append(self.at)


class ScoredPlay(ScriptPlay):
    def score(self) -> float:
        self.owner.asked += 1
        assert self.owner.score is not None
        return self.owner.score()


def once(failing: Callable[[], Any], after: Reply) -> Callable[[], Any]:
    """Return a step that fails the first time it is called."""
    calls: list[int] = []

    def step() -> Any:
        calls.append(1)
        return failing() if len(calls) == 1 else after

    return step
