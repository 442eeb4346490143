"""Turns what a run file names as model and data into local paths: files, folders of data sets, and ids on the hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Literal, TypeVar

from penstock.protocol.config.connection import Section
from penstock.protocol.errors import ConfigError
from penstock.protocol.files import target_outside
from penstock.protocol.model_folder import refuse_adapter
from penstock.trainer.data_settings import FineTuningSettings
from penstock.trainer.settings import TrainerSettings

S = TypeVar("S", bound=Section)
Split = Literal["train", "eval"]

_SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".arrow")
_DESCRIPTIONS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json"}
_SPLITS: dict[Split, tuple[tuple[str, ...], ...]] = {  # the first that a data set has
    "train": (("train", "training"),),
    "eval": (("validation", "valid", "val", "dev"), ("test", "eval", "evaluation", "heldout")),
}
_ID = re.compile(
    r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?(:(?P<pattern>[^:]+))?", re.ASCII
)
_MAX_LISTED = 8
_OWN_DATA = ("sft", "dpo", "rm")  # sections with separate rows


def resolve_inputs(settings: TrainerSettings) -> TrainerSettings:
    update: dict[str, Section] = {
        "model": settings.model.model_copy(update={"path": model_folder(settings.model.path, "model.path")})
    }
    if settings.data.from_run is None:
        data = settings.data
        train = data.train_files if data.train else ()
        update["data"] = _with_files(data, "data", train=(train, "train"), eval=(data.eval_files, "eval"))
        sources = {
            name: _with_files(source, f"eval.source.{name}", data=(source.files, "eval"))
            for name, source in settings.eval.source.items()
        }
        update["eval"] = settings.eval.model_copy(update={"source": sources})
    for name in _OWN_DATA:
        section: FineTuningSettings = getattr(settings, name)
        update[name] = _with_files(section, name, data=(section.files, "train"), eval_data=(section.eval_files, "eval"))
    return settings.model_copy(update=update)


def model_folder(path: Path, key: str) -> Path:
    if path.exists() or (named := _id(path)) is None:
        refuse_adapter(path, key)
        return path
    from penstock.trainer.data import hub  # noqa: PLC0415  takes a second to import

    return hub.download_model(named["id"], named["revision"], key)


def data_files(paths: Sequence[Path], key: str, split: Split) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            names = [
                str(PurePosixPath(*file.relative_to(path).parts)) for file in sorted(path.rglob("*")) if file.is_file()
            ]
            chosen = [path / name for name in choose_files(names, split, None, f"{key} = {path}")]
            if leaving := [(file, target) for file in chosen if (target := target_outside(file, path)) is not None]:
                raise ConfigError(
                    f"{key} = {path}: {leaving[0][0]} links to {leaving[0][1]}, outside of the folder; copy the file there, or name it itself"
                )
            files += chosen
        elif path.exists() or (named := _id(path)) is None:
            files.append(path)
        else:
            from penstock.trainer.data import hub  # noqa: PLC0415  takes a second to import

            pattern, where = named["pattern"], f"{key} = {path}"
            files += hub.download_data(
                named["id"], named["revision"], key, lambda names, p=pattern, w=where: choose_files(names, split, p, w)
            )
    return files


def choose_files(names: Sequence[str], split: Split, pattern: str | None, where: str) -> list[str]:
    data = [
        name
        for name in sorted(names)
        if name.endswith(_SUFFIXES) and PurePosixPath(name).name not in _DESCRIPTIONS and not name.startswith(".")
    ]
    if pattern is not None:
        chosen = [name for name in data if fnmatchcase(name, pattern) or name == pattern]
        if not chosen:
            raise ConfigError(f"{where}: no data file matches {pattern}; there are {_listed(data)}")
        return chosen
    words = {name: set(re.split(r"[^a-z0-9]+", name.lower())) for name in data}
    named = {
        name for group in _SPLITS.values() for split_words in group for name in data if words[name] & set(split_words)
    }
    candidates = (
        [name for name in data if words[name] & set(split_words)] for split_words in _SPLITS[split]
    ) if named else iter([data])  # fmt: skip
    chosen = next(filter(None, candidates), [])
    if not chosen:
        raise ConfigError(f"{where}: it has no file of the split {split}; there are {_listed(data)}")
    kinds = {(str(PurePosixPath(name).parent), PurePosixPath(name).suffix) for name in chosen}
    if len(kinds) > 1:
        first = chosen[0]
        raise ConfigError(f"{where}: it has several data sets, {_listed(chosen)}; name one of them, such as {first}")
    return chosen


def _with_files(section: S, name: str, **sources: tuple[Sequence[Path], Split]) -> S:
    resolved = {key: data_files(paths, f"{name}.{key}", split) for key, (paths, split) in sources.items()}
    update = {
        key: files for key, files in resolved.items() if files != list(sources[key][0])
    }  # recorded as they were given
    return section.model_copy(update=update)


def _id(path: Path) -> re.Match[str] | None:
    text = str(path)
    match = _ID.fullmatch(text)
    if match is None or Path(match["id"]).parent.is_dir():
        return None
    return None if match["pattern"] is None and text.endswith(_SUFFIXES) else match


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return (", ".join(names[:_MAX_LISTED]) or "none") + more
