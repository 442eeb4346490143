"""SGLang's replies → completions, checksums, reports and metrics; prompts with images → what is sent; pure.

A reply that contradicts itself is refused as a whole. SGLang wants one placeholder for each image in ``input_ids``, and
expands it itself; ids that are expanded already make it render the prompt as text and tokenise that again. So it is
asked for the prompt that it computed, which must be the row's, token for token.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.protocol.errors import PackError
from penstock.protocol.groups import RowImages
from penstock.protocol.images.processor import collapsed
from penstock.protocol.token_annotations import ExpertChoices, Routers, dtype_of
from penstock.rollout_service.checks.check_task import ImageTokens
from penstock.rollout_service.engines.completion import (
    Completion,
    EngineChecksum,
    check_tokens,
    read_version_runs,
    shorten,
)
from penstock.rollout_service.engines.engine_client import ImagePrompt, ServerReport, read_samples, refuse_images
from penstock.rollout_service.errors import EngineAborted, ReplyRefused, TaskRefused

_METRICS = {
    "num_running_reqs": "engine_running",
    "num_queue_reqs": "engine_queued",
    "num_paused_reqs": "engine_paused",
    "gen_throughput": "engine_tokens_per_s",
    "generation_tokens_total": "engine_generated_tokens",
    "prompt_tokens_total": "engine_prompt_tokens",
    "cached_tokens_total": "engine_cached_tokens",
    "num_aborted_requests_total": "engine_aborted",
    "num_retracted_requests_total": "engine_retracted",
    "token_usage": "engine_kv_usage",
    "cache_hit_rate": "engine_cache_hit_rate",
}
TESTED_VERSIONS = ("0.5.23",)  # `make test-sglang` runs the contract against these
_EMBEDDED = [{"engine": "embedded"}]  # it reports the `weights_digest` of the files that it loaded
_SIDE = 64  # pixels of the pictures that `sight_requests` shows
_RED, _BLUE = (255, 0, 0), (0, 0, 255)


def read_metrics(exposition: str) -> dict[str, float]:
    return read_samples(exposition, prefix="sglang", names=_METRICS)


def read_slots(info: Any) -> dict[str, float]:
    """Return ``engine_slots`` from ``/server_info``: of SGLang per replica, as it chose them."""
    states = info.get("internal_states") if isinstance(info, dict) else None
    if isinstance(states, list):
        shown = [state.get("effective_max_running_requests_per_dp") for state in states if isinstance(state, dict)]
        slots = shown[0] * info.get("dp_size", 1) if shown and isinstance(shown[0], int) else None
    else:
        slots = info.get("max_running_requests") if isinstance(info, dict) else None
    return {"engine_slots": float(slots)} if isinstance(slots, int) and slots > 0 else {}


def patched_bytes(message: str) -> int:
    """Return the bytes that a server's plugin says it touched to apply a patch."""
    match = re.search(r"penstock: .*\bbytes=(\d+)", message)
    return 0 if match is None else int(match[1])


def report_of(info: Mapping[str, Any]) -> ServerReport:
    """Read ``/server_info``; the embedded engine and other versions of SGLang may leave out any of it."""
    version, length = info.get("version"), info.get("context_length")
    return ServerReport(
        objections=objections(info),
        untested_version="" if version is None or str(version) in TESTED_VERSIONS else str(version),
        context_tokens=length if isinstance(length, int) and length > 0 else None,
        takes_adapters=bool(info.get("enable_lora")),
    )


def objections(info: Mapping[str, Any]) -> list[str]:
    reasons: list[str] = []
    if info.get("skip_tokenizer_init"):
        reasons.append("--skip-tokenizer-init: completions would have no text to be rewarded")
    if info.get("tokenizer_worker_num", 1) != 1:
        reasons.append("--tokenizer-worker-num above 1: each worker names another weight version after an update")
    if info.get("enable_deterministic_inference"):
        reasons.append(
            "--enable-deterministic-inference: without a seed of its own for each, all samples of a group are the same"
        )
    if info.get("weight_cache_mode", "off") not in ("off", None):
        reasons.append("--weight-cache-mode: the server crashes at its first update")
    return reasons


def read_checksum(answer: Any) -> EngineChecksum | None:
    if not isinstance(answer, dict) or answer.get("success") is not True:
        return None
    value, ranks = answer.get("per_engine_checksum"), answer.get("ranks")
    if not isinstance(value, str) or not value or not isinstance(ranks, list):
        return None
    sharding = [rank.get("parallelism_info") for rank in ranks if isinstance(rank, dict)]
    digest = hashlib.sha256(json.dumps(sharding, sort_keys=True).encode()).hexdigest()
    return EngineChecksum(value, f"{len(ranks)}-{digest[:12]}", is_of_files=sharding == _EMBEDDED)


def read_completion(
    row: Any,
    *,
    num_prompt_tokens: int,
    max_new_tokens: int,
    interrupted: bool = False,
    routers: Routers | None = None,
    num_layers: int = 0,
) -> Completion:
    """Read one row of a reply; raises ReplyRefused or EngineAborted, naming what does not fit.

    ``routers`` are those whose choices were asked for, in a model of ``num_layers``.

    The engine may have aborted a row of an ``interrupted`` request, even before its first token: its tokens so far are
    returned with the finish reason ``"abort"``.
    """
    try:
        meta = row["meta_info"]
        token_ids: list[int] = row["output_ids"]
        text = row.get("text")
        finish = meta["finish_reason"]["type"]
        is_part = interrupted and finish == "abort" and meta["finish_reason"].get("status_code") is None
        triples = meta.get("output_token_logprobs", []) if is_part else meta["output_token_logprobs"]
        logprobs = [triple[0] for triple in triples]
        logprob_ids = [triple[1] for triple in triples]
        echoed = meta.get("prompt_tokens", num_prompt_tokens)
    except (KeyError, TypeError, IndexError, AttributeError) as err:
        raise ReplyRefused(
            f"a completion does not have SGLang's form ({type(err).__name__}: {err}): {shorten(row)}"
        ) from None
    if finish == "abort" and not is_part:
        raise EngineAborted(f"the engine aborted a generation: {shorten(meta['finish_reason'])}")
    if finish not in ("stop", "length", "abort"):
        raise ReplyRefused(f"unknown finish reason {shorten(finish)}")
    if echoed != num_prompt_tokens:
        raise ReplyRefused(f"a completion belongs to a prompt of {echoed} tokens, expected {num_prompt_tokens}")
    check_tokens(token_ids, logprob_ids, logprobs, at_least=0 if is_part else 1, at_most=max_new_tokens)
    if not isinstance(text, str):
        raise ReplyRefused("a completion has no text; start the server without --skip-tokenizer-init")
    runs = read_version_runs(meta.get("weight_versions"), len(token_ids), engine="SGLang")
    experts = None
    if routers is not None and (not is_part or "routed_experts" in meta):
        experts = read_experts(meta, routers, num_layers, num_tokens=num_prompt_tokens + len(token_ids))
    return Completion(token_ids, logprobs, runs, finish, text, experts)


def read_experts(meta: dict[str, Any], routers: Routers, num_layers: int, *, num_tokens: int) -> ExpertChoices:
    """Read ``routed_experts``: base64 of int32 [num_tokens - 1, num_layers, k], where layers without experts are zero.

    The last token of a sequence is sampled and not computed. Raises ReplyRefused for what is not of this form.
    """
    text = meta.get("routed_experts")
    if not isinstance(text, str):
        raise ReplyRefused(
            "a completion does not say which experts computed its tokens (trainer.router_replay); start SGLang with "
            "--enable-return-routed-experts (sglang.extra_args)"
        )
    shape = (num_tokens - 1, num_layers, routers.top_k)
    try:
        ids = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
    except (binascii.Error, ValueError) as err:
        raise ReplyRefused(f"routed_experts is not base64 of int32 ({err}): {shorten(text)}") from None
    if ids.size != shape[0] * shape[1] * shape[2]:
        raise ReplyRefused(
            f"routed_experts has {ids.size} numbers, expected {list(shape)}: tokens - 1, layers, experts of a token"
        )
    chosen = np.sort(ids.reshape(shape)[:, list(routers.layers)], axis=-1)
    if chosen.size and (int(chosen.min()) < 0 or int(chosen.max()) >= routers.num_experts):
        wrong = int(chosen.min()) if int(chosen.min()) < 0 else int(chosen.max())
        raise ReplyRefused(f"routed_experts names expert {wrong}, expected 0 to {routers.num_experts - 1}")
    try:
        return ExpertChoices(routers.shape, chosen.astype(dtype_of(routers.shape)))
    except PackError as err:
        raise ReplyRefused(f"routed_experts: {err}") from None


def image_fields(
    prompts: Sequence[Sequence[int]],
    shown: Sequence[Sequence[int]],
    tokens: ImageTokens | None,
    *,
    takes_positions: bool,
) -> dict[str, Any]:
    """Return the fields of a request's body that its images need, ``input_ids`` among them; none without images.

    ``prompts`` are all token ids of each prompt, with what was sampled behind it; ``shown`` the prompts themselves, of
    which some may have images; ``tokens`` the model's, None: it reads no images. With ``takes_positions`` the server is
    told which tokens are placeholders, so that others may have the same id. Raises TaskRefused if the model reads no
    images, or the policy sampled the image token's id, and the server would take it for a placeholder.
    """
    images = [prompt.images if isinstance(prompt, ImagePrompt) else None for prompt in shown]
    if tokens is None:
        refuse_images(shown, "an engine whose model reads text alone")
        return {}
    extra = [
        sum(token == tokens.image for token in ids) - (row_images.num_tokens if row_images is not None else 0)
        for ids, row_images in zip(prompts, images, strict=True)
    ]
    has_images = any(row_images is not None for row_images in images)
    if not has_images and not (takes_positions and any(extra)):
        return {}
    if any(extra) and not takes_positions:
        raise TaskRefused(
            "image_token_sampled",
            f"the policy sampled token {tokens.image}, which stands for images, in a prompt with images: SGLang would "
            "take it for another image; train the token away, or use the embedded engine",
        )
    fields: dict[str, Any] = {
        "input_ids": [collapsed(ids, row_images) for ids, row_images in zip(prompts, images, strict=True)]
    }
    if has_images:
        fields["image_data"] = [_data(prompt) for prompt in shown]
        fields["return_prompt_token_ids"] = True
    if takes_positions:
        fields["image_positions"] = [_positions(row_images) for row_images in images]
    return fields


def check_expanded(row: Any, expected: Sequence[int]) -> None:
    """Raise ReplyRefused unless a reply says that exactly these token ids were computed as its prompt."""
    token_ids = row.get("prompt_token_ids") if isinstance(row, dict) else None
    if not isinstance(token_ids, list):
        raise ReplyRefused(f"a reply to a prompt with images has no prompt_token_ids: {shorten(row)}")
    if token_ids == list(expected):
        return
    pairs = enumerate(zip(token_ids, expected, strict=False))
    at = next((at for at, (computed, other) in pairs if computed != other), min(len(token_ids), len(expected)))
    raise ReplyRefused(
        f"the engine computed a prompt of {len(token_ids)} tokens, the row has {len(expected)}; they differ from token "
        f"{at} on: {token_ids[at : at + 8]} and {list(expected[at : at + 8])}. Engine and trainer process images "
        "differently: give both the model folder's own preprocessor_config.json"
    )


def sight_requests(tokens: ImageTokens) -> list[dict[str, Any]]:
    """Return two requests that differ in the colour of a picture alone; their log-probabilities must differ."""
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
    """Return True if replies to `sight_requests` show that the pictures were looked at; raises ReplyRefused."""
    logprobs: list[list[float]] = []
    for reply in replies:
        try:
            triples = reply["meta_info"]["input_token_logprobs"]
            logprobs.append([float(triple[0]) for triple in triples[-2:]])
        except (KeyError, TypeError, IndexError, ValueError) as err:
            raise ReplyRefused(f"a reply has no log-probabilities of its prompt ({err!r}): {shorten(reply)}") from None
    return logprobs[0] != logprobs[1]


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
    from PIL import Image  # noqa: PLC0415  (a worker of a model that reads text alone needs none)

    picture = io.BytesIO()
    Image.new("RGB", (_SIDE, _SIDE), colour).save(picture, "PNG")
    return picture.getvalue()
