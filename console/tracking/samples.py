"""The table of samples and the files that a tracker gets when a run has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.console.record.ancestry import Member, packs_of, version_lineage
from penstock.console.record.lineage import open_record, read_texts

COLUMNS = ("step", "prompt", "completion", "reward")
REPORT_FILES = ("report.md", "report.json", "curve.png")
_TEXT_CHARS = 4000


@dataclass(frozen=True, slots=True)
class SampleTable:
    """Trained completions of the newest version in the record."""

    step: int
    rows: list[tuple[int, str, str, float]]


def read_samples(run: str, arguments: Sequence[str], environ: Mapping[str, str], most: int) -> SampleTable:
    """Read the last steps' completions, the newest step first; raises PenstockError when the record cannot be read."""
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
    """Return the files of a run's report that are there, without links."""
    return [path for name in REPORT_FILES if (path := folder / name).is_file() and not path.is_symlink()]
