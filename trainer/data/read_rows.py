"""Reads rows in the formats of verl, TRL and others: as a prompt with its reward, or as a chat to imitate; pure.

`row_formats` has what the columns of each format mean; docs/data.md has an example of each. Columns without a meaning go into extra_info,
so that a reward sees the whole row (`column_uses`). An invalid value raises MalformedData that begins with its column; the caller adds
file and line.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.trainer.data.messages import (
    COLUMN,
    Chat,
    chat_in_text,
    has_text,
    images_of,
    is_answer,
    is_blank,
    is_trained,
    read_calls,
    read_chat,
    refuse,
    shown,
    text_of,
    with_images,
)
from penstock.trainer.data.null_padding import RenamedRow, calls_of, schema_without_padding, tool_of, without_padding
from penstock.trainer.data.row_checks import (
    as_setting,
    is_self_play,
    json_text,
    mark_of,
    refuse_unread,
    suggest,
    whole_chat,
    without_nan,
    wrong_of,
)
from penstock.trainer.data.row_files import Row, RowFile, Unreadable
from penstock.trainer.errors import MalformedData
from penstock.trainer.row_format import ROW_FORMATS, RowFormat, detect
from penstock.trainer.settings import COLUMNS, DataSettings

_TEXT_CHATS = {"prompt", "completion", "response"}
_CHATS = {"messages", "conversations"}
_GLAIVE_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
_GLAIVE_TURN = re.compile(rf"(?<!\S)({'|'.join(_GLAIVE_ROLES)}):")
_GLAIVE_CALL = re.compile(r"""\{\s*"name":\s*"([^"]+)"\s*(?:,\s*"arguments":\s*(?:'(.*)'|(\{.*\}))\s*)?\}""", re.DOTALL)


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A chat to complete and the input of its reward; ``ground_truth`` and ``extra_info`` are JSON texts."""

    chat: Chat
    data_source: str
    ground_truth: str | None
    extra_info: str
    is_plain: bool = False  # the text of the only message is the prompt, without the chat template
    tools: tuple[Any, ...] = ()  # for the chat template
    unused_answer: bool = False  # the chat ended with an answer, which is not its ground truth
    is_self_play: bool = False  # scored by ``data.self_play_reward``
    images: tuple[Any, ...] = ()  # sources of those in the chat, in order
    column: str = ""  # of the prompt

    @property
    def is_blank(self) -> bool:
        return is_blank(self.chat[-1])


@dataclass(frozen=True, slots=True)
class TurnRow:
    chat: Chat
    is_plain: bool = False  # prompt and answer are the texts of two messages, without the chat template
    tools: tuple[Any, ...] = ()
    trained: tuple[bool, ...] = ()  # of each assistant message; empty: all
    column: str = ""  # of the prompt
    left_out: str | None = None  # why the answer is not trained


def form_of(row: Row, data: DataSettings) -> RowFormat:
    if data.format == "auto":
        try:
            return detect(row)
        except MalformedData as err:
            guess = suggest(row)
            fix = (
                f"if they hold them, set {as_setting(guess, data.map_key)}"
                if "prompt" in guess
                else f'name other columns as {data.map_key}.prompt = "NAME"'
            )
            raise MalformedData(f"{err}; {fix}") from None
    form = ROW_FORMATS.find(data.format).value
    missing = [name for name in form.required if name not in row]
    if missing:
        raise MalformedData(
            f"column {missing[0]}: missing in a row of format {form.name}; the row has {', '.join(sorted(row)) or 'none'}; "
            f'name it as {data.map_key}.{missing[0]} = "NAME", or set data.format'
        )
    return form


def read_row(file: RowFile, number: int, data: DataSettings) -> RenamedRow:
    return rename(file.row(number), data, nested_texts=file.nested_texts, is_table=file.is_table)


def rename(row: Row, data: DataSettings, *, nested_texts: bool, is_table: bool = False) -> RenamedRow:
    """Leave out ignored columns and rename mapped ones; the file's name may be a path, such as ``extra_info.answer``.

    Messages that are a JSON text are parsed; ``nested_texts`` parses other chats and objects that are JSON texts too.
    """
    renamed = {name: value for name, value in row.items() if name not in data.ignore}
    for column, source in data.map.items():
        value: Any = row
        for key in [source] if source in row else source.split("."):
            if not isinstance(value, Mapping) or key not in value:
                raise MalformedData(
                    f"column {source}: missing ({data.map_key}.{column}); the row has {', '.join(sorted(row)) or 'no columns'}"
                )
            value = value[key]
        renamed.pop(source, None)
        renamed[column] = value
    _read_older(renamed)
    for name in _CHATS & renamed.keys():
        renamed[name] = chat_in_text(renamed[name], ("role", "from"))
    if nested_texts:
        for name in _TEXT_CHATS & renamed.keys():
            renamed[name] = chat_in_text(renamed[name])
        for name in ("reward_model", "extra_info"):
            if isinstance(renamed.get(name), str) and renamed[name].lstrip().startswith("{"):
                renamed[name] = _parsed(name, renamed[name])
    return without_padding(_without_unreadable(RenamedRow(renamed, is_table=is_table)), data.roles)


def _read_older(row: Row) -> None:
    """Name the columns of Glaive and of OpenAI's first calls as they are read here."""
    if "USER:" in str(row.get("chat")) and "system" in row:
        row["messages"] = _glaive_chat(str(row.pop("system")), str(row.pop("chat")))
    if row.get("functions") and "messages" in row and not row.get("tools"):
        row["tools"] = row.pop("functions")


def _glaive_chat(system: str, text: str) -> list[dict[str, Any]]:
    """Return the messages of a row of Glaive, whose chat is one text; its functions stay in the system message."""
    chat: list[dict[str, Any]] = [{"role": "system", "content": system.removeprefix("SYSTEM:").strip()}]
    _, *parts = _GLAIVE_TURN.split(text)
    for who, part in zip(parts[::2], parts[1::2], strict=True):
        said, mark, call = part.strip().removesuffix("<|endoftext|>").partition("<functioncall>")
        message: dict[str, Any] = {"role": _GLAIVE_ROLES[who], "content": said.strip()}
        if mark:
            found = _GLAIVE_CALL.fullmatch(call.strip())
            if found is None:
                refuse("chat", 'expected {"name": …, "arguments": …} after <functioncall>', shown(call))
            message["tool_calls"] = [{"function": {"name": found[1], "arguments": found[2] or found[3] or "{}"}}]
        chat.append(message)
    return chat


def _without_unreadable(row: RenamedRow) -> RenamedRow:
    """Leave out values without a meaning that cannot be read; raises MalformedData for one in a column that has a meaning."""
    for name, value in list(row.items()):
        reason = value.reason if isinstance(value, Unreadable) else ""
        if reason and name in COLUMNS:
            raise MalformedData(f"a value that cannot be read (column {name}: {reason})")
        if name in ("prompt", "extra_info") and isinstance(value, float) and not math.isfinite(value):
            raise MalformedData(f"not JSON (NaN is not JSON), column {name}; write null for what is missing")
        if reason:
            row.changes.add(name)
            del row[name]
    return row


def prompt_row(row: Row, data: DataSettings) -> PromptRow:
    form = form_of(row, data)
    refuse_unread(row, reads_self_play=data.self_play_reward is not None, reads_images=True)
    chat, images = with_images(prompt_chat(row, form, data, reads_images=True), images_of(row))
    answer = None
    if form.is_whole_chat and chat[-1]["role"] == "assistant":
        chat, answer = chat[:-1], text_of(chat[-1]["content"])
    if not chat or chat[-1]["role"] == "assistant":
        refuse(
            form.prompt, "expected the chat to end with a message to answer", "an assistant message" if chat else "none"
        )
    is_plain = _is_plain(row, form, data)
    if is_plain and images:
        refuse(COLUMN, "expected none beside a plain text prompt", f'{len(images)}; set data.text_prompts = "chat"')
    return PromptRow(
        chat=chat if is_plain else with_system(chat, row, data),
        data_source=_text(row, "data_source" if "data_source" in row else form.data_source, default=""),
        ground_truth=_ground_truth(row, form, answer, data),
        extra_info=_extra_info(row, form),
        is_plain=is_plain,
        tools=tools_of(row, data),
        unused_answer=answer is not None and not data.answer_is_ground_truth,
        is_self_play=is_self_play(row),
        images=images,
        column=form.prompt,
    )


def turn_rows(row: Row, data: DataSettings, dropped: Counter[str] | None = None) -> list[TurnRow]:
    """Read a row for imitation, one `TurnRow` for each assistant message that is to be trained.

    Raises MalformedData if it has no assistant message. What is left out is counted in ``dropped`` by reason.
    """
    turns = every_turn(row, data)
    if dropped is not None:
        dropped.update(turn.left_out for turn in turns if turn.left_out)
    return [turn for turn in turns if turn.left_out is None]


def every_turn(row: Row, data: DataSettings) -> list[TurnRow]:
    """Read a row for imitation, one `TurnRow` for each assistant message; raises MalformedData if it has none."""
    form = form_of(row, data)
    refuse_unread(row, imitates=True)
    chat = prompt_chat(row, form, data)
    is_plain = _is_plain(row, form, data)
    if form.is_whole_chat:
        if all(message["role"] != "assistant" for message in chat):
            roles = f"roles {[message['role'] for message in chat]}"
            refuse(form.prompt, "expected an assistant message to imitate", roles)
    else:
        answer = form.answer_column(row)
        if answer is None:
            raise MalformedData(
                f"column response: missing, nothing to imitate; the row has {', '.join(sorted(row))}; "
                f'name the column as {data.map_key}.response = "NAME"'
            )
        chat = _answered(chat, _answer(row, form, answer, data), answer)
    whole = chat if is_plain else with_system(chat, row, data)
    num_added = len(whole) - len(chat)
    answers = [n for n, message in enumerate(chat) if message["role"] == "assistant"]
    reasons = [mark_of(row) or wrong_of(row) or reason_left_out(chat[: n + 1], f"{form.prompt}[{n}]") for n in answers]
    trained = tuple(reason is None for reason in reasons)
    tools = tools_of(row, data)
    return [
        TurnRow(whole[: num_added + n + 1], is_plain, tools, trained[: number + 1], form.prompt, reasons[number])
        for number, n in enumerate(answers)
    ]


def _answered(before: Chat, answer: Chat, column: str) -> Chat:
    chat = whole_chat(before, answer)
    if chat is not answer and before[-1]["role"] == "user" and answer[0]["role"] in ("system", "developer", "user"):
        refuse(
            column,
            "expected an answer, or the whole chat with the prompt as it is in its own column",
            f"roles {[message['role'] for message in answer]}, of which the first are not the prompt; make them equal",
        )
    return chat


def reason_left_out(chat: Chat, column: str) -> str | None:
    """Return why the last message of a chat, an answer, is not trained; None if it is."""
    *before, answer = chat
    if not is_trained(answer, column):
        return "marked as not trained"
    if not before:
        return "answer without a prompt"
    if is_blank(before[-1]):
        return "blank prompt"
    return "empty answer" if not has_text(answer) else None


def _answer(row: Row, form: RowFormat, column: str, data: DataSettings) -> Chat:
    if form.calls == column:
        return ({"role": "assistant", "content": "", "tool_calls": read_calls(calls_of(row, column), column)},)
    return read_chat(row[column], column, roles=data.roles, text_role="assistant")


def can_imitate(row: Row, form: RowFormat, data: DataSettings) -> bool:
    if form.is_whole_chat:
        messages = row[form.prompt]
        return isinstance(messages, list) and any(is_answer(message, data.roles) for message in messages)
    answer = form.answer_column(row)
    is_truth_alone = answer is not None and not isinstance(row[answer], str | list) and truth_column(row, form, data)
    return answer is not None and not is_truth_alone


def prompt_chat(row: Row, form: RowFormat, data: DataSettings, *, reads_images: bool = False) -> Chat:
    text_role = None if form.is_whole_chat else "user"
    chat = read_chat(row[form.prompt], form.prompt, roles=data.roles, text_role=text_role, reads_images=reads_images)
    return chat if form.extend is None else form.extend(row, chat)


def _is_plain(row: Row, form: RowFormat, data: DataSettings) -> bool:
    if data.text_prompts == "chat" or not isinstance(row[form.prompt], str):
        return False
    for other in ("system", "history"):
        if row.get(other) and (other == "system" or other in form.prompt_parts):
            refuse(
                other,
                "expected none beside a plain text prompt",
                f'one; set data.text_prompts = "chat", or ignore {other}',
            )
    return True


def tools_of(row: Row, data: DataSettings) -> tuple[Any, ...]:
    """Return the tools for the chat template: JSON schemas as OpenAI wraps them, without the nulls of a table."""
    if not data.use_tools or not row.get("tools"):
        return ()
    tools = _parsed("tools", row["tools"]) if isinstance(row["tools"], str) else row["tools"]
    if tools is None:  # the JSON text null
        return ()
    tools = [tools] if isinstance(tools, dict) else tools
    tools = [tool_of(tool) for tool in tools] if isinstance(tools, list) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        refuse("tools", "expected a list of JSON schemas", shown(row["tools"]))
    is_table = isinstance(row, RenamedRow) and row.is_table and not isinstance(row["tools"], str)
    cleaned = schema_without_padding(tools, is_table=is_table)
    if cleaned != tools and isinstance(row, RenamedRow):
        row.changes.add("padding")
    return tuple({"type": "function", "function": tool} if _is_bare(tool) else tool for tool in cleaned)


def _is_bare(tool: Mapping[str, Any]) -> bool:
    return "name" in tool and "parameters" in tool and "function" not in tool and tool.get("type") != "function"


def with_system(chat: Chat, row: Row, data: DataSettings) -> Chat:
    system = _text(row, "system", default="") or data.system_prompt
    if not system or chat[0]["role"] == "system":
        return chat
    return ({"role": "system", "content": system}, *chat)


def _text(row: Row, column: str, *, default: str) -> str:
    value = row.get(column, default)
    return value if isinstance(value, str) else refuse(column, "expected a text", shown(value))


def truth_column(row: Row, form: RowFormat, data: DataSettings) -> str | None:
    """Return the column that holds the ground truth of a row; None if none does: that of a whole chat is its last message."""
    model = row.get("reward_model")
    if isinstance(model, dict) and model.get("ground_truth") is not None:
        return "reward_model"
    if (column := next((name for name in ("ground_truth", form.ground_truth) if name in row), None)) is not None:
        return column
    return form.answer_column(row) if data.answer_is_ground_truth and not form.is_whole_chat else None


def _ground_truth(row: Row, form: RowFormat, answer: str | None, data: DataSettings) -> str | None:
    model, column = row.get("reward_model", {}), truth_column(row, form, data)
    if not isinstance(model, dict):
        refuse("reward_model", "expected an object with style and ground_truth", shown(model))
    if column == "reward_model":
        return json_text(model["ground_truth"], "reward_model.ground_truth")
    if "reward_model" in row and model.get("style", "rule") == "rule" and "ground_truth" not in row:
        refuse("reward_model.ground_truth", "expected the right answer, since style is rule", "nothing")
    if column is None:
        return json_text(answer, form.prompt) if answer is not None and data.answer_is_ground_truth else None
    if column in ("ground_truth", form.ground_truth):
        return json_text(row[column], column)
    if column == form.calls:
        return json_text(calls_of(row, column), column)
    return json_text(read_chat(row[column], column, roles=data.roles, text_role="assistant")[-1]["content"], column)


def _extra_info(row: Row, form: RowFormat) -> str:
    declared = row.get("extra_info", {})
    if not isinstance(declared, dict):
        refuse("extra_info", "expected an object", shown(declared))
    hidden = {"reward_model", *([COLUMN] if images_of(row) else [])}  # images are no JSON, and the model sees them
    others = {name: value for name, value in row.items() if name not in form.reads and name not in hidden}
    try:
        json_text(others, "").encode()
    except (MalformedData, UnicodeEncodeError):
        others = _held_by_json(row, others)
    return json_text({**others, **declared}, "extra_info")


def _held_by_json(row: Row, columns: Row) -> Row:
    """Return columns without a meaning, null for each NaN, without those that JSON cannot hold, which are noted."""
    held: Row = {}
    for name, value in columns.items():
        try:
            held[name] = json.loads(json_text(without_nan(value), name).encode())
        except (MalformedData, UnicodeEncodeError):
            if isinstance(row, RenamedRow):
                row.changes.add(name)
    return held


def _parsed(column: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as err:
        return refuse(column, "expected JSON text", str(err))
