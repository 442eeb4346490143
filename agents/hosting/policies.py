"""Policies that need no model, to try an environment: answers at random, or those of a script. Pure."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from penstock.agents.proxy.answer_formats.answer_format import ANSWER_FORMATS
from penstock.agents.proxy.messages import Message, ToolCall

_WORDS = re.compile(r"\w+")
_MAX_WORDS = 200  # of the last message, from its end
_ELEMENTS = 3


class Policy(Protocol):
    """Answers messages."""

    def answer(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Message | None:
        """Return the answer; None: it has no further one."""
        ...


class RandomPolicy:
    """Answers with a word or a number of the last message, or calls a tool with arguments that fit its schema."""

    def __init__(self, seed: int) -> None:
        """The same seed gives the same answers to the same messages."""
        self._random = random.Random(seed)  # noqa: S311 - not a secret

    def answer(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Message:
        """Return an answer; with tools, four of five are calls."""
        if tools and self._random.random() < 0.8:
            function = self._random.choice(list(tools))["function"]
            arguments = json.dumps(self._value(function.get("parameters") or {"type": "object"}))
            return Message(
                "assistant",
                tool_calls=(ToolCall(f"call_{self._random.getrandbits(48):x}", function["name"], arguments),),
            )
        words = _WORDS.findall(messages[-1].content)[-_MAX_WORDS:] or ["yes"]
        number = str(self._random.randint(0, 100))
        return Message(
            "assistant", self._random.choice([self._random.choice(words), self._random.choice(words), number])
        )

    def _value(self, schema: Mapping[str, Any]) -> Any:
        """Return a value of a JSON schema, as far as it says ``enum``, ``type``, ``properties``, ``items`` and bounds."""
        draw = self._random
        if schema.get("enum"):
            return draw.choice(schema["enum"])
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = draw.choice(kind)
        match kind:
            case "object":
                return {name: self._value(one) for name, one in schema.get("properties", {}).items()}
            case "array":
                return [self._value(schema.get("items") or {}) for _ in range(draw.randint(1, _ELEMENTS))]
            case "integer":
                return draw.randint(int(schema.get("minimum", 0)), int(schema.get("maximum", 100)))
            case "number":
                return round(draw.uniform(schema.get("minimum", 0.0), schema.get("maximum", 100.0)), 2)
            case "boolean":
                return draw.random() < 0.5
            case "null":
                return None
        return draw.choice(["a", "1", "1 + 1"])


class ScriptedPolicy:
    """Answers with the lines of a script, one after the other; calls of tools are written as the answer format says."""

    def __init__(self, lines: Sequence[str], answer_format: str) -> None:
        """Begin with the first line; raises ConfigError for an unknown answer format."""
        self._lines, self._format = iter(lines), ANSWER_FORMATS.find(answer_format).value
        self._calls = 0

    def answer(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Message | None:
        """Return the next line as an answer; None after the last one."""
        line = next(self._lines, None)
        if line is None:
            return None
        parsed = self._format.parse(line)
        self._calls += 1
        calls = tuple(
            ToolCall(f"call_{self._calls}_{number}", call.name, call.arguments)
            for number, call in enumerate(parsed.calls)
        )
        return Message("assistant", parsed.content, tool_calls=calls)
