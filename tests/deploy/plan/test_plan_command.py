"""`penstock plan`: a run file and rates in; figures of several bounds, sentences and the memory of a rank out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.placement.hosts import model_of

from penstock.console.cli.main import run
from penstock.deploy.plan.memory.report import RankMemory
from penstock.deploy.train import fault_note
from penstock.protocol.config.run_file import load
from penstock.protocol.hardware_errors import fault_in
from penstock.trainer.settings import TrainerSettings

RUN_FILE = """
run.id = "demo"
model.path = "/nowhere"
data.train = "train.jsonl"
rollout = { groups_per_step = 8, group_size = 4, max_new_tokens = 400, max_staleness = 3 }
"""


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE)
    return str(path)


def test_the_plan_has_the_run_files_bound_and_others(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings may follow the flags; the JSON has a row for each bound."""
    assert run(["plan", run_file, "--workers", "3", "--json", "worker.packs_in_flight=6"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [row["max_staleness"] for row in said["waits"]] == [0, 1, 2, 3, 4, 8]
    assert all(0 < row["tokens_per_s"] <= 1.01 * row["ideal_tokens_per_s"] for row in said["waits"])
    assert said["says"]
    assert run(["plan", run_file]) == 0
    assert "           3*  " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "0"], "--workers 0: expected a number of 1 to 1000"),
        (["--median", "500"], "--median 500: expected a number of 1 to 400"),
        (["--score", "nan"], "--score nan: expected a number of 0 to 86400"),
        (["--lone-rate", "-1"], "--lone-rate -1: expected a number of 1 to 1e+09"),
        (["rollout.max_staleness=-1"], "rollout.max_staleness"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    run_file: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the flag or the setting that is wrong, and exit code 2."""
    assert run(["plan", run_file, *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The setting of a folder with the shape of Qwen3-0.6B and no weights."""
    return f"model.path={model_of(tmp_path, '0.6B')}"


def _memory(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = run(["plan", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)["memory"]


def test_the_plan_has_the_memory_of_a_rank(run_file: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By phase, in text and JSON; Qwen3-0.6B has 596 million parameters."""
    code, memory = _memory(capsys, run_file, model)
    assert (code, memory["parameters"], memory["fits"]) == (0, 596_049_920, None)
    assert memory["peak"] == memory["phases"][memory["largest_phase"]]["total"]
    assert run(["plan", run_file, model]) == 0
    said = capsys.readouterr().out
    assert "who waits for whom" in said
    assert "596.0 million parameters" in said
    assert f"a rank needs {memory['peak'] / 1e9:.2f} GB" in said


def test_the_plan_of_gpus_has_the_engines_that_are_placed(
    run_file: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of eight GPUs the trainer has one; two workers divide the others, and are not given all of them each."""
    engine = ["worker.engine=sglang", "model.gradient_checkpointing=true"]
    assert run(["plan", run_file, model, *engine, "--gpus", "8x80GB", "--workers", "2"]) == 0
    said = capsys.readouterr().out
    assert "(2 workers," in said
    assert "- engines: 6, " in said


def test_the_plan_of_a_gpu_that_is_used_in_turns_has_their_cost(
    run_file: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only where engine and trainer do not fit beside each other; 596 million parameters are 1.19 GB of weights."""
    arguments = ["plan", run_file, model, "worker.engine=sglang", "model.gradient_checkpointing=true", "--json"]
    assert run([*arguments, "--gpus", "1x80GB"]) == 0
    assert "in turns" not in capsys.readouterr().out
    assert run([*arguments, "--gpus", "1x80GB", "placement.shared=turns"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["placement"]["takes_turns"]
    assert said["says"][0].startswith("engines: 1, ")  # of one worker, where `--workers` does not say more
    [line] = [line for line in said["says"] if line.startswith("in turns")]
    costs = r"4 batches .* about (\S+) s for (\S+) GB .* and 1\.19 GB of weights .*"
    found = re.search(rf"{costs}: trainer (\d+)%.* engine (\d+)%, changes (\d+)%", line)
    assert found is not None, line
    change_s, moved, *shares = map(float, found.groups())
    assert change_s == pytest.approx(2 * moved / 20 + 1.19 / 4, abs=0.06)
    assert sum(shares) == pytest.approx(100, abs=1)


@pytest.mark.parametrize("limit", [40, 9, 5])
@pytest.mark.parametrize("reference", [(), ("algorithm.kl_coefficient=0.1", "algorithm.reference_device=parked")])
def test_the_settings_that_make_it_fit_do(run_file: str, model: str, limit: int, reference: tuple[str, ...]) -> None:
    def estimated(*settings: str) -> dict[str, Any]:
        given = load(
            TrainerSettings, files=[Path(run_file)], overrides=[model, *reference, *settings], environ={}
        ).settings
        return RankMemory(given, limit=limit * 10**9, on_gpu=True).document()

    memory = estimated()
    assert memory["fits"] is False
    assert memory["fits_with"]
    for one in memory["fits_with"]:
        changed = estimated(*one["settings"])
        assert (changed["fits"], changed["peak"]) == (True, one["peak"]), one["settings"]


@pytest.mark.parametrize(
    ("free", "advice"),
    [
        ("1.00", r" of a GPU with 9\.66 GB for it; it fits with trainer\.micro_batch_tokens=\d+ "),
        ("90.00", r", which fits: set trainer\.micro_batch_tokens=8192"),
    ],
)
def test_out_of_memory_is_explained_by_the_plan_for_this_card(
    run_file: str, model: str, free: str, advice: str
) -> None:
    """For what is free and what PyTorch holds, without other processes; a disk has no plan, nor an unknown model."""
    line = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 99.00 "
        f"GiB of which {free} GiB is free. Process 7 has 70.00 GiB memory in use. Of the allocated memory 7.00 GiB is "
        "allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
    )
    settings = load(TrainerSettings, files=[Path(run_file)], overrides=[model], environ={}).settings
    note = fault_note(settings, fault_in(line))
    assert note.startswith("\nout of GPU memory on GPU 0 (2.00 GiB requested, ")
    assert re.search(rf"\npenstock plan: a rank needs [\d.]+ GB{advice}", note)
    unknown = load(TrainerSettings, files=[Path(run_file)], overrides=[], environ={}).settings
    assert "\npenstock plan has no estimate: " in fault_note(unknown, fault_in(line))
    assert "penstock plan" not in fault_note(settings, fault_in("No space left on device"))
    assert fault_note(settings, None) == ""


def test_a_run_that_does_not_fit_ends_with_1(run_file: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", run_file, model, "--gpu", "--rank-memory", "9GB"]) == 1
    said = capsys.readouterr().out
    assert "it does not fit into 9.00 GB: the largest phase is `log-probabilities and loss`" in said
    assert "- it fits with trainer.micro_batch_tokens=" in said


def test_without_the_model_the_rest_of_the_plan_is_printed(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the reason in the place of the memory; a limit, which then cannot be compared, is refused."""
    assert run(["plan", run_file]) == 0
    said = capsys.readouterr().out
    assert "memory of a rank: not estimated" in said
    assert "model.path = /nowhere: no config.json could be read" in said
    assert run(["plan", run_file, "--rank-memory", "80GB"]) == 2
    assert "model.path = /nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rank-memory", "80"), "--rank-memory 80: expected a size such as 24GB"),
        (("--rank-memory", "0GB"), "--rank-memory 0GB: expected a size"),
        (
            ("--rank-memory", "80GB", "algorithm.kl_coefficient=0.1", "algorithm.kl_form=full"),
            "algorithm.kl_form = full: the memory of whole distributions was not measured",
        ),
    ],
)
def test_a_limit_that_cannot_be_compared_is_refused(
    run_file: str, model: str, arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the flag or the setting, and exit code 2."""
    assert run(["plan", run_file, model, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_the_plan_says_what_computes_attention(
    run_file: str, model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU in bfloat16 unless the file says otherwise; the definition's matrices are counted where it is chosen."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # where the plan is made decides nothing
    _, on_cpu = _memory(capsys, run_file, model)
    _, on_gpu = _memory(capsys, run_file, model, "--gpu")
    _, wide = _memory(capsys, run_file, model, "--gpu", "model.dtype=float32")
    assert [one["attention"] for one in (on_cpu, on_gpu, wide)] == ["cpu-flash", "flash", "sdpa"]
    assert on_gpu["peak"] < wide["peak"]
    _, dense = _memory(capsys, run_file, model, "--gpu", "trainer.attention=dense")
    matrix = 4 * 16 * dense["largest_micro_batch_tokens"] ** 2
    assert dense["attention"] == "dense"
    assert dense["peak"] - on_gpu["peak"] > 2 * matrix
    assert run(["plan", run_file, model, "--gpu"]) == 0
    assert "attention: flash, for 16 heads of 128 dimensions in bfloat16 on a GPU" in capsys.readouterr().out
    assert run(["plan", run_file, model, "--gpu", "trainer.attention=flash", "model.dtype=float32"]) == 0
    refused = "trainer.attention = flash cannot be used for 16 heads of 128 dimensions in float32"
    assert refused in capsys.readouterr().out
