"""A worker process of a user's reward: ``python -m penstock.reward_service.user_code.worker NAME PARAMETERS PARENT``.

NAME is ``module:attribute`` or ``file.py:attribute``, PARAMETERS a JSON object, PARENT the process id of the service.
Stdin and stdout have one JSON text a line:

    ← {"digest": "0123456789abcdef"}          loaded; or {"refused": "..."} and exit code 1
    → {"group_id": "g", "completions": [...], ...}       a `GroupToScore`
    ← {"scores": [{"score": 1.0, "parts": {}}, ...]}     or {"bad_ground_truth": "..."}

User code sees neither pipe: what it prints goes to stderr, and its stdin is empty. It runs with the rights of the
service, without the environment variables ``PENSTOCK_*``, and ends with the service.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.extensions import Registry
from penstock.protocol.parent_death import end_with_parent
from penstock.reward_service.endpoints.wire import GroupToScore, Score
from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.rewards.reward import PureReward, Reward, Verdict
from penstock.reward_service.user_code import user_file
from penstock.reward_service.user_code.user_function import UserReward


@dataclass(frozen=True, slots=True)
class JudgeReward:
    judge: Callable[[tuple[str, ...], Any], list[Verdict]]

    async def score(self, group: GroupToScore) -> list[Score]:
        """Call the reward's `judge`; what it raises, BadGroundTruth aside, is the error of every score."""
        try:
            verdicts = self.judge(tuple(group.completions), group.ground_truth)
            return [Score(score=verdict.reward, parts=dict(verdict.parts)) for verdict in verdicts]
        except BadGroundTruth:
            raise
        except Exception as err:  # noqa: BLE001 the user's code may raise anything; it becomes the score's error
            return [Score(error=f"{type(err).__name__}: {err}"[:1000])] * len(group.completions)


def load(name: str, parameters: dict[str, Any]) -> tuple[UserReward | JudgeReward, str]:
    registry = Registry("reward", object, package="penstock.reward_service.rewards", group="penstock.rewards")
    loaded = registry.find(name)
    kind = type(loaded.value).__name__
    if isinstance(loaded.value, Reward):
        if not isinstance(loaded.value, PureReward):
            raise ConfigError(f"reward {name!r}: a reward of your own is a PureReward, got {kind}")
        try:
            validated = loaded.value.parameters.model_validate_json(json.dumps(parameters), strict=True)
        except ValidationError as err:
            first = err.errors()[0]
            where = ".".join(["parameters", *map(str, first["loc"])])
            raise ConfigError(f"reward {name!r}: {where}: {first['msg']}") from None
        return JudgeReward(loaded.value.bind(validated)), loaded.digest
    if not callable(loaded.value):
        raise ConfigError(f"reward {name!r}: expected a function, a callable object or a PureReward, got {kind}")
    attribute, file = name.rpartition(":")[2], _file_of(loaded.value)
    return user_file.of(loaded.value, attribute, file, arguments=parameters), loaded.digest


def _file_of(value: Any) -> Path:
    home: Any = value if inspect.isroutine(value) or inspect.isclass(value) else type(value)
    try:
        return Path(inspect.getfile(inspect.unwrap(home))).resolve()
    except TypeError:
        return Path(str(home))


async def _serve(name: str, parameters: dict[str, Any], incoming: BinaryIO, outgoing: BinaryIO) -> int:
    def reply(message: dict[str, Any]) -> None:
        outgoing.write(json.dumps(message).encode() + b"\n")
        outgoing.flush()

    try:
        reward, digest = load(name, parameters)
        if isinstance(reward, UserReward):
            await reward.open()
    except PenstockError as err:
        reply({"refused": str(err)})
        return 1
    reply({"digest": digest})
    while line := await asyncio.to_thread(incoming.readline):
        try:
            scores = await reward.score(GroupToScore.model_validate_json(line))
            reply({"scores": [score.model_dump() for score in scores]})
        except BadGroundTruth as err:
            reply({"bad_ground_truth": str(err)})
    if isinstance(reward, UserReward):
        await reward.close()
    return 0


def main(arguments: Sequence[str]) -> int:
    name, parameters, parent = arguments
    if not end_with_parent(int(parent)):
        sys.exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which then closes stdin
    with os.fdopen(os.dup(0), "rb") as incoming, os.fdopen(os.dup(1), "wb") as outgoing:
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.dup2(2, 1)
        sys.path.append(str(Path.cwd()))  # user code may import its neighbours, after everything that is installed
        return asyncio.run(_serve(name, json.loads(parameters), incoming, outgoing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
