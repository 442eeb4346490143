"""Messages → token ids: a whole conversation, or only what lies between a sampled answer and the next one.

The second is the *bridge*. The answer's recorded ids stay, and what the template writes behind an answer is taken from the
rendering of a stand-in: the same kind of answer with a marker as its content. So nothing that was sampled is ever rendered.

Where a template changes what stands before, rendering a history again would give other tokens than were sampled. The proxy
continues the recorded tokens in every shape with a bridge; `probe` says how far a prompt made so is from that of the template.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from penstock.agents.proxy.answer_formats.answer_format import END_THINK, THINK
from penstock.agents.proxy.messages import Message, ToolCall
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.control_tokens import ControlTokens
from penstock.protocol.errors import MalformedData

_MARKERS = ("SEAM7f3a9c", "SEAMb41d60")  # as the answer's content; the second where a message contains the first
_PLAIN_ROLES = frozenset({"user", "tool"})  # whose texts are written by neither the policy nor the agent's author
_KEPT_CHARACTERS = 2 * 1024**2  # of prompts whose ids are kept, about 20 MB with them
_SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}}
_LOOK = {"name": "look", "description": "Look a word up.", "parameters": _SCHEMA}
_TOOLS = ({"type": "function", "function": _LOOK},)
_CALL = ToolCall("call00001", "look", '{"word": "sun"}')  # ids that every template takes
_OTHER = ToolCall("call00002", "look", '{"word": "moon"}')
_RESULT, _OTHER_RESULT = (Message("tool", one, tool_call_id=n.id) for one, n in (("star", _CALL), ("rock", _OTHER)))
_USER = Message("user", "Hello.")
_NEXT = Message("user", "Go on.")
SHAPES: dict[str, tuple[Message, tuple[Message, ...], bool]] = {
    "answer, then user": (Message("assistant", "Yes."), (_NEXT,), False),
    "reasoning and answer, then user": (Message("assistant", "Yes.", "Let me see."), (_NEXT,), False),
    "call, then result": (Message("assistant", "", "", (_CALL,)), (_RESULT,), True),
    "text and call, then result": (Message("assistant", "I look.", "", (_CALL,)), (_RESULT,), True),
    "reasoning and call, then result": (Message("assistant", "", "Let me see.", (_CALL,)), (_RESULT,), True),
    "two calls, then two results": (Message("assistant", "", "", (_CALL, _OTHER)), (_RESULT, _OTHER_RESULT), True),
    "call, then result and user": (Message("assistant", "", "", (_CALL,)), (_RESULT, _NEXT), True),
    "call, then user": (Message("assistant", "", "", (_CALL,)), (_NEXT,), True),
}


@dataclass(frozen=True, slots=True)
class Rendered:
    token_ids: list[int]
    opens_reasoning: bool  # it ends with the tag that begins the reasoning


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    stop_text: str = ""  # of the stop token that the policy sampled; empty if it was cut
    in_reasoning: bool = False  # cut before its reasoning ended
    added: str = ""  # what the client wrote behind it


@dataclass(frozen=True, slots=True)
class Bridge:
    rendered: Rendered
    keeps_stop_token: bool  # False: the template continues with another token than the one that the policy ended with


class ChatRenderer:
    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self._controls = ControlTokens(tokenizer.added_tokens(), tokenizer.encoder_of_plain_text)
        self._kept = _KeptPrompts(_KEPT_CHARACTERS)
        self._closing = self._find_closing()
        self._stops = tuple(tokenizer.decode([one]) for one in tokenizer.eos_ids)

    def whole(self, messages: Sequence[Message], tools: Sequence[Any]) -> Rendered:
        return self._kept.get(self.text(messages, tools), self._encoded)

    def bridge(
        self, answer: Message, end: AnswerEnd, new: Sequence[Message], tools: Sequence[Any], *, has_system: bool
    ) -> Bridge | None:
        """Return what follows a sampled answer when ``new`` messages follow it; None if the template has no such form."""
        for calls in ((answer.tool_calls,) if answer.tool_calls and new[0].role == "tool" else ()) + ((),):
            for reasoning in ("", "r"):  # some templates render the last answer otherwise than earlier ones without it
                tokens = self._behind_answer(calls, reasoning, new, tools, has_system=has_system)
                if tokens is not None:
                    return self._joined(tokens, end)
        return None

    def text_of(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids)

    @functools.cached_property
    def wants_one_system(self) -> bool:
        """Whether the template shows a system message that is the first, and refuses or leaves out later ones."""
        later = Message("system", _MARKERS[0])
        first, answered = Message("system", "s"), Message("assistant", "a")
        late = ([first, _USER, later, _NEXT], [first, _USER, answered, later, _NEXT], [first, later, _USER])
        return self._shows_marker([later, _USER]) and not all(map(self._shows_marker, late))

    def _shows_marker(self, messages: Sequence[Message]) -> bool:
        try:
            return _MARKERS[0] in self.text(messages, ())
        except MalformedData:
            return False

    def _joined(self, behind: str, end: AnswerEnd) -> Bridge:
        keeps = behind.startswith(end.stop_text)
        text = behind[len(end.stop_text) :] if keeps else behind
        if end.in_reasoning:
            text = f"\n{END_THINK}\n\n{text}"
        return Bridge(self._encoded(end.added + text), keeps)

    def _find_closing(self) -> str:
        text = self.text((Message("user", "u"), Message("assistant", _MARKERS[0])), (), generate=False)
        _, marker, closing = text.rpartition(_MARKERS[0])
        if not marker:
            raise MalformedData(
                "the chat template leaves out the content of an answer; agents need a template that shows it"
            )
        return closing

    def _behind_answer(
        self, calls: tuple[ToolCall, ...], reasoning: str, new: Sequence[Message], tools: Sequence[Any], *,
        has_system: bool,
    ) -> str | None:  # fmt: skip
        """Return the text behind an answer of this form, its closing included; None if it cannot be told apart."""
        marker = next(
            (candidate for candidate in _MARKERS if not any(candidate in message.content for message in new)), None
        )
        if marker is None:
            return None
        before = [Message("system", "s")] * has_system + [Message("user", "u")]
        answer = Message("assistant", marker, reasoning, calls)
        try:
            longer = self.text([*before, answer, *new], tools)
            if not calls:
                return longer.partition(marker)[2] if longer.count(marker) == 1 else None
            alone = self.text([*before, answer], tools, generate=False)
            if marker not in alone:  # the template shows the calls alone
                marker = ""
        except MalformedData:
            return None
        before_calls, _, shown = alone.partition(marker) if marker else ("", "", alone)
        closings = [one for one in (self._closing, *self._stops) if shown.endswith(one)]
        if not closings:  # an answer with calls may end with another stop token
            return None
        shown = shown[: len(shown) - len(closings[0])]
        head, separator, behind = longer.partition(marker) if marker else ("", "-", longer)
        if not separator or not behind.startswith(shown) or head != before_calls:
            return None
        return behind[len(shown) :]

    def text(self, messages: Sequence[Message], tools: Sequence[Any], *, generate: bool = True) -> str:
        return self.tokenizer.render(
            [self._escaped(message).for_template() for message in messages], add_generation_prompt=generate, tools=tools
        )

    def _escaped(self, message: Message) -> Message:
        """Return a message in which the texts of control tokens are code points that stand for them.

        A tool's result may contain the text of a control token, and even a whole turn: it must not become one.
        """
        if self._controls.has_escaped(message.content):
            raise MalformedData(
                "a message has a character of the private use plane at U+100000 that is used here for the text of a control token; leave it out"
            )
        if message.role not in _PLAIN_ROLES or not self._controls.found_in(message.content):
            return message
        return replace(
            message,
            content=self._controls.escaped(message.content),
            parts=tuple(self._controls.escaped([*message.parts])),
        )

    def _encoded(self, text: str) -> Rendered:
        is_escaped = self._controls.has_escaped(text)
        ids = self._controls.encode(text, self.tokenizer.encode) if is_escaped else self.tokenizer.encode(text)
        return Rendered(ids, text.rstrip().endswith(THINK))


class _KeptPrompts:
    """The prompts that were encoded last: the episodes of a group begin with the same one, at about the same time. Thread-safe."""

    def __init__(self, max_characters: int) -> None:
        self._max_characters = max_characters
        self._encoded: OrderedDict[str, Future[Rendered]] = OrderedDict()  # the one used last is the last
        self._characters = 0
        self._lock = threading.Lock()

    def get(self, text: str, encode: Callable[[str], Rendered]) -> Rendered:
        """Return the ids of a text; of those who ask at the same time one encodes it. Raises what ``encode`` does, which is not kept."""
        with self._lock:
            tokens = self._encoded.get(text)
            if tokens is not None:
                self._encoded.move_to_end(text)
            future = self._begun(text) if tokens is None else None
        if future is None:
            assert tokens is not None
            return tokens.result()
        try:
            future.set_result(encode(text))
        except Exception as err:  # noqa: BLE001 - those who wait for it get it too
            future.set_exception(err)
            with self._lock:
                if self._encoded.get(text) is future:
                    self._drop(text)
        return future.result()

    def _begun(self, text: str) -> Future[Rendered]:
        made: Future[Rendered] = Future()
        self._encoded[text] = made
        self._characters += len(text)
        while self._characters > self._max_characters:
            self._drop(next(iter(self._encoded)))
        return made

    def _drop(self, text: str) -> None:
        del self._encoded[text]
        self._characters -= len(text)


def without_reasoning(messages: Sequence[Message], *, before: int) -> list[Message]:
    return [
        replace(message, reasoning="") if number < before and message.reasoning else message
        for number, message in enumerate(messages)
    ]


@dataclass(frozen=True, slots=True)
class ShapeReport:
    shape: str
    renders: bool
    append_only: bool  # the longer rendering begins with the shorter one
    has_bridge: bool
    same_bridge: bool  # the bridge is what the template itself writes there, if it is append-only


def probe(renderer: ChatRenderer) -> list[ShapeReport]:
    return [_report(renderer, shape, *parts) for shape, parts in SHAPES.items()]


def _report(
    renderer: ChatRenderer, shape: str, answer: Message, new: tuple[Message, ...], uses_tools: bool
) -> ShapeReport:
    tools: Sequence[Any] = _TOOLS if uses_tools else ()
    try:
        shorter = renderer.text([_USER, answer], tools, generate=False)
        longer = renderer.text([_USER, answer, *new], tools)
    except MalformedData:
        return ShapeReport(shape, renders=False, append_only=False, has_bridge=False, same_bridge=False)
    bridge = renderer.bridge(answer, AnswerEnd(), new, tools, has_system=False)
    append_only = longer.startswith(shorter)
    same = False
    if bridge is not None and append_only:
        written = renderer.text_of(bridge.rendered.token_ids)
        same = longer.endswith(written) and len(longer) - len(written) <= len(shorter)
    return ShapeReport(shape, True, append_only, bridge is not None, same)


def format_table(reports: Sequence[ShapeReport]) -> str:
    width = max(len(report.shape) for report in reports)
    lines = [f"{'shape':{width}}  append-only  continued by"]
    for report in reports:
        if not report.renders:
            lines.append(f"{report.shape:{width}}  refused      -")
            continue
        how = "a bridge" if report.has_bridge else "rendering again: a row for each"
        how += ", as the template writes it" if report.same_bridge else ""
        lines.append(f"{report.shape:{width}}  {'yes' if report.append_only else 'no':11}  {how}")
    return "\n".join(lines)


def shows_tools(renderer: ChatRenderer) -> bool:
    """Return True if the template shows the tools of a request; otherwise the policy does not know them."""
    try:
        return renderer.text([_USER], _TOOLS) != renderer.text([_USER], ())
    except MalformedData:
        return False
