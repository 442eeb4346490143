"""Run grader processes, of the math reward or of patterns and schemas: persistent, one job at a time each, killed when they overrun.

The outcome of a job that does not finish depends on the cause:

- while the *gold* answer is parsed: `GraderFailed`; the cause is the row or the machine.
- after that, killed by its CPU timer, out of memory or crashed in two attempts: this completion alone is the
  cause; its verdict is wrong (`EXHAUSTED`).
- anything else (killed by another process, wall time ran out on a busy machine): `GraderFailed`.

The answers of one group share a budget of CPU time, so that a group of hostile answers does not occupy a grader for
minutes; an answer always gets a tenth of the limit, hundreds of times what an ordinary one takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import structlog

from penstock.reward_service.errors import GraderFailed
from penstock.reward_service.rewards.math_answer import Graded

_START_S = 120.0  # importing sympy or a user's libraries on a busy machine
_LINE_BYTES = 64 * 1024**2  # longest line that is read
log = structlog.get_logger("reward_service.grader_pool")
_WALL_FACTOR = 6.0  # wall seconds granted for each CPU second
_WALL_MIN_S = 20.0
EXIT_S = 5.0  # from a closed pipe to the exit of its process
_TRIES = 2
_GROUP_SHARE = 2.0  # the budget of a group, in limits of one answer
_LEAST_SHARE = 0.1  # what an answer gets when the budget is spent
_BY_ANSWER = {-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT}
_KNOWN_VERDICTS = 4096  # the same wrong answers repeat within a run
_KNOWN_CHARS = 16_384  # longer texts are not remembered
_SETTINGS_PREFIX = "PENSTOCK_"  # of variables that may hold passwords; a grader reads what a policy wrote


ProcessT = TypeVar("ProcessT", bound="JsonProcess")


class JsonProcess:
    """One child process, without the settings of this one. Its first line says that it is ready.

    Every wait ends: `start` has a deadline, and the caller of `read` sets one.
    """

    def __init__(self, command: Sequence[str], **environ: str) -> None:
        """``environ``: further variables of its environment."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS_PREFIX)}
        self._command, self._environ = command, {**ours, **environ}
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def start(self) -> dict[str, Any]:
        async with asyncio.timeout(_START_S):
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                env=self._environ, limit=_LINE_BYTES, start_new_session=True,
            )  # fmt: skip
            return await self.read()

    async def write(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        await self._process.stdin.drain()

    async def read(self) -> dict[str, Any]:
        """Return the next line; raises EOFError at the end of stdout, ValueError for anything but a JSON object."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise EOFError
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError(f"expected a JSON object, got {str(message)[:80]!r}")  # noqa: TRY004 as json.loads
        return message

    async def kill(self, *, after_s: float = 0.0) -> int | None:
        """End the process, ``after_s`` seconds after its stdin was closed; returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        if process.stdin is not None:
            process.stdin.close()
        if after_s:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), after_s)
        if process.returncode is None:  # of one that has exited, the process id may belong to another by now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started too
        return await process.wait()


class ProcessPool(Generic[ProcessT]):
    """Processes that are lent to one caller at a time; each starts at its first use."""

    def __init__(self, processes: Sequence[ProcessT], *, exit_s: float = 0.0) -> None:
        """``exit_s``: how long a process may take to exit when the pool is closed, before it is killed."""
        self._all, self._exit_s = processes, exit_s
        self._idle: asyncio.LifoQueue[ProcessT] = asyncio.LifoQueue()
        for process in processes:
            self._idle.put_nowait(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._all if process.pid]

    @contextlib.asynccontextmanager
    async def lend(self) -> AsyncIterator[ProcessT]:
        process = await self._idle.get()
        try:
            yield process
        finally:
            self._idle.put_nowait(process)

    async def close(self) -> None:
        await asyncio.gather(*(process.kill(after_s=self._exit_s) for process in self._all))


def describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def command(kind: str) -> list[str]:
    return [sys.executable, "-P", "-m", f"penstock.reward_service.graders.{kind}_grader"]


@dataclass(slots=True)
class _GraderEnded(Exception):
    gold_parsed: bool
    by_answer: bool
    how: str


class _Grader(JsonProcess):
    async def grade(self, gold: str, answer: str, *, gold_cpu_s: float, cpu_s: float) -> tuple[Graded, float]:
        gold_parsed = False
        try:
            if self.pid is None:
                await self.start()
            async with asyncio.timeout(2 * max(_WALL_MIN_S, _WALL_FACTOR * gold_cpu_s)):
                await self.write({"gold": gold, "answer": answer, "gold_cpu_s": gold_cpu_s, "cpu_s": cpu_s})
                if not (await self._said(gold_parsed=False))["gold"]:
                    return Graded.GOLD_UNREADABLE, 0.0
                gold_parsed = True
                said = await self._said(gold_parsed=True)
                if "exhausted" in said:
                    return Graded.EXHAUSTED, said["cpu_s"]
                return Graded.RIGHT if said["equal"] else Graded.WRONG, said["cpu_s"]
        except _GraderEnded:
            raise
        except TimeoutError:
            await self.kill()
            raise _GraderEnded(gold_parsed, False, "did not answer in time and was killed") from None
        except (EOFError, ConnectionError, ValueError, KeyError) as err:
            code = await self.kill(after_s=EXIT_S)  # its exit code says who killed it
            raise _GraderEnded(gold_parsed, False, f"{describe_exit(code)} ({type(err).__name__})") from None
        except BaseException:  # cancelled before the answer came: its next line would answer the wrong question
            await self.kill()
            raise

    async def _said(self, *, gold_parsed: bool) -> dict[str, Any]:
        said = await self.read()
        if "ended" in said:  # its child, which has a successor already
            raise _GraderEnded(gold_parsed, said["ended"] in _BY_ANSWER, describe_exit(said["ended"]))
        return said


class GraderPool(ProcessPool[_Grader]):
    def __init__(self, num_workers: int, *, cpu_s: float, kind: str = "math") -> None:
        """Grant every answer ``cpu_s`` seconds of CPU time; ``graders/KIND_grader.py`` is what runs."""
        super().__init__([_Grader(command(kind), PYTHONHASHSEED="0") for _ in range(num_workers)])
        self._cpu_s = cpu_s
        self._kind = kind
        self._known: OrderedDict[tuple[str, str], Graded] = OrderedDict()

    async def equal(self, gold: str, answer: str) -> Graded:
        graded, _ = await self.equal_within(gold, answer, self._cpu_s)
        return graded

    def for_group(self) -> Callable[[str, str], Awaitable[Graded]]:
        """Return `equal` for the answers of one group, which share a budget of CPU time."""
        left_s = _GROUP_SHARE * self._cpu_s

        async def equal(gold: str, answer: str) -> Graded:
            nonlocal left_s
            limit_s = min(self._cpu_s, max(_LEAST_SHARE * self._cpu_s, left_s))
            graded, used_s = await self.equal_within(gold, answer, limit_s)
            left_s -= used_s
            return graded

        return equal

    async def equal_within(self, gold: str, answer: str, cpu_s: float) -> tuple[Graded, float]:
        """Return the verdict on an answer that may cost ``cpu_s``, and what it cost; raises GraderFailed."""
        known = self._known.get((gold, answer))
        if known is not None:
            return known, 0.0
        graded, used_s = await self._ask(gold, answer, cpu_s)
        is_final = graded is not Graded.EXHAUSTED or cpu_s >= self._cpu_s
        if is_final and len(gold) + len(answer) <= _KNOWN_CHARS:
            self._known[gold, answer] = graded
        if len(self._known) > _KNOWN_VERDICTS:
            self._known.popitem(last=False)
        return graded, used_s

    async def _ask(self, gold: str, answer: str, cpu_s: float) -> tuple[Graded, float]:
        problem = ""
        for _ in range(_TRIES):
            try:
                async with self.lend() as grader:
                    return await grader.grade(gold, answer, gold_cpu_s=self._cpu_s, cpu_s=cpu_s)
            except _GraderEnded as end:
                log.warning("grader ended", how=end.how, gold_parsed=end.gold_parsed, answer=answer[:200])
                if not end.gold_parsed and end.by_answer:
                    return Graded.GOLD_UNREADABLE, 0.0  # the truth alone exhausts the grader
                if not (end.gold_parsed and end.by_answer):
                    part = "answer" if end.gold_parsed else "ground truth"
                    problem = f"{end.how} while grading the {part}"
        if problem:
            raise GraderFailed(f"the {self._kind} grader {problem}; ground truth {gold[:80]!r}, answer {answer[:80]!r}")
        return Graded.EXHAUSTED, _TRIES * cpu_s
