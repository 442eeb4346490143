"""docs/graders.md describes every built-in reward as the code does."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from penstock.protocol.config.reward_settings import RewardSettings
from penstock.reward_service.registry import definitions
from penstock.reward_service.registry.built_in import BUILT_INS, BY_SOURCE, update_tables

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "graders.md").read_text(encoding="utf-8")


def _rows(heading: str) -> list[list[str]]:
    section = TEXT.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| `")
    ]


def test_the_tables_equal_the_registry() -> None:
    """The generated tables are up to date; the command in their markers renews them."""
    assert update_tables(TEXT) == TEXT, "run: python -m penstock.reward_service rewards --write docs/graders.md"


def test_every_reward_and_parameter_is_in_the_table() -> None:
    listed = {name: row for row in _rows("The table") for name in re.findall(r"`(\w+)`", row[0])}
    assert listed.keys() == BUILT_INS.keys()
    for name, built_in in BUILT_INS.items():
        named = set(re.findall(r"`(\w+)`", listed[name][1]))
        assert set(built_in.parameters.model_fields) <= named, name


def test_the_example_is_a_run_file() -> None:
    example = "".join(re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL))  # the second says what counts as correct
    settings = RewardSettings.model_validate(tomllib.loads(example)["reward"])
    assert set(definitions.check(settings.define)["mine"]) == {"correct", "form", "length"}


def test_every_data_set_is_listed_with_its_reward() -> None:
    """Each data set of the code is in one row, that of its reward, and the page has the right number of answers."""
    listed = {
        source: rewards.strip("`")
        for rewards, sources in _rows("Data sets")
        for source in re.findall(r"`([^`]+)`", sources)
    }
    assert listed == BY_SOURCE
    num_answers = len((ROOT / "tests" / "data" / "answers.jsonl").read_text(encoding="utf-8").splitlines())
    assert f"{num_answers} answers" in TEXT
