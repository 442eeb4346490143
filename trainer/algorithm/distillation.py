"""On-policy distillation: what a teacher's log-probabilities of sampled tokens add to the loss; pure.

With π the policy, T the teacher, μ the policy that sampled:

- ``reverse`` minimises KL(π ‖ T) at every sampled position. Its gradient is E_π[(log π − log T) ∇log π], so each sampled token has the
  advantage log T − log π, detached, and the loss's ratio π/μ corrects for stale samples
  (thinkingmachines.ai/blog/on-policy-distillation; arXiv 2306.13649 with β = 1 and the sampled token for the sum).
- ``forward`` minimises KL(T ‖ π) at every position that the policy reached, over the teacher's k likeliest tokens and one event for all
  others (arXiv 2306.13649 with β → 0 and λ = 1): Σ_k T_v (log T_v − log π_v) + t (log t − log p) with t and p what T and π leave for the
  others. Without the last term the policy would be drawn to none of the others (arXiv 2608.14728).

Differs from the blog in one thing: there log μ stands for log π, which is the same on samples of the policy itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.trainer.algorithm.algorithm_settings import DistillForm
from penstock.trainer.algorithm.batch import MicroBatch

_LEAST_REST = 1e-6  # what float32 leaves of 1 minus a sum of probabilities may be rounding


@dataclass(frozen=True, slots=True)
class DistillTerm:
    """The KL to the teacher, as the objective adds it."""

    form: DistillForm
    coefficient: float
    clip: float | None = None  # bound of |log T − log π| in an advantage

    def advantages(self, held: Tensor, batch: MicroBatch) -> Tensor | float:
        """Return what is added to the advantages of tokens with the log-probabilities ``held`` [N], without gradient."""
        if self.form != "reverse":
            return 0.0
        gap = of_teacher(batch) - held
        if self.clip is not None:
            gap = gap.clamp(-self.clip, self.clip)
        return self.coefficient * gap


def of_teacher(batch: MicroBatch) -> Tensor:
    """Return the teacher's log-probabilities of the sampled tokens, [N]; raises ValueError where there are none."""
    if batch.teacher_logprobs is not None:
        return batch.teacher_logprobs
    if len(batch.targets):
        raise ValueError("the objective needs a teacher's log-probabilities, and the micro-batch carries none")
    return batch.behaviour_logprobs  # of no token


def top_of_teacher(batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return the teacher's likeliest tokens and their log-probabilities, both [N, k]; raises ValueError where there are none."""
    if batch.teacher_top_ids is not None and batch.teacher_top_logprobs is not None and batch.teacher_top_ids.shape[1]:
        return batch.teacher_top_ids, batch.teacher_top_logprobs
    if len(batch.targets):
        raise ValueError("the objective needs a teacher's likeliest tokens, and the micro-batch carries none")
    return batch.targets.reshape(0, 1), batch.behaviour_logprobs.reshape(0, 1)


def kl_from_teacher(logits: Tensor, top_ids: Tensor, top_logprobs: Tensor) -> Tensor:
    """Return KL(teacher ‖ current) where the tokens outside ``top_ids`` are one event, [n] with gradient.

    Args:
        logits: [n, V] of the current policy.
        top_ids: [n, k] int64, the teacher's likeliest tokens.
        top_logprobs: [n, k] the teacher's log-probabilities of them.
    """
    mine = logits.log_softmax(-1)
    own = mine.gather(-1, top_ids)
    chances = top_logprobs.exp()
    inside = (chances * (top_logprobs - own)).sum(-1)
    rest = 1.0 - chances.sum(-1)
    has_rest = rest > _LEAST_REST if top_ids.shape[-1] < logits.shape[-1] else torch.zeros_like(rest, dtype=torch.bool)
    # Where there is no rest nothing is masked, since the gradient of a sum over nothing is not a number.
    hidden = torch.where(has_rest.unsqueeze(-1), float("-inf"), own.detach())
    my_rest = mine.scatter(-1, top_ids, hidden).logsumexp(-1)
    return inside + torch.where(has_rest, rest * (rest.clamp(min=_LEAST_REST).log() - my_rest), 0.0)
