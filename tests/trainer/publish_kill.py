"""A publisher in a process of its own, which publishes versions 0 and 1 and kills itself at a crash point of the second.

python -m tests.trainer.publish_kill POINT < connections, run and model folder as JSON
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from protocol.connection import NatsSettings, S3Settings
from protocol.transport.blobs import Blobs
from protocol.transport.bus import Bus
from protocol.versions import PolicyVersion
from protocol.weight_retention import AnchorPolicy
from tests.trainer.test_publish import snapshot
from trainer import crash_points
from trainer.doors import Doors
from trainer.publish import Publisher


def main() -> None:
    """Publish until killed."""
    told = json.loads(sys.stdin.read())
    bus = Bus.connect(NatsSettings.model_validate(told["nats"]), name="killed")
    doors = Doors(told["run_id"], bus, Blobs(S3Settings.model_validate(told["s3"])))
    always = AnchorPolicy(max_ratio=1e9, max_versions=1)
    publisher = Publisher(doors, model_folder=Path(told["model"]), epoch=1, policy=always)
    publisher.submit(snapshot(0, must_publish=True))
    publisher.wait_until_published(PolicyVersion(0), 20.0)
    crash_points.arm(sys.argv[1])
    publisher.submit(snapshot(1, must_publish=True))
    publisher.close()


if __name__ == "__main__":
    main()
