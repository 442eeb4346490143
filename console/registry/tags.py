"""Names that a user gives to versions of a run, in ``tags.json`` in the run's folder.

A tag names a version and the digest of its weights. A version that the run retires keeps its tag and loses its objects,
unless its model was written to ``models/TAG`` in the run's folder when it was tagged.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.protocol.errors import ConfigError
from penstock.protocol.files import atomic_write, read_regular

FILE = "tags.json"
MODELS = "models"
RESERVED = ("best", "head")  # the run itself gives these
_NAME = re.compile(r"(?=.*[A-Za-z_])[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


class Tag(BaseModel):
    """One named version."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Annotated[int, Field(ge=0)]
    state_root: str = ""
    at: float = 0.0  # seconds since 1970
    note: str = ""


class _Tags(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_tag: Literal["model_tags.v1"] = "model_tags.v1"
    tags: dict[str, Tag] = {}


def read(run_folder: Path) -> dict[str, Tag]:
    """Return the tags of a run by name; raises ConfigError for a damaged file."""
    path = run_folder / FILE
    try:
        return _Tags.model_validate_json(read_regular(path)).tags
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError) as err:
        raise ConfigError(
            f"{path} cannot be read ({str(err).splitlines()[0]}); restore it, or remove it to lose its tags"
        ) from None


def check_name(name: str) -> str:
    """Return a tag's name; raises ConfigError for one that could be mistaken for a version or a path."""
    if name in RESERVED or not _NAME.fullmatch(name):
        raise ConfigError(
            f"tag {name!r}: expected 1 to 64 of A-Z, a-z, 0-9, '_', '.', '-' with a letter among them, and not {' or '.join(RESERVED)}, "
            "which the run gives itself"
        )
    return name


def put(run_folder: Path, name: str, tag: Tag, *, move: bool = False) -> Tag | None:
    """Store a tag and return the one that it replaces; raises ConfigError if there is one and ``move`` is not set."""
    known = read(run_folder)
    before = known.get(check_name(name))
    if before is not None and before.version != tag.version and not move:
        raise ConfigError(
            f"tag {name} of run {run_folder.name} names version {before.version}; to move it to version {tag.version}, add --move"
        )
    _write(run_folder, {**known, name: tag})
    return before


def remove(run_folder: Path, name: str) -> Tag:
    """Remove a tag and return it; raises ConfigError when there is none."""
    known = read(run_folder)
    if name not in known:
        raise ConfigError(f"run {run_folder.name} has no tag {name}; it has {', '.join(sorted(known)) or 'none'}")
    _write(run_folder, {key: value for key, value in known.items() if key != name})
    return known[name]


def _write(run_folder: Path, tags: dict[str, Tag]) -> None:
    atomic_write(run_folder / FILE, _Tags(tags=tags).model_dump_json(indent=1) + "\n")
