"""The frozen reference policy, from which the KL in loss or reward is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from penstock.trainer.algorithm.batch import MicroBatch
from penstock.trainer.algorithm.kl import of_teacher
from penstock.trainer.learner.host_states import HostStates
from penstock.trainer.learner.logprobs import CompletionScorer, HiddenStates, read_batch

if TYPE_CHECKING:
    from penstock.trainer.learner.policy import Policy


def park(module: nn.Module, device: torch.device) -> None:
    """Park a module: its parameters stay in host memory, pinned for a GPU, and its buffers go to the device.

    Every submodule that owns parameters gets them on the device when it is called, and its copies are freed when it
    returns. So the device holds one layer at a time, and each call transfers all weights once. A submodule must be
    called to be used: reading its weight from outside gives the one in host memory. The module must not be trained.
    """
    for part in module.modules():
        part._buffers.update({name: None if b is None else b.to(device) for name, b in part._buffers.items()})
        if any(parameter is not None for parameter in part._parameters.values()):
            hooks = _Hooks(part, device)
            part.register_forward_pre_hook(hooks.fetch)
            part.register_forward_hook(hooks.release, always_call=True)


class _Hooks:
    def __init__(self, part: nn.Module, device: torch.device) -> None:
        self._part, self._device = part, device
        self._parked = {name: weight for name, weight in part._parameters.items() if weight is not None}
        for parameter in self._parked.values():
            host_copy = parameter.data.to("cpu")
            needs_pin = device.type == "cuda" and not host_copy.is_pinned()
            parameter.data = host_copy.pin_memory() if needs_pin else host_copy

    def fetch(self, *_: object) -> None:
        for name, parked in self._parked.items():
            # In the order of the device's stream: the layer's kernels wait for it, and what gets this memory next.
            there = parked.data.to(self._device, non_blocking=True)
            self._part._parameters[name] = nn.Parameter(there, requires_grad=False)

    def release(self, *_: object) -> None:
        self._part._parameters.update(self._parked)


class ReferencePolicy(Protocol):
    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Score a micro-batch; [N] float32, on the device that computed it."""
        ...

    def hidden_states(self, batch: MicroBatch) -> HiddenStates: ...


class RemoteReference:
    """A model that a worker asked for its log-probabilities: the packs store them, and no model is loaded."""

    def logprobs(self, batch: MicroBatch) -> Tensor:
        return of_teacher(batch)

    def hidden_states(self, batch: MicroBatch) -> HiddenStates:
        """Raise ValueError: packs store no whole distributions. The settings refuse what needs them."""
        raise ValueError("whole distributions of a remote reference are not stored; use another form of the KL")


class WithoutAdapter:
    """The policy with its adapters switched off: the model that it started from, without extra memory."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def logprobs(self, batch: MicroBatch) -> Tensor:
        return self._policy.logprobs_without_adapter(batch)

    def hidden_states(self, batch: MicroBatch) -> HiddenStates:
        return self._policy.hidden_states_without_adapter(batch)


class Reference:
    """A frozen model without optimizer; every rank has a copy, or a part of it, which makes every method collective."""

    def __init__(
        self,
        scorer: CompletionScorer,
        device: torch.device,
        *,
        parked: bool = False,
        run: Callable[..., Any] | None = None,
    ) -> None:
        """``run`` computes a scorer of which this rank has a part; None: this rank has all of it."""
        self._scorer = scorer.requires_grad_(False).eval()
        self._device = device
        self._run = run or scorer
        if parked:
            park(self._scorer, device)
        elif run is None:
            self._scorer.to(device)
        self._host = HostStates(device)

    def leave_device(self) -> int:
        return self._host.move_out(self._scorer)

    def enter_device(self) -> None:
        self._host.move_back()

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> Tensor:
        return read_batch(self._run, batch.to(self._device))

    @torch.no_grad()
    def hidden_states(self, batch: MicroBatch) -> HiddenStates:
        return HiddenStates(read_batch(self._run, batch.to(self._device), hidden_only=True), self._scorer)
