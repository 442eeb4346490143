"""Where trainer and rollout workers answer Prometheus."""

from __future__ import annotations

from pydantic import Field

from penstock.protocol.config.connection import Section


class MetricsSettings(Section):
    """Prometheus metrics of trainer and rollout workers at ``/metrics``; the reward service answers at its HTTP API."""

    host: str = Field(
        default="127.0.0.1",
        description="Address that /metrics listens on. There is no token: others than loopback should be reachable by "
        "Prometheus only.",
    )
    trainer_port: int | None = Field(
        default=None, ge=0, le=65535, description="Port of the trainer's /metrics; 0 takes any free one, None is off."
    )
    rollout_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of a rollout worker's /metrics; 0 takes any free one, as several workers of one machine need; "
        "None is off.",
    )
