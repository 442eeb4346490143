"""Prompts with images → what SGLang is sent for them, and what its reply must say; pure.

SGLang wants one placeholder for each image in ``input_ids``, and expands it itself; ids that are expanded already make it render
the prompt as text and tokenise that again. So it is asked for the prompt that it computed, which must be the row's, token for token.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from typing import Any

from penstock.protocol.facts import RowImages
from penstock.protocol.images.processor import collapsed
from penstock.rollout_service.checks.check_task import ImageTokens
from penstock.rollout_service.engines.completion import shorten
from penstock.rollout_service.engines.engine_client import ImagePrompt, refuse_images
from penstock.rollout_service.errors import ReplyRefused, TaskRefused

_SIDE = 64  # pixels of the pictures that `sight_requests` shows
_RED, _BLUE = (255, 0, 0), (0, 0, 255)


def image_fields(
    prompts: Sequence[Sequence[int]],
    shown: Sequence[Sequence[int]],
    tokens: ImageTokens | None,
    *,
    takes_positions: bool,
) -> dict[str, Any]:
    """Return the fields of a request's body that its images need, ``input_ids`` among them; none without images.

    Args:
        prompts: All token ids of each prompt, with what was sampled behind it.
        shown: The prompts themselves, of which some may have images.
        tokens: The model's; None: it reads no images.
        takes_positions: The server is told which tokens are placeholders, so that others may have the same id.

    Raises:
        TaskRefused: The model reads no images; or the policy sampled the image token's id, and the server would take it for a placeholder.
    """
    images = [one.images if isinstance(one, ImagePrompt) else None for one in shown]
    if tokens is None:
        refuse_images(shown, "an engine whose model reads text alone")
        return {}
    extra = [
        sum(token == tokens.image for token in ids) - (found.num_tokens if found is not None else 0)
        for ids, found in zip(prompts, images, strict=True)
    ]
    has_images = any(found is not None for found in images)
    if not has_images and not (takes_positions and any(extra)):
        return {}
    if any(extra) and not takes_positions:
        raise TaskRefused(
            "image_token_sampled",
            f"the policy sampled token {tokens.image}, which stands for images, in a prompt with images: SGLang would take it for another "
            "image; train the token away, or use the embedded engine",
        )
    fields: dict[str, Any] = {"input_ids": [collapsed(ids, found) for ids, found in zip(prompts, images, strict=True)]}
    if has_images:
        fields["image_data"] = [_data(one) for one in shown]
        fields["return_prompt_token_ids"] = True
    if takes_positions:
        fields["image_positions"] = [_positions(found) for found in images]
    return fields


def check_expanded(row: Any, expected: Sequence[int]) -> None:
    """Raise ReplyRefused unless a reply says that exactly these token ids were computed as its prompt."""
    token_ids = row.get("prompt_token_ids") if isinstance(row, dict) else None
    if not isinstance(token_ids, list):
        raise ReplyRefused(f"a reply to a prompt with images has no prompt_token_ids: {shorten(row)}")
    if token_ids == list(expected):
        return
    pairs = enumerate(zip(token_ids, expected, strict=False))
    at = next((at for at, (one, other) in pairs if one != other), min(len(token_ids), len(expected)))
    raise ReplyRefused(
        f"the engine computed a prompt of {len(token_ids)} tokens, the row has {len(expected)}; they differ from token {at} on: {token_ids[at : at + 8]} "
        f"and {list(expected[at : at + 8])}. Engine and trainer process images differently: give both the model folder's own "
        "preprocessor_config.json"
    )


def sight_requests(tokens: ImageTokens) -> list[dict[str, Any]]:
    """Return two requests that differ in the colour of a picture alone: their replies must have other log-probabilities."""
    ids = [*tokens.before, tokens.image, *tokens.behind, 0, 0]
    return [
        {
            "input_ids": ids,
            "image_data": [base64.b64encode(_png(colour)).decode()],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        for colour in (_RED, _BLUE)
    ]


def sees(replies: Sequence[Any]) -> bool:
    """Return True if the replies to `sight_requests` show that the pictures were looked at; raises ReplyRefused for other replies."""
    found: list[list[float]] = []
    for reply in replies:
        try:
            triples = reply["meta_info"]["input_token_logprobs"]
            found.append([float(triple[0]) for triple in triples[-2:]])
        except (KeyError, TypeError, IndexError, ValueError) as err:
            raise ReplyRefused(f"a reply has no log-probabilities of its prompt ({err!r}): {shorten(reply)}") from None
    return found[0] != found[1]


def _data(prompt: Sequence[int]) -> list[str]:
    if not isinstance(prompt, ImagePrompt):
        return []
    return [base64.b64encode(prompt.data[ref.sha256]).decode() for ref in prompt.images.refs]


def _positions(images: RowImages | None) -> list[int]:
    places: list[int] = []
    skipped = 0
    for ref in images.refs if images is not None else ():
        places.append(ref.position - skipped)
        skipped += ref.num_tokens - 1
    return places


def _png(colour: tuple[int, int, int]) -> bytes:

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", _SIDE, _SIDE, 8, 2, 0, 0, 0)
    rows = (b"\0" + bytes(colour) * _SIDE) * _SIDE
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
