"""`calculator`: arithmetic, and a calculator to call.

The expression follows from the seed. The policy may call the tool ``calculator``; an answer without a call ends the episode, with
1 for the right number.
"""

from __future__ import annotations

import json
import random
import re
from fractions import Fraction
from typing import Any

from pydantic import Field

from penstock.agents.environments.games.actions import ActionOptions, Game, find_action, opening
from penstock.agents.environments.games.arithmetic import evaluate
from penstock.agents.environments.play import Play, Reply, Row
from penstock.agents.proxy.messages import Message, ToolCall

_NUMBER = re.compile(r"-?[0-9]{1,100}")
_SAID = "Return the value of an expression of whole numbers, + - * / and parentheses."
_SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
_FUNCTION = {"name": "calculator", "description": _SAID, "parameters": _SCHEMA}
_TOOL: dict[str, Any] = {"type": "function", "function": _FUNCTION}


class CalculatorOptions(ActionOptions):
    """Options of ``calculator``."""

    numbers: int = Field(3, ge=2, le=16, description="How many numbers the expression has.")
    largest: int = Field(99, ge=1, le=9_999, description="The numbers are between 1 and this.")
    max_calls: int = Field(4, ge=1, le=64, description="Calls of one answer that are computed.")


def draw_expression(seed: int, numbers: int, largest: int) -> str:
    draw = random.Random(seed)  # noqa: S311  a game, no secret
    text = str(draw.randint(1, largest))
    for _ in range(numbers - 1):
        text += f" {draw.choice('+-*')} {draw.randint(1, largest)}"
    return text


class CalculatorPlay(Play):
    tools = (_TOOL,)

    def __init__(self, seed: int, row: Row, options: CalculatorOptions) -> None:
        self._row, self._options = row, options
        self._expression = draw_expression(seed, options.numbers, options.largest)

    def start(self) -> tuple[Message, ...]:
        rules = "What is the value of the expression? Use the calculator, then answer with the number alone."
        return opening(self._row, self._options, rules, self._expression)

    def step(self, answer: Message) -> Reply:
        calls = answer.tool_calls
        if calls:
            replies = [self._called(call, n) for n, call in enumerate(calls)]
            return Reply(tuple(replies), parts={"success": 0.0, "calls": float(len(calls))})
        number = find_action(answer.content, self._options)
        if not _NUMBER.fullmatch(number):
            return Reply(reward=self._options.format_penalty, is_done=True, parts={"success": 0.0, "malformed": 1.0})
        is_right = Fraction(number) == evaluate(self._expression)
        return Reply(reward=float(is_right), is_done=True, parts={"success": float(is_right)})

    def _called(self, call: ToolCall, n: int) -> Message:
        try:
            text = (
                _calculate(call)
                if n < self._options.max_calls
                else f"not done: more than {self._options.max_calls} calls"
            )
        except ValueError as err:
            text = f"error: {err}"
        return Message("tool", text, tool_call_id=call.id)


def _calculate(call: ToolCall) -> str:
    if call.name != "calculator":
        raise ValueError(f"there is no tool {call.name[:50]!r}, only calculator")
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        raise ValueError("the arguments are not JSON") from None
    expression = arguments.get("expression") if isinstance(arguments, dict) else None
    if not isinstance(expression, str):
        raise ValueError('expected the arguments {"expression": "..."}')  # noqa: TRY004  one kind of error, told to the policy
    return str(evaluate(expression))


class Calculator(Game):
    name = "calculator"
    options = CalculatorOptions
    play_class = CalculatorPlay


CALCULATOR = Calculator()
