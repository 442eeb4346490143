"""SGLang's replies → completions, versions, checksums: pure, and refused as a whole when anything does not fit.

The other half of the contract, what is asked and when, is `sglang_client.py`.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, replace
from typing import Any

from penstock.protocol.facts import FinishReason
from penstock.protocol.versions import PolicyVersion, VersionRun
from penstock.rollout_service.errors import EngineAborted, ReplyRefused


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled continuation; positions of ``version_runs`` count from its first token."""

    token_ids: list[int]  # [C] as sampled, the matched stop token included
    logprobs: list[float]  # [C] of the sampled tokens under the policy that sampled them
    version_runs: tuple[VersionRun, ...]  # cover [0, C) without gap or overlap
    finish_reason: FinishReason
    text: str


@dataclass(frozen=True, slots=True)
class EngineChecksum:
    """What an engine says of the weights it serves; comparable among engines of one ``layout``."""

    value: str
    layout: str  # how many ranks hold the weights, and how they are cut


def read_version(label: object) -> PolicyVersion | None:
    """Translate ``weight_version`` into a policy version; None for a label that is not one of ours."""
    if isinstance(label, str) and label.isascii() and label.isdecimal():
        return PolicyVersion(int(label))
    return None


def read_checksum(answer: Any) -> EngineChecksum | None:
    """Read the reply to ``/weights_checker``; None when it holds no checksum."""
    if not isinstance(answer, dict) or answer.get("success") is not True:
        return None
    value, ranks = answer.get("per_engine_checksum"), answer.get("ranks")
    if not isinstance(value, str) or not value or not isinstance(ranks, list):
        return None
    cut = [rank.get("parallelism_info") for rank in ranks if isinstance(rank, dict)]
    digest = hashlib.sha256(json.dumps(cut, sort_keys=True).encode()).hexdigest()
    return EngineChecksum(value, f"{len(ranks)}-{digest[:12]}")


def read_completion(row: Any, *, num_prompt_tokens: int, max_new_tokens: int, interrupted: bool = False) -> Completion:
    """Read one row of a reply; raises ReplyRefused or EngineAborted, naming what does not fit.

    Of an ``interrupted`` request a row may have been ended by the engine, at its first token even: what it has by
    then is returned, and its finish reason is ``"abort"``.
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
    if not (0 if is_part else 1) <= len(token_ids) <= max_new_tokens:
        raise ReplyRefused(f"{len(token_ids)} completion tokens, expected 1 to {max_new_tokens}")
    if logprob_ids != token_ids:
        raise ReplyRefused(
            f"log-probabilities are of other tokens than the sampled ones: {len(logprobs)} for {len(token_ids)} tokens"
        )
    if not all(type(value) is int and value >= 0 for value in token_ids):
        raise ReplyRefused(f"output_ids are not token ids: {shorten(token_ids)}")
    if not all(type(value) in (float, int) and math.isfinite(value) and value <= _LOGPROB_SLACK for value in logprobs):
        raise ReplyRefused(f"log-probabilities are missing, not finite or above 0: {shorten(logprobs)}")
    if not isinstance(text, str):
        raise ReplyRefused("a completion has no text; start the server without --skip-tokenizer-init")
    runs = _read_version_runs(meta.get("weight_versions"), len(token_ids))
    return Completion(token_ids, logprobs, runs, finish, text)


def sampled_by_adapter(completion: Completion, adapter: PolicyVersion, base: PolicyVersion | None) -> Completion:
    """Return a completion as the adapter's: its tokens are of that version, and of no other.

    A server names the weights below an adapter, not the adapter. That it computed with it is known from its having
    taken the name: it refuses one that it does not have. Raises ReplyRefused when the weights below were, at any
    token, not those that the adapter was loaded upon.
    """
    for run in completion.version_runs:
        if run.version != base:
            raise ReplyRefused(
                f"tokens {run.start} to {run.end} of adapter {adapter} were computed upon version {run.version}, "
                f"but it was loaded upon version {base}"
            )
    num_tokens = len(completion.token_ids)
    runs = (VersionRun(adapter, 0, num_tokens),) if num_tokens else ()
    return replace(completion, version_runs=runs)


_LOGPROB_SLACK = 1e-3  # a probability of 1 may round to a log-probability just above 0


def _read_version_runs(spans: Any, num_tokens: int) -> tuple[VersionRun, ...]:
    runs: list[VersionRun] = []
    position = 0
    for span in spans if isinstance(spans, list) else ():
        try:
            version, start, end = read_version(span["version"]), span["start"], span["end"]
        except (KeyError, TypeError) as err:
            raise ReplyRefused(f"weight_versions do not have SGLang's form ({err!r}): {shorten(spans)}") from None
        if start == end:  # an update before the first token leaves an empty span
            continue
        if version is None:
            raise ReplyRefused(f"tokens of unknown version {shorten(span['version'])} are never trained on")
        if start != position or not isinstance(end, int) or end < start:
            raise ReplyRefused(f"weight_versions have a gap or overlap at token {position}: {shorten(spans)}")
        runs.append(VersionRun(version, start, end))
        position = end
    if position != num_tokens:
        raise ReplyRefused(f"weight_versions cover {position} of {num_tokens} tokens: {shorten(spans)}")
    return tuple(runs)


def shorten(value: object) -> str:
    """Return what an error may quote of a reply."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 300 else f"{text[:300]}…"
