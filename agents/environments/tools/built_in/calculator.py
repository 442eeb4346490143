"""`calculator`: the value of an expression, exact until it is written down; nothing is executed."""

from __future__ import annotations

import decimal
from fractions import Fraction

from pydantic import Field

from penstock.agents.environments.games.arithmetic import evaluate
from penstock.agents.environments.tools.tool import Tool, ToolArguments, ToolEpisode, ToolError

_DIGITS = 12  # of a value that is not whole


class CalculatorArguments(ToolArguments):
    expression: str = Field(description="Numbers, + - * / // % ** and parentheses, for example (3.5 + 4) * 2.")


class CalculatorTool(Tool):
    name = "calculator"
    description = "Return the value of an arithmetic expression."
    arguments = CalculatorArguments

    def call(self, arguments: CalculatorArguments, episode: ToolEpisode) -> str:
        try:
            return written(evaluate(arguments.expression))
        except ValueError as err:
            raise ToolError(str(err)) from None


def written(value: Fraction) -> str:
    """Return a whole number with all its digits, another one with 12 significant digits."""
    if value.denominator == 1:
        return str(value)
    with decimal.localcontext(prec=_DIGITS):
        return str((decimal.Decimal(value.numerator) / decimal.Decimal(value.denominator)).normalize())


CALCULATOR_TOOL = CalculatorTool()
