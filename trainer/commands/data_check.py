"""`python -m penstock.trainer data-check FILE`: format, usable algorithms and malformed rows of data files."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.command_line import UsageError
from penstock.protocol.config.run_file import load
from penstock.protocol.images.processor import read_processor
from penstock.trainer.commands import data_rows
from penstock.trainer.commands.data_commands import Reading
from penstock.trainer.commands.data_rows import TestReport, as_reward_input
from penstock.trainer.data.dataset import prompt_limit, prompt_text
from penstock.trainer.data.file_notes import FileNotes
from penstock.trainer.data.inputs import data_files, model_folder, resolve_inputs
from penstock.trainer.data.messages import ImageRows, text_of
from penstock.trainer.data.pairs import holds_pair, pair_row
from penstock.trainer.data.read_rows import PromptRow, TurnRow, can_imitate, form_of, prompt_row, read_row, turn_rows
from penstock.trainer.data.row_checks import Problems, suggest
from penstock.trainer.data.row_files import Row, RowFile, open_rows
from penstock.trainer.errors import MalformedData
from penstock.trainer.learner import gguf_model
from penstock.trainer.row_format import RowFormat
from penstock.trainer.settings import COLUMNS, DataSettings, TrainerSettings


@dataclass(slots=True)
class FileReport:
    """The report on one file; lengths are in tokens with a model, else in characters."""

    file: str
    length_unit: str
    num_rows: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    num_grpo: int = 0  # rows with a prompt to answer
    num_sft: int = 0  # rows with something to imitate
    num_pairs: int | None = None  # rows with two answers; None: the run does not train on them
    data_sources: Counter[str] = field(default_factory=Counter)
    num_ground_truths: Counter[str] = field(default_factory=Counter)  # by data_source
    prompt_lengths: list[int] = field(default_factory=list)
    completion_lengths: list[int] = field(default_factory=list)
    num_repeated_prompts: int = 0
    problems: Problems = field(default_factory=Problems)  # of bad rows, each with file, line and column
    rows_with_tests: list[dict[str, Any]] = field(default_factory=list)  # as `data_rows.check_tests` reads them
    tests: TestReport | None = None  # None if no row may hold tests, or they were not to be run
    no_grpo: str = ""  # why the first row that only SFT can use has no prompt to answer
    notes: list[FileNotes] = field(default_factory=list)  # what GRPO reads, and what SFT reads
    suggested_map: dict[str, str] = field(default_factory=dict)  # of a row whose columns are not recognised
    context_tokens: int | None = None  # of the model
    num_overlong: int = 0
    overlong: str = ""  # the limit of the rows that training would drop

    def hints(self) -> list[str]:
        return next((notes.hints() for notes in self.notes if notes.num_rows), [])

    def to_document(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "rows": self.num_rows,
            "formats": dict(self.formats),
            "can_train": {
                "grpo": self.num_grpo,
                "sft": self.num_sft,
                **({} if self.num_pairs is None else {"pairs": self.num_pairs}),
            },
            "data_sources": {
                name: {"rows": count, "with_ground_truth": self.num_ground_truths[name]}
                for name, count in self.data_sources.most_common()
            },
            "length_unit": self.length_unit,
            "prompt_length": length_statistics(self.prompt_lengths),
            "completion_length": length_statistics(self.completion_lengths),
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


def check_data(paths: Sequence[Path], reading: Reading, *, as_json: bool, runs_tests: bool) -> int:
    mapping = {column: name for column, _, name in (pair.partition("=") for pair in reading.map)}
    unknown = sorted(set(mapping) - set(COLUMNS))
    if unknown or not all(mapping.values()):
        raise UsageError(
            f"--map takes COLUMN=NAME with COLUMN one of {', '.join(COLUMNS)}; got {' '.join(reading.map)}"
        )
    settings, files = _settings(paths, reading.run)
    update = {
        **({} if reading.format == "auto" else {"format": reading.format}),
        **({"map": mapping} if mapping else {}),
    }
    data = settings.data.model_copy(update=update)
    tokenizer, images = None, None
    if reading.model or reading.run:
        path = model_folder(reading.model, "--model") if reading.model else settings.model.path
        tokenizer = ChatTokenizer.read(
            gguf_model.model_folder(path), arguments=data.template_arguments, needs_template=data.text_prompts == "chat"
        )
        images = ImageRows(read_processor(path))
    max_new_tokens = settings.rollout.max_new_tokens if reading.run else 1
    has_pairs = settings.algorithm.dpo_coefficient > 0.0
    reports = [
        check_file(
            path, data, tokenizer, max_new_tokens=max_new_tokens, most=reading.first, has_pairs=has_pairs, images=images
        )
        for path in files
    ]
    if runs_tests:
        for report in reports:
            if report.rows_with_tests:
                tests = data_rows.check_tests(report.rows_with_tests)
                if tests.num_checked or tests.not_run:
                    report.tests = tests
                for place, problem in tests.problems:
                    report.problems.add(place, problem)
    for report in reports:
        sys.stdout.write(json.dumps(report.to_document()) + "\n" if as_json else describe(report))
    return 1 if any(report.problems.count for report in reports) else 0


def _settings(files: Sequence[Path], run: Path | None) -> tuple[TrainerSettings, list[Path]]:
    overrides = [str(file) for file in files if str(file).startswith("data.") and "=" in str(file)]
    paths = [file for file in files if str(file) not in overrides]
    run_files = [str(path) for path in paths if path.suffix == ".toml"]
    if run_files:
        rest = " ".join(str(file) for file in files if str(file) not in run_files)
        raise UsageError(
            f"{run_files[0]} is a run file, no data; type: penstock data check {rest} --run {run_files[0]}".replace(
                "  ", " "
            )
        )
    if run:
        settings = resolve_inputs(load(TrainerSettings, files=[run], overrides=overrides, environ=os.environ).settings)
        configured = [*settings.data.train_files, *settings.data.eval_files, *settings.sft.files]
        return settings, data_files(paths, "FILE", "train") or list(dict.fromkeys(configured))
    if not paths:
        raise UsageError("name a data file, or a run file with --run")
    settings = load(TrainerSettings, overrides=["model.path=unknown", *overrides]).settings
    return settings, data_files(paths, "FILE", "train")


def check_file(
    path: Path,
    data: DataSettings,
    tokenizer: ChatTokenizer | None,
    *,
    max_new_tokens: int = 1,
    most: int | None = None,
    has_pairs: bool = False,
    images: ImageRows | None = None,
) -> FileReport:
    """Read every row of a file, or the first ``most``, as training does; an unreadable file is one bad row.

    Without a tokenizer lengths are characters; ``images`` reads those of rows, None does not look at them.
    """
    report = FileReport(str(path), "tokens" if tokenizer else "characters")
    report.context_tokens = tokenizer.context_tokens if tokenizer else None
    try:
        rows = open_rows(path)
    except MalformedData as err:
        report.problems.add(str(path), str(err).removeprefix(f"{path}: "))
        return report
    report.num_pairs = 0 if has_pairs else None
    report.notes = [FileNotes(path, "grpo"), FileNotes(path, "sft")]
    limit = None if tokenizer is None else prompt_limit(data, tokenizer, max_new_tokens)
    seen: set[int] = set()
    for number in range(len(rows) if most is None else min(len(rows), most)):
        report.num_rows += 1
        try:
            if not _check_row(rows, number, data, tokenizer, images, report, seen):
                continue
            if limit is not None:
                _check_length(rows.place(number), report, data, limit)
        except MalformedData as err:
            report.problems.add(rows.place(number), str(err))
    return report


def _check_length(place: str, report: FileReport, data: DataSettings, limit: int) -> None:
    """Count a prompt that training would drop; one that no setting makes fit into the model's context is a bad row."""
    length, context = report.prompt_lengths[-1], report.context_tokens
    if context is not None and length >= context:
        raise MalformedData(f"{length} tokens, and the model's context has {context}; shorten the prompt")
    if length > limit:
        reason = (
            "data.max_prompt_tokens" if limit == data.max_prompt_tokens else "the model's context less the completion"
        )
        report.overlong = report.overlong or f"{reason} = {limit}, the first is {place} with {length}"
        report.num_overlong += 1


def _check_row(
    rows: RowFile,
    number: int,
    data: DataSettings,
    tokenizer: ChatTokenizer | None,
    images: ImageRows | None,
    report: FileReport,
    seen: set[int],
) -> bool:
    row = read_row(rows, number, data)
    if report.num_pairs is not None and holds_pair(row):
        pair_row(row, data)
        report.num_pairs += 1
        return False
    try:
        form = form_of(row, data)
    except MalformedData:
        report.suggested_map = report.suggested_map or suggest(row)
        raise
    prompt, turns = _read(row, form, data, rows.place(number), report)
    completions = [turn.chat[-1]["content"] for turn in turns]
    lengths = [len(tokenizer.encode(completion)) if tokenizer else len(completion) for completion in completions]
    text = _prompt_text(prompt, turns, tokenizer, data)
    is_plain = prompt is not None and prompt.is_plain
    if tokenizer is None:
        report.prompt_lengths.append(len(text))
    else:
        ids = tokenizer.encode(text, add_special_tokens=is_plain)
        if prompt is not None and images is not None:
            ids = images.read(prompt, ids, rows.path.parent).token_ids
        report.prompt_lengths.append(len(ids))
    for notes, read in zip(report.notes, (prompt, turns[-1] if turns else None), strict=True):
        if read is not None:
            notes.add(row, form, read, data, text if tokenizer and read is prompt else None)
            if tokenizer is not None:
                notes.add_text(text, tokenizer)
    report.completion_lengths += lengths
    report.formats[form.name] += 1
    report.num_sft += bool(turns)
    shown = hash((text, repr(prompt.images) if prompt is not None else ""))  # pictures differ where texts may not
    report.num_repeated_prompts += shown in seen
    seen.add(shown)
    if prompt is not None:
        report.num_grpo += 1
        report.data_sources[prompt.data_source] += 1
        report.num_ground_truths[prompt.data_source] += prompt.ground_truth is not None
        if data_rows.may_hold_tests(prompt.ground_truth, prompt.extra_info):
            report.rows_with_tests.append(as_reward_input(rows.place(number), prompt))
    return True


def _read(
    row: Row, form: RowFormat, data: DataSettings, place: str, report: FileReport
) -> tuple[PromptRow | None, list[TurnRow]]:
    prompt, problem = None, None
    try:
        prompt = prompt_row(row, data)
    except MalformedData as err:
        problem = err
    has_images = prompt is not None and bool(prompt.images)
    turns = turn_rows(row, data) if can_imitate(row, form, data) and not has_images else []
    if problem is not None:
        if not turns:
            raise problem
        report.no_grpo = report.no_grpo or f"{place}: {problem}"
    return prompt, turns


def _prompt_text(
    prompt: PromptRow | None, turns: Sequence[TurnRow], tokenizer: ChatTokenizer | None, data: DataSettings
) -> str:
    chat = prompt.chat if prompt is not None else turns[0].chat[:-1]
    if tokenizer is not None and prompt is not None:
        return prompt_text(prompt, tokenizer, data)
    if tokenizer is not None and not turns[0].is_plain:
        return tokenizer.render(chat, add_generation_prompt=True)
    return "\n".join(text_of(message["content"]) for message in chat)


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
        pairs = "" if report.num_pairs is None else f", {report.num_pairs} pairs beside the groups"
        lines += [_line("can train", f"{grpo}, {sft}{pairs}"), *_sources(report)]
        lines += [_line(f"{notes.purpose} reads", notes.columns_text()) for notes in report.notes if notes.num_rows]
        lines += [_line("note", hint) for hint in report.hints()]
        lines.append(_line(f"prompt {report.length_unit}", _statistics(report.prompt_lengths)))
        if report.completion_lengths:
            lines.append(_line(f"completion {report.length_unit}", _statistics(report.completion_lengths)))
        if report.num_overlong:
            lines.append(_line("too long", f"{report.num_overlong} rows are left out by {report.overlong} tokens"))
        if report.num_repeated_prompts:
            lines.append(_line("repeated", f"{report.num_repeated_prompts} rows repeat an earlier prompt"))
    if report.tests is not None:
        ran = f"of {report.tests.num_checked} rows were run, {len(report.tests.problems)} are bad"
        lines.append(_line("tests", f"not run: {report.tests.not_run}" if report.tests.not_run else ran))
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
