"""Refusals of workers are bounded: a login of a worker may refuse anything in any name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from penstock.protocol.facts import WeightsRefused
from penstock.protocol.groups import BlobRef
from penstock.trainer.publishing.publish import Refusals


def refused(sha256: str, worker: str = "w0") -> WeightsRefused:
    manifest = BlobRef(key="k", size_bytes=1, sha256=sha256)
    return WeightsRefused(run_id="r", worker_id=worker, version=1, manifest=manifest, serving=None, reason="")


def newest(number: int, kind: str = "patch") -> Any:
    manifest = SimpleNamespace(version=number, kind=kind)
    return cast(
        Any, SimpleNamespace(reference=BlobRef(key="k", size_bytes=1, sha256=f"{number:064x}"), manifest=manifest)
    )


def test_what_is_remembered_of_refusals_is_bounded() -> None:
    """Thousands of invented manifests and workers leave a few entries, and those of the newest version stay."""
    refusals, now = Refusals(), newest(7)
    assert refusals.add(refused(f"{7:064x}"), now)
    for number in range(1000):
        assert not refusals.add(refused(f"{1000 + number:064x}"), now)
    assert refusals.need_republication(now)
    for number in range(1000):
        refusals.add(refused(f"{7:064x}", f"w{number}"), now)
    assert len(refusals._refused) <= 64
    assert sum(map(len, refusals._refused.values())) <= 128


def test_republications_have_a_budget_that_refills() -> None:
    """However many versions are refused, six are published again at once, and one more every ten minutes."""
    clock = [0.0]
    refusals = Refusals(lambda: clock[0])

    def answer(version: int) -> bool:
        refusals.add(refused(f"{version:064x}"), newest(version))
        if not refusals.need_republication(newest(version)):
            return False
        refusals.clear(newest(version))
        return True

    assert [answer(version) for version in range(1, 9)] == [True] * 6 + [False] * 2
    clock[0] = 599.0
    assert not refusals.need_republication(newest(8))
    clock[0] = 601.0
    assert refusals.need_republication(newest(8))
    assert answer(8)
    assert not answer(9)
    clock[0] = 1e6
    assert [answer(version) for version in range(9, 17)] == [True] * 6 + [False] * 2
