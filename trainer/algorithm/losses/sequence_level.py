"""Losses whose ratio belongs to a whole sequence: GSPO, GMPO, and the sequence products; pure.

A product of T token ratios spreads as exp(sigma sqrt(T)): whatever bounds it becomes a filter on the
length. The geometric mean spreads as exp(sigma / sqrt(T)) and holds for answers of any length.
"""

from __future__ import annotations

import math

import torch

from penstock.trainer.algorithm.losses.clipped import clip_terms
from penstock.trainer.algorithm.losses.tokens import MAX_LOG_RATIO, LossTerms, Tokens, none_of


def gspo(
    tokens: Tokens, *, clip_low: float, clip_high: float, dual_clip: float | None = None, by_length: bool = False
) -> LossTerms:
    """Group sequence policy optimisation (arXiv 2507.18071; with ``by_length``: LUSPO, arXiv 2602.05261).

    ``s = exp(mean over the sequence of log r)`` and ``L = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)``
    for every token of the sequence; the paper averages over sequences and clips at 3e-4 / 4e-4. LUSPO
    multiplies the loss of a sequence by its length. Same as verl `gspo`, TRL
    ``importance_sampling_level="sequence"``, OpenRLHF `gspo`. A ``dual_clip`` bounds s where A < 0.
    """
    ratio = tokens.sequences.spread(tokens.sequence_log_ratio.exp())
    terms = clip_terms(ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    if not by_length:
        return terms
    lengths = tokens.sequences.spread(tokens.sequences.lengths(terms.loss))
    return LossTerms(terms.loss * lengths, terms.ratio, terms.clipped, terms.dual_clipped)


def gspo_token(tokens: Tokens, *, clip_low: float, clip_high: float, dual_clip: float | None = None) -> LossTerms:
    """GSPO whose advantages may differ by token: the sequence's ratio, the token's gradient (2507.18071, eq. 13).

    ``s_t = exp(log p_t - sg(log p_t) + sg(log s))``. Equal to `gspo` where the advantage is one per sequence.
    """
    held = tokens.sequences.spread(tokens.sequence_log_ratio.detach())
    ratio = (tokens.current - tokens.current.detach() + held).exp()
    return clip_terms(ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def gmpo(tokens: Tokens, *, clip_low: float, clip_high: float) -> LossTerms:
    """Geometric-mean policy optimisation (arXiv 2507.20673).

    Token log-ratios are clipped to [-clip_low, clip_high] on the side their advantage pushes, then averaged:
    ``L = -A exp(mean of the clipped log r)``, one value per sequence, mean over sequences.
    """
    sign = tokens.advantages.sign()
    log_ratio = tokens.log_ratio
    bounded = log_ratio.clamp(-clip_low, clip_high)
    held = sign * torch.minimum(sign * log_ratio, sign * bounded)
    ratio = tokens.sequences.spread(tokens.sequences.mean(held).exp())
    advantages = tokens.sequences.spread(tokens.sequences.mean(tokens.advantages))
    clipped = (sign * log_ratio > sign * bounded).detach()
    return LossTerms(-advantages * ratio, ratio.detach(), clipped, none_of(clipped))


def product_clip(tokens: Tokens, *, clip_low: float, clip_high: float) -> LossTerms:
    """PPO clip on the product of a sequence's ratios, as TRL's RLOO trainer has it.

    One loss per sequence: spread over its tokens so that `seq-mean-token-mean` gives the mean over sequences.
    """
    log_ratio = tokens.sequences.sum(tokens.log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = tokens.sequences.spread(log_ratio.exp())
    return clip_terms(ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=None)


def topr(tokens: Tokens, *, low: float = 0.0, high: float = 1.0) -> LossTerms:
    """Tapered off-policy REINFORCE (arXiv 2503.14286): successes weigh 1, failures at most 1.

    ``L = -w A log p`` with w = 1 where A >= 0 and the detached product of the sequence's ratios, limited to
    [low, high], where A < 0. Mean over sequences of sums over tokens. ROLL calls it `use_topr_loss`
    (`tpro` in an old guide) and takes the ratio of each token (`topr_token`).
    """
    product = tokens.sequences.sum(tokens.log_ratio.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    ratio = tokens.sequences.spread(product)
    weight = torch.where(tokens.advantages < 0, ratio.clamp(low, high), torch.ones_like(ratio))
    capped = (tokens.advantages < 0) & (ratio > high)
    return LossTerms(-weight * tokens.advantages * tokens.current, ratio, none_of(capped), capped)


def vespo(
    tokens: Tokens, *, k_positive: float, lambda_positive: float, k_negative: float, lambda_negative: float
) -> LossTerms:
    """A gamma-shaped weight on the sequence product (VESPO, arXiv 2602.10693).

    ``L = -phi(w) A log p`` with ``phi(w) = w^k exp(lambda (1 - w))``, so that phi(1) = 1; detached.
    """
    log_weight = tokens.sequences.sum(tokens.log_ratio.detach()).clamp(math.log(1e-8), MAX_LOG_RATIO)
    log_weight = tokens.sequences.spread(log_weight)
    weight = log_weight.exp()
    rises = tokens.advantages >= 0
    power = torch.where(rises, k_positive, k_negative).to(weight.dtype)
    decay = torch.where(rises, lambda_positive, lambda_negative).to(weight.dtype)
    phi = (decay + power * log_weight - decay * weight).exp()
    return LossTerms(-phi * tokens.advantages * tokens.current, weight, none_of(weight), none_of(weight))
