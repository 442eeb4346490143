"""A reward model as a reward that `penstock reward serve-model` serves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.protocol.errors import ConfigError
from penstock.reward_model.classifier import Form, Reading, Unusable
from penstock.reward_model.commands import ModelOptions
from penstock.reward_service.endpoints.wire import GroupToScore, Score


class ModelReward:
    batched = True

    def __init__(self, folder: Path, options: ModelOptions) -> None:
        """Read nothing yet; `load` loads the model."""
        self._options = options
        self._folder = folder
        self._model: Any = None
        self._reading: Reading | None = None
        self._version = ""
        self._num_texts = self._num_tokens = 0

    @property
    def title(self) -> str:
        return f"{self._folder.name}: reward model in {self._options.dtype} on {self._options.device}"

    @property
    def version(self) -> str:
        """Hash of the folder and of the options that change scores."""
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
