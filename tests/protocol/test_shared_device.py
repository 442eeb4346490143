"""The locks of a GPU that engines and trainer use in turns: who has it, after whatever process was killed in whatever state."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.servers import wait_for

from penstock.protocol.errors import ConfigError, DeviceTaken
from penstock.protocol.shared_device import Role, SharedDevices

_HOLDER = """
import subprocess, sys
from pathlib import Path
from penstock.protocol.shared_device import SharedDevices
role, run_id, folder, *devices = sys.argv[1:]
with SharedDevices(devices, Path(folder), role=role, run_id=run_id) as shared:
    taken = (role == "engine" or shared.try_want()) and shared.try_take()
    server = None
    if role == "engine":
        server = subprocess.Popen(["sleep", "600"], pass_fds=shared.inherited, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    print(int(taken), server.pid if server else 0, flush=True)
    sys.stdin.read()
"""

Open = Callable[..., SharedDevices]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Claim devices, as a process does; all are closed at the end."""
    made: list[SharedDevices] = []

    def claim(role: Role, *devices: str, run_id: str = "r") -> SharedDevices:
        made.append(SharedDevices(devices, tmp_path / "locks", role=role, run_id=run_id).__enter__())
        return made[-1]

    yield claim
    for one in made:
        one.close()


def holder(folder: Path, role: str, *devices: str) -> tuple[subprocess.Popen[str], bool, int]:
    """Start a process that takes devices; returns it, whether it has them, and the process id of its server."""
    words = [sys.executable, "-c", _HOLDER, role, "r", str(folder / "locks"), *devices]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    taken, server = map(int, process.stdout.readline().split())
    return process, bool(taken), server


def test_engines_hold_a_device_together_until_a_rank_wants_it(opened: Open) -> None:
    rank, first, second = opened("trainer", "a"), opened("engine", "a", "b"), opened("engine", "a")
    assert rank.is_free
    assert first.try_take()
    assert second.try_take()
    assert rank.try_want()
    assert not rank.try_take()
    assert first.is_wanted
    assert second.is_wanted
    assert "engine of run r (pid " in rank.holders()
    second.give()
    assert not rank.try_take()
    first.give()
    assert rank.try_take()
    assert not first.try_take()
    assert not second.try_take()
    assert not second.is_free
    rank.give()
    assert first.try_take()


def test_engines_hold_all_of_their_devices_or_none(opened: Open) -> None:
    """So no two processes wait for each other."""
    rank, engines = opened("trainer", "b"), opened("engine", "a", "b")
    assert rank.try_want()
    assert rank.try_take()
    assert not engines.try_take()
    other = opened("trainer", "a")
    assert other.try_want()
    assert other.try_take()


@pytest.mark.parametrize("role", ["engine", "trainer"])
def test_the_kernel_frees_what_a_killed_process_held(opened: Open, tmp_path: Path, role: str) -> None:
    """An engine's device only when its server has exited too, which inherited the lock."""
    process, taken, server = holder(tmp_path, role, "a")
    assert taken
    waiting = opened("trainer" if role == "engine" else "engine", "a")
    assert not (role == "engine" and waiting.try_want() and waiting.try_take())
    assert role == "engine" or not waiting.try_take()
    process.kill()
    process.communicate()
    if role == "engine":
        assert not waiting.try_take(), "its server may still have memory there"
        assert "which has exited; its engine may still be ending" in waiting.holders()
        subprocess.run(["kill", "-9", str(server)], check=True)
    wait_for(waiting.try_take, "the device of a killed process")


def test_a_second_rank_of_a_device_waits_for_the_first(opened: Open) -> None:
    """Such as the successor of a trainer that hangs."""
    first, second = opened("trainer", "a"), opened("trainer", "a")
    assert first.try_want()
    assert not second.try_want()
    first.give()
    assert second.try_want()


def test_another_run_is_refused_by_name(opened: Open) -> None:
    opened("engine", "GPU-1/2", run_id="first").try_take()
    with pytest.raises(
        DeviceTaken, match=r"GPU GPU-1-2 is used by run first, run second cannot share it \(.*engine of run first"
    ):
        opened("trainer", "GPU-1/2", run_id="second")
    opened("trainer", "GPU-1/2", run_id="first")


def test_a_run_takes_over_a_device_that_no_process_of_another_uses(opened: Open) -> None:
    opened("engine", "a", run_id="first").close()
    assert opened("engine", "a", run_id="second").try_take()


@pytest.mark.parametrize("kind", ["file", "link", "folder of another user"])
def test_a_folder_of_locks_that_cannot_be_used_is_refused(kind: str, tmp_path: Path) -> None:
    """In the system's folder for temporary files another user may have made it first; nothing is written there."""
    folder, target = tmp_path / "locks", tmp_path / "target"
    target.mkdir()
    if kind == "file":
        folder.write_text("a file")
    elif kind == "link":
        folder.symlink_to(target)
    else:
        if os.geteuid() != 0:
            pytest.skip("only root makes folders of others")
        folder.mkdir()
        os.chown(folder, 12345, 12345)
    with pytest.raises(ConfigError, match=r"placement\.lock_dir"):
        SharedDevices(["a"], folder, role="engine", run_id="r").__enter__()
    assert not list(target.iterdir())
