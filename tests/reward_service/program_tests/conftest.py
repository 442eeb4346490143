"""A slot in the sandbox that works here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.reward_service.program_tests.grade import Slot
from penstock.sandbox import canary
from penstock.sandbox.zygote_command import Launch
from penstock.sandbox.zygote_process import Limits, Zygote

LIMITS = Limits(cpu_s=1.0, memory_bytes=256 * 1024**2)


@pytest.fixture(scope="module")
def slot() -> Iterator[Slot]:
    found = canary.probe("auto")
    assert found.kind is not None, found
    launch = Launch(found.kind)
    made = Slot(Zygote(launch, 8), Zygote(launch, 9))
    yield made
    made.kill()
