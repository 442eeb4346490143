"""The rig whose optimizer steps sleep replaces the method of the learner that makes them."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from tests.rigs.simulated_trainer import simulate_steps

from penstock.trainer.learner.learner import Learner


def test_simulated_steps_are_called_as_the_learner_calls_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Learner, "_learn", own := Learner._learn)  # restored at the end
    simulate_steps(tmp_path / "trace", token_s=0.0, step_s=0.0)
    assert Learner._learn is not own
    assert list(inspect.signature(Learner._learn).parameters) == list(inspect.signature(own).parameters)
