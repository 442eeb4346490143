"""The options of a replay."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from penstock.protocol.command_line import Parameter


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """What is replayed, and what the record may name."""

    first: Annotated[int | None, Parameter(name="--from")] = None
    """Start from the newest stored checkpoint at or before this version instead of the initial model."""
    last: Annotated[int | None, Parameter(name="--to")] = None
    """Last version to train."""
    batch: str | None = None
    """Step, or folder, of a batch that the run saved when it stopped by itself (`penstock runs stopped RUN`)."""
    model: Path | None = None
    """Folder or GGUF file of the initial model, if it has moved since the run."""
    user_code: bool = False
    """Run the losses, filters and others that the record names by path; the record may be another person's."""
    trusted_keys: Path | None = None
    """File of public keys, one of which has signed the stored weights; default $PENSTOCK_WORKER__TRUSTED_KEYS_FILE."""
    json: bool = False
    """Print one JSON object."""
