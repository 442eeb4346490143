"""The adapter file of vLLM's HTTP API. A reply that contradicts itself is refused as a whole.

Token ids go in and come out (``/inference/v1/generate``); every choice names the weight version of each of its tokens.
The log-probabilities are ``log softmax(logits / temperature)`` over the full vocabulary, of the sampled token, while
``top_p`` and ``top_k`` are off, if the server was started with ``--logprobs-mode processed_logprobs``.

The routes for pauses and weights exist only with ``VLLM_SERVER_DEV_MODE=1``, the token routes with
``--enable-scale-out``, those for adapters with ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.protocol.groups import Sampling
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.adapter_format import adapter_name
from penstock.rollout_service.engines.completion import (
    Completion,
    EngineChecksum,
    Resumption,
    check_tokens,
    read_version_runs,
    shorten,
)
from penstock.rollout_service.engines.completion_sampler import SampleRequest
from penstock.rollout_service.engines.engine_client import ServerReport, UpdateMode, read_samples
from penstock.rollout_service.engines.engine_http import LOAD_S, PROBE_S, AdapterCalls, HttpEngineClient
from penstock.rollout_service.errors import EngineAborted, EngineError, EngineRefused, ReplyRefused, WeightsNotApplied

_INFO_S = 60.0  # the first server_info lists the machine's packages, which takes a quarter of a minute
_PAUSE_S = 60.0  # at most one decoding step
_FORBIDDEN, _NOT_FOUND, _BUSY = 403, 404, 503

_PAUSE_MODES: dict[UpdateMode, str] = {"drain": "wait", "abort": "abort", "retract": "keep", "in_place": "keep"}
_METRICS = {
    "num_requests_running": "engine_running",
    "num_requests_waiting": "engine_queued",
    "generation_tokens_total": "engine_generated_tokens",
    "prompt_tokens_total": "engine_prompt_tokens",
    "prompt_tokens_cached_total": "engine_cached_tokens",
    "num_preemptions_total": "engine_retracted",
    "kv_cache_usage_perc": "engine_kv_usage",
}
TESTED_VERSIONS = ("0.32.0",)  # the contract ran against a CPU build of these


class _AdapterCalls(AdapterCalls):
    async def load(self, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        try:
            await self._http.call("POST", "/v1/load_lora_adapter", body, LOAD_S, parse=False)
        except EngineRefused as err:
            raise WeightsNotApplied(f"adapter {name}: {err}{_fix(err)}") from None
        if name not in await self.list_names():
            raise WeightsNotApplied(f"{self._http.url} did not list {name} after it was loaded from {folder}")

    async def unload(self, name: str) -> None:
        await self._http.call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, LOAD_S, parse=False)


def _fix(refusal: EngineRefused) -> str:
    if refusal.status != _NOT_FOUND:
        return ""
    return (
        "; set vllm.max_lora_rank for a server of the worker's own, or start yours with --enable-lora --max-lora-rank "
        "and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
    )


class VllmClient(HttpEngineClient):
    adapter_calls = _AdapterCalls
    version_page = "/weight_info"
    returns_text = False
    without_images = "vLLM"

    def __init__(self, url: str, *, api_key: str = "", request_deadline_s: float = 600.0) -> None:
        super().__init__(url, api_key=api_key, request_deadline_s=request_deadline_s)
        self._accepting = asyncio.Event()  # cleared during a pause, in which vLLM refuses new requests
        self._accepting.set()
        self._num_pauses = 0
        self._cache_salt: str | None = None  # separates cached prefixes of different versions where none are flushed

    async def _sample(self, sequences: Sequence[Resumption], request: SampleRequest) -> list[Completion]:
        n = request.n if request.sampling.temperature > 0 else 1  # vLLM refuses several greedy samples in a request
        try:
            async with asyncio.TaskGroup() as requests:
                parts = [
                    requests.create_task(self._sample_prompt(sequences[start : start + n], request))
                    for start in range(0, len(sequences), n)
                ]
        except* EngineError as failures:
            raise failures.exceptions[0] from None
        return [part for group in parts for part in group.result()]

    async def _sample_prompt(self, sequences: Sequence[Resumption], request: SampleRequest) -> list[Completion]:
        first = sequences[0]
        body: dict[str, Any] = {
            "request_id": uuid.uuid4().hex,
            "token_ids": [*first.prompt, *first.sampled],
            "sampling_params": _sampling_params(request.sampling, len(sequences), first.num_left),
        }
        if request.adapter is not None:
            body["model"] = adapter_name(request.adapter)
        while True:
            while not self._accepting.is_set():  # the next pause may begin before this task runs again
                await self._accepting.wait()
            if self._cache_salt is not None:
                body["cache_salt"] = self._cache_salt
            num_pauses, num_aborts = self._num_pauses, self._num_aborts
            try:
                answer = await self._http.call("POST", "/inference/v1/generate", body, request.deadline_s)
            except EngineRefused as err:
                if err.status == _BUSY and self._was_interrupted(
                    num_aborts
                ):  # it arrived after the others were aborted
                    return [Completion([], [], (), "abort", "") for _ in sequences]
                if err.status == _BUSY and num_pauses != self._num_pauses:
                    continue  # it arrived after the pause had begun
                raise
            interrupted = self._was_interrupted(num_aborts)
            return read_completions(answer, [sequence.num_left for sequence in sequences], interrupted=interrupted)

    async def health(self) -> None:
        await self._http.call("GET", "/health", None, PROBE_S, parse=False)

    async def inspect(self) -> ServerReport:
        version = await self._http.call("GET", "/version", None, PROBE_S)
        version = str(version.get("version")) if isinstance(version, dict) else ""
        if not await self._has("GET", "/weight_info", None, missing=_NOT_FOUND):
            return ServerReport(["the environment without VLLM_SERVER_DEV_MODE=1: it has no routes for weights"])
        if not await self._has("POST", "/inference/v1/generate", {}, missing=_FORBIDDEN):
            return ServerReport(["no --enable-scale-out: it has no token routes"])
        info = await self._http.call("GET", "/server_info?config_format=json", None, _INFO_S)
        return report_of(version, info if isinstance(info, dict) else {})

    async def _has(self, method: str, path: str, body: object, *, missing: int) -> bool:
        try:
            await self._http.call(method, path, body, PROBE_S)
        except EngineRefused as err:
            return err.status != missing
        return True

    async def metrics(self) -> dict[str, float]:
        return read_metrics(await self._http.call("GET", "/metrics", None, PROBE_S, parse=False))

    async def started_with(self, folder: Path, version: PolicyVersion) -> None:
        """Label the weights that the server was started with: it takes no label on its command line."""
        async with self._weights_turn:
            self._sampler.folder = folder
            await self._label(version)

    async def load_weights(self, folder: Path, version: PolicyVersion, mode: UpdateMode = "drain") -> None:
        """Load the weights of a folder and confirm the version; see `EngineClient.load_weights`.

        The pause of ``drain`` and ``abort`` clears the prefix cache, ``retract`` resets it and recomputes what runs;
        after ``in_place`` later requests carry the version as a cache salt. A failed load leaves vLLM without usable
        weights: it crashes at the next request.
        """
        await self._prepare_load(version)
        async with self._adapters.turn, self._weights_turn:
            self._sampler.folder = folder
            if self._released:
                await self._http.call("POST", "/wake_up?tags=weights", None, self._load_s, parse=False)
                await self._reload(folder, version)
                await self._http.call("POST", "/wake_up?tags=kv_cache", None, self._load_s, parse=False)
                await self._http.call("POST", "/resume", None, _PAUSE_S)
                self._released, self._cache_salt = False, None
                self._sampler.may_send.set()
                return
            try:
                await self._pause(mode)
                await self._reload(folder, version)
                if mode == "retract":
                    await self._recompute_running()
                self._cache_salt = str(version) if mode == "in_place" else None
                await self._http.call("POST", "/resume", None, _PAUSE_S)
            finally:
                self._accepting.set()

    async def _end_requests(self) -> None:
        await self._http.call("POST", "/pause?mode=abort", None, self._load_s)

    async def _release(self) -> None:
        """Discard weights, keys and values (sleep level 2), of a server started with --enable-sleep-mode."""
        await self._http.call("POST", "/pause?mode=wait", None, self._load_s)
        await self._http.call("POST", "/sleep?level=2", None, self._load_s, parse=False)

    async def _pause(self, mode: UpdateMode) -> None:
        self._num_pauses += 1
        if mode in ("drain", "abort"):
            self._accepting.clear()
        with self._pausing(mode):
            await self._http.call("POST", f"/pause?mode={_PAUSE_MODES[mode]}", None, self._load_s)

    async def _reload(self, folder: Path, version: PolicyVersion) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        try:
            await self._http.call("POST", "/collective_rpc", body, self._load_s)
            await self._label(version)
        except EngineRefused as err:
            raise WeightsNotApplied(f"version {version}: {err}") from None

    async def _label(self, version: PolicyVersion) -> None:
        await self._http.call("POST", "/update_weight_version", {"new_version": str(version)}, PROBE_S)
        served = await self._read_version()
        if served != version:
            raise WeightsNotApplied(f"{self.url} was to serve version {version}, but its weight_info names {served}")

    async def _recompute_running(self) -> None:
        answer = await self._http.call("POST", "/reset_prefix_cache?reset_running_requests=true", None, _PAUSE_S)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise WeightsNotApplied(f"{self.url} kept keys and values of the old weights: {shorten(answer)}")

    async def weights_checksum(self) -> EngineChecksum | None:
        async with self._weights_turn:
            try:
                answer = await self._http.call("POST", "/weight_checker", {"action": "checksum"}, self._load_s)
            except (EngineRefused, ReplyRefused):
                return None
        return read_checksum(answer)


def _sampling_params(sampling: Sampling, n: int, max_new_tokens: int) -> dict[str, Any]:
    return {
        "n": n,
        "max_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "logprobs": 0,  # of the sampled token, and of no others
        "stop_token_ids": list(sampling.stop_token_ids),
        **_stop_params(sampling),
    }


def _stop_params(sampling: Sampling) -> dict[str, Any]:
    if not sampling.stop:
        return {"detokenize": False}
    return {
        "stop": list(sampling.stop),
        "include_stop_str_in_output": True,
        "detokenize": True,
        "skip_special_tokens": False,
    }


def read_metrics(exposition: str) -> dict[str, float]:
    return read_samples(exposition, prefix="vllm", names=_METRICS)


def report_of(version: str, info: Mapping[str, Any]) -> ServerReport:
    config = info.get("vllm_config")
    config = config if isinstance(config, dict) else {}
    model = config.get("model_config")
    model = model if isinstance(model, dict) else {}
    length = model.get("max_model_len")
    return ServerReport(
        objections=_objections(model),
        untested_version="" if version in TESTED_VERSIONS else version,
        context_tokens=length if isinstance(length, int) and length > 0 else None,
        takes_adapters=bool(config.get("lora_config")),
    )


def _objections(model: Mapping[str, Any]) -> list[str]:
    reasons: list[str] = []
    mode = model.get("logprobs_mode")
    if mode != "processed_logprobs":
        reasons.append(
            f"--logprobs-mode {mode}: log-probabilities must be those of the sampled distribution, 'processed_logprobs'"
        )
    if model.get("skip_tokenizer_init"):
        reasons.append("--skip-tokenizer-init: the server would not know the model's end token")
    return reasons


def read_completions(answer: Any, limits: Sequence[int], *, interrupted: bool) -> list[Completion]:
    """Read the reply of ``/inference/v1/generate``, one choice for each of ``limits``, the tokens it may have.

    Raises ReplyRefused or EngineAborted, naming what does not fit. The engine may have aborted a choice of an
    ``interrupted`` request, even before its first token: its tokens so far are returned with the finish reason
    ``"abort"``. The texts are empty: this API returns token ids.
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != len(limits):
        got = f"{len(choices)} choices" if isinstance(choices, list) else shorten(answer)
        raise ReplyRefused(f"expected {len(limits)} choices, got {got}")
    try:
        ordered = sorted(choices, key=lambda choice: choice["index"])
        numbers = [choice["index"] for choice in ordered]
    except (KeyError, TypeError) as err:
        raise ReplyRefused(f"choices do not have vLLM's form ({err!r}): {shorten(choices)}") from None
    if numbers != list(range(len(limits))):
        raise ReplyRefused(f"expected choices 0 to {len(limits) - 1}, got {numbers}")
    return [_completion(choice, limit, interrupted) for choice, limit in zip(ordered, limits, strict=True)]


def _completion(choice: dict[str, Any], limit: int, interrupted: bool) -> Completion:
    finish = choice.get("finish_reason")
    is_part = interrupted and finish == "abort"
    if finish == "abort" and not is_part:
        raise EngineAborted(f"the engine aborted a generation: {shorten(choice.get('stop_reason'))}")
    if finish not in ("stop", "length", "abort"):
        raise ReplyRefused(f"unknown finish reason {shorten(finish)}")
    try:
        token_ids: list[int] = choice["token_ids"] or []
        content = (choice.get("logprobs") or {}).get("content") or []
        logprob_ids = [entry["token_id"] for entry in content]
        logprobs = [entry["logprob"] for entry in content]
    except (KeyError, TypeError, AttributeError) as err:
        raise ReplyRefused(f"a choice does not have vLLM's form ({err!r}): {shorten(choice)}") from None
    check_tokens(token_ids, logprob_ids, logprobs, at_least=0 if is_part else 1, at_most=limit)
    runs = read_version_runs(choice.get("weight_versions"), len(token_ids), engine="vLLM")
    return Completion(token_ids, logprobs, runs, finish, "")


def read_checksum(answer: Any) -> EngineChecksum | None:
    """Read the reply to ``/weight_checker``: one digest for each tensor of each rank; None when it holds none."""
    digests = answer.get("checksums") if isinstance(answer, dict) else None
    if not isinstance(digests, dict) or not digests:
        return None
    return EngineChecksum(_digest(digests), f"{len(digests)}-{_digest(sorted(digests))[:12]}")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
