"""Write the memory of a rank as text and as JSON for `penstock plan`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.deploy.plan.memory.memory_plan import MemoryPlan, Phase, suggestions
from penstock.deploy.plan.memory.model_shape import ModelShape, Needs, read_shape
from penstock.deploy.plan.memory.plan_inputs import plan_inputs
from penstock.protocol.errors import ConfigError
from penstock.trainer.attention_choice import matrix_bytes
from penstock.trainer.settings import TrainerSettings

_GB = 1e9
_GPUS_OF_NODE = 8
# Assumed, never measured here: pinned host memory over PCIe 4, and a model folder in the page cache.
_BUS_BYTES_PER_S = 20e9
_LOAD_BYTES_PER_S = 4e9
_UNITS = {"MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30, "TB": 10**12, "TiB": 2**40}


def size(num_bytes: float) -> str:
    return f"{num_bytes / _GB:.2f} GB" if num_bytes >= _GB else f"{num_bytes / 1e6:.0f} MB"


def parse_size(text: str, flag: str) -> int:
    size = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([MGT]i?B)", text)
    if size is None or float(size[1]) == 0.0:
        raise ConfigError(f"{flag} {text}: expected a size such as 24GB, 80GiB or 900MB")
    return int(float(size[1]) * _UNITS[size[2]])


@dataclass(frozen=True, slots=True)
class Turns:
    """What the turns of trainer and engine on one GPU cost, where it has no room for both."""

    moved: int  # bytes that a rank holds between two steps
    weights: int  # bytes of the engine's weights
    max_staleness: int  # the engine samples one batch more in a turn, and the trainer makes as many steps in its next
    sample_s: float  # seconds in which the engine samples the batch of a step
    train_s: float  # seconds of an optimizer step

    @property
    def change_s(self) -> float:
        """Seconds of a turn to the engine and back: states out and in, weights loaded."""
        return 2 * self.moved / _BUS_BYTES_PER_S + self.weights / _LOAD_BYTES_PER_S

    def text(self) -> str:
        steps = self.max_staleness + 1
        whole_s = steps * (self.train_s + self.sample_s) + self.change_s
        trains, samples = (steps * seconds / whole_s for seconds in (self.train_s, self.sample_s))
        return (
            f"in turns the figures above do not overlap: {steps} batches are sampled, then trained; two changes take about "
            f"{self.change_s:.1f} s for {self.moved / 1e9:.2f} GB to host memory ({_BUS_BYTES_PER_S / 1e9:.0f} GB/s assumed) and back, and "
            f"{self.weights / 1e9:.2f} GB of weights ({_LOAD_BYTES_PER_S / 1e9:.0f} GB/s): trainer {trains:.0%} of the time, engine "
            f"{samples:.0%}, changes {1 - trains - samples:.0%}"
        )


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
        self._peak = self._plan.peak(on_gpu=on_gpu)
        self._largest = max(self._plan.phases, key=self._size)
        self._suggestions = [] if limit is None or self.fits else suggestions(inputs, limit, on_gpu=on_gpu)

    @property
    def fits(self) -> bool:
        return self._limit is None or self._peak <= self._limit

    def turns(self, *, max_staleness: int, sample_s: float, train_s: float) -> Turns:
        """Return what turns of this rank with an engine cost; sampling and training of a step take these seconds."""
        inputs, moved = self._plan.inputs, sum(self._plan.held.device.values())
        return Turns(moved, inputs.published_bytes, max_staleness, sample_s, train_s)

    def advice(self) -> str:
        """Return one line for a rank that ran out of memory although the limit was all of its GPU."""
        if self._limit is None or self.fits:
            return f"a rank needs {size(self._peak)}, which fits: set trainer.micro_batch_tokens={self._plan.inputs.budget_tokens // 2}"
        need = f"a rank needs {size(self._peak)} of a GPU with {size(self._limit)} for it"
        settings = [" ".join(suggestion.settings) for suggestion in self._suggestions[:2]]
        return (
            f"{need}; it fits with {', or with '.join(settings)}"
            if settings
            else f"{need}; no known setting makes it fit"
        )

    def text(self) -> str:
        return "".join(f"{line}\n" for line in self._lines())

    def document(self) -> dict[str, Any]:
        inputs = self._plan.inputs
        return {
            "parameters": inputs.shape.parameters,
            "micro_batches": inputs.largest.count,
            "largest_micro_batch_tokens": inputs.largest.tokens,
            "operations": inputs.operations,
            "attention": inputs.backend(on_gpu=self._on_gpu),
            "held": asdict(self._plan.held),
            "phases": {
                phase.name: {**asdict(phase.needs), "on_device": phase.on_device, "total": phase.total}
                for phase in self._plan.phases
            },
            "loading_host": {"rank": self._plan.loading_host, "node": self._node_ranks * self._plan.loading_host},
            "largest_phase": self._largest.name,
            "peak": self._peak,
            "limit": self._limit,
            "fits": None if self._limit is None else self.fits,
            "fits_with": [
                {"settings": list(suggestion.settings), "peak": suggestion.peak} for suggestion in self._suggestions
            ],
        }

    def _lines(self) -> Iterator[str]:
        inputs, shape, largest = self._plan.inputs, self._plan.inputs.shape, self._plan.inputs.largest
        where = (
            "its GPU, besides the CUDA context" if self._on_gpu else "its process, besides the libraries (about 0.5 GB)"
        )
        yield f"memory of a rank ({where})"
        yield ""
        yield f"model: {shape.family}, {shape.parameters / 1e6:,.1f} million parameters, {shape.layers} layers of width {shape.hidden}"
        yield (
            f"optimizer step: {inputs.batch.num_groups} groups of {inputs.batch.group_size} rows of at most {inputs.row_tokens:,} tokens; "
            f"on each of {inputs.method.num_ranks} rank(s) {largest.count} micro-batch(es) of up to {largest.tokens:,} computed tokens, "
            f"{inputs.operations / 1e12:,.1f} TFLOP"
        )
        yield f"attention: {self._attention()}"
        yield ""
        yield "held all the time"
        for name, value, note in self._parts(self._plan.held):
            yield f"  {name:<34}{size(value):>10}{f'  {note}' if note else ''}"
        yield "in all, by phase"
        for phase in self._plan.phases:
            parts = ", ".join(
                f"{name} {size(value)}{f' {note}' if note else ''}"
                for name, value, note in self._parts(phase.needs)
                if value
            )
            mark = "  <- largest" if phase is self._largest else ""
            yield f"  {phase.name:<34}{size(self._size(phase)):>10}{f'  with {parts}' if parts else ''}{mark}"
        yield ""
        yield f"- a rank needs {size(self._peak)}"
        if self._on_gpu:
            host, ranks = self._plan.loading_host, self._node_ranks
            yield f"- while models are read it holds {size(host)} in host memory; {ranks} rank(s) on one node {size(ranks * host)}"
        if self._limit is None:
            return
        if self.fits:
            yield f"- it fits into {size(self._limit)}"
            return
        yield f"- it does not fit into {size(self._limit)}: the largest phase is `{self._largest.name}`"
        if not self._suggestions:
            yield "- no setting that is known here makes it fit: use a smaller model or shorter rows"
        for suggestion in self._suggestions:
            yield f"- it fits with {' '.join(suggestion.settings)}: {size(suggestion.peak)}"

    @property
    def _node_ranks(self) -> int:
        return min(self._plan.inputs.method.num_ranks, _GPUS_OF_NODE)

    def _attention(self) -> str:
        inputs, where = self._plan.inputs, "a GPU" if self._on_gpu else "a CPU"
        heads = f"{inputs.shape.heads} heads of {inputs.shape.head_dim} dimensions in {inputs.method.dtype} on {where}"
        backend = inputs.backend(on_gpu=self._on_gpu)
        if backend is None:
            return f"trainer.attention = {inputs.attention} cannot be used for {heads}; set it to auto"
        if inputs.method.dense_attention:
            matrices = matrix_bytes(inputs.shape.heads, inputs.largest.tokens)
            return f"{backend}, with matrices of {size(matrices)}, for {heads}"
        return f"{backend}, for {heads}; memory grows with the tokens, not with their square"

    def _parts(self, needs: Needs) -> Iterator[tuple[str, int, str]]:
        """Yield what is needed, its bytes, and where it lies if that is not the device."""
        yield from ((name, value, "") for name, value in needs.device.items())
        yield from ((name, value, "(host)" if self._on_gpu else "") for name, value in needs.host.items())
        if not self._on_gpu:
            yield from ((name, value, "") for name, value in needs.cpu.items())

    def _size(self, phase: Phase) -> int:
        return phase.on_device if self._on_gpu else phase.total


def _shape(path: Path | None, key: str) -> ModelShape | None:
    return None if path is None else read_shape(path, key)
