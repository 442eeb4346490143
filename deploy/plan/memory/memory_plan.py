"""Puts the estimates of a run together: what a rank holds all the time, and its phases; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.deploy.plan.memory.estimate import LOSS, MAX_LOGITS, Network, Pass, checkpoint_copy, network
from penstock.deploy.plan.memory.model_shape import FLOAT32, Method, ModelShape, Needs, Sizes
from penstock.deploy.plan.memory.plan_inputs import PlanInputs
from penstock.protocol.weights.layout import BUCKET_BYTES

_COPIES = 2  # of the weights: the newest published one, which the next patch is made against, and the one on its way
# What libraries hold on a CPU besides tensors, measured: half of it is code that oneDNN compiles for each shape of a product. Experts have
# as many shapes in the smallest model as the trainer keeps code of (`process_memory`), which is measured as part of the libraries.
_FLOAT32_KERNELS, _BFLOAT16_KERNELS, _BFLOAT16_KERNELS_OF_ADAPTERS = 10_000_000, 35_000_000, 55_000_000
_KERNELS_OF_EXPERTS = 10_000_000
COPY = "copy of the weights"
LAST_RANK = f"{LOSS} on the last rank"  # which samples the most of shared tokens, and copies no weights where there are few buckets
_HELD_COPIES = "copies of the weights"
PARKED = "log-probabilities of the parked reference"
CHECKPOINT = "copy for a checkpoint"  # of weights and optimizer states, until a thread has written it


@dataclass(frozen=True)
class Phase:
    """What a rank holds at the largest moment of a phase, in bytes."""

    name: str
    needs: Needs  # besides what is held all the time
    held: Needs

    @property
    def on_device(self) -> int:
        """Bytes of the device that trains."""
        return sum(self.held.device.values()) + sum(self.needs.device.values())

    @property
    def total(self) -> int:
        """Bytes of the process where the CPU trains, which is device and host."""
        elsewhere = (self.held.host, self.held.cpu, self.needs.host, self.needs.cpu)
        return self.on_device + sum(sum(sizes.values()) for sizes in elsewhere)


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of the rank that needs the most."""

    inputs: PlanInputs

    @cached_property
    def _policy(self) -> Network:
        return network(self.inputs.rank_shape, self.inputs.method, self._largest)

    @property
    def _largest(self) -> Pass:
        """The largest micro-batch of the rank that holds copies of the weights."""
        return self.inputs.largest if self._all_ranks_copy else self.inputs.largest_of_first_rank

    @cached_property
    def _critic(self) -> Network | None:
        if self.inputs.critic is None:
            return None
        return network(*self._critics, replace(self.inputs.largest, predictors=0))

    @property
    def _critics(self) -> tuple[ModelShape, Method]:
        """The critic's body, and how it is trained: whole. Its head is one number for each token."""
        assert self.inputs.critic is not None
        method = replace(self.inputs.method, lora_rank=0, lora_targets=(), with_entropy=False)
        return replace(self.inputs.critic.of_rank(method.tensor_parallel), tied=True), method

    @cached_property
    def held(self) -> Needs:
        device, host = dict(self._policy.held.device), dict(self._policy.held.host)
        if self._critic:
            for held, sizes in ((device, self._critic.held.device), (host, self._critic.held.host)):
                held.update({f"{name} of the critic": size for name, size in sizes.items()})
        (host if self.inputs.reference_on_host else device)["reference"] = self._reference
        copies = 1 if self.inputs.publishes_adapter else _COPIES  # of the adapters' base, which is never copied again
        host[_HELD_COPIES] = copies * self._copy
        host[CHECKPOINT] = checkpoint_copy(self.inputs.rank_shape, self.inputs.method)
        if self.inputs.critic is not None:
            host[CHECKPOINT] += checkpoint_copy(*self._critics)
        return Needs(_present(device), _present(host), {"compiled kernels": self._kernels})

    @cached_property
    def phases(self) -> list[Phase]:
        return list(self._phases())

    @property
    def largest(self) -> Phase:
        """The phase that needs the most memory of device and host together."""
        return max(self.phases, key=lambda phase: phase.total)

    def peak(self, *, on_gpu: bool) -> int:
        """Return the most bytes that are needed at once: of the device, or of the process where the CPU trains."""
        return max(phase.on_device if on_gpu else phase.total for phase in self.phases)

    def _phases(self) -> Iterator[Phase]:
        yield from (Phase(name, needs, self.held) for name, needs in self._policy.phases.items())
        if self._largest != self.inputs.largest:
            others = network(self.inputs.rank_shape, self.inputs.method, self.inputs.largest)
            host = {name: size for name, size in self.held.host.items() if name != _HELD_COPIES}
            yield Phase(LAST_RANK, others.phases[LOSS], replace(self.held, host=host))
        if self._critic is not None:
            yield from (Phase(f"critic: {name}", needs, self.held) for name, needs in self._critic.phases.items())
        if self.inputs.reference is not None and self.inputs.reference_on_host:
            yield Phase(PARKED, Needs(self._parked(self.inputs.reference)), self.held)
        if not self.inputs.publishes_adapter:
            yield Phase(COPY, Needs(host={"newest copy": self._copy}), self.held)

    def _parked(self, reference: ModelShape) -> Sizes:
        """Return what a parked reference needs of the device: its largest layer, and a chunk of logits twice."""
        largest, method = self.inputs.largest, self.inputs.method
        layer = max(reference.table, *(inputs * outputs for inputs, outputs in reference.linears.values()))
        positions = min(max(1, MAX_LOGITS // reference.vocabulary), largest.predictors)
        return {
            "layer of the reference": layer * method.width,
            "activations": largest.tokens * method.width * (2 * reference.hidden + 3 * reference.intermediate),
            "logits": 2 * FLOAT32 * positions * reference.vocabulary,
        }

    @property
    def _kernels(self) -> int:
        method = self.inputs.method
        if method.dtype == "float32":
            return _FLOAT32_KERNELS
        if self.inputs.shape.mixture is not None:
            return _KERNELS_OF_EXPERTS
        return _BFLOAT16_KERNELS_OF_ADAPTERS if method.lora_rank else _BFLOAT16_KERNELS

    @property
    def _copy(self) -> int:
        """Bytes of a rank's share of a copy: whole buckets, the embedding in one of its own if it is larger."""
        shape, width = self.inputs.shape, self.inputs.published_width
        whole = shape.parameters * width
        of_rank = -(-self._buckets // self.inputs.method.num_ranks)
        return max(whole * of_rank // self._buckets, shape.table * width)

    @property
    def _buckets(self) -> int:
        return -(-self.inputs.shape.parameters * self.inputs.published_width // BUCKET_BYTES)

    @property
    def _all_ranks_copy(self) -> bool:
        return self._buckets >= self.inputs.method.num_ranks

    @property
    def _reference(self) -> int:
        return self.inputs.reference.parameters * self.inputs.method.width if self.inputs.reference else 0


def _present(sizes: Mapping[str, int]) -> Sizes:
    return {name: size for name, size in sizes.items() if size}
