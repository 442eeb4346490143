"""Prompts to train on and turns to imitate, all checked before a run starts.

Opening a set reads every row once: malformed rows are refused together, each with file, line and column, and rows
that are too long are counted or refused. After that a `PromptSet` holds the positions of its rows and reads a row
again when it is accessed; a `TurnSet` holds its token ids.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.reward_settings import RewardSettings
from penstock.protocol.facts import RewardRequest
from penstock.trainer.data.file_notes import FileNotes
from penstock.trainer.data.row_files import Row, RowFile, fingerprint, open_rows
from penstock.trainer.data.row_formats import PromptRow, TurnRow, form_of, prompt_row, rename, turn_rows
from penstock.trainer.errors import MalformedData
from penstock.trainer.settings import DataSettings

MAX_PROBLEMS_SHOWN = 20
AUTO_REWARD = "auto"  # the reward service chooses by data_source

_BATCH_ROWS = 512  # rows that are tokenised together


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; ``index`` counts the prompts that were kept, in the files' order."""

    index: int
    token_ids: tuple[int, ...]
    text: str  # as the template rendered it
    reward: RewardRequest


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One assistant turn to imitate."""

    token_ids: npt.NDArray[np.int32]  # [T] prompt then completion
    loss_mask: npt.NDArray[np.bool_]  # [T] True for the completion, end token included


@dataclass(frozen=True, slots=True)
class _Located:
    place: str
    file_number: int
    row_number: int


class _Problems:
    """Collects the problems of rows; only the first are kept as text."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._count = 0

    def add(self, place: str, text: str) -> None:
        self._count += 1
        if len(self._texts) < MAX_PROBLEMS_SHOWN:
            self._texts.append(f"{place}: {text}")

    def raise_if_any(self) -> None:
        if self._count:
            more = self._count - len(self._texts)
            raise MalformedData("\n".join([*self._texts, *([f"and {more} more"] if more else [])]))


class PromptSet:
    """Prompts of one or several files, by index; immutable once opened."""

    def __init__(
        self,
        files: Sequence[RowFile],
        data: DataSettings,
        reward: RewardSettings,
        tokenizer: ChatTokenizer,
        *,
        max_new_tokens: int,
    ):
        """Check every row. Called by `open`."""
        self._files = files
        self._limit = prompt_limit(data, tokenizer, max_new_tokens)
        self._data = data
        self._reward = reward
        self._tokenizer = tokenizer
        self._file_numbers = array("l")
        self._row_numbers = array("q")
        self.dropped: Counter[str] = Counter()
        """Rows left out, by reason."""
        self.notes = [FileNotes(file.path, "grpo") for file in files]
        """What was read of each file."""
        self.rows_by_reward: Counter[str] = Counter()
        """Prompts by the name of the reward that scores them."""
        self.num_tokens = 0
        self.fingerprint = fingerprint([file.path for file in files])
        """sha256 of the files' contents."""
        self._check()

    @classmethod
    def open(
        cls,
        files: Sequence[Path],
        *,
        data: DataSettings,
        reward: RewardSettings,
        tokenizer: ChatTokenizer,
        max_new_tokens: int = 1,
    ) -> PromptSet:
        """Open and check files; raises MalformedData listing the malformed rows, or if no prompt is left.

        ``max_new_tokens`` have to fit into the model's context after every prompt.
        """
        return cls([open_rows(path) for path in files], data, reward, tokenizer, max_new_tokens=max_new_tokens)

    def __len__(self) -> int:
        return len(self._row_numbers)

    def __getitem__(self, index: int) -> Prompt:
        file = self._files[self._file_numbers[index]]
        number = self._row_numbers[index]
        try:
            row = self._parse(file, number)
            text = prompt_text(row, self._tokenizer)
            token_ids = self._tokenizer.encode(text, add_special_tokens=row.is_plain)
        except MalformedData as err:  # accepted when the file was opened, so the file has changed
            raise MalformedData(
                f"{file.place(number)}: {err}; the file has changed since the start: restore it, or restart the trainer"
            ) from None
        request = RewardRequest(
            name=reward_name(self._reward, row.data_source),
            data_source=row.data_source,
            ground_truth=row.ground_truth,
            extra_info=row.extra_info,
        )
        return Prompt(index, tuple(token_ids), text, request)

    def _parse(self, file: RowFile, number: int) -> PromptRow:
        return self._read(rename(file.row(number), self._data, nested_texts=file.nested_texts))

    def _read(self, row: Row) -> PromptRow:
        read = prompt_row(row, self._data)
        for column in ("ground_truth", "data_source", "extra_info"):  # the template checks the prompt
            try:
                (getattr(read, column) or "").encode()
            except UnicodeEncodeError:
                raise MalformedData(
                    f"column {column}: a lone surrogate (\\ud800 to \\udfff), which no message holds"
                ) from None
        return read

    def _check(self) -> None:
        problems = _Problems()
        for batch in _batches(_located(self._files, self._data.max_samples)):
            kept: list[tuple[_Located, str, str]] = []
            are_plain: list[bool] = []
            for at in batch:
                file = self._files[at.file_number]
                try:
                    row = rename(file.row(at.row_number), self._data, nested_texts=file.nested_texts)
                    read = self._read(row)
                    name = reward_name(self._reward, read.data_source)
                    text = prompt_text(read, self._tokenizer)
                except MalformedData as err:
                    problems.add(at.place, str(err))
                    continue
                kept.append((at, name, text))
                are_plain.append(read.is_plain)
                self.notes[at.file_number].add(row, form_of(row, self._data), read, self._data, text)
            encoded = encode_texts([text for *_, text in kept], are_plain, self._tokenizer)
            for (at, name, _), ids in zip(kept, encoded, strict=True):
                if _fits(len(ids), self._data, self._limit, at.place, problems, self.dropped):
                    self._keep(at, name, len(ids))
        problems.raise_if_any()
        if not len(self):
            raise MalformedData(_nothing_left(self._files, self.dropped, self._limit))

    def _keep(self, at: _Located, name: str, length: int) -> None:
        self._file_numbers.append(at.file_number)
        self._row_numbers.append(at.row_number)
        self.rows_by_reward[name] += 1
        self.num_tokens += length


class TurnSet:
    """Assistant turns of one or several files, by index, as token ids."""

    def __init__(self, files: Sequence[RowFile], data: DataSettings, tokenizer: ChatTokenizer, max_tokens: int):
        """Check and tokenise every row. Called by `open`."""
        self.dropped: Counter[str] = Counter()
        """Turns left out, by reason."""
        self.notes = [FileNotes(file.path, "sft") for file in files]
        """What was read of each file."""
        self.fingerprint = fingerprint([file.path for file in files])
        """sha256 of the files' contents."""
        self._token_ids = array("i")  # of all turns, concatenated
        self._ends = array("q")
        self._num_prompt_tokens = array("l")
        self._check(files, data, tokenizer, max_tokens)

    @classmethod
    def open(cls, files: Sequence[Path], *, data: DataSettings, tokenizer: ChatTokenizer, max_tokens: int) -> TurnSet:
        """Open and check files; a turn with its prompt has at most ``max_tokens``.

        Raises MalformedData listing the malformed rows, or if no turn is left.
        """
        return cls([open_rows(path) for path in files], data, tokenizer, max_tokens)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Turn:
        start, end = self._ends[index - 1] if index else 0, self._ends[index]
        token_ids = np.asarray(self._token_ids[start:end], dtype=np.int32)
        return Turn(token_ids, np.arange(end - start) >= self._num_prompt_tokens[index])

    def _check(self, files: Sequence[RowFile], data: DataSettings, tokenizer: ChatTokenizer, max_tokens: int) -> None:
        problems = _Problems()
        if tokenizer.context_tokens is not None:
            max_tokens = min(max_tokens, tokenizer.context_tokens)
        for batch in _batches(_located(files, data.max_samples)):
            places: list[str] = []
            texts: list[str] = []  # prompt, completion, prompt, completion, …
            begin_plain: list[bool] = []  # of each text: it is the beginning of a sequence without template
            for at in batch:
                file = files[at.file_number]
                try:
                    row = rename(file.row(at.row_number), data, nested_texts=file.nested_texts)
                    turns = turn_rows(row, data)
                    parts = [_prompt_and_completion(turn, tokenizer) for turn in turns]
                except MalformedData as err:
                    problems.add(at.place, str(err))
                    continue
                for turn, part in zip(turns, parts, strict=True):
                    texts += part
                    places.append(at.place)
                    begin_plain += [turn.is_plain, False]
                if turns:
                    self.notes[at.file_number].add(row, form_of(row, data), turns[-1], data, parts[-1][0])
            encoded = encode_texts(texts, begin_plain, tokenizer)
            for place, prompt, completion in zip(places, encoded[::2], encoded[1::2], strict=True):
                ended = _until_end(completion, tokenizer.eos_ids)
                if _fits(len(prompt) + len(ended), data, max_tokens, place, problems, self.dropped):
                    self._token_ids.extend((*prompt, *ended))
                    self._ends.append(len(self._token_ids))
                    self._num_prompt_tokens.append(len(prompt))
        problems.raise_if_any()
        if not len(self):
            raise MalformedData(_nothing_left(files, self.dropped, max_tokens))


def reward_name(reward: RewardSettings, data_source: str) -> str:
    """Return the name of the reward that scores rows of a data source.

    ``reward.by_source`` first, then ``reward.name``, then the reward service's own choice by
    data_source. Raises MalformedData if the row has no data_source and the run file names no reward.
    """
    name = reward.by_source.get(data_source) or reward.name
    if name is None and not data_source:
        raise MalformedData("column data_source: missing, and reward.name is not set; set one of them")
    return name or AUTO_REWARD


def _located(files: Sequence[RowFile], max_samples: int | None) -> Iterator[_Located]:
    rows = (
        _Located(file.place(number), file_number, number)
        for file_number, file in enumerate(files)
        for number in range(len(file))
    )
    return islice(rows, max_samples)


def _batches(rows: Iterator[_Located]) -> Iterator[list[_Located]]:
    while batch := list(islice(rows, _BATCH_ROWS)):
        yield batch


def _fits(length: int, data: DataSettings, limit: int, place: str, problems: _Problems, dropped: Counter[str]) -> bool:
    if length <= limit:
        return True
    if data.overlong == "error":
        problems.add(place, f'{length} tokens, the limit is {limit}; raise it, or set data.overlong = "drop"')
    else:
        dropped["overlong"] += 1
    return False


def _nothing_left(files: Sequence[RowFile], dropped: Counter[str], limit: int) -> str:
    names = ", ".join(str(file.path) for file in files)
    return (
        f"{names}: no row is left: all {dropped.total()} are longer than the limit of {limit} tokens; raise the limit"
    )


def prompt_text(row: PromptRow, tokenizer: ChatTokenizer) -> str:
    """Return a prompt as the model gets it."""
    if row.is_plain:
        return row.chat[0]["content"]
    return tokenizer.render(row.chat, add_generation_prompt=True, tools=row.tools)


def prompt_limit(data: DataSettings, tokenizer: ChatTokenizer, max_new_tokens: int) -> int:
    """Return the most tokens that a prompt may have; raises MalformedData if the model's context has no room for one."""
    if tokenizer.context_tokens is None:
        return data.max_prompt_tokens
    room = tokenizer.context_tokens - max_new_tokens
    if room < 1:
        raise MalformedData(
            f"rollout.max_new_tokens = {max_new_tokens} leaves no room for a prompt in the model's context of "
            f"{tokenizer.context_tokens} tokens (max_position_embeddings in its config.json); lower it"
        )
    return min(data.max_prompt_tokens, room)


def encode_texts(texts: Sequence[str], begin_plain: Sequence[bool], tokenizer: ChatTokenizer) -> list[list[int]]:
    """Return the token ids of texts; those that begin a sequence without template get the tokenizer's special tokens."""
    encoded = tokenizer.encode_many(texts)
    return [
        tokenizer.encode(text, add_special_tokens=True) if is_plain else ids
        for text, is_plain, ids in zip(texts, begin_plain, encoded, strict=True)
    ]


def _prompt_and_completion(turn: TurnRow, tokenizer: ChatTokenizer) -> tuple[str, str]:
    chat = turn.chat
    if turn.is_plain:
        return chat[0]["content"], chat[-1]["content"]
    prompt = tokenizer.render(chat[:-1], add_generation_prompt=True, tools=turn.tools)
    whole = tokenizer.render(chat, add_generation_prompt=False, tools=turn.tools)
    if not whole.startswith(prompt):
        raise MalformedData(
            "the model's chat template renders the answer differently from its own generation prompt "
            f"(…{prompt[-40:]!r}), so training would teach another format than inference uses; use another template"
        )
    return prompt, whole[len(prompt) :]


def _until_end(completion: Sequence[int], eos_ids: Sequence[int]) -> list[int]:
    """Cut after the first end token: what a template adds after it, such as a newline, is never sampled."""
    for number, token in enumerate(completion):
        if token in eos_ids:
            return list(completion[: number + 1])
    return [*completion, eos_ids[0]]
