"""Models whose parameters are divided among the ranks while they are read (ZeRO 3): no rank ever holds the whole model.

`transformers` builds a model on the meta device and registers its parameters one by one, each read from its safetensors file. As soon
as one is registered, DeepSpeed keeps this rank's part of it, and the rest is freed: a rank holds its part of the model and one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from penstock.trainer.errors import UnsupportedModel
from penstock.trainer.learner.optimizer_state import variable_set
from penstock.trainer.learner.trainable import import_deepspeed

_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"  # of transformers: else threads read the whole model while its first tensors are registered
_PIECE = 2**22  # elements that are checked at once


class PartitionedParameters:
    """The parameters that were divided while a model was read."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype) -> None:
        deepspeed = import_deepspeed()
        # A module without parameters, so that it partitions none, and computes linear layers as it does with all of a model's.
        # The group of hpZ is made once in a process.
        self._init = deepspeed.zero.Init(
            module=nn.Module(),
            config_dict_or_path=dict(config),
            zero_param_parallel_group=deepspeed.utils.groups._get_zero_param_intra_parallel_group(),
        )
        self._gathered: Callable[..., Any] = deepspeed.zero.GatheredParameters
        self._dtype = dtype
        self._registered: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._not_finite: set[nn.Parameter] = set()

    @contextmanager
    def of_next_model(self) -> Iterator[None]:
        """Divide what is read inside the block; collective: all ranks read the same model."""
        hook = register_module_parameter_registration_hook(self._partition)
        try:
            with variable_set(_ONE_BY_ONE):
                yield
        finally:
            hook.remove()

    def check(self, model: nn.Module, folder: Path) -> None:
        """Move the model's buffers to the device, and check what was read; raises UnsupportedModel. Collective."""
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = buffer if buffer is None else buffer.to(self._init.local_device)
        names = {parameter: name for name, parameter in model.named_parameters()}
        for parameter in self._not_finite:
            if parameter in names:
                raise not_finite(folder, names[parameter])
        for module, name, parameter in self._registered:
            tied = module._parameters[name]
            if tied is parameter or tied is None:
                continue
            with self._gathered([parameter, tied]):
                is_same = torch.equal(parameter, tied)
            if not is_same:
                raise UnsupportedModel(
                    f"model.path = {folder}: config.json ties {names[tied]} to another weight (tie_word_embeddings), and the files have different "
                    "values of both; set tie_word_embeddings to false in config.json"
                )
        self._registered.clear()

    def _partition(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        is_read = getattr(
            parameter, "_is_hf_initialized", False
        )  # others are missing in the files, or on the meta device
        if parameter is None or not is_read or parameter.is_meta or hasattr(parameter, "ds_id"):
            return
        # Its own memory, not that of the file, into which DeepSpeed's broadcast would write.
        dtype = self._dtype if parameter.is_floating_point() else parameter.dtype
        parameter.data = parameter.data.to(self._init.local_device, dtype, copy=True)
        if not is_finite(parameter):
            self._not_finite.add(parameter)
        self._init._convert_to_zero_parameters([parameter])
        self._registered.append((module, name, parameter))


def is_finite(values: Tensor) -> bool:
    """Return True without NaN and infinite numbers, without a copy of all of them."""
    pieces = values.detach().flatten().split(_PIECE)
    return all(torch.isfinite(piece.sum(dtype=torch.float32)) or torch.isfinite(piece).all() for piece in pieces)


def not_finite(folder: Path, name: str) -> UnsupportedModel:
    return UnsupportedModel(f"model.path = {folder}: {name} has NaN or infinite numbers; restore the file")
