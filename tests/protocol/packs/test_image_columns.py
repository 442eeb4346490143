"""Images of rows in packs and messages: they round-trip, and rows that contradict themselves are refused."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from tests.episodes import make_row, one_turn
from tests.groups import make_group
from tests.protocol.packs.written_packs import altered, table_of, task_of
from tests.trainer.groups.stored_groups import taught

from penstock.protocol.episode import EpisodeRow
from penstock.protocol.errors import PackError
from penstock.protocol.groups import ImageRef, RowImages, Task
from penstock.protocol.packs import group_pack, pack_bounds
from penstock.protocol.packs.task_promise import TaskPromise
from penstock.protocol.trajectory import Group

PROMPT = (5, 9, 9, 7, 9, 9, 9, 9)
IMAGES = RowImages(
    processor="a" * 64,
    refs=(
        ImageRef(position=1, num_tokens=2, grid_thw=(1, 2, 4), sha256="b" * 64, size_bytes=77),
        ImageRef(position=4, num_tokens=4, grid_thw=(1, 4, 4), sha256="c" * 64, size_bytes=2**24),
    ),
)


def group(number: int = 0, images: RowImages | None = IMAGES) -> Group:
    made = make_group(f"e0.p{number}.a0", size=3, prompt_ids=PROMPT, seed=number)
    return replace(made, trajectories=tuple(replace(row, images=images) for row in made.trajectories))


def test_a_pack_gives_back_where_the_images_are() -> None:
    """With a teacher and without, beside a group without images; packs without any have no such columns."""
    groups = [group(0), group(1, None), group(2, IMAGES.before(3))]
    for kept in (groups, [taught(one, 2) for one in groups]):
        data = group_pack.encode(kept)
        found = group_pack.decode(data, described=[one.summary(n) for n, one in enumerate(kept)])
        for before, after in zip(kept, found, strict=True):
            assert [row.images for row in after.trajectories] == [row.images for row in before.trajectories]
            assert after.image_processor == before.image_processor
        assert group_pack.decode_texts(data, [0])[0].group_id == "e0.p0.a0"
        (one,) = group_pack.decode(data, [2])
        assert one.trajectories[0].images == IMAGES.before(3)
    assert "image_processor" not in table_of(group(1, None)).schema.names


@pytest.mark.parametrize("prompt", [PROMPT[:-1], (*PROMPT[:-1], 8), (5, 9, 7, *PROMPT[3:])])
def test_a_task_whose_prompt_lacks_tokens_of_an_image_is_refused(prompt: tuple[int, ...]) -> None:
    document = {**task_of(group(), images=IMAGES).model_dump(), "prompt_ids": prompt}
    with pytest.raises(ValidationError, match="are not one token, repeated"):
        Task.model_validate(document, strict=True)


def test_the_group_of_a_task_has_its_images() -> None:
    """Another picture in the same place, and none, are refused; so is another in one trajectory only."""
    expected = group()
    promise = TaskPromise.of(task_of(expected, images=IMAGES))
    promise.check(expected)
    other = RowImages(processor="a" * 64, refs=(IMAGES.refs[0], IMAGES.refs[1].model_copy(update={"sha256": "d" * 64})))
    for images in (None, other):
        with pytest.raises(PackError, match="prompt, images or what"):
            promise.check(group(0, images))
    rows = expected.trajectories
    with pytest.raises(PackError, match="trajectory 2 has other images"):
        replace(expected, trajectories=(*rows[:2], replace(rows[2], images=other))).check_prompt()


def test_a_group_has_one_processor() -> None:
    other = IMAGES.model_copy(update={"processor": "f" * 64})
    rows = group().trajectories
    with pytest.raises(PackError, match="by the processors"):
        replace(group(), trajectories=(*rows[:2], replace(rows[2], images=other)))
    pack = group_pack.encode([group()])
    with pytest.raises(PackError, match="image_processor is a"):
        group_pack.decode(pack, described=[group().summary(0).model_copy(update={"image_processor": None})])


def test_tokens_of_an_image_are_never_sampled() -> None:
    """A row that says so is refused, as is one whose image has other tokens, or lies beyond its end."""
    row = group().trajectories[0]
    late = IMAGES.refs[0].model_copy(update={"position": len(PROMPT), "num_tokens": 1})
    beyond = IMAGES.refs[0].model_copy(update={"position": len(row.token_ids) - 1})
    mixed = IMAGES.refs[0].model_copy(update={"position": 3})
    for ref in (late, beyond, mixed):
        with pytest.raises(PackError, match="or were sampled"):
            replace(row, images=RowImages(processor="a" * 64, refs=(ref,)))


@pytest.mark.parametrize(
    ("column", "change", "words"),
    [
        ("image_processor", lambda v: ["", *v[1:]], "numbers and 2 names of images, and the processor ''"),
        ("image_processor", lambda v: ["x", *v[1:]], "a row's images: String should match"),
        ("image_numbers", lambda v: [v[0][:-1], *v[1:]], "11 numbers and 2 names"),
        ("image_numbers", lambda v: [[], *v[1:]], "0 numbers and 2 names"),
        ("image_numbers", lambda v: [[*v[0][:6], 1, *v[0][7:]], *v[1:]], "begins at token 1"),
        ("image_numbers", lambda v: [[*v[0][:6], 2**40, *v[0][7:]], *v[1:]], "are not one token"),
        ("image_sha256", lambda v: [[v[0][0], "../x"], *v[1:]], "a row's images: String should match"),
        ("image_sha256", lambda v: [[*v[0], v[0][0]], *v[1:]], "12 numbers and 3 names"),
    ],
)
def test_columns_that_contradict_one_another_are_refused(
    column: str, change: Callable[[list[Any]], list[Any]], words: str
) -> None:
    with pytest.raises(PackError, match=words):
        group_pack.decode(altered(group(), column, change))


def test_all_columns_fit_into_the_bounds() -> None:
    """A pack of episodes with a teacher and images has the most columns; its footer is accepted."""
    names = group_pack.SCHEMAS[True, True, False, True].names
    assert len(names) == len(set(names))
    sink = io.BytesIO()
    pq.ParquetWriter(sink, group_pack.SCHEMAS[True, True, False, True], store_schema=False).close()
    pack_bounds.check_footer(sink.getvalue())


def test_rows_that_share_a_beginning_share_its_images() -> None:
    """The same ids may stand for other pictures: then nothing of the earlier row's computation is this row's."""

    def shown(row: EpisodeRow, *letters: str) -> EpisodeRow:
        refs = [
            ImageRef(position=1, num_tokens=4, grid_thw=(1, 4, 4), sha256=letter * 64, size_bytes=9)
            for letter in letters
        ]
        images = RowImages(processor="c" * 64, refs=tuple(refs)) if refs else None
        return replace(row, trajectory=replace(row.trajectory, images=images))

    first = make_row([(0, [5, 9, 9, 9, 9, 6]), (1, [11, 12])], text="x")
    second = make_row([(0, [5, 9, 9, 9, 9, 6, 11, 12, 8]), (1, [14])], first_turn=1, parent=0, prefix_len=8)
    assert len(replace(one_turn(0), rows=(shown(first, "a"), shown(second, "a"))).rows) == 2
    for others in (("b",), ()):
        with pytest.raises(PackError, match="row 1 has other images than row 0 in the 8 tokens that they share"):
            replace(one_turn(0), rows=(shown(first, "a"), shown(second, *others)))
