"""The reward `ifeval`: each instruction, the forms of rows, and what is refused by line before a run."""

from __future__ import annotations

import importlib
import json
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from penstock.deploy.data_check.commands import main
from penstock.deploy.early_checks import check_inputs
from penstock.deploy.quickstart_task import write_model
from penstock.protocol.config.run_file import load
from penstock.protocol.errors import ConfigError
from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.rewards import ifeval
from penstock.trainer.settings import TrainerSettings

TABLE: dict[str, Any] = tomllib.loads((Path(__file__).parents[2] / "data" / "ifeval.toml").read_text())
OF_LANGUAGE = {name for name, rule in ifeval._RULES.items() if rule.get("check") in ifeval._OF_LANGUAGE}


def truth(name: str, given: Any) -> dict[str, Any]:
    return {"instruction_id_list": [name], "kwargs": [given]} if ":" in name else {"func_name": name, **given}


def rewards(*texts: str, of: Any, extra: Any = None, **parameters: bool) -> list[float]:
    return [verdict.reward for verdict in ifeval.judge(ifeval.Parameters(**parameters), texts, of, extra)]


def test_the_table_has_every_instruction_with_three_of_each_kind() -> None:
    assert TABLE.keys() == ifeval._RULES.keys()
    assert {len(TABLE[name][kind]) for name in TABLE for kind in ("right", "wrong")} == {3}


@pytest.mark.parametrize("name", TABLE)
def test_an_instruction_is_checked_by_its_rule(name: str) -> None:
    if name in OF_LANGUAGE and find_spec("langdetect") is None:
        pytest.skip("langdetect is not installed")
    of, table = truth(name, TABLE[name]["given"]), TABLE[name]
    assert rewards(*table["right"], of=of) == [1.0] * 3
    assert rewards(*table["wrong"], of=of) == [0.0] * 3


def test_all_instructions_count_and_rows_have_several_forms() -> None:
    both = {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {"keywords": None}]}
    texts = ('"a"', "a", 'Here:\n*"a"*', '<think>a, b</think>"c"')
    for of, extra in ((both, None), (json.dumps(both), {}), ([both], None), (None, both), ("", None)):
        if of != "":
            assert rewards(*texts, of=of, extra=extra) == [1.0, 0.0, 0.0, 1.0]
    assert rewards(*texts, of=both, loose=True) == [1.0, 0.0, 1.0, 1.0]
    assert rewards(*texts, of=both, partial=True) == [1.0, 0.5, 0.5, 1.0]


@pytest.mark.parametrize(
    ("of", "problem"),
    [
        (
            {"instruction_id_list": ["punctuation:no_coma"], "kwargs": [{}]},
            "no_coma is no instruction .* near: punctuation:no_comma",
        ),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, "expected instruction_id_list and kwargs"),
        ({"func_name": "validate_title", "N": 2}, "validate_title has no argument N; it has none"),
        (
            {"func_name": "validate_word_constraint", "N": 9, "quantifier": "some"},
            "quantifier must be at least or less than",
        ),
        ({"func_name": "verify_bullet_points", "N": "2"}, "N must be a number, got '2'"),
        ({"func_name": "verify_keywords", "keyword_list": None}, "keyword_list must be a texts|keyword_list must be"),
        ({"func_name": ["verify_keywords"]}, "no instruction that is known"),
        (None, "expected instruction_id_list and kwargs"),
        ("not json", "is not JSON"),
    ],
)
def test_a_row_whose_instructions_cannot_be_checked_is_an_error(of: Any, problem: str) -> None:
    with pytest.raises(BadGroundTruth, match=problem):
        rewards("a", of=of)


def test_without_the_package_of_languages_the_instruction_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(
        BadGroundTruth, match=r"language:response_language needs the package langdetect .* install penstock\[ifeval\]"
    ):
        rewards("a", of=truth("language:response_language", {"language": "de"}))


def test_rows_with_unknown_instructions_are_refused_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By `penstock data check`, and before a run starts a process."""
    write_model(tmp_path / "m", seed=0)
    rows = [
        {"prompt": "Write.", "instruction_id_list": [name], "kwargs": [{}]}
        for name in ("punctuation:no_comma", "no:such")
    ]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({**row, "data_source": "ifeval"}) + "\n" for row in rows))
    assert main(["data-check", str(path)]) == 1
    assert f"{path}:2: ifeval: no:such is no instruction" in capsys.readouterr().out
    for reward in ("ifeval", "auto"):
        given = [
            f"model.path={tmp_path / 'm'}",
            f"data.train={path}",
            f"reward.name={reward}",
            "rollout.max_new_tokens=8",
            f"run.dir={tmp_path}",
        ]
        with pytest.raises(ConfigError, match=r"x\.jsonl:2: ifeval: no:such"):
            check_inputs(load(TrainerSettings, overrides=given).settings)
