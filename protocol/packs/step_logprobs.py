"""The trainer's log-probabilities of the tokens of one step, as one object; for people to look at, no trainer reads it.

A safetensors file. Its rows are trained rows of the step's packs, in any order:

| tensor     | is               | holds                                                                              |
|------------|------------------|------------------------------------------------------------------------------------|
| `rows`     | int32 [R, 3]     | number of the group in the header, row of that group in its pack, sampled tokens n |
| `logprobs` | float32 [N]      | of each sampled token, one row after another; N is the sum of n                    |
| `outcomes` | uint8 [N]        | what the loss did with it: `CLIPPED`, `DUAL_CLIPPED` and `REJECTED`, added up      |

Each log-probability is the one that the loss read at the optimizer step that first trained the token, before its update. It is
float32: readers take differences, and float16 would round a log-probability of -10 by up to 0.004, more than policies of
neighbouring versions differ. So a token costs five bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError

from penstock.protocol.errors import PackError
from penstock.protocol.groups import Count, Identifier, Sha256, Wire

SCHEMA_TAG = "step_logprobs.v1"
MAX_TOKENS = 3_000_000  # of one object
MAX_ROWS = 2**18
MAX_GROUPS = 4096
MAX_BYTES = 24 * 1024**2
_MAX_HEADER_BYTES = 2 * 1024**2
CLIPPED, DUAL_CLIPPED, REJECTED = 1, 2, 4
OUTCOMES = {CLIPPED: "clipped", DUAL_CLIPPED: "dual-clipped", REJECTED: "rejected by a correction"}

_DTYPES = {"rows": ("I32", np.dtype("<i4")), "logprobs": ("F32", np.dtype("<f4")), "outcomes": ("U8", np.dtype("u1"))}
_MAX_LOGPROB = 1e-3  # rounding may put a log-probability of 0 a little above it


class KeptRow(NamedTuple):
    logprobs: npt.NDArray[np.float32]  # [n]
    outcomes: npt.NDArray[np.uint8]  # [n]


class KeptGroup(Wire):
    """One group of the object, by its id and its place in the step's packs."""

    group_id: Identifier
    pack: Sha256
    row_group: Count


class LogprobsHeader(Wire):
    """What the log-probabilities are of."""

    run_id: Identifier
    step: Count
    trained_version: Count  # whose weights the first optimizer step of the batch started from
    made_version: Count
    groups: Annotated[tuple[KeptGroup, ...], Field(max_length=MAX_GROUPS)]


@dataclass(frozen=True, slots=True, eq=False)
class StepLogprobs:
    header: LogprobsHeader
    rows: npt.NDArray[np.int32]  # [R, 3]
    logprobs: npt.NDArray[np.float32]  # [N]
    outcomes: npt.NDArray[np.uint8]  # [N]

    def group(self, group_id: str, pack_sha256: str) -> dict[int, KeptRow] | None:
        for number, entry in enumerate(self.header.groups):
            if (entry.group_id, entry.pack) == (group_id, pack_sha256):
                ends = np.cumsum(self.rows[:, 2], dtype=np.int64)
                return {
                    row: KeptRow(self.logprobs[end - n : end], self.outcomes[end - n : end])
                    for (group, row, n), end in zip(self.rows.tolist(), ends.tolist(), strict=True)
                    if group == number
                }
        return None


def encode(step_logprobs: StepLogprobs) -> bytes:
    try:
        _check(step_logprobs)
    except _Refused as err:
        raise PackError(f"log-probabilities of step {step_logprobs.header.step} are not written: {err}") from None
    tensors = {name: getattr(step_logprobs, name).astype(dtype, copy=False) for name, (_, dtype) in _DTYPES.items()}
    metadata = {"schema": SCHEMA_TAG, "step": step_logprobs.header.model_dump_json()}
    header = {"__metadata__": metadata, **_entries(len(step_logprobs.rows), len(step_logprobs.logprobs))}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *(tensor.tobytes() for tensor in tensors.values())])


def decode(data: bytes, *, run_id: str, step: int) -> StepLogprobs:
    what = f"log-probabilities of step {step} of run {run_id}"
    try:
        return _decode(data, run_id, step)
    except _Refused as err:
        raise PackError(f"{what}: {err}; the object is not what a trainer writes") from None


class _Refused(Exception):
    """Why an object is refused."""


def _decode(data: bytes, run_id: str, step: int) -> StepLogprobs:
    if not 8 < len(data) <= MAX_BYTES:
        raise _Refused(f"{len(data)} bytes, expected at most {MAX_BYTES}")
    (size,) = struct.unpack_from("<Q", data)
    if not 2 <= size <= min(_MAX_HEADER_BYTES, len(data) - 8):
        raise _Refused(f"a header of {size} bytes in {len(data)}")
    header, document = _header(data[8 : 8 + size])
    if (header.run_id, header.step) != (run_id, step):
        raise _Refused(f"they are of step {header.step} of run {header.run_id}")
    decoded = StepLogprobs(header, **_tensors(data, 8 + size, document))
    _check(decoded)
    return decoded


def _header(text: bytes) -> tuple[LogprobsHeader, dict[str, Any]]:
    try:
        document = json.loads(text)
        metadata = document.pop("__metadata__")
        tag, header = metadata["schema"], LogprobsHeader.model_validate_json(metadata["step"])
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, ValidationError) as err:
        raise _Refused(f"its header is not readable: {type(err).__name__}") from None
    if tag != SCHEMA_TAG:
        raise _Refused(f"schema {str(tag)[:40]!r}, expected {SCHEMA_TAG}")
    if document.keys() != _DTYPES.keys():
        raise _Refused(f"{len(document)} tensors, expected {', '.join(_DTYPES)}")
    return header, document


def _sizes(document: Mapping[str, Any]) -> tuple[int, int]:
    try:
        num_rows, num_tokens = document["rows"]["shape"][0], document["logprobs"]["shape"][0]
    except (KeyError, TypeError, IndexError):
        raise _Refused("a tensor without a shape") from None
    for name, number, most in (("rows", num_rows, MAX_ROWS), ("tokens", num_tokens, MAX_TOKENS)):
        if type(number) is not int or not 0 <= number <= most:
            raise _Refused(f"{str(number)[:20]} {name}, expected 0 to {most}")
    return num_rows, num_tokens


def _entries(num_rows: int, num_tokens: int) -> dict[str, dict[str, Any]]:
    """Return the header's entry for each tensor: they lie one behind the other."""
    entries, at = {}, 0
    for name, (code, dtype) in _DTYPES.items():
        shape = [num_rows, 3] if name == "rows" else [num_tokens]
        end = at + math.prod(shape) * dtype.itemsize
        entries[name], at = {"dtype": code, "shape": shape, "data_offsets": [at, end]}, end
    return entries


def _tensors(data: bytes, begin: int, document: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    tensors, end = {}, begin
    for name, entry in _entries(*_sizes(document)).items():
        start, end = (begin + offset for offset in entry["data_offsets"])
        if document[name] != entry or end > len(data):
            raise _Refused(f"tensor {name} has another dtype, shape or place than {entry}, or its bytes are missing")
        tensors[name] = np.frombuffer(data, _DTYPES[name][1], math.prod(entry["shape"]), start).reshape(entry["shape"])
    if end != len(data):
        raise _Refused(f"{len(data) - end} bytes after its tensors")
    return tensors


def _check(step_logprobs: StepLogprobs) -> None:
    rows, logprobs, outcomes = step_logprobs.rows, step_logprobs.logprobs, step_logprobs.outcomes
    if len(rows) and (rows.min() < 0 or rows[:, 0].max() >= len(step_logprobs.header.groups)):
        raise _Refused(f"a row of a group that is none of its {len(step_logprobs.header.groups)}, or a negative number")
    if (claimed := int(rows[:, 2].sum(dtype=np.int64))) != len(logprobs):
        raise _Refused(f"its rows have {claimed} tokens, and it has {len(logprobs)}")
    places = rows[:, 0].astype(np.int64) << 32 | rows[:, 1]
    if len(np.unique(places)) != len(places):
        raise _Refused("a row twice")
    if len(logprobs) and not (np.isfinite(logprobs).all() and float(logprobs.max()) <= _MAX_LOGPROB):
        raise _Refused("a value that is not a log-probability")
    if len(outcomes) and int(outcomes.max()) > CLIPPED + DUAL_CLIPPED + REJECTED:
        raise _Refused(f"an outcome of {int(outcomes.max())}")
