"""The README: its run files load, and it is short; tests/docs reads its commands. CONTRIBUTING: its tables of files."""

from __future__ import annotations

import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path

from docs import file_list

from penstock.protocol.config.run_file import load
from penstock.trainer.settings import TrainerSettings
from tests.packaging.conftest import OURS, ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
_BLOCKS = re.findall(r"```(\w*)\n(.*?)```", TEXT, re.DOTALL)
_OVERRIDE = re.compile(r"[a-z_]+\.[a-z_.]+=.+")


def test_every_setting_exists(tmp_path: Path):
    """The run file loads, with what the section on agents adds to it, and so does every override on a command line."""
    toml, agents = [block for language, block in _BLOCKS if language == "toml"]
    file, added = tmp_path / "run.toml", tmp_path / "agents.toml"
    file.write_text(toml)
    added.write_text(agents)
    assert load(TrainerSettings, files=[file, added], environ={}).settings.rollout.environment == "lookup-agent"
    lines = [line.partition("  #")[0] for language, block in _BLOCKS if not language for line in block.splitlines()]
    words = [shlex.split(line) for line in lines if line.startswith("penstock ")]
    assert len(words) >= 15
    overrides = [word for line in words for word in line if _OVERRIDE.fullmatch(word)]
    pairs = [pair for line in words for pair in pairwise(line) if pair[0].startswith("--") and "." in pair[0]]
    overrides += [f"{flag[2:]}={value}" for flag, value in pairs]
    assert len(overrides) >= 3
    load(TrainerSettings, files=[file], overrides=overrides, environ={})


def test_the_table_of_where_to_change_what_names_every_folder_and_files_that_exist():
    """Every folder of two levels is a row of CONTRIBUTING's table."""
    rows = re.findall(r"^\| `([\w/]+)` \| (.+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    folders = {folder for folder, _ in rows}
    named = {folder + path for folder, text in rows for path in re.findall(r"`([\w./]+[./][\w./]*)`", text)}
    assert len(named) >= 50
    assert [path for path in sorted(folders | named) if not (ROOT / path).exists()] == []
    packages = {f"{path.parent.relative_to(ROOT)}/" for top in OURS for path in (ROOT / top).glob("*/__init__.py")}
    assert packages - folders == set()


def test_the_list_of_all_files_is_that_of_the_tree():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert file_list.with_list(page) == page, "write it: make files"


def test_nothing_that_a_program_left_in_the_tree_is_committed():
    """The folder of a run and a downloaded package were."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    known = {*file_list.PACKAGES, "benchmarks", "docs", "examples", "src", "tests", ".ci"}
    assert {name.partition("/")[0] for name in listed if "/" in name} <= known
    assert not [name for name in listed if name.endswith((".whl", ".lock", "metrics.jsonl"))]


def test_the_readme_is_short():
    assert len(TEXT.splitlines()) <= 120
