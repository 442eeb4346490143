"""What a file that holds a policy loss needs: `policy_loss`, `Tokens`, `LossTerms`, `Options`.

A user-defined loss, here in a file ``my_losses.py``, chosen by ``algorithm.loss = "my_losses.py:tilted"``:

    class TiltedOptions(Options):
        tilt: float = Field(default=0.5, ge=0.0, description="Exponent of the ratio.")

    @policy_loss(options=TiltedOptions, source="arXiv 0000.00000")
    def tilted(tokens: Tokens, *, tilt: float) -> LossTerms:
        ratio = tokens.log_ratio.exp()
        return LossTerms(-tokens.advantages * ratio**tilt, ratio.detach(), none_of(ratio), none_of(ratio))
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.trainer.algorithm.losses.tokens import MAX_LOG_RATIO, LossTerms, Sequences, Tokens, none_of
from penstock.trainer.algorithm.parts import (
    GRPO,
    ClipRange,
    DualClip,
    DualClipRange,
    Options,
    OptionsT_co,
    Part,
    WeightCap,
    decorator,
)

__all__ = [
    "GRPO", "MAX_LOG_RATIO", "ClipRange", "DualClip", "DualClipRange", "Loss", "LossTerms", "Options", "Sequences", "Tokens",
    "WeightCap", "none_of", "policy_loss",
]  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True)
class Loss(Part[OptionsT_co]):
    """A policy loss: ``fn(tokens, **options)`` returns one value per sampled token."""

    uses_ratio: bool = True  # of current to anchor policy; False: a correction may weigh its tokens


policy_loss = decorator(Loss)
"""Make a function a policy loss of the function's name; the arguments are the fields of `Loss`."""
