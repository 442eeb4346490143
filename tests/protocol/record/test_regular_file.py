"""The folder of a run may be a copy from somebody else: no file of it leads elsewhere, or is waited for."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
from tests.deadline import ends_within

from penstock.console import connections, evaluation_results
from penstock.console.connections import NamedRun
from penstock.console.live import run_snapshot
from penstock.console.record import stored_run
from penstock.console.registry import versions
from penstock.console.report import curves
from penstock.console.report.event_fields import read_object
from penstock.console.report.report import stored_summary
from penstock.console.tools.runs import list_folder, print_one
from penstock.deploy import stored
from penstock.forensics.audit.record_checks import from_metrics
from penstock.forensics.replay.replay_findings import config_findings
from penstock.protocol import seals
from penstock.protocol.errors import ConfigError, MalformedFact, UntrustedFolder
from penstock.protocol.files import links_below, read_regular
from penstock.protocol.record import stopped_batch
from penstock.protocol.record.checkpoint_state import CheckpointState, read_state
from penstock.protocol.record.run_folder import PLACEMENT

RUN = "foreign"
FILES = ("config.json", "report.json", "report.md", "metrics.jsonl", "state.json", "watched.json", "environment")


def replaced(path: Path, kind: str) -> None:
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "endless":
            path.symlink_to("/dev/zero")
        case "link":
            path.symlink_to(path.parent.parent / "private")
        case _:
            path.mkdir()


@pytest.fixture(params=["pipe", "endless", "link", "folder"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A run's folder whose every file is something else; the link leads to a file that is valid JSON."""
    (tmp_path / "private").write_text('{"settings": {"trainer": {"num_ranks": 3}}, "finished": true, "steps": 1}\n')
    home = tmp_path / RUN
    home.mkdir()
    for name in {*FILES, run_snapshot.TOTALS_FILE}:
        replaced(home / name, request.param)
    return home


def test_what_stands_in_place_of_a_file_is_neither_followed_nor_waited_for(folder: Path) -> None:
    for name in FILES:
        with pytest.raises(OSError, match=r"(?i)symbolic link|regular|directory"), ends_within(20):
            read_regular(folder / name)
    with pytest.raises(OSError, match=r"(?i)symbolic link|regular|directory"):
        read_state(folder)
    assert list(curves.rows(folder)) == []
    assert curves.num_unreadable(folder) == 1
    assert stored_summary(folder) is None
    assert run_snapshot.load_totals(folder) is None
    assert [line.step for line in list_folder(folder.parent)] in ([None], [])
    state = CheckpointState.model_construct(metrics_bytes=2**40)
    assert "cannot be read" in from_metrics(folder, state).problems[0]
    assert all("does not hold the settings" in line for line in config_findings(folder / "config.json", {}))
    with pytest.raises(UntrustedFolder):
        connections.store_environment(folder)
    with pytest.raises(ConfigError, match=r"report\.md cannot be read"):
        print_one(NamedRun(RUN, [f"run.dir={folder.parent}"], {}))


NESTED, HALF = b"[" * 200_000, b'{"settings": {"a": "\\ud800"}}'


@pytest.mark.parametrize("data", [b"", NESTED, b"[[]," * 4_000_000, b'{"a":0},' * 2_000_000, HALF], ids=range(5))
def test_a_document_takes_bounded_memory_and_time(tmp_path: Path, data: bytes) -> None:
    """Of a folder that was sent: b"" stands for a file of 1 TB that takes no room on a disk."""
    for name in {
        *FILES,
        PLACEMENT,
        evaluation_results.RESULT,
        evaluation_results.GROUPS,
        stopped_batch.BATCH,
        versions.FILE,
    }:
        (tmp_path / name).write_bytes(data)
        os.truncate(tmp_path / name, len(data) or 1 << 40)
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used_bytes() + 1024**3, limits[1]))
    try:
        with ends_within(60):
            for path in (tmp_path / stopped_batch.BATCH, tmp_path / "state.json"):
                with pytest.raises(MalformedFact, match="." if data in (NESTED, HALF) else "bytes of memory"):
                    (read_state if path.name == "state.json" else stopped_batch.read_batch)(tmp_path)
            assert list(curves.rows(tmp_path)) == []
            assert curves.num_unreadable(tmp_path) == 0
            assert stored_summary(tmp_path) is None
            assert run_snapshot.load_totals(tmp_path) is None
            assert run_snapshot.load_placement(tmp_path) == ""
            assert read_object(tmp_path / "config.json") is None
            assert evaluation_results.read_result(tmp_path) is None
            assert evaluation_results.read_outcomes(tmp_path) == {}
            with pytest.raises(ConfigError):
                versions.read_tags(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)


def used_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[5]) * resource.getpagesize()  # data and stack


@pytest.mark.parametrize("ranks", [10**6, 257, 0, -1])
def test_a_file_does_not_start_processes_without_end(tmp_path: Path, ranks: int) -> None:
    """The number of ranks of a replay is read from the folder of the run."""
    (tmp_path / RUN).mkdir()
    (tmp_path / RUN / "config.json").write_text(f'{{"settings": {{"trainer": {{"num_ranks": {ranks}}}}}}}')
    with pytest.raises(ConfigError, match="expected 1 to 256"):
        stored_run.replay(NamedRun(RUN, [f"run.dir={tmp_path}"], {}), [])


def test_the_environment_of_servers_names_no_other_file_and_no_other_setting(tmp_path: Path) -> None:
    """A password is sent to the server as it is: a file elsewhere would be, too. Settings of a run are not taken from there."""
    store, private = tmp_path / "store", tmp_path / "private"
    store.mkdir()
    private.write_text("a private key")
    own = f"export PENSTOCK_NATS__PASSWORD_FILE={store / 'nats.password'}\n"
    seals.write(store / "environment", f"{own}export PENSTOCK_ALGORITHM__LOSS=evil.py:loss PATH=/evil\n")
    assert connections.store_environment(store) == {"PENSTOCK_NATS__PASSWORD_FILE": str(store / "nats.password")}
    for path in (private, store / ".." / "private"):
        seals.write(store / "environment", f"export PENSTOCK_NATS__PASSWORD_FILE={path}\n")
        with pytest.raises(ConfigError, match="a file outside"):
            connections.store_environment(store)
    (store / "nats.password").symlink_to(private)
    seals.write(store / "environment", own)
    with pytest.raises(ConfigError, match="a file outside"):
        connections.store_environment(store)


def test_servers_are_not_started_over_a_store_with_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They would write to what a link leads to: a log, or an object, in place of any file of this machine."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "nats-server.log").symlink_to(tmp_path.parent / "profile")
    (tmp_path / "objects").mkdir()
    assert links_below(tmp_path) == [tmp_path / "logs" / "nats-server.log"]
    assert stored.main([str(tmp_path), "--", "true"]) == 1
    assert "is a link" in capsys.readouterr().err
    assert not (tmp_path.parent / "profile").exists()
    assert not (tmp_path / "lock").exists()
