"""Measure programs per CPU second in each sandbox available on this machine, and in a plain subprocess.

python -m benchmarks.sandbox [programs of each kind, default 200]

All variants alternate on one core and run the same program: read a number, write its double. CPU time is that of this
process and its children; wall times are printed too, but depend on the machine's other load.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable

from penstock.reward_service.program_tests.grade import Slot, grade
from penstock.reward_service.program_tests.tests_of_row import Assertions, StdinTests
from penstock.sandbox import canary
from penstock.sandbox.zygote_command import ENVIRONMENT, Kind, Launch, interpreter
from penstock.sandbox.zygote_process import Limits, Zygote

PROGRAM = "print(2 * int(input()))"
FUNCTION = "def double(x):\n    return 2 * x"
LIMITS = Limits()


def plain(start: list[str]) -> Callable[[], None]:
    def run() -> None:
        answer = subprocess.run([*start, "-c", PROGRAM], input=b"21", capture_output=True, env=ENVIRONMENT, check=True)
        assert answer.stdout == b"42\n"

    return run


def in_sandbox(slot: Slot) -> Callable[[], None]:
    def run() -> None:
        assert grade(slot, PROGRAM, StdinTests(("21",), ("42",)), LIMITS, stop_early=False).passed == 1

    return run


def by_test_code(slot: Slot) -> Callable[[], None]:
    tests = Assertions(("assert double(21) == 42", "assert double(0) == 0", "assert double('a') == 'aa'"))

    def run() -> None:
        assert grade(slot, FUNCTION, tests, LIMITS, stop_early=False).passed == 3

    return run


def cold(launch: Launch) -> Callable[[], None]:
    def run() -> None:
        slot = Slot(Zygote(launch, 8), Zygote(launch, 9))
        in_sandbox(slot)()
        slot.kill()

    return run


def cpu_s() -> float:
    """Return the CPU seconds of this process and of the children it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def of_zygotes(slot: Slot) -> float:
    """Return the CPU seconds of a slot's running zygotes and of the programs that have ended in them."""
    ticks = 0
    for pid in (slot.programs.pid, slot.tests.pid):
        for one in [pid, *descendants(pid)] if pid else []:
            with open(f"/proc/{one}/stat") as file:  # noqa: PTH123
                fields = file.read().rsplit(")", 1)[1].split()
            ticks += sum(int(field) for field in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:  # noqa: PTH123
        children = [int(child) for child in file.read().split()]
    return [one for child in children for one in (child, *descendants(child))]


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    slots: dict[str, Slot] = {}
    variants: dict[str, tuple[Callable[[], None], int]] = {
        "plain subprocess, python": (plain([interpreter()]), count),
        "plain subprocess, python -S -s": (plain([interpreter(), "-S", "-s"]), count),
    }
    for kind in Kind:
        problem = canary.attack(kind)
        if problem:
            print(f"{kind} does not confine programs on this machine: {problem}")
            continue
        launch = Launch(kind)
        for name, make in (("a stdin test", in_sandbox), ("3 asserts, two processes", by_test_code)):
            slot = slots[f"{kind}, {name}"] = Slot(Zygote(launch, 0), Zygote(launch, 1))
            variants[f"{kind}, {name}"] = (make(slot), count)
        variants[f"{kind}, a zygote for each"] = (cold(launch), max(10, count // 10))
    spent: dict[str, list[float]] = {name: [0.0, 0.0, 0] for name in variants}
    for run, _ in variants.values():
        run()
    for turn in range(10):
        for name, (run, total) in variants.items():
            slot = slots.get(name)
            clock, cpu = time.perf_counter(), cpu_s() + (of_zygotes(slot) if slot else 0.0)
            for _ in range(max(1, total // 10)):
                run()
            cpu_now = cpu_s() + (of_zygotes(slot) if slot else 0.0)
            row = spent[name]
            row[0], row[1], row[2] = (
                row[0] + cpu_now - cpu,
                row[1] + time.perf_counter() - clock,
                row[2] + max(1, total // 10),
            )
        print(f"turn {turn + 1} of 10", file=sys.stderr)
    show(spent, set(slots))
    for slot in slots.values():
        slot.kill()


def show(spent: dict[str, list[float]], counted: set[str]) -> None:
    base = spent["plain subprocess, python"][0] / spent["plain subprocess, python"][2]
    print(f"{'':36}{'programs':>9}{'CPU ms':>9}{'per core-second':>16}{'vs plain':>9}{'wall ms':>10}")
    for name, (cpu, clock, done) in spent.items():
        each = cpu / done
        figures = f"{1000 * each:>9.1f}{1 / each:>16.0f}{base / each:>9.2f}"
        if name not in counted and not name.startswith("plain"):  # the CPU time of a killed zygote cannot be read
            figures = f"{'-':>9}{'-':>16}{'-':>9}"
        print(f"{name:36}{done:>9}{figures}{1000 * clock / done:>10.1f}")


if __name__ == "__main__":
    main()
