"""`make gpu-check` works at toy size on the CPU, so that it runs where a GPU is at hand for minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import trainer_memory
from benchmarks.trainer_memory import inputs_of
from tests.packaging.test_extras import SERVICES
from tests.rigs import gpu_carry, gpu_check

from penstock.deploy.plan.memory.memory_plan import MemoryPlan

FIGURES = {"losses", "norms", "tokens_per_s", "mfu", "peak_gb", "planned_gb", "kernels"}
_OF_THE_RUN = ("", "console", "engine", "reward", "rollout", "trainer")


@pytest.fixture
def carried(tmp_path: Path) -> tuple[Path, Path]:
    """The tree that is carried, and a Python that sees it, torch and transformers, and what is on the list of wheels; nothing else."""
    gpu_carry.carry(tmp_path / "out")
    listed = {line.partition("==")[0] for line in (tmp_path / "out/wheels.txt").read_text().split()}
    visible = listed | gpu_carry.WITH_TRANSFORMERS | gpu_carry.required(["torch", "transformers"])
    venv.create(tmp_path / "venv", with_pip=False)
    packages = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    for name in visible:
        for file in metadata.distribution(name).files or ():
            top, source = packages / file.parts[0], Path(str(metadata.distribution(name).locate_file(file.parts[0])))
            if file.parts[0] not in ("..", "__pycache__") and not top.exists():
                top.symlink_to(source.resolve())
    (packages / "penstock.pth").write_text(str(tmp_path / "out/tree/src"))
    return tmp_path / "out/tree", tmp_path / "venv/bin/python"


@pytest.mark.slow
def test_steps_give_their_figures_where_only_what_is_carried_is(carried: tuple[Path, Path]) -> None:
    """One file or wheel less than needed, and the check fails there; what its last part starts is imported: `make gpu-carry` says how it is run."""
    tree, python = carried
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PENSTOCK_"))}
    services = "; ".join(f"import penstock.{module}" for extra in _OF_THE_RUN for module in SERVICES[extra])
    program = f"import sys; sys.argv[1:] = ['--toy', '--part', 'segments']\n{services}\nfrom tests.rigs.gpu_check import main; main()"
    environ["DS_ACCELERATOR"] = "cpu"
    child = subprocess.run([str(python), "-c", program], cwd=tree, env=environ, capture_output=True, text=True, check=False)  # fmt: skip
    assert child.returncode == 0, child.stderr[-2000:]
    figures = next(line for line in child.stdout.splitlines() if line.startswith("gpu-check "))
    assert json.loads(figures.removeprefix("gpu-check ")).keys() == FIGURES
    assert not (tree / "docs").exists()


def test_parts_are_written_and_a_failed_one_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The one that copies weights is measured here, the other one is replaced."""

    def measured(part: str, *, toy: bool) -> dict[str, Any]:
        return gpu_check.Check(toy=toy).publish() if part == "publish" else {"failed": "no result"}

    monkeypatch.setattr(gpu_check, "measure", measured)
    for parts, code in ((["publish"], 0), (["segments", "publish"], 1)):
        monkeypatch.setattr(sys, "argv", ["gpu_check", "--toy", "--out", str(tmp_path), "--only", *parts])
        assert gpu_check.main() == code
        found = json.loads((tmp_path / "gpu-check.json").read_text())["parts"]
        assert list(found) == parts
        assert found["publish"].keys() == {"fresh", "reused", "pinned", "compared on the device", "compared on the host"}  # fmt: skip


def test_the_steps_fit_the_machine_and_their_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """An 80 GB GPU and 128 GiB of host memory; a model of billions is made on the device, which takes no minutes."""
    for chosen in (gpu_check.QWEN3_06B, replace(gpu_check.QWEN25_7B, lora=16), gpu_check.OFFLOADED):
        plan = MemoryPlan(inputs_of(chosen))
        copies = sum(size for name, size in plan.held.host.items() if name.startswith("cop"))  # nothing is published
        assert plan.peak(on_gpu=True) < 70e9
        assert sum(plan.held.host.values()) - copies < 100e9
    drawn = []
    monkeypatch.setattr(
        trainer_memory.AutoModelForCausalLM, "from_config", lambda *_, **__: drawn.append(torch.empty(0).device)
    )
    with pytest.raises(AttributeError):  # nothing was made
        trainer_memory.Trained(gpu_check.tiny(gpu_check.QWEN3_06B), gpu_check.Check(toy=True).dims, "meta")
    assert drawn == [torch.device("meta")]


def test_each_head_size_has_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "HEADS", ((128, 2),))
    assert gpu_check.Check(toy=True).attention()["128 x 2"]["backend"] == "cpu-flash"


def test_a_late_part_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts after it run, and the exit code says it."""
    monkeypatch.setitem(gpu_check.DEADLINES_S, "publish", 0.001)
    assert "no result within" in gpu_check.measure("publish", toy=True)["failed"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert gpu_check.main() == 2
    assert "--toy" in capsys.readouterr().err
