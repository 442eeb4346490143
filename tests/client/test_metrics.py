"""The figures of a run as arrays."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.client import metrics
from penstock.protocol.errors import PenstockError

ROWS = [
    {"kind": "step", "step": 2, "loss": 0.5, "groups": {"trained": 8}, "note": "x"},
    {"kind": "step", "step": 1, "loss": 1.0, "reward_mean": 0.25, "skipped": None, "on": True},
    {"kind": "step", "step": 2, "loss": 0.75, "groups": {"trained": 9, "dropped": {"stale": 1}}},
    {"kind": "step", "step": 3, "loss": 10**400},
]


def test_each_figure_is_an_array_over_the_steps() -> None:
    """Steps are in order and whole numbers; a repeated step counts with its last row; what is missing is nan, not 0."""
    found = metrics.metrics_of_rows(ROWS)
    assert found["step"].tolist() == [1, 2, 3]
    assert found["step"].dtype == np.int64
    np.testing.assert_array_equal(found["loss"], [1.0, 0.75, np.nan])
    np.testing.assert_array_equal(found["reward_mean"], [0.25, np.nan, np.nan])
    np.testing.assert_array_equal(found["groups.trained"], [np.nan, 9.0, np.nan])
    np.testing.assert_array_equal(found["groups.dropped.stale"], [np.nan, 1.0, np.nan])
    assert not found.keys() & {"note", "kind", "skipped", "groups"}


def test_a_run_without_steps_has_an_empty_array() -> None:
    assert metrics.metrics_of_rows([])["step"].tolist() == []


def test_evaluations_of_one_step_are_told_apart_by_their_source() -> None:
    """Two held-out sources of a step are two elements, and their names an array of texts."""
    rows = [
        {"step": 5, "split": "eval", "name": name, "reward_mean": value} for name, value in (("a", 0.1), ("b", 0.2))
    ]
    found = metrics.metrics_of_rows(rows)
    assert found["name"].tolist() == ["a", "b"]
    assert found["reward_mean"].tolist() == [0.1, 0.2]


def test_a_data_frame_needs_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pandas the error says how to install it; with it the frame's index is the step."""
    found = metrics.metrics_of_rows(ROWS)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(PenstockError, match="pip install pandas"):
        found.to_pandas()

    class Frame(dict[str, Any]):
        def set_index(self, name: str) -> tuple[str, list[str]]:
            return name, list(self)

    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=Frame))
    index, columns = found.to_pandas()
    assert index == "step"
    assert "loss" in columns
