"""The messages of an agent's conversation in one form, and their canonical hashes; pure.

Each API (`api/`) is translated into these. Two spellings of one message are one message: content that is null, empty,
absent or one text part, and arguments of a tool call that are equal as JSON.

`RequestRefused` is a request that the proxy does not answer, with its HTTP status; the API of the request writes the
body.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from penstock.protocol.errors import PenstockError
from penstock.protocol.images.admission import AdmittedImage

_KEY_BYTES = 16
_WORDS = {"true": True, "false": False, "none": None, "null": None}
# The conversation of a request, as the agent declares it; empty: it does not.
Declared: TypeAlias = Literal["", "main", "side"]
Part: TypeAlias = str | bytes | AdmittedImage  # a text; an image as it was sent; the same, decoded once within limits


class RequestRefused(PenstockError):
    """A request cannot be answered; ``code`` is one word for programs, the text a sentence for people."""

    def __init__(self, status: int, code: str, message: str, *, param: str | None = None) -> None:
        """``param`` names the field of the body at fault."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


def invalid(message: str, param: str | None = None, *, code: str = "invalid_request") -> RequestRefused:
    return RequestRefused(400, code, message, param=param)


def unsupported(what: str, param: str) -> RequestRefused:
    return RequestRefused(400, "unsupported", f"{what} is not supported: leave out {param}", param=param)


def constrained(param: str) -> RequestRefused:
    said = f"{param} constrains decoding: the log-probabilities would be of another distribution than the trained one"
    return invalid(f"{said}; leave it out, and let the reward judge the form", param, code="constrained_decoding")


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON, or whatever the client wrote

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Message:
    """One message; texts that are absent are empty. Messages of users and tools may have images."""

    role: str
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""  # of a tool's result
    name: str = ""
    # begun in the content, and no calls; of an answer of the policy
    unparsed_calls: int = field(default=0, compare=False)
    parts: tuple[Part, ...] = ()  # texts and images in order, if it has an image; ``content`` is the texts

    @classmethod
    def of_parts(cls, role: str, *parts: Part, tool_call_id: str = "") -> Message:
        texts = [part for part in parts if isinstance(part, str)]
        has_images = len(texts) < len(parts)
        return cls(role, "\n".join(texts), tool_call_id=tool_call_id, parts=parts if has_images else ())

    @property
    def images(self) -> tuple[bytes | AdmittedImage, ...]:
        return tuple([part for part in self.parts if not isinstance(part, str)])

    def as_dict(self, written_image: Callable[[bytes | AdmittedImage], dict[str, Any]]) -> dict[str, Any]:
        """Return the message as the chat completions API writes it, each image as ``written_image`` does."""
        written: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.parts:
            written["content"] = [
                {"type": "text", "text": part} if isinstance(part, str) else written_image(part) for part in self.parts
            ]
        if self.reasoning:
            written["reasoning_content"] = self.reasoning
        if self.tool_calls:
            written["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        optional = {"tool_call_id": self.tool_call_id, "name": self.name}
        return written | {key: text for key, text in optional.items() if text}

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates take it: arguments of calls as objects."""
        written = self.as_dict(lambda _: {"type": "image"})
        for call in written.get("tool_calls", ()):
            with contextlib.suppress(ValueError, RecursionError):
                arguments = json.loads(call["function"]["arguments"])
                if isinstance(arguments, dict):
                    call["function"]["arguments"] = arguments
        return written


def root_key(tools: Sequence[Any]) -> bytes:
    return _digest(b"root", canonical_json(list(tools)))


def next_key(key: bytes, message: Message) -> bytes:
    """Return the key of a conversation with one more message that the policy did not sample."""
    calls = [(call.name, canonical_arguments(call.arguments)) for call in message.tool_calls]
    shown = [part if isinstance(part, str) else ("image", _name(part)) for part in message.parts]
    texts = (message.role, message.content, message.reasoning, message.tool_call_id, message.name, repr(calls))
    return _digest(key, *texts, *((repr(shown),) if shown else ()))


def _name(image: bytes | AdmittedImage) -> str:
    return image.sha256 if isinstance(image, AdmittedImage) else hashlib.sha256(image).hexdigest()


def _digest(key: bytes, *texts: str) -> bytes:
    """Return a digest of texts, with their lengths: no two lists of texts have the same bytes."""
    joined = f"{[*map(len, texts)]}{''.join(texts)}"
    return hashlib.blake2b(key + joined.encode("utf-8", "surrogatepass"), digest_size=_KEY_BYTES).digest()


def canonical_json(value: Any) -> str:
    """Return one text for all spellings of a JSON value: key order, spacing, escapes, ``1e3`` and ``1000.0``."""
    return json.dumps(_canonical(value), sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _canonical(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {key: _canonical(element) for key, element in value.items()}
    if isinstance(value, list):
        return [_canonical(element) for element in value]
    return value


def canonical_arguments(arguments: str) -> str:
    """Return a call's arguments in canonical form; what is not JSON stays as it is."""
    try:
        return canonical_json(json.loads(arguments))
    except (ValueError, RecursionError):
        return arguments


def same_arguments(sent: str, received: str) -> bool:
    """Return True if a client sent the arguments of a call back unchanged, in any spelling of JSON."""
    return sent == received or canonical_arguments(sent) == canonical_arguments(received)


def similar_arguments(sent: str, received: str) -> bool:
    """Return True if arguments differ only in how scalars are written: ``false``, ``"False"``; ``1``, ``"1.0"``."""
    try:
        one, other = json.loads(sent), json.loads(received)
        return bool(_plain(one) == _plain(other))
    except (ValueError, RecursionError):
        return sent.strip() == received.strip()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(element) for key, element in value.items()}
    if isinstance(value, list):
        return [_plain(element) for element in value]
    if isinstance(value, str):
        text = value.strip()
        if text.lower() in _WORDS:
            return ("word", _WORDS[text.lower()])
        try:
            return ("number", float(text))
        except ValueError:
            return ("text", text)
    if isinstance(value, bool) or value is None:
        return ("word", value)
    return ("number", float(value))


@dataclass(frozen=True, slots=True)
class AgentRequest:
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()  # as the chat completions API writes them
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    reads_calls: bool = True  # False: tool_choice is "none"
    conversation: Declared = ""
    overruled: tuple[str, ...] = ()  # fields whose values the task's sampling replaces, or that have no effect here


@dataclass(frozen=True, slots=True)
class Lenience:
    """What a request may hold that has no counterpart here; it is left out, and named in `AgentRequest.overruled`."""

    drops_unknown: bool = False  # kinds of tools and items
    ignores_constraints: bool = False  # of decoding


STRICT = Lenience()


@dataclass(frozen=True, slots=True)
class RetryMark:
    digest: bytes  # of path and body
    key: str | None = None  # the Idempotency-Key header
    is_retry: bool = False  # a client library counts it as a retry
