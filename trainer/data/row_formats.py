"""Reads rows in the formats of verl, TRL and others: as a prompt with its reward, or as a chat to imitate; pure.

| format            | columns                                                                   | can train |
|-------------------|---------------------------------------------------------------------------|-----------|
| `verl`            | prompt (chat), reward_model {style, ground_truth}, data_source, extra_info | GRPO      |
| `trl`             | prompt (text or chat), or with completion or response                     | both      |
| `messages`        | messages (chat); a last assistant message is what SFT imitates            | both      |
| `flat`            | prompt (text or chat), ground_truth, data_source                          | GRPO      |
| `question_answer` | question, answer; the answer is the ground truth                          | both      |

Every format may have ground_truth, data_source, extra_info and system. Other columns go into extra_info, so that a
reward sees the whole row. An invalid value raises MalformedData that begins with its column; the caller adds file
and line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from typing import Any, Literal, NoReturn

from penstock.trainer.data.row_files import Row
from penstock.trainer.errors import MalformedData
from penstock.trainer.settings import Format

KnownFormat = Literal["verl", "trl", "messages", "flat", "question_answer"]
Chat = tuple[dict[str, Any], ...]

_READ = (
    "prompt",
    "messages",
    "response",
    "completion",
    "question",
    "ground_truth",
    "data_source",
    "extra_info",
    "system",
)
_CHATS = {"prompt", "messages", "completion", "response"}
_REQUIRED: dict[KnownFormat, tuple[str, ...]] = {
    "verl": ("prompt", "reward_model"),
    "trl": ("prompt",),
    "messages": ("messages",),
    "flat": ("prompt", "ground_truth"),
    "question_answer": ("question", "answer"),
}


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A chat to complete and the input of its reward; ``ground_truth`` and ``extra_info`` are JSON texts."""

    chat: Chat
    data_source: str
    ground_truth: str | None
    extra_info: str


@dataclass(frozen=True, slots=True)
class TurnRow:
    """A chat whose last message, of the assistant, is imitated."""

    chat: Chat


def detect(row: Row) -> KnownFormat:
    """Return the format of a row, by its columns after `rename`; raises MalformedData if there is none."""
    if "messages" in row:
        return "messages"
    if "prompt" in row:
        if "reward_model" in row:
            return "verl"
        return "flat" if "ground_truth" in row and not {"completion", "response"} & row.keys() else "trl"
    if "question" in row and "answer" in row:
        return "question_answer"
    raise MalformedData(
        f"no format recognised from the columns {', '.join(sorted(row)) or '(none)'}; expected prompt, messages, or "
        'question and answer; name other columns as data.map.prompt = "NAME"'
    )


def rename(row: Row, mapping: Mapping[str, str], *, nested_texts: bool) -> Row:
    """Rename mapped columns; the file's name may be a path, such as ``extra_info.answer``.

    ``nested_texts`` parses chats and objects that are JSON texts in the file.
    """
    renamed = dict(row)
    for column, source in mapping.items():
        value: Any = row
        for key in [source] if source in row else source.split("."):
            if not isinstance(value, Mapping) or key not in value:
                raise MalformedData(
                    f"column {source}: missing (data.map.{column}); the row has {', '.join(sorted(row)) or 'no columns'}"
                )
            value = value[key]
        renamed.pop(source, None)
        renamed[column] = value
    if nested_texts:
        for name in _CHATS & renamed.keys():
            renamed[name] = _chat_in_text(renamed[name])
        for name in ("reward_model", "extra_info"):
            if isinstance(renamed.get(name), str) and renamed[name].lstrip().startswith("{"):
                renamed[name] = _parsed(name, renamed[name])
    return renamed


def prompt_row(row: Row, form: Format, *, system_prompt: str) -> PromptRow:
    """Read a row as a prompt with its reward; raises MalformedData naming the column."""
    form = _checked(row, form)
    if form == "messages":
        chat = _chat(row, "messages")
        chat = chat[:-1] if chat[-1]["role"] == "assistant" else chat
    else:
        chat = _chat(row, "question" if form == "question_answer" else "prompt")
    if not chat or chat[-1]["role"] == "assistant":
        column = "messages" if form == "messages" else "prompt"
        _refuse(column, "expected the chat to end with a message to answer", "an assistant message" if chat else "none")
    return PromptRow(
        chat=_with_system(chat, row, system_prompt),
        data_source=_text(row, "data_source", default=""),
        ground_truth=_ground_truth(row, form),
        extra_info=_extra_info(row, form),
    )


def turn_rows(row: Row, form: Format, *, system_prompt: str) -> list[TurnRow]:
    """Read a row for imitation: one `TurnRow` for each assistant message, with exactly the chat before it.

    Raises MalformedData naming the column if there is nothing to imitate.
    """
    form = _checked(row, form)
    if form == "messages":
        chat = _chat(row, "messages")
        if all(message["role"] != "assistant" for message in chat):
            _refuse("messages", "expected an assistant message to imitate", f"roles {[m['role'] for m in chat]}")
    else:
        column = "question" if form == "question_answer" else "prompt"
        answers = [name for name in ("response", "completion", "answer") if name in row]
        if not answers:
            raise MalformedData(
                f"column response: missing, nothing to imitate; the row has {', '.join(sorted(row))}; "
                'name the column as data.map.response = "NAME"'
            )
        chat = _chat(row, column) + _chat(row, answers[0], role="assistant")
    chat = _with_system(chat, row, system_prompt)
    return [TurnRow(chat[: n + 1]) for n, message in enumerate(chat) if message["role"] == "assistant" and n]


def can_imitate(row: Row) -> bool:
    """Return True if a renamed row has something for SFT to imitate."""
    if "messages" in row:
        messages = row["messages"]
        return isinstance(messages, list) and any(
            isinstance(m, dict) and m.get("role") == "assistant" for m in messages
        )
    return bool({"response", "completion", "answer"} & row.keys())


def _checked(row: Row, form: Format) -> KnownFormat:
    known = detect(row) if form == "auto" else form
    missing = [name for name in _REQUIRED[known] if name not in row]
    if missing:
        raise MalformedData(
            f"column {missing[0]}: missing in a row of format {known}; the row has {', '.join(sorted(row)) or 'none'}; "
            f'name it as data.map.{missing[0]} = "NAME", or set data.format'
        )
    return known


def _chat(row: Row, column: str, role: str = "user") -> Chat:
    value = row[column]
    if isinstance(value, str) and column != "messages":
        if not value.strip():
            _refuse(column, "expected a text", "an empty one")
        return ({"role": role, "content": value},)
    if not isinstance(value, list) or not value:
        kinds = "a list of messages" if column == "messages" else "a text or a list of messages"
        _refuse(column, f"expected {kinds}", _shown(value))
    return tuple(_message(message, f"{column}[{number}]") for number, message in enumerate(value))


def _message(message: Any, column: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        _refuse(column, "expected a message with role and content", _shown(message))
    message = {name: value for name, value in message.items() if value is not None}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        _refuse(f"{column}.role", "expected a role such as user", _shown(role))
    content = message.get("content", "" if "tool_calls" in message else None)
    if isinstance(content, list):
        content = "".join(_text_part(part, f"{column}.content[{n}]") for n, part in enumerate(content))
    if not isinstance(content, str):
        _refuse(f"{column}.content", "expected a text", _shown(content))
    return {**message, "content": content}


def _text_part(part: Any, column: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else part
    return _refuse(column, "expected a part of type text", _shown(kind))


def _with_system(chat: Chat, row: Row, system_prompt: str) -> Chat:
    system = _text(row, "system", default="") or system_prompt
    if not system or chat[0]["role"] == "system":
        return chat
    return ({"role": "system", "content": system}, *chat)


def _text(row: Row, column: str, *, default: str) -> str:
    value = row.get(column, default)
    return value if isinstance(value, str) else _refuse(column, "expected a text", _shown(value))


def _ground_truth(row: Row, form: KnownFormat) -> str | None:
    if "reward_model" in row:
        model = row["reward_model"]
        if not isinstance(model, dict):
            _refuse("reward_model", "expected an object with style and ground_truth", _shown(model))
        truth = model.get("ground_truth")
        if truth is None and model.get("style", "rule") == "rule" and "ground_truth" not in row:
            _refuse("reward_model.ground_truth", "expected the right answer, since style is rule", "nothing")
        if truth is not None:
            return _json(truth, "reward_model.ground_truth")
    if "ground_truth" in row:
        return _json(row["ground_truth"], "ground_truth")
    return _json(row["answer"], "answer") if form == "question_answer" else None


def _extra_info(row: Row, form: KnownFormat) -> str:
    declared = row.get("extra_info", {})
    if not isinstance(declared, dict):
        _refuse("extra_info", "expected an object", _shown(declared))
    read = {*_READ, *(("answer",) if form == "question_answer" else ())}
    others = {name: value for name, value in row.items() if name not in read}
    others.pop("reward_model", None)
    return _json({**others, **declared}, "extra_info")


def _json(value: Any, column: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as err:
        return _refuse(column, "expected a value that JSON can hold", str(err))


def _plain(value: Any) -> Any:
    if isinstance(value, (date, time, Decimal)):  # a datetime is a date
        return str(value)
    raise TypeError(f"{type(value).__name__}")


def _chat_in_text(value: Any) -> Any:
    """Return the chat that a JSON text holds; any other text is returned as it is, even if it is JSON."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            return value
        if isinstance(parsed, list) and parsed and all(isinstance(item, dict) and "role" in item for item in parsed):
            return parsed
    return value


def _parsed(column: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as err:
        return _refuse(column, "expected JSON text", str(err))


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, (str, int, float)):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    return "an empty list" if isinstance(value, Sequence) and not value else f"a {type(value).__name__}"


def _refuse(column: str, expected: str, got: str) -> NoReturn:
    raise MalformedData(f"column {column}: {expected}, got {got}")
