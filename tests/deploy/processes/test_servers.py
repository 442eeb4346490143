"""The servers of deploy/processes/servers.py, as everybody's fixtures use them."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.groups import make_generated, make_groups

from penstock.deploy.processes.child import DeployError
from penstock.deploy.processes.servers import HOST, NatsServer, S3Server
from penstock.protocol import subjects
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus


def test_nats_restarts_on_the_same_port_with_its_messages(own_nats: Callable[[], NatsServer], run_id: str) -> None:
    from penstock.protocol.streams import StreamSpec

    server = own_nats()
    port = server.port
    with Bus.connect(server.settings, name="test") as bus:
        bus.ensure_stream(
            StreamSpec(f"{run_id}-generated", (subjects.generated(run_id),), "workqueue", 100, 10_000_000)
        ).wait()
        fact = make_generated(run_id, make_groups(1))
        bus.publish(subjects.generated(run_id, "train"), fact, msg_id="1").wait()
        server.kill()
        server.restart()
        assert server.port == port
        assert bus.stream_state(f"{run_id}-generated").wait().num_messages == 1


def test_s3_restarts_on_the_same_port_with_its_objects(own_s3: Callable[[], S3Server]) -> None:
    server = own_s3()
    port = server.port
    blobs = Blobs(server.settings)
    ref = blobs.put("runs/r/x", b"held")
    server.kill()
    server.restart()
    assert server.port == port
    assert blobs.get(ref) == b"held"


@pytest.mark.parametrize("kind", [NatsServer, S3Server])
def test_a_port_in_use_is_refused(kind: type[NatsServer] | type[S3Server], tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as holder:
        port = holder.getsockname()[1]
        server = kind(tmp_path / "store", log=tmp_path / "log", port=port)
        with pytest.raises(DeployError, match=f"port {port} on {HOST} is taken"):
            server.start()


def test_a_server_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    """The error of a failed start holds the last lines of the server's log."""
    store = tmp_path / "store"
    store.mkdir()
    (store / "jetstream-store").write_text("a file where a folder should be")
    server = NatsServer(store, log=tmp_path / "log")
    with pytest.raises(DeployError, match=r"(?s)nats-server was not ready.*ended with exit code 1.*not a directory"):
        server.start()
