"""Preferences to train on: rows with a chosen and a rejected answer, or one of them, and their token ids; all rows are checked when the set is opened.

A row is a prompt with a chosen and a rejected answer, or with one of them, in the forms of TRL, HH-RLHF and OpenRLHF:

| form                | columns                                                                                      |
|---------------------|----------------------------------------------------------------------------------------------|
| explicit            | prompt (text or chat), chosen and rejected (text, or chat of one assistant message)           |
| implicit            | chosen and rejected are whole chats that begin alike and differ in the last message           |
| ms-swift            | messages with the chosen answer, rejected_response (text) or rejected_messages (chat)          |
| LLaMA-Factory       | chosen and rejected are two messages after the chat in conversations or messages              |
| HH                  | chosen and rejected are texts with "\n\nHuman:" and "\n\nAssistant:" before each turn          |
| one answer          | prompt, completion (as chosen), label: true if the answer is desirable; for `dpo.loss = "kto"`   |
| one answer, chat    | messages or another form to imitate, whose last answer has label or kto_tag                     |

Beside them a row may have system, tools and margin (for `penstock rm`). data.map names other columns.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.trainer.data.messages import (
    PYTHON_CHAT,
    Chat,
    chat_in_text,
    is_trained,
    read_chat,
    refuse,
    shown,
    text_of,
)
from penstock.trainer.data.null_padding import RenamedRow
from penstock.trainer.data.read_rows import (
    TurnRow,
    every_turn,
    prompt_chat,
    read_row,
    reason_left_out,
    tools_of,
    with_system,
)
from penstock.trainer.data.row_checks import (
    LABELLED,
    LABELS,
    REJECTED,
    ROW_MARKS,
    SCORE,
    Located,
    Problems,
    RowSet,
    encode_texts,
    is_given,
    labels_of,
    mark_of,
    refuse_media,
    scores_against,
    whole_chat,
)
from penstock.trainer.data.row_files import Row, RowFile, open_rows
from penstock.trainer.data.turns import prompt_and_completion, until_end
from penstock.trainer.errors import MalformedData
from penstock.trainer.row_format import detect
from penstock.trainer.settings import DataSettings

_HH_TURN = re.compile(r"\n\n(Human|Assistant): ?")
_READ = {
    "prompt", "chosen", "rejected", "chosen_response", "completion", "messages", "conversations", "system", *REJECTED, *LABELS, *ROW_MARKS,
}  # fmt: skip
_PROMPTS = {"instruction", "input", "history", "question", "query", "response", "output", "answer"}
_SEVERAL = ("completions", "responses", "generations", "answers", "outputs", "summaries")
_HH_ROLES = {"Human": "user", "Assistant": "assistant"}
Ids = npt.NDArray[np.int32]
Ends = Literal["end token", "chat"]


@dataclass(frozen=True, slots=True)
class PairRow:
    chosen: TurnRow | None
    rejected: TurnRow | None
    margin: float = 0.0  # how much better chosen is
    scored: str | None = None  # why the scores of the answers speak against the preference

    @property
    def left_out(self) -> str | None:
        """Why the row is not trained on; None if it is."""
        turns = [turn for turn in (self.chosen, self.rejected) if turn is not None]
        if len(turns) == 2 and turns[0].chat == turns[1].chat:  # nothing to prefer
            return "identical"
        reasons = (turn.left_out or reason_left_out(turn.chat, turn.column) for turn in turns)
        return self.scored or next(filter(None, reasons), None)


def unread_of(row: Row, data: DataSettings) -> list[str]:
    """Return the columns of a row of answers that `penstock dpo` does not read."""
    read = _READ if row.get("prompt") else _READ | _PROMPTS
    is_read = {name for name in row if SCORE.search(name.replace("rejected", "chosen"))} | read
    return sorted(row.keys() - is_read - ({"tools"} if data.use_tools else set()))


def holds_pair(row: Row) -> bool:
    """Return True for a renamed row with two answers; raises MalformedData for one of chosen and rejected alone."""
    if any(is_given(row.get(name)) for name in REJECTED):
        return True
    present = [name for name in ("chosen", "rejected") if row.get(name) not in (None, "", [])]
    if len(present) == 1:
        [other] = {"chosen", "rejected"} - set(present)
        raise MalformedData(
            f"column {other}: missing beside {present[0]}; a pair has both, a prompt to answer neither; name it as "
            f'data.map.{other} = "NAME"'
        )
    return bool(present)


def pair_row(row: Row, data: DataSettings) -> PairRow:
    refuse_media(row)
    row = _with_both_answers(row)
    if is_labelled(row):
        return _labelled(row, data)
    for name in ("chosen", "rejected"):
        if row.get(name) in (None, "", []):
            if name in row:
                raise MalformedData(
                    f"column {name}: missing: its text is empty; remove the row, or set {data.map_key}.{name} to another column"
                )
            several = next(
                (f"; of {key} choose two, such as the best and the worst" for key in _SEVERAL if key in row), ""
            )
            raise MalformedData(
                f"column {name}: missing; a preference has prompt, chosen and rejected, and this row has "
                f'{", ".join(sorted(key for key, value in row.items() if value is not None))}; name it as {data.map_key}.{name} = "NAME"{several}'
            )
    prompt = row.get("prompt") or _prompt_beside(row, data)
    chosen, rejected = (_turn(row, name, prompt, data) for name in ("chosen", "rejected"))
    if chosen.chat[:-1] != rejected.chat[:-1]:
        refuse("rejected", "expected the same chat as in chosen before the last message", "another one")
    return PairRow(
        _with_system(chosen, row, data), _with_system(rejected, row, data), _margin(row), scores_against(row)
    )


def _prompt_beside(row: Row, data: DataSettings) -> Any:
    """Return the prompt of two answers in a row without the column prompt; None if each is a whole chat."""
    chosen = chat_in_text(row["chosen"], ("role", "from"))
    if isinstance(chosen, list) or _HH_TURN.match(str(chosen)):
        return None
    try:
        form = detect({**row, "answer": ""})
    except MalformedData:
        return None
    return row[form.prompt] if form.extend is None else list(prompt_chat(row, form, data))


def _with_both_answers(row: Row) -> Row:
    """Return a row of ms-swift with its chats as chosen and rejected; any other row as it is."""
    name = next((name for name in reversed(REJECTED) if is_given(row.get(name))), None)
    if name is None or is_given(row.get("chosen")):
        return row
    is_table = isinstance(row, RenamedRow) and row.is_table
    if is_given(row.get("chosen_response")):
        return RenamedRow({**row, "chosen": row["chosen_response"], "rejected": row[name]}, is_table=is_table)
    chat, other = row.get("messages") or row.get("conversations"), chat_in_text(row[name], ("role", "from"))
    if not isinstance(chat, list):
        refuse(name, "expected a chat that ends with the chosen answer in messages", shown(chat))
    if isinstance(other, str):
        other = [*chat[:-1], {"role": "assistant", "content": other}]
    return RenamedRow({**row, "prompt": None, "chosen": chat, "rejected": other}, is_table=is_table)


def is_labelled(row: Row) -> bool:
    """Return True for a renamed row with one answer, and a label that tells whether it is desirable."""
    has_label = any(row.get(name) is not None for name in LABELS)  # which without an answer may be the truth
    is_answered = any(pair <= row.keys() for pair in ({"input", "output"}, {"question", "answer"}))
    return not {"chosen", "rejected", *REJECTED} & row.keys() and (
        "completion" in row or (has_label and bool(LABELLED & row.keys())) or (is_answered and bool(labels_of(row)))
    )


def _labelled(row: Row, data: DataSettings) -> PairRow:
    label = next(iter(labels_of(row).values()), None)
    if label is None:
        name = next((name for name in LABELS if row.get(name) is not None), LABELS[0])
        refuse(name, "expected true for a desirable completion, or false, or good or bad", shown(row.get(name)))
    if "completion" not in row:
        turn = _last_turn(row, data)
    elif row["completion"] in (None, "", []):
        refuse("completion", "expected an answer", shown(row["completion"]))
    else:
        turn = _with_system(_turn(row, "completion", row.get("prompt"), data), row, data)
    return PairRow(turn, None) if label else PairRow(None, turn)


def _last_turn(row: Row, data: DataSettings) -> TurnRow:
    is_table = isinstance(row, RenamedRow) and row.is_table
    unlabelled = RenamedRow({key: value for key, value in row.items() if key not in LABELS}, is_table=is_table)
    return every_turn(unlabelled, data)[-1]  # which the label is of, also if it is left out


def _turn(row: Row, column: str, prompt: Any, data: DataSettings) -> TurnRow:
    """Return the answer of a column, after ``prompt`` or, without one, as the end of a whole chat."""
    before = _chat(prompt, "prompt", data, "user") if prompt not in (None, "", []) else None
    answer = [row[column]] if isinstance(row[column], dict) else row[column]
    chat = _whole(before, _chat(answer, column, data, None if before is None else "assistant"), column)
    is_plain = data.text_prompts == "plain" and isinstance(prompt, str)
    return TurnRow(chat, is_plain, tools_of(row, data), column=column, left_out=mark_of(row))


def _with_system(turn: TurnRow, row: Row, data: DataSettings) -> TurnRow:
    return turn if turn.is_plain else replace(turn, chat=with_system(turn.chat, row, data))


def _chat(value: Any, column: str, data: DataSettings, text_role: str | None) -> Chat:
    value = chat_in_text(value, ("role", "from"))
    is_hh = text_role is None or (text_role == "user" and data.text_prompts == "chat" and _HH_TURN.match(str(value)))
    if isinstance(value, str) and is_hh:
        return _hh_chat(value, column)
    if isinstance(value, str) and PYTHON_CHAT.match(value):
        got = f"{shown(value)}, a chat as Python prints it; write it as JSON"
        refuse(column, "expected a text, or a chat as JSON", got)
    return read_chat(value, column, roles=data.roles, text_role=text_role)


def _hh_chat(text: str, column: str) -> Chat:
    start, *parts = _HH_TURN.split(text if text.startswith("\n\n") else f"\n\n{text}")
    if start.strip() or not parts:
        refuse(
            column, 'without a column prompt, expected a chat, or a text that begins with "\\n\\nHuman:"', shown(text)
        )
    if len(parts) > 2 and column == "prompt" and not parts[-1].strip():  # it ends where the answer begins
        parts = parts[:-2]
    turns = zip(parts[::2], parts[1::2], strict=True)
    return tuple({"role": _HH_ROLES[who], "content": said.strip()} for who, said in turns)


def _whole(before: Chat | None, chat: Chat, column: str) -> Chat:
    if before is not None:
        chat = whole_chat(before, chat)
    num_before = len(chat) - 1 if before is None else len(before)
    if chat[-1]["role"] != "assistant" or len(chat) != num_before + 1 or num_before < 1:
        roles = [message["role"] for message in chat]
        is_near = before is not None and _stripped(chat[len(before) :][: len(before)]) == _stripped(before)
        hint = (
            "; its first messages are the prompt but for white space at their ends: make them equal" if is_near else ""
        )
        refuse(column, "expected a prompt and one assistant message after it", f"roles {roles}{hint}")
    if not is_trained(chat[-1], column):
        refuse(
            column, "expected an answer to train", "one that its row marks as not trained; remove the mark, or the row"
        )
    return chat


def _stripped(chat: Chat) -> list[tuple[str, str]]:
    return [(message["role"], text_of(message["content"]).strip()) for message in chat]


def _margin(row: Row) -> float:
    margin = row.get("margin")
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        refuse("margin", "expected a number", shown(margin))
    return float(margin)


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
        return bool(len(self.chosen)) + bool(len(self.rejected))

    @property
    def longest(self) -> int:
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


@dataclass(frozen=True, slots=True)
class _PairTexts:
    prompt: str
    chosen: str  # empty if the row has the other answer alone
    rejected: str
    is_plain: bool
    margin: float


class PairSet(RowSet[_PairTexts]):
    def __init__(
        self,
        files: Sequence[Path],
        *,
        data: DataSettings,
        tokenizer: ChatTokenizer,
        max_tokens: int,
        ends: Ends = "end token",
        takes_one_answer: bool = False,
        skips_prompts: bool = False,
    ) -> None:
        """Open and check files; a prompt has with each answer at most ``max_tokens``.

        Answers end with their end token, as they are sampled, or with the chat as the template renders it, as a reward model
        receives it. Rows with one answer and a label are refused unless ``takes_one_answer``, and those without two answers unless
        ``skips_prompts``. Raises MalformedData listing the malformed rows, or if no row is left.
        """
        super().__init__(files, data, tokenizer, max_tokens)
        self._ends_at = ends
        self._takes_one_answer, self._skips_prompts = takes_one_answer, skips_prompts
        self.num_rows = Counter[Path]()
        """Rows read, by file."""
        self.unread: set[str] = set()
        """Columns that `penstock dpo` does not read."""
        self._token_ids = array("i")  # prompt, chosen, rejected, prompt, …
        self._ends = array("q")
        self._margins = array("d")
        self._check([open_rows(path) for path in files])

    def __len__(self) -> int:
        return len(self._ends) // 3

    def __getitem__(self, index: int) -> Pair:
        starts = [self._ends[at - 1] if at else 0 for at in range(3 * index, 3 * index + 3)]
        ends = self._ends[3 * index : 3 * index + 3]
        parts = (self._token_ids[start:end] for start, end in zip(starts, ends, strict=True))
        return Pair(*(np.asarray(part, dtype=np.int32) for part in parts), margin=self._margins[index])

    def _read(self, file: RowFile, at: Located) -> _PairTexts | None:
        row = read_row(file, at.row_number, self._data)
        if self._skips_prompts and not (self._takes_one_answer and is_labelled(row)) and not holds_pair(row):
            return None  # a prompt to answer, among which the pairs are
        pair = pair_row(row, self._data)
        if reason := pair.left_out:
            self.dropped[reason] += 1
            return None
        self.num_rows[file.path] += 1
        self.unread.update(unread_of(row, self._data))
        return self._texts(pair)

    def _texts(self, pair: PairRow) -> _PairTexts:
        both = (pair.chosen, pair.rejected)
        turns = [turn for turn in both if turn is not None]
        if len(turns) < 2 and not self._takes_one_answer:
            raise MalformedData(
                'column completion: one answer with a label, which `penstock dpo` trains on with dpo.loss = "kto" alone, and without '
                "dpo.length_alpha and dpo.weighting; a preference has chosen and rejected"
            )
        rendered = [prompt_and_completion(turn, self._tokenizer, self._data) for turn in turns]
        answers = iter([answer for _, answer in rendered])
        chosen, rejected = ("" if turn is None else next(answers) for turn in both)
        return _PairTexts(rendered[0][0], chosen, rejected, turns[0].is_plain, pair.margin)

    def _keep(self, rows: Sequence[tuple[Located, _PairTexts]], problems: Problems) -> None:
        encoded = encode_texts(
            [text for _, row in rows for text in (row.prompt, row.chosen, row.rejected)],
            [begins_plain for _, row in rows for begins_plain in (row.is_plain, False, False)],
            self._tokenizer,
            places=[at.place for at, _ in rows for _ in range(3)],
            problems=problems,
        )
        for number, (at, row) in enumerate(rows):
            prompt_ids, *answers = encoded[3 * number : 3 * number + 3]
            ended = [self._ended(answer) for answer in answers]
            if not prompt_ids:
                problems.add(at.place, "column prompt: expected at least one token, got none")
            elif ended[0] == ended[1]:  # two, as data of human labels have some of: nothing to prefer
                self.dropped["identical"] += 1
            elif self._fits(len(prompt_ids) + max(map(len, ended)), at.place, problems):
                self._add(prompt_ids, *ended)
                self._margins.append(row.margin)

    def _nothing_left(self) -> str:
        if self._skips_prompts and not self.dropped:
            return "no row has chosen and rejected, which algorithm.dpo_coefficient trains on; set it to 0, or name the columns with data.map"
        return super()._nothing_left()

    def _ended(self, answer: list[int]) -> list[int]:
        return until_end(answer, self._tokenizer.eos_ids) if answer and self._ends_at == "end token" else answer

    def _add(self, *parts: Sequence[int]) -> None:
        for ids in parts:
            self._token_ids.extend(ids)
            self._ends.append(len(self._token_ids))
