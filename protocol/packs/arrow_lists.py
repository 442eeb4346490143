"""Columns of lists in Parquet objects: their type, and building them without a Python object per element."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa


def list_of(kind: pa.DataType) -> pa.DataType:
    """Return the type of a list column whose elements are never null, so that readers need no check."""
    return pa.list_(pa.field("element", kind, nullable=False))


def lists(arrays: Sequence[np.ndarray], kind: pa.DataType) -> pa.Array:
    """Return a column with one list for each array."""
    offsets = np.zeros(len(arrays) + 1, dtype=np.int32)
    np.cumsum([len(a) for a in arrays], out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(arrays), type=kind), type=list_of(kind))
