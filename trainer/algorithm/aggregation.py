"""Aggregation of a loss per token to one number: the weights of tokens and sequences; pure.

A mode is a weight per sequence, and the loss is ``sum over tokens of weight(sequence) * loss(token)``.
The denominators count the **whole** batch, over all micro-batches and all ranks, so that splitting a
batch differently changes nothing, neither the loss nor its gradient.

| mode                      | weight of each token of sequence i | where it comes from               |
|---------------------------|------------------------------------|-----------------------------------|
| `token-mean`              | 1 / N                              | DAPO, arXiv 2503.14476            |
| `seq-mean-token-mean`     | 1 / (B · length_i)                 | GRPO as published                 |
| `seq-mean-token-sum`      | 1 / B                              | REINFORCE over sequences          |
| `seq-mean-token-sum-norm` | 1 / (B · L)                        | Dr. GRPO, arXiv 2503.20783        |
| `prompt-mean`             | 1 / (P · tokens of its prompt)     | ScaleRL, arXiv 2510.13786         |
| `token-sum`               | 1                                  | a sum; the learning rate divides  |

N: sampled tokens of the batch. B: sequences with at least one sampled token. P: prompts with at
least one sampled token. L: a constant, the longest completion that the run allows; with verl's
default, the padded length of the micro-batch, the loss would depend on the padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Aggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean", "token-sum"
]


@dataclass(frozen=True, slots=True)
class Denominators:
    num_tokens: int  # sampled tokens
    num_sequences: int  # sequences with at least one sampled token
    max_completion_tokens: int  # the constant L
    num_prompts: int = 1  # prompts with at least one sampled token

    def __post_init__(self) -> None:
        if min(self.num_tokens, self.num_sequences, self.max_completion_tokens, self.num_prompts) < 1:
            raise ValueError(f"every denominator must be at least 1, got {self}")


def sequence_weight(
    mode: Aggregation, num_tokens: int, batch: Denominators, *, prompt_tokens: int | None = None
) -> float:
    match mode:
        case "token-mean":
            return 1.0 / batch.num_tokens
        case "seq-mean-token-mean":
            return 1.0 / (batch.num_sequences * num_tokens)
        case "seq-mean-token-sum":
            return 1.0 / batch.num_sequences
        case "seq-mean-token-sum-norm":
            return 1.0 / (batch.num_sequences * batch.max_completion_tokens)
        case "prompt-mean":
            if prompt_tokens is None:
                raise ValueError("prompt-mean needs the number of tokens of the sequence's prompt")
            return 1.0 / (batch.num_prompts * prompt_tokens)
        case "token-sum":
            return 1.0
