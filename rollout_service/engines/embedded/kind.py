"""The embedded engine as a kind of engine: its HTTP API is SGLang's."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.rollout_service.engines.embedded.command import PREPARE, EmbeddedOptions, embedded_command
from penstock.rollout_service.engines.engine_kind import EngineKind, ServerLaunch
from penstock.rollout_service.engines.sglang.client import SglangClient


class EmbeddedClient(SglangClient):
    """A client of the embedded engine, whose ``/generate`` has one field more than SGLang's."""

    takes_image_positions = True


def _launches(options: EmbeddedOptions, environ: Mapping[str, str]) -> list[ServerLaunch]:
    return [ServerLaunch(embedded_command(options), "engine.log", prepare=PREPARE)]


EMBEDDED = EngineKind("embedded", EmbeddedClient, _launches, section="worker", returns_experts=True)
