"""``serve-grader GRADER.json``: a grader in OpenAI's form, evaluated here, as a reward endpoint."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock.protocol.errors import ConfigError
from penstock.reward_service.endpoints.dialects.openai_grader import item_of
from penstock.reward_service.endpoints.wire import GroupToScore, Score
from penstock.reward_service.hosting import served_reward
from penstock.reward_service.hosting.judge.chat_client import Chat
from penstock.reward_service.hosting.judge.settings import JudgeSettings
from penstock.reward_service.hosting.openai_graders import grader as graders
from penstock.reward_service.hosting.openai_graders.evaluate_grader import evaluate
from penstock.reward_service.hosting.openai_graders.grader import Grader, Multi, ScoreModel

_TEACHES = """\
The file is a grader as OpenAI's guide describes it: string_check, text_similarity, score_model, or multi of these:

  {"type": "multi",
   "graders": {
     "exact": {"type": "string_check", "operation": "eq", "name": "exact",
               "input": "{{sample.output_text}}", "reference": "{{item.reference_answer}}"},
     "near": {"type": "text_similarity", "evaluation_metric": "fuzzy_match", "name": "near",
              "input": "{{sample.output_text}}", "reference": "{{item.reference_answer}}"}},
   "calculate_output": "0.9 * exact + 0.1 * near"}

item holds the row's columns, prompt, data_source, and the ground truth as reference_answer (--reference-key).
score_model asks a chat endpoint: --base-url, and --api-key-env or --api-key-file. python graders are refused.

Example:  penstock reward serve-grader grader.json --register http://127.0.0.1:8700
"""
_ROUNDS = 4.0


class GraderReward:
    batched = True

    def __init__(self, file: Path, reference_key: str, model_settings: JudgeSettings | None) -> None:
        """Read the grader; ``model_settings`` name the chat endpoint of score_model graders. Raises ConfigError."""
        self._file = file
        self._reference_key = reference_key
        self._grader: Grader = graders.load(file)
        self._settings = model_settings
        self._chat: Chat | None = None
        self._key = model_settings.api_key() if model_settings is not None else ""
        if _asks_a_model(self._grader) and model_settings is None:
            raise ConfigError(f"{file}: a score_model grader needs a chat endpoint: name it with --base-url")

    @property
    def title(self) -> str:
        return f"{self._file.name}: {self._grader.type} grader"

    @property
    def version(self) -> str:
        """Hash of the grader and of its chat endpoint's settings."""
        where = "" if self._settings is None else self._settings.base_url
        return hashlib.sha256(f"{self._grader.model_dump_json()}\n{where}".encode()).hexdigest()[:8]

    @property
    def terms(self) -> Mapping[str, Any]:
        """Allow long calls, because a grading model may take minutes."""
        if self._settings is None:
            return {}
        return {"timeout_s": min(3600.0, self._settings.timeout_s * _ROUNDS), "batch_size": 4}

    @property
    def figures(self) -> Mapping[str, float]:
        return {} if self._chat is None else asdict(self._chat.cost)

    async def open(self) -> None:
        if self._settings is not None:
            self._chat = Chat(self._settings, self._key)

    async def score(self, groups: Sequence[GroupToScore]) -> list[list[Score]]:
        return list(await asyncio.gather(*(self._group(group) for group in groups)))

    async def _group(self, group: GroupToScore) -> list[Score]:
        item = item_of(group, self._reference_key)
        return list(
            await asyncio.gather(*(evaluate(self._grader, item, text, self._chat) for text in group.completions))
        )

    async def close(self) -> None:
        if self._chat is not None:
            await self._chat.close()


def _asks_a_model(grader: Grader) -> bool:
    inner = grader.graders.values() if isinstance(grader, Multi) else [grader]
    return any(isinstance(one, ScoreModel) for one in inner)


def _model_settings(options: argparse.Namespace) -> JudgeSettings | None:
    if not options.base_url:
        return None
    try:
        return JudgeSettings(
            base_url=options.base_url,
            model="of the grader",
            timeout_s=options.timeout_s,
            concurrency=options.concurrency,
            api_key_env=options.api_key_env,
            api_key_file=options.api_key_file,
        )
    except ValidationError as err:
        raise ConfigError(
            "; ".join(f"--{one['loc'][0] if one['loc'] else ''}: {one['msg']}" for one in err.errors())
        ) from None


def main(arguments: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C; raises PenstockError when the file or the registration is wrong."""
    parser = argparse.ArgumentParser(
        prog="penstock reward serve-grader",
        description="Serve a grader in OpenAI's JSON form as an endpoint of a reward service.",
        epilog=_TEACHES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="JSON file of the grader")
    parser.add_argument(
        "--reference-key",
        default="reference_answer",
        help="key of the ground truth in the item (default: reference_answer)",
    )
    parser.add_argument("--base-url", default="", help="chat endpoint of score_model graders, e.g. http://.../v1")
    parser.add_argument("--api-key-env", default="", help="environment variable with its API key")
    parser.add_argument("--api-key-file", type=Path, help="file with its API key")
    parser.add_argument("--concurrency", type=int, default=16, help="concurrent requests to the model (default: 16)")
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=120.0,
        help="deadline of one model request in seconds, retries included (default: 120)",
    )
    served_reward.add_options(parser, default_name="the file's name")
    options = parser.parse_args(arguments)
    reward = GraderReward(options.file, options.reference_key, _model_settings(options))
    served_reward.serve(reward, served_reward.address(options, options.file.stem))
    return 0
