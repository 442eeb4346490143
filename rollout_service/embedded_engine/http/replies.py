"""Build SGLang's reply objects from sequences. Pure but for the detokenizer."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Any

import numpy as np

from penstock.rollout_service.embedded_engine.http.bodies import SamplingParams
from penstock.rollout_service.embedded_engine.http.build_job import RequestedJob
from penstock.rollout_service.embedded_engine.http.text import Text
from penstock.rollout_service.embedded_engine.sequence import Sequence


def build_replies(requested: RequestedJob, text: Text, latency_s: float) -> list[dict[str, Any]]:
    """Return one reply per sequence, in the order of the request; all sequences are finished."""
    texts = completion_texts(requested.sequences, requested.params, text)
    return [
        _reply(requested, sequence, completion, latency_s)
        for sequence, completion in zip(requested.sequences, texts, strict=True)
    ]


def build_chunk(requested: RequestedJob, index: int, num_tokens: int, version: str, text: Text) -> dict[str, Any]:
    """Return the cumulative reply of an unfinished sequence, for streaming; spans come with the last chunk."""
    sequence, params = requested.sequences[index], requested.params[index]
    tokens = sequence.output_ids[:num_tokens]
    completion = text.decode([tokens], skip_special_tokens=params.skip_special_tokens)[0]
    meta: dict[str, Any] = {
        "id": sequence.rid,
        "finish_reason": None,
        "prompt_tokens": len(sequence.prompt),
        "completion_tokens": num_tokens,
        "cached_tokens": sequence.cached_tokens,
        "weight_version": version,
    }
    if requested.return_logprob:
        meta |= _output_logprobs(tokens, sequence.output_logprobs[:num_tokens])
    return {"text": completion, "output_ids": tokens, "meta_info": meta}


def completion_texts(sequences: Items[Sequence], params: Items[SamplingParams], text: Text) -> list[str]:
    """Return the text of finished completions without the stop token or string (unless no_stop_trim)."""
    if not text.has_tokenizer:
        return [""] * len(sequences)
    rows = [_visible_tokens(sequence, requested) for sequence, requested in zip(sequences, params, strict=True)]
    same = len({requested.skip_special_tokens for requested in params}) == 1
    if same:
        texts = text.decode(rows, skip_special_tokens=params[0].skip_special_tokens)
    else:
        pairs = zip(rows, params, strict=True)
        texts = [text.decode([row], skip_special_tokens=requested.skip_special_tokens)[0] for row, requested in pairs]
    return [_cut(*item) for item in zip(texts, sequences, params, strict=True)]


def _visible_tokens(sequence: Sequence, params: SamplingParams) -> list[int]:
    stopped_by_token = sequence.finish is not None and isinstance(sequence.finish.matched, int)
    return sequence.output_ids[:-1] if stopped_by_token and not params.no_stop_trim else sequence.output_ids


def _cut(completion: str, sequence: Sequence, params: SamplingParams) -> str:
    matched = sequence.finish.matched if sequence.finish is not None else None
    if not isinstance(matched, str):
        return completion
    return completion if params.no_stop_trim else completion.partition(matched)[0]


def _reply(requested: RequestedJob, sequence: Sequence, completion: str, latency_s: float) -> dict[str, Any]:
    finish = sequence.finish
    assert finish is not None
    num_tokens = len(sequence.output_ids)
    meta: dict[str, Any] = {
        "id": sequence.rid,
        "finish_reason": finish.to_json(num_tokens),
        "prompt_tokens": len(sequence.prompt),
        "completion_tokens": num_tokens,
        "cached_tokens": sequence.cached_tokens,
        "weight_version": sequence.final_version,
        "weight_versions": [{"version": span.version, "start": span.start, "end": span.end} for span in sequence.spans],
        "num_retractions": sequence.num_retractions,
        "e2e_latency": latency_s,
    }
    if requested.return_logprob:
        meta |= _output_logprobs(sequence.output_ids, sequence.output_logprobs)
    if sequence.experts is not None:
        meta["routed_experts"] = _routed_experts(sequence, requested)
    if sequence.input_logprobs_from is not None and sequence.input_logprobs is not None:
        tokens = sequence.prompt[sequence.input_logprobs_from :]
        meta["input_token_logprobs"] = _triples((None, *sequence.input_logprobs), tokens)
    if sequence.input_top_logprobs is not None:
        tops = [[(logprob, token, None) for logprob, token in place] for place in sequence.input_top_logprobs]
        meta["input_top_logprobs"] = [None, *tops]
    reply: dict[str, Any] = {"text": completion, "output_ids": sequence.output_ids, "meta_info": meta}
    if requested.return_prompt_token_ids:
        reply["prompt_token_ids"] = sequence.prompt
    return reply


def _routed_experts(sequence: Sequence, requested: RequestedJob) -> str:
    """Return SGLang's ``routed_experts``: base64 of int32 [tokens - 1, layers, k], zero in layers without experts."""
    assert sequence.experts is not None
    chosen = sequence.experts[: sequence.num_tokens - 1]
    table = np.zeros((len(chosen), requested.num_layers, chosen.shape[2]), dtype="<i4")
    table[:, list(requested.expert_layers)] = chosen
    return base64.b64encode(table.tobytes()).decode("ascii")


def _output_logprobs(tokens: list[int], logprobs: list[float]) -> dict[str, Any]:
    return {
        "output_token_logprobs": _triples(logprobs, tokens),
        "output_token_logprobs_length": len(tokens),
    }


def _triples(logprobs: Iterable[float | None], tokens: Iterable[int]) -> list[tuple[float | None, int, None]]:
    return [(logprob, token, None) for logprob, token in zip(logprobs, tokens, strict=True)]
