"""SGLang's replies → completions, checksums, server reports and metrics; pure. A reply that contradicts itself is refused as a whole."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.protocol.errors import PackError
from penstock.protocol.token_annotations import ExpertChoices, Routers, dtype_of
from penstock.rollout_service.engines.completion import (
    Completion,
    EngineChecksum,
    check_tokens,
    read_version_runs,
    shorten,
)
from penstock.rollout_service.engines.engine_client import ServerReport, read_samples
from penstock.rollout_service.errors import EngineAborted, ReplyRefused

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


def read_metrics(exposition: str) -> dict[str, float]:
    return read_samples(exposition, prefix="sglang", names=_METRICS)


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
    """Return why a server cannot be used; empty when it can, or when it does not report the flag."""
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
