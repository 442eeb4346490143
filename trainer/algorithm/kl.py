"""KL to the reference policy: estimators, the exact sum over the vocabulary, the controller; and the entropy; pure.

With x = log p - log p_ref of a sampled token (joschu.net/blog/kl-approx.html):

| form       | value               | as a loss on samples of the current policy                         |
|------------|---------------------|--------------------------------------------------------------------|
| `k1`       | x                   | its expected gradient is 0: only useful inside the reward          |
| `abs`      | |x|                 | biased                                                             |
| `k2`       | x^2 / 2             | right gradient                                                     |
| `k3`       | exp(-x) - 1 + x     | positive, low variance; its gradient is that of the reverse KL     |
| `k1+`...   | as without the plus | the gradient of `k2` (straight through)                            |
| `full`     | sum over the vocabulary of p (log p - log p_ref) | exact at every position, no noise from the sample |

verl, ROLL and others also say `kl` (k1), `mse` (k2) and `low_var_kl` (k3).

On-policy distillation is a KL to a teacher. With π the policy, T the teacher, μ the policy that sampled:

- ``reverse`` minimises KL(π ‖ T) at every sampled position. Its gradient is E_π[(log π − log T) ∇log π], so each sampled token has the
  advantage log T − log π, detached, and the loss's ratio π/μ corrects for stale samples
  (thinkingmachines.ai/blog/on-policy-distillation, where log μ stands for log π; arXiv 2306.13649 with β = 1 and the sampled token for the sum).
- ``forward`` minimises KL(T ‖ π) at every position that the policy reached, over the teacher's k likeliest tokens and one event for all
  others (arXiv 2306.13649 with β → 0 and λ = 1): Σ_k T_v (log T_v − log π_v) + t (log t − log p) with t and p what T and π leave for the
  others. Without the last term the policy would be drawn to none of the others (arXiv 2608.14728).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from penstock.trainer.algorithm.algorithm_settings import DistillForm
from penstock.trainer.algorithm.batch import MicroBatch

KlForm = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"]  # estimated from the sampled token
AnyKlForm = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+", "full"]
_MAX_K3 = 10.0
_LEAST_REST = 1e-6  # what float32 leaves of 1 minus a sum of probabilities may be rounding


def kl_estimate(current: Tensor, reference: Tensor, form: KlForm) -> Tensor:
    """Estimate KL(current || reference) from sampled tokens, [N] with gradient; k3 is limited to ±10."""
    gap = current - reference
    if form.endswith("+"):
        value = kl_estimate(current.detach(), reference, form.removesuffix("+"))  # type: ignore[arg-type]
        square = 0.5 * gap.square()
        return square - square.detach() + value
    match form:
        case "k1":
            return gap
        case "abs":
            return gap.abs()
        case "k2":
            return 0.5 * gap.square()
        case _:
            gap = gap.clamp(-20.0, 20.0)
            return ((-gap).exp() - 1.0 + gap).clamp(-_MAX_K3, _MAX_K3)


def kl_full(logits: Tensor, reference_logits: Tensor) -> Tensor:
    """Return the exact KL(current || reference) of each position, [..., V] -> [...] (ROLL's `full`).

    `CompletionScorer` calls it for some positions at a time, so that the logits of all of them never exist at once.
    """
    mine, theirs = logits.log_softmax(-1), reference_logits.log_softmax(-1)
    return (mine.exp() * (mine - theirs)).sum(-1)


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy of each position's distribution in nats, [..., V] -> [...]; computed in float32 at least."""
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


@dataclass(slots=True)
class KlController:
    """The coefficient of the KL term: fixed, or adapted to a target (arXiv 1909.08593).

    ``beta <- beta (1 + clip(kl / target - 1, -0.2, 0.2) samples / horizon)``.
    """

    coefficient: float
    target: float | None = None  # None: fixed
    horizon: int = 10_000  # samples

    def update(self, kl: float, num_samples: int) -> None:
        if self.target is not None:
            error = min(max(kl / self.target - 1.0, -0.2), 0.2)
            self.coefficient *= 1.0 + error * num_samples / self.horizon


@dataclass(frozen=True, slots=True)
class DistillTerm:
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
    if batch.teacher_logprobs is not None:
        return batch.teacher_logprobs
    if len(batch.targets):
        raise ValueError("the objective needs a teacher's log-probabilities, and the micro-batch carries none")
    return batch.behaviour_logprobs  # of no token


def top_of_teacher(batch: MicroBatch) -> tuple[Tensor, Tensor]:
    if batch.teacher_top_ids is not None and batch.teacher_top_logprobs is not None and batch.teacher_top_ids.shape[1]:
        return batch.teacher_top_ids, batch.teacher_top_logprobs
    if len(batch.targets):
        raise ValueError("the objective needs a teacher's likeliest tokens, and the micro-batch carries none")
    return batch.targets.reshape(0, 1), batch.behaviour_logprobs.reshape(0, 1)


def kl_from_teacher(logits: Tensor, top_ids: Tensor, top_logprobs: Tensor) -> Tensor:
    """Return KL(teacher ‖ current), [n], of ``top_ids`` [n, k] and one event for all others; ``logits`` [n, V]."""
    mine = logits.log_softmax(-1)
    current_logprobs = mine.gather(-1, top_ids)
    chances = top_logprobs.exp()
    inside = (chances * (top_logprobs - current_logprobs)).sum(-1)
    rest = 1.0 - chances.sum(-1)
    has_rest = rest > _LEAST_REST if top_ids.shape[-1] < logits.shape[-1] else torch.zeros_like(rest, dtype=torch.bool)
    # Where there is no rest nothing is masked, since the gradient of a sum over nothing is not a number.
    hidden = torch.where(has_rest.unsqueeze(-1), float("-inf"), current_logprobs.detach())
    my_rest = mine.scatter(-1, top_ids, hidden).logsumexp(-1)
    return inside + torch.where(has_rest, rest * (rest.clamp(min=_LEAST_REST).log() - my_rest), 0.0)
