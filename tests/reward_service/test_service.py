"""The service as a process: packs in, rewards out, whatever dies in between."""

from __future__ import annotations

from collections.abc import Callable

from tests.groups import make_group
from tests.reward_service.conftest import Wire
from tests.reward_service.processes import Service

TEXTS = ["1 2 3", " 1 2 3\n", "3 2 1", ""]


def test_a_pack_is_scored_and_acknowledged(wire: Wire, start_service: Callable[..., Service]) -> None:
    """Every group of a pack gets one reward for each completion, by the reward its task named."""
    start_service()
    groups = [
        make_group("e0.p0.a0", size=4, texts=TEXTS),
        make_group("e0.p1.a0", size=2, texts=["#### 42", "41"], ground_truth="42", reward_name="gsm8k"),
        make_group("e0.p2.a0", size=1, texts=["\\boxed{4}"], ground_truth=4, reward_name="auto", data_source="math"),
    ]
    wire.announce(groups)
    found = wire.wait_scored("e0.p0.a0", "e0.p1.a0", "e0.p2.a0")
    assert found["e0.p0.a0"][0].rewards == (1.0, 1.0, 0.0, 0.0)
    assert found["e0.p0.a0"][0].scorer == "exact_match"
    assert found["e0.p1.a0"][0].rewards == (1.0, 0.0)
    assert found["e0.p1.a0"][0].parts == {"has_answer": (1.0, 0.0)}
    assert found["e0.p2.a0"][0].scorer == "math"
    assert len(wire.scored) == 1, "a pack that is scored as a whole is one message"
    wire.wait_idle()
    assert not wire.dead
