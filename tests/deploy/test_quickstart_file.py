"""The run file that the quickstart writes for a real SGLang, and its warm-up."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from penstock.deploy import quickstart, sglang_cpu
from penstock.deploy.processes.child import DeployError
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


_KILLED = "import os, signal, sys; os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (
            f"import pathlib\nif not pathlib.Path('{{mark}}').exists(): pathlib.Path('{{mark}}').touch(); {_KILLED}",
            None,
        ),
        (_KILLED, r"sft failed; it ended with SIGKILL"),
        ("print('no such file'); raise SystemExit(2)", r"sft failed; it ended with exit code 2.*\n    no such file"),
    ],
)
def test_a_killed_warm_up_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, expected: str | None
) -> None:
    """A SIGKILL during the warm-up costs its steps, not the quickstart; a third one, or an error of its own, ends it."""
    program = program.replace("{mark}", str(tmp_path / "mark"))
    monkeypatch.setattr(quickstart.launch, "module", lambda *_: [sys.executable, "-S", "-c", program])
    options = quickstart.Options(
        seed=0, steps=2, workers=1, run_id="r", folder=tmp_path, as_json=True, kill=False, engine="embedded"
    )
    shown: list[str] = []

    def warm_up() -> bool:
        return quickstart._warm_up(options, tmp_path / "run.toml", shown.append, threading.Event())  # type: ignore[arg-type]

    if expected is None:
        assert warm_up()
        assert [line.partition(",")[0] for line in shown] == [
            "warm-up   was killed (SIGKILL); starting it again from its first step",
            "warm-up   60 supervised steps on 128 examples each",
        ]
    else:
        with pytest.raises(DeployError, match=expected):
            warm_up()
        assert len(shown) == (2 if program == _KILLED else 0)
