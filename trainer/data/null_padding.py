"""Removes the nulls with which Arrow fills up the objects of a column, in tool schemas and in the arguments of calls; pure.

In a table each object of a column has the keys of all of them, so a null there stands for a key that is not there, unless the
tool's schema requires the key. In JSON a null is what somebody wrote, unless the schema has no such key or allows no null: then it was
written from such a table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from penstock.protocol.call_arguments import parsed_arguments
from penstock.trainer.data.messages import CALL_ROLES, chat_in_text, json_of, role_of, unique
from penstock.trainer.data.row_files import Row

Parameters = Mapping[str, Mapping[str, Any]]  # the JSON schema of a tool's arguments, by its name

_MAY_CALL = {  # columns that may hold calls of tools
    "prompt", "completion", "response", "messages", "conversations", "chosen", "rejected", "rejected_messages", "input", "question",
}  # fmt: skip
_VALUES = frozenset({"default", "const", "example"})  # keywords whose null is a value, in JSON


class RenamedRow(dict[str, Any]):
    """A row whose columns have the names of `COLUMNS`; ``is_table``: its objects may be filled up with nulls."""

    def __init__(self, columns: Row, *, is_table: bool) -> None:
        super().__init__(columns)
        self.is_table = is_table
        self.changes: set[str] = set()
        """What was changed in it, for `FileNotes`: ``padding``, and the columns that are left out."""

    @cached_property
    def parameters(self) -> Parameters:
        tools = json_of(self.get("tools"))
        return _parameters_of(map(tool_of, tools)) if isinstance(tools, list) else {}


def schema_without_padding(value: Any, *, is_table: bool) -> Any:
    """Return a tool, or a part of its JSON schema, without keys whose value is null, at every depth."""
    if isinstance(value, list):
        return [schema_without_padding(item, is_table=is_table) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: {name: schema_without_padding(part, is_table=is_table) for name, part in item.items() if part is not None}
        if key == "properties" and isinstance(item, Mapping)
        else schema_without_padding(item, is_table=is_table)
        for key, item in value.items()
        if item is not None or (key in _VALUES and not is_table)
    }


def tool_of(value: Any) -> Any:
    """Return a tool, or what its JSON text holds, with its ``parameters`` as an object where they are a JSON text."""
    tool = parsed_arguments(value) or value
    if isinstance(tool, Mapping):
        if isinstance(tool.get("function"), Mapping):
            return {**tool, "function": tool_of(tool["function"])}
        if isinstance(text := tool.get("parameters"), str):
            return {**tool, "parameters": parsed_arguments(text) or text}
    return tool


def _parameters_of(tools: Iterable[Any]) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("parameters"), Mapping):
            found[str(function.get("name"))] = function["parameters"]
    return found


def without_padding(row: RenamedRow, roles: Mapping[str, str]) -> RenamedRow:
    """Leave padding out of the calls in the messages of a row, and note it there; ``roles`` as for `read_chat`."""
    for name in _MAY_CALL & row.keys():
        value = chat_in_text(row[name], ("role", "from")) if "chosen" in name or "rejected" in name else row[name]
        messages = value if isinstance(value, list) else [value]  # LLaMA-Factory's answers of a pair are one message
        cleaned = [_message(message, row.parameters, is_table=row.is_table, roles=roles) for message in messages]
        if cleaned != messages:
            row.changes.add("padding")
            row[name] = cleaned if isinstance(value, list) else cleaned[0]
    return row


def calls_of(row: Row, column: str) -> Any:
    """Return what a column of calls holds, without padding."""
    if not isinstance(row, RenamedRow):
        return json_of(row[column])
    cleaned = _calls(row[column], row.parameters, is_table=row.is_table)
    if cleaned != row[column]:
        row.changes.add("padding")
    return json_of(cleaned)


def _message(message: Any, parameters: Parameters, *, is_table: bool, roles: Mapping[str, str]) -> Any:
    """Return a message whose calls have no padding; itself if there is none."""
    if not isinstance(message, Mapping):
        return message
    text_keys = ("content", "value") if role_of(message, roles) in CALL_ROLES else ()
    calls = {key: message[key] for key in ("tool_calls", "function_call", *text_keys) if message.get(key)}
    cleaned = {key: _calls(value, parameters, is_table=is_table) for key, value in calls.items()}
    return message if cleaned == calls else {**message, **cleaned}


def _calls(value: Any, parameters: Parameters, *, is_table: bool) -> Any:
    """Return one or several calls, or those of a JSON text, without padding; the value itself if there is none."""
    calls, is_table = json_of(value, object_pairs_hook=unique), is_table and not isinstance(value, str)
    cleaned = (
        [_call(call, parameters, is_table) for call in calls]
        if isinstance(calls, list)
        else _call(calls, parameters, is_table)
    )
    return value if cleaned == calls else cleaned


def _call(call: Any, parameters: Parameters, is_table: bool) -> Any:
    if not isinstance(call, Mapping):
        return call
    call = {key: value for key, value in call.items() if value is not None}
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(call["function"], parameters, is_table)}
    arguments = json_of(call.get("arguments"), object_pairs_hook=unique)
    if not isinstance(arguments, Mapping):
        return call
    is_text = isinstance(call["arguments"], str)
    schema = parameters.get(str(call.get("name")))
    cleaned = _arguments(arguments, schema, is_table=is_table and not is_text)
    if cleaned == arguments:
        return call
    return {**call, "arguments": json.dumps(cleaned, ensure_ascii=False) if is_text else cleaned}


def _arguments(value: Any, schema: Any, *, is_table: bool) -> Any:
    schema = schema if isinstance(schema, Mapping) else {}
    if isinstance(value, list):
        return [_arguments(item, schema.get("items"), is_table=is_table) for item in value]
    if not isinstance(value, Mapping):
        return value
    properties = schema.get("properties")
    return {
        key: _arguments(item, properties.get(key) if isinstance(properties, Mapping) else None, is_table=is_table)
        for key, item in value.items()
        if item is not None or _keeps_null(key, properties, schema.get("required"), is_table=is_table)
    }


def _keeps_null(key: str, properties: Any, required: Any, *, is_table: bool) -> bool:
    if isinstance(required, list) and key in required:
        return True
    if is_table:
        return False
    return not isinstance(properties, Mapping) or (key in properties and _allows_null(properties[key]))


def _allows_null(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return True
    kinds = schema.get("type")
    if schema.get("nullable") is True or "null" in (kinds if isinstance(kinds, list) else [kinds]):
        return True
    if None in (schema.get("enum") or []):
        return True
    parts = [part for key in ("anyOf", "oneOf") for part in schema.get(key) or []]
    return any(map(_allows_null, parts)) if parts else kinds is None and "enum" not in schema
