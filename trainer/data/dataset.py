"""Prompts to train on, all checked before a run starts.

Opening a set reads every row once: malformed rows are refused together, each with file, line and column, and rows that
are too long are counted or refused. After that a `PromptSet` holds the positions of its rows and reads a row again when
it is accessed, unless it is among the last ones that were; a `TurnSet` (`turns.py`) and a `PairSet` (`pairs.py`) hold
their token ids.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.reward_settings import RewardSettings
from penstock.protocol.groups import RewardRequest, RowImages
from penstock.protocol.images.admission import AdmittedImage
from penstock.protocol.images.processor import ImageProcessor, read_processor
from penstock.trainer.data.file_notes import FileNotes
from penstock.trainer.data.messages import Chat, ImageRows, ReadImages
from penstock.trainer.data.pairs import holds_pair
from penstock.trainer.data.read_rows import PromptRow, form_of, prompt_row, read_row
from penstock.trainer.data.row_checks import Located, Problems, RowSet, encode_texts, for_template
from penstock.trainer.data.row_files import Row, RowFile, open_rows
from penstock.trainer.errors import MalformedData
from penstock.trainer.settings import DataSettings, TrainerSettings

# Tokens of the prompts that are kept, about 10 MB: a training needs a prompt to issue its group and again when that
# arrives, an evaluation once more, and every evaluation the same ones. To read one takes 0.1 ms.
KEPT_TOKENS = 2**18

AUTO_REWARD = "auto"  # the reward service chooses by data_source


@dataclass(frozen=True, slots=True)
class Prompt:
    index: int
    token_ids: tuple[int, ...]
    text: str  # as the template rendered it
    reward: RewardRequest
    messages: Chat = ()  # for an environment that renders them itself
    images: RowImages | None = None  # ``token_ids`` hold all of their tokens
    image_files: tuple[AdmittedImage, ...] = ()  # what they are, each once


class PromptSet(RowSet[tuple[PromptRow, str]]):
    def __init__(
        self,
        files: Sequence[Path],
        *,
        data: DataSettings,
        reward: RewardSettings,
        tokenizer: ChatTokenizer,
        max_new_tokens: int = 1,
        skips_pairs: bool = False,
        processor: ImageProcessor | None = None,
    ) -> None:
        """Open and check files; raises MalformedData listing the malformed rows, or if no prompt is left.

        ``max_new_tokens`` have to fit into the model's context after every prompt. Rows with two answers are refused
        unless ``skips_pairs``, which counts them. Rows with images are refused without a ``processor``, the model's.
        """
        super().__init__(files, data, tokenizer, prompt_limit(data, tokenizer, max_new_tokens))
        self._files = [open_rows(path) for path in files]
        self._images = ImageRows(processor)
        self._reward, self._skips_pairs = reward, skips_pairs
        self._kept: OrderedDict[int, Prompt] = OrderedDict()  # the least recently used first
        self._num_kept_tokens = 0
        self._keeping = threading.Lock()
        self._file_numbers = array("l")
        self._row_numbers = array("q")
        self._image_hashes = array("Q")  # of the images of a prompt as they were at the start, 64 bits; 0: it has none
        self.notes = [FileNotes(path, "grpo") for path in files]
        """What was read of each file."""
        self.rows_by_reward: Counter[str] = Counter()
        """Prompts by the name of the reward that scores them."""
        self.rows_of_source: dict[str, array[int]] = {}
        """Numbers of the prompts of each data_source, ascending."""
        self.num_tokens = 0
        self.num_with_images = 0
        """Prompts with an image or several."""
        self._image_digest = hashlib.sha256()
        self._check(self._files)
        if self.num_with_images:  # their contents are no part of the files
            digests = f"{self.fingerprint} {self._image_digest.hexdigest()}"
            self.fingerprint = hashlib.sha256(digests.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._row_numbers)

    def __getitem__(self, index: int) -> Prompt:
        with self._keeping:
            if (kept := self._kept.get(index)) is not None:
                self._kept.move_to_end(index)
                return kept
        prompt = self._read_again(index)
        with self._keeping:
            if index not in self._kept:
                self._kept[index] = prompt
                self._num_kept_tokens += _size(prompt)
            while self._num_kept_tokens > KEPT_TOKENS:
                _, dropped = self._kept.popitem(last=False)
                self._num_kept_tokens -= _size(dropped)
        return prompt

    def _read_again(self, index: int) -> Prompt:
        file = self._files[self._file_numbers[index]]
        number = self._row_numbers[index]
        try:
            row = self._prompt_of(read_row(file, number, self._data))
            text = prompt_text(row, self._tokenizer, self._data)
            [token_ids] = encode_texts([text], [row.is_plain], self._tokenizer)
            read = self._images.read(row, token_ids, file.path.parent)
            if _short(read.sha256) != self._image_hashes[index]:
                raise MalformedData("other images than the row had")
        except MalformedData as err:  # accepted when the file was opened, so the file has changed
            raise MalformedData(
                f"{file.place(number)}: {err}; the file has changed since the start: restore it, or restart the trainer"
            ) from None
        request = RewardRequest(
            name=self._reward_name(row),
            data_source=row.data_source,
            ground_truth=row.ground_truth,
            extra_info=row.extra_info,
        )
        text = self._tokenizer.control_tokens.restored(text)
        return Prompt(index, tuple(read.token_ids), text, request, row.chat, read.places, read.files)

    def _reward_name(self, row: PromptRow) -> str:
        self_play_reward = self._data.self_play_reward if row.is_self_play else None
        return self_play_reward or reward_name(self._reward, row.data_source)

    def _prompt_of(self, row: Row) -> PromptRow:
        read = prompt_row(row, self._data)
        for column in ("ground_truth", "data_source", "extra_info"):  # the template checks the prompt
            try:
                (getattr(read, column) or "").encode()
            except UnicodeEncodeError:
                raise MalformedData(
                    f"column {column}: a lone surrogate (\\ud800 to \\udfff), which no message holds"
                ) from None
        return read

    def _read(self, file: RowFile, at: Located) -> tuple[PromptRow, str] | None:
        """Return a row as a prompt to answer, with its text."""
        row = read_row(file, at.row_number, self._data)
        notes = self.notes[at.file_number]
        if self._skips_pairs and holds_pair(row):
            notes.num_pairs += 1
            return None
        read = self._prompt_of(row)
        if read.is_blank:
            self.dropped["blank prompt"] += 1
            return None
        self._reward_name(read)  # raises MalformedData for a row that no reward scores
        text = prompt_text(read, self._tokenizer, self._data)
        notes.add(row, form_of(row, self._data), read, self._data, text)
        notes.add_text(text, self._tokenizer)
        return read, text

    def _keep(self, rows: Sequence[tuple[Located, tuple[PromptRow, str]]], problems: Problems) -> None:
        texts, places = [text for _, (_, text) in rows], [at.place for at, _ in rows]
        are_plain = [row.is_plain for _, (row, _) in rows]
        encoded = encode_texts(texts, are_plain, self._tokenizer, places=places, problems=problems)
        for (at, (row, _)), ids in zip(rows, encoded, strict=True):
            try:
                read = self._images.read(row, ids, self._files[at.file_number].path.parent)
            except MalformedData as err:
                problems.add(at.place, str(err))
                continue
            self._image_digest.update(read.sha256)
            self.notes[at.file_number].add_ids(ids, self._tokenizer)
            if self._fits(len(read.token_ids), at.place, problems):
                self.rows_by_reward[self._reward_name(row)] += 1
                self.rows_of_source.setdefault(row.data_source, array("q")).append(len(self))
                self._add(at, read)

    def _add(self, at: Located, read: ReadImages) -> None:
        self._file_numbers.append(at.file_number)
        self._row_numbers.append(at.row_number)
        self.num_tokens += len(read.token_ids)
        self._image_hashes.append(_short(read.sha256))
        self.num_with_images += read.places is not None

    def _nothing_left(self) -> str:
        if not self.dropped:
            return (
                "every row is a pair of answers, and none a prompt to answer; train on pairs alone with `penstock dpo`"
            )
        return super()._nothing_left()


def training_prompts(settings: TrainerSettings, tokenizer: ChatTokenizer) -> PromptSet:
    """Open the prompts that a run trains on; raises MalformedData."""
    return PromptSet(
        settings.data.train_files,
        data=settings.data,
        reward=settings.reward,
        tokenizer=tokenizer,
        max_new_tokens=settings.rollout.max_new_tokens,
        skips_pairs=settings.algorithm.dpo_coefficient > 0.0,
        processor=read_processor(settings.model.path),
    )


def _short(sha256: bytes) -> int:
    return int.from_bytes(sha256[:8])


def _size(prompt: Prompt) -> int:
    return len(prompt.token_ids) + sum(len(image.data) for image in prompt.image_files) // 40


def reward_name(reward: RewardSettings, data_source: str) -> str:
    """Return the name of the reward that scores rows of a data source.

    ``reward.by_source`` first, then ``reward.name``, then the reward service's choice by
    data_source. Raises MalformedData if the row has no data_source and the run file names no reward.
    """
    name = reward.by_source.get(data_source) or reward.name
    if name is None and not data_source:
        raise MalformedData("column data_source: missing, and reward.name is not set; set one of them")
    return name or AUTO_REWARD


def prompt_text(row: PromptRow, tokenizer: ChatTokenizer, data: DataSettings) -> str:
    """Return a prompt as the model gets it, with escaped texts of control tokens."""
    chat, tools = for_template(row.chat, row.tools, row.column, tokenizer, data, is_plain=row.is_plain)
    if row.is_plain:
        return chat[0]["content"]
    return tokenizer.render(chat, add_generation_prompt=True, tools=tools)


def prompt_limit(data: DataSettings, tokenizer: ChatTokenizer, max_new_tokens: int) -> int:
    if tokenizer.context_tokens is None:
        return data.max_prompt_tokens
    room = tokenizer.context_tokens - max_new_tokens
    if room < 1:
        raise MalformedData(
            f"rollout.max_new_tokens = {max_new_tokens} leaves no room for a prompt in the model's context of "
            f"{tokenizer.context_tokens} tokens (in its config.json); lower it"
        )
    return min(data.max_prompt_tokens, room)
