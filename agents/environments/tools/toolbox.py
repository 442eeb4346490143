"""The tools of an environment: every call gets a text, whatever is wrong with it.

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
import inspect
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from penstock.agents.environments.tools.tool import Cut, Tool, ToolEpisode, ToolError, ToolUnavailable, shortened
from penstock.agents.proxy.messages import Message, ToolCall

_SHOWN = 100  # characters of what the policy wrote that an error repeats
BAD_CALLS = ("unknown_tools", "bad_arguments")  # the policy's fault, for which a format penalty is due


@dataclass(frozen=True, slots=True)
class CallLimits:
    deadline_s: float
    max_output_chars: int
    cut: Cut


@dataclass(frozen=True, slots=True)
class Answered:
    messages: tuple[Message, ...]
    counts: Counter[str]


@dataclass(slots=True)
class Toolbox:
    tools: dict[str, Tool]
    limits: CallLimits
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
        self, calls: Sequence[ToolCall], allowed: int, episode: ToolEpisode, own: Mapping[str, Tool]
    ) -> Answered:
        """Return a text for each call, in order; the first ``allowed`` of them run beside each other. Raises ToolUnavailable.

        ``own``: tools that the episode has besides.
        """
        known = {**self.tools, **own}
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
            texts.append(shortened(text, self.limits.max_output_chars, self.limits.cut))
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
            return f"error: {tool.name} gave no answer within {self.limits.deadline_s:g} s", "timed_out_calls"
        except ToolUnavailable:
            raise
        except ToolError as err:
            return f"error: {err}", "tool_errors"
        except Exception as err:  # noqa: BLE001 - an author's code, with arguments of any kind
            return f"error: {type(err).__name__}: {err}", "tool_errors"
        return text.encode("utf-8", "replace").decode(), ""

    async def _call(self, tool: Tool, arguments: Any, episode: ToolEpisode) -> str:
        place = self._places.setdefault(tool.name, asyncio.Semaphore(tool.max_running))
        await place.acquire()
        if inspect.iscoroutinefunction(tool.call):
            deadline_s = None if tool.ends_calls else self.limits.deadline_s
            try:
                return _checked(tool, await _within(tool.call(arguments, episode), deadline_s))
            finally:
                place.release()
        if tool.name not in self._threads:
            self._threads[tool.name] = ThreadPoolExecutor(tool.max_running, thread_name_prefix=f"tool-{tool.name}")
        threads = self._threads[tool.name]
        running = asyncio.get_running_loop().run_in_executor(threads, tool.call, arguments, episode)
        running.add_done_callback(lambda done: _free(done, place))  # a thread that goes on keeps its place
        return _checked(tool, await _within(asyncio.shield(running), self.limits.deadline_s))


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
    return "; ".join(f"{'.'.join(map(str, one['loc'])) or 'all'}: {one['msg'][:_SHOWN]}" for one in errors[:3])
