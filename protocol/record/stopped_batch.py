"""The batch at which a run stopped by itself: written by the trainer (`trainer/recovery/run_record_writer.py`), read by the console."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from penstock.protocol.errors import ConfigError, MalformedFact
from penstock.protocol.files import MOST_BYTES, JsonTooLarge, read_document, read_regular
from penstock.protocol.groups import Count, Identifier, ScoredGroup, Wire, first_problem
from penstock.protocol.packs import group_pack
from penstock.protocol.trajectory import Group

FOLDER = "stopped"  # in the run's folder; below it one folder for each step
BATCH, GROUPS, SETTINGS = "batch.json", "groups.parquet", "config.json"


class StoppedBatch(Wire):
    """The content of ``batch.json``; ``row_group`` of each group is its place in ``groups.parquet``."""

    run_id: Identifier
    step: Count  # number of the step that was to be made
    version: Count  # of the weights before it
    reason: str
    error: str = ""  # the kind of the error; empty: written by an earlier release, as are the next two
    epoch: Count = 0  # of the trainer's lease
    # the state before the step: `trainer/algorithm/credit.py`
    algorithm: dict[str, Any] = Field(default_factory=dict)
    ages: tuple[tuple[Count, Count], ...] = ()  # as in `RecordedStep`
    groups: Annotated[tuple[ScoredGroup, ...], Field(min_length=1)]  # in the order of their use


def stopped_batches(run_folder: Path) -> list[Path]:
    return sorted(path.parent for path in (run_folder / FOLDER).glob(f"step*/{BATCH}") if path.parent.suffix == "")


def find_batch(run_folder: Path, step_or_folder: str) -> Path:
    saved = {int(path.name.removeprefix("step")): path for path in stopped_batches(run_folder)}
    if step_or_folder.isdecimal() and int(step_or_folder) in saved:
        return saved[int(step_or_folder)]
    if not step_or_folder.isdecimal() and (folder := Path(step_or_folder).absolute()) in {
        path.absolute() for path in saved.values()
    }:
        return folder
    steps = ", ".join(map(str, saved)) or "none: the run has not stopped by itself"
    raise ConfigError(f"{run_folder / FOLDER}: no saved batch {step_or_folder!r}; give a step or a folder of {steps}")


def read_batch(folder: Path) -> tuple[StoppedBatch, list[Group]]:
    try:
        batch = StoppedBatch.model_validate_json(read_document(folder / BATCH))
    except ValidationError as err:
        raise MalformedFact(f"{folder / BATCH}: {first_problem(err)}; restore the file") from None
    except JsonTooLarge as err:
        raise MalformedFact(f"{folder / BATCH}: {err}; restore the file") from None
    described = [scored.generated for scored in batch.groups]
    groups = group_pack.decode(
        read_regular(folder / GROUPS, MOST_BYTES),
        [description.row_group for description in described],
        described=described,
    )
    return batch, groups
