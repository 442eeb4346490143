"""`penstock config show`: the settings of every service, and nothing that does nothing."""

from __future__ import annotations

import json

import pytest

from penstock.deploy import config_show
from penstock.protocol.config.run_file import SECTIONS


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = config_show.main(["model.path=m", *arguments])
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
