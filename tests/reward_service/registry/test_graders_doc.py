"""docs/graders.md describes every built-in reward as the code does."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from penstock.protocol.config.reward_settings import RewardSettings
from penstock.reward_service.registry import definitions
from penstock.reward_service.registry.built_in import update_tables

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "graders.md").read_text(encoding="utf-8")


def test_the_tables_equal_the_registry() -> None:
    """The generated tables are up to date; the command in their markers renews them."""
    assert update_tables(TEXT) == TEXT, "run: python -m penstock.reward_service rewards --write docs/graders.md"


def test_the_example_is_a_run_file() -> None:
    example = "".join(re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL))  # the second says what counts as correct
    settings = RewardSettings.model_validate(tomllib.loads(example)["reward"])
    assert set(definitions.check(settings.define)["mine"]) == {"correct", "form", "length"}


def test_the_page_has_the_right_number_of_answers() -> None:
    num_answers = len((ROOT / "tests" / "data" / "answers.jsonl").read_text(encoding="utf-8").splitlines())
    num_pairs = len((ROOT / "tests" / "data" / "graded_pairs.tsv").read_text(encoding="utf-8").splitlines()) - 1
    assert f"{num_answers} answers" in TEXT
    assert f"{num_pairs:,} more" in TEXT
