"""Tool calls that are not JSON alone: arguments as bare texts between tags, typed by the schemas of the tools; and Llama's, which may be Python."""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from penstock.agents.proxy.answer_formats.answer_format import (
    AnswerFormat,
    Call,
    ParsedAnswer,
    call_of,
    calls_between,
    decoded,
    listed_calls,
    read_json,
    written_call,
)

_GLM_CALL = re.compile(  # a call; one that was begun, up to its end or the next; a mention
    r"<tool_call>(\s*+[^\s<>{}]++\s*+(?:<arg_key>(?:(?!<arg_key>).)*?</arg_key>\s*+<arg_value>(?:(?!<arg_value>).)*?</arg_value>\s*+)*+)</tool_call>"
    r"(?!(?:(?!<tool_call>).)*?</arg_value>)"  # no end of an argument behind it: the text of one held the call's
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


_QUOTED = re.compile(r"\s*([\"']?)(.*?)\1\s*", re.DOTALL)


class QwenXml(AnswerFormat):
    """Tool calls as Qwen3-Coder and Qwen3.5 write them: ``<tool_call><function=NAME><parameter=KEY>TEXT</parameter></function></tool_call>``.

    The model may leave out the outer tags.
    """

    name = "qwen_xml"
    tags: ClassVar[tuple[str, str, str]] = (
        "tool_call",
        "function=",
        "parameter=",
    )  # of all calls, of one, and of an argument

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedAnswer:
        call, argument = _xml_patterns(*self.tags)
        return calls_between(call, text, lambda body: self._call(body, argument, tools))

    def _call(self, body: str, argument: re.Pattern[str], tools: Sequence[Mapping[str, Any]]) -> Call:
        name, closed, rest = body.partition(">")
        texts = written_arguments(argument, rest, (f"<{self.tags[2]}",))
        heads = [key.partition(' string="') for key, _ in texts]
        names = [_unquoted(one) for one in (name, *(key for key, _, _ in heads))]
        if not closed or not all(re.fullmatch(r"[^\s<\"']+", one) for one in names):  # name="a" id="1" is no name
            raise ValueError("expected names")
        values = [self.unwrapped(text) for _, text in texts]
        written = {names[1 + n]: is_text == 'true"' for n, (_, typed, is_text) in enumerate(heads) if typed}
        return typed_call(names[0], list(zip(names[1:], values, strict=True)), tools, written)

    def unwrapped(self, text: str) -> str:
        """Return the text of an argument without what the template writes around it."""
        return text.removeprefix("\n").removesuffix("\n")


@functools.cache
def _xml_patterns(outer: str, function: str, parameter: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return patterns of a call, of one that was begun, up to its end or the next, or of a mention; and of an argument."""
    end, close = (f"</{tag.rstrip('=').split()[0]}>" for tag in (function, parameter))
    name, behind = r'[^>\s]+(?: string="(?:true|false)")?', rf"(?=\s*+(?:<{parameter}|{end}|\Z))"  # else of the text
    alone = rf"(?!(?:(?!<{function}|<{outer}>).)*?{close})"  # as above
    call = (
        rf"(?:<{outer}>\s*+)?<{function}([^<>]*+>(?:\s*+<{parameter}{name}>(?:(?!<{parameter}).)*?{close}{behind})*+\s*+){end}{alone}(?:\s*+</{outer}>)?"
        rf"|(?:<{outer}>\s*+)?<{function}[^<>]*+>\s*+<{parameter}.*?(?:{end}|(?=<{outer}>)|$)"
        rf"|<{outer}>(?:\s*+<{function})?|<{function}"
    )
    return re.compile(call, re.DOTALL), re.compile(rf"\s*<{parameter}({name})>(.*?){close}{behind}", re.DOTALL)


def _unquoted(text: str) -> str:
    """Return a name without the quotes that a model may write around it, as XML has them."""
    match = _QUOTED.fullmatch(text)
    return match[2] if match else text


QWEN_XML = QwenXml()


class MiniMax(QwenXml):
    """Tool calls as MiniMax-M2 writes them: ``<minimax:tool_call><invoke name="NAME"><parameter name="KEY">TEXT</parameter></invoke>…``."""

    name = "minimax"
    tags = ("minimax:tool_call", "invoke name=", "parameter name=")

    def unwrapped(self, text: str) -> str:
        return text


MINIMAX = MiniMax()


class SeedOss(QwenXml):
    """Tool calls and reasoning as Seed-OSS writes them."""

    name = "seed_oss"
    tags = ("seed:tool_call", "function=", "parameter=")
    reasoning_tags = ("<seed:think>", "</seed:think>")


SEED_OSS = SeedOss()


_PYTHON_BEGIN, _PYTHON_END = re.compile(r"<\|python_(?:tag|start)\|>"), "<|python_end|>"
_PYTHON_CALLS = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")


class Llama(AnswerFormat):
    """Tool calls as Llama 3 and 4 write them: the whole answer, or all behind a mark, is ``{"name": …, "parameters": {…}}``, several joined by ``;``.

    Or it is a list in Python, as Llama 3.2 and 4 may write it: ``[look(word="sun"), look(word="moon")]``.
    """

    name = "llama"

    def parse(self, text: str) -> ParsedAnswer:
        body, said = text.strip(), ""
        before, _, behind = body.partition(_PYTHON_END)
        mark = None if body.startswith(("{", "[")) else _PYTHON_BEGIN.search(body)
        if before.startswith("<|python_start|>") and behind.lstrip().startswith("{"):  # Llama 4's text before its calls
            said, body = before.removeprefix("<|python_start|>").strip(), behind
        elif mark is not None:
            said, body = body[: mark.start()].strip(), body[mark.end() :]
        stripped = body.strip().removesuffix(_PYTHON_END).strip()
        is_python = _PYTHON_CALLS.match(stripped) is not None
        if not (stripped.startswith(("{", "[{")) or is_python):
            return ParsedAnswer(text, num_unparsed=int(mark is not None))
        try:
            return ParsedAnswer(said, _python_calls(stripped) if is_python else _joined_calls(stripped))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return ParsedAnswer(text, num_unparsed=int(is_python or '"name"' in stripped))


def _joined_calls(text: str) -> tuple[Call, ...]:
    calls: list[Call] = []
    while text:
        value, end = decoded(text, 0)
        calls += listed_calls(value)
        text = text[end:].lstrip().removeprefix(";").lstrip()
    return tuple(calls)


def _python_calls(text: str) -> tuple[Call, ...]:
    listed = ast.parse(text, mode="eval").body
    if not isinstance(listed, ast.List) or not listed.elts:
        raise ValueError("expected a list of calls")
    return tuple(_python_call(node) for node in listed.elts)


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError("expected a call with named arguments")
    values = {str(one.arg): ast.literal_eval(_JsonWords().visit(one.value)) for one in node.keywords if one.arg}
    if len(values) < len(node.keywords):
        raise ValueError("expected arguments with different names")
    return call_of(ast.unparse(node.func), json.dumps(values, allow_nan=False))


class _JsonWords(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node


LLAMA = Llama()


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


def typed_call(
    name: str,
    texts: Sequence[tuple[str, str]],
    tools: Sequence[Mapping[str, Any]],
    are_texts: Mapping[str, bool] = MappingProxyType({}),
) -> Call:
    """Return a call with arguments from ``texts``; what has no form of its type stays a text. Raises ValueError for a repeated name.

    ``are_texts`` has the arguments whose kind the model wrote: texts, or JSON, for which ValueError is raised if it is not valid.
    """
    functions = (tool["function"] for tool in tools if isinstance(tool.get("function"), Mapping))
    schema = next((one.get("parameters") for one in functions if one.get("name") == name), None)
    schema = schema if isinstance(schema, Mapping) else {}
    properties = schema.get("properties")
    arguments: dict[str, Any] = {}
    for key, text in texts:
        if key in arguments:
            raise ValueError(f"{key} is written twice")
        declared = properties.get(key) if isinstance(properties, Mapping) else None
        is_text = are_texts.get(key)
        arguments[key] = _value(text, declared, schema) if is_text is None else text if is_text else read_json(text)
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
    if names and "string" not in names and text.strip().lower() in ("null", "none"):
        return None  # as templates write an argument that is left out
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
