"""Tool calls whose arguments a model writes as bare texts between tags; they become values by the schemas of the tools."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.agents.proxy.answer_formats.answer_format import (
    AnswerFormat,
    Call,
    ParsedAnswer,
    calls_between,
    read_json,
    written_call,
)

_GLM_CALL = re.compile(  # a call; one that was begun, up to its end or the next; a mention
    r"<tool_call>(\s*+[^\s<>{}]++\s*+(?:<arg_key>(?:(?!<arg_key>).)*?</arg_key>\s*+<arg_value>(?:(?!<arg_value>).)*?</arg_value>\s*+)*+)</tool_call>"
    r"|<tool_call>[^<]*+<arg_key>.*?(?:</tool_call>|(?=<tool_call>)|$)|<tool_call>",
    re.DOTALL,
)
_GLM_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


class Glm(AnswerFormat):
    """Tool calls as GLM-4.5 to 4.7 write them: ``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>TEXT</arg_value></tool_call>``."""

    name = "glm"

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedAnswer:
        return calls_between(_GLM_CALL, text, lambda body: _glm_call(body, tools))


def _glm_call(body: str, tools: Sequence[Mapping[str, Any]]) -> Call:
    name, begun, rest = body.partition("<arg_key>")
    if not name.strip() or re.search(r"[\s<>{}]", name.strip()):
        raise ValueError("expected a name")
    arguments = written_arguments(_GLM_ARGUMENT, begun + rest, ("<arg_key>", "<arg_value>"))
    return typed_call(name.strip(), [(key.strip(), text) for key, text in arguments], tools)


GLM = Glm()


_QWEN_CALL = re.compile(  # a call; one that was begun, up to its end or the next; a mention
    r"(?:<tool_call>\s*+)?<function=([^<>]*+>(?:\s*+<parameter=[^>\s]+>(?:(?!<parameter=).)*?</parameter>)*+\s*+)</function>(?:\s*+</tool_call>)?"
    r"|(?:<tool_call>\s*+)?<function=[^<>]*+>\s*+<parameter=.*?(?:</function>|(?=<tool_call>)|$)"
    r"|<tool_call>(?:\s*+<function=)?|<function=",
    re.DOTALL,
)
_QUOTED = re.compile(r"\s*([\"']?)(.*?)\1\s*", re.DOTALL)
_QWEN_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)


class QwenXml(AnswerFormat):
    """Tool calls as Qwen3-Coder and Qwen3.5 write them: ``<tool_call><function=NAME><parameter=KEY>TEXT</parameter></function></tool_call>``.

    The model may leave out the outer tags.
    """

    name = "qwen_xml"

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedAnswer:
        return calls_between(_QWEN_CALL, text, lambda body: _qwen_call(body, tools))


def _qwen_call(body: str, tools: Sequence[Mapping[str, Any]]) -> Call:
    name, closed, rest = body.partition(">")
    if not closed or not _unquoted(name) or "<" in name:
        raise ValueError("expected a name")
    arguments = [
        (_unquoted(key), text.removeprefix("\n").removesuffix("\n"))
        for key, text in written_arguments(_QWEN_PARAMETER, rest, ("<parameter=",))
    ]
    return typed_call(_unquoted(name), arguments, tools)


def _unquoted(text: str) -> str:
    """Return a name without the quotes that a model may write around it, as XML has them."""
    match = _QUOTED.fullmatch(text)
    return match[2] if match else text


QWEN_XML = QwenXml()


_INTEGER = re.compile(r"[+-]?\d{1,400}(?:\.0+)?")
_MAX_DEPTH = 8
_OTHER_NAMES = {  # of types, in schemas that are not quite JSON Schema
    "int": "integer", "float": "number", "double": "number", "bool": "boolean", "dict": "object", "list": "array", "none": "null",
}  # fmt: skip


def written_arguments(pattern: re.Pattern[str], text: str, begins: Sequence[str]) -> list[tuple[str, str]]:
    """Return the names and texts of arguments that ``pattern`` reads one behind the other, as its two groups.

    Raises ValueError where something else stands between them, or one of ``begins``, with which an argument begins, in a name or text.
    """
    read: list[tuple[str, str]] = []
    position = 0
    while (match := pattern.match(text, position)) is not None:
        if any(begin in match[1] or begin in match[2] for begin in begins):
            raise ValueError("an argument has no end")
        read.append((match[1], match[2]))
        position = match.end()
    if text[position:].strip():
        raise ValueError("expected arguments alone")
    return read


def typed_call(name: str, texts: Sequence[tuple[str, str]], tools: Sequence[Mapping[str, Any]]) -> Call:
    """Return a call with arguments from ``texts``; what has no form of its type stays a text. Raises ValueError for a repeated name."""
    functions = (tool["function"] for tool in tools if isinstance(tool.get("function"), Mapping))
    schema = next((one.get("parameters") for one in functions if one.get("name") == name), None)
    schema = schema if isinstance(schema, Mapping) else {}
    properties = schema.get("properties")
    arguments: dict[str, Any] = {}
    for key, text in texts:
        if key in arguments:
            raise ValueError(f"{key} is written twice")
        declared = properties.get(key) if isinstance(properties, Mapping) else None
        arguments[key] = _value(text, declared, schema)
    return written_call(name, arguments)


def _value(text: str, declared: Any, root: Mapping[str, Any]) -> Any:
    kinds = list(_kinds(declared, root, 0))
    allowed = [value for kind, value in kinds if kind == "enum"]
    if text in allowed:
        return text
    names = {kind for kind, _ in kinds}
    if "enum" in names and names == {"enum"}:
        names = {_kind_of(value) for value in allowed}
    for kind in ("null", "boolean", "integer", "number", "object", "array"):
        if kind in names:
            try:
                value = _read(text.strip(), kind)
            except ValueError:
                continue
            # a text that is allowed, and is not how the number is written ("007", "1e3"), is a text
            if kind in ("integer", "number") and "string" in names and json.dumps(value) != text.strip():
                continue
            return value
    return text


def _read(text: str, kind: str) -> Any:
    """Return a text as a value of a JSON type; raises ValueError."""
    if kind == "integer":
        if _INTEGER.fullmatch(text) is None:
            raise ValueError(text)
        return int(text.partition(".")[0])
    lowered = text.lower()
    if kind in ("null", "boolean"):
        words = {"null": None, "none": None} if kind == "null" else {"true": True, "false": False}
        if lowered not in words:
            raise ValueError(text)
        return words[lowered]
    value = _read_literal(text) if kind in ("object", "array") else read_json(text)
    if _kind_of(value) not in ((kind, "integer") if kind == "number" else (kind,)):
        raise ValueError(text)
    return value


def _read_literal(text: str) -> Any:
    """Return a JSON value, also as Python writes it; raises ValueError."""
    try:
        return read_json(text)
    except ValueError:
        if not text.startswith(("[", "{", "(")):
            raise
        try:
            return read_json(json.dumps(ast.literal_eval(text), allow_nan=False))
        except (TypeError, SyntaxError, MemoryError, RecursionError) as err:
            raise ValueError(text[:40]) from err


def _kind_of(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _kinds(declared: Any, root: Mapping[str, Any], depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the types that a schema allows, and ("enum", value) for each value that it lists."""
    if not isinstance(declared, Mapping) or depth > _MAX_DEPTH:
        return
    kinds = declared.get("type")
    listed = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)]
    yield from ((_OTHER_NAMES.get(kind, kind), None) for kind in listed)
    values = declared["enum"] if isinstance(declared.get("enum"), list) else []
    yield from (("enum", value) for value in [*values, *([declared["const"]] if "const" in declared else [])])
    for key in ("anyOf", "oneOf", "allOf"):
        for option in declared[key] if isinstance(declared.get(key), list) else ():
            yield from _kinds(option, root, depth + 1)
    path = declared.get("$ref")
    if isinstance(path, str) and path.startswith("#/"):
        at: Any = root
        for part in path[2:].split("/"):
            at = at.get(part) if isinstance(at, Mapping) else None
        yield from _kinds(at, root, depth + 1)
    if kinds is None and "properties" in declared:
        yield "object", None
