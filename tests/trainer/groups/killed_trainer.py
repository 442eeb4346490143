"""The group handling of a trainer in a process of its own, which is killed while it reads a pack.

The arguments are the file of `Run.write`, and "killed" for one that gets SIGKILL where decoding begins.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tests.trainer.groups.test_collect import V0, Session, read_prompts, write_prompts

from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.groups import BlobRef
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.trainer.connections import Connections
from penstock.trainer.groups import pack_reader
from penstock.trainer.groups.pack_reader import PackReader, ReadingMark


@dataclass(frozen=True)
class Run:
    folder: Path

    @classmethod
    def write(cls, folder: Path, run_id: str, nats: NatsSettings, s3: S3Settings) -> Run:
        write_prompts(folder)
        made = cls(folder)
        connections = {
            "run_id": run_id,
            "nats": {**nats.model_dump(mode="json"), "password": nats.secret()},
            "s3": {**s3.model_dump(mode="json"), "secret_key": s3.secret()},
        }
        made.file.write_text(json.dumps(connections))
        return made

    @property
    def file(self) -> Path:
        return self.folder / "connections.json"

    @property
    def marks(self) -> Path:
        return self.folder / "marks"

    @property
    def deaths(self) -> dict[str, int]:
        """How many trainers were killed at each pack, by its key: those that were counted, and the mark that is left."""
        counted = self.marks / "readers_killed.json"
        found = json.loads(counted.read_text()) if counted.exists() else {}
        if left := (self.marks / "reading").read_text().split("\n")[0]:
            found[left] = found.get(left, 0) + 1
        return found

    @property
    def trained(self) -> Path:
        """The ids of the batch that a session took, which is the end of it."""
        return self.folder / "trained.json"


def _end_while_reading(pack: BlobRef, _wanted: object, fetch: Callable[[BlobRef], bytes], **_: object) -> NoReturn:
    fetch(pack)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def main() -> None:
    """Issue four groups and take one batch of them."""
    run = Run(Path(sys.argv[1]).parent)
    if sys.argv[2] == "killed":
        pack_reader.read_groups = _end_while_reading  # type: ignore[assignment]
    setup = json.loads(run.file.read_text())
    with Bus.connect(NatsSettings.model_validate(setup["nats"]), name="trainer") as bus:
        blobs = Blobs(S3Settings.model_validate(setup["s3"]))
        reader = PackReader(blobs.get, mark=ReadingMark(run.marks))
        connections = Connections(setup["run_id"], bus, blobs)
        with Session(connections, read_prompts(run.folder), reader=reader, log=run.folder / "issued.log") as session:
            session.issuer.advance(V0, 4)
            trained = session.train(V0)
    partial = run.trained.with_suffix(".partial")
    partial.write_text(json.dumps(trained))
    partial.replace(run.trained)
