"""One group of an environment, played with an engine that answers with texts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tests.agents.proxy.agent_model import Engine

from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.environment_settings import EnvironmentDefinition
from penstock.protocol.episode import Episode
from penstock.protocol.groups import RewardRequest, Sampling, Task
from penstock.rollout_service.environments.environment import Environment


def task_of(text: str = "go", *, size: int = 1, reward: str = "environment", group: str = "r:0:1", **more: Any) -> Task:
    return Task(
        group_id=group, prompt_ids=(1,), prompt_text=text, group_size=size, sampling=Sampling(max_new_tokens=256),
        reward=RewardRequest(name=reward, **more), split="train", environment="mine", issued_version=3,
        messages=json.dumps([{"role": "user", "content": text}]),
    )  # fmt: skip


def play(
    model: Path, environment: Environment, script: Sequence[str], task: Task | None = None, **settings: Any
) -> tuple[Any, Engine]:
    engine = Engine(ChatTokenizer.read(model), script=[f"{text}<|im_end|>" for text in script])

    async def run() -> Any:
        mine = environment.defined("mine", EnvironmentDefinition(type=environment.name, **settings))
        mine.use_model(model, 8192)
        try:
            (found,) = await mine.rollout([task or task_of()], engine)
        finally:
            await mine.close()
        return found

    return asyncio.run(run()), engine


def said(episode: Episode) -> list[tuple[str, str]]:
    return [(load["role"], load.get("content") or "") for load in json.loads(episode.messages)]


def check_exact(episode: Episode, engine: Engine, model: Path, script: Sequence[str]) -> None:
    """Assert that an episode is one row whose trained tokens are those that were sampled, under the tokens that the engine was given."""
    (row,) = episode.rows
    tokens, tokenizer = row.trajectory, ChatTokenizer.read(model)
    assert len(row.turns) == len(engine.prompts) == len(script)
    for turn, prompt, text in zip(row.turns, engine.prompts, script, strict=True):
        assert tokens.token_ids[: turn.start].tolist() == prompt
        assert tokens.token_ids[turn.start : turn.end].tolist() == tokenizer.encode(f"{text}<|im_end|>")
    assert np.count_nonzero(tokens.loss_mask) == sum(turn.end - turn.start for turn in row.turns)
