"""AOT: the chosen answers of a batch as a whole are to be better than the rejected ones (arXiv 2406.05882).

The loss compares sorted values, so the loss of one pair depends on the whole batch, over all micro-batches and ranks.
"""

from __future__ import annotations

from penstock.trainer.algorithm.lazy_torch import Tensor
from penstock.trainer.algorithm.preferences.interface import Pairs, Smoothing, preference_loss
from penstock.trainer.algorithm.preferences.margins import smoothed


@preference_loss(options=Smoothing, source="AOT, arXiv 2406.05882, paired", couples_pairs=True)
def aot(pairs: Pairs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """``-log sigmoid(beta d)`` of the differences d between the sorted margins of policy and reference."""
    policy = (pairs.chosen - pairs.rejected).sort().values
    reference = (pairs.reference_chosen - pairs.reference_rejected).sort().values
    return smoothed(beta * (policy - reference), label_smoothing)


@preference_loss(options=Smoothing, source="AOT, arXiv 2406.05882, unpaired", couples_pairs=True)
def aot_unpaired(pairs: Pairs, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """``-log sigmoid(beta d)`` of the differences d between the sorted log-ratios of chosen and of rejected answers."""
    delta = pairs.chosen_ratio.sort().values - pairs.rejected_ratio.sort().values
    return smoothed(beta * delta, label_smoothing)
