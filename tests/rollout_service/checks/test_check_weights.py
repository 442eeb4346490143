"""No engine is given a folder that it would crash on, or serve wrongly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.checks.check_weights import WeightsCheck
from penstock.rollout_service.errors import WeightsUnusable

V0, V1 = PolicyVersion(0), PolicyVersion(1)
Tensors = dict[str, torch.Tensor]


def tensors(dtype: torch.dtype = torch.float32) -> Tensors:
    torch.manual_seed(0)
    return {"embed": torch.randn(7, 3).to(dtype), "up": torch.randn(3, 5).to(dtype), "steps": torch.arange(3)}


def write(folder: Path, values: Tensors) -> Path:
    """A model folder, as far as the check looks."""
    folder.mkdir(exist_ok=True)
    save_file(values, folder / "model.safetensors")
    return folder


@pytest.fixture
def check(tmp_path: Path) -> WeightsCheck:
    """A check that has accepted a valid first version."""
    check = WeightsCheck()
    check.check(write(tmp_path / "v0", tensors()), V0)
    return check


def test_other_values_of_the_same_model_pass(check: WeightsCheck, tmp_path: Path):
    """Only harmful differences are refused; also when the tensors are in several files."""
    moved = {name: value + 1 for name, value in tensors().items()}
    check.check(write(tmp_path / "v1", moved), V1)
    shards = tmp_path / "v2"
    shards.mkdir()
    for number, name in enumerate(moved):
        save_file({name: moved[name]}, shards / f"model-{number}.safetensors")
    check.check(shards, PolicyVersion(2))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda values: values.pop("up"), "1 tensors are missing.*such as up"),
        (lambda values: values.update(down=torch.zeros(2)), "1 tensors are new.*such as down"),
        (
            lambda values: values.update(up=values["up"].T.contiguous()),
            r"up is \('F32', \(5, 3\)\), in earlier versions \('F32', \(3, 5\)\)",
        ),
        (lambda values: values.update(up=values["up"].bfloat16()), r"up is \('BF16'"),
        (lambda values: values["embed"][2].fill_(torch.nan), "embed holds a value that is not finite"),
        (lambda values: values["up"][0].fill_(-torch.inf), "up holds a value that is not finite"),
    ],
)
def test_weights_that_would_be_served_wrongly_are_refused(
    check: WeightsCheck, tmp_path: Path, spoil: Callable[[Tensors], object], words: str
):
    """The error names the tensor; the next valid version passes."""
    values = tensors()
    spoil(values)
    with pytest.raises(WeightsUnusable, match=f"version 1: .*{words}"):
        check.check(write(tmp_path / "bad", values), V1)
    check.check(write(tmp_path / "good", tensors()), PolicyVersion(2))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn]
)
def test_nan_is_found_in_every_format(tmp_path: Path, dtype: torch.dtype):
    largest = torch.full((9,), torch.finfo(dtype).max, dtype=torch.float64)
    WeightsCheck().check(write(tmp_path / "good", {"w": largest.to(dtype)}), V0)
    largest[4] = torch.nan
    with pytest.raises(WeightsUnusable, match="w holds a value that is not finite"):
        WeightsCheck().check(write(tmp_path / "bad", {"w": largest.to(dtype)}), V0)


@pytest.mark.parametrize("keep", [0, 4, 8, 60, -1])
def test_a_truncated_file_is_refused(check: WeightsCheck, tmp_path: Path, keep: int):
    folder = write(tmp_path / "cut", tensors())
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(WeightsUnusable, match=r"version 1: .* is not a readable set of weights"):
        check.check(folder, V1)


def test_a_folder_without_weights_is_refused(check: WeightsCheck, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightsUnusable, match=r"no \.safetensors file"):
        check.check(tmp_path / "empty", V1)
