"""`penstock train` without --local: what the run lacks is created, and the trainer is started again and stopped."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.servers import wait_for

from penstock.deploy import train
from penstock.deploy.bootstrap import delete_run
from penstock.deploy.train import AttachedTrainer, create_what_is_missing
from penstock.protocol import streams
from penstock.protocol.config.connection import NatsSettings, RunSettings, S3Settings
from penstock.protocol.errors import MissingStream
from penstock.protocol.transport.bus import Bus
from penstock.trainer.settings import TrainerSettings

BY_MARK = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
mark = pathlib.Path(sys.argv[1])
mark.write_text(mark.read_text() + "x" if mark.exists() else "x")
{then}
"""


@pytest.fixture
def attached(tmp_path: Path) -> Iterator[Callable[[str], AttachedTrainer]]:
    """A trainer that adds a letter to a file at each start; the process that starts it passes its own signals on."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    start = [sys.executable, "-c"]
    starts, run = str(tmp_path / "starts"), RunSettings(dir=tmp_path)
    yield lambda then: AttachedTrainer([*start, BY_MARK.format(then=then), starts], run)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_run_without_streams_gets_them(
    bus: Bus, nats_settings: NatsSettings, s3_settings: S3Settings, run_id: str
) -> None:
    """Streams, consumers and buckets of the run exist afterwards; a second start changes nothing."""
    settings = TrainerSettings.model_validate(
        {"run": {"id": run_id}, "model": {"path": "m"}, "nats": nats_settings, "s3": s3_settings}
    )
    with pytest.raises(MissingStream):
        bus.key_value(streams.state_bucket(run_id).bucket).wait()
    create_what_is_missing(settings)
    create_what_is_missing(settings)
    for spec in streams.consumers(run_id):
        bus.consumer_state(spec).wait()
    delete_run(bus, run_id)


def test_a_trainer_that_a_signal_killed_is_started_again(
    tmp_path: Path, attached: Callable[[str], AttachedTrainer]
) -> None:
    """Its exit code is that of the last start; the panel is told of the crash and the restart."""
    then = "os.kill(os.getpid(), signal.SIGKILL) if mark.read_text() == 'x' else sys.exit(3)"
    told: list[str] = []
    with attached(then) as trainer:
        trainer.on_incident(told.append)
        assert trainer.wait(60.0) == 3
    assert (tmp_path / "starts").read_text() == "xx"
    assert "trainer was restarted" in told[-1]
    assert not trainer.stop_requested


@pytest.mark.parametrize(("line", "starts"), [("ncclRemoteError", "xx"), ("CUDA out of memory", "x")])
def test_a_trainer_that_another_rank_ended_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attached: Callable[[str], AttachedTrainer], line: str, starts: str
) -> None:
    """What would fail again is not; the log that names it is the trainer's own, on a terminal."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    then = f"mark.read_text() == 'x' and sys.exit(print({line!r}) or 2)"
    with attached(then) as trainer:
        assert trainer.wait(60.0) == (0 if starts == "xx" else 2)
    assert (tmp_path / "starts").read_text() == starts


def test_a_trainer_that_ends_in_an_outage_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attached: Callable[[str], AttachedTrainer]
) -> None:
    """Not in the first minute, when an address may be wrong, and for an hour at most."""
    for limit, code, starts in (("", 75, "x"), ("_STARTED_S", 0, "xxx"), ("_OUTAGE_S", 75, "xxxx")):
        if limit:
            monkeypatch.setattr(train, limit, 0.0)
        with attached("sys.exit(0 if len(mark.read_text()) == 3 else 75)") as trainer:
            assert trainer.wait(60.0) == code
        assert (tmp_path / "starts").read_text() == starts


def test_a_signal_to_the_command_is_passed_to_the_trainer(
    tmp_path: Path, attached: Callable[[str], AttachedTrainer]
) -> None:
    """The trainer writes its checkpoint and ends with its own exit code; it is not started again."""
    with attached("time.sleep(60)") as trainer:
        starts = tmp_path / "starts"
        wait_for(lambda: starts.exists() and starts.read_text() == "x", "the start")
        os.kill(os.getpid(), signal.SIGTERM)
        assert trainer.wait(60.0) == 143
    assert trainer.stop_requested
    assert (tmp_path / "starts").read_text() == "x"
