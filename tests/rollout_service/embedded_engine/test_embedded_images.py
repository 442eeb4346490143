"""The embedded engine with a model that reads images, compared with transformers' own forward of it."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contracts.engine_under_test import EngineUnderTest, embedded_engine
from tests.contracts.tiny_model import read_tensors, write_changed_copy, write_tensors
from tests.pictures import picture, picture_bytes
from tests.vision_model import build_vision_model
from transformers import Qwen2_5_VLForConditionalGeneration

from penstock.protocol.groups import Sampling
from penstock.protocol.images.admission import admit
from penstock.protocol.images.processor import ImageProcessor, collapsed, expanded, read_processor, rope_positions
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.checks.check_task import ModelLimits
from penstock.rollout_service.embedded_engine.caches import ImageFeatureCache
from penstock.rollout_service.embedded_engine.http.bodies import GenerateBody, ImageReader
from penstock.rollout_service.embedded_engine.model.model_config import read_model_config
from penstock.rollout_service.embedded_engine.model.weights import read_checkpoint
from penstock.rollout_service.engines.embedded import EmbeddedClient
from penstock.rollout_service.engines.engine_client import ImagePrompt
from penstock.rollout_service.engines.sglang.client import SglangClient
from penstock.rollout_service.engines.sglang.messages import check_expanded, sees
from penstock.rollout_service.errors import EngineMisconfigured, ReplyRefused, TaskRefused

TOLERANCE = 1e-5  # nats; float32 against float32
SMALL, WIDE, OTHER = (picture_bytes(picture(*size, seed=n)) for n, size in enumerate(((24, 24), (60, 20), (24, 24))))


class Reference:
    """Transformers' forward of a model folder, and how its prompts are made."""

    def __init__(self, folder: Path) -> None:
        self.model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        processor = read_processor(folder)
        assert processor is not None
        self.processor: ImageProcessor = processor
        self.token = processor.image_token_id

    def prompt(self, *parts: int | bytes) -> tuple[list[int], list[bytes]]:
        """Return ids with a placeholder for each image, and the images."""
        ids = [self.token if isinstance(part, bytes) else part for part in parts]
        return ids, [part for part in parts if isinstance(part, bytes)]

    def expanded(self, prompt: Sequence[int], images: Sequence[bytes]) -> list[int]:
        return expanded(prompt, [admit(image) for image in images], self.processor)[0]

    def logprobs(self, prompt: Sequence[int], images: Sequence[bytes], completion: Sequence[int]) -> torch.Tensor:
        """Return [tokens, vocab]: row i is for token i + 1, by the model's forward with its own positions."""
        whole, kinds = self.expanded(prompt, images), []
        kinds = [int(one == self.token) for one in whole] + [0] * len(completion)
        given: dict[str, Any] = {}
        if images:
            made = [self.processor.process(image) for image in images]
            given["pixel_values"] = torch.cat([torch.from_numpy(one.pixel_values) for one in made])
            given["image_grid_thw"] = torch.tensor([one.grid_thw for one in made])
            given["mm_token_type_ids"] = torch.tensor([kinds])
        with torch.inference_mode():
            self.model.model.rope_deltas = None  # of the sequence before
            logits = self.model(torch.tensor([[*whole, *completion]]), use_cache=False, **given).logits[0]
        return logits.log_softmax(-1)

    def of_completion(self, prompt: Sequence[int], images: Sequence[bytes], completion: Sequence[int]) -> list[float]:
        assert self.token not in completion, "transformers would take it for a part of an image; use another seed"
        start = len(self.expanded(prompt, images)) - 1
        table = self.logprobs(prompt, images, completion)
        return [table[start + at, token].item() for at, token in enumerate(completion)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vision") / "model"
    build_vision_model(made, eos_token_id=None)
    return made


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
    with embedded_engine(folder, tmp_path_factory.mktemp("engine")) as engine:
        yield engine


def sample(engine: EngineUnderTest, prompts: Any, images: Any, *, expect: int = 200, **fields: Any) -> Any:
    top = {name: fields.pop(name) for name in ("logprob_start_len", "image_positions") if name in fields}
    body = {
        "input_ids": prompts,
        "image_data": images,
        "sampling_params": {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 5, **fields},
        "return_logprob": True,
        "return_prompt_token_ids": True,
        **top,
    }
    return engine.post("/generate", body, expect=expect)


def as_text(image: bytes) -> str:
    return base64.b64encode(image).decode()


def outputs(reply: Any) -> list[float]:
    return [item[0] for item in reply["meta_info"]["output_token_logprobs"]]


def test_log_probabilities_are_those_of_transformers(engine: EngineUnderTest, reference: Reference) -> None:
    """Prompts with no image, one, and two of other sizes, decoded together: exact to 1e-5, completions too."""
    made = [
        reference.prompt(5, 6, 7),
        reference.prompt(5, SMALL, 6, 7, 8),
        reference.prompt(9, WIDE, 10, SMALL, 11),
        reference.prompt(5, OTHER, 6, 7, 8),
    ]
    texts = [[as_text(image) for image in images] or None for _, images in made]
    texts[1] = f"data:image/png;base64,{as_text(SMALL)}"  # type: ignore[assignment]
    replies = sample(engine, [ids for ids, _ in made], texts, logprob_start_len=0)
    for (ids, images), reply in zip(made, replies, strict=True):
        whole, completion = reference.expanded(ids, images), reply["output_ids"]
        assert reply["prompt_token_ids"] == whole
        assert reply["meta_info"]["prompt_tokens"] == len(whole)
        assert outputs(reply) == pytest.approx(reference.of_completion(ids, images, completion), abs=TOLERANCE)
        table = reference.logprobs(ids, images, completion)
        wanted = [table[at, token].item() for at, token in enumerate(whole[1:])]
        found = [item[0] for item in reply["meta_info"]["input_token_logprobs"][1:]]
        assert found == pytest.approx(wanted, abs=TOLERANCE)
    assert outputs(replies[1]) != pytest.approx(outputs(replies[3]), abs=1e-3), "another picture is another prompt"


def test_what_is_kept_is_of_the_same_tokens_and_the_same_images(engine: EngineUnderTest, reference: Reference) -> None:
    """The next turn computes only what is new; the same ids behind another picture share their beginning only."""
    ids, images = reference.prompt(*range(20, 55), WIDE, *range(60, 70))
    first = sample(engine, ids, as_text(WIDE))
    grown = [*ids, *first["output_ids"], reference.token, 71]
    second = sample(engine, grown, [as_text(WIDE), as_text(SMALL)])
    known = len(reference.expanded(ids, images)) + len(first["output_ids"]) - 1
    assert second["meta_info"]["cached_tokens"] == known
    wanted = reference.of_completion(grown, [WIDE, SMALL], second["output_ids"])
    assert outputs(second) == pytest.approx(wanted, abs=TOLERANCE)
    other = picture_bytes(picture(60, 20, seed=9))
    third = sample(engine, ids, as_text(other))
    assert third["meta_info"]["cached_tokens"] == 35, "the text before the picture"
    assert outputs(third) == pytest.approx(reference.of_completion(ids, [other], third["output_ids"]), abs=TOLERANCE)
    again = sample(engine, ids[:36], as_text(other))  # cut behind a picture that is known
    assert outputs(again) == pytest.approx(
        reference.of_completion(ids[:36], [other], again["output_ids"]), abs=TOLERANCE
    )


def test_new_weights_compute_the_images_again(
    engine: EngineUnderTest, folder: Path, reference: Reference, tmp_path: Path
) -> None:
    """After an update, of the vision tower too, every log-probability is of the new weights, and back."""
    changed = write_changed_copy(folder, tmp_path / "changed", seed=1, scale=0.05)
    ids, _ = reference.prompt(5, SMALL, 6, 7, 8)
    for served, judge in ((changed, Reference(changed)), (folder, reference)):
        engine.update(served, "1")
        reply = sample(engine, ids, as_text(SMALL))
        wanted = judge.of_completion(ids, [SMALL], reply["output_ids"])
        assert outputs(reply) == pytest.approx(wanted, abs=TOLERANCE)


def test_a_sampled_token_may_have_the_id_of_an_image(engine: EngineUnderTest, reference: Reference) -> None:
    """It is an ordinary token where ``image_positions`` do not name it, else a placeholder without an image."""
    ids = [5, reference.token, 6, reference.token, 7]
    assert "2 placeholders" in str(sample(engine, ids, as_text(SMALL), expect=400))
    assert "image_positions must rise" in str(sample(engine, ids, as_text(SMALL), image_positions=[2], expect=400))
    reply = sample(engine, ids, as_text(SMALL), image_positions=[1])
    made = reference.processor.process(SMALL)
    whole = [5, *[reference.token] * made.num_tokens, 6, reference.token, 7]
    assert reply["prompt_token_ids"] == whole
    tokens = torch.tensor([[*whole, *reply["output_ids"]]])
    _, images = expanded([5, reference.token, 6], [admit(SMALL)], reference.processor)
    model = reference.model
    with torch.inference_mode():
        embedded = model.get_input_embeddings()(tokens)
        grid = torch.tensor([made.grid_thw])
        embedded[0, 1 : 1 + made.num_tokens] = model.model.visual(
            torch.from_numpy(made.pixel_values), grid_thw=grid
        ).pooler_output
        places = torch.from_numpy(rope_positions(tokens.shape[1], images, 2))[:, None]
        logits = model.model.language_model(inputs_embeds=embedded, position_ids=places, use_cache=False)[0]
        table = model.lm_head(logits)[0].log_softmax(-1)
    wanted = [table[len(whole) - 1 + at, token].item() for at, token in enumerate(reply["output_ids"])]
    assert outputs(reply) == pytest.approx(wanted, abs=TOLERANCE)
    assert collapsed(whole, images) == ids


def test_what_cannot_be_read_is_refused_by_name(engine: EngineUnderTest, reference: Reference) -> None:
    """Nothing is fetched or guessed: the answer names the field, and the engine goes on."""
    ids, _ = reference.prompt(5, SMALL, 6)
    for images, message in (
        ("https://example.org/cat.png", "URL"),
        ("/etc/hostname", "base64"),
        (as_text(b"no picture"), "no image in PNG"),
        ([as_text(SMALL)] * 2, "1 placeholders"),
        ([as_text(SMALL)] * 9, "up to 8"),
        (None, "1 placeholders"),
        ([[as_text(SMALL)]], "texts for a prompt"),
    ):
        assert message in str(sample(engine, ids, images, expect=400)), images
    assert "input_ids holds -1" in str(sample(engine, [5, -1, 6], None, expect=400))
    assert "each of 2 prompts" in str(sample(engine, [ids, ids], as_text(SMALL), expect=400))
    assert engine.get("/model_info")["has_image_understanding"]
    sample(engine, ids, as_text(SMALL))


async def test_an_image_is_read_once_and_memory_is_bounded(folder: Path) -> None:
    """Equal images have one number; beyond the memory the one used longest ago is dropped, and gets another."""
    body = GenerateBody(input_ids=[[5], [6], [7]], image_data=[as_text(SMALL), as_text(OTHER), as_text(SMALL)])
    reader = ImageReader(read_processor(folder))
    [one], [other], [same] = await reader.read(body)
    assert one is same
    assert one.image.number != other.image.number
    small = ImageReader(read_processor(folder), max_bytes=one.num_bytes)
    [one], [other], [again] = await small.read(body)
    assert len({found.image.number for found in (one, other, again)}) == 3
    seen = ImageFeatureCache(max_bytes=100)
    for number in range(4):
        seen.keep(number, torch.zeros(10))
    assert [number for number in range(4) if seen.find(number) is not None] == [2, 3]
    seen.keep(4, torch.zeros(30))  # more than all the memory
    assert seen.find(4) is None


def test_a_folder_has_the_names_of_the_hub_or_of_the_module(folder: Path, tmp_path: Path) -> None:
    """Both forms are read; a mixture of them, or an incomplete tower, is refused."""
    tensors = read_tensors(folder)
    assert "visual.blocks.0.attn.qkv.weight" in tensors
    renamed = {
        name if name.startswith("lm_head")
        else f"model.{name}" if name.startswith("visual.")
        else name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in tensors.items()
    }  # fmt: skip
    config = read_model_config(folder)
    write_tensors(folder, tmp_path / "module", renamed)
    assert read_checkpoint(tmp_path / "module", config).keys() == renamed.keys()
    del tensors["visual.merger.ln_q.weight"]
    write_tensors(folder, tmp_path / "incomplete", tensors)
    with pytest.raises(Exception, match=r"1 tensors missing, e\.g\. visual\.merger\.ln_q\.weight"):
        read_checkpoint(tmp_path / "incomplete", config)


def shown_prompt(reference: Reference, *parts: int | bytes, shown: bytes | None = None) -> ImagePrompt:
    ids, images = reference.prompt(*parts)
    admitted = [admit(image) for image in images]
    whole, places = expanded(ids, admitted, reference.processor)
    assert places is not None
    return ImagePrompt(whole, places, {one.sha256: shown or one.data for one in admitted})


async def client_of(engine: EngineUnderTest, folder: Path, kind: type[SglangClient] = EmbeddedClient) -> SglangClient:
    client = kind(engine.url)
    client.limits = ModelLimits.of(folder)
    await client.load_weights(folder, PolicyVersion(0))
    return client


async def test_the_workers_client_shows_images(engine: EngineUnderTest, folder: Path, reference: Reference) -> None:
    """A batch with and without pictures: the log-probabilities of transformers, in the order of the prompts."""
    client = await client_of(engine, folder)
    prompts = [[5, 6, 7], shown_prompt(reference, 9, WIDE, 10, SMALL, 11), shown_prompt(reference, 5, SMALL, 6)]
    groups = await client.generate(prompts, Sampling(max_new_tokens=8), 2, seeds=[4, 5, 6])
    plain = [
        ([5, 6, 7], []),
        ([9, reference.token, 10, reference.token, 11], [WIDE, SMALL]),
        ([5, reference.token, 6], [SMALL]),
    ]
    for (ids, images), group in zip(plain, groups, strict=True):
        for one in group:
            assert one.logprobs == pytest.approx(reference.of_completion(ids, images, one.token_ids), abs=TOLERANCE)
    sampled = shown_prompt(reference, 5, SMALL, 6)
    longer = ImagePrompt([*sampled.token_ids, reference.token, 8], sampled.images, sampled.data)
    [[one], [other]] = await client.generate([longer, [5, reference.token]], Sampling(max_new_tokens=2), 1)
    assert len(one.token_ids) == len(other.token_ids) == 2
    await client.close()
    standard = await client_of(engine, folder, SglangClient)
    with pytest.raises(TaskRefused, match=f"sampled token {reference.token}, which stands for images"):
        await standard.generate([longer], Sampling(max_new_tokens=2), 1)
    await standard.close()


async def test_an_engine_that_sees_otherwise_is_refused(
    engine: EngineUnderTest, folder: Path, reference: Reference, tmp_path: Path
) -> None:
    """One that computes another prompt than the row's, and one that answers to red and blue alike."""
    client = await client_of(engine, folder)
    with pytest.raises(
        ReplyRefused, match=r"the engine computed a prompt of \d+ tokens, the row has \d+; they differ from token"
    ):
        await client.generate([shown_prompt(reference, 5, SMALL, 6, shown=WIDE)], Sampling(max_new_tokens=2), 1)
    await client.close()
    tensors = read_tensors(folder)
    for part in ("weight", "bias"):
        tensors[f"visual.merger.mlp.2.{part}"] *= 0
    blind = write_tensors(folder, tmp_path / "blind", tensors)
    client = await client_of(engine, blind)
    with pytest.raises(EngineMisconfigured, match="red picture the log-probabilities of one with a blue picture"):
        await client.generate([shown_prompt(reference, 5, SMALL, 6)], Sampling(max_new_tokens=2), 1)
    await client.load_weights(folder, PolicyVersion(0))
    assert len(await client.generate([shown_prompt(reference, 5, SMALL, 6)], Sampling(max_new_tokens=2), 1)) == 1
    await client.close()
    with pytest.raises(ReplyRefused, match="no prompt_token_ids"):
        check_expanded({"text": ""}, [1])
    with pytest.raises(ReplyRefused, match="no log-probabilities of its prompt"):
        sees([{}, {}])
