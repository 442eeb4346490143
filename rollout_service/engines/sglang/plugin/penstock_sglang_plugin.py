"""A plugin of SGLang that applies weight patches (`penstock_weight_patch.py`); its scheduler processes load it by its entry point.

It wraps ``WeightUpdater.update_weights_from_disk`` and answers two load formats itself; all others pass. So a refusal is an HTTP 400 with its
reason, and the scheduler records the version and flushes its cache as after a load from disk.

| `load_format` | what it does |
|---|---|
| `penstock:probe:PREFIX` | maps every parameter, compares each mapped word with the folder ``model_path``, writes ``PREFIX.RANK.json``; changes nothing |
| `penstock:patch:PREFIX` | applies ``PREFIX.RANK``, a file of the format that `read_patch` documents |

`/server_info` shows `penstock_weight_patch` in ``internal_states`` where it is active: an unknown load format ends a server that lacks it.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import torch
from penstock_weight_patch import (
    ParameterMap,
    Refused,
    apply_patch,
    build_map,
    check_map,
    folder_tensors,
    reason_of,
    write_map,
)
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel, get_serving

NAME = "penstock_weight_patch"
PROTOCOL = 1
PREFIX = "penstock:"


def register() -> None:
    """Register the hooks, in processes that have the scheduler; the detokenizer would import it for nothing."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    updater = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
    HookRegistry.register(f"{updater}.update_weights_from_disk", _update, HookType.AROUND)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.get_internal_state", _show, HookType.AFTER)


def _show(result: Any, *_: Any) -> Any:
    """Show the plugin in `/server_info`, for servers it can serve: ranks of tensor parallelism alone."""
    with suppress(Exception):
        parallel = get_parallel()
        if (parallel.pp_size, parallel.dp_size) == (1, 1):
            device = "cuda" if torch.cuda.is_available() else "cpu"
            shown = {"protocol": PROTOCOL, "tp_size": int(parallel.tp_size), "device": device}
            result.internal_state[NAME] = shown
    return result


def _update(original: Any, updater: Any, model_path: str, load_format: str, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(load_format, str) or not load_format.startswith(PREFIX):
        return original(updater, model_path, load_format, *args, **kwargs)
    job, _, prefix = load_format[len(PREFIX) :].partition(":")
    model = updater.get_model()
    try:
        if job == "probe":
            return True, _probe(updater, model, model_path, prefix)
        if job == "patch":
            figures = apply_patch(model, f"{prefix}.{updater.tp_rank}", get_serving().weight_version, _agree)
            updater.model_config.model_path = model_path
            return True, f"penstock: {figures}."
        raise Refused(f"unknown job {job!r}")
    except Refused as refused:
        return False, f"penstock: {refused}"


def _probe(updater: Any, model: Any, folder: str, prefix: str) -> str:
    problem, parameter_map = "", ParameterMap()
    try:
        _check_server(updater, model)
        parameter_map = build_map(model, folder_tensors(folder))
        check_map(model, parameter_map, folder_tensors(folder))
        write_map(model, parameter_map, f"{prefix}.{updater.tp_rank}.json")
    except Exception as error:  # noqa: BLE001  (every rank must reach the agreement)
        problem = reason_of(error)
    if refusals := _agree(bool(problem)):
        raise Refused(problem or f"{refusals} other ranks refuse")
    return f"penstock: {len(parameter_map.blocks)} blocks."


def _check_server(updater: Any, model: torch.nn.Module) -> None:
    """Raise Refused for what a patch would not reach: copies of the weights in other layouts, and the weights of a draft model."""
    from sglang.srt.model_executor.model_runner_components import weight_updater  # noqa: PLC0415  (seconds, where nothing is served)

    updater._assert_weight_cache_inactive("a patch")
    if updater.get_model_runner().is_draft_worker:
        raise Refused("the server has a draft model")
    if error := weight_updater._unsupported_derived_weight_cache_error(model):
        raise Refused(error)
    methods = {type(method).__name__ for module in model.modules() if (method := getattr(module, "quant_method", None))}
    if quantized := sorted(name for name in methods if not name.startswith("Unquantized")):
        raise Refused(f"layers are quantized: {', '.join(quantized)}")


def _agree(number: int) -> int:
    parallel = get_parallel()
    if parallel.tp_size == 1:
        return int(number)
    total = torch.tensor([int(number)])
    torch.distributed.all_reduce(total, group=parallel.tp_group.cpu_group)
    return int(total)
