"""`make gpu-check` works at toy size on the CPU, so that it runs where a GPU is at hand for minutes."""

from __future__ import annotations

import sys

import pytest
import torch
from tests.rigs import gpu_check


@pytest.mark.parametrize(
    ("part", "figures"),
    [
        ("publish", {"fresh", "reused", "pinned", "compared on the device", "compared on the host"}),
        ("segments", {"losses", "norms", "tokens_per_s", "mfu", "peak_gb", "planned_gb", "kernels"}),
    ],
)
def test_a_part_gives_its_figures(part: str, figures: set[str]) -> None:
    found = gpu_check.measure(part, toy=True)
    assert found.keys() == {*figures, "wall_s"}, found


def test_each_head_size_has_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "HEADS", ((128, 2),))
    assert gpu_check.Check(toy=True).attention()["128 x 2"]["backend"] == "cpu-flash"


def test_a_late_part_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts after it run, and the exit code says it."""
    monkeypatch.setitem(gpu_check.DEADLINES_S, "publish", 0.001)
    assert "no result within" in gpu_check.measure("publish", toy=True)["failed"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert gpu_check.main() == 2
    assert "--toy" in capsys.readouterr().err
