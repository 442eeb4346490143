"""Resolve what is evaluated: a model folder, the final model of a run, or one of its stored versions.

A model folder is published as version 0 of a run, bucket by bucket, without loading it into torch.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.console import connections, launch
from penstock.console.registry import versions
from penstock.console.registry.model_merge import open_model
from penstock.console.tools.runs import unknown_run
from penstock.protocol import blob_keys, seals
from penstock.protocol.config.run_file import refuse_masks, toml_text
from penstock.protocol.errors import ConfigError
from penstock.protocol.facts import Head
from penstock.protocol.files import json_value, read_regular
from penstock.protocol.groups import BlobRef
from penstock.protocol.model_folder import refuse_adapter
from penstock.protocol.subjects import check_run_id
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.bucket_codec import bucket_xxh3
from penstock.protocol.weights.layout import (
    SAFETENSORS_DTYPES,
    TensorDigest,
    TensorSpec,
    WeightLayout,
    bucket_digests,
    build_layout,
    shard_header,
    shard_name,
    weights_digest,
)
from penstock.protocol.weights.manifest import BucketState, StoredRange
from penstock.trainer.connections import Connections
from penstock.trainer.data.inputs import model_folder
from penstock.trainer.publishing.publication import HeadKey
from penstock.trainer.publishing.rank_publisher import StoredObjects
from penstock.trainer.publishing.version_writer import Content, Label, VersionWriter

if TYPE_CHECKING:
    from penstock.protocol.weights.signature import SigningKey


# What an evaluation takes over from a run. Of the data: all but which rows there are.
OWN_DATA = frozenset({"train", "eval", "from_run", "max_samples", "shuffle", "weights"})
_SECTIONS: Mapping[str, tuple[str, ...] | None] = {  # None: the whole section
    "data": None,
    "rollout": ("max_new_tokens", "temperature", "stop", "environment"),
    "eval": ("map", "max_new_tokens", "temperature", "top_p", "top_k", "environment"),
    "reward": None,
}
VERSION = PolicyVersion(0)


@dataclass(frozen=True, slots=True)
class Target:
    name: str  # as it was named
    home: Path  # the folder of a run
    identity: str  # changes with the weights
    folder: Path | None = None  # None: a version that has to be exported first
    run: str | None = None
    version: int | None = None
    state_root: str = ""
    recorded: Path | None = None  # config.json of the run


def find(name: str, arguments: Sequence[str], environ: Mapping[str, str]) -> Target:
    """Return the target that a user named; raises ConfigError when there is none.

    A folder with a config.json, RUN, RUN@VERSION, RUN@best, RUN@head, RUN@TAG, or an id on the Hugging Face hub.
    """
    runs = connections.find(arguments, environ).settings.run.dir
    path = Path(name)
    refuse_adapter(path, "MODEL")
    if (path / "config.json").is_file() and not (runs / name / "metrics.jsonl").is_file():
        return _of_folder(name, path, runs)
    run, at, version = name.partition("@")
    is_run = (runs / run).is_dir()
    if not at and is_run:
        return _final_model(check_run_id(run), runs / run)
    if not at or (not is_run and "/" in run):
        folder = model_folder(path, "MODEL")
        if not (folder / "config.json").is_file():
            raise unknown_run(name, runs, more=", or name a model folder")
        return _of_folder(name, folder, runs)
    return _of_version(check_run_id(run), version, runs / run, arguments)


def export(target: Target, to: Path, arguments: Sequence[str]) -> Path:
    """Return the model folder of a target; a stored version is written to ``to``. Raises ConfigError."""
    if target.folder is not None:
        return target.folder
    assert target.run is not None
    if not (to / "config.json").is_file():
        _penstock("weights", "export", target.run, "--version", str(target.version), "--to", str(to), *arguments)
    return to


def recorded_settings(target: Target, *, with_reward: bool, files: Sequence[Path] = ()) -> str:
    """Return the run's settings of data, sampling and rewards as a run file; empty for a folder.

    ``with_reward`` is False when another reward was named: then rewards by source are left out. ``files`` are read after it. Raises UntrustedFolder unless this
    user's run wrote them, since they may name code and servers, and ConfigError for settings that cannot be read.
    """
    if target.recorded is None:
        return ""
    try:
        document = json.loads(seals.read(target.recorded) or b"null")
        settings = document["settings"]
        sections = {name: _part(settings.get(name) or {}, keys) for name, keys in _SECTIONS.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise ConfigError(
            f"{target.recorded}: its settings cannot be read ({type(err).__name__}: {err}); restore the file, or export the version "
            "(penstock weights export) and evaluate the folder"
        ) from None
    sections["data"] = {key: value for key, value in sections["data"].items() if key not in OWN_DATA}
    if not with_reward:
        sections["reward"] = {k: v for k, v in sections["reward"].items() if k not in {"name", "by_source"}}
    used = {name: section for name, section in sections.items() if name != "reward" or with_reward}
    refuse_masks({**document, "settings": used}, (*used,), str(target.recorded), files=files)
    return "".join(f"{name} = {toml_text(section)}\n" for name, section in sections.items() if section)


def _part(section: Mapping[str, Any], keys: tuple[str, ...] | None) -> dict[str, Any]:
    return {key: value for key, value in section.items() if (keys is None or key in keys) and value is not None}


def _of_folder(name: str, folder: Path, runs: Path) -> Target:
    safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in folder.resolve().name)
    return Target(name, runs / f"eval-{safe}", _identity(folder), folder)


def _final_model(run: str, home: Path) -> Target:
    folder = home / "model"
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"run {run} has no final model yet ({folder}); it is written when the run ends. Name a version: {run}@head, {run}@best "
            f"or one of `penstock weights {run}`"
        )
    try:
        version = int(json_value(read_regular(home / "trainer.json"))["version"])
    except (OSError, ValueError, KeyError, TypeError):
        version = None
    return Target(run, home, _identity(folder), folder, run, version, recorded=_config(home))


def _of_version(run: str, version: str, home: Path, arguments: Sequence[str]) -> Target:
    tag = versions.read_tags(home).get(version)
    if tag is not None and ((kept := home / versions.MODELS / version) / "config.json").is_file():
        return Target(f"{run}@{version}", home, _identity(kept), kept, run, tag.version, recorded=_config(home))
    version = str(tag.version) if tag is not None else version
    rows: list[dict[str, Any]] = json.loads(_penstock("weights", run, "--json", *arguments))
    named = [row for row in rows if _is_named(row, version, home)]
    if not named:
        stored = ", ".join(str(row["version"]) for row in rows) or "none"
        raise ConfigError(f"run {run} has no version {version}; stored: {stored}; see: penstock weights {run}")
    row = named[0]
    name = f"{run}@{row['version']}"
    return Target(
        name, home, row["state_root"], None, run, int(row["version"]), row["state_root"], recorded=_config(home)
    )


def _is_named(row: Mapping[str, Any], version: str, home: Path) -> bool:
    if version == "head":
        return bool(row["head"])
    if version == "best":
        return row["kept"]["best"] is not None and row["kept"]["best"]["rank"] == 1
    return str(row["version"]) == version


def _config(home: Path) -> Path | None:
    return home / "config.json" if (home / "config.json").is_file() else None


def _identity(folder: Path) -> str:
    """Return a digest of names, sizes and times of a folder's files, and of its config: it changes with the weights."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    config = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    return hashlib.sha256(json.dumps([str(folder.resolve()), config, stats]).encode()).hexdigest()


def _penstock(*arguments: str) -> str:
    done = subprocess.run(launch.module("penstock", *arguments), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(done.stderr.strip().removeprefix("penstock: ") or f"penstock {' '.join(arguments)} failed")
    return done.stdout


def publish_folder(connections: Connections, folder: Path, signing_key: SigningKey | None = None) -> str:
    """Store the tensors of a model folder as a full snapshot and point the run's head to it; return its state root.

    Raises ConfigError for a folder without safetensors, BlobError, and PublicationFailed.
    """
    tensors = open_model(folder)
    layout = build_layout([TensorSpec(t.name, SAFETENSORS_DTYPES[t.dtype][0], t.shape) for t in tensors.values()])
    attempt = secrets.token_hex(8)
    digests: list[TensorDigest] = []
    objects: list[BlobRef] = []
    states: list[BucketState] = []
    for number, bucket in enumerate(layout.buckets):
        raw = np.concatenate([tensors[placed.name].raw() for placed in bucket.tensors])
        digests += bucket_digests(bucket, raw.data)
        name = shard_name(number, len(layout.buckets))
        key = blob_keys.weights_shard(connections.run_id, VERSION, attempt, name)
        blob = connections.blobs.put(key, shard_header(bucket) + raw.tobytes())
        states.append(
            BucketState(
                codec="safetensors",
                stored=StoredRange(object=number, offset=0, size_bytes=blob.size_bytes, sha256=blob.sha256),
                num_words=bucket.num_words,
                num_changed=bucket.num_words,
                new_xxh3=bucket_xxh3(raw),
            )
        )
        objects.append(blob)
    writer = VersionWriter(connections, folder, signing_key)
    root = weights_digest(digests)
    stored = StoredObjects(attempt, tuple(objects), tuple(states))
    content = Content(layout, writer.small_files(_dtype(folder, layout)), stored, root)
    written = writer.write("anchor", Label(VERSION, 0, 0), content, parent=None)
    HeadKey(connections.bus, connections.run_id).move(Head(version=VERSION, step=0, manifest=written.reference))
    return root


def _dtype(folder: Path, layout: WeightLayout) -> str:
    try:
        config = json.loads((folder / "config.json").read_bytes())
        named = config.get("dtype") or config.get("torch_dtype")
    except (OSError, ValueError, AttributeError):
        raise ConfigError(f"{folder / 'config.json'} is not readable; restore it") from None
    if isinstance(named, str):
        return named
    sizes: Counter[str] = Counter()
    for bucket in layout.buckets:
        sizes[bucket.dtype] += bucket.num_words
    return sizes.most_common(1)[0][0]
