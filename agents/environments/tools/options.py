"""Options of the environment `tools`, and how its final answers are compared with the ground truth."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from penstock.agents.environments.adapters.mcp_servers.sessions import McpServer, ServerLimits, ServerName
from penstock.agents.environments.games.actions import PatternOptions
from penstock.agents.environments.tools.tool import Cut

Scoring = Literal["none", "text", "number"]

_NUMBER = re.compile(r"[+-]?([0-9]{1,100}(\.[0-9]{0,100})?|\.[0-9]{1,100})")
_TOLERANCE = Fraction(1, 10**6)  # relative, of numbers that are not whole


def is_right(answer: str, truth: Any, scoring: Scoring) -> bool:
    """Return True if an answer is the ground truth, or one of a list of them.

    ``text``: equal texts, whatever the case and the white space. ``number``: equal numbers; one that is not whole within 1e-6 of it.

    Raises ValueError for a ground truth that no answer can be compared with.
    """
    wanted = truth if isinstance(truth, list) else [truth]
    if not wanted or any(isinstance(one, (dict, list)) or one is None for one in wanted):
        raise ValueError(f"ground_truth is {str(truth)[:100]!r}, expected a text, a number, or a list of such")
    return any(_EQUAL[scoring](answer, str(one)) for one in wanted)


def _same_text(answer: str, truth: str) -> bool:
    return " ".join(answer.split()).casefold() == " ".join(truth.split()).casefold()


def _same_number(answer: str, truth: str) -> bool:
    wanted, given = _number(truth), _number(answer)
    if wanted is None:
        raise ValueError(f"ground_truth is {truth[:100]!r}, expected a number")
    if given is None:
        return False
    return given == wanted if wanted.denominator == 1 else abs(given - wanted) <= _TOLERANCE * abs(wanted)


def _number(text: str) -> Fraction | None:
    plain = text.strip().replace(",", "").rstrip(".")
    return Fraction(plain) if _NUMBER.fullmatch(plain) else None


_EQUAL: Mapping[str, Callable[[str, str], bool]] = {"text": _same_text, "number": _same_number}


class ToolServer(McpServer):
    tools: list[str] = Field(
        default_factory=list, description="Those of its tools that the policy may call; empty: all."
    )


class ToolsOptions(PatternOptions, ServerLimits):
    """Options of ``tools``."""

    tools: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        max_length=64,
        description="The tools: built-in ones by name, or your own as module:ATTRIBUTE or file.py:ATTRIBUTE, each with a table of its options.",
    )
    servers: dict[ServerName, ToolServer] = Field(
        default_factory=dict,
        max_length=16,
        description="MCP servers by name, whose tools are SERVER__TOOL: command, folder, variables and pass_variables, or url, token_file and "
        "protocol; and tools.",
    )
    system: str = Field(
        "",
        description="Text before the row's system message, for example how to call tools; {tools} in it becomes their JSON Schemas, one a line.",
    )
    answer: Scoring = Field(
        "none",
        description="How the last answer is compared with the row's ground truth for a reward of 1: text, number, or none, which gives "
        "no reward for it.",
    )
    call_reward: float = Field(
        0.0, le=0, allow_inf_nan=False, description="Reward of every call, 0 or less: what a call costs."
    )
    max_calls: int = Field(
        64, ge=1, le=4096, description="Calls of one episode that are answered; others get an error."
    )
    max_parallel_calls: int = Field(
        8, ge=1, le=64, description="Calls of one answer, which run beside each other; others get an error."
    )
    min_turns: int = Field(
        1,
        ge=1,
        description="An answer without a call that comes before this turn is not the last: the policy is asked to call a tool.",
    )
    repeat_limit: int = Field(
        0, ge=0, description="The episode ends when the same call was made so often; 0: it does not."
    )
    note: str = Field(
        "",
        description="Text after each reply; {turn} in it becomes the number of the next answer, {turns_left} how many are left with it.",
    )
    call_deadline_s: float = Field(
        30.0, gt=0, description="Seconds of one call; less than reply_deadline_s of the environment."
    )
    max_output_chars: int = Field(
        4000, ge=1, le=1_000_000, description="Characters of an answer of a tool that the policy reads."
    )
    output_cut: Cut = Field("end", description="Where a longer answer is shortened: end, middle, start.")

    @model_validator(mode="after")
    def _has_tools(self) -> Self:
        if not (self.tools or self.servers):
            raise ValueError("write tools, or servers that have some")
        return self
