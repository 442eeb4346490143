"""`python -m penstock.trainer.learner.attention`: which backend computes attention on this machine, for the usual heads.

Prints one line for each kind of head: its size, the query heads for each key head, the dtype and the backend that works and
agrees with the definition. Exit code 1 if one has none. `penstock doctor` runs it where a GPU is.
"""

from __future__ import annotations

import logging
import sys

import structlog
import torch

from penstock.trainer.errors import NoAttentionKernel
from penstock.trainer.learner.attention import backends

HEADS = (
    (64, 2),
    (80, 1),
    (96, 1),
    (128, 1),
    (128, 4),
    (128, 8),
    (192, 1),
    (256, 2),
)  # dimensions, and query heads a key head
_TOKENS = 16_384  # the default of trainer.micro_batch_tokens


def main() -> int:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    failed = False
    for size, ratio in HEADS:
        query = torch.empty(1, 2 * ratio, 1, size, device=device, dtype=torch.bfloat16)
        key = torch.empty(1, 2, 1, size, device=device, dtype=torch.bfloat16)
        try:
            backend = backends.choose(query, key, key, _TOKENS).name
        except NoAttentionKernel as err:
            backend, failed = f"none: {err}", True
        sys.stdout.write(
            f"{size:>4} dimensions, {ratio} query heads a key head, bfloat16 on {device.type}: {backend}\n"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
