"""vLLM as a kind of engine."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.rollout_service.engines.engine_kind import EngineKind, ServerLaunch
from penstock.rollout_service.engines.vllm.client import VllmClient
from penstock.rollout_service.engines.vllm.command import vllm_command, vllm_environ
from penstock.rollout_service.engines.vllm.settings import VllmSettings


def _launches(settings: VllmSettings, environ: Mapping[str, str]) -> list[ServerLaunch]:
    return [
        ServerLaunch(
            vllm_command(settings),
            f"vllm-{number}.log",
            environ=vllm_environ(settings, number, environ),
            context_length=settings.max_model_len,
        )
        for number in range(settings.engines)
    ]


VLLM_URL = EngineKind("vllm-url", VllmClient)
VLLM = EngineKind("vllm", VllmClient, _launches, options=VllmSettings, section="vllm")
