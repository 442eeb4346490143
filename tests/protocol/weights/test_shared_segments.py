"""Bytes that processes of a host pass on: what is returned has its hash, whatever others do to the folder."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.power import small_disk

from penstock.protocol.weights import shared_segments
from penstock.protocol.weights.shared_segments import SharedSegments, locked_folder

Join = Callable[[], SharedSegments]
DATA = os.urandom(1 << 16)
NAME = hashlib.sha256(DATA).hexdigest()
HOLDER = """
import os, signal, sys
from pathlib import Path
from penstock.protocol.weights.shared_segments import SharedSegments
worker = SharedSegments("r", Path(sys.argv[1]))
worker.join()
def killed():
    os.kill(os.getpid(), signal.SIGKILL)
worker.fetch(sys.argv[2], 1, killed)
"""


@pytest.fixture
def joined(tmp_path: Path) -> Iterator[Join]:
    """Workers of one host and one run."""
    workers: list[SharedSegments] = []

    def join() -> SharedSegments:
        workers.append(SharedSegments("r", tmp_path))
        workers[-1].join()
        return workers[-1]

    yield join
    for worker in workers:
        worker.close()


def from_s3() -> bytes:
    return DATA


def fetched(worker: SharedSegments, download: Callable[[], bytes] = from_s3) -> str:
    """Fetch the data, which must be right; return where it came from and what was missed since."""
    before = worker.figures()
    assert worker.fetch(NAME, len(DATA), download) == DATA
    grown = [name.removeprefix("weights_") for name, value in worker.figures().items() if value > before[name]]
    return " ".join(grown)


def test_workers_read_what_the_trainer_of_their_host_has_stored(
    tmp_path: Path, joined: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written where nobody reads; what is old or left goes, and the folder with the last, even if killed."""
    trainer = SharedSegments("r", tmp_path)
    trainer.offer(NAME, DATA)
    assert not list(tmp_path.iterdir())
    worker = joined()
    assert fetched(worker) == "bytes_s3 misses_absent"
    assert not (worker.folder / NAME).exists(), "a worker alone keeps it to itself"
    trainer.offer(NAME, DATA)
    assert fetched(worker) == "bytes_shared_memory"
    assert fetched(SharedSegments("r", tmp_path)) == "bytes_s3", "worker.share_downloads = false"
    other_run = SharedSegments("r2", tmp_path)
    other_run.offer(NAME, DATA)
    assert not other_run.folder.exists()
    os.utime(worker.folder / NAME, (0, 0))
    worker.trim()
    assert fetched(worker) == "bytes_s3 misses_absent"
    trainer.offer(NAME, DATA)
    joined().close()
    kill(joined())
    trainer.offer("0" * 64, DATA)
    assert [path.name for path in worker.folder.glob("reader-*")] == [worker._reader[0].name if worker._reader else ""]
    kill(worker)
    with locked_folder(worker._parent):  # another worker decides: a trainer does not wait
        monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
        trainer.offer("0" * 64, DATA)
    trainer.offer("0" * 64, DATA)
    assert not worker.folder.exists()


def kill(worker: SharedSegments) -> None:
    """Close its file, as the kernel does with those of a killed process."""
    assert worker._reader is not None
    os.close(worker._reader[1])
    worker._reader = None


WRONG: dict[str, Callable[[Path], object]] = {
    "a link": lambda path: path.symlink_to("/etc/passwd"),
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "truncated": lambda path: path.write_bytes(DATA[:-1]),
    "longer": lambda path: path.write_bytes(DATA + b"x"),
    "changed": lambda path: path.write_bytes(b"x" + DATA[1:]),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_file_that_is_not_what_the_manifest_says_is_not_used(joined: Join, kind: str) -> None:
    worker = joined()
    WRONG[kind](path := worker.folder / NAME)
    assert fetched(worker) == f"bytes_s3 misses_{'unreadable' if kind.startswith('a ') else 'altered'}"
    assert kind.startswith("a ") or not path.exists(), "it would be read again and again"


def test_a_file_that_others_cut_and_write_while_it_is_read_is_right_or_missed(joined: Join) -> None:
    worker, stop = joined(), threading.Event()
    path = worker.folder / NAME

    def disturb() -> None:
        while not stop.is_set():
            path.write_bytes(DATA)
            with contextlib.suppress(FileNotFoundError):  # the reader has removed it
                os.truncate(path, 100)

    with ThreadPoolExecutor(1) as pool:
        disturbing = pool.submit(disturb)
        found = {fetched(worker) for _ in range(200)}
        stop.set()
        disturbing.result()
    assert found <= {"bytes_shared_memory", "bytes_s3 misses_altered", "bytes_s3 misses_absent"}


@pytest.mark.parametrize("whose", ["open to all", "a link"])
def test_a_folder_that_is_not_this_users_alone_is_neither_read_nor_written(
    joined: Join, tmp_path: Path, whose: str
) -> None:
    """Although a reader is there, who would get the weights."""
    first = joined()
    first.offer(NAME, DATA)
    if whose == "a link":
        parent = first._parent.rename(tmp_path / "elsewhere")
        first._parent.symlink_to(parent)
    else:
        first._parent.chmod(0o755)
    assert fetched(joined()) == "bytes_s3 misses_unreadable"
    SharedSegments("r", tmp_path).offer("0" * 64, DATA)
    assert not (first.folder / ("0" * 64)).exists()


@pytest.mark.parametrize("share", [0.125, 1e9], ids=["beyond the share", "the file system is full"])
def test_without_room_workers_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    monkeypatch.setattr(shared_segments, "SHARE", share)
    with small_disk(tmp_path / "shm", 4 * len(DATA)) as disk:
        workers = [SharedSegments("r", disk) for _ in range(2)]
        for worker in workers:
            worker.join()
        if share > 1:
            (disk / "ballast").write_bytes(bytes(3 * len(DATA) + len(DATA) // 2))
        SharedSegments("r", disk).offer(NAME, DATA)
        assert fetched(workers[0]) == ("bytes_s3 misses_absent misses_full" if share > 1 else "bytes_s3 misses_full")
        assert {path.name[:7] for path in workers[0].folder.iterdir()} == {"reader-"}
        for worker in workers:
            worker.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_what_another_user_made_or_protects_stops_neither_a_trainer_nor_a_worker() -> None:
    with tempfile.TemporaryDirectory() as root:
        Path(root).chmod(0o1777)
        parent = Path(root) / "penstock-segments-12345"
        parent.mkdir(mode=0o700)
        os.seteuid(12345)
        try:
            worker = SharedSegments("r", Path(root))
            worker.offer(NAME, DATA)
            worker.join()
            assert fetched(worker) == "bytes_s3 misses_unreadable"
            os.seteuid(0)
            os.chown(parent, 12345, -1)
            os.seteuid(12345)
            worker.join()
            (worker.folder / NAME).write_bytes(b"x")
            worker.folder.chmod(0o500)
            assert fetched(worker) == "bytes_s3 misses_altered"
        finally:
            os.seteuid(0)


def test_where_others_may_rename_nothing_is_removed_outside(joined: Join, tmp_path: Path) -> None:
    """A folder for all without the sticky bit: what is removed is in the folder that was locked."""
    worker, home = joined(), tmp_path / "home"
    (home / "precious").mkdir(parents=True)
    kill(worker)
    with locked_folder(worker._parent) as (_, parent):
        worker._parent.rename(tmp_path / "elsewhere")
        worker._parent.symlink_to(home)
        shared_segments._clear_abandoned(parent)
    assert (home / "precious").exists()
    assert not (tmp_path / "elsewhere" / "r").exists()


@pytest.mark.parametrize(
    ("groups", "names"),
    [
        ("4:memory:/a/b", "memory.limit_in_bytes memory.usage_in_bytes total_inactive_file"),
        ("3:cpu:/\n0::/a/b", "memory.max memory.current inactive_file"),
    ],
)
def test_free_memory_is_what_the_control_groups_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, names: str
) -> None:
    """The smallest of the groups above counts, less its file pages that may be dropped."""
    maximum, current, cache = names.split()
    inside = tmp_path / groups.split(":")[-2] / "a" / "b"
    inside.mkdir(parents=True)
    for folder, used in ((inside, 5000), (inside.parent, 7000)):
        for name, text in ((maximum, "10000"), (current, f"{used}"), ("memory.stat", f"{cache} 500")):
            (folder / name).write_text(text)
    (tmp_path / "groups").write_text(groups)
    monkeypatch.setattr(shared_segments, "_CGROUPS", tmp_path)
    monkeypatch.setattr(shared_segments, "_OWN_CGROUPS", tmp_path / "groups")
    assert shared_segments.free_memory() == 3500


def test_the_oldest_make_room(joined: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, trainer = joined(), SharedSegments("r", tmp_path)

    def stored() -> list[Path]:
        return [path for path in worker.folder.iterdir() if path.name.isdecimal()]

    monkeypatch.setattr(shared_segments, "SHARE", 1.0)
    monkeypatch.setattr(shared_segments, "free_memory", lambda: int(2.5 - len(stored())) * len(DATA))
    for number in range(4):
        trainer.offer(f"{number:064}", DATA)
        os.utime(worker.folder / f"{number:064}", (time.time() - 100 + number,) * 2)
    assert sorted(path.name[-1] for path in stored()) == ["2", "3"]


@pytest.mark.parametrize(("share", "times"), [(1.0, 1), (0.0, 4)], ids=["room", "no room"])
def test_workers_that_ask_at_once_download_once(
    joined: Join, monkeypatch: pytest.MonkeyPatch, share: float, times: int
) -> None:
    """Or all together: in turn, eight workers of a container without room would need eight times as long."""
    monkeypatch.setattr(shared_segments, "SHARE", share)
    workers, num_downloads, together = [joined() for _ in range(4)], [], threading.Barrier(times, timeout=10.0)

    def download() -> bytes:
        num_downloads.append(1)
        together.wait()
        time.sleep(0.5)  # the others ask
        return DATA

    with ThreadPoolExecutor(len(workers)) as pool:
        found = list(pool.map(lambda worker: worker.fetch(NAME, len(DATA), download), workers))
    assert (found, len(num_downloads)) == ([DATA] * len(workers), times)


def test_a_worker_that_is_killed_or_stopped_while_it_downloads_blocks_no_other(
    joined: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, _ = joined(), joined()
    killed = subprocess.run([sys.executable, "-c", HOLDER, str(tmp_path), NAME], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (worker.folder / f"{NAME}.lock").exists()
    assert fetched(worker) == "bytes_s3 misses_absent"
    (worker.folder / NAME).unlink()
    monkeypatch.setattr(shared_segments, "FETCH_DEADLINE_S", 0.1)
    with (worker.folder / f"{NAME}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert fetched(worker) == "bytes_s3 misses_busy"
