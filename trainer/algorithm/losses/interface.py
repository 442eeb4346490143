"""What a file that holds a policy loss needs: `policy_loss`, `Tokens`, `LossTerms`, `Options`.

A loss of your own, here in a file ``my_losses.py``, chosen by ``algorithm.loss = "my_losses.py:tilted"``:

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
from penstock.trainer.algorithm.parts import ClipRange, DualClip, Options, OptionsT_co, Part, WeightCap

__all__ = [
    "MAX_LOG_RATIO",
    "ClipRange",
    "DualClip",
    "Loss",
    "LossTerms",
    "Options",
    "Sequences",
    "Tokens",
    "WeightCap",
    "none_of",
    "policy_loss",
]


@dataclass(frozen=True, eq=False, kw_only=True)
class Loss(Part[OptionsT_co]):
    """A policy loss: ``fn(tokens, **options)`` returns one value per sampled token."""

    uses_ratio: bool = True  # False: no importance ratio in it, so that a correction may weigh its tokens


policy_loss = Loss.declare
