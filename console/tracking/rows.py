"""Turn events into rows of numbers by name, each step once, and a finished run into its table of samples and its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.console.record.lineage import Member, open_record, packs_of, read_texts, version_lineage
from penstock.console.report.event_fields import number
from penstock.console.tracking.interface import EVENT, Row
from penstock.protocol.facts import RunEvent

METRICS = "metrics"  # the kind of events that `penstock log` publishes
_GROUPS = {"step": "train", "eval": "eval"}  # kind of event -> prefix of its names
_HISTOGRAMS = ("staleness_tokens",)  # by age: a name for each age would be a chart for each age
_NO_FIGURES = ("step",)
_MOST_VALUES = 1000  # of one event
COLUMNS = ("step", "prompt", "completion", "reward")
REPORT_FILES = ("report.md", "report.json", "curve.png")
_TEXT_CHARS = 4000


class RowFold:
    """Turns the events of a run into rows.

    A step or an evaluation that a resumed trainer repeats is left out: trackers cannot take back what they show.
    ``steps`` are the last steps so far by series, for a reader that resumes.
    """

    def __init__(self, steps: Mapping[str, int] | None = None) -> None:
        self.steps: dict[str, int] = dict(steps or {})
        self.num_repeated = 0

    def row(self, event: int, fact: RunEvent) -> Row | None:
        """Return the row of an event; None for one without figures, or of a step that was there before."""
        if fact.kind == METRICS:
            step, values = fact.data.get("step"), dict(figures(fact.data.get("values")))
            return self._row(event, fact.at, step, values)
        group = _GROUPS.get(fact.kind)
        if group is None:
            return None
        name = fact.data.get("name")
        series = f"{group}/{name}" if isinstance(name, str) and name else group
        step = fact.data.get("step")
        if step is None or not _is_step(step):
            return None
        if step <= self.steps.get(series, -1):
            self.num_repeated += 1
            return None
        self.steps[series] = step
        data = {key: value for key, value in fact.data.items() if key not in (*_NO_FIGURES, *_HISTOGRAMS)}
        return self._row(event, fact.at, step, {f"{series}/{key}": value for key, value in figures(data)})

    @staticmethod
    def _row(event: int, at: float, step: Any, values: dict[str, float]) -> Row | None:
        if not values or not _is_step(step):
            return None
        return Row(event, step, at, {**values, EVENT: float(event)})


def figures(data: Any) -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of nested tables as ``outer/inner``, at most a thousand; other values are left out."""
    found = _figures(data, "") if isinstance(data, Mapping) else iter(())
    for _, one in zip(range(_MOST_VALUES), found, strict=False):
        yield one


def _figures(data: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _figures(value, f"{prefix}{key}/")
        elif (found := number(value)) is not None:
            yield f"{prefix}{key}", found


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2**53


@dataclass(frozen=True, slots=True)
class SampleTable:
    """Trained completions of the newest version in the record."""

    step: int
    rows: list[tuple[int, str, str, float]]


def read_samples(run: str, arguments: Sequence[str], environ: Mapping[str, str], most: int) -> SampleTable:
    record, blobs = open_record(run, arguments, environ)
    chosen: list[tuple[int, Member]] = []
    for step in reversed(record.steps):
        members = version_lineage(record, step.made_version).groups
        chosen += [(step.step, member) for member in members]
        if sum(len(member.rewards) for _, member in chosen) >= most:
            break
    read_texts([member for _, member in chosen], packs_of(record), blobs)
    rows = [
        (step, member.prompt_text[:_TEXT_CHARS], completion[:_TEXT_CHARS], reward)
        for step, member in chosen
        for completion, reward in zip(member.completions, member.rewards, strict=False)
    ]
    return SampleTable(record.steps[-1].step if record.steps else 0, rows[:most])


def report_files(folder: Path) -> list[Path]:
    return [path for name in REPORT_FILES if (path := folder / name).is_file() and not path.is_symlink()]
