"""Digests of a safetensors file's tensors, for the simulated engine and for tests that compare files and buckets."""

from __future__ import annotations

import json

from penstock.protocol.errors import MalformedWeights
from penstock.protocol.weights.layout import SAFETENSORS_DTYPES, TensorDigest, tensor_digest


def safetensors_digests(data: bytes | memoryview) -> list[TensorDigest]:
    view = memoryview(data).cast("B")
    start = 8 + int.from_bytes(view[:8], "little")
    digests = []
    try:
        header = json.loads(bytes(view[8:start]))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            body = view[start + begin : start + end]
            if len(body) != end - begin:
                raise ValueError(f"tensor {name}: bytes {begin} to {end} are missing")
            digests.append(tensor_digest(name, SAFETENSORS_DTYPES[entry["dtype"]][0], entry["shape"], body))
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise MalformedWeights(f"not safetensors: {type(err).__name__}: {err}") from None
    return digests
