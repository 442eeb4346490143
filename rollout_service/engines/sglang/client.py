"""The adapter file of SGLang's HTTP API; its replies are read by `messages.py`.

Every reply is checked against its request before anything is built from it. The log-probabilities are ``log
softmax(logits / temperature)`` over the full vocabulary, of the sampled token, while ``top_p`` and ``top_k`` are off.

The embedded engine serves the same API: this client does not distinguish the two.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import structlog

from penstock.protocol.groups import Sampling
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.adapter_format import adapter_name
from penstock.rollout_service.engines.completion import Completion, EngineChecksum, Resumption, read_version, shorten
from penstock.rollout_service.engines.completion_sampler import SampleRequest
from penstock.rollout_service.engines.engine_client import KeptCompletions, ServerReport, UpdateMode
from penstock.rollout_service.engines.engine_http import LOAD_S, PROBE_S, AdapterCalls, HttpEngineClient
from penstock.rollout_service.engines.redundancy import Redundancy, generate_redundantly
from penstock.rollout_service.engines.sglang.messages import (
    check_expanded,
    image_fields,
    patched_bytes,
    read_checksum,
    read_completion,
    read_metrics,
    read_slots,
    report_of,
    sees,
    sight_requests,
)
from penstock.rollout_service.engines.sglang.weight_patch import Offer, WeightPatcher
from penstock.rollout_service.engines.weight_changes import NoChanges, WeightChanges
from penstock.rollout_service.errors import EngineMisconfigured, EngineRefused, ReplyRefused, WeightsNotApplied

log = structlog.get_logger("rollout.engine")

_HEALTH_S = 30.0  # generates one token at most; SGLang itself gives up after 20 s
_PAUSE_S = 60.0  # at most one decoding step
# What the plugin answers where it has changed nothing; its figures mean that it has, and that it failed later.
_REFUSAL = re.compile(r'"penstock: (?!words=)')

_NEUTRAL = {
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}


class _AdapterCalls(AdapterCalls):
    async def load(self, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        try:
            answer = await self._http.call("POST", "/load_lora_adapter", body, LOAD_S)
        except EngineRefused as err:
            raise WeightsNotApplied(f"adapter {name}: {err}{_fix(str(err))}") from None
        listed = answer.get("loaded_adapters") if isinstance(answer, dict) and answer.get("success") is True else None
        if not isinstance(listed, dict) or listed.get(name) != str(folder):
            raise WeightsNotApplied(f"{self._http.url} did not load {name} from {folder}: {shorten(answer)}")

    async def unload(self, name: str) -> None:
        answer = await self._http.call("POST", "/unload_lora_adapter", {"lora_name": name}, LOAD_S)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise EngineRefused(f"{self._http.url} did not unload {name}: {shorten(answer)}")


def _fix(refusal: str) -> str:
    if "LoRA is not enabled" not in refusal:
        return ""
    return (
        "; set sglang.max_lora_rank for a server of the worker's own, or start yours with --enable-lora --max-lora-rank"
    )


class SglangClient(HttpEngineClient):
    adapter_calls = _AdapterCalls
    version_page = "/model_info"
    takes_image_positions: ClassVar[bool] = False  # its server is told which tokens are placeholders of images

    def __init__(self, url: str, *, api_key: str = "", request_deadline_s: float = 600.0) -> None:
        super().__init__(url, api_key=api_key, request_deadline_s=request_deadline_s)
        self._may_be_paused = True  # a previous worker may have been killed in the middle of an update
        self._checksum: EngineChecksum | None = None  # of the served weights, where the reply to their update had it
        self._looking = asyncio.Lock()  # held while the server is asked whether it looks at images
        self._sees = False
        self._patcher = WeightPatcher()
        self._asked_for_map = False
        self._slots: dict[str, float] = {}
        self._cache_key: str | None = None  # separates cached prefixes of different versions where none are flushed

    async def generate_redundantly(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        redundancy: Redundancy,
        adapter: PolicyVersion | None = None,
    ) -> list[KeptCompletions]:
        """Sample more completions of every prompt than are kept, one per request; see `GeneratesRedundantly`."""
        return await generate_redundantly(
            self._sampler, prompts, sampling, redundancy, adapter, self.limits, self._abort
        )

    async def _abort(self, name: str) -> None:
        await self._http.call("POST", "/abort_request", {"rid": name}, PROBE_S, parse=False)

    async def _sample(self, sequences: Sequence[Resumption], request: SampleRequest) -> list[Completion]:
        n, num_aborts = request.n, self._num_aborts
        prompts = [[*resumption.prompt, *resumption.sampled] for resumption in sequences[::n]]
        params = [_sampling_params(request.sampling, n, resumption) for resumption in sequences[::n]]
        body: dict[str, Any] = {
            "rid": [uuid.uuid4().hex for _ in prompts] if request.single is None else [request.single.name],
            "input_ids": prompts,
            "sampling_params": params[0] if all(param == params[0] for param in params) else params,
            "return_logprob": True,
        }
        shown = [resumption.prompt for resumption in sequences[::n]]
        body |= image_fields(prompts, shown, self.limits.images, takes_positions=self.takes_image_positions)
        has_images = "image_data" in body
        if has_images:
            await self._check_sight()
        routers = self.limits.routers if request.sampling.routers is not None else None
        if routers is not None:
            body["return_routed_experts"] = True
        if self._cache_key is not None:
            body["extra_key"] = self._cache_key
        if request.adapter is not None:
            body["lora_path"] = adapter_name(request.adapter)
        rows = await self._http.call("POST", "/generate", body, request.deadline_s)
        if isinstance(rows, dict):
            rows = [rows]
        if not isinstance(rows, list) or len(rows) != len(sequences):
            got = f"{len(rows)} rows" if isinstance(rows, list) else type(rows).__name__
            raise ReplyRefused(f"{self.url}: expected {len(sequences)} completions, got {got}")
        if has_images:
            for index, row in enumerate(rows):
                check_expanded(row, prompts[index // n])
        abandoned = request.single is not None and request.single.is_abandoned
        interrupted = abandoned or self._was_interrupted(num_aborts)
        return [
            read_completion(
                row,
                num_prompt_tokens=len(prompts[index // n]),
                max_new_tokens=sequence.num_left,
                interrupted=interrupted,
                routers=routers,
                num_layers=self.limits.num_layers,
            )
            for index, (sequence, row) in enumerate(zip(sequences, rows, strict=True))
        ]

    async def _check_sight(self) -> None:
        """Raise EngineMisconfigured unless two pictures give other log-probabilities: a route may drop images."""
        async with self._looking:
            if self._sees:
                return
            assert self.limits.images is not None  # else no prompt has images
            requests = sight_requests(self.limits.images)
            replies = [
                await self._http.call("POST", "/generate", request, self._deadline.least_s) for request in requests
            ]
            if not sees(replies):
                raise EngineMisconfigured(
                    f"{self.url} gives a prompt with a red picture the log-probabilities of one with a blue picture: "
                    "it ignores images; start it with the model's vision tower, or train on data without images"
                )
            self._sees = True

    async def health(self) -> None:
        """Return when the engine generates, or could; raises EngineError when it does not."""
        async with self._weights_turn:  # while it drains for an update it does not answer
            await self._http.call("GET", "/health", None, _HEALTH_S, parse=False)

    async def inspect(self) -> ServerReport:
        with contextlib.suppress(EngineRefused):
            info = await self._http.call("GET", "/server_info", None, PROBE_S)
            return report_of(info if isinstance(info, dict) else {})
        return ServerReport()

    async def metrics(self) -> dict[str, float]:
        page = await self._http.call("GET", "/metrics", None, PROBE_S, parse=False)
        return read_metrics(page) | self._patcher.figures() | self._slots

    async def started_with(self, folder: Path, version: PolicyVersion) -> None:
        self._sampler.folder = folder
        async with self._weights_turn:
            await self._map_parameters(folder, version)

    @property
    def max_changed_share(self) -> float:
        return self._patcher.max_changed_share

    async def stage(self, changes: WeightChanges | NoChanges) -> bool:
        """Write the patch that `patch` applies; see `TakesChanges.stage`."""
        folder = self._sampler.folder
        try:
            return folder is not None and await asyncio.to_thread(self._patcher.stage, changes, folder)
        except OSError as err:
            log.warning("patch not written, the folder will be loaded", url=self.url, error=str(err))
            self._patcher.forget_staged()
            return False

    async def load_weights(self, folder: Path, version: PolicyVersion, mode: UpdateMode = "drain") -> None:
        """Load the weights of a folder and confirm the version; see `EngineClient.load_weights`.

        The server flushes its prefix cache, except ``in_place``: then later requests carry the version as a cache key.
        """
        await self._prepare_load(version)
        async with self._adapters.turn, self._weights_turn:
            self._sampler.folder = folder
            if was_released := self._released:
                await self._occupy("resume", "weights")
            await self._pause(mode)
            flush = mode != "in_place"
            await self._update(folder, version, flush=flush)
            await self._map_parameters(folder, version, flush=flush)
            self._patcher.loaded()
            self._cache_key = None if flush else str(version)
            if was_released:
                await self._occupy("resume", "kv_cache")
                self._released = False
                self._sampler.may_send.set()
            if mode != "drain":
                await self._continue()

    async def _end_requests(self) -> None:
        await self._http.call("POST", "/abort_request", {"rid": "", "abort_all": True}, PROBE_S, parse=False)

    async def _release(self) -> None:
        self._patcher.forget_staged()
        await self._occupy("release", "kv_cache", "weights")

    async def _occupy(self, what: Literal["release", "resume"], *tags: str) -> None:
        """Free the memory of ``tags``, or allocate it again, empty, on a server with --enable-memory-saver."""
        await self._http.call("POST", f"/{what}_memory_occupation", {"tags": tags}, self._load_s, parse=False)

    async def patch(self, version: PolicyVersion, mode: UpdateMode = "drain") -> bool:
        """Apply the patch that is staged for a version; see `TakesChanges.patch`."""
        prefix, folder = self._patcher.take(version), self._sampler.folder
        if prefix is None or folder is None:
            return False
        await self._prepare_load(version)
        async with self._adapters.turn, self._weights_turn:
            await self._pause(mode)
            flush, load_format, applied = mode != "in_place", f"penstock:patch:{prefix}", False
            try:
                message = await self._update(folder, version, flush=flush, load_format=load_format)
                applied = True
            except WeightsNotApplied as err:
                if not _REFUSAL.search(str(err)):
                    raise
                log.warning("patch refused, the folder will be loaded", policy_version=version, error=str(err))
                self._patcher.refused()
            else:
                self._patcher.loaded(patched_bytes(message))
                self._cache_key = None if flush else str(version)
            if mode != "drain":
                await self._continue()
            return applied

    async def _map_parameters(self, folder: Path, version: PolicyVersion, *, flush: bool = True) -> None:
        """Ask a server with the plugin, once, where each value of the folder that it has loaded is in its parameters.

        The folder is loaded again after a refusal: what the attempt has changed is unknown.
        """
        if self._asked_for_map:
            return
        self._asked_for_map = True
        with contextlib.suppress(EngineRefused, ReplyRefused):
            info = await self._http.call("GET", "/server_info", None, PROBE_S)
            self._slots, self._patcher.offer = read_slots(info), Offer.read(info)
        if self._patcher.offer is None:
            return
        job = f"penstock:probe:{self._patcher.map_prefix(folder)}"
        try:
            await self._update(folder, version, flush=False, load_format=job)
            await asyncio.to_thread(self._patcher.read_maps, folder)
        except (WeightsNotApplied, OSError, ValueError, KeyError) as err:
            log.warning(
                "this server's weights cannot be patched, each version is loaded whole", url=self.url, error=str(err)
            )
            await self._update(folder, version, flush=flush)

    async def _update(self, folder: Path, version: PolicyVersion, *, flush: bool, load_format: str = "auto") -> str:
        """Have the server load a folder, or do a job of its plugin; return its message."""
        body = {
            "model_path": str(folder),
            "load_format": load_format,
            "weight_version": str(version),
            "flush_cache": flush,
            "abort_all_requests": False,
        }
        self._checksum = None
        try:
            answer = await self._http.call("POST", "/update_weights_from_disk", body, self._load_s)
        except EngineRefused as err:
            raise WeightsNotApplied(f"version {version}: {err}") from None
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise WeightsNotApplied(f"{self.url} did not load version {version} from {folder}: {shorten(answer)}")
        names_version = "weight_version" in answer  # the embedded engine's reply does, SGLang's does not
        served = read_version(answer["weight_version"]) if names_version else await self._read_version()
        if served != version:
            where = "answer" if names_version else "model_info"
            raise WeightsNotApplied(
                f"{self.url} answered that it loaded version {version}, but its {where} names {served}"
            )
        self._checksum = read_checksum(answer)
        return str(answer.get("message"))

    async def _pause(self, mode: UpdateMode) -> None:
        if mode == "drain":
            if self._may_be_paused:
                await self._continue()
            return
        self._may_be_paused = True
        with self._pausing(mode):
            await self._http.call("POST", "/pause_generation", {"mode": mode}, self._load_s)

    async def _continue(self) -> None:
        await self._http.call("POST", "/continue_generation", {}, _PAUSE_S)
        self._may_be_paused = False

    async def weights_checksum(self) -> EngineChecksum | None:
        """Return the checksum of the served weights; None when the server reports none.

        A server whose reply to the update had it is not asked again.
        """
        async with self._weights_turn:
            if self._checksum is not None:
                return self._checksum
            try:
                answer = await self._http.call("POST", "/weights_checker", {"action": "checksum"}, self._load_s)
            except (EngineRefused, ReplyRefused):
                return None
        return read_checksum(answer)


def _sampling_params(sampling: Sampling, n: int, sequence: Resumption) -> dict[str, Any]:
    seed = sequence.next_seed
    return {
        "n": n,
        "max_new_tokens": sequence.num_left,
        **({} if seed is None else {"sampling_seed": seed}),  # SGLang reads it under deterministic inference only
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        **_NEUTRAL,  # sent although they are off: a server may have been started with other preferences
        "stop_token_ids": list(sampling.stop_token_ids),
        **({"stop": list(sampling.stop), "no_stop_trim": True} if sampling.stop else {}),
    }
