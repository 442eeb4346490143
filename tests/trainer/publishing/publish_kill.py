"""A publisher in its own process that publishes versions 0 and 1 and kills itself at a crash point of the second.

Its arguments: the point; connections, run and model folder as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.trainer.publishing.test_publish import snapshot

from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from penstock.trainer import crash_points
from penstock.trainer.connections import Connections
from penstock.trainer.publishing.publish import Publisher
from penstock.trainer.publishing.weight_retention import FullSnapshotPolicy


def main(arguments: Sequence[str]) -> None:
    point, given = arguments
    setup = json.loads(given)
    bus = Bus.connect(NatsSettings.model_validate(setup["nats"]), name="killed")
    connections = Connections(setup["run_id"], bus, Blobs(S3Settings.model_validate(setup["s3"])))
    always = FullSnapshotPolicy(max_ratio=1e9, max_versions=1)
    publisher = Publisher(connections, model_folder=Path(setup["model"]), epoch=1, policy=always)
    publisher.submit(snapshot(0, must_publish=True))
    publisher.wait_until_published(PolicyVersion(0), 180.0)
    crash_points.arm(point)
    publisher.submit(snapshot(1, must_publish=True))
    publisher.close()
