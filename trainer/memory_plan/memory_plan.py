"""Puts the estimates of a run together: what a rank holds all the time, and its phases; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.protocol.weights.layout import BUCKET_BYTES
from penstock.trainer.memory_plan.estimate import Method, Network, Sizes, checkpoint_copy, network
from penstock.trainer.memory_plan.model_shape import ModelShape
from penstock.trainer.memory_plan.plan_inputs import PlanInputs

_COPIES = 2  # of the weights: the newest published one, which the next patch is made against, and the one on its way
COPY = "copy of the weights"
CHECKPOINT = "copy for a checkpoint"  # of weights and optimizer states, until a thread has written it


@dataclass(frozen=True)
class Phase:
    """What a rank holds at the largest moment of a phase, in bytes."""

    name: str
    device: Sizes  # besides what is held all the time
    host: Sizes
    held: MemoryPlan

    @property
    def on_device(self) -> int:
        """Bytes of the device that trains."""
        return sum(self.held.device.values()) + sum(self.device.values())

    @property
    def total(self) -> int:
        """Bytes of device and host together: those of the process where the CPU trains."""
        return self.on_device + sum(self.held.host.values()) + sum(self.host.values())


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of the rank that needs the most."""

    inputs: PlanInputs

    @cached_property
    def _policy(self) -> Network:
        return network(self.inputs.shape, self.inputs.method, self.inputs.largest)

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
        return replace(self.inputs.critic, tied=True), method

    @cached_property
    def device(self) -> Sizes:
        """What is held all the time on the device that trains."""
        critic = self._critic.held if self._critic else {}
        found = {**self._policy.held, **{f"{name} of the critic": size for name, size in critic.items()}}
        return _present({**found, "reference": 0 if self.inputs.reference_on_host else self._reference})

    @cached_property
    def host(self) -> Sizes:
        """What is held all the time in the memory of the host."""
        copies = 1 if self.inputs.publishes_adapter else _COPIES  # of the adapters' base, which is never copied again
        kept = self._reference if self.inputs.reference_on_host else 0
        checkpoint = checkpoint_copy(self.inputs.shape, self.inputs.method)
        if self.inputs.critic is not None:
            checkpoint += checkpoint_copy(*self._critics)
        return _present({"copies of the weights": copies * self._copy, CHECKPOINT: checkpoint, "reference": kept})

    @cached_property
    def phases(self) -> list[Phase]:
        """The phases in their order."""
        return list(self._phases())

    @property
    def largest(self) -> Phase:
        """The phase that needs the most memory of device and host together."""
        return max(self.phases, key=lambda phase: phase.total)

    def peak(self, *, on_gpu: bool) -> int:
        """Return the most bytes that are needed at once: of the device, or of the process where the CPU trains."""
        return max(phase.on_device if on_gpu else phase.total for phase in self.phases)

    def _phases(self) -> Iterator[Phase]:
        yield from (Phase(name, sizes, {}, self) for name, sizes in self._policy.phases.items())
        if self._critic is not None:
            for name, sizes in self._critic.phases.items():
                yield Phase(f"critic: {name}", _present(sizes), {}, self)
        if not self.inputs.publishes_adapter:
            yield Phase(COPY, {}, {"newest copy": self._copy}, self)

    @property
    def _copy(self) -> int:
        """Bytes of a rank's share of a copy: whole buckets, the embedding in one of its own if it is larger."""
        shape, width = self.inputs.shape, self.inputs.published_width
        whole = shape.parameters * width
        buckets = -(-whole // BUCKET_BYTES)
        of_rank = -(-buckets // self.inputs.method.num_ranks)
        return max(whole * of_rank // buckets, shape.table * width)

    @property
    def _reference(self) -> int:
        return self.inputs.reference.parameters * self.inputs.method.width if self.inputs.reference else 0


def _present(sizes: Mapping[str, int]) -> Sizes:
    return {name: size for name, size in sizes.items() if size}
