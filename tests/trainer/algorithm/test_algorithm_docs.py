"""docs/algorithms.md against the code: every preset, every part, every setting, every choice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from docs.algorithm_reference import with_reference

from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.chosen_parts import ALIASES, PRESETS, REFUSED, canonical
from penstock.trainer.optimizer_settings import CriticSettings

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
QUOTED = re.findall(r"`([^`\n]+)`", PAGE)
ROWS = {
    row[0].strip(" `"): row for line in PAGE.splitlines() if line.count("|") == 7 for row in [line.split("|")[1:-1]]
}


def _is_named(word: str) -> bool:
    return any(re.search(rf"(?<![A-Za-z0-9_]){re.escape(word)}(?![A-Za-z0-9_+])", quoted) for quoted in QUOTED)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_its_row_and_its_formula(name: str) -> None:
    """The row names the aggregation that the preset sets, its source, and its names elsewhere; a paragraph explains it."""
    _, advantage, loss, aggregation, source, elsewhere = (cell.strip() for cell in ROWS[name])
    assert aggregation == PRESETS[name]["aggregation"]
    assert advantage
    assert loss
    assert re.search(r"\d{4}\.\d{5}|Williams|ROLL|Infini-AI-Lab", source)
    assert elsewhere
    assert f"**{name}**" in PAGE
    if PRESETS[name]["advantage"] in ("grpo", "pass_at_k") and name != "pass_at_k":
        assert PRESETS[name]["normalise_by_std"] == ("÷ std" in advantage or advantage == "as `gspo`")


def test_the_table_names_nothing_that_does_not_exist() -> None:
    assert set(ROWS) - {"preset", "---"} == set(PRESETS)


@pytest.mark.parametrize(("section", "name"), [
    *(("algorithm", name) for name in AlgorithmSettings.model_fields if name != "name"),
    *(("critic", name) for name in CriticSettings.model_fields),
])  # fmt: skip
def test_every_setting_is_explained(section: str, name: str) -> None:
    assert _is_named(name)
    model = AlgorithmSettings if section == "algorithm" else CriticSettings
    annotation: Any = model.model_fields[name].annotation
    for choice in [value for part in (annotation, *get_args(annotation)) for value in get_args(part)]:
        assert not isinstance(choice, str) or _is_named(choice) or choice in ("none", "off", "same"), choice


def test_the_tables_of_the_parts_are_up_to_date() -> None:
    assert with_reference(PAGE) == PAGE, "run python -m docs.algorithm_reference"


def test_the_page_names_what_is_not_offered_and_every_alias_is_a_preset() -> None:
    assert all(_is_named(name) for name in REFUSED if name != "crossentropy")
    assert all(canonical(alias) in PRESETS for alias in ALIASES)
    assert not ALIASES.keys() & PRESETS.keys()
