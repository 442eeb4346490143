"""Grader processes, of the math reward or of patterns and schemas: persistent, one job at a time each, killed when they overrun.

The outcome of a job that does not finish depends on the cause:

- while the *gold* answer is parsed: `GraderFailed`; the cause is the row or the machine.
- after that, killed by its own CPU timer in two attempts: this completion alone is the cause; its verdict is wrong
  (`EXHAUSTED`).
- anything else (killed by another process, wall time ran out on a busy machine): `GraderFailed`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import OrderedDict
from dataclasses import dataclass

import structlog

from penstock.reward_service.errors import GraderFailed
from penstock.reward_service.graders.json_process import JsonProcess, describe_exit
from penstock.reward_service.rewards.math_answer import Graded

log = structlog.get_logger("reward_service.grader_pool")

_WALL_FACTOR = 6.0  # wall seconds granted for each CPU second
_WALL_MIN_S = 20.0
_EXIT_S = 5.0  # from a closed pipe to the exit of its process
_TRIES = 2
_KNOWN_VERDICTS = 4096  # the same wrong answers repeat within a run
_KNOWN_CHARS = 16_384  # longer texts are not remembered
_SETTINGS_PREFIX = "PENSTOCK_"  # of variables that may hold passwords; a grader reads what a policy wrote


@dataclass(slots=True)
class _GraderEnded(Exception):
    gold_parsed: bool
    out_of_cpu: bool
    how: str


class GraderPool:
    """``num_workers`` grader processes, started with the first job. Close it."""

    def __init__(self, num_workers: int, *, cpu_s: float, kind: str = "math") -> None:
        """Grant every answer ``cpu_s`` seconds of CPU time; ``graders/KIND_grader.py`` is what runs."""
        self._cpu_s = cpu_s
        self._kind = kind
        self._idle: asyncio.LifoQueue[_Grader] = asyncio.LifoQueue()
        self._all = [_Grader(f"penstock.reward_service.graders.{kind}_grader") for _ in range(num_workers)]
        for grader in self._all:
            self._idle.put_nowait(grader)
        self._known: OrderedDict[tuple[str, str], Graded] = OrderedDict()

    @property
    def pids(self) -> list[int]:
        """Process ids of the graders that run."""
        return [grader.pid for grader in self._all if grader.pid]

    async def equal(self, gold: str, answer: str) -> Graded:
        """Return whether an answer equals the gold answer; raises GraderFailed."""
        known = self._known.get((gold, answer))
        if known is None:
            known = await self._ask(gold, answer)
            if len(gold) + len(answer) <= _KNOWN_CHARS:
                self._known[gold, answer] = known
            if len(self._known) > _KNOWN_VERDICTS:
                self._known.popitem(last=False)
        return known

    async def _ask(self, gold: str, answer: str) -> Graded:
        problem = ""
        for _ in range(_TRIES):
            grader = await self._idle.get()
            try:
                return await grader.grade(gold, answer, self._cpu_s)
            except _GraderEnded as end:
                log.warning("grader ended", how=end.how, gold_parsed=end.gold_parsed, answer=answer[:200])
                if not (end.gold_parsed and end.out_of_cpu):
                    part = "answer" if end.gold_parsed else "ground truth"
                    problem = f"{end.how} while grading the {part}"
            finally:
                self._idle.put_nowait(grader)
        if problem:
            raise GraderFailed(f"the {self._kind} grader {problem}; ground truth {gold[:80]!r}, answer {answer[:80]!r}")
        return Graded.EXHAUSTED

    async def close(self) -> None:
        """End all graders."""
        for grader in self._all:
            await grader.kill()


class _Grader:
    """One process, started when it is needed and started again after it ended."""

    def __init__(self, module: str) -> None:
        command = [sys.executable, "-P", "-m", module]
        ours = {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS_PREFIX)}
        self._process = JsonProcess(command, environ={**ours, "PYTHONHASHSEED": "0"})

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def grade(self, gold: str, answer: str, cpu_s: float) -> Graded:
        gold_parsed = False
        try:
            if self._process.pid is None:
                await self._process.start()
            async with asyncio.timeout(2 * max(_WALL_MIN_S, _WALL_FACTOR * cpu_s)):
                await self._process.write({"gold": gold, "answer": answer, "cpu_s": cpu_s})
                if not (await self._process.read())["gold"]:
                    return Graded.GOLD_UNREADABLE
                gold_parsed = True
                return Graded.RIGHT if (await self._process.read())["equal"] else Graded.WRONG
        except TimeoutError:
            await self.kill()
            raise _GraderEnded(gold_parsed, False, "did not answer in time and was killed") from None
        except (EOFError, ConnectionError, ValueError, KeyError) as err:
            code = await self._process.kill(after_s=_EXIT_S)  # its own exit code says who killed it
            out_of_cpu = code == -signal.SIGPROF
            raise _GraderEnded(gold_parsed, out_of_cpu, f"{describe_exit(code)} ({type(err).__name__})") from None
        except BaseException:  # cancelled before the answer came: its next line would answer the wrong question
            await self.kill()
            raise

    async def kill(self) -> None:
        await self._process.kill()
