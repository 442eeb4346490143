"""The tools of the environment `tools`, and their options: every call gets a text, whatever is wrong with it.

| a call                                                    | the policy reads                      | counted as         |
|-----------------------------------------------------------|---------------------------------------|--------------------|
| of a tool that does not exist                             | an error, with the names of the tools | `unknown_tools`    |
| with arguments that are no JSON, or not those of the tool | an error that names the field         | `bad_arguments`    |
| whose tool raises                                         | the error                             | `tool_errors`      |
| without an answer after `call_deadline_s`                 | an error                              | `timed_out_calls`  |
| beyond `max_parallel_calls` or `max_calls`                | an error                              | `refused_calls`    |
| with an answer longer than `max_output_chars`             | its beginning, its end or both        | `shortened_outputs`|

A tool that raises ToolUnavailable, or answers with something else than a text, fails the episode: it is restarted.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from penstock.agents.environments.adapters.mcp_sessions import McpServer, ServerLimits, ServerName
from penstock.agents.environments.games.actions import PatternOptions
from penstock.agents.environments.play import caught
from penstock.agents.environments.shared_options import CallOptions
from penstock.agents.environments.tools.tool import Tool, ToolEpisode, ToolError, ToolUnavailable
from penstock.agents.proxy.messages import Message, ToolCall

Scoring = Literal["none", "text", "number"]

_NUMBER = re.compile(r"[+-]?([0-9]{1,100}(\.[0-9]{0,100})?|\.[0-9]{1,100})")
_TOLERANCE = Fraction(1, 10**6)  # relative, of numbers that are not whole
_SHOWN = 100  # characters of what the policy wrote that an error repeats
BAD_CALLS = ("unknown_tools", "bad_arguments")  # the policy's fault, for which a format penalty is due


def is_right(answer: str, truth: Any, scoring: Scoring) -> bool:
    """Return True if an answer is the ground truth, or one of a list of them.

    ``text``: equal texts, whatever the case and the white space. ``number``: equal numbers; one that is not whole within 1e-6 of it.

    Raises ValueError for a ground truth that no answer can be compared with.
    """
    wanted = truth if isinstance(truth, list) else [truth]
    if not wanted or any(isinstance(expected, (dict, list)) or expected is None for expected in wanted):
        raise ValueError(f"ground_truth is {str(truth)[:100]!r}, expected a text, a number, or a list of such")
    return any(_EQUAL[scoring](answer, str(expected)) for expected in wanted)


def _same_text(answer: str, truth: str) -> bool:
    return " ".join(answer.split()).casefold() == " ".join(truth.split()).casefold()


def _same_number(answer: str, truth: str) -> bool:
    wanted, actual = _number(truth), _number(answer)
    if wanted is None:
        raise ValueError(f"ground_truth is {truth[:100]!r}, expected a number")
    if actual is None:
        return False
    return actual == wanted if wanted.denominator == 1 else abs(actual - wanted) <= _TOLERANCE * abs(wanted)


def _number(text: str) -> Fraction | None:
    plain = text.strip().replace(",", "").rstrip(".")
    return Fraction(plain) if _NUMBER.fullmatch(plain) else None


_EQUAL: Mapping[str, Callable[[str, str], bool]] = {"text": _same_text, "number": _same_number}


class ToolServer(McpServer):
    tools: list[str] = Field(
        default_factory=list, description="Those of its tools that the policy may call; empty: all."
    )


class ToolsOptions(PatternOptions, ServerLimits, CallOptions):
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
    max_output_chars: int = Field(
        4000, ge=1, le=1_000_000, description="Characters of an answer of a tool that the policy reads."
    )

    @model_validator(mode="after")
    def _has_tools(self) -> Self:
        if not (self.tools or self.servers):
            raise ValueError("write tools, or servers that have some")
        return self


@dataclass(frozen=True, slots=True)
class Answered:
    messages: tuple[Message, ...]
    counts: Counter[str]


@dataclass(slots=True)
class Toolbox:
    tools: dict[str, Tool]
    limits: CallOptions
    _places: dict[str, asyncio.Semaphore] = field(init=False, default_factory=dict)
    _threads: dict[str, ThreadPoolExecutor] = field(init=False, default_factory=dict)  # of plain tools
    _preparing: threading.Lock = field(init=False, default_factory=threading.Lock)
    _is_prepared: bool = field(init=False, default=False)

    def prepare(self) -> None:
        with self._preparing:
            if not self._is_prepared:
                for tool in self.tools.values():
                    tool.prepare()
                self._is_prepared = True

    async def close(self) -> None:
        for tool in self.tools.values():
            await tool.close()
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    def schemas(self) -> tuple[dict[str, Any], ...]:
        return tuple(tool.schema() for tool in self.tools.values())

    async def answer(
        self, calls: Sequence[ToolCall], allowed: int, episode: ToolEpisode, episode_tools: Mapping[str, Tool]
    ) -> Answered:
        """Return a text for each call, in order; the first ``allowed`` of them run beside each other. Raises ToolUnavailable.

        ``episode_tools``: tools that the episode has besides.
        """
        known = {**self.tools, **episode_tools}
        try:
            async with asyncio.TaskGroup() as running:
                tasks = [running.create_task(self._answer(call, episode, known)) for call in calls[:allowed]]
        except* ToolUnavailable as failures:
            raise failures.exceptions[0] from None
        counts: Counter[str] = Counter(calls=len(calls))
        texts: list[str] = []
        for task in tasks:
            text, problem = task.result()
            counts.update([problem] if problem else [])
            counts.update(["shortened_outputs"] if len(text) > self.limits.max_output_chars else [])
            texts.append(self.limits.shortened(text))
        refused = len(calls) - len(tasks)
        if refused:
            counts["refused_calls"] = refused
            texts += ["error: not done, because there were too many calls"] * refused
        messages = [Message("tool", text, tool_call_id=call.id) for call, text in zip(calls, texts, strict=True)]
        return Answered(tuple(messages), counts)

    async def _answer(self, call: ToolCall, episode: ToolEpisode, known: Mapping[str, Tool]) -> tuple[str, str]:
        tool = known.get(call.name)
        if tool is None:
            return f"error: there is no tool {call.name[:_SHOWN]!r}; tools: {', '.join(known)}", "unknown_tools"
        try:
            arguments = tool.arguments.model_validate_json(call.arguments)
        except ValueError as err:  # a ValidationError is one
            return f"error: wrong arguments of {tool.name}: {_problems(err)}", "bad_arguments"
        try:
            text = await self._call(tool, arguments, episode)
        except TimeoutError:
            return f"error: {tool.name} gave no answer within {self.limits.call_deadline_s:g} s", "timed_out_calls"
        except ToolUnavailable:
            raise
        except ToolError as err:
            return f"error: {err}", "tool_errors"
        except (Exception, SystemExit) as err:  # noqa: BLE001 - an author's code, with arguments of any kind
            return f"error: {type(err).__name__}: {err}", "tool_errors"
        return text.encode("utf-8", "replace").decode(), ""

    async def _call(self, tool: Tool, arguments: Any, episode: ToolEpisode) -> str:
        place = self._places.setdefault(tool.name, asyncio.Semaphore(tool.max_running))
        await place.acquire()
        if inspect.iscoroutinefunction(tool.call):
            deadline_s = None if tool.ends_calls else self.limits.call_deadline_s
            try:
                return _checked(tool, await _within(tool.call(arguments, episode), deadline_s))
            finally:
                place.release()
        if tool.name not in self._threads:
            self._threads[tool.name] = ThreadPoolExecutor(tool.max_running, thread_name_prefix=f"tool-{tool.name}")
        threads = self._threads[tool.name]
        made = functools.partial(tool.call, arguments, episode)
        running = asyncio.get_running_loop().run_in_executor(threads, caught, made)
        running.add_done_callback(lambda done: _free(done, place))  # a thread that goes on keeps its place
        value, error = await _within(asyncio.shield(running), self.limits.call_deadline_s)
        if error is not None:
            known = isinstance(error, (ToolError, ToolUnavailable))
            raise error if known else ToolError(f"{type(error).__name__}: {error}") from error
        return _checked(tool, value)


async def _within(answer: Any, deadline_s: float | None) -> Any:
    """Wait for an answer; a TimeoutError that the tool raises itself is not one of ours, unless there is none of ours."""
    limit = asyncio.timeout(deadline_s)
    try:
        async with limit:
            return await answer
    except TimeoutError as err:
        if deadline_s is None or limit.expired():
            raise
        raise ToolError(f"TimeoutError: {err}") from None


def _free(done: asyncio.Future[Any], place: asyncio.Semaphore) -> None:
    place.release()
    if not done.cancelled():
        done.exception()  # taken, so that asyncio does not report one that came after the deadline


def _checked(tool: Tool, value: Any) -> str:
    if not isinstance(value, str):
        raise ToolUnavailable(f"tool {tool.name} returned {type(value).__name__}, expected a text")
    return value


def _problems(err: ValueError) -> str:
    if not isinstance(err, ValidationError):
        return str(err)[:_SHOWN]
    errors = err.errors(include_input=False, include_url=False, include_context=False)
    return "; ".join(f"{'.'.join(map(str, error['loc'])) or 'all'}: {error['msg'][:_SHOWN]}" for error in errors[:3])
