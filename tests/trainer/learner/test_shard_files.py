"""Shards of any layout are read as one state, and a set of them that is not whole is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.trainer.errors import CheckpointError
from penstock.trainer.learner.shard_files import WEIGHT, Cut, Fragment, Part, Shard, ShardFiles

SHAPES = {"a": (3, 4), "b": (5,)}
VALUES = {"a": torch.arange(12.0), "b": torch.arange(5.0) + 100.0}


def write(folder: Path, *cuts: dict[str, tuple[int, int]], num_ranks: int | None = None) -> None:
    """Write one shard for each dictionary of parameters and elements."""
    for rank, parts in enumerate(cuts):
        fragments = [
            Fragment(
                name, start, {kind: VALUES[name][start:end] * scale for kind, scale in ((WEIGHT, 1), ("exp_avg", 2))}
            )
            for name, (start, end) in parts.items()
        ]
        Shard(rank, num_ranks or len(cuts), SHAPES, fragments, {"steps_done": 3}).write(folder)


def test_any_part_is_read_across_shards(tmp_path: Path) -> None:
    """Parts that begin and end within, between and across files; a rank may have nothing."""
    write(tmp_path, {"a": (0, 5)}, {}, {"a": (5, 12), "b": (0, 5)})
    with ShardFiles(tmp_path) as files:
        for start, num in ((0, 12), (2, 1), (3, 5), (5, 7), (4, 1)):
            assert files.read("a", WEIGHT, start, num).tolist() == VALUES["a"][start : start + num].tolist()
        assert files.read("b", "exp_avg", 1, 2).tolist() == [202.0, 204.0]
        assert (files.state, files.shapes["a"], set(files.kinds("b"))) == (
            {"steps_done": 3},
            [3, 4],
            {WEIGHT, "exp_avg"},
        )


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_a_cut_parameter_are_read_by_every_layout(tmp_path: Path, dim: int) -> None:
    whole = torch.arange(24.0).view(4, 6)
    cut = Cut(dim, 2)
    for rank in range(4):
        index, half = rank % 2, rank // 2
        part = cut.part_of(whole, index).flatten()
        own = part[6 * half : 6 * half + 6]
        b = [Fragment("b", 0, {WEIGHT: VALUES["b"]})] if rank == 0 else []
        fragments = [Fragment("a", 6 * half, {WEIGHT: own, "exp_avg": own * 2}), *b]
        shapes = {"a": (4, 6), "b": (5,)}
        Shard(rank, 4, shapes, fragments, {}, {"a": Part(cut, index)}).write(tmp_path)
    with ShardFiles(tmp_path) as files:
        assert set(files.kinds("a")) == {WEIGHT, "exp_avg"}
        assert files.read("a", WEIGHT, 0, 24).tolist() == whole.flatten().tolist()
        assert files.read("a", "exp_avg", 5, 3).tolist() == (2 * whole.flatten()[5:8]).tolist()
        assert files.read("b", WEIGHT, 1, 2).tolist() == VALUES["b"][1:3].tolist()
        for other in (cut, Cut(1 - dim, 2), Cut(1, 3)):
            for index in range(other.count):
                expected = other.part_of(whole, index).flatten()
                found = files.read("a", WEIGHT, 1, 4, Part(other, index))
                assert found.tolist() == expected[1:5].tolist()
    (tmp_path / "rank00003.safetensors").unlink()
    Shard(3, 4, {"a": (4, 6), "b": (5,)}, [], {}, {"a": Part(cut, 1)}).write(tmp_path)
    with pytest.raises(CheckpointError, match=r"a@1#.*: the shards do not hold each of its 12 elements once"), ShardFiles(tmp_path):  # fmt: skip
        pass
    Shard(3, 4, {"a": (4, 6), "b": (5,)}, [], {}, {"a": Part(Cut(dim, 3), 1)}).write(tmp_path)
    with pytest.raises(CheckpointError, match="its parameters are not cut as those of rank00000"), ShardFiles(tmp_path):
        pass


@pytest.mark.parametrize(
    ("cuts", "num_ranks", "message"),
    [
        ([{"a": (0, 12), "b": (0, 5)}], 2, r"expected 2 shard\(s\), found 1"),
        ([{"a": (0, 5)}, {"a": (6, 12), "b": (0, 5)}], None, "a#.*do not hold each of its 12 elements once"),
        ([{"a": (0, 6)}, {"a": (5, 12), "b": (0, 5)}], None, "a#.*do not hold each of its 12 elements once"),
        ([{"a": (0, 12)}], None, "b#weight: the shards do not hold each of its 5 elements once"),
    ],
    ids=["missing", "hole", "overlap", "parameter"],
)
def test_shards_that_are_not_whole_are_refused(
    tmp_path: Path, cuts: list[dict[str, tuple[int, int]]], num_ranks: int | None, message: str
) -> None:
    """A missing file, elements that no shard or two shards hold, a parameter that is not there."""
    write(tmp_path, *cuts, num_ranks=num_ranks)
    with pytest.raises(CheckpointError, match=message), ShardFiles(tmp_path):
        pass


def test_a_damaged_shard_is_refused(tmp_path: Path) -> None:
    """A file that was cut off ends in an error that names the folder."""
    write(tmp_path, {"a": (0, 12), "b": (0, 5)})
    path = tmp_path / "rank00000.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=f"checkpoint {tmp_path} is not readable"), ShardFiles(tmp_path):
        pass
