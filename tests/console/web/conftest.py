"""A run on the session's servers, served by the console's app; one for all tests of a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tests.console.record import recorded_run as recorded
from tests.console.web.control.api import Api
from tests.console.web.shown_run import ShownRun, environ_of

from penstock.console.live import run_snapshot
from penstock.console.web.access import Role
from penstock.deploy.bootstrap import bootstrap
from penstock.deploy.processes.servers import NatsServer, S3Server
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus

STEPS = 30


@dataclass
class Shown:
    """Two runs, one with hostile texts, and the console that serves them."""

    plain: ShownRun
    hostile: ShownRun
    console: Api
    folder: Path

    def client(self, role: Role = Role.READ) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.console.tokens[role]}"}
        return httpx.Client(base_url=self.console.url, headers=headers, timeout=60.0, trust_env=False)


@pytest.fixture(scope="module")
def shown(nats_server: NatsServer, s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Shown]:  # fmt: skip
    """The runs ``plain-FILE`` and ``hostile-FILE`` of thirty steps."""
    folder = tmp_path_factory.mktemp("runs")
    blobs = Blobs(s3_server.settings)
    name = request.path.stem.replace("_", "-")[5:30]
    with Bus.connect(nats_server.settings, name="shown") as bus:
        runs = []
        for run_id in (f"plain-{name}", f"hostile-{name}"):
            bootstrap(bus, blobs, run_id)
            run = ShownRun(run_id, bus, blobs, hostile=run_id.startswith("hostile"))
            run.write(STEPS)
            (folder / run_id).mkdir()
            lr = 1e-5 if run.hostile else 2e-5
            (folder / run_id / "config.json").write_text(
                json.dumps({"settings": {"trainer": {"lr": lr, "steps": 9, "store_logprobs": "all"}}})
            )
            runs.append(run)
        recorded.write_metrics(folder / "only-files")
        run_snapshot.save_totals(folder / "only-files", recorded.whole_run().totals())
        (folder / "only-files" / "evaluations").mkdir()
        evaluated = {"evaluation": "v60-a", "step": recorded.STEPS, "at": 1.0, "values": {"eval/math/accuracy": 0.9}}
        (folder / "only-files" / "evaluations" / "metrics.jsonl").write_text(json.dumps(evaluated) + "\n")
        with Api(folder, environ=environ_of(nats_server.settings, s3_server.settings)).served() as console:
            yield Shown(runs[0], runs[1], console, folder)
