"""The trees of errors, as the modules that define them draw them."""

from __future__ import annotations

import textwrap

from penstock.protocol import errors as protocol_errors
from penstock.reward_service import errors as reward_errors
from penstock.rollout_service import errors as rollout_errors
from penstock.trainer import errors as trainer_errors

_TREES = {
    "protocol": protocol_errors,
    "trainer": trainer_errors,
    "rollout_service": rollout_errors,
    "reward_service": reward_errors,
}


def text() -> str:
    """Return one section for each package."""
    parts = []
    for name, module in _TREES.items():
        summary, _, rest = (module.__doc__ or "").partition("\n\n")
        body = f"\n```text\n{textwrap.dedent(rest).strip()}\n```\n" if rest else ""
        parts.append(f"## {name}\n\n{summary.strip()}\n{body}")
    return "\n".join(parts)
