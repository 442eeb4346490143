"""Answers to imitate, as token ids with the mask of what is trained; all rows are checked when the set is opened.

With the mask `turns`, each assistant turn is an example: the chat before it, rendered as for inference, and its text up to the
end token. With `markers`, a chat is one example, and the parts that the template itself puts into ``{% generation %}`` blocks
are trained; the parts are tokenised one by one, as they are sampled.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.trainer.data.file_notes import FileNotes
from penstock.trainer.data.read_rows import TurnRow, form_of, read_row, turn_rows
from penstock.trainer.data.row_checks import Located, Problems, RowSet, encode_texts, for_template
from penstock.trainer.data.row_files import RowFile, open_rows
from penstock.trainer.data_settings import TurnMasks
from penstock.trainer.errors import MalformedData
from penstock.trainer.settings import DataSettings

Part = tuple[str, bool]  # a text, and whether its tokens are trained


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    token_ids: npt.NDArray[np.int32]  # [T]
    loss_mask: npt.NDArray[np.bool_]  # [T] True for the tokens that are trained, end tokens included


@dataclass(frozen=True, slots=True)
class _Example:
    place: str
    parts: Sequence[Part]
    is_plain: bool
    is_marked: bool


class TurnSet(RowSet[list[_Example]]):
    def __init__(
        self,
        files: Sequence[Path],
        *,
        data: DataSettings,
        tokenizer: ChatTokenizer,
        max_tokens: int,
        mask: TurnMasks = "turns",
    ) -> None:
        """Open files of examples of at most ``max_tokens``; raises MalformedData, also if none is left."""
        super().__init__(files, data, tokenizer, max_tokens)
        self.num_endless = 0
        """Examples whose template marks no end token after an answer: the model does not learn to end it."""
        self.notes = [FileNotes(path, "sft") for path in files]
        """What was read of each file."""
        self._uses_markers = mask == "markers" or (mask == "auto" and tokenizer.marks_answers)
        self._token_ids = array("i")  # of all examples, concatenated
        self._is_trained = array("b")
        self._ends = array("q")
        self._check([open_rows(path) for path in files])

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Turn:
        start, end = self._ends[index - 1] if index else 0, self._ends[index]
        token_ids = np.asarray(self._token_ids[start:end], dtype=np.int32)
        return Turn(token_ids, np.asarray(self._is_trained[start:end], dtype=np.bool_))

    def _read(self, file: RowFile, at: Located) -> list[_Example]:
        row = read_row(file, at.row_number, self._data)
        turns = turn_rows(row, self._data, self.dropped)
        examples = self._examples(at.place, turns)
        if turns:
            text = "".join(text for text, _ in examples[-1].parts[:-1])
            self.notes[at.file_number].add(row, form_of(row, self._data), turns[-1], self._data, text)
        return examples

    def _examples(self, place: str, turns: Sequence[TurnRow]) -> list[_Example]:
        if turns and self._uses_markers and not turns[-1].is_plain:
            last = turns[-1]
            chat, tools = for_template(last.chat, last.tools, last.column, self._tokenizer, self._data)
            parts = _without_untrained(self._tokenizer.render_marked(chat, tools=tools), last.trained)
            if not any(is_trained and text.strip() for text, is_trained in parts):
                raise MalformedData(
                    'the chat template marks no text of this chat, so nothing of it would be trained; set sft.mask = "turns"'
                )
            return [_Example(place, parts, is_plain=False, is_marked=True)]
        texts = [prompt_and_completion(turn, self._tokenizer, self._data) for turn in turns]
        return [
            _Example(place, [(prompt, False), (completion, True)], turn.is_plain, is_marked=False)
            for turn, (prompt, completion) in zip(turns, texts, strict=True)
        ]

    def _keep(self, rows: Sequence[tuple[Located, list[_Example]]], problems: Problems) -> None:
        examples = [example for _, row_examples in rows for example in row_examples]
        for example, encoded in zip(examples, _encoded(examples, self._tokenizer, problems), strict=True):
            self._add(example, encoded, problems)

    def _add(self, example: _Example, encoded: Sequence[list[int]], problems: Problems) -> None:
        """Add an example, up to its last trained token: no later one changes what is learned."""
        eos_ids = self._tokenizer.eos_ids
        parts = list(zip(encoded, (is_trained for _, is_trained in example.parts), strict=True))
        if example.is_marked:
            while not (parts[-1][0] and parts[-1][1]):
                parts.pop()
            self.num_endless += any(ids[-1] not in eos_ids for ids, is_trained in parts if is_trained and ids)
        else:
            parts[-1] = (until_end(parts[-1][0], eos_ids), True)
        if not self._fits(sum(len(ids) for ids, _ in parts), example.place, problems):
            return
        first = len(self._token_ids)
        for ids, is_trained in parts:
            self._token_ids.extend(ids)
            self._is_trained.extend([int(is_trained)] * len(ids))
        self._is_trained[first] = 0  # nothing predicts the first token
        self._ends.append(len(self._token_ids))


def _without_untrained(parts: Sequence[Part], trained: Sequence[bool]) -> list[Part]:
    """Unmark the blocks of answers that are not to be trained; raises MalformedData unless each answer is one block."""
    if all(trained):
        return list(parts)
    if sum(is_marked for _, is_marked in parts) != len(trained):
        raise MalformedData(
            "some answers of this chat are not to be trained, and the chat template marks not one text for each answer; set "
            'sft.mask = "turns"'
        )
    remaining = iter(trained)
    return [(text, is_marked and next(remaining)) for text, is_marked in parts]


def _encoded(examples: Sequence[_Example], tokenizer: ChatTokenizer, problems: Problems) -> list[list[list[int]]]:
    texts = [text for example in examples for text, _ in example.parts]
    begin_plain = [example.is_plain and number == 0 for example in examples for number, _ in enumerate(example.parts)]
    places = [example.place for example in examples for _ in example.parts]
    encoded = encode_texts(texts, begin_plain, tokenizer, places=places, problems=problems)
    ends = list(accumulate((len(example.parts) for example in examples), initial=0))
    return [encoded[start:end] for start, end in pairwise(ends)]


def prompt_and_completion(turn: TurnRow, tokenizer: ChatTokenizer, data: DataSettings) -> tuple[str, str]:
    """Return the text before an answer, as for inference, and the text of the answer; raises MalformedData if they differ."""
    chat, tools = for_template(turn.chat, turn.tools, turn.column, tokenizer, data, is_plain=turn.is_plain)
    if turn.is_plain:
        return chat[0]["content"], chat[-1]["content"]
    prompt = tokenizer.render(chat[:-1], add_generation_prompt=True, tools=tools)
    whole = tokenizer.render(chat, add_generation_prompt=False, tools=tools)
    if not whole.startswith(prompt):
        raise MalformedData(
            "the model's chat template renders the answer differently from its own generation prompt "
            f"(…{prompt[-40:]!r}), so training would teach another format than inference uses; use another template"
        )
    return prompt, whole[len(prompt) :]


def until_end(completion: Sequence[int], eos_ids: Sequence[int]) -> list[int]:
    """Cut after the first end token: what a template adds after it, such as a newline, is never sampled."""
    for number, token in enumerate(completion):
        if token in eos_ids:
            return list(completion[: number + 1])
    return [*completion, eos_ids[0]]
