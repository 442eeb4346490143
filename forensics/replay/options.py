"""The options of a replay."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from penstock.protocol.command_line import Help, Json


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    first: Annotated[
        int | None,
        Help(
            "Start from the newest stored checkpoint at or before this version instead of the initial model.",
            name="--from",
        ),
    ] = None
    last: Annotated[int | None, Help("Last version to train.", name="--to")] = None
    batch: Annotated[
        str | None,
        Help("Step, or folder, of a batch that the run saved when it stopped by itself (`penstock runs stopped RUN`)."),
    ] = None
    model: Annotated[Path | None, Help("Folder or GGUF file of the initial model, if it has moved since the run.")] = (
        None
    )
    user_code: Annotated[
        bool,
        Help("Run the losses, filters and others that the record names by path; the record may be another person's."),
    ] = False
    trusted_keys: Annotated[
        Path | None,
        Help(
            "File of public keys, one of which has signed the stored weights; default $PENSTOCK_WORKER__TRUSTED_KEYS_FILE."
        ),
    ] = None
    json: Json = False
