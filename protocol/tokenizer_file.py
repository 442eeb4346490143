"""Read a ``tokenizer.json`` from outside: the one check of every program that tokenizes; the importer of `tokenizers`.

The Rust library aborts the process where it cannot allocate, so what a file could make of a short text is computed from
its JSON before it is loaded: by its normalizer, pre-tokenizer, decoder, post-processor, and longest token.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from penstock.protocol.errors import UnsupportedModel
from penstock.protocol.files import json_value, read_regular

_MAX_BYTES = 256 * 1024**2  # the largest published ones have about 35 MB
_MAX_GROWTH = 64
_MAX_TOKEN_CHARS = 2048  # the longest published ones are runs of some hundred blanks
_MAX_ADDED_CHARS = 8 * 1024**2
_MAX_PARTS = 64  # components of a normalizer, pre-tokenizer, decoder or post-processor
_MAX_TEXT = 64 * 1024  # of a regular expression
_MAX_TEMPLATE_IDS = 1024
_UNICODE_GROWTH = 18  # of NFKC: U+FDFA
_SEQUENCES = ("normalizers", "pretokenizers", "decoders", "processors")
_DOUBLING = frozenset({"ByteLevel", "Metaspace", "BertNormalizer", "BPEDecoder", "CTC", "WordPiece"})


def load_tokenizer(path: Path) -> Tokenizer:
    """Return a tokenizer without truncation and padding; raises UnsupportedModel naming what the file must not hold."""
    check_tokenizer(path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except BaseException as err:
        if not is_of_library(err):
            raise
        raise UnsupportedModel(f"{path}: not a tokenizer ({err}); save it again with transformers") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def is_of_library(err: BaseException) -> bool:
    """Return True for an error or panic of the Rust library; the latter's class is no Exception and not importable."""
    return type(err) is Exception or type(err).__name__ == "PanicException"


def check_tokenizer(path: Path) -> None:
    """Raise UnsupportedModel for a file that could make long texts or many tokens of a short text, or is not valid JSON."""
    try:
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise UnsupportedModel(f"{path}: {size} bytes, the limit is {_MAX_BYTES}")
        described = json_value(read_regular(path, _MAX_BYTES, follow=True), object_pairs_hook=_without_repetition)
        _check(described)
    except OSError as err:
        raise UnsupportedModel(f"{path}: not readable ({err.strerror}); check the path") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as err:
        raise UnsupportedModel(
            f"{path}: not a tokenizer ({str(err)[:200]}); use another one, or save it again with transformers"
        ) from None


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):  # the Rust library may read another one
        raise ValueError("duplicate key")
    return content


def _check(described: dict[str, Any]) -> None:
    names = ("normalizer", "pre_tokenizer", "decoder")
    normalizer, pre_tokenizer, decoder = (_growth(name, described.get(name)) for name in names)
    growth = normalizer * pre_tokenizer
    _check_limit(growth, _MAX_GROWTH, "its normalizer makes texts up to {} times as long")
    _check_limit(decoder, _MAX_GROWTH // 4, "its decoder makes texts up to {} times as long")
    for part in _parts("post_processor", described.get("post_processor")):
        _check_template(part)
    added = described.get("added_tokens") or []
    characters = growth * sum(len(token["content"]) for token in added)
    _check_limit(characters, _MAX_ADDED_CHARS, "its added tokens have {} characters, normalized")
    model = described["model"]
    vocabulary = model.get("vocab") or []
    tokens = vocabulary if isinstance(vocabulary, dict) else (entry[0] for entry in vocabulary)
    longest = max(max(map(len, tokens), default=0), max((len(token["content"]) for token in added), default=0))
    _check_limit(longest, _MAX_TOKEN_CHARS, "a token of {} characters")
    texts = [value for name, value in model.items() if isinstance(value, str) and name != "type"]
    _check_limit(max(map(len, texts), default=0), _MAX_GROWTH, "its model adds up to {} characters to each one")


def _check_limit(size: int, limit: int, text: str) -> None:
    if size > limit:
        raise ValueError(f"{text.format(size)}, the limit is {limit}")


def _parts(name: str, component: Any) -> list[dict[str, Any]]:
    """Return all components of a sequence, nested ones too."""
    parts, remaining = [], [component] if component is not None else []
    while remaining:
        node = remaining.pop()
        remaining += [item for key in _SEQUENCES for item in node.get(key) or []]
        parts.append({key: value for key, value in node.items() if key not in _SEQUENCES})
        _check_limit(len(parts) + len(remaining), _MAX_PARTS, f"its {name} has {{}} parts")
    return parts


def _growth(name: str, component: Any) -> int:
    growth = 1
    for part in _parts(name, component):
        for key, text in _texts(part):
            if key == "precompiled_charsmap":
                growth *= _growth_of_map(text)
            elif key in ("content", "prepend"):
                growth *= 1 + len(text)
            else:
                limit = _MAX_TEXT if key in ("Regex", "String") else _MAX_GROWTH
                _check_limit(len(text), limit, f"its {name} has a text of {{}} characters")
        growth *= 2 if part.get("type") in _DOUBLING else 1
    return growth


def _growth_of_map(text: str) -> int:
    """Return what a character becomes at most, beyond NFKC; ``text`` is sentencepiece's table in base64."""
    data = base64.b64decode(text)
    replacements = data[4 + int.from_bytes(data[:4], "little") :].decode(errors="replace")
    return math.ceil(max(map(len, replacements.split("\0"))) / _UNICODE_GROWTH) or 1


def _check_template(part: dict[str, Any]) -> None:
    special = part.get("special_tokens") or {}
    for name in ("single", "pair"):
        pieces = [(kind, piece["id"]) for entry in part.get(name) or [] for kind, piece in entry.items()]
        most = 1 if name == "single" else 2
        _check_limit(sum(kind == "Sequence" for kind, _ in pieces), most, "its post_processor repeats a text {} times")
        ids = sum(len(special[token]["ids"]) for kind, token in pieces if kind == "SpecialToken")
        _check_limit(ids, _MAX_TEMPLATE_IDS, "its post_processor adds {} tokens")
    texts = (len(text) for key, text in _texts(part) if key not in ("Regex", "String"))
    _check_limit(max(texts, default=0), _MAX_TOKEN_CHARS, "its post_processor has a text of {} characters")


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, key)
    elif isinstance(value, str):
        yield key, value
