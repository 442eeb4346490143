"""SGLang as a kind of engine."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.rollout_service.engines.engine_kind import EngineKind, ServerLaunch
from penstock.rollout_service.engines.sglang.client import SglangClient
from penstock.rollout_service.engines.sglang.command import sglang_command, sglang_environ
from penstock.rollout_service.engines.sglang.settings import SglangSettings


def _launches(settings: SglangSettings, environ: Mapping[str, str]) -> list[ServerLaunch]:
    passed = sglang_environ(settings, environ)
    return [
        ServerLaunch(
            sglang_command(settings, number),
            f"sglang-{number}.log",
            environ=passed,
            context_length=settings.context_length,
        )
        for number in range(settings.engines)
    ]


SGLANG_URL = EngineKind("sglang-url", SglangClient, returns_experts=True)
SGLANG = EngineKind("sglang", SglangClient, _launches, options=SglangSettings, section="sglang", returns_experts=True)
