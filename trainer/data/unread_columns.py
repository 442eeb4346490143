"""Refuses columns whose loss would change what a row means: answers to compare, self-play, and pictures; pure."""

from __future__ import annotations

import json
from typing import Any

from penstock.trainer.data.row_files import Row
from penstock.trainer.data.row_images import COLUMN
from penstock.trainer.errors import MalformedData

_PAIR = ("chosen", "rejected")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")


def is_self_play(row: Row) -> bool:
    """Return True if the completions of the row's group are to be compared with one another."""
    return row.get("self_play") not in (None, False, "", "false")


def refuse_unread(row: Row, *, reads_self_play: bool = False, reads_images: bool = False) -> None:
    """Raise MalformedData naming the column, and the settings that read the row without it."""
    if found := [name for name in _PAIR if _is_given(row.get(name))]:
        raise MalformedData(
            f"column {found[0]}: a preference, which `penstock dpo` trains on, and `penstock train` with algorithm.dpo_coefficient; set data.ignore = {json.dumps(found)} to "
            "train on the prompt alone; for SFT on the chosen answers set also "
            'data.map.response = "chosen" and ignore only rejected'
        )
    if isinstance(row.get("label"), bool) and "completion" in row:
        raise MalformedData(
            'column label: tells good completions from bad ones, which `penstock dpo` with dpo.loss = "kto" trains on; keep only '
            'the rows with good ones, or set data.ignore = ["label"]'
        )
    if is_self_play(row) and not reads_self_play:
        raise MalformedData(
            "column self_play: the answers of a group are compared with one another; set data.self_play_reward to a reward that "
            'compares, such as a judge with mode = "pairwise" (`penstock reward serve-judge`), or data.ignore = ["self_play"] to score '
            "such rows as all others"
        )
    refuse_media(row, reads_images=reads_images)


def refuse_media(row: Row, *, reads_images: bool = False) -> None:
    """Raise MalformedData naming a column of pictures, films or sounds that is not read, and the setting that leaves it out."""
    if found := [name for name in _MEDIA if _is_given(row.get(name)) and not (reads_images and name == COLUMN)]:
        reads = 'images in the column "images" (data.map.images)' if reads_images else "text alone"
        raise MalformedData(
            f"column {found[0]}: what is read is {reads}; leave the row out, or set data.ignore = {json.dumps(found)} to train on the rest"
        )


def _is_given(value: Any) -> bool:
    return value is not None and value not in ([], "")
