"""`penstock config show`: the settings of every service, and nothing that does nothing."""

from __future__ import annotations

import json
import tomllib

import pytest

from penstock.console.cli.main import run
from penstock.protocol.config.run_file import SECTIONS


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(["config", "show", "model.path=m", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_every_section_is_shown_once_with_its_origins(capsys: pytest.CaptureFixture[str]) -> None:
    """Of trainer, worker and reward service, as text and as JSON; both have the same keys."""
    code, text, _ = shown(capsys, "worker.max_running=7", "reward_service.port=0")
    keys = [line.partition(" = ")[0] for line in text.splitlines()]
    assert code == 0
    assert len(keys) == len(set(keys))
    assert {key.split(".")[0] for key in keys} == set(SECTIONS)
    assert any(line.startswith("worker.max_running = 7 ") and line.endswith("# override") for line in text.splitlines())
    document = json.loads(shown(capsys, "--json", "worker.max_running=7")[1])
    assert document["settings"]["worker"]["max_running"] == 7
    assert document["origins"]["worker.max_running"] == "override"
    assert set(document["settings"]) == set(SECTIONS)
    assert set(keys) == set(document["origins"])


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (
            ["trainer.min_lr_ratio=0.5"],
            "trainer.min_lr_ratio has no effect with trainer.schedule = constant [override]",
        ),
        (["trainer.min_lr_ratio=0.5", "sft.schedule=linear"], ""),
        (
            ["trainer.max_mismatch=none", "trainer.mismatch_patience=2"],
            "trainer.mismatch_patience has no effect without",
        ),
        (["trainer.resume=false", "trainer.resume_older_step=2"], "trainer.resume_older_step has no effect with"),
        (["eval.num_prompts=3"], "eval.num_prompts has no effect without data.eval"),
        (["eval.num_prompts=3", "data.eval=e"], ""),
        (["data.from_run=x", "data.train=t"], "data.train has no effect with data.from_run"),
    ],
)
def test_a_setting_without_effect_is_named(capsys: pytest.CaptureFixture[str], arguments: list[str], note: str) -> None:
    """As a comment after the settings, which stay valid TOML; nothing where there is nothing to say."""
    code, text, _ = shown(capsys, *arguments)
    said = [line for line in text.splitlines() if line.startswith("# note: ")]
    assert code == 0
    assert [note in line for line in said] == ([True] if note else [])
    tomllib.loads(text)


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["worker.engin=x"], "override: unknown key worker.engin; did you mean worker.engine?"),
        (["sglang.tp_sizee=2"], "override: unknown key sglang.tp_sizee; did you mean sglang.tp_size?"),
        (["reward_service.portt=1"], "unknown key reward_service.portt; did you mean reward_service.port?"),
        (["trainer.stpes=1"], "unknown key trainer.stpes; did you mean trainer.steps?"),
        (
            ["sglang.tp_size=4"],
            'sglang.tp_size does nothing with worker.engine = embedded; set worker.engine = "sglang"',
        ),
        (["worker.device=cuda", "worker.engine=sglang"], "worker.device does nothing with worker.engine = sglang"),
        (
            ["worker.max_running=4", "worker.engine=vllm-url", "worker.engine_url=http://h:1"],
            "worker.max_running does nothing with worker.engine = vllm-url",
        ),
        (["vllm.max_num_seqs=1", "worker.engine=sglang"], "vllm.max_num_seqs does nothing with worker.engine = sglang"),
    ],
)
def test_a_mistake_in_any_section_is_answered_once(
    capsys: pytest.CaptureFixture[str], arguments: list[str], answer: str
) -> None:
    """Whichever service reads the section; several mistakes are listed together, contradictions once the values are valid."""
    others = [] if "does nothing" in answer else ["run.seed=much"]
    code, out, err = shown(capsys, *arguments, *others)
    assert (code, out) == (2, "")
    assert sum(answer in line for line in err.splitlines()) == 1
    assert sum("run.seed" in line for line in err.splitlines()) == len(others)
