"""Hostile programs in both sandboxes: contained, detected from outside, and reported with the right reason."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.sandbox import attacks

from penstock.reward_service.program_tests.grade import Slot, grade
from penstock.reward_service.program_tests.tests_of_row import Assertions, FunctionTests, StdinTests
from penstock.sandbox import canary
from penstock.sandbox.inside import confine
from penstock.sandbox.zygote_command import Kind, Launch
from penstock.sandbox.zygote_process import Limits, Reason, Zygote, failure, run_program

LIMITS = Limits(cpu_s=1.0, memory_bytes=256 * 1024**2, output_bytes=1024**2, tasks=16)
IMPATIENT = replace(LIMITS, wall_factor=0.0, wall_min_s=0.5)  # for programs that only wait
SECRET = "the-secret-of-another-process"
ANSWER = "an-answer-that-no-program-is-told"
OTHER_CALLS = {  # calls in no list: x86_64, aarch64
    "socket": (41, 198), "shmget": (29, 194), "mq_open": (240, 180), "tkill": (200, 130), "seccomp": (317, 277),
    "setresuid": (117, 147), "capset": (126, 91), "mlock": (149, 228),
}  # fmt: skip
PLACES = ("/tmp", "/dev/shm", "/var/tmp", "/", str(Path.cwd()))


class World:
    """Files, listeners and processes outside the sandbox that would show an escape."""

    def __init__(self, folder: Path, uid: int) -> None:
        folder.chmod(0o777)
        self.uid = uid
        self.folder = folder
        self.file = folder / "secret"
        self.file.write_text(SECRET)
        self.file.chmod(0o666)
        (folder / "penstock_canary_module.py").write_text("print('ESCAPED')")
        self.sockets = {
            "tcp4": _bound(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            "tcp6": _bound(socket.AF_INET6, socket.SOCK_STREAM, ("::1", 0)),
            "udp4": _bound(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            "unix": _bound(socket.AF_UNIX, socket.SOCK_STREAM, str(folder / "s")),
            "unix_datagram": _bound(socket.AF_UNIX, socket.SOCK_DGRAM, str(folder / "d")),
            "abstract": _bound(socket.AF_UNIX, socket.SOCK_STREAM, f"\0penstock-{os.getpid()}"),
        }
        for path in ("s", "d"):
            (folder / path).chmod(0o777)
        # Of the same user as programs, so that only the sandbox protects it.
        self.victim = subprocess.Popen(
            ["sleep", "600"], user=uid if os.geteuid() == 0 else None, env={"SECRET": SECRET}, start_new_session=True
        )
        self.before = self._traces()

    def described(self) -> dict[str, object]:
        ports = {name: self.sockets[name].getsockname()[1] for name in ("tcp4", "tcp6", "udp4")}
        return {
            **ports,
            "unix": str(self.folder / "s"),
            "unix_datagram": str(self.folder / "d"),
            "abstract": f"penstock-{os.getpid()}",
            "file": str(self.file),
            "folder": str(self.folder),
            "victim": self.victim.pid,
            "service": os.getpid(),
            "home": str(Path.cwd()),
        }

    def assert_untouched(self) -> None:
        """Assert that nothing connected, nothing was written, no process was signalled and none is left."""
        for name, listener in self.sockets.items():
            with pytest.raises(BlockingIOError):
                listener.recv(1) if "datagram" in name or name == "udp4" else listener.accept()
        assert self._traces() == self.before

    def _traces(self) -> dict[str, object]:
        state = Path(f"/proc/{self.victim.pid}/stat").read_text().split(") ")[1].split()
        status = self.file.stat()
        return {
            "content": self.file.read_text(),
            "file": (status.st_mode, status.st_uid, status.st_mtime, status.st_nlink),
            "folder": sorted(path.name for path in self.folder.iterdir()),
            "strays": [str(path) for place in PLACES for path in Path(place).glob("attack-of-penstock*")],
            "victim": (self.victim.poll(), state[0] in "TtZ", state[16]),
            "processes": _processes_of(self.uid) if os.geteuid() == 0 else [],
        }

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        for one in self.sockets.values():
            one.close()


def _bound(family: int, kind: int, address: object) -> socket.socket:
    made = socket.socket(family, kind)
    made.bind(address)
    made.setblocking(False)
    if kind == socket.SOCK_STREAM:
        made.listen()
    return made


def _processes_of(uid: int) -> list[int]:
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and path.stat().st_uid == uid:
                found.append(int(path.name))
        except FileNotFoundError:
            continue
    return sorted(found)


class Place:
    """A slot of one kind of sandbox, with the targets outside it."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        launch = Launch(kind)
        self.slot = Slot(Zygote(launch, 6), Zygote(launch, 7))
        settings = json.loads(launch.command(0, 6)[-1])
        self.world = World(folder, settings["uid"] or os.getuid())
        described = self.world.described()
        if kind is Kind.BUBBLEWRAP:  # a process there has no number that could be meant; its own parent has
            described["victim"] = 2
        numbers = {name: pair[0 if confine.machine_name() == "x86_64" else 1] for name, pair in OTHER_CALLS.items()}
        for table in (confine.ALLOWED, confine.CONDITIONAL, confine.FATAL):
            numbers |= confine.call_numbers(table, confine.machine_name())
        self.prelude = f"{attacks.PRELUDE}\nN = {numbers!r}\nW = {described!r}\nREVERSED_ANSWER = {ANSWER[::-1]!r}\n"

    def run(self, statement: str, limits: Limits = LIMITS) -> Reason:
        """Run an attack; returns the reason of its failure, ``WRONG`` if it finished."""
        run = run_program(self.slot.programs, self.prelude + statement, limits)
        said = run.output + run.errors
        assert b"ESCAPED" not in run.output, said[-1000:]
        assert SECRET.encode() not in said
        return failure(run, limits) or Reason.WRONG


@pytest.fixture(scope="module", params=list(Kind), ids=lambda kind: kind.value)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    problem = canary.attack(request.param)
    if problem:
        pytest.skip(f"{request.param} does not hold on this machine: {problem}")
    folder = Path("/tmp") / f"penstock-world-{os.getpid()}-{request.param}"
    folder.mkdir()
    made = Place(request.param, folder)
    for tests in (  # the zygotes have started, and hold all they will ever hold of the answer
        StdinTests(("", ""), (ANSWER, ANSWER)),
        FunctionTests("f", ([1],), (ANSWER,)),
        Assertions((f"assert f(1) == {ANSWER!r}",)),
    ):
        assert (
            grade(made.slot, f"def f(x): return {ANSWER!r}\nprint({ANSWER!r})", tests, LIMITS, stop_early=False).reason
            is None
        )
    made.world.before = made.world._traces()
    yield made
    made.slot.kill()
    made.world.close()
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@pytest.mark.parametrize("name", attacks.EVERYTHING_THAT_FAILS)
def test_an_attack_fails_and_is_reported(place: Place, name: str) -> None:
    """A call that would leave the sandbox raises or ends the program, and nothing outside changes."""
    statement = attacks.EVERYTHING_THAT_FAILS[name]
    zygote = place.slot.programs.pid
    reason = place.run(statement + "\nprint('ESCAPED')")
    assert reason in (Reason.RAISED, Reason.FORBIDDEN), reason
    assert place.slot.programs.pid == zygote
    place.world.assert_untouched()


@pytest.mark.parametrize("name", attacks.EXCESSES)
def test_an_excess_is_stopped_and_reported(place: Place, name: str) -> None:
    """A program that exceeds a limit, crashes or forges output gets the reason, and leaves no process or file."""
    statement, reasons = attacks.EXCESSES[name]
    zygote = place.slot.programs.pid
    if Reason.CPU_TIME in reasons:  # on a machine that gives it little, the clock runs out first
        reasons = {*reasons, Reason.WALL_TIME}
    assert place.run(statement, IMPATIENT if reasons == {Reason.WALL_TIME} else LIMITS) in reasons
    assert place.slot.programs.pid == zygote
    place.world.assert_untouched()


@pytest.mark.skipif(confine.machine_name() != "x86_64", reason="machine code of x86_64")
@pytest.mark.parametrize("name", attacks.ONLY_ON_X86)
def test_system_calls_of_another_abi_are_fatal(place: Place, name: str) -> None:
    """The call numbers of the 32-bit and x32 ABIs pass no filter."""
    assert place.run(attacks.ONLY_ON_X86[name] + "\nprint('ESCAPED')") in (Reason.FORBIDDEN, Reason.CRASHED)


@pytest.mark.parametrize("name", attacks.FORGERIES)
def test_no_program_forges_the_verdict_of_test_code(place: Place, name: str) -> None:
    """No behaviour of a program in the calls of its tests passes a test whose answer it does not compute."""
    program = attacks.FORGERIES[name]
    tests = Assertions(
        (
            "assert f(3) == 4242",
            "assert abs(f(3) - 4242) < 1",
            "assert [y for y in map(f, [3]) if y == 4242] == [4242]",
            "assert f(3) in (4242, 4243)",
            "assert 4242 == f(3)",
            "import unittest\nclass T(unittest.TestCase):\n    def test_it(self): self.assertEqual(f(3), 4242)",
            "def check(candidate):\n    assert candidate(3) == 4242",
        ),
        entry_points=("f",),
    )
    graded = grade(place.slot, program, tests, LIMITS, stop_early=False)
    assert (graded.passed, graded.total) == (0, 7), graded
    assert graded.reason is not None
    place.world.assert_untouched()
