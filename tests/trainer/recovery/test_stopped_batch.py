"""A batch at which a run stopped is saved whole, shown by the console, and refused when it is damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.trainer.groups.stored_groups import invent_group

from penstock.console.connections import NamedRun
from penstock.console.record.stopped import print_stopped
from penstock.protocol.errors import ConfigError
from penstock.protocol.groups import BlobRef, ScoredGroup
from penstock.protocol.record.stopped_batch import BATCH, stopped_batches
from penstock.trainer.errors import TrainingDiverged
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.recovery.run_record_writer import save_batch


def ready(number: int, reward: float) -> ReadyGroup:
    group = invent_group(f"e0.p{number}.a0", seed=number)
    scored = ScoredGroup(generated=group.summary(3), rewards=(reward, 0.0, 1.0, 0.5), scorer="mine")
    return ReadyGroup(scored, BlobRef(key="k", size_bytes=1, sha256="0" * 64), group)


def test_a_saved_batch_is_shown_and_a_damaged_one_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest one, or that of a step; saving it again replaces it, and what is far out is marked."""
    home = tmp_path / "mine"
    for step, reward in ((7, 1.0), (12, 1.0), (12, 1e25)):
        batch, error = [ready(1, 0.0), ready(2, reward)], TrainingDiverged("it is nan")
        save_batch(home, batch, error, config=b"{}", run_id="mine", step=step, version=step - 1)
    assert [folder.name for folder in stopped_batches(home)] == ["step00000007", "step00000012"]
    given = [f"run.dir={tmp_path}"]

    def shown(step: int | None = None, *, as_json: bool) -> str:
        assert print_stopped(NamedRun("mine", given, {}), step=step, as_json=as_json) == 0
        return capsys.readouterr().out

    found = json.loads(shown(as_json=True))
    assert (found["step"], found["version"], found["reason"]) == (12, 11, "it is nan")
    assert [one["group_id"] for one in found["groups"]] == ["e0.p1.a0", "e0.p2.a0"]
    assert [one["far_out"] for one in found["groups"]] == [[], ["reward 1e+25"]]
    assert found["groups"][1]["rewards"] == [1e25, 0.0, 1.0, 0.5]
    assert json.loads(shown(7, as_json=True))["version"] == 6
    text = shown(as_json=False)
    assert "run mine, step 12 on version 11: it is nan" in text
    assert "reward 1e+25" in text
    with pytest.raises(ConfigError, match="no batch of step 8; saved are those of 7, 12"):
        shown(8, as_json=True)
    with pytest.raises(ConfigError, match="no run other"):
        print_stopped(NamedRun("other", given, {}), step=None, as_json=True)
    (home / "stopped" / "step00000012" / BATCH).write_text("{}")
    with pytest.raises(ConfigError, match=r"step00000012 cannot be read .*restore it"):
        shown(as_json=True)
