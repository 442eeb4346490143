"""`penstock data check FILE`: format, usable algorithms and malformed rows of data files."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.deploy.data_check import rows as data_rows
from penstock.deploy.data_check.commands import Reading
from penstock.deploy.data_check.report import FileReport, describe
from penstock.deploy.data_check.rows import as_reward_input
from penstock.deploy.data_check.show_rows import Purpose, shown_rows
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.command_line import UsageError
from penstock.protocol.config.reward_settings import RewardSettings
from penstock.protocol.config.run_file import load
from penstock.protocol.images.processor import read_processor
from penstock.protocol.process_end import printable
from penstock.reward_service.registry.built_in import BY_SOURCE
from penstock.trainer.data.data_order import weighted_sources, whole_shares
from penstock.trainer.data.dataset import prompt_limit, prompt_text
from penstock.trainer.data.file_notes import FileNotes, end_of_turn_note
from penstock.trainer.data.inputs import data_files, model_folder, resolve_inputs
from penstock.trainer.data.messages import ImageRows, text_of
from penstock.trainer.data.pairs import PairRow, holds_pair, is_labelled, pair_row, unread_of
from penstock.trainer.data.read_rows import PromptRow, TurnRow, can_imitate, form_of, prompt_row, read_row, turn_rows
from penstock.trainer.data.row_checks import REJECTED, encode_texts, for_template, labels_of, suggest
from penstock.trainer.data.row_files import Row, RowFile, open_rows
from penstock.trainer.data.turns import prompt_and_completion
from penstock.trainer.data_settings import DATA_EVAL, listed
from penstock.trainer.errors import MalformedData
from penstock.trainer.learner import gguf_model
from penstock.trainer.row_format import RowFormat
from penstock.trainer.settings import COLUMNS, DataSettings, GivenAnswersSettings, TrainerSettings

_NO_TRUTHS = (None, '""', "[]", "{}")


def check_data(paths: Sequence[Path], reading: Reading, *, as_json: bool, runs_tests: bool) -> int:
    mapping = {column: name for column, _, name in (pair.partition("=") for pair in reading.map)}
    unknown = sorted(set(mapping) - set(COLUMNS))
    if unknown or not all(mapping.values()):
        raise UsageError(
            f"--map takes COLUMN=NAME with COLUMN one of {', '.join(COLUMNS)}; got {' '.join(reading.map)}"
        )
    settings, files = _settings(paths, reading.run)
    data = settings.data
    if reading.show and not (reading.model or reading.run):
        raise UsageError("--show needs the model whose template renders the rows; add --model or --run")
    tokenizer, images = _model(reading, settings.model.path, data)
    max_new_tokens = settings.rollout.max_new_tokens if reading.run else 1
    has_pairs = settings.algorithm.dpo_coefficient > 0.0
    sources = [(path, _with_options(data, reading.format, mapping)) for path, data in _sources(settings, files)]
    reports = [
        check_file(
            path,
            data,
            tokenizer,
            max_new_tokens=max_new_tokens,
            most=reading.first,
            has_pairs=has_pairs,
            images=images,
            reward=settings.reward if runs_tests and not _is_fine_tuned(settings, path, data) else None,
        )
        for path, data in sources
    ]
    for report, (_, data) in zip(reports, sources, strict=True):
        if report.rows_to_test is not None:
            with report.rows_to_test as rows:
                tests = data_rows.check_tests(rows, report.num_to_test, report.problems)
            report.tests = tests if tests.num_checked or tests.not_run or tests.num_failed else None
        sys.stdout.write(json.dumps(report.to_document()) + "\n" if as_json else printable(describe(report)))
        if reading.show and tokenizer is not None and not as_json:
            processor = images.processor if images is not None else None
            purpose = _purpose(report, settings, data)
            shown = settings.model_copy(update={"data": data})
            lines = shown_rows(Path(report.file), reading.show, purpose, shown, tokenizer, processor)
            sys.stdout.write("\n".join(lines) + "\n")
    is_whole = not settings.data.weights or _write_weights(settings, reports, as_json=as_json)
    return 0 if is_whole and not any(report.problems.count for report in reports) else 1


def _write_weights(settings: TrainerSettings, reports: Sequence[FileReport], *, as_json: bool) -> bool:
    """Write what data.weights make of the training rows; return False if these have other sources."""
    train = {file.absolute() for file in listed(settings.data.train)}
    trained = [report.data_sources for report in reports if not train or Path(report.file).absolute() in train]
    rows = sum(trained, Counter[str]())
    try:
        sources, shares = weighted_sources(settings.data.weights, rows), whole_shares(settings.data.weights)
    except MalformedData as err:
        sys.stdout.write(
            json.dumps({"weights": None, "problem": str(err)}) + "\n" if as_json else f"{printable(err)}\n"
        )
        return False
    num_rows = {name: sum(rows[one] for one in sources[name]) for name in sources}
    unit = rows.total() / sum(shares.values())
    made = {
        name: {"share": share * unit / rows.total(), "rows": num_rows[name], "passes": share * unit / num_rows[name]}
        for name, share in shares.items()
    }
    lines = [
        f"{name}: {one['share']:.1%} of the prompts, {one['rows']} rows, {one['passes']:.3g} passes over them in {rows.total()} prompts\n"
        for name, one in made.items()
    ]
    sys.stdout.write(json.dumps({"weights": made}) + "\n" if as_json else "data.weights\n  " + "  ".join(lines))
    return True


def _model(reading: Reading, path: Path, data: DataSettings) -> tuple[ChatTokenizer | None, ImageRows | None]:
    if not (reading.model or reading.run):
        return None, None
    path = model_folder(reading.model, "--model") if reading.model else path
    tokenizer = ChatTokenizer.read(
        gguf_model.model_folder(path), arguments=data.template_arguments, needs_template=data.text_prompts == "chat"
    )
    return tokenizer, ImageRows(read_processor(path))


def _with_options(data: DataSettings, row_format: str, mapping: dict[str, str]) -> DataSettings:
    data = data if row_format == "auto" else data.model_copy(update={"format": row_format})
    return data.with_map(mapping, "data.map") if mapping else data


def _sources(settings: TrainerSettings, files: Sequence[Path]) -> list[tuple[Path, DataSettings]]:
    """Return each file with the reading of rows of each section that names it, whose names of columns may differ."""
    eval_names = {DATA_EVAL: settings.data.eval_files, **{n: s.files for n, s in settings.eval.source.items()}}
    named = [(settings.data, listed(settings.data.train))]
    named += [(settings.data_of(name), paths) for name, paths in eval_names.items()]
    for name, section in (("sft", settings.sft), ("dpo", settings.dpo), ("rm", settings.rm)):
        rows = section.files or (listed(settings.data.train) if section.map else ())
        named.append((settings.data_of(name), (*rows, *section.eval_files)))
    sources: list[tuple[Path, DataSettings]] = []
    for file in files or dict.fromkeys(path for _, paths in named for path in paths) or settings.data.train_files:
        readings = {
            repr(data.map): data for data, paths in reversed(named) if file.absolute() in map(Path.absolute, paths)
        }
        sources += [(file, data) for data in reversed((readings or {"": settings.data}).values())]
    return sources


def _is_fine_tuned(settings: TrainerSettings, file: Path, data: DataSettings) -> bool:
    """Return True for rows that no reward scores, because SFT, DPO or the training of a reward model alone reads them."""
    sections = (settings.sft, settings.dpo, settings.rm)
    rewarded = [*listed(settings.data.train), *settings.data.eval_files]
    is_own = file not in rewarded and any(file in (*section.files, *section.eval_files) for section in sections)
    return is_own or data.map_key in ("sft.map", "dpo.map", "rm.map")


def _purpose(report: FileReport, settings: TrainerSettings, data: DataSettings) -> Purpose:
    """Return what a file's rows are shown for: what the run file names it for, or else what they can train, most specific first."""
    file = Path(report.file)
    if file in settings.sft.files or data.map_key == "sft.map":
        return "sft"
    if report.num_dpo or report.num_pairs:
        return "dpo"
    is_for_groups = bool(settings.data.train) and file in settings.data.train_files
    return "sft" if report.num_sft and not is_for_groups else "grpo"


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
        settings = resolve_inputs(
            load(GivenAnswersSettings, files=[run], overrides=overrides, environ=os.environ).settings
        )
        return settings, data_files(paths, "FILE", "train")
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
    reward: RewardSettings | None = None,
) -> FileReport:
    """Read every row of a file, or the first ``most``, as training does; an unreadable file is one bad row.

    Without a tokenizer lengths are characters; ``images`` reads those of rows, None does not look at them. With ``reward``
    the rows that it may score are written to a file of the report: what stays in memory of a row are its lengths and two hashes.
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
    report.model_note = "" if tokenizer is None else end_of_turn_note(tokenizer)
    check = _FileCheck(rows, data, tokenizer, images, report, reward)
    limit = None if tokenizer is None else prompt_limit(data, tokenizer, max_new_tokens)
    for number in range(len(rows) if most is None else min(len(rows), most)):
        report.num_rows += 1
        try:
            if check.row(number) and limit is not None:
                check.length(rows.place(number), limit)
        except MalformedData as err:
            report.problems.add(rows.place(number), str(err))
    if report.num_sft:  # SFT obeys marks of answers
        report.notes[0].message_keys &= report.notes[1].message_keys
    report.repeated_keys = rows.repeated_keys
    return report


@dataclass(slots=True)
class _FileCheck:
    """The rows of one file, as they are read for a report."""

    rows: RowFile
    data: DataSettings
    tokenizer: ChatTokenizer | None
    images: ImageRows | None
    report: FileReport
    reward: RewardSettings | None
    seen: dict[int, int] = field(default_factory=dict)  # hash of the ground truth of each prompt, by its own

    def length(self, place: str, limit: int) -> None:
        """Count a prompt that training would drop; one that no setting makes fit into the model's context is a bad row."""
        report, length, context = self.report, self.report.prompt_lengths[-1], self.report.context_tokens
        if context is not None and length >= context:
            raise MalformedData(f"{length} tokens, and the model's context has {context}; shorten the prompt")
        if length > limit:
            is_set = limit == self.data.max_prompt_tokens
            reason = "data.max_prompt_tokens" if is_set else "the model's context less the completion"
            report.overlong = report.overlong or f"{reason} = {limit}, the first is {place} with {length}"
            report.num_overlong += 1

    def row(self, number: int) -> bool:
        """Read one row; return False for one that has no prompt whose length counts."""
        data, report, tokenizer, place = self.data, self.report, self.tokenizer, self.rows.place(number)
        row = read_row(self.rows, number, data)
        if report.num_pairs is not None and holds_pair(row):
            pair_row(row, data)
            report.num_pairs += 1
            return False
        is_pair = all(row.get(name) is not None for name in ("chosen", "rejected")) or any(map(row.get, REJECTED))
        if is_pair or (labels_of(row) and is_labelled(row)):
            return self._answers(pair_row(row, data), unread_of(row, data))
        try:
            form = form_of(row, data)
        except MalformedData:
            report.suggested_map = report.suggested_map or suggest(row)
            raise
        prompt, turns = self._read(row, form, place)
        turns = self._imitable(turns, place, has_prompt=prompt is not None)
        if prompt is None and not turns:
            return False
        text = self._prompt_text(prompt, turns)
        ids: Sequence[int] = ()
        if tokenizer is not None:
            [ids] = encode_texts([text], [prompt is not None and prompt.is_plain], tokenizer)
        for notes, read in zip(report.notes, (prompt, turns[-1] if turns else None), strict=True):
            if read is not None:
                notes.add(row, form, read, data, text if tokenizer and read is prompt else None)
                if tokenizer is not None:
                    notes.add_text(text, tokenizer)
                    notes.add_ids(ids, tokenizer)
        if prompt is not None and self.images is not None and tokenizer is not None:
            ids = self.images.read(prompt, ids, self.rows.path.parent).token_ids
        report.prompt_lengths.append(len(text) if tokenizer is None else len(ids))
        answers = [text_of(turn.chat[-1]["content"]) for turn in turns]
        report.completion_lengths.extend(
            len(tokenizer.encode(answer)) if tokenizer else len(answer) for answer in answers
        )
        report.formats[form.name] += 1
        report.num_sft += bool(turns)
        self._count_prompt(prompt, text, place)
        return True

    def _count_prompt(self, prompt: PromptRow | None, text: str, place: str) -> None:
        report = self.report
        shown = hash((text, repr(prompt.images) if prompt is not None else ""))  # pictures differ where texts may not
        report.num_repeated_prompts += shown in self.seen
        truth = hash(None if prompt is None else prompt.ground_truth)
        if self.seen.setdefault(shown, truth) != truth:
            report.num_contradicted += 1
            report.first_contradicted = report.first_contradicted or place
        if prompt is not None:
            report.num_grpo += 1
            report.data_sources[prompt.data_source] += 1
            report.num_ground_truths[prompt.data_source] += prompt.ground_truth not in _NO_TRUTHS
            if self.reward is not None:
                self._keep_for_tests(prompt, place, self.reward)

    def _keep_for_tests(self, prompt: PromptRow, place: str, reward: RewardSettings) -> None:
        report, name = self.report, reward.by_source.get(prompt.data_source, reward.name)
        holds_tests = data_rows.may_hold_tests(prompt.ground_truth, prompt.extra_info)
        if name or prompt.data_source in BY_SOURCE or holds_tests:
            rest = {} if holds_tests else {"prompt": "", "extra_info": {}}
            report.rows_to_test = report.rows_to_test or tempfile.TemporaryFile("w+")  # noqa: SIM115 `check_data` closes it
            report.rows_to_test.write(json.dumps({**as_reward_input(place, prompt), **rest, "reward": name}) + "\n")
            report.num_to_test += 1

    def _imitable(self, turns: list[TurnRow], place: str, *, has_prompt: bool) -> list[TurnRow]:
        """Return the turns of a row; none, which is noted, if SFT would refuse it and it has a prompt to answer."""
        if self.tokenizer is None or not turns:
            return turns
        try:
            last = turns[-1]
            for_template(last.chat, last.tools, last.column, self.tokenizer, self.data, is_plain=last.is_plain)
        except MalformedData as err:
            if not has_prompt:
                raise
            self.report.no_sft = self.report.no_sft or f"{place}: {err}"
            return []
        return turns

    def _answers(self, pair: PairRow, unread: Sequence[str]) -> bool:
        report, tokenizer = self.report, self.tokenizer
        turns = [turn for turn in (pair.chosen, pair.rejected) if turn is not None]
        if reason := pair.left_out:
            report.dropped[reason] += 1
            return False
        report.num_dpo += 1
        report.unread.update(unread)
        ends = (turns[0].chat[-2], *(turn.chat[-1] for turn in turns))
        before, *said = [text_of(message["content"]) for message in ends]
        report.num_begun += len(said) == 2 and bool(before.strip()) and all(text.startswith(before) for text in said)
        report.formats["preference" if len(turns) == 2 else "labelled answer"] += 1
        texts = [
            ("\n".join(text_of(message["content"]) for message in turn.chat[:-1]), text_of(turn.chat[-1]["content"]))
            if tokenizer is None
            else prompt_and_completion(turn, tokenizer, self.data)
            for turn in turns
        ]
        report.prompt_lengths.append(_length(texts[0][0], tokenizer))
        report.completion_lengths.extend(_length(answer, tokenizer) for _, answer in texts)
        return True

    def _read(self, row: Row, form: RowFormat, place: str) -> tuple[PromptRow | None, list[TurnRow]]:
        data, report = self.data, self.report
        prompt, problem = None, None
        try:
            prompt = prompt_row(row, data)
        except MalformedData as err:
            problem = err
        has_images = prompt is not None and bool(prompt.images)
        turns: list[TurnRow] = []
        try:
            if can_imitate(row, form, data) and not has_images:
                turns = turn_rows(row, data, report.dropped)
        except MalformedData as err:
            if prompt is None or not labels_of(row):
                raise
            report.no_sft = report.no_sft or f"{place}: {err}"
        if problem is not None:
            if not turns:
                raise problem
            report.no_grpo = report.no_grpo or f"{place}: {problem}"
        if prompt is not None and prompt.is_blank:
            report.dropped.update(
                [] if can_imitate(row, form, data) else ["blank prompt"]
            )  # else its answer is counted
            prompt = None
        return prompt, turns

    def _prompt_text(self, prompt: PromptRow | None, turns: Sequence[TurnRow]) -> str:
        tokenizer, data = self.tokenizer, self.data
        chat = prompt.chat if prompt is not None else turns[0].chat[:-1]
        if tokenizer is not None and prompt is not None:
            return prompt_text(prompt, tokenizer, data)
        if tokenizer is not None and not turns[0].is_plain:
            chat, tools = for_template(chat, turns[0].tools, turns[0].column, tokenizer, data)
            return tokenizer.render(chat, add_generation_prompt=True, tools=tools)
        return "\n".join(text_of(message["content"]) for message in chat)


def _length(text: str, tokenizer: ChatTokenizer | None) -> int:
    return len(text) if tokenizer is None else len(encode_texts([text], [False], tokenizer)[0])
