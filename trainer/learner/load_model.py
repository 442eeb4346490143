"""Loads Hugging Face model folders as the policy, the frozen reference, or the backbone of a critic.

transformers gives random numbers to tensors that are missing, and reads NaN without an error: `check_loaded` refuses
both.

Under ZeRO 3 parameters are divided among the ranks while they are read: no rank ever holds the whole model.
transformers builds a model on the meta device and registers its parameters one by one, each read from its safetensors
file. As soon as one is registered, DeepSpeed keeps this rank's part of it, and the rest is freed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from penstock.protocol.errors import ConfigError
from penstock.protocol.hardware_errors import fault_of
from penstock.protocol.images.processor import read_processor
from penstock.trainer.errors import UnsupportedModel
from penstock.trainer.learner import adapter, experts, vision
from penstock.trainer.learner.attention import backends
from penstock.trainer.learner.attention.models import attention_of, why_not_packed
from penstock.trainer.learner.logprobs import CompletionScorer
from penstock.trainer.learner.model_folder_check import check_folder, check_routers
from penstock.trainer.learner.optimizer_state import variable_set, zero_config
from penstock.trainer.learner.parallel_shares import TokenShares
from penstock.trainer.learner.policy import Policy
from penstock.trainer.learner.reference import Reference
from penstock.trainer.learner.step_metrics import layer_groups
from penstock.trainer.learner.trainable import Optimisation, Trainable, frozen, import_deepspeed
from penstock.trainer.parallel_dims import ParallelDims

check_log = structlog.get_logger("trainer.loaded_model_check")

_LAYER = re.compile(r"(^|\.)layers\.\d+\.")
_SHOWN = 3
_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"  # of transformers: else threads read all of it while it is registered
_PIECE = 2**22  # elements that are checked at once
log = structlog.get_logger("trainer.model")


def check_loaded(model: nn.Module, report: Mapping[str, Any], folder: Path) -> None:
    """Check that every tensor of a model came from its folder and is finite; raises UnsupportedModel."""
    missing = sorted(str(name) for name in report["missing_keys"])
    unused = sorted(str(name) for name in report["unexpected_keys"])
    more_layers = [name for name in unused if _LAYER.search(name)]
    for what, names in (("the files have no", missing), ("config.json has no", more_layers)):
        if names:
            raise UnsupportedModel(
                f"model.path = {folder}: {what} {', '.join(names[:_SHOWN])} ({len(names)} tensors): they would be "
                "random, or be left out; set it to a folder whose config.json belongs to its weights"
            )
    if unused:
        check_log.warning("tensors of the model folder are not used", num_tensors=len(unused), first=unused[:_SHOWN])
    for name, parameter in model.named_parameters():
        if not is_finite(parameter):
            raise not_finite(folder, name)


def offload_activations(body: nn.Module) -> None:
    """Have every forward pass of a module with gradient checkpointing keep its saved tensors in host memory.

    Checkpointed layers save only their inputs, which come back to the device one layer at a time. Without checkpointing
    the weights would be moved too.
    """
    open_passes: list[Any] = []

    def begin(*_: Any) -> None:
        open_passes.append(torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()))
        open_passes[-1].__enter__()

    def end(*_: Any) -> None:
        open_passes.pop().__exit__(None, None, None)

    body.register_forward_pre_hook(begin)
    body.register_forward_hook(end, always_call=True)


def load_policy(
    model_folder: Path, how: Optimisation, dims: ParallelDims, *, temperature: float, adapters: Path | None = None
) -> Policy:
    """Load a Hugging Face model folder and put it under DeepSpeed; the same call on every rank.

    The policy's adapters begin with those published in ``adapters``; None: as ``how`` says. Raises UnsupportedModel
    for a missing folder or another model, NoAttentionKernel if no attention over packed rows works, ConfigError for a
    layout that the model does not allow, or no routers to replay.
    """
    check_routers(model_folder, router_replay=how.router_replay)
    model: Any = load_language_model(model_folder, how, dims)
    attach_adapters(model, how, adapters)
    scorer = _scorer(model, how, dims, temperature)
    if how.router_replay:
        scorer.replay_routers()
    layers = layer_groups(name for name, parameter in scorer.named_parameters() if parameter.requires_grad)
    trainable = Trainable(scorer, how, dims, layers, model=model)
    attention = check_attention(model, scorer.padding_reason, trainable.device, dims)
    return Policy(trainable, scorer, dims, attention=attention, router_replay=how.router_replay)


def load_reference(
    folder: Path,
    how: Optimisation,
    device: torch.device,
    dims: ParallelDims,
    *,
    temperature: float,
    parked: bool = False,
) -> Reference:
    """Load a frozen reference, in host memory if ``parked``; divided among the ranks as the policy is: collective.

    Raises UnsupportedModel and ConfigError.
    """
    how = replace(how, offload="parameters" if parked else "none")
    model = load_language_model(folder, how, dims)
    scorer = _scorer(model, how, dims, temperature)
    if is_partitioned(how, dims):
        return Reference(scorer, device, run=frozen(scorer.requires_grad_(False), how))
    return Reference(scorer, device, parked=parked)


def _scorer(model: Any, how: Optimisation, dims: ParallelDims, temperature: float) -> CompletionScorer:
    return CompletionScorer(
        model, temperature, how.max_logits, TokenShares(dims.token_group), head_in_float32=how.head_dtype == "float32"
    )


def load_language_model(folder: Path, how: Optimisation, dims: ParallelDims) -> nn.Module:
    """Load a causal language model for training; raises UnsupportedModel and ConfigError as `load_policy` does."""
    if read_processor(folder) is None:
        loader, kind = "AutoModelForCausalLM", "a usable causal language model"
    else:
        loader, kind = "AutoModelForImageTextToText", "a usable language model that reads images"
    model, report = from_folder(loader, kind, folder, how.dtype, dims, zero=how)
    check_loaded(model, report, folder)
    experts.check_family(model, str(model.config.get_text_config().model_type))
    if not how.train_vision_tower:
        vision.freeze_tower(model)
    prepare(model, how)
    return model


def from_folder(
    loader: str,
    kind: str,
    folder: Path,
    dtype: str,
    dims: ParallelDims | None = None,
    zero: Optimisation | None = None,
    **options: object,
) -> tuple[Any, dict[str, Any]]:
    """Load a folder with the class ``loader`` of `transformers`; returns the model and what was found.

    Code in the folder is never executed, and dropout is off. What a model does not allow in the layout of ``dims`` is
    refused before its weights are read. Parameters are divided among the ranks as they are read if ``zero`` does so:
    collective. Raises UnsupportedModel and ConfigError.
    """
    if not (folder / "config.json").is_file():
        raise UnsupportedModel(f"model.path = {folder}: no config.json found; set it to a Hugging Face model folder")
    check_folder(folder)
    import transformers  # noqa: PLC0415  seconds of import, only where it is needed
    from transformers.utils import logging as transformers_logging  # noqa: PLC0415

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # `check_loaded` reports what is missing
    parts = None
    from_files: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}  # else it asks on a terminal
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **from_files, **options)
        if dims is not None and dims.layout.ranks_of_rows > 1:
            _check_layout(getattr(transformers, loader), config, folder, dims)
        if zero is not None and dims is not None and is_partitioned(zero, dims):
            parts = PartitionedParameters(zero_config(zero), getattr(torch, dtype))
        model, report = _read(
            getattr(transformers, loader), folder, getattr(torch, dtype), parts, from_files | {"config": config}
        )
    except (ConfigError, UnsupportedModel):
        raise
    except Exception as err:
        if parts is not None and fault_of(err) is not None:  # of the device, or of another rank
            raise
        raise UnsupportedModel(
            f"model.path = {folder} is not {kind} ({type(err).__name__}: {err}); set it to a Hugging Face model "
            "folder of an architecture that transformers has: code in the folder is never executed"
        ) from None
    if (dropout := switch_off_dropout(model)) and (dims is None or dims.writes_files):
        log.info("the model's own dropout is off", dropout=dropout)
    return model, report


def _read(
    loader: Any, folder: Path, dtype: torch.dtype, parts: PartitionedParameters | None, options: Mapping[str, object]
) -> tuple[Any, dict[str, Any]]:
    with contextlib.nullcontext() if parts is None else parts.of_next_model():
        model, report = loader.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
        )
    if parts is not None:
        parts.check(model, folder)
    return model, report


def is_partitioned(how: Optimisation, dims: ParallelDims) -> bool:
    """Return True if parameters are divided while they are read. AutoTP cuts whole ones."""
    return how.zero_stage == 3 and dims.weight_group is None


def _check_layout(loader: Any, config: Any, folder: Path, dims: ParallelDims) -> None:
    """Raise ConfigError if a folder's model, made without weights, cannot be computed by several ranks together."""
    dims.layout.check(config.to_dict(), str(folder))
    text = config.get_text_config()
    heads = text.num_attention_heads
    dims.layout.check_heads(heads, getattr(text, "num_key_value_heads", None) or heads, str(folder))
    if dims.layout.sequence_parallel == 1:
        return
    with torch.device("meta"):
        model = loader.from_config(config, trust_remote_code=False)
    if reason := why_not_packed(model):
        raise ConfigError(
            f"trainer.sequence_parallel = {dims.layout.sequence_parallel} needs rows in one stream, and model.path = "
            f"{folder}: {reason}, so that its rows are padded; set it to 1"
        )


def prepare(model: Any, how: Optimisation) -> None:
    backends.use(how.attention)
    model.config.use_cache = False
    if how.gradient_checkpointing:
        # transformers renamed the method, and warns about the former name.
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    if how.activation_offload:
        offload_activations(model.base_model)


def switch_off_dropout(model: nn.Module) -> dict[str, float]:
    """Set every probability of dropout in a model's modules to 0, as engines sample without it; returns the others.

    They are by name. That of adapters, which are attached later, stays.
    """
    found = {}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_dropout = "dropout" in name or name.endswith("pdrop") or (name == "p" and isinstance(module, nn.Dropout))
            if is_dropout and isinstance(value, float) and value > 0:
                found[name] = value
                setattr(module, name, 0.0)
    return found


def attach_adapters(model: Any, how: Optimisation, begin: Path | None = None, *, head: str | None = None) -> None:
    if how.lora is None:
        return
    adapter.attach(model, how.lora, head=head)
    if (folder := begin or how.lora.path) is not None:
        adapter.load(model, folder)
    if how.gradient_checkpointing:  # a checkpointed layer needs an input that requires a gradient
        model.enable_input_require_grads()


def check_attention(model: Any, padding_reason: str | None, device: torch.device, dims: ParallelDims) -> str:
    """Return the name of a model's attention, ``padded`` where it is transformers' own; raises NoAttentionKernel."""
    backend = "padded" if padding_reason is not None else attention_of(model, device)
    if not dims.writes_files:
        return backend
    if padding_reason is not None:
        log.warning("rows are padded, and prompts are not shared: slower, and equal", reason=padding_reason)
    log.info("attention", backend=backend, device=device.type)
    if device.type == "cuda" and model.get_input_embeddings().weight.dtype == torch.float32:
        log.warning(
            "the model trains in float32 on a GPU: several times slower, twice the memory; set model.dtype = bfloat16"
        )
    return backend


class PartitionedParameters:
    """The parameters that were divided while a model was read."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype) -> None:
        deepspeed = import_deepspeed()
        # A module without parameters, so that it partitions none, and computes linear layers as it does with a model's.
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

    @contextlib.contextmanager
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
                    f"model.path = {folder}: config.json ties {names[tied]} to another weight (tie_word_embeddings), "
                    "and the files have different values of both; set tie_word_embeddings to false in config.json"
                )
        self._registered.clear()

    def _partition(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        is_read = getattr(parameter, "_is_hf_initialized", False)  # else missing in the files, or on the meta device
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
