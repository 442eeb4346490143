"""Reads preference rows: a prompt with a chosen and a rejected answer, or with one of them; in the forms of TRL, HH-RLHF and OpenRLHF; pure.

| form                | columns                                                                                      |
|---------------------|----------------------------------------------------------------------------------------------|
| explicit            | prompt (text or chat), chosen and rejected (text, or chat of one assistant message)           |
| implicit            | chosen and rejected are whole chats that begin alike and differ in the last message           |
| HH                  | chosen and rejected are texts with "\\n\\nHuman:" and "\\n\\nAssistant:" before each turn          |
| one answer          | prompt, completion (as chosen), label: true if the answer is desirable; for `dpo.loss = "kto"`   |

Beside them a row may have system, tools and margin (for `penstock rm`). data.map names other columns.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from penstock.trainer.data.messages import Chat, chat_in_text, read_chat, refuse, shown
from penstock.trainer.data.read_rows import TurnRow
from penstock.trainer.data.row_files import Row
from penstock.trainer.data.unread_columns import refuse_media
from penstock.trainer.errors import MalformedData
from penstock.trainer.settings import DataSettings

_HH_TURN = re.compile(r"\n\n(Human|Assistant): ?")
_HH_ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class PairRow:
    """Two answers to one prompt, each as the chat that ends with it; of a row with a label only one is there."""

    chosen: TurnRow | None
    rejected: TurnRow | None
    margin: float = 0.0  # how much better chosen is


def holds_pair(row: Row) -> bool:
    """Return True for a renamed row with two answers; raises MalformedData for one of chosen and rejected alone."""
    given = [name for name in ("chosen", "rejected") if row.get(name) not in (None, "", [])]
    if len(given) == 1:
        [other] = {"chosen", "rejected"} - set(given)
        raise MalformedData(
            f"column {other}: missing beside {given[0]}; a pair has both, a prompt to answer neither; name it as "
            f'data.map.{other} = "NAME"'
        )
    return bool(given)


def pair_row(row: Row, data: DataSettings) -> PairRow:
    """Read a renamed row as a preference; raises MalformedData naming the column."""
    refuse_media(row)
    if "completion" in row and not {"chosen", "rejected"} & row.keys():
        return _labelled(row, data)
    for name in ("chosen", "rejected"):
        if row.get(name) in (None, "", []):
            raise MalformedData(
                f"column {name}: missing; a preference has prompt, chosen and rejected, and this row has "
                f'{", ".join(sorted(key for key, value in row.items() if value is not None))}; name it as data.map.{name} = "NAME"'
            )
    prompt: Any = row.get("prompt")
    is_plain = data.text_prompts == "plain" and isinstance(prompt, str)
    before = _chat(prompt, "prompt", data, "user") if prompt not in (None, "", []) else None
    chats = [
        _chat(row[name], name, data, "assistant" if before is not None else None) for name in ("chosen", "rejected")
    ]
    chosen, rejected = (_whole(before, chat, name) for chat, name in zip(chats, ("chosen", "rejected"), strict=True))
    if chosen[:-1] != rejected[:-1]:
        refuse("rejected", "expected the same chat as in chosen before the last message", "another one")
    if not is_plain:
        chosen, rejected = (_with_system(chat, row, data) for chat in (chosen, rejected))
    tools = _tools(row, data)
    return PairRow(TurnRow(chosen, is_plain, tools), TurnRow(rejected, is_plain, tools), _margin(row))


def _labelled(row: Row, data: DataSettings) -> PairRow:
    label: Any = row.get("label")
    if not isinstance(label, bool) and label not in (0, 1):
        refuse("label", "expected true for a desirable completion, or false", shown(label))
    if row["completion"] in (None, "", []):
        refuse("completion", "expected an answer", shown(row["completion"]))
    prompt: Any = row.get("prompt")
    before = _chat(prompt, "prompt", data, "user") if prompt not in (None, "", []) else None
    answer = _chat(row["completion"], "completion", data, None if before is None else "assistant")
    chat = _whole(before, answer, "completion")
    is_plain = data.text_prompts == "plain" and isinstance(prompt, str)
    turn = TurnRow(chat if is_plain else _with_system(chat, row, data), is_plain, _tools(row, data))
    return PairRow(turn, None) if label else PairRow(None, turn)


def _chat(value: Any, column: str, data: DataSettings, text_role: str | None) -> Chat:
    value = chat_in_text(value, ("role", "from"))
    if isinstance(value, str) and text_role is None:
        return _hh_chat(value, column)
    return read_chat(value, column, roles=data.roles, text_role=text_role)


def _hh_chat(text: str, column: str) -> Chat:
    """Return the chat of a text in the form of HH-RLHF."""
    start, *parts = _HH_TURN.split(text if text.startswith("\n\n") else f"\n\n{text}")
    if start.strip() or not parts:
        refuse(
            column, 'without a column prompt, expected a chat, or a text that begins with "\\n\\nHuman:"', shown(text)
        )
    turns = zip(parts[::2], parts[1::2], strict=True)
    return tuple({"role": _HH_ROLES[who], "content": said.strip()} for who, said in turns)


def _whole(before: Chat | None, chat: Chat, column: str) -> Chat:
    """Return prompt and answer; an answer that repeats the prompt's messages is not added to them."""
    if before is not None and chat[: len(before)] != before:
        chat = (*before, *chat)
    num_before = len(chat) - 1 if before is None else len(before)
    if chat[-1]["role"] != "assistant" or len(chat) != num_before + 1 or num_before < 1:
        roles = [message["role"] for message in chat]
        refuse(column, "expected a prompt and one assistant message after it", f"roles {roles}")
    return chat


def _with_system(chat: Chat, row: Row, data: DataSettings) -> Chat:
    system = row.get("system") or data.system_prompt
    if not isinstance(system, str):
        refuse("system", "expected a text", shown(system))
    return chat if not system or chat[0]["role"] == "system" else ({"role": "system", "content": system}, *chat)


def _margin(row: Row) -> float:
    margin = row.get("margin")
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        refuse("margin", "expected a number", shown(margin))
    return float(margin)


def _tools(row: Row, data: DataSettings) -> tuple[Any, ...]:
    tools = row.get("tools")
    if not data.use_tools or not tools:
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        refuse("tools", "expected a list of JSON schemas", shown(tools))
    return tuple(tools)
