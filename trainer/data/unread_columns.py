"""Refuses columns whose loss would change what a row means: answers to compare, self-play, and pictures; pure."""

from __future__ import annotations

import json
from typing import Any

from penstock.trainer.data.row_files import Row
from penstock.trainer.errors import MalformedData

_PAIR = ("chosen", "rejected")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")


def refuse_unread(row: Row) -> None:
    """Raise MalformedData naming the column, and the settings that read the row without it."""
    if found := [name for name in _PAIR if _is_given(row.get(name))]:
        raise MalformedData(
            f"column {found[0]}: a preference, which `penstock dpo` trains on; set data.ignore = {json.dumps(found)} to "
            "train on the prompt alone; for SFT on the chosen answers set also "
            'data.map.response = "chosen" and ignore only rejected'
        )
    if isinstance(row.get("label"), bool) and "completion" in row:
        raise MalformedData(
            'column label: tells good completions from bad ones, which `penstock dpo` with dpo.loss = "kto" trains on; keep only '
            'the rows with good ones, or set data.ignore = ["label"]'
        )
    if row.get("self_play") not in (None, False, "", "false"):
        raise MalformedData(
            "column self_play: answers of a group are compared with one another by the run's reward, not by a row; serve a judge that "
            'compares (mode = "pairwise" of `penstock reward serve-judge`), choose it as reward.name, and set data.ignore = '
            '["self_play"]'
        )
    if found := [name for name in _MEDIA if _is_given(row.get(name))]:
        raise MalformedData(
            f"column {found[0]}: only text is trained on; leave the row out, or set data.ignore = {json.dumps(found)} to train "
            "on its text alone"
        )


def _is_given(value: Any) -> bool:
    return value is not None and value not in ([], "")
