"""Run one episode of verifiers against the URL in ``OPENAI_BASE_URL``, and write its reward to ``PENSTOCK_RESULT``.

Run as ``python verifiers_runner.py CONFIG``, where CONFIG is block ``[env]`` of verifiers 0.4 as JSON. A separate program with an interpreter that
has verifiers: it imports nothing of Penstock. Ends with 1, and so without a reward, if the episode has an error.
"""

import asyncio
import importlib
import itertools
import json
import os
import pathlib
import sys
from typing import Any


async def play(config: dict[str, Any], task: dict[str, Any]) -> Any:
    library = importlib.import_module("verifiers.v1")
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    sampling = importlib.import_module("verifiers.v1.types").SamplingConfig()
    environment = loaders.load_environment(loaders.resolve_env_config(config))
    client = library.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    model = library.ModelContext(client=client, model="policy", sampling=sampling)
    async with environment.serving():
        return await environment.run_episode(chosen(environment.taskset, task), model)


def chosen(taskset: Any, task: dict[str, Any]) -> Any:
    """Return the task that a row names with ``extra_info.task``; without it, the one that the seed chooses. Raises LookupError."""
    number = task["extra_info"].get("task")
    if number is None and not taskset.bounded:
        raise LookupError("the taskset has no end: name the task of each row in extra_info.task")
    if number is None:
        tasks = list(taskset)
        number = task["seed"] % max(len(tasks), 1)
    elif type(number) is int and number >= 0:
        tasks = list(itertools.islice(taskset, number + 1))
    else:
        raise LookupError(f"extra_info.task is {number!r}, expected a whole number from 0 on")
    if number >= len(tasks):
        raise LookupError(f"task {number} is not among the {len(tasks)} of the taskset")
    return tasks[number]


def result_of(episode: Any) -> dict[str, Any]:
    parts: dict[str, float] = {}
    for trace in episode.traces:
        named = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        for name, value in {**named, **trace.metrics}.items():
            if isinstance(value, (int, float)):
                parts[name] = parts.get(name, 0.0) + float(value) / len(episode.traces)
    rewards = [float(trace.reward) for trace in episode.traces]
    return {"reward": sum(rewards) / len(rewards), "parts": parts}


def main() -> None:
    task = json.loads(pathlib.Path(os.environ["PENSTOCK_TASK"]).read_text())
    episode = asyncio.run(play(json.loads(sys.argv[1]), task))
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors or not episode.traces:
        sys.exit("\n".join(f"{failure.type}: {failure.message}" for failure in errors) or "verifiers ran no agent")
    pathlib.Path(os.environ["PENSTOCK_RESULT"]).write_text(json.dumps(result_of(episode)))


if __name__ == "__main__":
    main()
