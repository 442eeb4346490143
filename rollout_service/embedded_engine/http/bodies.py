"""Request bodies of SGLang 0.5.23, checked by pydantic, and their images as the vision tower reads them.

Fields of SGLang that a worker sends and this engine does not compute accept only the value that requests nothing; any
other value, and any other field, is refused. No field is accepted and ignored.

``image_data``: one prompt has a text, or a list of texts, one for each placeholder in its ``input_ids``; a batch has
either of these, or null, for each prompt. A text is base64, or a data URL of it. Paths and URLs are refused. What was
made of an image is kept, since the turns of an episode and the samples of a group send the same ones; memory is
bounded.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from penstock.protocol.errors import ImageRefused
from penstock.protocol.groups import MAX_IMAGES
from penstock.protocol.images import admission
from penstock.protocol.images.admission import AdmittedImage
from penstock.protocol.images.processor import ImageProcessor, expanded
from penstock.rollout_service.embedded_engine.errors import RequestRefused
from penstock.rollout_service.embedded_engine.sequence import Image, Images

TokenIds = list[int]
MAX_TOP_LOGPROBS = 256  # a reply holds two numbers for each, as text
_MAX_BYTES = 512 * 2**20  # of images that are kept, encoded and as pixel values
_HIDDEN = -1  # stands for a token of the text that has the image token's id


class Body(BaseModel):
    """Base of all bodies: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SamplingParams(Body):
    """SGLang's ``sampling_params``; the defaults are SGLang's."""

    n: Annotated[int, Field(ge=1, description="completions per prompt")] = 1
    max_new_tokens: Annotated[int, Field(ge=0)] | None = 128  # None: until the context is full
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    no_stop_trim: bool = False
    sampling_seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    min_new_tokens: Literal[0] = 0
    min_p: Literal[0] = 0
    frequency_penalty: Literal[0] = 0
    presence_penalty: Literal[0] = 0
    repetition_penalty: Literal[1] = 1


def _tag(value: object) -> str:
    return "list" if isinstance(value, list) else "object"


# Tagged by its JSON type, so that an error is reported for the form that was sent.
OneOrMany = Annotated[
    Annotated[SamplingParams, Tag("object")] | Annotated[list[SamplingParams], Tag("list")], Discriminator(_tag)
]


class GenerateBody(Body):
    rid: str | list[str] | None = None
    text: str | list[str] | None = None
    input_ids: TokenIds | list[TokenIds] | None = None
    sampling_params: OneOrMany = SamplingParams()
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1)] | None = None
    stream: bool = False
    extra_key: str | None = None  # sequences share a prompt's computation only under the same key
    return_prompt_token_ids: bool = False
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None  # of the prompt's positions
    return_routed_experts: bool = False
    lora_path: str | list[str | None] | None = None  # name of a loaded adapter, or one for each prompt
    image_data: str | list[str] | list[str | list[str] | None] | None = None  # base64 or data URLs
    # Where placeholders are; None: at every token with the image token's id. Not SGLang's: a policy may sample that id.
    image_positions: TokenIds | list[TokenIds] | None = None


class UpdateWeightsBody(Body):
    model_path: str
    weight_version: str | None = None
    load_format: Literal["auto", "safetensors"] | None = None
    flush_cache: bool = True
    abort_all_requests: Literal[False] = False


class LoadAdapterBody(Body):
    lora_name: Annotated[str, Field(min_length=1)]
    lora_path: str


class UnloadAdapterBody(Body):
    lora_name: str


class CheckWeightsBody(Body):
    action: Literal["checksum"] = "checksum"


class PauseBody(Body):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class OccupationBody(Body):
    tags: tuple[Literal["weights", "kv_cache"], ...] | None = None  # None: all


class AbortBody(Body):
    """Body of ``/abort_request``: a prefix of rids, or everything."""

    rid: str = ""
    abort_all: bool = False


@dataclass(frozen=True, slots=True)
class ReadImage:
    admitted: AdmittedImage
    image: Image

    @property
    def num_bytes(self) -> int:
        return len(self.admitted.data) + self.image.pixel_values.nbytes


class ImageReader:
    def __init__(self, processor: ImageProcessor | None, *, max_bytes: int = _MAX_BYTES) -> None:
        self.processor = processor
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[str, ReadImage] = OrderedDict()  # by hash of what was sent, used longest ago first
        self._numbers = itertools.count(1)  # an image that was dropped and is sent again gets another one

    async def read(self, body: GenerateBody) -> list[list[ReadImage]]:
        listed = _listed(body)
        if any(listed) and self.processor is None:
            raise RequestRefused(
                "image_data: the served model reads no images; send text alone, or serve a model with images"
            )
        return [[await self._read(text) for text in texts] for texts in listed]

    async def _read(self, text: str) -> ReadImage:
        assert self.processor is not None
        try:
            source = text if text.startswith("data:") or ":" in text[:16] else {"base64": text}
            data = admission.image_bytes(source)
            name = hashlib.sha256(data).hexdigest()
            image = self._kept.pop(name, None)
            if image is None:
                image = await asyncio.to_thread(_processed, data, self.processor, next(self._numbers))
        except ImageRefused as error:
            raise RequestRefused(f"image_data: {error}") from None
        previous = self._kept.pop(name, None)  # another request may have sent it meanwhile: both have its number then
        image = previous or image
        self._kept[name] = image
        self._num_bytes = sum(kept.num_bytes for kept in self._kept.values())
        while self._num_bytes > self._max_bytes and len(self._kept) > 1:
            self._num_bytes -= self._kept.popitem(last=False)[1].num_bytes
        return image


def _listed(body: GenerateBody) -> list[list[str]]:
    image_data = body.image_data
    prompts = body.input_ids if body.text is None else body.text
    is_batch = isinstance(prompts, list) and bool(prompts) and not isinstance(prompts[0], int)
    num_prompts = len(prompts) if is_batch and prompts is not None else 1
    if image_data is None:
        return [[] for _ in range(num_prompts)]
    if not is_batch:
        listed = [[image_data] if isinstance(image_data, str) else image_data]
    elif isinstance(image_data, list) and len(image_data) == num_prompts:
        listed = [[entry] if isinstance(entry, str) else entry or [] for entry in image_data]
    else:
        raise RequestRefused(f"image_data must be a list with an entry for each of {num_prompts} prompts")
    texts_by_prompt: list[list[str]] = []
    for texts in listed:
        if len(texts) > MAX_IMAGES or not all(isinstance(text, str) for text in texts):
            raise RequestRefused(
                f"image_data must have up to {MAX_IMAGES} texts for a prompt, got {len(texts)} entries"
            )
        texts_by_prompt.append([text for text in texts if isinstance(text, str)])
    return texts_by_prompt


def with_images(
    prompt: tuple[int, ...], images: Items[ReadImage], positions: Items[int] | None, processor: ImageProcessor
) -> tuple[tuple[int, ...], Images | None]:
    """Return a prompt, which has one placeholder for each image, with all tokens of its images, and these.

    ``positions`` are those of the placeholders; None: every token with the image token's id. Raises RequestRefused if
    there are not as many placeholders as images, or ``positions`` name other tokens.
    """
    token = processor.image_token_id
    if positions is not None:
        wrong = [at for at in positions if not 0 <= at < len(prompt) or prompt[at] != token]
        if wrong or list(positions) != sorted(set(positions)):
            raise RequestRefused(
                f"image_positions must rise, and be of tokens {token} of the prompt, got {list(positions)[:16]}"
            )
        places = set(positions)
        prompt = tuple(
            _HIDDEN if token_id == token and at not in places else token_id for at, token_id in enumerate(prompt)
        )
    try:
        ids, row_images = expanded(prompt, [image.admitted for image in images], processor)
    except ImageRefused as error:
        raise RequestRefused(f"image_data: {error}") from None
    whole = tuple(token if token_id == _HIDDEN else token_id for token_id in ids)
    return whole, None if row_images is None else Images(row_images, tuple(image.image for image in images))


def _processed(data: bytes, processor: ImageProcessor, number: int) -> ReadImage:
    admitted = admission.admit(data)
    made = processor.process(admitted.data)
    return ReadImage(admitted, Image(number, made.pixel_values, made.grid_thw))
