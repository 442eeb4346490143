"""The log-probabilities of a step as one object: what is written is read, and anything else is refused with the reason."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from penstock.protocol.errors import PackError
from penstock.protocol.packs import step_logprobs
from penstock.protocol.packs.step_logprobs import KeptGroup, LogprobsHeader, StepLogprobs

GROUPS = tuple(KeptGroup(group_id=f"e0.p{n}.a0", pack="a" * 64, row_group=n) for n in range(2))
HEADER = LogprobsHeader(run_id="run", step=3, trained_version=2, made_version=3, groups=GROUPS)


def made(rows: list[list[int]], logprobs: list[float], outcomes: list[int]) -> StepLogprobs:
    index = np.array(rows, np.int32).reshape(-1, 3)
    return StepLogprobs(HEADER, index, np.array(logprobs, np.float32), np.array(outcomes, np.uint8))


FOUND = made([[1, 1, 3], [0, 0, 2], [0, 2, 1]], [-3.0, 0.0, -9.0, -0.5, -1.5, -2.0], [0, 0, 0, 5, 1, 0])
DATA = step_logprobs.encode(FOUND)


def decoded(data: bytes = DATA, run_id: str = "run", step: int = 3) -> StepLogprobs:
    return step_logprobs.decode(data, run_id=run_id, step=step)


def rewritten(change: Callable[[dict[str, Any]], None], more: bytes = b"", *, body: bytes | None = None) -> bytes:
    (size,) = struct.unpack_from("<Q", DATA)
    header = json.loads(DATA[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + (DATA[8 + size :] if body is None else body) + more


def with_rows(rows: list[list[int]], logprobs: list[float], outcomes: list[int]) -> bytes:
    """An object of these arrays, their places as they should be."""
    arrays = {
        "rows": np.array(rows, "<i4").reshape(-1, 3),
        "logprobs": np.array(logprobs, "<f4"),
        "outcomes": np.array(outcomes, "u1"),
    }

    def change(header: dict[str, Any]) -> None:
        at = 0
        for name, array in arrays.items():
            header[name] |= {"shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
            at += array.nbytes

    return rewritten(change, body=b"".join(array.tobytes() for array in arrays.values()))


def test_what_is_written_is_read_by_us_and_by_safetensors() -> None:
    """Every row has its values; a group is found by its id and pack only."""
    found = decoded()
    assert found.header == HEADER
    rows = found.group("e0.p0.a0", "a" * 64)
    assert rows is not None
    assert {number: (row.logprobs.tolist(), row.outcomes.tolist()) for number, row in rows.items()} == {
        0: ([-0.5, -1.5], [5, 1]), 2: ([-2.0], [0]),
    }  # fmt: skip
    assert found.group("e0.p0.a0", "b" * 64) is None
    arrays = load(DATA)
    assert arrays["logprobs"].tolist() == [-3.0, 0.0, -9.0, -0.5, -1.5, -2.0]
    assert arrays["rows"].tolist() == [[1, 1, 3], [0, 0, 2], [0, 2, 1]]
    assert decoded(step_logprobs.encode(made([], [], []))).group("e0.p1.a0", "a" * 64) == {}


SIX = [-0.5] * 6
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes"),
    "too large": (DATA + b"\0" * step_logprobs.MAX_BYTES, "expected at most"),
    "header beyond the file": (struct.pack("<Q", 2**40) + DATA[8:], "a header of"),
    "no JSON": (struct.pack("<Q", 4) + b"\xff\xff\xff\xff", "not readable"),
    "nested deeply": (struct.pack("<Q", 200_000) + b"[" * 200_000, "not readable"),
    "no header of ours": (rewritten(lambda h: h.pop("__metadata__")), "not readable"),
    "another schema": (rewritten(lambda h: h["__metadata__"].update(schema="other.v1")), "schema 'other.v1'"),
    "more tensors": (rewritten(lambda h: h.update(more=h["rows"])), "4 tensors"),
    "another dtype": (rewritten(lambda h: h["logprobs"].update(dtype="F64")), "another dtype"),
    "a shape that is none": (rewritten(lambda h: h["rows"].update(shape={})), "without a shape"),
    "a shape of text": (rewritten(lambda h: h["logprobs"].update(shape="99")), "9 tokens"),
    "more tokens than allowed": (rewritten(lambda h: h["logprobs"].update(shape=[2**40])), "tokens, expected"),
    "more rows than allowed": (rewritten(lambda h: h["rows"].update(shape=[2**30, 3])), "rows, expected"),
    "fewer outcomes than tokens": (rewritten(lambda h: h["outcomes"].update(shape=[5])), "tensor outcomes"),
    "overlapping tensors": (rewritten(lambda h: h["outcomes"].update(data_offsets=[0, 6])), "tensor outcomes"),
    "cut short": (DATA[:-1], "bytes are missing"),
    "bytes after its tensors": (DATA + b"\0", "1 bytes after"),
    "a row of no group": (with_rows([[2, 0, 6]], SIX, [0] * 6), "a row of a group"),
    "a negative length": (with_rows([[0, 0, -1], [0, 1, 7]], SIX, [0] * 6), "negative number"),
    "fewer tokens than its rows": (with_rows([[0, 0, 7]], SIX, [0] * 6), "its rows have 7 tokens"),
    "a row twice": (with_rows([[0, 0, 3], [0, 0, 3]], SIX, [0] * 6), "a row twice"),
    "a probability above one": (with_rows([[0, 0, 6]], [*SIX[1:], 0.5], [0] * 6), "not a log-probability"),
    "no number": (with_rows([[0, 0, 6]], [*SIX[1:], float("nan")], [0] * 6), "not a log-probability"),
    "minus infinity": (with_rows([[0, 0, 6]], [*SIX[1:], float("-inf")], [0] * 6), "not a log-probability"),
    "an unknown outcome": (with_rows([[0, 0, 6]], SIX, [0] * 5 + [8]), "an outcome of 8"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_object_is_refused(name: str) -> None:
    data, reason = HOSTILE[name]
    with pytest.raises(PackError, match=reason):
        decoded(data)


def test_an_object_of_another_step_or_run_is_refused() -> None:
    for run_id, step in (("run", 4), ("other", 3)):
        with pytest.raises(PackError, match="they are of step 3 of run run"):
            decoded(run_id=run_id, step=step)


def test_values_that_would_be_refused_are_not_written() -> None:
    with pytest.raises(PackError, match="not a log-probability"):
        step_logprobs.encode(made([[0, 0, 1]], [float("-inf")], [0]))
