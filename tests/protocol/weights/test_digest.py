"""The name of a set of weights: one value for the same tensors, in any implementation and any order."""

import numpy as np
import pytest
import torch
from safetensors.torch import save
from tests.safetensors_digests import safetensors_digests

from penstock.protocol.weights.layout import TensorDigest, tensor_digest, weights_digest

TENSORS = {
    "b.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "a.weight": torch.ones(4, dtype=torch.bfloat16),
    "scale": torch.tensor(2.0),
}


def digests() -> list[TensorDigest]:
    return safetensors_digests(save(TENSORS))


def test_a_file_and_its_tensors_have_the_same_digest():
    direct = [
        tensor_digest(name, str(t.dtype).removeprefix("torch."), t.shape, t.view(torch.uint8).numpy().tobytes())
        for name, t in {**TENSORS, "scale": TENSORS["scale"].reshape(1)}.items()
    ]
    direct[-1] = TensorDigest("scale", "float32", (), direct[-1].xxh3)
    assert weights_digest(direct) == weights_digest(digests())


def test_the_order_of_the_tensors_does_not_matter():
    assert weights_digest(reversed(digests())) == weights_digest(digests())


def test_the_value_is_fixed_for_ever():
    """Recorded runs are compared with it: a change of the formula would break every replay."""
    tensor = tensor_digest("w", "float32", (2,), np.array([1.0, 2.0], dtype="<f4").tobytes())
    assert tensor.xxh3 == "4533ce61c4655ba3c3e077b25dd1d769"
    assert weights_digest([tensor]) == "97302fe1efcc2d8a74255ad317049c6fae36fba74dba377ad11831545cf159e3"


@pytest.mark.parametrize("change", ["name", "dtype", "shape", "xxh3"])
def test_everything_about_a_tensor_is_in_the_digest(change: str):
    """Another name, dtype, shape or content is another digest."""
    one = TensorDigest("w", "float32", (2, 3), "0" * 32)
    others = {"name": "v", "dtype": "int32", "shape": (3, 2), "xxh3": "1" * 32}
    fields = {"name": one.name, "dtype": one.dtype, "shape": one.shape, "xxh3": one.xxh3, change: others[change]}
    assert weights_digest([TensorDigest(**fields)]) != weights_digest([one])


def test_a_name_that_could_be_mistaken_is_refused():
    one = TensorDigest("w", "float32", (), "0" * 32)
    with pytest.raises(ValueError, match="unique"):
        weights_digest([one, one])
    with pytest.raises(ValueError, match="line break"):
        weights_digest([TensorDigest("w\nv", "float32", (), "0" * 32)])
