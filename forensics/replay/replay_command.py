"""A replay from its arguments to its exit code, on one rank or several under torchrun."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict

from penstock.forensics.replay.options import ReplayOptions
from penstock.forensics.replay.replay_findings import describe
from penstock.protocol import logs, streams
from penstock.protocol.command_line import FLAT, RunArguments, program
from penstock.protocol.config.connection import NatsSettings, RunSettings, S3Settings
from penstock.protocol.config.run_file import load, split_arguments
from penstock.protocol.config.sources import ENVIRONMENT_PREFIX, from_overrides
from penstock.protocol.errors import BlobCorrupt, BlobMissing, ConfigError, PenstockError, RecordBroken, WireError
from penstock.protocol.process_end import error_text
from penstock.protocol.record.stopped_batch import find_batch
from penstock.protocol.record.stored_record import StoredRecord, end_of_record
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.trainer.learner.gguf_model import model_folder

if TYPE_CHECKING:
    from penstock.forensics.replay.replay_run import Wanted
    from penstock.protocol.weights.signature import TrustedKeys
    from penstock.trainer.ranks import Ranks

ERROR = 2  # exit code of an error that is explained on stderr
DIFFERS = 1
_TRUSTED_KEYS = f"{ENVIRONMENT_PREFIX}WORKER__TRUSTED_KEYS_FILE"


class RunLocation(BaseModel):
    """The sections that locate a run; everything else is in its record."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: RunSettings = RunSettings()
    nats: NatsSettings = NatsSettings()
    s3: S3Settings = S3Settings()


def replay(run: str, *arguments: RunArguments, options: Annotated[ReplayOptions, FLAT] = ReplayOptions()) -> int:  # noqa: B008 - frozen
    """Replay a run; returns 0 if every version is identical, 1 if not, 2 for an error on stderr."""
    if options.batch and (options.first is not None or options.last is not None):
        raise ConfigError("--batch trains on one saved batch alone; leave out --from and --to")
    files, overrides = split_arguments(arguments)
    recorded = [
        override
        for override in from_overrides(overrides, [])
        if override.path[0].replace("-", "_") not in RunLocation.model_fields
    ]
    if recorded:
        raise ConfigError(
            f"{'.'.join(recorded[0].path)} cannot be set: a replay uses the settings in the run's record; set only run.dir, "
            "nats and s3, and --model for the folder of the initial model"
        )
    settings = load(RunLocation, files=files, overrides=[*overrides, f"run.id={run}"], environ=os.environ).settings
    logs.configure("replay", level="warning")
    from penstock.trainer.ranks import Ranks  # noqa: PLC0415  argument errors are reported without importing torch

    ranks = Ranks()
    code = 0
    try:
        lead = _lead_batch if options.batch else _lead
        code = ranks.broadcast(
            lead(options, settings, files, ranks) if ranks.is_leader else _follow(options, settings, ranks)
        )
    except (BlobMissing, BlobCorrupt, WireError, RecordBroken) as err:
        sys.stderr.write(error_text(f"the record cannot be replayed: {err}\n"))
        code = DIFFERS
    except PenstockError as err:
        sys.stderr.write(error_text(f"{err}\n"))
        code = ERROR
    ranks.leave(code)
    return code


main = program("penstock replay", replay, error=None)


def _lead(options: ReplayOptions, settings: RunLocation, files: Sequence[Path], ranks: Ranks) -> int:
    from penstock.forensics.replay.replay_run import Replay  # noqa: PLC0415  as above

    blobs = Blobs(settings.s3, deadline_s=30.0)
    blobs.check(settings.run.id)

    def pointer() -> bytes | None:
        with Bus.connect(settings.nats, name="replay", deadline_s=5.0) as bus:
            entry = (
                bus.key_value(streams.state_bucket(settings.run.id).bucket).wait().get(streams.CHECKPOINT_KEY).wait()
            )
            return None if entry is None else entry.value

    record = StoredRecord.read(settings.run.id, end_of_record(settings.run.id, settings.run.folder, pointer), blobs.get)

    def show(version: int) -> None:
        if not options.json and sys.stderr.isatty():
            sys.stderr.write(f"\rversion {version} is identical\x1b[K")

    verdict = Replay(record, blobs, ranks, settings.run.folder, _wanted(options, files)).run(show)
    if options.json:
        sys.stdout.write(json.dumps(verdict.to_document()) + "\n")
    else:
        sys.stderr.write("\r\x1b[K" if sys.stderr.isatty() else "")
        sys.stdout.write(describe(verdict))
    return 0 if verdict.holds else DIFFERS


def _lead_batch(options: ReplayOptions, settings: RunLocation, files: Sequence[Path], ranks: Ranks) -> int:
    from penstock.forensics.replay.replay_batch import BatchReplay  # noqa: PLC0415
    from penstock.forensics.replay.replay_findings import describe_batch  # noqa: PLC0415  as above

    folder = find_batch(settings.run.folder, options.batch or "")
    replay = BatchReplay(settings.run, folder, ranks, _wanted(options, files))
    verdict = replay.run(Blobs(settings.s3, deadline_s=30.0))
    sys.stdout.write(json.dumps(verdict.to_document()) + "\n" if options.json else describe_batch(verdict))
    return 0 if verdict.is_reproduced else DIFFERS


def _wanted(options: ReplayOptions, files: Sequence[Path]) -> Wanted:
    from penstock.forensics.replay.replay_run import Wanted  # noqa: PLC0415  as above

    model = model_folder(options.model) if options.model else None
    return Wanted(options.first, options.last, model, tuple(files), options.user_code, _keys(options.trusted_keys))


def _keys(keys_file: Path | None) -> TrustedKeys | None:
    named = os.environ.get(_TRUSTED_KEYS)
    file = keys_file or (Path(named) if named else None)
    if file is None:
        return None
    from penstock.protocol.weights.signature import TrustedKeys  # noqa: PLC0415  its library is needed only here

    return TrustedKeys.from_file(file, "--trusted-keys" if keys_file else _TRUSTED_KEYS)


def _follow(options: ReplayOptions, settings: RunLocation, ranks: Ranks) -> None:
    from penstock.forensics.replay import replay_batch, replay_run  # noqa: PLC0415  as above

    replay_batch.follow(ranks) if options.batch else replay_run.follow(ranks, Blobs(settings.s3))
