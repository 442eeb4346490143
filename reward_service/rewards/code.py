"""The share of its tests that a program passes (or 1 for all of them, else 0), run in a sandbox.

Parts: ``passed`` and ``tests`` are counts, ``has_code`` is 1 if the completion contains a program, and
``failed_<reason>`` is 1 for the reason of the first failure (`zygote_process.Reason`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from penstock.reward_service.program_tests import code_blocks, tests_of_row
from penstock.reward_service.program_tests.grade import Graded
from penstock.reward_service.program_tests.tests_of_row import Tests
from penstock.reward_service.rewards.reward import SandboxedReward, Verdict
from penstock.sandbox.zygote_process import Reason

NAME = "code"

Grade = Callable[[str, Tests, int], Awaitable[Graded]]  # program, tests, how many programs share the group's time
_DATA_SETS = (
    "code", "code_generation", "codecontests", "apps", "codeforces", "taco", "livecodebench", "humaneval",
    "openai_humaneval", "openai/openai_humaneval", "mbpp", "google-research-datasets/mbpp",
    "PrimeIntellect/verifiable-coding-problems", "PrimeIntellect/SYNTHETIC-1", "codeparrot/apps", "BAAI/TACO",
    "deepmind/code_contests", "livecodebench/code_generation_lite", "open-r1/verifiable-coding-problems-python",
    "agentica-org/DeepCoder-Preview-Dataset", "KodCode/KodCode-V1", "newfacade/LeetCodeDataset",
)  # fmt: skip


async def judge(
    completions: tuple[str, ...], truth: Any, extra: Any, grade: Grade, *, all_or_nothing: bool, prompt: str = ""
) -> list[Verdict]:
    """Run every completion's program against the row's tests; equal programs run once. A body may go on from the ``prompt``."""
    tests = tests_of_row.read(truth, extra)
    found = (code_blocks.program(completion, tests_of_row.called(tests)) for completion in completions)
    programs = [
        prompt + program if program and program[0].isspace() and code_blocks.is_program(prompt + program) else program
        for program in found
    ]
    different = dict.fromkeys(program for program in programs if program is not None)
    known = {program: await grade(program, tests, len(different)) for program in different}
    return [
        _verdict(known[program], all_or_nothing=all_or_nothing)
        if program is not None
        else Verdict(0.0, {"has_code": 0.0, f"failed_{Reason.NO_PROGRAM}": 1.0})
        for program in programs
    ]


def _verdict(graded: Graded, *, all_or_nothing: bool) -> Verdict:
    share = graded.passed / graded.total
    parts = {"passed": float(graded.passed), "tests": float(graded.total), "has_code": 1.0}
    if graded.reason is not None:
        parts[f"failed_{graded.reason}"] = 1.0
    return Verdict(float(share == 1.0) if all_or_nothing else share, parts)


REWARD = SandboxedReward(
    name=NAME,
    description="the share of the row's tests that the completion's Python program passes",
    judge=judge,
    data_sources=_DATA_SETS,
    parts=("passed", "tests", "has_code", "failed_<reason>"),
    notes="set with `reward_service.code_*`; see `reward_service/program_tests/README.md`",
    success=1.0,
)
