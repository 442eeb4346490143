"""The run file that the quickstart writes for a real SGLang."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from penstock.deploy import sglang_cpu
from penstock.deploy.quickstart import _engine_sections
from penstock.protocol.config.run_file import load
from penstock.rollout_service.settings import RolloutSettings


def test_a_real_sglang_is_updated_in_mid_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A worker accepts its sections; the embedded engine needs none."""
    monkeypatch.setenv(sglang_cpu.PYTHON_VARIABLE, sys.executable)
    file = tmp_path / "run.toml"
    file.write_text('[run]\nid = "r"\n' + _engine_sections("sglang"))
    settings = load(RolloutSettings, files=[file]).settings
    assert (settings.worker.engine, settings.worker.update_mode) == ("sglang", "retract")
    assert settings.sglang.python == Path(sys.executable)
    assert _engine_sections("embedded") == ""
