"""Events of a run as its trainer publishes them."""

from __future__ import annotations

from penstock.protocol.facts import RunEvent


def step(number: int, *, loss: float = 0.5) -> RunEvent:
    """An optimizer step with figures, nested figures, texts and a histogram."""
    data = {
        "step": number, "version": number, "loss": loss, "reward_mean": number / 100, "lr": None, "groups_digest": "ab",
        "staleness_tokens": {"0": 10, "1": 3}, "groups": {"issued": 8 * number, "dropped": {"stale": 1}},
    }  # fmt: skip
    return RunEvent(run_id="r", source="trainer", kind="step", at=1000.0 + number, data=data)


def evaluation(number: int, accuracy: float) -> RunEvent:
    """An evaluation of the version that a step made; later steps may come before it."""
    data = {"split": "eval", "step": number, "version": number, "accuracy": accuracy, "pass_at": {"1": accuracy}}
    return RunEvent(run_id="r", source="trainer", kind="eval", at=1000.0 + number, data=data)


def finished() -> RunEvent:
    data = {"text": "finished", "finished": True}
    return RunEvent(run_id="r", source="trainer", kind="state", at=9000.0, data=data)
