"""The README: its run files load, its make targets, links and paths exist, and it is short; tests/docs reads its commands."""

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


def commands(program: str) -> list[str]:
    """Return the lines of code blocks that call a program, without comments."""
    lines = [line for language, block in _BLOCKS if not language for line in block.splitlines()]
    return [line.partition("  #")[0].strip() for line in lines if line.startswith(f"{program} ")]


def test_there_are_commands():
    assert len(commands("penstock")) >= 15
    assert len(commands("make")) >= 1


def test_every_setting_exists(tmp_path: Path):
    """The run file loads, with what the section on agents adds to it, and so does every override on a command line."""
    toml, agents = [block for language, block in _BLOCKS if language == "toml"]
    file, added = tmp_path / "run.toml", tmp_path / "agents.toml"
    file.write_text(toml)
    added.write_text(agents)
    assert load(TrainerSettings, files=[file, added], environ={}).settings.rollout.environment == "lookup-agent"
    words = [shlex.split(line) for line in commands("penstock")]
    overrides = [word for line in words for word in line if _OVERRIDE.fullmatch(word)]
    pairs = [pair for line in words for pair in pairwise(line) if pair[0].startswith("--") and "." in pair[0]]
    overrides += [f"{flag[2:]}={value}" for flag, value in pairs]
    assert len(overrides) >= 3
    load(TrainerSettings, files=[file], overrides=overrides, environ={})


def test_every_make_target_exists():
    makefile = (ROOT / "Makefile").read_text()
    for target in {*re.findall(r"`make ([a-z-]+)`", TEXT), *(line.split()[1] for line in commands("make"))}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_link_leads_to_a_file():
    """Relative links; and in CONTRIBUTING's table of where to change what, every folder of two levels and the files of its row."""
    linked = set(re.findall(r"\]\(([^)#:]+)\)", TEXT))
    rows = re.findall(r"^\| `([\w/]+)` \| (.+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    folders = {folder for folder, _ in rows}
    named = {folder + path for folder, text in rows for path in re.findall(r"`([\w./]+[./][\w./]*)`", text)}
    assert len(linked) >= 10
    assert len(named) >= 50
    assert [path for path in sorted(linked | folders | named) if not (ROOT / path).exists()] == []
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
