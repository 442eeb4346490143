"""The frozen reference policy: the distance to it is a penalty in the loss."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from penstock.trainer.algorithm.batch import MicroBatch
from penstock.trainer.learner.logprobs import CompletionScorer, Logits


class ReferencePolicy(Protocol):
    """What a KL term looks at."""

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Score a micro-batch; [N] float32 on the batch's device."""
        ...

    def logits(self, batch: MicroBatch) -> Logits:
        """Read a micro-batch; returns what gives the logits of some of its tokens, on the batch's device."""
        ...


class Adapted(Protocol):
    """A policy whose adapters can be switched off."""

    def logprobs_without_adapter(self, batch: MicroBatch) -> Tensor:
        """Score a micro-batch as the model that training started from would; [N] float32."""
        ...

    def logits_without_adapter(self, batch: MicroBatch) -> Logits:
        """Read a micro-batch as the model that training started from would."""
        ...


class WithoutAdapter:
    """The policy itself with its adapters switched off: the model it started from, at no memory of its own."""

    def __init__(self, policy: Adapted) -> None:
        """Look at a policy that trains adapters."""
        self._policy = policy

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Score a micro-batch; [N] float32 on the batch's device. Collective under ZeRO-3."""
        return self._policy.logprobs_without_adapter(batch).to(batch.input_ids.device)

    def logits(self, batch: MicroBatch) -> Logits:
        """Read a micro-batch; collective under ZeRO-3."""
        return self._policy.logits_without_adapter(batch)


class Reference:
    """A copy of a model that never changes and has no optimizer; every rank holds its own."""

    def __init__(self, scorer: CompletionScorer, device: torch.device) -> None:
        """Put the model on its device and freeze it; see `trainer.policy.load_reference`."""
        self._scorer = scorer.to(device).requires_grad_(False).eval()
        self._device = device

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Score a micro-batch; [N] float32 on the batch's device."""
        with torch.no_grad():
            return self._read(batch).to(batch.input_ids.device)

    def logits(self, batch: MicroBatch) -> Logits:
        """Read a micro-batch; its hidden states are held, logits exist for the tokens that are asked for."""
        with torch.no_grad():
            hidden = self._read(batch, hidden_only=True)

        def logits(start: int, end: int) -> Tensor:
            with torch.no_grad():
                return self._scorer.logits(hidden[start:end]).to(batch.input_ids.device)

        return logits

    def _read(self, batch: MicroBatch, *, hidden_only: bool = False) -> Tensor:
        moved = batch.to(self._device)
        return self._scorer(
            moved.input_ids,
            moved.predictors,
            moved.targets,
            position_ids=moved.position_ids,
            attention_mask=moved.attention_mask,
            hidden_only=hidden_only,
        )
