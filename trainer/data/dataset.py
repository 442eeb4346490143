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

from penstock.protocol.config.reward_settings import RewardSettings
from penstock.protocol.facts import RewardRequest
from penstock.trainer.data.chat_template import ChatTokenizer
from penstock.trainer.data.row_files import RowFile, fingerprint, open_rows
from penstock.trainer.data.row_formats import Chat, PromptRow, prompt_row, rename, turn_rows
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

    def __init__(self, files: Sequence[RowFile], data: DataSettings, reward: RewardSettings, tokenizer: ChatTokenizer):
        """Check every row. Called by `open`."""
        self._files = files
        self._data = data
        self._reward = reward
        self._tokenizer = tokenizer
        self._file_numbers = array("l")
        self._row_numbers = array("q")
        self.dropped: Counter[str] = Counter()
        """Rows left out, by reason."""
        self.rows_by_reward: Counter[str] = Counter()
        """Prompts by the name of the reward that scores them."""
        self.num_tokens = 0
        self.fingerprint = fingerprint([file.path for file in files])
        """sha256 of the files' contents."""
        self._check()

    @classmethod
    def open(
        cls, files: Sequence[Path], *, data: DataSettings, reward: RewardSettings, tokenizer: ChatTokenizer
    ) -> PromptSet:
        """Open and check files; raises MalformedData listing the malformed rows, or if no prompt is left."""
        return cls([open_rows(path) for path in files], data, reward, tokenizer)

    def __len__(self) -> int:
        return len(self._row_numbers)

    def __getitem__(self, index: int) -> Prompt:
        file = self._files[self._file_numbers[index]]
        number = self._row_numbers[index]
        try:
            row = self._parse(file, number)
            text = self._tokenizer.render(row.chat, add_generation_prompt=True)
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
        return Prompt(index, tuple(self._tokenizer.encode(text)), text, request)

    def _parse(self, file: RowFile, number: int) -> PromptRow:
        row = rename(file.row(number), self._data.map, nested_texts=file.nested_texts)
        read = prompt_row(row, self._data.format, system_prompt=self._data.system_prompt)
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
            for at in batch:
                try:
                    row = self._parse(self._files[at.file_number], at.row_number)
                    name = reward_name(self._reward, row.data_source)
                    kept.append((at, name, self._tokenizer.render(row.chat, add_generation_prompt=True)))
                except MalformedData as err:
                    problems.add(at.place, str(err))
            lengths = [len(ids) for ids in self._tokenizer.encode_many([text for *_, text in kept])]
            for (at, name, _), length in zip(kept, lengths, strict=True):
                if _fits(length, self._data, self._data.max_prompt_tokens, at.place, problems, self.dropped):
                    self._keep(at, name, length)
        problems.raise_if_any()
        if not len(self):
            raise MalformedData(_nothing_left(self._files, self.dropped, self._data.max_prompt_tokens))

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
        for batch in _batches(_located(files, data.max_samples)):
            places: list[str] = []
            texts: list[str] = []  # prompt, completion, prompt, completion, …
            for at in batch:
                file = files[at.file_number]
                try:
                    row = rename(file.row(at.row_number), data.map, nested_texts=file.nested_texts)
                    for turn in turn_rows(row, data.format, system_prompt=data.system_prompt):
                        texts += _prompt_and_completion(turn.chat, tokenizer)
                        places.append(at.place)
                except MalformedData as err:
                    problems.add(at.place, str(err))
            encoded = tokenizer.encode_many(texts)
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


def _prompt_and_completion(chat: Chat, tokenizer: ChatTokenizer) -> tuple[str, str]:
    prompt = tokenizer.render(chat[:-1], add_generation_prompt=True)
    whole = tokenizer.render(chat, add_generation_prompt=False)
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
