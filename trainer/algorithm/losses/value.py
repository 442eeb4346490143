"""The critic's loss of PPO; pure."""

from __future__ import annotations

from typing import Literal

from penstock.trainer.algorithm.lazy_torch import Tensor, torch


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    clip: float | None,
    form: Literal["mse", "huber"] = "mse",
    huber_delta: float = 10.0,
) -> Tensor:
    """Return the loss of clipped value regression, one per token (code of arXiv 1707.06347; verl, OpenRLHF, AReaL).

    ``L = max(d(v, R), d(clip(v, v_old - clip, v_old + clip), R))`` with d = half the square, or Huber's loss.

    Args:
        values: [N] with gradient.
        old_values: [N] the critic's values before it learned from the batch.
        returns: [N] targets.
        clip: How far a value may move; None: not limited.
        form: Half the squared error, or Huber's loss.
        huber_delta: Error above which Huber's loss is linear.

    Returns:
        [N] losses.
    """

    def distance(prediction: Tensor) -> Tensor:
        if form == "mse":
            return 0.5 * (prediction - returns).square()
        return torch.nn.functional.huber_loss(prediction, returns, reduction="none", delta=huber_delta)

    free = distance(values)
    if clip is None:
        return free
    return torch.maximum(free, distance(values.clamp(old_values - clip, old_values + clip)))
