"""`penstock.Client` and its handles: what is refused before anything starts, and what the handles say of a run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.client import local_start
from penstock.client.events import Event
from penstock.client.handles import Run
from penstock.client.processes import RunFailed, State
from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.record import run_folder
from penstock.reward_service.errors import UserFileError

ROWS = [{"prompt": "sort 31", "ground_truth": "13"}]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[penstock.Client]:
    with penstock.Client(runs=tmp_path / "runs") as made:
        yield made


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"trainer": {"lrr": 1}}, ConfigError, r"unknown key trainer.lrr; did you mean trainer.lr\?"),
        ({"trainer.lr": "high"}, ConfigError, r"trainer.lr: expected a valid number"),
        ({"modl": {"path": 1}}, ConfigError, r"unknown section \[modl\]; did you mean \[model\]\?"),
        ({"algorithm": "grpoo"}, ConfigError, r"unknown algorithm 'grpoo'; did you mean grpo\?"),
        ({"run_id": "My Run"}, ConfigError, r"run id 'My Run' must be"),
        ({"workers": 0}, ConfigError, r"at least one rollout worker"),
        ({"reward": lambda texts: 0.0}, UserFileError, r"is not a reward function"),
        ({"nats.password": "x"}, ConfigError, r"nats.password is refused"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    client: penstock.Client, tmp_path: Path, more: dict[str, Any], error: type[Exception], message: str
) -> None:
    """The error names the setting and the nearest one; there is no folder of runs, and no process."""
    given = {"model": "quickstart", "data": ROWS, "reward": "exact_match", **more}
    with pytest.raises(error, match=message):
        client.train(**given)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"sft": {"stepz": 1}}, r"unknown key sft.stepz; did you mean sft.steps\?"),
        ({"rollout": {"group_size": 4}}, r"rollout.group_size is not read by `penstock sft`"),
        ({"sft": {"data": ROWS}}, r"sft.data is given twice"),
    ],
)
def test_fine_tuning_refuses_what_it_does_not_read(
    client: penstock.Client, tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        client.sft(model="quickstart", data=ROWS, **more)
    assert not (tmp_path / "runs").exists()


def test_a_missing_model_or_file_is_named_before_a_process_starts(client: penstock.Client, tmp_path: Path) -> None:
    """Both verbs check the paths of a call; the name that they would have taken is free again."""
    with pytest.raises(ConfigError, match=r"model.path = .*nowhere"):
        client.train(model=tmp_path / "nowhere", data=ROWS, reward="exact_match")
    with pytest.raises(ConfigError, match=r"sft.data: there is no .*rows.jsonl"):
        client.sft(model="quickstart", data=tmp_path / "rows.jsonl")
    assert list(tmp_path.glob("runs/*")) == []


def test_a_run_that_is_running_is_not_started_again(client: penstock.Client, tmp_path: Path) -> None:
    """Another process that holds the run's folder is named as the reason."""
    with (
        run_folder.hold_lock(tmp_path / "runs" / "mine"),
        pytest.raises(ConfigError, match="run mine is running already"),
    ):
        client.train(model="quickstart", data=ROWS, reward="exact_match", run_id="mine")


def test_runs_get_the_first_free_name(tmp_path: Path) -> None:
    """A name is claimed by its folder, so that two callers never share one."""
    names = [local_start.claim({}, tmp_path, "run")[0].name for _ in range(3)]
    assert names == ["run", "run-2", "run-3"]
    assert local_start.claim({("run", "id"): "run"}, tmp_path, "run") == (tmp_path / "run", False)
    assert local_start.claim({("run", "id"): "mine"}, tmp_path, "run") == (tmp_path / "mine", True)


def test_an_existing_run_is_found_by_its_name(client: penstock.Client, tmp_path: Path) -> None:
    """Its state is that of its folder: running while a process holds it, then as it ended; another name is an error."""
    folder = tmp_path / "runs" / "mine"
    with run_folder.hold_lock(folder):
        run = client.run("mine")
        assert run.state == "running"
        run_folder.request_pause(folder)
        assert run.state == "pausing"
        with pytest.raises(TimeoutError):
            run.wait(0.05)
        with pytest.raises(PenstockError, match="pausing: wait"):
            run.resume()
        with pytest.raises(PenstockError, match="started by another program"):
            run.stop()
    assert run.wait(60.0).state == "paused"
    with pytest.raises(PenstockError, match="only one that is running can be paused"):
        run.pause()
    run_folder.withdraw_pause(folder)
    assert run.state == "stopped"
    with pytest.raises(ConfigError, match=r"has no run\.toml"):
        run.resume()
    (folder / "report.json").write_text("{}")
    assert run.state == "finished"
    with pytest.raises(ConfigError, match=r"no run min .*did you mean mine\?"):
        client.run("min")


class Scripted:
    def __init__(self, *, over_after: int = 0, end: State = "finished") -> None:
        self.run_id = "scripted"
        self.folder: Path | None = None
        self.waits = 0
        self.called: list[str] = []
        self._over_after = over_after
        self._end: State = end

    @property
    def state(self) -> State:
        return "running" if self.waits < self._over_after else self._end

    def wait(self, timeout_s: float | None) -> bool:
        self.waits += 1
        time.sleep(min(timeout_s or 0.0, 0.01))
        return self.state != "running"

    def failure(self) -> RunFailed:
        return RunFailed("run scripted ended with exit code 1")

    def rows(self) -> list[Mapping[str, Any]]:
        return [{"kind": "step", "step": 1, "loss": 0.5}, {"kind": "eval", "step": 0, "reward_mean": 0.1}]

    def events(self) -> Iterator[Event | None]:
        yield None
        yield Event("step", "trainer", 1.0, {"step": 1})
        yield None
        yield Event("state", "trainer", 2.0, {"finished": True})

    def versions(self) -> list[dict[str, Any]]:
        return []

    def export(self, version: int | None, to: Path) -> None:
        self.called.append(f"export {version}")

    def __getattr__(self, name: str) -> Callable[[], None]:
        return lambda: self.called.append(name)


def test_a_wait_ends_with_the_run_with_its_failure_or_at_the_timeout() -> None:
    assert Run(Scripted()).wait().state == "finished"
    assert Run(Scripted(end="stopped")).wait(1.0).state == "stopped"
    with pytest.raises(RunFailed, match="exit code 1"):
        Run(Scripted(end="failed")).wait()
    backend = Scripted(over_after=99)
    with pytest.raises(TimeoutError, match="it continues"):
        Run(backend).wait(0.0)
    assert backend.called == []


def test_what_a_run_without_a_folder_has_not_is_an_error() -> None:
    """Model, report and answers say that they are missing; none is made up."""
    run = Run(Scripted())
    for read in (lambda: run.model, lambda: run.report, lambda: run.chat("hello")):
        with pytest.raises(PenstockError, match="run scripted has no"):
            read()
    assert run.checkpoint() is None
    assert run.summary() == {}
    assert (run.step, run.metrics()["loss"].tolist(), run.metrics("eval")["reward_mean"].tolist()) == (1, [0.5], [0.1])
    assert [event.kind for event in run.events()] == ["step", "state"]


async def test_coroutines_do_what_the_methods_do() -> None:
    """Every public name of the plain handles is one of the asynchronous ones too, with the same arguments and results."""
    backend = Scripted(over_after=3)
    run = penstock.AsyncRun(Run(backend))
    assert [event.kind async for event in run.events()] == ["step", "state"]
    assert (await run.metrics())["loss"].tolist() == [0.5]
    assert await (await run.wait(60.0)).state() == "finished"
    assert backend.waits == 3
    await run.stop()
    await run.close()
    assert backend.called == ["stop", "close"]
    for plain, coroutines in (
        (penstock.Client, penstock.AsyncClient),
        (penstock.Run, penstock.AsyncRun),
        (penstock.FineTuning, penstock.AsyncFineTuning),
    ):
        names = {name for name in dir(plain) if not name.startswith("_")}
        assert names <= set(dir(coroutines)), names - set(dir(coroutines))


async def test_an_asynchronous_wait_can_be_cancelled_and_times_out() -> None:
    backend = Scripted(over_after=10**9)
    run = penstock.AsyncRun(Run(backend))
    with pytest.raises(TimeoutError, match=r"not over after 0\.05 s"):
        await run.wait(0.05)
    waiting = asyncio.create_task(run.wait())
    await asyncio.sleep(0.03)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert backend.called == []
