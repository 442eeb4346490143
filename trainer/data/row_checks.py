"""What every set of rows does when it is opened: read batches of rows, collect malformed ones, leave out rows that are too long.

`suggest` guesses which columns hold the prompt and the ground truth, by the names that public data sets use. A guess is only shown, or written
into a run file that people read: rows are read by what `data.map` says.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar
from uuid import UUID

from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.trainer.data.messages import COLUMN, Chat, is_marked, json_of, refuse, shown, text_of, truth
from penstock.trainer.data.row_files import Row, RowFile, fingerprint
from penstock.trainer.errors import MalformedData
from penstock.trainer.settings import DataSettings, TrainerSettings

_NAMES: Mapping[str, Sequence[str]] = {  # the likeliest first
    "prompt": (
        "problem", "question", "query", "user_prompt", "prompt_text", "input_text", "task", "user", "source", "text_input", "context",
    ),
    "ground_truth": (
        "final_answer", "expected_answer", "expected_output", "expected", "reference_answer", "gold", "gold_answer", "target", "answer",
        "label", "solution", "reference", "answers", "output",
    ),
}  # fmt: skip
MAX_PROBLEMS_SHOWN = 20
_TAGGED = re.compile(r"\s*<tool_response>\s*((?:(?!</?tool_response>).)*?)\s*</tool_response>\s*", re.DOTALL)
_BATCH_ROWS = 512  # rows that are tokenised together
LABELS = ("label", "kto_tag")  # of an answer, TRL's and LLaMA-Factory's
LABELLED = {"completion", "response", "messages", "conversations", "instruction"}
ROW_MARKS = ("weight", "loss_weight", "sample_weight", "loss_scale", "loss_mask", "train", "trainable")
_RIGHT = ("correct", "is_correct", "is_good", "passed", "resolved", "success")  # what a checker says of an answer
_CHOICES = {"choices", "options"}  # beside which ``correct`` is the number of one
SCORE = re.compile(r"chosen.*(?:score|rating|reward)|(?:score|rating|reward).*chosen")
_LABEL_WORDS = {
    "good": True, "desirable": True, "chosen": True, "preferred": True, "accepted": True, "thumbs_up": True,
    "bad": False, "undesirable": False, "rejected": False, "dispreferred": False, "thumbs_down": False,
}  # fmt: skip
REJECTED = ("rejected_response", "rejected_messages")  # ms-swift's, beside a chat that ends with the chosen answer
_PAIR = ("chosen", "rejected", *REJECTED)
_MEDIA = re.compile(r"(?:image|video|audio)s?(?:_\d+)?")  # MMMU numbers them


def suggest(columns: Collection[str]) -> dict[str, str]:
    suggestions: dict[str, str] = {}
    by_name = {_plain(name): name for name in sorted(columns, reverse=True)}
    for column, names in _NAMES.items():
        if column not in columns and (likely := next((by_name[name] for name in names if name in by_name), None)):
            suggestions[column] = likely
    return suggestions


def as_setting(mapping: Mapping[str, str], key: str) -> str:
    return " and ".join(f'{key}.{column} = "{name}"' for column, name in mapping.items())


def _plain(name: str) -> str:
    return name.strip().lower().replace(" ", "_").replace("-", "_")


@dataclass(frozen=True, slots=True)
class Located:
    place: str
    file_number: int
    row_number: int


class Problems:
    def __init__(self) -> None:
        self._places: dict[str, tuple[str, int]] = {}  # by text: the first place, and the number of rows
        self.count = 0
        """Rows with a problem."""

    def add(self, place: str, text: str) -> None:
        self.count += 1
        first, count = self._places.get(text, (place, 0))
        if count or len(self._places) < MAX_PROBLEMS_SHOWN:
            self._places[text] = (first, count + 1)

    def lines(self) -> list[str]:
        said = [
            f"{place}: {text}" + (f" (and {count - 1} more rows)" if count > 1 else "")
            for text, (place, count) in self._places.items()
        ]
        more = self.count - sum(count for _, count in self._places.values())
        return [*said, *([f"and {more} rows with other problems"] if more else [])]

    def raise_if_any(self) -> None:
        if self.count:
            raise MalformedData("\n".join(self.lines()))


RowT = TypeVar("RowT")


class RowSet(ABC, Generic[RowT]):
    """Rows of files, each read once when the set is opened: malformed ones are refused together, those left out are counted."""

    def __init__(self, files: Sequence[Path], data: DataSettings, tokenizer: ChatTokenizer, max_tokens: int) -> None:
        self._paths, self._data, self._tokenizer = files, data, tokenizer
        self._max_tokens = min(max_tokens, tokenizer.context_tokens or max_tokens)
        self.dropped: Counter[str] = Counter()
        """Rows left out, by reason."""
        self.fingerprint = ""
        """sha256 of the files' contents; of prompts also of all images of their rows."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _read(self, file: RowFile, at: Located) -> RowT | None:
        """Return a row; None for one that is left out; raises MalformedData."""

    @abstractmethod
    def _keep(self, rows: Sequence[tuple[Located, RowT]], problems: Problems) -> None:
        """Tokenise rows, and keep those that fit."""

    def _check(self, files: Sequence[RowFile]) -> None:
        """Read ``data.max_samples`` rows of all files; raises MalformedData listing malformed ones, or if none is kept."""
        self.fingerprint = fingerprint(self._paths)
        problems = Problems()
        places = (
            Located(file.place(number), file_number, number)
            for file_number, file in enumerate(files)
            for number in range(len(file))
        )
        remaining = islice(places, self._data.max_samples)
        while batch := list(islice(remaining, _BATCH_ROWS)):
            rows: list[tuple[Located, RowT]] = []
            for at in batch:
                try:
                    row = self._read(files[at.file_number], at)
                except MalformedData as err:
                    problems.add(at.place, str(err))
                    continue
                if row is not None:
                    rows.append((at, row))
            self._keep(rows, problems)
        problems.raise_if_any()
        if not len(self):
            raise MalformedData(f"{', '.join(map(str, self._paths))}: {self._nothing_left()}")

    def _fits(self, length: int, place: str, problems: Problems) -> bool:
        if length <= self._max_tokens:
            return True
        if self._data.overlong == "error":
            limit = self._max_tokens
            problems.add(place, f'{length} tokens, the limit is {limit}; raise it, or set data.overlong = "drop"')
        else:
            self.dropped["overlong"] += 1
        return False

    def _nothing_left(self) -> str:
        """Return what to do about each reason for which rows were left out."""
        dropped = self.dropped
        fixes = {
            "overlong": f"{dropped['overlong']} are longer than the limit of {self._max_tokens} tokens: raise the limit",
            "identical": f"{dropped['identical']} have two equal answers: give two that differ",
            "marked as not trained": f"{dropped['marked as not trained']} answers are marked as not trained: remove the marks",
        }
        if set(dropped) == {"overlong"}:
            return f"no row is left: all {fixes['overlong']}"
        reasons = [fixes.get(name, f"{count} of them: {name}") for name, count in dropped.items()]
        return f"no row is left: {'; '.join(reasons) or 'none holds anything to train'}"


def encode_texts(
    texts: Sequence[str],
    begin_plain: Sequence[bool],
    tokenizer: ChatTokenizer,
    *,
    places: Sequence[str] = (),
    problems: Problems | None = None,
) -> list[list[int]]:
    """Return the token ids of texts; those that begin a sequence without template get the tokenizer's special tokens.

    A text with a token that the model does not have is among the ``problems`` with its place, and has any ids; without them
    MalformedData is raised.
    """
    try:
        encoded = tokenizer.encode_escaped(texts)
        return [
            tokenizer.encode(text, add_special_tokens=True) if is_plain else ids
            for text, is_plain, ids in zip(texts, begin_plain, encoded, strict=True)
        ]
    except MalformedData:
        if problems is None:
            raise
    made = []
    for text, is_plain, place in zip(texts, begin_plain, places, strict=True):
        try:
            made += encode_texts([text], [is_plain], tokenizer)
        except MalformedData as err:
            problems.add(place, str(err))
            made.append([0])
    return made


def for_template(
    chat: Chat,
    tools: tuple[Any, ...],
    column: str,
    tokenizer: ChatTokenizer,
    data: DataSettings,
    *,
    is_plain: bool = False,
) -> tuple[Chat, tuple[Any, ...]]:
    """Return a chat and its tools, with texts of control tokens as ``data.control_tokens`` says; raises MalformedData if refused.

    The tags of Hermes around a tool's result are left out where the template writes them too.
    """
    if any(_TAGGED.fullmatch(text_of(message["content"])) for message in chat) and tokenizer.tags_tool_results:
        chat = tuple(
            {**message, "content": tagged[1]}
            if message["role"] == "tool" and (tagged := _TAGGED.fullmatch(text_of(message["content"])))
            else message
            for message in chat
        )
    controls = tokenizer.control_tokens
    chat = tuple(map(dict, tokenizer.with_arguments(chat)))  # the JSON text of an object may spell a token as \u003c
    parts = [(f"column {column}: message {n} ({m['role']})", {**m, "role": ""}) for n, m in enumerate(chat)]
    for place, part in [*parts, ("column tools: a tool", tools)]:
        for text in sorted(controls.found_in(part)):
            if controls.has_escaped(text):
                raise MalformedData(
                    f"{place} has the character U+{ord(text):X}, which is used here for the text of a control token; remove it"
                )
            if data.control_tokens == "refuse" and not is_plain:
                raise MalformedData(
                    f"{place} has the text {text!r}, which is a control token of the model; "
                    'remove it, or set data.control_tokens = "escape" (it is ordinary text) or "keep" (it is the token)'
                )
    if data.control_tokens != "escape" or is_plain:
        return chat, tools
    escaped_chat = tuple({**controls.escaped(message), "role": message["role"]} for message in chat)
    return escaped_chat, tuple(controls.escaped(tools))


def read_tokenizer(settings: TrainerSettings, *, renders_chats: bool = True) -> ChatTokenizer:
    data = settings.data
    needs_template = renders_chats and data.text_prompts == "chat"
    return ChatTokenizer.read(settings.model.path, arguments=data.template_arguments, needs_template=needs_template)


def labels_of(row: Row) -> dict[str, bool]:
    """Return whether the answer of a row is desirable, by the columns that say so with true, 1, the text of one, or a word such as good."""
    labels = {name: _label(row.get(name)) for name in LABELS}
    return {name: label for name, label in labels.items() if label is not None}


def _label(value: Any) -> bool | None:
    word = _plain(value) if isinstance(value, str) else ""
    return _LABEL_WORDS[word] if word in _LABEL_WORDS else False if value in (-1, "-1") else truth(value)


def mark_of(row: Row) -> str | None:
    """Return why nothing of a row is trained; None if none of its columns says so. Raises MalformedData for a share such as 0.5."""
    for name in (*ROW_MARKS, "label_smoothing"):
        if row.get(name) is not None and truth(row[name]) is None:
            fix = "set dpo.label_smoothing for all rows" if name == "label_smoothing" else "round it"
            got = f'{shown(row[name])}; {fix}, or set data.ignore = ["{name}"]'
            refuse(name, "expected true, false, 1 or 0 as what a row counts", got)
    marks = {name: value for name, value in row.items() if isinstance(value, bool) and name != "label"}
    is_off = is_marked(marks) or any(truth(row.get(name)) is False for name in ROW_MARKS)
    return "marked as not trained" if is_off else None


def wrong_of(row: Row) -> str | None:
    is_wrong = any(truth(row.get(name)) is False for name in _RIGHT) and not row.keys() & _CHOICES
    return "marked as wrong" if is_wrong else None


def scores_against(row: Row) -> str | None:
    """Return why a row's scores, ratings or rewards of its answers are no preference of the chosen one; None if they are, or it has none."""
    for name in filter(SCORE.search, row):
        scores = [json_of(row.get(key)) for key in (name, name.replace("chosen", "rejected"))]
        if (
            all(isinstance(score, int | float) and not isinstance(score, bool) for score in scores)
            and scores[0] <= scores[1]
        ):
            return "equal scores" if scores[0] == scores[1] else "scores that prefer the rejected answer"
    margin = row.get("margin")
    return "scores that prefer the rejected answer" if isinstance(margin, int | float) and margin < 0 else None


def whole_chat(before: Chat, answer: Chat) -> Chat:
    """Return a prompt with its answer; the answer itself if it is the whole chat, which begins with the prompt."""
    start = int(answer[0]["role"] == "system" != before[0]["role"])
    return answer if answer[start : start + len(before)] == before else (*before, *answer)


def is_self_play(row: Row) -> bool:
    return row.get("self_play") not in (None, False, "", "false")


def refuse_unread(
    row: Row, *, imitates: bool = False, reads_self_play: bool = False, reads_images: bool = False
) -> None:
    """Raise MalformedData for a column that other training reads; a prompt to answer may have a ``label`` of 0 or 1 as its truth."""
    if columns := [name for name in _PAIR if is_given(row.get(name))]:
        rest = (
            "train on the chat, which ends with the chosen answer"
            if columns[0] in REJECTED
            else 'train on the prompt alone; for SFT on the chosen answers set also sft.map.response = "chosen" and ignore only rejected'
        )
        raise MalformedData(
            f"column {columns[0]}: a preference, which `penstock dpo` trains on, and `penstock train` with algorithm.dpo_coefficient; set data.ignore = {json.dumps(columns)} to {rest}"
        )
    labels = [
        name
        for name in labels_of(row)
        if imitates
        or (LABELLED & row.keys() and (name != "label" or _plain(str(row[name])) in ("true", "false", *_LABEL_WORDS)))
    ]
    if labels:
        raise MalformedData(
            f'column {labels[0]}: tells good completions from bad ones, which `penstock dpo` with dpo.loss = "kto" trains on; keep only '
            f'the rows with good ones, or set data.ignore = ["{labels[0]}"]'
        )
    if is_self_play(row) and not reads_self_play:
        raise MalformedData(
            "column self_play: the answers of a group are compared with one another; set data.self_play_reward to a reward that "
            'compares, such as a judge with mode = "pairwise" (`penstock reward serve-judge`), or data.ignore = ["self_play"] to score '
            "such rows as all others"
        )
    refuse_media(row, reads_images=reads_images)


def refuse_media(row: Row, *, reads_images: bool = False) -> None:
    names = [name for name in row if _MEDIA.fullmatch(name) and is_given(row[name])]
    if columns := [name for name in names if not (reads_images and name == COLUMN)]:
        reads = 'images in the column "images" (data.map.images)' if reads_images else "text alone"
        raise MalformedData(
            f"column {columns[0]}: what is read is {reads}; leave the row out, or set data.ignore = {json.dumps(columns)} to train on the rest"
        )


def is_given(value: Any) -> bool:
    return value is not None and value not in ([], "")


def without_nan(value: Any) -> Any:
    """Return a value with null for each number that JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_text(value: Any, column: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_as_text)
    except (TypeError, ValueError, RecursionError) as err:
        if isinstance(value, Mapping):  # name the first key that is the reason
            for key, item in value.items():
                json_text(item, f"{column}.{key}")
        return refuse(
            column, "expected a value that JSON can hold", f"{shown(value)} ({err}); set data.ignore to leave it out"
        )


def _as_text(value: Any) -> Any:
    if isinstance(value, (date, time, timedelta, Decimal, UUID)):  # a datetime is a date
        return str(value)
    raise TypeError(f"JSON has no {type(value).__name__}")
