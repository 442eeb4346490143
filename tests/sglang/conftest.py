"""Workers on a real SGLang server; all tests are skipped except under ``make test-sglang``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.deploy import sglang_cpu
from penstock.deploy.bootstrap import bootstrap, delete_run
from penstock.deploy.processes.child import Child
from penstock.deploy.processes.servers import NatsServer, S3Server
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from tests.contracts import real_sglang
from tests.contracts.real_sglang import START_S
from tests.rollout_service.trainer_side import TrainerSide, worker_process

_RUN = "sglang"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and not real_sglang.ASKED:
            item.add_marker(pytest.mark.skip(reason="needs a real SGLang server: make test-sglang"))


@pytest.fixture(scope="module")
def trainer_side(
    nats_server: NatsServer, s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TrainerSide]:
    """The trainer's and the reward service's end of one run, of which version 0 is published."""
    blobs = Blobs(s3_server.settings)
    with Bus.connect(nats_server.settings, name="test") as bus:
        bootstrap(bus, blobs, _RUN)
        end = TrainerSide(bus, blobs, _RUN, tmp_path_factory.mktemp("trainer_side"))
        end.publish(0)
        yield end
        delete_run(bus, _RUN)


@pytest.fixture(scope="module")
def running_worker(nats_server: NatsServer, s3_server: S3Server, trainer_side: TrainerSide) -> Iterator[Child]:
    """A worker whose engine is a real SGLang on the CPU, updated in mid-generation."""
    section = trainer_side.folder / "sglang.toml"
    section.write_text('[worker]\nengine = "sglang"\nupdate_mode = "retract"\n\n' + sglang_cpu.section_toml())
    nats, s3 = nats_server.settings, s3_server.settings
    child = worker_process(trainer_side.folder, _RUN, "w0", nats, s3, str(section))
    trainer_side.wait_applied("w0", 0, START_S)
    yield child
    child.kill()


@pytest.fixture
def sglang_worker(running_worker: Child) -> Iterator[Child]:
    """That worker, one for all tests: it restarts its server after a kill. A failed test shows its log."""
    yield running_worker
    print(f"── log of {running_worker.name} ──\n{running_worker.log_tail(40)}")
