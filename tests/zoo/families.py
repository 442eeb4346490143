"""The families of `families.toml`, written as model folders with random weights under the names of published ones."""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

WIDTH = 64
WHOLE = "PENSTOCK_TEST_ZOO" in os.environ  # as `make test-more NAME=zoo` sets it


@dataclass(frozen=True, eq=False)
class Family:
    name: str
    config: dict[str, Any]  # of config.json
    rows: str = "packed"
    engine: str = ""
    lora: str = ""
    plan: bool = False

    @property
    def is_refused(self) -> bool:
        return self.rows.startswith("refused: ")

    @cached_property
    def with_few_tokens(self) -> Family:
        """The same with a vocabulary of 4,096, for what does not depend on its size; with PENSTOCK_TEST_ZOO itself."""
        if WHOLE:
            return self
        outside = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        return replace(self, config={**self.config, **outside, "vocab_size": 4096})


def _read() -> dict[str, Family]:
    with Path(__file__).with_suffix(".toml").open("rb") as file:
        tables = tomllib.load(file)
    families = {}
    for name, config in tables.items():
        expected, nulls = config.pop("expected"), dict.fromkeys(config.pop("null", ()))  # TOML has none
        families[name] = Family(name, {"hidden_size": WIDTH, "num_hidden_layers": 2, **config, **nulls}, **expected)
    return families


FAMILIES = _read()


def write(family: Family, folder: Path) -> Path:
    """Write the folder of a family: config.json as it is published, float32 weights that nothing hides behind zeros and ones."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(family.config))
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to_empty(device="cpu")
    model.tie_weights()
    generator = torch.Generator().manual_seed(0)
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        _fill(name, weight.data, generator, of_norm=0.0 if "gemma" in family.name else 1.0)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(family.config))
    return folder


def _fill(name: str, weight: torch.Tensor, generator: torch.Generator, *, of_norm: float) -> None:
    if weight.dim() > 1:
        nn.init.normal_(weight, std=0.2 if "embed" in name else 0.8 * weight.shape[-1] ** -0.5, generator=generator)
    else:
        nn.init.normal_(weight, mean=of_norm if "norm" in name else 0.0, std=0.1, generator=generator)
