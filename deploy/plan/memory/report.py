"""Write the memory of a rank as text and as JSON for `penstock plan`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.deploy.plan.memory.memory_plan import MemoryPlan, Phase, Suggestion, suggestions
from penstock.deploy.plan.memory.model_shape import ModelShape, Needs, read_shape
from penstock.deploy.plan.memory.plan_inputs import plan_inputs
from penstock.protocol.errors import ConfigError
from penstock.trainer.attention_choice import matrix_bytes
from penstock.trainer.settings import TrainerSettings

_GB = 1e9
_UNITS = {"MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30, "TB": 10**12, "TiB": 2**40}


def size(num_bytes: float) -> str:
    return f"{num_bytes / _GB:.2f} GB" if num_bytes >= _GB else f"{num_bytes / 1e6:.0f} MB"


def text(plan: MemoryPlan, *, limit: int | None, on_gpu: bool, found: Sequence[Suggestion]) -> str:
    return "".join(f"{line}\n" for line in _lines(plan, limit, on_gpu, found))


def _lines(plan: MemoryPlan, limit: int | None, on_gpu: bool, found: Sequence[Suggestion]) -> Iterator[str]:
    inputs, shape, largest = plan.inputs, plan.inputs.shape, plan.inputs.largest
    where = "its GPU, besides the CUDA context" if on_gpu else "its process, besides the libraries (about 0.5 GB)"
    yield f"memory of a rank ({where})"
    yield ""
    yield f"model: {shape.family}, {shape.parameters / 1e6:,.1f} million parameters, {shape.layers} layers of width {shape.hidden}"
    yield (
        f"optimizer step: {inputs.batch.num_groups} groups of {inputs.batch.group_size} rows of at most {inputs.row_tokens:,} tokens; "
        f"on each of {inputs.method.num_ranks} rank(s) {largest.count} micro-batch(es) of up to {largest.tokens:,} computed tokens, "
        f"{inputs.operations / 1e12:,.1f} TFLOP"
    )
    yield f"attention: {_attention(plan, on_gpu)}"
    yield ""
    yield "held all the time"
    for name, value in plan.held.device.items():
        yield f"  {name:<34}{size(value):>10}"
    for name, value in plan.held.host.items():
        yield f"  {name:<34}{size(value):>10}{'  (host)' if on_gpu else ''}"
    for name, value in plan.held.cpu.items() if not on_gpu else ():
        yield f"  {name:<34}{size(value):>10}"
    yield "in all, by phase"
    for phase in plan.phases:
        parts = ", ".join(_parts(phase, on_gpu))
        mark = "  <- largest" if phase is _largest(plan, on_gpu) else ""
        yield f"  {phase.name:<34}{size(_size(phase, on_gpu)):>10}  with {parts}{mark}"
    peak = plan.peak(on_gpu=on_gpu)
    yield ""
    yield f"- a rank needs {size(peak)}"
    if limit is None:
        return
    if peak <= limit:
        yield f"- it fits into {size(limit)}"
        return
    yield f"- it does not fit into {size(limit)}: the largest phase is `{_largest(plan, on_gpu).name}`"
    if not found:
        yield "- no setting that is known here makes it fit: use a smaller model or shorter rows"
    for one in found:
        yield f"- it fits with {' '.join(one.settings)}: {size(one.peak)}"


def document(plan: MemoryPlan, *, limit: int | None, on_gpu: bool, found: Sequence[Suggestion]) -> dict[str, Any]:
    inputs = plan.inputs
    peak = plan.peak(on_gpu=on_gpu)
    return {
        "parameters": inputs.shape.parameters,
        "micro_batches": inputs.largest.count,
        "largest_micro_batch_tokens": inputs.largest.tokens,
        "operations": inputs.operations,
        "attention": inputs.backend(on_gpu=on_gpu),
        "held": _needs(plan.held),
        "phases": {
            phase.name: {**_needs(phase.needs), "on_device": phase.on_device, "total": phase.total}
            for phase in plan.phases
        },
        "largest_phase": _largest(plan, on_gpu).name,
        "peak": peak,
        "limit": limit,
        "fits": None if limit is None else peak <= limit,
        "fits_with": [{"settings": list(one.settings), "peak": one.peak} for one in found],
    }


def _attention(plan: MemoryPlan, on_gpu: bool) -> str:
    inputs, where = plan.inputs, "a GPU" if on_gpu else "a CPU"
    heads = f"{inputs.shape.heads} heads of {inputs.shape.head_dim} dimensions in {inputs.method.dtype} on {where}"
    backend = inputs.backend(on_gpu=on_gpu)
    if backend is None:
        return f"trainer.attention = {inputs.attention} cannot be used for {heads}; set it to auto"
    if inputs.method.dense_attention:
        return (
            f"{backend}, with matrices of {size(matrix_bytes(inputs.shape.heads, inputs.largest.tokens))}, for {heads}"
        )
    return f"{backend}, for {heads}; memory grows with the tokens, not with their square"


def _needs(needs: Needs) -> dict[str, dict[str, int]]:
    return {"device": dict(needs.device), "host": dict(needs.host), "cpu": dict(needs.cpu)}


def _parts(phase: Phase, on_gpu: bool) -> Iterator[str]:
    needs = phase.needs
    yield from (f"{name} {size(value)}" for name, value in needs.device.items() if value)
    yield from (f"{name} {size(value)}{' (host)' if on_gpu else ''}" for name, value in needs.host.items() if value)
    yield from (f"{name} {size(value)}" for name, value in needs.cpu.items() if value and not on_gpu)


def _size(phase: Phase, on_gpu: bool) -> int:
    return phase.on_device if on_gpu else phase.total


def _largest(plan: MemoryPlan, on_gpu: bool) -> Phase:
    return max(plan.phases, key=lambda phase: _size(phase, on_gpu))


class RankMemory:
    def __init__(self, settings: TrainerSettings, *, limit: int | None, on_gpu: bool) -> None:
        """Estimate it; raises NotEstimated, with the reason.

        Args:
            settings: The run.
            limit: Bytes that a rank may use; None: not compared.
            on_gpu: Count what lies on the device that trains; False: host and device together, as where the CPU trains.
        """
        inputs = plan_inputs(
            settings,
            read_shape(settings.model.path, "model.path"),
            reference=_shape(settings.algorithm.reference_path, "algorithm.reference_path"),
            critic=_shape(settings.critic.path, "critic.path"),
        )
        self._plan, self._limit, self._on_gpu = MemoryPlan(inputs), limit, on_gpu
        self._found = [] if limit is None or self.fits else suggestions(inputs, limit, on_gpu=on_gpu)

    @property
    def fits(self) -> bool:
        return self._limit is None or self._plan.peak(on_gpu=self._on_gpu) <= self._limit

    def text(self) -> str:
        return text(self._plan, limit=self._limit, on_gpu=self._on_gpu, found=self._found)

    def document(self) -> dict[str, Any]:
        return document(self._plan, limit=self._limit, on_gpu=self._on_gpu, found=self._found)


def parse_size(given: str, flag: str) -> int:
    size = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([MGT]i?B)", given)
    if size is None or float(size[1]) == 0.0:
        raise ConfigError(f"{flag} {given}: expected a size such as 24GB, 80GiB or 900MB")
    return int(float(size[1]) * _UNITS[size[2]])


def _shape(path: Path | None, key: str) -> ModelShape | None:
    return None if path is None else read_shape(path, key)
