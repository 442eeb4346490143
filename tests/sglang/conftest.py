"""Workers on a real SGLang server; everything here is skipped unless ``make test-sglang`` asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy import sglang_cpu
from deploy.child import Child
from protocol.connection import NatsSettings, S3Settings
from protocol.transport.blobs import Blobs
from protocol.transport.bus import Bus
from tests.contracts import real_sglang
from tests.rollout_service.ring_end import RingEnd, worker_process


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip by name where no server was asked for."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and not real_sglang.ASKED:
            item.add_marker(pytest.mark.skip(reason="needs a real SGLang server: make test-sglang"))


@pytest.fixture
def ring_end(bus: Bus, blobs: Blobs, ring_streams: str, tmp_path: Path) -> RingEnd:
    """The trainer's and the reward service's end of a run of its own."""
    return RingEnd(bus, blobs, ring_streams, tmp_path)


@pytest.fixture
def sglang_worker(
    ring_streams: str, nats_settings: NatsSettings, s3_settings: S3Settings, tmp_path: Path
) -> Iterator[Callable[..., Child]]:
    """Start a worker whose engine is a real SGLang on the CPU; a failed test shows its log."""
    started: list[Child] = []
    section = tmp_path / "sglang.toml"

    def start(*overrides: str) -> Child:
        section.write_text('[worker]\nengine = "sglang"\n\n' + sglang_cpu.section_toml())
        child = worker_process(tmp_path, ring_streams, "w0", nats_settings, s3_settings, str(section), *overrides)
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
        print(f"── log of {child.name} ──\n{child.log_tail(40)}")
