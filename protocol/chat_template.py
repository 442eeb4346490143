"""Render a model's chat template, which is code from outside: the adapter of jinja2.

The sandbox of Jinja keeps a template from reaching Python, but not from using all memory or never ending. So every loop,
macro, call, filter and operator here counts: a rendering ends with `TemplateRefused` when a value, the sum of all values
that it made, or its CPU time exceeds a limit.

Needs ``jinja2``, which only the services that render a chat install.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from penstock.protocol.errors import TemplateRefused

MAX_TEMPLATE_CHARS = 1024**2  # templates of published models have less than 20,000
MAX_VALUE = 8 * 1024**2  # characters of a text, 64 for each item of a list: the longest contexts have fewer
MAX_MADE = 256 * MAX_VALUE  # the same, of all values that one rendering makes
MAX_CPU_S = 5.0
_MAX_INT_BITS = 4096
_ITEM = 64  # size of an item of a list or mapping, in characters
_PLAIN = {int, float, bool, type(None)}
_MOST_RANGE = 100_000  # items that the sandbox allows a range
_WIDE_FIELD = re.compile(r"\d{5}|\*|\{[^}]*\{")  # of a format: a width that could be anything
_UNBOUNDED_METHODS = frozenset({"translate", "expandtabs"})
_UNBOUNDED_FILTERS = ("urlize", "xmlattr", "pprint", "striptags", "wordwrap")


class ChatTemplate:
    """One compiled template. Thread-safe."""

    def __init__(self, text: str) -> None:
        """Compile; raises TemplateRefused for invalid Jinja, and for a text that is too long."""
        if len(text) > MAX_TEMPLATE_CHARS:
            raise TemplateRefused(f"{len(text)} characters, the limit is {MAX_TEMPLATE_CHARS}")
        self.marks_answers = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", text) is not None
        """Whether the template marks what an assistant says, by ``{% generation %}`` blocks."""
        try:
            self._template = _Environment().from_string(text)
        except Exception as err:  # noqa: BLE001 - code from outside: whatever its compilation raises
            raise TemplateRefused(f"it is not valid Jinja ({_one_line(err)})") from None

    def render(self, messages: Sequence[Mapping[str, Any]], **names: Any) -> str:
        environment: Any = self._template.environment
        try:
            with environment.limits:
                text = self._template.render(
                    messages=[
                        {key: value for key, value in message.items() if value is not None} for message in messages
                    ],
                    **names,
                )
            text.encode()
        except UnicodeEncodeError:
            raise TemplateRefused("the text has a lone surrogate, which no tokenizer encodes") from None
        except Exception as err:  # noqa: BLE001 - code from outside: whatever its execution raises
            raise TemplateRefused(_one_line(err)) from None
        return text

    def render_marked(self, messages: Sequence[Mapping[str, Any]], **names: Any) -> list[tuple[str, bool]]:
        """Return the texts that make up a chat, each with whether it is inside a ``{% generation %}`` block.

        Raises TemplateRefused as `render` does, and if the template changes the text of its blocks afterwards.
        """
        environment: Any = self._template.environment
        mark = secrets.token_hex(8)
        limits = environment.limits
        limits.opening, limits.closing = f"\ue000{mark}\ue001", f"\ue002{mark}\ue003"
        try:
            marked = self.render(messages, **names)
        finally:
            parts = re.compile(f"({limits.opening}|{limits.closing})")
            opening, limits.opening, limits.closing = limits.opening, "", ""
        segments, is_inside = [], False
        for number, part in enumerate(parts.split(marked)):
            if number % 2:
                is_inside = part == opening
            elif part:
                segments.append((part, is_inside))
        if "".join(text for text, _ in segments) != self.render(messages, **names):
            raise TemplateRefused("it changes the text inside its generation blocks after it marked it")
        return segments


class _Limits(threading.local):
    """What the rendering under way on this thread may still use; a context manager around a rendering."""

    made = 0
    ticks = 0
    deadline = float("inf")
    opening = closing = ""  # around the text of a generation block

    def __enter__(self) -> None:
        self.made, self.ticks, self.deadline = 0, 0, time.thread_time() + MAX_CPU_S

    def __exit__(self, *_: object) -> None:
        self.deadline = float("inf")

    def check_time(self) -> str:
        self.ticks += 1
        if not self.ticks % 16 and time.thread_time() > self.deadline:  # a system call
            raise TemplateRefused(f"the rendering uses more than {MAX_CPU_S:.0f} s of CPU time")
        return ""

    def check(self, size: int) -> None:
        self.made += size
        if size > MAX_VALUE or self.made > MAX_MADE:
            raise TemplateRefused(f"the rendering makes values of more than {MAX_VALUE} characters or items")

    def checked(self, value: Any) -> Any:
        self.check(len(value) if type(value) is str else _size(value))
        return value


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols], autoescape=False
        )
        self.limits = _Limits()
        self.finalize = self.limits.checked
        self.concat = self._concat
        self.globals.pop("lipsum")
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.filters["tojson"] = _to_json
        for name in _UNBOUNDED_FILTERS:
            del self.filters[name]
        self.filters = {name: _bounded(function, self.limits) for name, function in self.filters.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Counted().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def _concat(self, parts: Iterable[str]) -> str:
        kept, size = [], 0
        for part in parts:
            size += len(part)
            if size > MAX_VALUE:
                self.limits.check(size)
            kept.append(part)
        self.limits.check(size)
        return "".join(kept)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is str and type(right) is str:
            self.limits.check(len(left) + len(right))
            return left + right
        _check_operands(self.limits, operator, left, right)
        return self.limits.checked(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.limits.check_time()
        _check_arguments(
            self.limits, getattr(function, "__name__", ""), getattr(function, "__self__", None), args, kwargs
        )
        return self.limits.checked(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _UNBOUNDED_METHODS and super().is_safe_attribute(obj, attr, value)


class _Counted(NodeTransformer):
    """Make each turn of a loop and each call of a macro check the time, and each list and text that is put together its size."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        made = self.generic_visit(node, *args, **kwargs)
        match node:
            case nodes.For() | nodes.Macro():
                return _with_check(made)
            case nodes.List() | nodes.Dict() | nodes.Tuple(ctx="load"):
                return _checked(node, made)
            case nodes.Concat():
                texts: list[nodes.Expr] = [
                    nodes.Filter(part, "string", [], [], None, None, lineno=node.lineno) for part in node.nodes
                ]
                joined = texts[0]
                for text in texts[1:]:
                    joined = nodes.Add(joined, text, lineno=node.lineno)
                return joined
            case _:
                return made


def _with_check(node: Any) -> nodes.Node:
    call = nodes.Call(nodes.EnvironmentAttribute("limits.check_time"), [], [], None, None, lineno=node.lineno)
    node.body = [nodes.ExprStmt(call, lineno=node.lineno), *node.body]
    return node


def _checked(node: nodes.Node, made: Any) -> nodes.Node:
    return nodes.Call(nodes.EnvironmentAttribute("limits.checked"), [made], [], None, None, lineno=node.lineno)


def _bounded(function: Callable[..., Any], limits: _Limits) -> Callable[..., Any]:
    passes_context, name = hasattr(function, "jinja_pass_arg"), function.__name__.removeprefix("do_")

    @functools.wraps(function)  # with the mark of a filter that gets the context
    def bounded(*args: Any, **kwargs: Any) -> Any:
        values = args[1:] if passes_context else args
        limits.check_time()
        if not (len(values) == 1 and type(values[0]) is str):
            limits.check(_size(values))
        _check_arguments(limits, name, values[0] if values else None, values[1:], kwargs)
        return limits.checked(function(*args, **kwargs))

    return bounded


def _check_operands(limits: _Limits, operator: str, left: Any, right: Any) -> None:
    match operator:
        case "%" if isinstance(left, str):
            _check_format(left)
        case "*" if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
        case "**" if isinstance(left, int) and isinstance(right, int):
            _check_bits(max(1, left.bit_length()) * abs(right))
        case "*":
            count, repeated = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(count, int) and not isinstance(repeated, float):
                limits.check(_size(repeated) * max(0, count))
        case "+" if not isinstance(left, (int, float)):
            limits.check(_size(left) + _size(right))
        case _:
            pass


def _check_arguments(limits: _Limits, name: str, owner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if not args and not kwargs and name != "format":
        return
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_VALUE and name != "strftime_now":
            limits.check(min(abs(value), 2 * MAX_VALUE))
    if name == "format" and isinstance(owner, str):  # the filter; `wrap_str_format` has the method
        _check_format(owner)
    if name == "join":
        separator, joined = (owner, args[0]) if isinstance(owner, str) else (args[0] if args else "", owner)
        count = len(joined) if hasattr(joined, "__len__") else _MOST_RANGE  # a generator
        limits.check(_length(separator) * count)
    if name in ("replace", "indent") and isinstance(owner, str | list | tuple | range):
        _check_replacement(limits, owner, (*args, *kwargs.values()))


def _check_replacement(limits: _Limits, text: Any, values: Sequence[Any]) -> None:
    texts = [value for value in values if isinstance(value, str)]
    if isinstance(text, str) and len(texts) == 2:
        most = len(text) + text.count(texts[0]) * len(texts[1])
    else:
        widths = [len(value) if isinstance(value, str) else value for value in values if isinstance(value, str | int)]
        most = (_length(text) if not isinstance(text, str) else text.count("\n") + 1) * max(widths, default=0)
    if most > MAX_VALUE:
        limits.check(most)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | range | dict) else 0


def _check_format(form: str) -> None:
    if _WIDE_FIELD.search(form):
        raise TemplateRefused("a format with a width above 9,999, or one that is computed")


def _check_bits(bits: int) -> None:
    if bits > _MAX_INT_BITS:
        raise TemplateRefused(f"a number of more than {_MAX_INT_BITS} bits")


def _size(value: Any) -> int:
    """Return the size of a value, counted until it exceeds the limit; a shared item counts at each use."""
    size, remaining = 0, [value]
    while remaining and size <= MAX_VALUE:
        element = remaining.pop()
        if isinstance(element, str | bytes | range):
            size += len(element)
        elif isinstance(element, list | tuple | set | frozenset | Mapping):
            size += _ITEM * (1 + len(element))
            parts = itertools.chain(element.keys(), element.values()) if isinstance(element, Mapping) else element
            remaining += [part for part in parts if type(part) not in _PLAIN] if size <= MAX_VALUE else []
    return size


class _GenerationBlocks(Extension):
    """Renders the content of ``{% generation %}`` blocks, with which templates mark assistant turns."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares tags

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        opening, closing = (
            nodes.Output([nodes.EnvironmentAttribute(f"limits.{name}")], lineno=line) for name in ("opening", "closing")
        )
        return [opening, *parser.parse_statements(("name:endgeneration",), drop_needle=True), closing]


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # The filter of jinja2 escapes HTML, which would change the prompt.
    if indent is not None and not 0 <= int(indent) <= 16:
        raise TemplateRefused(f"tojson with an indent of {indent}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    if re.search(r"%[^A-Za-z%]*\d", form):
        raise TemplateRefused("a date format with a width")
    return datetime.now().astimezone().strftime(form)


def _one_line(err: Exception) -> str:
    text = " ".join(str(err).split())[:300]
    plain = isinstance(err, (jinja2.TemplateError, TemplateRefused)) and text
    return text if plain else f"{type(err).__name__}: {text}"
