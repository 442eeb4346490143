"""One process writes a run to TensorBoard: every step once, also after a kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import psutil
import pytest
from tests.console.record.recorded_run import Services
from tests.console.tracking.recorded_events import evaluation, finished, step
from tests.servers import wait_for

from penstock.console.evaluation_results import Estimate, EvaluationResult, SourceResult
from penstock.console.tracking import consumer, trackers
from penstock.console.tracking.__main__ import _job
from penstock.console.tracking.consumer import Consumer, Written
from penstock.console.tracking.sources import RunStream, TrainingLog, note_evaluation
from penstock.console.tracking.trackers import load_settings
from penstock.protocol.config.connection import NatsSettings
from penstock.protocol.errors import ConfigError
from penstock.protocol.transport.bus import Bus

pytest.importorskip("tensorboardX")
from tests.console.tracking import event_files


@pytest.fixture
def run(run_streams: str) -> str:
    return run_streams


def _arguments(folder: Path, nats: NatsSettings) -> list[str]:
    return [f"nats.url={nats.url}", f"run.dir={folder}", "tracker=tensorboard", "tracking.samples=0"]


def _work(run: str, bus: Bus, folder: Path, *, once: bool = False) -> Written:
    arguments = _arguments(folder, NatsSettings(url=bus.url))
    settings = load_settings(run, arguments, {})
    job = _job(settings, "tensorboard", arguments, once=once, awaits_report=False)
    with consumer.opened(folder / run, "tensorboard") as file:
        return Consumer(job, RunStream(bus, run), file, threading.Event()).work()


def _losses(folder: Path, run: str) -> Counter[int]:
    found = event_files.values(folder / run / "trackers" / "tensorboard")
    return Counter({number: count for (tag, number, _), count in found.items() if tag == "train/loss"})


def test_a_run_is_written_once_and_continued_where_it_stopped(bus: Bus, run: str, tmp_path: Path) -> None:
    """A second session writes what is new; the run's settings, its report and its end are there."""
    Services(bus, run).say(*map(step, range(1, 6)))
    assert _work(run, bus, tmp_path, once=True) == Written(num_rows=5)
    folder = tmp_path / run
    (folder / "report.md").write_text("# The report\n")
    Services(bus, run).say(step(4), step(6), evaluation(5, 0.75), finished())
    assert _work(run, bus, tmp_path) == Written(num_rows=2, num_repeated=1, finished=True)
    assert _losses(tmp_path, run) == Counter(dict.fromkeys(range(1, 7), 1))
    values = event_files.values(folder / "trackers" / "tensorboard")
    assert values["eval/accuracy", 5, 0.75] == 1
    assert event_files.texts(folder / "trackers" / "tensorboard")["report/text_summary"] == "# The report\n"
    assert _work(run, bus, tmp_path) == Written(finished=True), "nothing is written again"


def test_rows_that_were_written_but_not_noted_are_not_written_again(bus: Bus, run: str, tmp_path: Path) -> None:
    """A kill between the tracker's files and the position file, and one in the middle of a record."""
    Services(bus, run).say(*map(step, range(1, 4)))
    _work(run, bus, tmp_path, once=True)
    noted = tmp_path / run / "trackers" / "tensorboard.json"
    earlier = noted.read_bytes()
    Services(bus, run).say(*map(step, range(4, 9)))
    _work(run, bus, tmp_path, once=True)
    noted.write_bytes(earlier)  # as before the second batch
    newest = max(
        (tmp_path / run / "trackers" / "tensorboard").glob("events.*"), key=lambda path: path.stat().st_mtime_ns
    )
    newest.write_bytes(newest.read_bytes()[:-20])  # the record of step 8 is torn
    assert _work(run, bus, tmp_path, once=True).num_rows == 1
    assert _losses(tmp_path, run) == Counter(dict.fromkeys(range(1, 9), 1))


def test_rows_that_the_tracker_lost_are_written_again(bus: Bus, run: str, tmp_path: Path) -> None:
    Services(bus, run).say(*map(step, range(1, 4)))
    _work(run, bus, tmp_path, once=True)
    for path in (tmp_path / run / "trackers" / "tensorboard").iterdir():
        path.unlink()
    assert _work(run, bus, tmp_path, once=True).num_rows == 3
    assert _losses(tmp_path, run) == Counter(dict.fromkeys(range(1, 4), 1))


def _started(run: str, folder: Path, nats: NatsSettings, events: int, *words: str) -> subprocess.Popen[bytes]:
    """Start a process that writes the run; return when it has noted so many events."""
    login = {"PENSTOCK_NATS__USER": nats.user, "PENSTOCK_NATS__PASSWORD": nats.secret()}
    command = [sys.executable, "-P", "-m", *words, *_arguments(folder, nats)]
    process = subprocess.Popen(command, env={**os.environ, **login}, stderr=subprocess.DEVNULL)
    noted = folder / run / "trackers" / "tensorboard.json"
    wait_for(lambda: noted.exists() and json.loads(noted.read_text())["event"] >= events, "the writer to write")
    return process


@pytest.mark.slow
def test_a_writer_ends_when_the_process_that_started_it_is_killed(
    bus: Bus, run: str, nats_settings: NatsSettings, tmp_path: Path
) -> None:
    """Else it would go on beside the next `penstock track`, which would be refused."""
    Services(bus, run).say(step(1))
    parent = _started(run, tmp_path, nats_settings, 1, "penstock", "track", run)
    writers = psutil.Process(parent.pid).children(recursive=True)
    assert writers
    parent.kill()
    parent.wait()
    _, running = psutil.wait_procs(writers, timeout=60)
    assert not running
    assert _work(run, bus, tmp_path, once=True).num_rows == 0


def test_two_processes_do_not_write_one_run_to_one_tracker(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match="another process writes this run to wandb")
    with consumer.opened(tmp_path, "wandb"), refused, consumer.opened(tmp_path, "wandb"):
        pass
    with consumer.opened(tmp_path, "wandb"):
        pass


def test_events_that_begin_again_are_not_taken_for_the_old_ones(bus: Bus, run: str, tmp_path: Path) -> None:
    Services(bus, run).say(step(1))
    with consumer.opened(tmp_path / run, "tensorboard") as file:
        file.position.event = 50
        file.save()
    with pytest.raises(ConfigError, match="deleted and begin again, after 50 were written"):
        _work(run, bus, tmp_path, once=True)


def test_a_position_that_is_not_ours_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """A damaged position is never taken for an empty one, which would write the run twice."""
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "wandb.json").write_text('{"key": "../../etc"}')
    refused = pytest.raises(ConfigError, match="remove it to write the whole run to a new run")
    with refused, consumer.opened(tmp_path, "wandb"):
        pass


def test_steps_of_a_training_on_given_answers_are_written_once(tmp_path: Path) -> None:
    """Also those that are made again after a kill cut the file to its checkpoint; the end is that of the result."""
    arguments = [f"run.dir={tmp_path}", "tracker=tensorboard"]
    settings = load_settings("warm-up", arguments, {})
    folder = tmp_path / "warm-up" / "sft-training"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"settings": {"sft": {"lr": 1e-05}}}')

    def work(steps: range, *, once: bool = True) -> Written:
        lines = [{"kind": "step", "at": 1.0, "step": number, "loss": 1 / number} for number in steps]
        lines += [{"kind": "eval", "at": 2.0, "step": number, "eval_loss": 0.5} for number in steps if number % 2 == 0]
        lines.sort(key=lambda line: line["step"])
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "st')
        job = _job(settings, "tensorboard", arguments, once=once, awaits_report=False, training="sft")
        stop = threading.Event()
        with consumer.opened(job.folder, "tensorboard") as file:
            return Consumer(job, TrainingLog(job.folder, job.run_id, stop), file, stop).work()

    assert work(range(1, 6)) == Written(num_rows=7)
    assert work(range(1, 4)) == Written()
    assert work(range(1, 8)) == Written(num_rows=3)
    (folder / "result.json").write_text("{}")
    assert work(range(1, 9), once=False) == Written(num_rows=2, finished=True)
    written = event_files.values(folder / "trackers" / "tensorboard")
    assert Counter({n: k for (tag, n, _), k in written.items() if tag == "train/loss"}) == Counter(range(1, 9))
    assert "sft.lr" in event_files.texts(folder / "trackers" / "tensorboard")["settings/text_summary"]


@pytest.mark.slow
def test_the_process_of_a_tracker_that_is_killed_beside_a_training_is_started_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "warm-up" / "sft-training"
    folder.mkdir(parents=True)
    noted = folder / "trackers" / "tensorboard.json"
    arguments = [f"run.dir={tmp_path}", "run.id=warm-up", "tracker=tensorboard", "tracking.finish_s=60"]
    with trackers.beside("sft", arguments, os.environ), (folder / "metrics.jsonl").open("w") as file:
        for number in (1, 2):
            print(f'{{"kind": "step", "step": {number}, "loss": 1.0}}', file=file, flush=True)
            wait_for(lambda n=number: noted.exists() and json.loads(noted.read_text())["event"] >= 2 * n, "the writer")
            for child in psutil.Process().children() if number == 1 else ():
                if "penstock.console.tracking" in child.cmdline():
                    child.kill()
        (folder / "result.json").write_text("{}")
    written = event_files.values(folder / "trackers" / "tensorboard")
    assert Counter({n: k for (tag, n, _), k in written.items() if tag == "train/loss"}) == Counter((1, 2))
    assert "the tracker tensorboard ended with exit code -9; restarting it\n" in capsys.readouterr().err


@pytest.mark.slow
def test_each_evaluation_reaches_a_tracker_once(tmp_path: Path) -> None:
    """Whatever the order of the versions, though a note was cut, and though the command is repeated."""
    folder = tmp_path / "My.run" / "evaluations"
    for name, version in (("v5-a", 5), ("v3-b", 3), ("v5-a", 5)):
        accuracy = Estimate(version / 10, None, None, "none", 1)
        one = SourceResult(source="math", prompts=1, complete=1, failed=0, accuracy=accuracy, pass_at={4: accuracy})
        (folder / name).mkdir(parents=True, exist_ok=True)
        result = EvaluationResult(evaluation_id=name, model="m", version=version, k=4, sources=(one,), finished_at=9.0)
        note_evaluation(folder / name, result)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"evaluation": "v3-b", "st' if name == "v5-a" else "")
        trackers.write_evaluations(folder.parent, ["tracker=tensorboard", "tracking.finish_s=60"], os.environ)
    written = event_files.values(folder / "trackers" / "tensorboard")
    expected = {("eval/math/pass@4", 5, 0.5): 1, ("eval/math/pass@4", 3, 0.3): 1}
    assert {key: count for key, count in written.items() if "@" in key[0]} == expected
