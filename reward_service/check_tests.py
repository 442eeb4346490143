"""``python -m penstock.reward_service check-tests``: run the test programs of rows, and read their ground truths, before a run does.

Reads rows as JSON objects, one a line: ``place``, ``prompt``, ``data_source``, ``ground_truth``, ``extra_info``, the last two as values;
``reward`` where the ground truth is to be read, the name of the reward, null: that of the data source. Writes JSON objects, one a line:

- for each row that the reward `code` would score, in order of completion, ``{"place", "problem", "solution"}``. The problem is "" for tests
  that reject an empty program and one that returns nothing useful, and that accept the row's solution if it has one; the solution is that
  program or null;
- for each row of another built-in reward whose ground truth no answer can be compared with, ``{"place", "problem"}``;
- in either "failed", with an empty problem: why this machine could not try the row.

`penstock data check` and `penstock reward test` start it, because neither imports this service.
"""

from __future__ import annotations

import ast
import asyncio
import json
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, TextIO

from penstock.reward_service.errors import BadGroundTruth, GraderFailed, SandboxFailed, SandboxUnavailable
from penstock.reward_service.graders.grader_pool import GraderPool
from penstock.reward_service.program_tests import code_blocks, tests_of_row
from penstock.reward_service.program_tests.grade import SandboxPool
from penstock.reward_service.registry.built_in import BUILT_INS, BY_SOURCE
from penstock.reward_service.rewards import code
from penstock.reward_service.rewards.reward import GradedReward, PureReward
from penstock.sandbox import canary
from penstock.sandbox.zygote_command import Launch
from penstock.sandbox.zygote_process import Limits

EMPTY_PROGRAM = "pass"
_NUM_SLOTS, _GRADER_CPU_S = 2, 5.0
_TOGETHER = 64  # rows read ahead
_SOLUTIONS = ("canonical_solution", "reference_solution", "gold_standard_solution", "solution", "solutions", "code")
_CODE = ("assert ", "def test", "def check", "unittest")


async def check(rows: Iterable[str], out: TextIO) -> int:
    """Check rows and write the results; return the exit code. Raises SandboxUnavailable when no sandbox works here."""
    pool, grader = None, GraderPool(1, cpu_s=_GRADER_CPU_S)
    try:
        batch: list[dict[str, Any]] = []
        for line in rows:
            row = json.loads(line)
            if not is_code(row):
                if any((found := await _outcome(problem_of_truth(row, grader))).values()):
                    out.write(json.dumps({"place": row["place"], **found}) + "\n")
                continue
            if pool is None:  # a sandbox is tried where a row needs one
                probed = await asyncio.to_thread(canary.probe, "auto")
                if probed.kind is None:
                    raise SandboxUnavailable(str(probed))
                pool = SandboxPool(Launch(probed.kind), _NUM_SLOTS, Limits())
            batch.append(row)
            if len(batch) == _TOGETHER:
                await _check_batch(batch, pool, out)
                batch = []
        if pool is not None:
            await _check_batch(batch, pool, out)
    finally:
        await asyncio.gather(grader.close(), *([] if pool is None else [pool.close()]))
    return 0


async def problem_of_truth(row: Mapping[str, Any], grader: GraderPool) -> str:
    """Return why the truth of a row cannot be compared with any answer, by the built-in reward that scores it; "" if it can."""
    name = row.get("reward") or BY_SOURCE.get(row.get("data_source") or "")
    reward = BUILT_INS.get(BY_SOURCE.get(name, name)) if name and "reward" in row else None
    if reward is None or reward.default is None or not isinstance(reward, PureReward | GradedReward):
        return ""
    judge, truth = reward.bind(reward.default), row.get("ground_truth")
    try:
        if isinstance(reward, PureReward):
            judge(("",), truth, **({"extra": row.get("extra_info")} if reward.reads == "answer and columns" else {}))
        elif reward.grader == "math":
            await judge(("",), truth, grade=grader.equal)
    except BadGroundTruth as err:
        return str(err)
    return ""


async def _outcome(problem: Awaitable[str]) -> dict[str, str]:
    """Return the problem of a row; if this machine could not try it, the reason as "failed"."""
    try:
        return {"problem": await problem}
    except (GraderFailed, SandboxFailed) as err:
        return {"problem": "", "failed": str(err)}


async def _check_batch(rows: list[dict[str, Any]], pool: SandboxPool, out: TextIO) -> None:
    async def one(row: dict[str, Any]) -> None:
        program = solution(row)
        found = await _outcome(problem_of(row, program, pool))
        out.write(json.dumps({"place": row["place"], **found, "solution": program}) + "\n")
        out.flush()

    await asyncio.gather(*map(one, rows))


def is_code(row: Mapping[str, Any]) -> bool:
    """Return True for a row of a data set that the reward `code` scores, or one of unknown origin that holds tests."""
    source = row.get("data_source") or ""
    if source in BY_SOURCE:
        return BY_SOURCE[source] == code.NAME
    fields = tests_of_row.fields_of(row.get("ground_truth"), row.get("extra_info"))
    texts = [fields.get("test"), *_listed(fields.get("test_list"))]
    holds_code = any(isinstance(text, str) and any(mark in text for mark in _CODE) for text in texts)
    return holds_code or bool(fields.get("cases"))


async def problem_of(row: Mapping[str, Any], program: str | None, pool: SandboxPool) -> str:
    try:
        tests = tests_of_row.read(row.get("ground_truth"), row.get("extra_info"))
        graded = await pool.grade(program or EMPTY_PROGRAM, tests)
    except BadGroundTruth as err:
        return str(err)
    if program is None:
        return "" if graded.passed < graded.total else "code: an empty program passes the row's tests"
    if graded.reason is None:
        return ""
    return f"code: the row's own solution passes {graded.passed} of {graded.total} tests ({graded.reason}: {graded.detail})"


def solution(row: Mapping[str, Any]) -> str | None:
    fields = tests_of_row.fields_of(row.get("ground_truth"), row.get("extra_info"), extra_columns=_SOLUTIONS)
    for text in (text for name in _SOLUTIONS for text in _listed(fields.get(name))[:1]):
        prompt = code_blocks.program(str(row.get("prompt") or "")) or ""
        for program in (code_blocks.program(text) or "", text, prompt + text):
            if program.strip() and _compiles(program):
                return program
    return None


def _listed(value: Any) -> list[Any]:
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return list(json.loads(value))
        except ValueError:
            return [value]
    return value if isinstance(value, list) else [value] if isinstance(value, str) else []


def _compiles(program: str) -> bool:
    try:
        ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
