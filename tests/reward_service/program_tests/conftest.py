"""A slot in the sandbox that works here, and programs run in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.reward_service.program_tests import tests_of_row
from penstock.reward_service.program_tests.grade import Graded, Slot, grade
from penstock.sandbox import canary
from penstock.sandbox.zygote_command import Launch
from penstock.sandbox.zygote_process import Limits, Zygote

LIMITS = Limits(cpu_s=1.0, memory_bytes=256 * 1024**2)


def run(slot: Slot, program: str, tests: Any, extra: dict[str, Any] | None = None) -> Graded:
    return grade(slot, program, tests_of_row.read(tests, extra or {}), LIMITS, stop_early=False)


def descendants(pid: int) -> list[int]:
    pids: list[int] = []
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except FileNotFoundError:
        return pids
    for child in children:
        pids += [child, *descendants(child)]
    return pids


@pytest.fixture(scope="module")
def slot() -> Iterator[Slot]:
    found = canary.probe("auto")
    assert found.kind is not None, found
    launch = Launch(found.kind)
    made = Slot(Zygote(launch, 8), Zygote(launch, 9))
    yield made
    made.kill()
