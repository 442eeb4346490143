"""docs/graders.md says of every built-in reward what the code says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from penstock.protocol.config.reward_settings import RewardSettings
from penstock.reward_service.registry import definitions
from penstock.reward_service.registry.built_in import BUILT_INS
from penstock.reward_service.rewards.data_sources import BY_SOURCE

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "graders.md").read_text(encoding="utf-8")


def _rows(heading: str) -> list[list[str]]:
    section = TEXT.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| `")
    ]


def test_every_reward_and_parameter_stands_in_the_table() -> None:
    """No built-in is missing, none is invented, and every parameter is named in its row."""
    listed = {name: row for row in _rows("The table") for name in re.findall(r"`(\w+)`", row[0])}
    assert listed.keys() == BUILT_INS.keys() | {"auto"}
    for name, built_in in BUILT_INS.items():
        named = set(re.findall(r"`(\w+)`", listed[name][1]))
        assert set(built_in.parameters.model_fields) <= named, name


def test_the_example_is_a_run_file() -> None:
    """The composed reward of the page is accepted as it stands."""
    (example,) = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    settings = RewardSettings.model_validate(tomllib.loads(example)["reward"])
    assert set(definitions.check(settings.define)["mine"]) == {"correct", "form", "length"}


def test_the_data_sets_have_the_rewards_that_the_page_says() -> None:
    """Names and patterns of the page are what the table of the code says."""
    for sources, rewards in _rows("Data sets"):
        for source in re.findall(r"`([^`]+)`", sources):
            stem = source.removesuffix("*")
            found = {
                reward
                for name, reward in BY_SOURCE.items()
                if name == source or (stem != source and name.startswith(stem))
            }
            assert found == ({source} if rewards == "the same name" else {rewards.strip("`")}), source
    num_answers = len((ROOT / "tests" / "data" / "answers.jsonl").read_text(encoding="utf-8").splitlines())
    assert f"{num_answers} answers" in TEXT
