"""Sample the next token of every running sequence, and return its logprob.

The reported logprob is log softmax(logits / temperature) over the whole vocabulary in float32, before
top-p and top-k: the behaviour policy of a rollout that uses neither. Greedy sequences
(temperature below 1e-6) report it at temperature 1. This is SGLang's definition.

Randomness is counter-based: the random number for token i of a sequence is a function of (seed, i) only
(SplitMix64, Steele et al., OOPSLA 2014), so a sequence is reproducible whatever else runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

GREEDY_BELOW = 1e-6

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class Choice:
    uniforms: torch.Tensor | None  # [n] float64 in [0, 1); None: every row is greedy
    temperatures: torch.Tensor | None  # [n] float32; None: all 1
    greedy: torch.Tensor | None  # [n] bool
    top_p: torch.Tensor | None  # [n] float32
    top_k: torch.Tensor | None  # [n] int64


def uniforms(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Return one float64 in [0, 1) per row from uint64 ``seeds`` and int64 token ``counters``."""
    start = _mix(seeds)
    with np.errstate(over="ignore"):
        state = start + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(state) >> np.uint64(11)) * 2.0**-53


def sample(logits: torch.Tensor, choice: Choice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [n] int64 and their logprobs [n] float32 for ``logits`` [n, vocab] float32."""
    scaled = logits if choice.temperatures is None else logits / choice.temperatures.unsqueeze(1)
    logprobs = scaled.log_softmax(-1)
    if choice.uniforms is None:
        tokens = logprobs.argmax(-1)
    else:
        probabilities = _filtered(logprobs.exp(), choice)
        # float64: summing a large vocabulary in float32 would change the probabilities of rare tokens
        cumulative = probabilities.cumsum(-1, dtype=torch.float64)
        targets = choice.uniforms.unsqueeze(1) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
        tokens.clamp_(max=logits.shape[1] - 1)
        if choice.greedy is not None:
            tokens = torch.where(choice.greedy, logprobs.argmax(-1), tokens)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _filtered(probabilities: torch.Tensor, choice: Choice) -> torch.Tensor:
    """Zero what top-k and then top-p exclude, in SGLang's order; the caller renormalises."""
    if choice.top_p is None and choice.top_k is None:
        return probabilities
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(ordered.shape[1], device=ordered.device)
    if choice.top_k is not None:
        ordered = ordered.masked_fill(ranks >= choice.top_k.unsqueeze(1), 0.0)
    if choice.top_p is not None:
        before = ordered.cumsum(-1, dtype=torch.float64) - ordered
        ordered = ordered.masked_fill(before > choice.top_p.unsqueeze(1), 0.0)
    return torch.zeros_like(probabilities).scatter_(1, order, ordered)


def _mix(value: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        value = (value ^ (value >> np.uint64(30))) * _MIX1
        value = (value ^ (value >> np.uint64(27))) * _MIX2
    return value ^ (value >> np.uint64(31))
