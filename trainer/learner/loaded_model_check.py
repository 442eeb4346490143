"""Checks of what transformers loaded: it gives random numbers to tensors that are missing, and reads NaN without a word."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import nn

from penstock.trainer.errors import UnsupportedModel

check_log = structlog.get_logger("trainer.loaded_model_check")

_LAYER = re.compile(r"(^|\.)layers\.\d+\.")
_SHOWN = 3


def check_loaded(model: nn.Module, report: Mapping[str, Any], folder: Path) -> None:
    """Check that every tensor of a model came from its folder and is finite; raises UnsupportedModel."""
    missing = sorted(str(name) for name in report["missing_keys"])
    unused = sorted(str(name) for name in report["unexpected_keys"])
    more_layers = [name for name in unused if _LAYER.search(name)]
    for what, names in (("the files have no", missing), ("config.json has no", more_layers)):
        if names:
            raise UnsupportedModel(
                f"model.path = {folder}: {what} {', '.join(names[:_SHOWN])} ({len(names)} tensors): they would be random, or "
                "be left out; set it to a folder whose config.json belongs to its weights"
            )
    if unused:
        check_log.warning("tensors of the model folder are not used", num_tensors=len(unused), first=unused[:_SHOWN])
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter.detach().sum(dtype=torch.float32)) and not torch.isfinite(parameter).all():
            raise UnsupportedModel(f"model.path = {folder}: {name} has NaN or infinite numbers; restore the file")
