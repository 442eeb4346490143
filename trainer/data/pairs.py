"""Preferences to train on, as token ids of two answers to one prompt; all rows are checked when the set is opened."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.trainer.data.pair_rows import PairRow, holds_pair, pair_row
from penstock.trainer.data.read_rows import TurnRow, rename
from penstock.trainer.data.row_checks import Problems, batches, encode_texts, fits, located, nothing_left
from penstock.trainer.data.row_files import RowFile, fingerprint, open_rows
from penstock.trainer.data.turns import prompt_and_completion, until_end
from penstock.trainer.errors import MalformedData
from penstock.trainer.settings import DataSettings

Ids = npt.NDArray[np.int32]
Ends = Literal["end token", "chat"]


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Two answers to one prompt, end tokens included; ``margin`` is how much better the chosen one is.

    An answer without tokens is not there: the row has one answer, which is desirable if it is the chosen one.
    """

    prompt: Ids
    chosen: Ids
    rejected: Ids
    margin: float = 0.0

    @property
    def num_answers(self) -> int:
        """1 or 2."""
        return bool(len(self.chosen)) + bool(len(self.rejected))

    @property
    def longest(self) -> int:
        """Tokens of the prompt and the longer answer."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


class PairSet:
    """Preferences of one or several files, by index."""

    def __init__(
        self,
        files: Sequence[RowFile],
        data: DataSettings,
        tokenizer: ChatTokenizer,
        max_tokens: int,
        ends: Ends,
        takes_one_answer: bool,
        skips_prompts: bool,
    ):
        """Check and tokenise every row. Called by `open`."""
        self._ends_at = ends
        self._takes_one_answer = takes_one_answer
        self._skips_prompts = skips_prompts
        self.dropped: Counter[str] = Counter()
        """Rows left out, by reason."""
        self.num_rows = Counter[Path]()
        """Rows read, by file."""
        self.fingerprint = fingerprint([file.path for file in files])
        """sha256 of the files' contents."""
        self._token_ids = array("i")  # prompt, chosen, rejected, prompt, …
        self._ends = array("q")
        self._margins = array("d")
        self._check(files, data, tokenizer, max_tokens)

    @classmethod
    def open(
        cls,
        files: Sequence[Path],
        *,
        data: DataSettings,
        tokenizer: ChatTokenizer,
        max_tokens: int,
        ends: Ends = "end token",
        takes_one_answer: bool = False,
        skips_prompts: bool = False,
    ) -> PairSet:
        """Open and check files; a prompt has with each answer at most ``max_tokens``.

        Answers end with their end token, as they are sampled, or with the chat as the template renders it, as a reward model
        is given it. Rows with one answer and a label are refused unless ``takes_one_answer``, and those without two answers unless
        ``skips_prompts``. Raises MalformedData listing the malformed rows, or if no row is left.
        """
        return cls(
            [open_rows(path) for path in files], data, tokenizer, max_tokens, ends, takes_one_answer, skips_prompts
        )

    def __len__(self) -> int:
        return len(self._ends) // 3

    def __getitem__(self, index: int) -> Pair:
        starts = [self._ends[at - 1] if at else 0 for at in range(3 * index, 3 * index + 3)]
        ends = self._ends[3 * index : 3 * index + 3]
        parts = (self._token_ids[start:end] for start, end in zip(starts, ends, strict=True))
        return Pair(*(np.asarray(part, dtype=np.int32) for part in parts), margin=self._margins[index])

    def _check(self, files: Sequence[RowFile], data: DataSettings, tokenizer: ChatTokenizer, max_tokens: int) -> None:
        problems = Problems()
        max_tokens = min(max_tokens, tokenizer.context_tokens or max_tokens)
        for batch in batches(located(files, data.max_samples)):
            places: list[str] = []
            margins: list[float] = []
            texts: list[str] = []  # prompt, chosen, rejected, prompt, …
            begin_plain: list[bool] = []
            for at in batch:
                file = files[at.file_number]
                try:
                    if (pair := self._read(file, at.row_number, data)) is None:
                        continue
                    turn, prompt, chosen, rejected = self._texts(pair, tokenizer)
                except MalformedData as err:
                    problems.add(at.place, str(err))
                    continue
                self.num_rows[file.path] += 1
                places.append(at.place)
                margins.append(pair.margin)
                texts += [prompt, chosen, rejected]
                begin_plain += [turn.is_plain, False, False]
            encoded = encode_texts(texts, begin_plain, tokenizer)
            for number, place in enumerate(places):
                prompt_ids, *answers = encoded[3 * number : 3 * number + 3]
                ended = [self._ended(answer, tokenizer) for answer in answers]
                length = len(prompt_ids) + max(map(len, ended))
                if not prompt_ids:
                    problems.add(place, "column prompt: expected at least one token, got none")
                elif ended[0] == ended[1]:  # two, as data of human labels have some of: nothing to prefer
                    self.dropped["identical"] += 1
                elif fits(length, data, max_tokens, place, problems, self.dropped):
                    self._add(prompt_ids, *ended)
                    self._margins.append(margins[number])
        problems.raise_if_any()
        if not len(self):
            raise MalformedData(self._nothing_left(files, max_tokens))

    def _read(self, file: RowFile, number: int, data: DataSettings) -> PairRow | None:
        """Return a row; None for a prompt to answer, among which the pairs are."""
        row = rename(file.row(number), data, nested_texts=file.nested_texts)
        return pair_row(row, data) if not self._skips_prompts or holds_pair(row) else None

    def _nothing_left(self, files: Sequence[RowFile], max_tokens: int) -> str:
        if self._skips_prompts and not self.dropped:
            return (
                f"{', '.join(str(file.path) for file in files)}: no row has chosen and rejected, which algorithm.dpo_coefficient "
                "trains on; set it to 0, or name the columns with data.map"
            )
        return nothing_left(files, self.dropped, max_tokens)

    def _ended(self, answer: list[int], tokenizer: ChatTokenizer) -> list[int]:
        return until_end(answer, tokenizer.eos_ids) if answer and self._ends_at == "end token" else answer

    def _texts(self, pair: PairRow, tokenizer: ChatTokenizer) -> tuple[TurnRow, str, str, str]:
        """Return a turn of the row, its prompt, and both answers; one that is not there is empty."""
        turns = [turn for turn in (pair.chosen, pair.rejected) if turn is not None]
        if len(turns) < 2 and not self._takes_one_answer:
            raise MalformedData(
                'column completion: one answer with a label, which `penstock dpo` trains on with dpo.loss = "kto" alone, and without '
                "dpo.length_alpha and dpo.weighting; a preference has chosen and rejected"
            )
        (prompt, answer), *others = (prompt_and_completion(turn, tokenizer) for turn in turns)
        if others:
            return turns[0], prompt, answer, others[0][1]
        return (turns[0], prompt, answer, "") if pair.chosen is not None else (turns[0], prompt, "", answer)

    def _add(self, *parts: Sequence[int]) -> None:
        for ids in parts:
            self._token_ids.extend(ids)
            self._ends.append(len(self._token_ids))
