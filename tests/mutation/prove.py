"""Prove that a test fails when a guard is removed: ``python -m tests.mutation.prove [WORD...] [--write PAGE]``.

In a copy of the working tree the tests of each guard of `guards.toml` must pass; with the guard's replacement at least one of
them must fail by itself. A test that does not end is tried once more alone, with more time, and proves nothing if it does not
end then either. A guard whose text is not in its file exactly once is an error: it has moved, and its row must follow.

Every result is written to `build/mutation.jsonl` as it comes, so that an interrupted run goes on where it was: a guard that is
proven is tried again only when its row, its file or the file of its tests has changed, or with ``--again``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import pytest

from tests.mutation.guards import ROOT, Guard, read_table
from tests.mutation.tree_copy import Ran, TreeCopy

RESULTS = ROOT / "build" / "mutation.jsonl"
_BASELINE_S = 900.0  # for the tests of one file with all guards in place
_LEAST_S = 90.0  # for one guard's tests, or this many times what all of its file's tests took with the guard:
_TIMES = 5
_ALONE_TIMES = 4  # as long for the second try of a test that did not end
_OUTPUT, _NUM_LAST = "pytest.out", 20  # what pytest prints in a copy; lines of it that are shown when it fails
_BEGIN, _END = "<!-- guards: written by `make mutation-proof` -->", "<!-- end of guards -->"
Verdict = Literal["proven", "passes", "no end", "broken"]


@dataclass(frozen=True)
class Result:
    """What became of the tests of one guard without it; ``test`` is the one that failed."""

    check: str
    digest: str
    verdict: Verdict
    test: str
    error: str
    seconds: float
    baseline_s: float


def result_of(guard: Guard, digest: str, ran: Ran, baseline_s: float) -> Result:
    verdict: Verdict = "broken"
    if ran.code is None:
        verdict = "no end"
    elif ran.has_failed:
        verdict = "proven"
    elif ran.has_passed:
        verdict = "passes"
    return Result(guard.check, digest, verdict, ran.test, ran.error, round(ran.seconds, 2), round(baseline_s, 2))


def _try_files(copy: TreeCopy, files: Sequence[Sequence[Guard]], times: float, terminal: int) -> None:
    for guards in files:
        tests = sorted({test for guard in guards for test in guard.tests})
        with_guards = copy.run(tests, deadline_s=_BASELINE_S)
        for guard in guards:
            digest = guard.digest(copy.folder)
            error = f"with the guard in place: {with_guards.test} {with_guards.error}"
            if with_guards.has_passed:
                deadline_s = times * max(_LEAST_S, _TIMES * with_guards.seconds)
                try:
                    without = copy.run_without(guard, deadline_s=deadline_s)
                    _keep(result_of(guard, digest, without, with_guards.seconds), terminal)
                    continue
                except ValueError as err:  # its text has moved; the guards after it are tried all the same
                    error = str(err)
            _keep(Result(guard.check, digest, "broken", "", error, 0.0, with_guards.seconds), terminal)


def _keep(result: Result, terminal: int) -> None:
    """Write a result to the file, and a line to the terminal: pytest captures what is printed here."""
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(result)) + "\n")
    name = {"proven": "ok  ", "passes": "HOLE", "no end": "SLOW", "broken": "BAD "}[result.verdict]
    line = f"{name} {result.check}: {result.test} {' '.join(result.error.split())[:160]} ({result.seconds:.1f} s)\n"
    os.write(terminal, line.encode())


def _lines() -> list[str]:
    return RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []


def kept_results(after: int = 0) -> dict[str, Result]:
    """Return the last result of each guard that was tried in this tree; only those behind the first ``after`` results."""
    return {result.check: result for result in (Result(**json.loads(line)) for line in _lines()[after:])}


def prove(guards: Sequence[Guard], *, num_copies: int) -> dict[str, Result]:
    """Try guards, in several copies of the tree at a time, file by file; then alone those whose tests did not end.

    A guard whose process ended before it was tried has no result, whatever an earlier run found.
    """
    before = len(_lines())
    with tempfile.TemporaryDirectory(prefix="penstock-mutants-") as folder:
        copies = [TreeCopy(Path(folder) / str(number)) for number in range(num_copies)]
        _try_all(guards, copies, 1.0)
        results = kept_results(before)
        without_end = [guard for guard in guards if guard.check in results and results[guard.check].verdict == "no end"]
        _try_all(without_end, copies[:1], _ALONE_TIMES)
    return kept_results(before)


def _try_all(guards: Sequence[Guard], copies: Sequence[TreeCopy], times: float) -> None:
    """Share the files of tests out among the copies, each with a process of its own."""
    by_file: dict[str, list[Guard]] = {}
    for guard in guards:
        by_file.setdefault(guard.test_files[0], []).append(guard)
    files = sorted(by_file.values(), key=len, reverse=True)
    shares = [(copy, share) for number, copy in enumerate(copies) if (share := files[number :: len(copies)])]
    started = []
    for copy, share in shares:
        if (pid := os.fork()) == 0:
            code = 1
            try:
                code = _try_share(copy, share, times)
            except BaseException:  # noqa: BLE001 this process must not go on as the one it was forked from
                traceback.print_exc()
            finally:
                os._exit(code)
        started.append((pid, copy))
    for pid, copy in started:
        if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            output = copy.folder / _OUTPUT
            said = output.read_text(errors="replace").splitlines()[-_NUM_LAST:] if output.exists() else []
            sys.stderr.write("".join(f"    {line}\n" for line in (f"a process ended with {code}:", *said)))


def _try_share(copy: TreeCopy, files: Sequence[Sequence[Guard]], times: float) -> int:
    """Try files of guards in this process; return 0, or another number if pytest itself failed."""
    terminal, output = os.dup(1), os.open(copy.folder / _OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    names = sorted({file for guards in files for guard in guards for file in guard.test_files})
    code = copy.collect(names, lambda: _try_files(copy, files, times, terminal))
    return 0 if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) else code  # a file that cannot be collected


def page(guards: Sequence[Guard], results: Mapping[str, Result], before: str = "") -> str:
    """Return a table of guards; the line of one that was not tried here is taken from the table ``before``."""
    known = {tuple(line.split(" | ")[:2]): line for line in before.splitlines() if line.startswith("| ")}
    lines = ["| check | file | fails without it |", "|---|---|---|"]
    for guard in guards:
        result = results.get(guard.check)
        start = (f"| {guard.check}", f"`{guard.file}`")
        if result is not None and result.verdict == "proven":
            file, _, test = result.test.partition("::")
            lines.append(" | ".join((*start, f"`{Path(file).name}` {test.partition('[')[0]} |")))
        elif result is None and start in known:
            lines.append(known[start])
        else:
            lines.append(" | ".join((*start, "**not tried** |" if result is None else "**no test** |")))
    return "\n".join(lines)


def main() -> int:
    """Prove the guards whose name has one of the words, all without words; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of the names of the guards to try (default: all)")
    parser.add_argument("--write", type=Path, help="page whose table is brought up to date")
    parser.add_argument("--again", action="store_true", help="also what is proven and has not changed")
    parser.add_argument("--copies", type=int, default=2, help="copies of the tree that are used at a time (default: 2)")
    options = parser.parse_args()
    guards = read_table()
    wanted = [one for one in guards if not options.words or any(word in one.check for word in options.words)]
    kept = kept_results()
    results = {
        one.check: kept[one.check] for one in guards if one.check in kept and kept[one.check].digest == one.digest()
    }
    proven = {check for check, result in results.items() if result.verdict == "proven" and not options.again}
    todo = [one for one in wanted if one.check not in proven]
    sys.stdout.write(f"{len(wanted) - len(todo)} of {len(wanted)} guards are proven and have not changed\n")
    sys.stdout.flush()
    tried = prove(todo, num_copies=options.copies) if todo else {}
    results = {check: one for check, one in results.items() if check not in {guard.check for guard in todo}} | tried
    if options.write is not None:
        text = options.write.read_text(encoding="utf-8")
        head, _, rest = text.partition(_BEGIN)
        table, _, after = rest.partition(_END)
        new = page(guards, results, table)
        options.write.write_text(f"{head}{_BEGIN}\n\n{new}\n\n{_END}{after}", encoding="utf-8")
    holes = [one.check for one in wanted if one.check not in results or results[one.check].verdict != "proven"]
    for check in holes:
        sys.stdout.write(
            f"not proven: {check} ({results[check].verdict if check in results else 'its process ended'})\n"
        )
    sys.stdout.write(f"{len(wanted) - len(holes)} of {len(wanted)} guards are proven\n")
    return 1 if holes else 0


if __name__ == "__main__":
    sys.exit(main())
