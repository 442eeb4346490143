"""The text of each token, where the model's tokenizer is on this machine."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.protocol.errors import PenstockError

_TOKENIZER = "tokenizer.json"


def reader(folder: Path, config: dict[str, Any]) -> Callable[[Sequence[int]], list[str]] | None:
    """Return what decodes tokens one by one; None without the library `tokenizers`, or a tokenizer on this machine.

    Looks into the run's folder first, then where ``model.path`` of the run's settings is.
    """
    if importlib.util.find_spec("tokenizers") is None:
        return None
    settings = config.get("settings")
    model = settings.get("model") if isinstance(settings, dict) else None
    path = model.get("path") if isinstance(model, dict) else None
    for place in (folder / "model", *([Path(path)] if isinstance(path, str) and path else [])):
        if (place / _TOKENIZER).is_file():
            return _decoder(place)
    return None


@functools.lru_cache(maxsize=4)
def _decoder(folder: Path) -> Callable[[Sequence[int]], list[str]] | None:
    # Costs 20 ms to import, and is an extra of the rollout worker.
    from penstock.protocol.chat_tokenizer import ChatTokenizer  # noqa: PLC0415

    try:
        tokenizer = ChatTokenizer.read(folder)
    except (PenstockError, OSError):
        return None
    return lambda ids: tokenizer.decode_many([[token] for token in ids], skip_special_tokens=False)
