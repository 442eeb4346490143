"""SGLang's HTTP contract, spoken in this file and nowhere else.

Here ``weight_version`` strings become policy versions, and here every reply is held against its
request before anything is built from it. What the log-probabilities are: ``log softmax(logits /
temperature)`` over the full vocabulary, of the token that was sampled, as long as ``top_p`` and
``top_k`` are off.

The embedded engine speaks the same contract, so nothing here knows which of the two it talks to.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from protocol.facts import FinishReason, Sampling
from protocol.versions import PolicyVersion, VersionRun
from rollout_service.check_task import ModelLimits, check_request
from rollout_service.errors import (
    EngineAborted,
    EngineDistrusted,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
    ReplyRefused,
    WeightsNotApplied,
)

_CONNECT_S = 5.0
_PROBE_S = 10.0  # a question that costs the engine nothing: model_info
_HEALTH_S = 30.0  # a token of its own at most; SGLang itself gives up after 20 s
_LOAD_S = 600.0  # draining what runs, then reading the weights


_NEUTRAL = {
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}


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


class SglangClient:
    """One engine. Requests may run side by side; weight operations go one at a time."""

    def __init__(self, url: str, *, api_key: str = "", request_deadline_s: float = 600.0) -> None:
        """Prepare a client; nothing is sent before the first call."""
        self.url = url
        self._request_deadline_s = request_deadline_s
        self._probe_s = _PROBE_S
        self._weights_turn = asyncio.Lock()
        self._num_doubts = 0
        self._doubt: str | None = None
        self.limits = ModelLimits(None, None)  # of the model that is served; requests beyond them are refused here
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,  # an engine on loopback is never behind a proxy
        )

    async def close(self) -> None:
        """Drop the connections."""
        await self._http.aclose()

    async def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, n: int) -> list[list[Completion]]:
        """Sample ``n`` completions of every prompt in one request.

        Returns one list of ``n`` for each prompt, in order. Raises EngineError of the kind that fits;
        a reply is used as a whole or not at all. Raises TaskRefused, and sends nothing, for what no engine could
        serve, or would die of.
        """
        for prompt in prompts:
            check_request(prompt, sampling, self.limits)
        num_doubts = self._num_doubts
        self._refuse_if_doubted(num_doubts)
        body = {
            "rid": [uuid.uuid4().hex for _ in prompts],  # aborts match by prefix, so all of one length
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": {
                "n": n,
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                # said although they are off: a server may have been started with other preferences
                **_NEUTRAL,
                "stop_token_ids": list(sampling.stop_token_ids),
            },
            "return_logprob": True,
        }
        rows = await self._call("POST", "/generate", body, self._request_deadline_s)
        self._refuse_if_doubted(num_doubts)
        if isinstance(rows, dict):
            rows = [rows]
        if not isinstance(rows, list) or len(rows) != n * len(prompts):
            got = f"{len(rows)} rows" if isinstance(rows, list) else type(rows).__name__
            raise ReplyRefused(f"{self.url}: expected {n * len(prompts)} completions, got {got}")
        completions = [
            read_completion(row, num_prompt_tokens=len(prompts[i // n]), max_new_tokens=sampling.max_new_tokens)
            for i, row in enumerate(rows)
        ]
        return [completions[i : i + n] for i in range(0, len(completions), n)]

    def distrust(self, why: str) -> None:
        """Refuse what is under way, and whatever is asked until `trust`: nobody knows which weights sample it."""
        self._num_doubts += 1
        self._doubt = why

    def trust(self) -> None:
        """Let requests through again: the engine has confirmed what it serves."""
        self._doubt = None

    def _refuse_if_doubted(self, num_doubts: int) -> None:
        if self._doubt is not None or num_doubts != self._num_doubts:
            raise EngineDistrusted(f"{self.url}: {self._doubt or 'an update of its weights failed meanwhile'}")

    async def health(self) -> None:
        """Return when the engine generates, or could; raises EngineError when it does not."""
        async with self._weights_turn:  # while it drains for an update it answers nobody
            await self._call("GET", "/health", None, _HEALTH_S, parse=False)

    async def server_info(self) -> dict[str, Any]:
        """Return how the engine was started, as it tells it; raises EngineError."""
        info = await self._call("GET", "/server_info", None, self._probe_s)
        return info if isinstance(info, dict) else {}

    async def metrics(self) -> str:
        """Return the engine's figures in Prometheus' text format; raises EngineError where it has none."""
        return await self._call("GET", "/metrics", None, self._probe_s, parse=False)

    async def load_weights(self, folder: Path, version: PolicyVersion) -> None:
        """Swap the weights and read back that it happened.

        The engine finishes what runs, holds back what is new, and drops its prefix cache. Raises
        WeightsNotApplied when it says no or afterwards names another version: then nobody knows
        what it serves, and it must be loaded again or started anew.
        """
        async with self._weights_turn:
            body = {
                "model_path": str(folder),
                "load_format": "auto",
                "weight_version": str(version),
                "flush_cache": True,
                "abort_all_requests": False,
            }
            try:
                answer = await self._call("POST", "/update_weights_from_disk", body, _LOAD_S)
            except EngineRefused as err:
                raise WeightsNotApplied(f"version {version}: {err}") from None
            if not isinstance(answer, dict) or answer.get("success") is not True:
                raise WeightsNotApplied(f"{self.url} did not load version {version} from {folder}: {_shorten(answer)}")
            served = await self._read_version()
            if served != version:
                raise WeightsNotApplied(
                    f"{self.url} said it loaded version {version}, but its model_info names {served}"
                )

    async def served_version(self) -> PolicyVersion | None:
        """Ask which version is served; None when the engine's label is not a version of ours."""
        async with self._weights_turn:
            return await self._read_version()

    async def weights_checksum(self) -> EngineChecksum | None:
        """Ask for the checksum of the served weights; None of an engine that cannot say it."""
        async with self._weights_turn:
            try:
                answer = await self._call("POST", "/weights_checker", {"action": "checksum"}, _LOAD_S)
            except (EngineRefused, ReplyRefused):
                return None
        return read_checksum(answer)

    async def _read_version(self) -> PolicyVersion | None:
        info = await self._call("GET", "/model_info", None, self._probe_s)
        return read_version(info.get("weight_version") if isinstance(info, dict) else None)

    async def _call(self, method: str, path: str, body: Any, deadline_s: float, *, parse: bool = True) -> Any:
        try:
            async with asyncio.timeout(deadline_s):
                response = await self._http.request(method, path, json=body)
        except TimeoutError:
            raise EngineTimeout(f"{self.url}{path} gave no answer within {deadline_s:g} s") from None
        except (httpx.HTTPError, RuntimeError) as err:
            if isinstance(err, RuntimeError) and not self._http.is_closed:
                raise
            raise EngineUnreachable(f"{self.url}{path}: {type(err).__name__} {err}".rstrip()) from None
        if response.status_code != httpx.codes.OK:
            raise EngineRefused(f"{self.url}{path} answered {response.status_code}: {_shorten(response.text)}")
        if not parse:
            return response.text
        try:
            return json.loads(response.content)
        except ValueError as err:
            raise ReplyRefused(
                f"{self.url}{path} answered what is not JSON ({err}): {_shorten(response.text)}"
            ) from None


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


def read_completion(row: Any, *, num_prompt_tokens: int, max_new_tokens: int) -> Completion:
    """Read one row of a reply; raises ReplyRefused or EngineAborted, naming what does not fit."""
    try:
        meta = row["meta_info"]
        token_ids: list[int] = row["output_ids"]
        text = row.get("text")
        triples = meta["output_token_logprobs"]
        finish = meta["finish_reason"]["type"]
        logprobs = [triple[0] for triple in triples]
        logprob_ids = [triple[1] for triple in triples]
        echoed = meta.get("prompt_tokens", num_prompt_tokens)
    except (KeyError, TypeError, IndexError, AttributeError) as err:
        raise ReplyRefused(
            f"a completion does not have SGLang's form ({type(err).__name__}: {err}): {_shorten(row)}"
        ) from None
    if finish == "abort":
        raise EngineAborted(f"the engine aborted a generation: {_shorten(meta['finish_reason'])}")
    if finish not in ("stop", "length"):
        raise ReplyRefused(f"unknown finish reason {_shorten(finish)}")
    if echoed != num_prompt_tokens:
        raise ReplyRefused(f"a completion belongs to a prompt of {echoed} tokens, expected {num_prompt_tokens}")
    if not 1 <= len(token_ids) <= max_new_tokens:
        raise ReplyRefused(f"{len(token_ids)} completion tokens, expected 1 to {max_new_tokens}")
    if logprob_ids != token_ids:
        raise ReplyRefused(
            f"log-probabilities are of other tokens than the sampled ones: {len(logprobs)} for {len(token_ids)} tokens"
        )
    if not all(type(value) is int and value >= 0 for value in token_ids):
        raise ReplyRefused(f"output_ids are not token ids: {_shorten(token_ids)}")
    if not all(type(value) in (float, int) and math.isfinite(value) and value <= _LOGPROB_SLACK for value in logprobs):
        raise ReplyRefused(f"log-probabilities are missing, not finite or above 0: {_shorten(logprobs)}")
    if not isinstance(text, str):
        raise ReplyRefused("a completion has no text; start the server without --skip-tokenizer-init")
    runs = _read_version_runs(meta.get("weight_versions"), len(token_ids))
    return Completion(token_ids, logprobs, runs, finish, text)


_LOGPROB_SLACK = 1e-3  # a probability of 1 may round to a log-probability just above 0


def _read_version_runs(spans: Any, num_tokens: int) -> tuple[VersionRun, ...]:
    runs: list[VersionRun] = []
    position = 0
    for span in spans if isinstance(spans, list) else ():
        try:
            version, start, end = read_version(span["version"]), span["start"], span["end"]
        except (KeyError, TypeError) as err:
            raise ReplyRefused(f"weight_versions do not have SGLang's form ({err!r}): {_shorten(spans)}") from None
        if start == end:  # an update before the first token leaves an empty span
            continue
        if version is None:
            raise ReplyRefused(f"tokens of unknown version {_shorten(span['version'])} are never trained on")
        if start != position or not isinstance(end, int) or end < start:
            raise ReplyRefused(f"weight_versions have a gap or overlap at token {position}: {_shorten(spans)}")
        runs.append(VersionRun(version, start, end))
        position = end
    if position != num_tokens:
        raise ReplyRefused(f"weight_versions cover {position} of {num_tokens} tokens: {_shorten(spans)}")
    return tuple(runs)


def _shorten(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 300 else f"{text[:300]}…"
