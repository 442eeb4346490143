"""Rows with images: every form that others write gives the same prompt, and what cannot be trained on is refused by row."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tests.pictures import picture, picture_bytes
from tests.trainer.data.row_sets import write_rows
from tests.vision_model import write_vision_tokenizer

from penstock.deploy.data_check.check import check_file
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.reward_settings import RewardSettings
from penstock.protocol.images.admission import admit
from penstock.protocol.images.processor import ImageProcessor
from penstock.trainer.data.data_order import DataOrder
from penstock.trainer.data.dataset import Prompt, PromptSet
from penstock.trainer.data.messages import ImageRows
from penstock.trainer.data.read_rows import turn_rows
from penstock.trainer.data.row_files import fingerprint
from penstock.trainer.errors import CheckpointError, MalformedData
from penstock.trainer.groups.group_states import GroupStates
from penstock.trainer.groups.prompt_cursor import PromptCursor, order_id
from penstock.trainer.settings import DataSettings

ONE, TWO = picture_bytes(picture(16, 8)), picture_bytes(picture(8, 24, seed=1), "JPEG")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("rows")
    write_vision_tokenizer(made)
    (made / "config.json").write_text(json.dumps({"vocab_size": 400}))
    (made / "pictures").mkdir()
    (made / "pictures/one.png").write_bytes(ONE)
    (made / "pictures/two.jpg").write_bytes(TWO)
    return made


@pytest.fixture(scope="module")
def processor(folder: Path) -> ImageProcessor:
    pad = ChatTokenizer.read(folder).encode("<|image_pad|>")
    return ImageProcessor(
        image_token_id=pad[0], patch_size=4, temporal_patch_size=2, merge_size=2, min_pixels=64, max_pixels=4096,
        rescale_factor=1 / 255, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5),
    )  # fmt: skip


def opened(path: Path, processor: ImageProcessor | None, **data: Any) -> PromptSet:
    return PromptSet(
        [path], data=DataSettings(**data), reward=RewardSettings(name="r"), tokenizer=ChatTokenizer.read(path.parent), processor=processor
    )  # fmt: skip


def prompt_of(folder: Path, processor: ImageProcessor | None, row: dict[str, Any], **data: Any) -> Prompt:
    return opened(write_rows(folder, row), processor, **data)[0]


def parts(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}]}


BASE64 = base64.b64encode(ONE).decode()
TEXT = {"type": "text", "text": "and"}
FILE = {"type": "image", "image": "pictures/two.jpg"}


@pytest.mark.parametrize(
    ("row", "data"),
    [
        (parts({"type": "image", "image": "pictures/one.png"}, TEXT, FILE), {}),
        (parts({"type": "image", "path": "pictures/one.png"}, TEXT, FILE), {}),
        (parts({"type": "image", "base64": BASE64}, TEXT, {"type": "image", "path": "pictures/two.jpg"}), {}),
        (parts({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BASE64}"}}, TEXT, FILE), {}),
        (parts({"type": "image"}, TEXT, {"type": "image"}) | {"images": ["pictures/one.png", "pictures/two.jpg"]}, {}),
        ({"prompt": [{"role": "user", "content": "<image>and<image>"}], "images": ["pictures/one.png", "pictures/two.jpg"]}, {}),
        ({"prompt": "<image>and<image>", "pics": [{"path": "pictures/one.png"}, "pictures/two.jpg"]}, {"map": {"images": "pics"}}),
        (
            {
                "prompt": [{"role": "user", "content": "<image>and<image>"}], "data_source": "d", "images": [{"base64": BASE64}, "pictures/two.jpg"],
                "reward_model": {"style": "rule", "ground_truth": "7"},
            },
            {},
        ),
    ],
)  # fmt: skip
def test_every_form_gives_the_same_prompt(
    folder: Path, processor: ImageProcessor, row: dict[str, Any], data: dict[str, Any]
) -> None:
    """That of transformers, OpenAI, TRL and verl: ids with all tokens of both images, and their bytes to be stored."""
    found = prompt_of(folder, processor, row, **data)
    assert found.images is not None
    assert [image.data for image in found.image_files] == [ONE, TWO]
    assert [(r.num_tokens, r.grid_thw, r.sha256) for r in found.images.refs] == [
        (2, (1, 2, 4), admit(ONE).sha256), (3, (1, 6, 2), admit(TWO).sha256),
    ]  # fmt: skip
    assert found.text == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>and<|vision_start|><|image_pad|><|vision_end|><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    tokenizer = ChatTokenizer.read(folder)
    ids = list(found.token_ids)
    for ref in reversed(found.images.refs):
        assert set(ids[ref.position : ref.end]) == {processor.image_token_id}
        ids[ref.position : ref.end] = [processor.image_token_id]
    assert ids == tokenizer.encode(found.text)
    assert "images" not in json.loads(found.reward.extra_info)


def test_a_parquet_file_of_a_hugging_face_data_set(folder: Path, processor: ImageProcessor) -> None:
    """Bytes and path in a struct; where a row has no image, its list is empty."""
    rows = [
        {"prompt": "<image>?", "images": [{"bytes": ONE, "path": "gone.png"}], "ground_truth": "a"},
        {"prompt": "none", "images": [], "ground_truth": "b"},
        {"prompt": "<image>!", "images": [{"bytes": ONE, "path": None}], "ground_truth": "c"},
    ]
    path = write_rows(folder, *rows, kind="parquet")
    prompts = opened(path, processor)
    assert prompts.num_with_images == 2
    assert [one.images is not None for one in (prompts[0], prompts[1], prompts[2])] == [True, False, True]
    assert prompts[0].image_files == prompts[2].image_files
    report = check_file(path, DataSettings(), ChatTokenizer.read(folder), images=ImageRows(processor))
    assert (report.num_grpo, report.num_sft, report.problems.lines()) == (3, 0, [])
    assert list(report.prompt_lengths) == [len(prompts[n].token_ids) for n in range(3)]
    assert report.num_repeated_prompts == 0


def test_the_same_words_about_another_picture_are_another_prompt(folder: Path, processor: ImageProcessor) -> None:
    names = ("one.png", "two.jpg", "one.png")
    path = write_rows(folder, *[parts({"type": "image", "image": f"pictures/{name}"}, TEXT) for name in names])
    for images in (None, ImageRows(processor)):
        report = check_file(path, DataSettings(), ChatTokenizer.read(folder), images=images)
        assert (report.num_grpo, report.num_repeated_prompts) == (3, 1)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (parts({"type": "image", "image": "https://example.org/a.png"}), "URLs are never fetched"),
        (parts({"type": "image", "image": "../one.png"}), "not below"),
        (parts({"type": "image", "image": "gone.png"}), "no such file"),
        (parts({"type": "image", "base64": "AAAA"}), "no image in PNG"),
        (parts({"type": "image"}), "expected an image for each of 1 places .* got 0"),
        (
            parts({"type": "image"}) | {"images": ["pictures/one.png"] * 2},
            "expected an image for each of 1 places .* got 2",
        ),
        (parts(*[FILE] * 9), "9 images, a row may have 8"),
        (parts(FILE, {"type": "text", "text": "<|image_pad|>"}), "2 placeholders of images"),
        (parts({"type": "video", "video": "a.mp4"}), "expected a part of type text or image"),
        (parts("text"), r"column messages\[0\]\.content\[0\]: expected a part such as .* got 'text'"),
        (parts(FILE, "and"), r"column messages\[0\]\.content\[1\]: expected a part such as .* got 'and'"),
        (parts({"type": "text"}), r"column messages\[0\]\.content\[0\]\.text: expected a text, got nothing"),
        (parts(TEXT) | {"videos": ["a.mp4"]}, "column videos: what is read is images"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_by_row(
    folder: Path, processor: ImageProcessor, row: dict[str, Any], words: str
) -> None:
    with pytest.raises(MalformedData, match=rf"rows\.jsonl:1.*{words}"):
        prompt_of(folder, processor, row)


def test_a_model_that_reads_text_is_never_trained_blind(folder: Path) -> None:
    """Its rows with images are refused; ignoring the column is a choice that the run file says."""
    row = {"prompt": "<image>?", "images": ["pictures/one.png"]}
    with pytest.raises(MalformedData, match=r"1 images, and model\.path reads text alone"):
        prompt_of(folder, None, row)
    assert prompt_of(folder, None, row, ignore=["images"]).images is None


def test_sft_reads_no_images(folder: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(MalformedData, match="column images: what is read is text alone"):
        turn_rows({"messages": chat, "images": ["pictures/one.png"]}, DataSettings())
    with pytest.raises(MalformedData, match="images are read in the prompts of `penstock train` alone"):
        turn_rows(parts(FILE) | {"messages": [*parts(FILE)["messages"], chat[1]]}, DataSettings())


def test_a_picture_that_changes_during_the_run_is_noticed(folder: Path, processor: ImageProcessor) -> None:
    (folder / "pictures/own.png").write_bytes(ONE)
    prompts = opened(write_rows(folder, parts({"type": "image", "image": "pictures/own.png"})), processor)
    (folder / "pictures/own.png").write_bytes(b"broken")
    with pytest.raises(MalformedData, match="the file has changed since the start"):
        prompts[0]


def test_the_images_of_an_instruction_stay_before_its_input(folder: Path, processor: ImageProcessor) -> None:
    rows = [
        {"instruction": parts(FILE, TEXT)["messages"], "input": "more"},
        {"instruction": parts(TEXT)["messages"], "input": "more"},
    ]
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    for row, shown in zip(rows, (f"{image}and\nmore", "and\nmore"), strict=True):
        found = prompt_of(folder, processor, row)
        assert found.text.startswith(f"<|im_start|>user\n{shown}<|im_end|>")
        assert [image_file.data for image_file in found.image_files] == ([TWO] if image in shown else [])


def test_texts_around_an_image_are_not_said_to_be_left_out(folder: Path, processor: ImageProcessor) -> None:
    path = write_rows(folder, parts({"type": "text", "text": "What is"}, FILE, {"type": "text", "text": "this?"}))
    assert not [hint for hint in opened(path, processor).notes[0].hints() if "leaves out" in hint]


def test_another_picture_in_the_same_file_is_another_data_set(folder: Path, processor: ImageProcessor) -> None:
    """A run that goes on counts prompts of the data with which it began; within a run the row is refused by its line."""
    own = folder / "pictures/own.png"
    own.write_bytes(ONE)
    path = write_rows(folder, parts(TEXT), parts({"type": "image", "image": "pictures/own.png"}))
    first = opened(path, processor)
    assert opened(path, processor).fingerprint == first.fingerprint
    own.write_bytes(picture_bytes(picture(16, 8, seed=2)))  # as large: the prompt has as many tokens
    with pytest.raises(
        MalformedData, match=r"rows\.jsonl:2: other images than the row had; the file has changed since"
    ):
        first[1]
    other = opened(path, processor)
    assert len(other) == len(first)
    assert other.fingerprint != first.fingerprint
    order = DataOrder(2, seed=0, shuffle=True)
    before, now = (PromptCursor(order, order_id(order, one.fingerprint), GroupStates()) for one in (first, other))
    with pytest.raises(CheckpointError, match=r"prompts of other data .*data\.train, the image files of its rows"):
        now.resume(before.to_document())
    own.write_bytes(ONE)
    assert opened(path, processor).fingerprint == first.fingerprint


def test_a_file_without_images_keeps_its_fingerprint(folder: Path, processor: ImageProcessor) -> None:
    path = write_rows(folder, parts(TEXT))
    assert opened(path, processor).fingerprint == fingerprint([path])
