"""The report of `penstock data check` on one file: as a JSON object, and as text."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any

import numpy as np

from penstock.deploy.data_check.rows import TestReport
from penstock.trainer.data.file_notes import FileNotes
from penstock.trainer.data.row_checks import Problems


@dataclass(slots=True)
class FileReport:
    """The report on one file; lengths are in tokens with a model, else in characters."""

    file: str
    length_unit: str
    num_rows: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    num_grpo: int = 0  # rows with a prompt to answer
    num_sft: int = 0  # rows with something to imitate
    num_dpo: int = 0  # rows with two answers, or one with a label
    dropped: Counter[str] = field(default_factory=Counter)  # answers and rows that are left out, by reason
    model_note: str = ""  # what is wrong with the model's template
    num_contradicted: int = 0  # rows that repeat a prompt with another ground truth
    first_contradicted: str = ""
    repeated_keys: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)  # columns of rows of answers that `penstock dpo` does not read
    num_begun: int = 0  # rows whose two answers begin with the whole text of the prompt
    num_pairs: int | None = None  # rows with two answers; None: the run does not train on them
    data_sources: Counter[str] = field(default_factory=Counter)
    num_ground_truths: Counter[str] = field(default_factory=Counter)  # by data_source
    prompt_lengths: array[int] = field(default_factory=partial(array, "q"))
    completion_lengths: array[int] = field(default_factory=partial(array, "q"))
    num_repeated_prompts: int = 0
    problems: Problems = field(default_factory=Problems)  # of bad rows, each with file, line and column
    rows_to_test: IO[str] | None = None  # a file, as `data_rows.check_tests` reads it; None if no row is to be tested
    num_to_test: int = 0
    tests: TestReport | None = None  # None if no row may hold tests, or they were not to be run
    no_grpo: str = ""  # why the first row that only SFT can use has no prompt to answer
    no_sft: str = ""  # why SFT refuses the first row that it alone cannot use
    notes: list[FileNotes] = field(default_factory=list)  # what GRPO reads, and what SFT reads
    suggested_map: dict[str, str] = field(default_factory=dict)  # of a row whose columns are not recognised
    context_tokens: int | None = None  # of the model
    num_overlong: int = 0
    overlong: str = ""  # the limit of the rows that training would drop

    def hints(self) -> list[str]:
        hints = next((notes.hints() for notes in self.notes if notes.num_rows), [])
        hints += [hint for notes in self.notes for hint in notes.odd_texts() if hint not in hints]
        if self.num_contradicted:
            hints.append(
                f"{self.num_contradicted} rows repeat an earlier prompt with another ground truth, the first is {self.first_contradicted}"
            )
        if self.repeated_keys:
            hints.append(
                f"keys that an object of JSON has twice, of which the last counts: {', '.join(sorted(self.repeated_keys))}"
            )
        if self.unread:
            but = "; margin is read by `penstock rm` alone" if "margin" in self.unread else ""
            hints.append(
                f"columns beside answers that `penstock dpo` does not read: {', '.join(sorted(self.unread))}{but}"
            )
        if 2 * self.num_begun > self.num_dpo:
            hints.append(
                f"both answers of {self.num_begun} rows begin with the text of their prompt, which is trained as part of them; remove it"
            )
        return [*hints, *filter(None, [self.model_note])]

    def to_document(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "rows": self.num_rows,
            "formats": dict(self.formats),
            "can_train": {
                "grpo": self.num_grpo,
                "sft": self.num_sft,
                **({} if self.num_pairs is None else {"pairs": self.num_pairs}),
                **({"dpo": self.num_dpo} if self.num_dpo else {}),
            },
            "data_sources": {
                name: {"rows": count, "with_ground_truth": self.num_ground_truths[name]}
                for name, count in self.data_sources.most_common()
            },
            "length_unit": self.length_unit,
            "prompt_length": length_statistics(self.prompt_lengths),
            "completion_length": length_statistics(self.completion_lengths),
            "dropped": dict(self.dropped),
            "repeated_prompts": self.num_repeated_prompts,
            "bad_rows": self.problems.count,
            "first_bad_rows": self.problems.lines(),
            "columns": {
                notes.purpose: {use.replace(" ", "_"): notes.columns(use) for use in notes.uses}
                for notes in self.notes
                if notes.num_rows
            },
            "hints": self.hints(),
            "suggested_map": self.suggested_map or next((n.suggested_map for n in self.notes if n.num_rows), {}),
            "context_tokens": self.context_tokens,
            "overlong": self.num_overlong,
            **({} if self.tests is None else {"tests": self.tests.to_document()}),
        }


def length_statistics(lengths: Sequence[int]) -> dict[str, float] | None:
    if not lengths:
        return None
    values = np.asarray(lengths)
    return {
        "min": int(values.min()),
        "mean": round(float(values.mean()), 1),
        "median": int(np.median(values)),
        "p95": int(np.percentile(values, 95)),
        "max": int(values.max()),
    }


def describe(report: FileReport) -> str:
    formats = ", ".join(
        f"{name} ({count})" if len(report.formats) > 1 else name for name, count in report.formats.items()
    )
    lines = [f"{report.file}: {report.num_rows} rows" + (f", format {formats}" if formats else "")]
    if report.num_rows > report.problems.count:
        grpo = f"grpo with {report.num_grpo} rows"
        if report.no_grpo:
            grpo += f" (not all: {report.no_grpo})"
        sft = f"sft with {report.num_sft} rows"
        if not report.num_sft:
            sft += " (no messages, response, completion or answer to imitate)"
        if report.no_sft:
            sft += f" (not all: {report.no_sft})"
        pairs = "" if report.num_pairs is None else f", {report.num_pairs} pairs beside the groups"
        dpo = f", dpo and rm with {report.num_dpo} rows" if report.num_dpo else ""
        lines += [_line("can train", f"{grpo}, {sft}{pairs}{dpo}"), *_sources(report)]
        lines += [_line(f"{notes.purpose} reads", notes.columns_text()) for notes in report.notes if notes.num_rows]
        lines += [_line("note", hint) for hint in report.hints()]
        lines.append(_line(f"prompt {report.length_unit}", _statistics(report.prompt_lengths)))
        if report.completion_lengths:
            lines.append(_line(f"completion {report.length_unit}", _statistics(report.completion_lengths)))
        if report.dropped:
            reasons = ", ".join(f"{count} {reason}" for reason, count in report.dropped.most_common())
            lines.append(_line("left out", reasons))
        if report.num_overlong:
            lines.append(_line("too long", f"{report.num_overlong} rows are left out by {report.overlong} tokens"))
        if report.num_repeated_prompts:
            lines.append(_line("repeated", f"{report.num_repeated_prompts} rows repeat an earlier prompt"))
    if report.tests is not None:
        lines.append(_line("tests", str(report.tests)))
    lines.append(_line("bad rows", str(report.problems.count) if report.problems.count else "none"))
    lines += [f"    {text}" for text in report.problems.lines()]
    return "\n".join(lines) + "\n"


def _sources(report: FileReport) -> list[str]:
    lines: list[str] = []
    for name, count in report.data_sources.most_common():
        truths = f"{count} rows, {report.num_ground_truths[name]} with a ground truth"
        remedy = "" if name else "; set reward.name, which scores them"
        lines.append(_line("data_source", f"{name or '(none)'}: {truths}{remedy}"))
    return lines


def _statistics(lengths: Sequence[int]) -> str:
    return "  ".join(f"{name} {value}" for name, value in (length_statistics(lengths) or {}).items())


def _line(title: str, text: str) -> str:
    return f"  {title:<22} {text}"
