"""Where an image's tokens stand in a row, and the positions of all tokens, for engine and trainer alike."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from pydantic import ValidationError
from tests.pictures import picture, picture_bytes

from penstock.protocol.errors import ImageRefused
from penstock.protocol.groups import ImageRef, RowImages
from penstock.protocol.images.admission import AdmittedImage, admit
from penstock.protocol.images.processor import (
    ImageProcessor,
    collapsed,
    expanded,
    joined,
    next_position,
    rope_positions,
)

PAD = 9
PROCESSOR = ImageProcessor(
    image_token_id=PAD, patch_size=2, temporal_patch_size=2, merge_size=2, min_pixels=16, max_pixels=10_000,
    rescale_factor=1 / 255, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5),
)  # fmt: skip


def image(width: int, height: int, seed: int = 0) -> AdmittedImage:
    return admit(picture_bytes(picture(width, height, seed=seed)))


def test_a_placeholder_becomes_all_tokens_of_its_image() -> None:
    prompt = [1, 2, PAD, 3, PAD, 4]
    one, other = image(8, 4), image(4, 12, seed=1)
    ids, images = expanded(prompt, [one, other], PROCESSOR)
    assert ids == [1, 2, PAD, PAD, 3, PAD, PAD, PAD, 4]
    assert images is not None
    assert [(r.position, r.num_tokens, r.grid_thw) for r in images.refs] == [(2, 2, (1, 2, 4)), (5, 3, (1, 6, 2))]
    assert [(r.sha256, r.size_bytes) for r in images.refs] == [(i.sha256, len(i.data)) for i in (one, other)]
    assert images.processor == PROCESSOR.sha256
    assert collapsed(ids, images) == prompt
    assert collapsed([*ids, PAD, PAD], images) == [*prompt, PAD, PAD]  # sampled: not tokens of an image
    assert expanded([1, 2], [], PROCESSOR) == ([1, 2], None)
    more, delta = expanded([5, PAD], [one], PROCESSOR, at=len(ids))
    whole = joined(images, delta)
    assert whole is not None
    assert [ref.position for ref in whole.refs] == [2, 5, 10]
    assert whole.before(8) == images
    assert whole.before(3) is None
    assert collapsed([*ids, *more], whole) == [*prompt, 5, PAD]


def test_a_text_cannot_smuggle_an_image_in() -> None:
    with pytest.raises(ImageRefused, match=r"2 placeholders of images .* for 1 images"):
        expanded([1, PAD, PAD], [image(8, 4)], PROCESSOR)
    with pytest.raises(ImageRefused, match="0 placeholders"):
        expanded([1], [image(8, 4)], PROCESSOR)


def test_a_row_has_at_most_eight_images() -> None:
    eight, images = expanded([PAD] * 8, [image(4, 4)] * 8, PROCESSOR)
    _, further = expanded([PAD], [image(4, 4)], PROCESSOR, at=len(eight))
    with pytest.raises(ImageRefused, match="9 images, a row may have 8"):
        joined(images, further)
    with pytest.raises(ImageRefused, match="9 images, a row may have 8"):
        expanded([PAD] * 9, [image(4, 4)] * 9, PROCESSOR)


def test_images_of_two_processors_are_never_in_one_row() -> None:
    _, one = expanded([PAD], [image(4, 4)], PROCESSOR)
    assert one is not None
    other = RowImages(processor="f" * 64, refs=tuple(r.model_copy(update={"position": 5}) for r in one.refs))
    with pytest.raises(ImageRefused, match="of the processors"):
        joined(one, other)


def test_positions_never_depend_on_what_follows() -> None:
    """Those of any first part are the first part of the positions; text counts on from an image's longer side."""
    ids, images = expanded([1, PAD, 2, 3, PAD], [image(12, 4), image(4, 4)], PROCESSOR)
    whole = rope_positions(len(ids) + 3, images, 2)
    assert whole[0].tolist() == [0, 1, 1, 1, 4, 5, 6, 7, 8, 9]
    assert whole[1].tolist() == [0, 1, 1, 1, 4, 5, 6, 7, 8, 9]
    assert whole[2].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    for length in range(len(ids) + 3):
        np.testing.assert_array_equal(rope_positions(length, images, 2), whole[:, :length])
    for length in (0, 1, 4, 6, 7, 9):
        assert next_position(length, images, 2) == whole[0, length]
    assert rope_positions(3, None, 2).tolist() == [[0, 1, 2]] * 3


def _ref(**changes: object) -> ImageRef:
    return ImageRef.model_validate(
        {"position": 3, "num_tokens": 2, "grid_thw": (1, 2, 4), "sha256": "a" * 64, "size_bytes": 10, **changes}
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"num_tokens": 3},
        {"num_tokens": 0},
        {"grid_thw": (2, 2, 4)},
        {"grid_thw": (1, 2, 2**15 + 1)},
        {"sha256": "../../x"},
        {"size_bytes": 2**24 + 1},
        {"position": -1},
    ],
)
def test_an_impossible_image_is_refused_on_entry(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        _ref(**changes)


def test_images_do_not_overlap() -> None:
    for one, other in itertools.product((3, 4), repeat=2):
        with pytest.raises(ValidationError, match="begins at token"):
            RowImages(processor="b" * 64, refs=(_ref(position=one), _ref(position=other)))


def test_the_hash_covers_whatever_changes_the_result() -> None:
    assert PROCESSOR.sha256 == ImageProcessor(**{n: getattr(PROCESSOR, n) for n in PROCESSOR.__slots__}).sha256
    for name, value in (("max_pixels", 20_000), ("image_token_id", 8), ("mean", (0.5, 0.5, 0.4))):
        changed = ImageProcessor(**{n: getattr(PROCESSOR, n) for n in PROCESSOR.__slots__} | {name: value})
        assert changed.sha256 != PROCESSOR.sha256


def test_a_disagreement_about_an_image_is_refused() -> None:
    """Grid or number of tokens differ from what its bytes give."""
    one = image(8, 4)
    _, images = expanded([PAD], [one], PROCESSOR)
    assert images is not None
    found = PROCESSOR.process(one.data)
    PROCESSOR.check(images.refs[0], found)
    for changes in ({"grid_thw": (1, 4, 2)}, {"num_tokens": 1}, {"num_tokens": 4}):
        with pytest.raises(ImageRefused, match="different image processors"):
            PROCESSOR.check(images.refs[0].model_copy(update=changes), found)
