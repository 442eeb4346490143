"""The plain policy gradient."""

from __future__ import annotations

from penstock.trainer.algorithm.losses.interface import LossTerms, Tokens, none_of, policy_loss


@policy_loss(
    source="Williams 1992",
    presets={"reinforce": {"advantage": "reinforce", "loss": "reinforce", "aggregation": "seq-mean-token-sum"}},
    uses_ratio=False,
)
def reinforce(tokens: Tokens) -> LossTerms:
    """Return ``L = -A log p`` (also GPG's loss, arXiv 2504.02546): for fresh samples only."""
    ratio = tokens.log_ratio.detach().exp()
    return LossTerms(-tokens.advantages * tokens.current, ratio, none_of(ratio), none_of(ratio))
