"""``serve-judge JUDGE.toml``: a language model as judge, as a reward endpoint."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.reward_service.endpoints.wire import GroupToScore, Score
from penstock.reward_service.hosting import served_reward
from penstock.reward_service.hosting.judge import settings as judge_settings
from penstock.reward_service.hosting.judge.chat_client import Chat
from penstock.reward_service.hosting.judge.judge_groups import Panel
from penstock.reward_service.hosting.judge.settings import JudgeSettings

_TEACHES = """\
The file names the judge's model and settings; reward_service/hosting/judge/settings.py describes every key:

  base_url = "http://127.0.0.1:30000/v1"     # any server with OpenAI's /chat/completions
  model = "Qwen/Qwen3-32B"
  mode = "pointwise"                         # or "pairwise": shares of comparisons won in the group
  api_key_env = "OPENAI_API_KEY"             # or api_key_file = "..."; shown nowhere

  template = '''Task: {{prompt}}
  Answer: {{answer}}
  Write, as the last line: SCORE: a number from 0 to 10'''

A verdict that cannot be read, is cut off or missing is an error, never a 0: its group is retried.
Text from the policy is put between marks that it cannot guess, and the judge is instructed not to obey it;
see docs/rewards.md.

Example:  penstock reward serve-judge judge.toml --register http://127.0.0.1:8700
          penstock reward test judge "a good answer" "a bad one"
"""
_ROUNDS = 4.0  # a call has one or more groups, and its questions wait in a queue with those of other calls


class JudgeReward:
    batched = True

    def __init__(self, file: Path) -> None:
        """Read its file; raises ConfigError."""
        self._file = file
        self._settings: JudgeSettings = judge_settings.load(file)
        self._key = self._settings.api_key()
        self._chat: Chat | None = None

    @property
    def title(self) -> str:
        return f"{self._file.name}: {self._settings.mode} judge {self._settings.model}"

    @property
    def version(self) -> str:
        return hashlib.sha256(self._settings.model_dump_json().encode()).hexdigest()[:8]

    @property
    def terms(self) -> Mapping[str, Any]:
        """Small calls with a long deadline, because a judge model may take minutes."""
        settings = self._settings
        timeout_s = min(3600.0, settings.timeout_s * _ROUNDS)
        lowest, highest = (settings.min_score, settings.max_score)
        if settings.scale or settings.mode == "pairwise":
            lowest, highest = (0.0, 1.0)
        return {"timeout_s": timeout_s, "batch_size": 4, "min_score": lowest, "max_score": highest}

    @property
    def figures(self) -> Mapping[str, float]:
        if self._chat is None:
            return {}
        cost, settings = self._chat.cost, self._settings
        price = (cost.tokens_in * settings.price_in + cost.tokens_out * settings.price_out) / 1e6
        return {**asdict(cost), "price": price}

    async def open(self) -> None:
        self._chat = Chat(self._settings, self._key)

    async def score(self, groups: Sequence[GroupToScore]) -> list[list[Score]]:
        assert self._chat is not None
        return await Panel(self._settings, self._chat).score(groups)

    async def close(self) -> None:
        if self._chat is not None:
            await self._chat.close()


def main(arguments: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C; raises PenstockError when the file or the registration is wrong."""
    parser = argparse.ArgumentParser(
        prog="penstock reward serve-judge",
        description="Serve a language model as judge, as an endpoint of a reward service.",
        epilog=_TEACHES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="TOML file of the judge")
    served_reward.add_options(parser, default_name="the file's name")
    options = parser.parse_args(arguments)
    reward = JudgeReward(options.file)
    served_reward.serve(reward, served_reward.address(options, options.file.stem))
    return 0
