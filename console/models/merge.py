"""``penstock model merge``: one model folder from several of the same shape, tensor by tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from penstock.console.models import merge_methods
from penstock.console.models.merge_methods import Recipe
from penstock.console.models.tensor_files import (
    INDEX,
    StoredTensor,
    open_model,
    packed,
    read_header,
    weight_files,
    write_file,
)
from penstock.protocol.errors import ConfigError
from penstock.protocol.files import new_folder

RECORD = "merge.json"


def merge_folders(models: Sequence[Path], base: Path | None, to: Path, recipe: Recipe) -> int:
    """Write the merged model, whole or not at all; returns the number of tensors.

    The first model gives the shards, the dtypes, the config and the tokenizer. Raises ConfigError when models differ in
    tensors or shapes, when a merged tensor is not finite, or when the folder exists.
    """
    recipe.check(has_base=base is not None)
    if to.exists():
        raise ConfigError(f"{to} exists; name another folder, or remove it")
    opened = [open_model(folder) for folder in models]
    opened_base = None if base is None else open_model(base)
    for folder, one in zip(models[1:], opened[1:], strict=True):
        _check_same(models[0], opened[0], folder, one)
    if base is not None and opened_base is not None:
        _check_same(models[0], opened[0], base, opened_base)
    with new_folder(to) as partial:
        for file in weight_files(models[0]):
            tensors = read_header(file)
            write_file(partial / file.name, tensors, _merged(tensors, opened, opened_base, recipe))
        _copy_rest(models[0], partial)
        (partial / RECORD).write_text(json.dumps(_record(models, base, recipe), indent=1) + "\n", encoding="utf-8")
    return len(opened[0])


def _merged(
    tensors: Mapping[str, StoredTensor],
    models: Sequence[Mapping[str, StoredTensor]],
    base: Mapping[str, StoredTensor] | None,
    recipe: Recipe,
) -> Iterator[bytes]:
    for name, tensor in tensors.items():
        if not tensor.is_float:  # such as position ids
            if any(not np.array_equal(tensor.raw(), other[name].raw()) for other in models[1:]):
                raise ConfigError(
                    f"tensor {name} has whole numbers that differ between the models; they cannot be merged"
                )
            yield tensor.raw().tobytes()
            continue
        values = [other[name].values() for other in models]
        merged = merge_methods.merge(recipe, values, None if base is None else base[name].values(), name)
        if not np.isfinite(merged).all():
            raise ConfigError(f"tensor {name} of the merged model has values that are not finite; check the models")
        yield packed(merged, tensor.dtype)


def _check_same(
    first: Path, tensors: Mapping[str, StoredTensor], folder: Path, others: Mapping[str, StoredTensor]
) -> None:
    differing = sorted(set(tensors) ^ set(others))
    if differing:
        where = first if differing[0] in tensors else folder
        raise ConfigError(
            f"{first} and {folder} differ in {len(differing)} tensors: {differing[0]} is only in {where}; merge models of "
            "one architecture"
        )
    for name, tensor in tensors.items():
        if tensor.shape != others[name].shape or tensor.is_float != others[name].is_float:
            raise ConfigError(
                f"tensor {name} is {tensor.dtype} {list(tensor.shape)} in {first} and {others[name].dtype} "
                f"{list(others[name].shape)} in {folder}; merge models of one architecture"
            )


def _copy_rest(folder: Path, to: Path) -> None:
    for path in sorted(folder.iterdir()):
        is_weights = path.suffix in (".safetensors", ".bin", ".pt", ".gguf")
        if path.is_file() and not path.is_symlink() and path.name != RECORD and not is_weights:
            shutil.copyfile(path, to / path.name)
    assert (to / INDEX).exists() == (folder / INDEX).exists()


def _record(models: Sequence[Path], base: Path | None, recipe: Recipe) -> dict[str, object]:
    return {
        "method": recipe.method,
        "models": [str(model) for model in models],
        "base": None if base is None else str(base),
        "weights": list(recipe.weights),
        "t": recipe.t,
        "density": recipe.density,
        "scale": recipe.scale,
        "seed": recipe.seed,
    }
