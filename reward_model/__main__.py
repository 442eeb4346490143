"""``python -m penstock.reward_model PATH``: a reward model as a registered reward endpoint (``penstock reward serve-model``)."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.protocol.errors import ConfigError, PenstockError
from penstock.reward_model.classifier import Form, Reading, Unusable
from penstock.reward_service.endpoints.wire import GroupToScore, Score
from penstock.reward_service.hosting import served_reward

_TEACHES = """\
PATH is a model folder as transformers writes it, with a sequence-classification head: one label (a reward model; its
logit is the score) or several (--label N: the probability of label N).

The prompt that the policy saw is rendered with the policy's chat template. For a reward model with its own
template, name the row's column with the question (--prompt-column), so that it is rendered only once.

Example:  penstock reward serve-model rm/ --prompt-column question --register http://127.0.0.1:8700
          penstock reward test rm
"""


class ModelReward:
    batched = True

    def __init__(self, options: argparse.Namespace) -> None:
        """``options`` are those of the command line; `open` loads the model."""
        self._options = options
        self._folder: Path = options.path
        self._model: Any = None
        self._reading: Reading | None = None
        self._version = ""
        self._num_texts = self._num_tokens = 0

    @property
    def title(self) -> str:
        return f"{self._folder.name}: reward model in {self._options.dtype} on {self._options.device}"

    @property
    def version(self) -> str:
        return self._version

    @property
    def terms(self) -> Mapping[str, Any]:
        """Large batches and low concurrency, because one model computes one batch at a time."""
        return {"timeout_s": self._options.timeout_s, "batch_size": 16, "concurrency": 2}

    @property
    def figures(self) -> Mapping[str, float]:
        return {"texts": self._num_texts, "tokens": self._num_tokens}

    def load(self) -> None:
        try:
            from penstock.reward_model import classifier  # noqa: PLC0415 --help needs no torch
        except ModuleNotFoundError as err:
            raise ConfigError(f"{err.name} is not installed; pip install 'penstock[reward-model]'") from None
        options = self._options
        model = classifier.Classifier(
            self._folder,
            dtype=options.dtype,
            device=options.device,
            label=options.label,
            max_length=options.max_length,
            batch_tokens=options.batch_tokens,
        )
        form: Form = options.form if options.form != "auto" else "chat" if model.has_chat_template else "plain"
        if form == "chat" and not model.has_chat_template:
            raise ConfigError(f"{self._folder}: the tokenizer has no chat template; use --form plain")
        self._model = model
        self._reading = Reading(form, model.render, options.prompt_column)
        self._version = f"{classifier.fingerprint(self._folder)}-{form}-{options.dtype}"

    async def open(self) -> None:
        """Do nothing: the model is loaded before the port is bound."""

    async def score(self, groups: Sequence[GroupToScore]) -> list[list[Score]]:
        assert self._reading is not None
        texts: list[str] = []
        found: list[list[Score] | range] = []
        for group in groups:
            try:
                more = self._reading.texts(group)
            except Unusable as err:
                found.append([Score(error=str(err))] * len(group.completions))
            else:
                found.append(range(len(texts), len(texts) + len(more)))
                texts += more
        scored = self._model.score(texts, special_tokens=self._reading.form == "plain") if texts else []
        self._num_texts += len(texts)
        self._num_tokens += sum(one.num_tokens for one in scored)
        scores = [_score(one) for one in scored]
        return [[scores[place] for place in one] if isinstance(one, range) else one for one in found]

    async def close(self) -> None:
        """Do nothing: the process exits next."""


def _score(one: Any) -> Score:
    if one.value is None:
        return Score(error=one.error)
    if not math.isfinite(one.value):
        return Score(error=f"the model's output is {one.value}, expected a finite number; try --dtype float32")
    return Score(score=one.value, parts={"num_tokens": float(one.num_tokens)})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock reward serve-model",
        description="Serve a reward model as an endpoint of a reward service.",
        epilog=_TEACHES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", type=Path, help="the model's folder")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="number format (default: float32)"
    )
    parser.add_argument("--device", default="cpu", help="torch device (default: cpu)")
    parser.add_argument(
        "--form",
        choices=["auto", "chat", "plain"],
        default="auto",
        help="input format; auto: chat if the tokenizer has a chat template",
    )
    parser.add_argument("--prompt-column", default="", help="the row's column with the question, as text or messages")
    parser.add_argument(
        "--label", type=int, help="with several labels: index of the label whose probability is the score"
    )
    parser.add_argument(
        "--max-length", type=int, help="token limit of a text (default: the model's); longer texts are errors"
    )
    parser.add_argument(
        "--batch-tokens", type=int, default=16_384, help="tokens per forward pass, padding included (default: 16384)"
    )
    parser.add_argument("--timeout-s", type=float, default=300.0, help="deadline of one call in seconds (default: 300)")
    served_reward.add_options(parser, default_name="the folder's name")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit code. A PenstockError is written to stderr."""
    options = _parser().parse_args(arguments)
    try:
        for name in ("max_length", "batch_tokens"):
            if (value := getattr(options, name)) is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1")
        if not (options.path / "config.json").is_file():  # checked before torch is imported
            raise ConfigError(f"{options.path}: not a model folder (config.json is missing)")
        where = served_reward.address(options, options.path.resolve().name)
        reward = ModelReward(options)
        reward.load()
        served_reward.serve(reward, where)
    except PenstockError as err:
        sys.stderr.write(f"{err}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
