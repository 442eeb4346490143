"""KL to the reference policy: estimators, the exact sum over the vocabulary, the controller; pure.

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
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

KlForm = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"]  # estimated from the sampled token
AnyKlForm = Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+", "full"]
KL_ALIASES: dict[str, KlForm] = {
    "kl": "k1", "mse": "k2", "low_var_kl": "k3", "kl+": "k1+", "mse+": "k2+", "low_var_kl+": "k3+",
}  # fmt: skip
_MAX_K3 = 10.0


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


def kl_penalty(current: Tensor, reference: Tensor, form: KlForm, *, ratio: Tensor | None = None) -> Tensor:
    """Return the KL term of the loss, [N]; with a ratio (with gradient) corrected for stale samples as DeepSeek-V3.2.

    On stale samples the plain estimate is biased; ``ratio * k3`` is not (arXiv 2512.02556; TRL's
    ``use_bias_correction_kl``).
    """
    estimate = kl_estimate(current, reference, form)
    return estimate if ratio is None else estimate * ratio


def kl_full(logits: Tensor, reference_logits: Tensor) -> Tensor:
    """Return the exact KL(current || reference) of each position, [..., V] -> [...] (ROLL's `full`).

    `CompletionScorer` calls it for some positions at a time, so that the logits of all of them never exist at once.
    """
    mine, theirs = logits.log_softmax(-1), reference_logits.log_softmax(-1)
    return (mine.exp() * (mine - theirs)).sum(-1)


@dataclass(slots=True)
class KlController:
    """The coefficient of the KL term: fixed, or adapted to a target (arXiv 1909.08593).

    ``beta <- beta (1 + clip(kl / target - 1, -0.2, 0.2) samples / horizon)``.
    """

    coefficient: float
    target: float | None = None  # None: fixed
    horizon: int = 10_000  # samples

    def update(self, kl: float, num_samples: int) -> None:
        """Adapt the coefficient to the KL measured on ``num_samples`` samples."""
        if self.target is not None:
            error = min(max(kl / self.target - 1.0, -0.2), 0.2)
            self.coefficient *= 1.0 + error * num_samples / self.horizon
