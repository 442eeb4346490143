"""The engine as the worker's child: started, swapped, restarted when it ends, given up when it keeps ending."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.servers import wait_for

from penstock.protocol.groups import Sampling
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.engines import engine_http, managed_engine
from penstock.rollout_service.engines.engine_process import LaunchCommand
from penstock.rollout_service.engines.managed_engine import ManagedEngine
from penstock.rollout_service.engines.sglang.client import SglangClient
from penstock.rollout_service.errors import EngineRestartLimit, EngineUnreachable, WeightsUnusable, WeightsUnverified

V0, V1, V2 = map(PolicyVersion, range(3))


def faulty_engine_command(folder: Path, version: PolicyVersion, port_file: Path) -> list[str]:
    """Start the tests' engine in the embedded one's place."""
    return [sys.executable, "-m", "tests.rollout_service.engines.faulty_engine", str(version), str(port_file)]


def script(source: str) -> LaunchCommand:
    return lambda folder, version, port_file: [sys.executable, "-c", source]


PREPARABLE = """
import json, runpy, sys
if sys.argv[1:] == ["--prepare"]:
    if not (line := sys.stdin.readline()):
        sys.exit(0)
    sys.argv[1:] = json.loads(line)
runpy.run_module("tests.rollout_service.engines.faulty_engine", run_name="__main__", alter_sys=True)
"""
PREPARE = [sys.executable, "-c", PREPARABLE, "--prepare"]


def preparable_command(folder: Path, version: PolicyVersion, port_file: Path) -> list[str]:
    """Start the tests' engine as a program that can be prepared."""
    return [*PREPARE[:-1], str(version), str(port_file)]


def build(
    command: LaunchCommand, tmp_path: Path, start_deadline_s: float = 30.0, prepare: Sequence[str] = ()
) -> ManagedEngine:
    return ManagedEngine(
        command,
        functools.partial(SglangClient, request_deadline_s=10.0),
        log_file=tmp_path / "engine.log",
        start_deadline_s=start_deadline_s,
        prepare=prepare,
    )


@asynccontextmanager
async def running(engine: ManagedEngine, folder: Path) -> AsyncIterator[asyncio.Task[None]]:
    """Start on version 0 and supervise; ends the child after the block."""
    await engine.load(folder, V0)
    supervision = asyncio.create_task(engine.run())
    try:
        yield supervision
    finally:
        supervision.cancel()
        await engine.stop()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model to the tests' engine."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    (folder / "config.json").write_text('{"vocab_size": 300, "max_position_embeddings": 64}')
    return folder


async def until(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110  (the condition is the operating system's)
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"waited in vain for {what}")


def child_of(engine: ManagedEngine) -> int:
    assert engine._process is not None
    return engine._process.pid


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP has reached every thread of a process."""
    threads = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(threads) == {"T"}


@pytest.mark.parametrize("keeps_memory", [False, True])
async def test_a_released_engine_serves_the_version_of_the_next_load(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, keeps_memory: bool
) -> None:
    """One that does not release its memory is killed, so that it is free, and started with that load alone."""
    monkeypatch.setenv("FAULTY_ENGINE_KEEPS_MEMORY", "1" if keeps_memory else "")
    engine = build(faulty_engine_command, tmp_path)
    async with running(engine, model):
        first = child_of(engine)
        await engine.release("abort")
        assert (engine.is_released, engine.ready.is_set()) == (True, False)
        assert exists(first) != keeps_memory
        await engine.check_health()
        await asyncio.sleep(0.1)  # in which a restart would begin
        assert child_of(engine) == first
        assert not engine.ready.is_set()
        await engine.load(model, V1)
        assert (engine.is_released, engine.ready.is_set(), engine.version) == (False, True, V1)
        assert (child_of(engine) != first) == keeps_memory


async def test_an_engine_starts_with_its_version_and_follows(tmp_path: Path, model: Path):
    """The first version is on the command line, later ones are loaded; both are confirmed by the engine."""
    engine = build(faulty_engine_command, tmp_path)
    async with running(engine, model):
        assert engine.version == await engine.client.served_version() == V0
        await engine.load(model, V1)
        assert engine.version == await engine.client.served_version() == V1
        assert engine.applied == {V0, V1}
        assert engine.cpu_seconds() > 0


def prepared_by(engine: ManagedEngine) -> int:
    """The id of the process that waits for the first weights."""
    assert engine._prepared is not None
    return engine._prepared.pid


async def test_a_prepared_process_becomes_the_engine(tmp_path: Path, model: Path):
    engine = build(preparable_command, tmp_path, 240.0, prepare=PREPARE)
    await engine.prepare()
    prepared = prepared_by(engine)
    async with running(engine, model):
        assert child_of(engine) == prepared
        assert await engine.client.served_version() == V0
        os.kill(prepared, signal.SIGKILL)
        await until(lambda: not engine.ready.is_set(), "the death to be noticed")
        await asyncio.wait_for(engine.ready.wait(), 60)
        assert child_of(engine) != prepared


async def test_without_its_prepared_process_an_engine_starts_all_the_same(tmp_path: Path, model: Path):
    """And the process ends with a worker that never had weights."""
    engine = build(preparable_command, tmp_path, 240.0, prepare=PREPARE)
    await engine.prepare()
    prepared = prepared_by(engine)
    os.kill(prepared, signal.SIGKILL)
    await until(lambda: not exists(prepared), "its death to be noticed")
    async with running(engine, model):
        assert child_of(engine) != prepared
        assert await engine.client.served_version() == V0
    unused = build(preparable_command, tmp_path, 240.0, prepare=PREPARE)
    await unused.prepare()
    prepared = prepared_by(unused)
    await unused.stop()
    assert not exists(prepared)


async def test_a_killed_engine_is_restarted_on_the_newest_version(tmp_path: Path, model: Path):
    """After SIGKILL the same version is served by another process, and it was never ready in between."""
    engine = build(faulty_engine_command, tmp_path)
    async with running(engine, model):
        await engine.load(model, V1)
        first = child_of(engine)
        os.kill(first, signal.SIGKILL)
        await until(lambda: not engine.ready.is_set(), "the death to be noticed")
        await asyncio.wait_for(engine.ready.wait(), 60)
        assert child_of(engine) != first
        assert await engine.client.served_version() == V1
        os.kill(child_of(engine), signal.SIGKILL)
        await asyncio.wait_for(engine.load(model, V2), 30)  # it exits during a swap
        assert engine.version == await engine.client.served_version() == V2


async def test_an_engine_that_does_not_confirm_a_version_is_restarted_with_it(tmp_path: Path, model: Path):
    """After a swap that is refused twice the served weights are unknown: it is restarted from the new ones."""
    engine = build(faulty_engine_command, tmp_path)
    async with running(engine, model):
        first = child_of(engine)
        unloadable = tmp_path / "elsewhere"
        unloadable.mkdir()
        (unloadable / "config.json").write_text(
            "{}"
        )  # the tests' engine refuses a folder without safetensors, but starts on anything
        await asyncio.wait_for(engine.load(unloadable, V2), 30)
        assert child_of(engine) != first
        assert engine.version == await engine.client.served_version() == V2


async def test_a_version_that_no_engine_starts_from_is_given_up(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
):
    """Neither loaded nor started from: the version before is served again, and the next one is followed."""
    monkeypatch.setattr(managed_engine, "FIRST_BACK_OFF_S", 0.001)

    def command(folder: Path, version: PolicyVersion, port_file: Path) -> list[str]:
        if folder.name == "bad":
            return [sys.executable, "-c", "print('SafetensorError: invalid header'); raise SystemExit(1)"]
        return faulty_engine_command(folder, version, port_file)

    bad = tmp_path / "bad"
    bad.mkdir()
    engine = build(command, tmp_path)
    async with running(engine, model):
        with pytest.raises(WeightsUnusable, match="neither loaded version 1 nor started with it"):
            await asyncio.wait_for(engine.load(bad, V1), 30)
        assert engine.version == await engine.client.served_version() == V0
        await engine.load(model, V2)
        assert engine.version == await engine.client.served_version() == V2
        assert engine.applied == {V0, V2}


async def test_an_engine_that_serves_other_weights_is_replaced(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
):
    """A periodic check detects it; its client refuses all requests from then on."""
    monkeypatch.setattr(managed_engine, "CHECK_S", 0.05)
    engine = build(faulty_engine_command, tmp_path)
    async with running(engine, model):
        first = engine.client
        await first.load_weights(model, V2)  # as an outsider would
        await until(lambda: engine.client is not first and engine.ready.is_set(), "another engine")
        assert engine.version == await engine.client.served_version() == V0
        with pytest.raises(WeightsUnverified, match=r"loaded version 0 but serves 2|the engine process exited"):
            await first.generate([[5]], Sampling(max_new_tokens=1), 1)


async def test_a_hanging_engine_is_killed_and_restarted(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch):
    """An engine that does not answer model_info after a failed request is replaced."""
    engine = build(faulty_engine_command, tmp_path)
    async with running(engine, model):
        first = child_of(engine)
        await engine.check_health()
        assert engine.ready.is_set(), "an engine that answers is left alone"
        os.kill(first, signal.SIGSTOP)
        wait_for(lambda: is_stopped(first), "SIGSTOP")  # until then a thread may answer
        with monkeypatch.context() as patch:
            patch.setattr(engine_http, "PROBE_S", 0.2)
            await engine.check_health()
        await asyncio.wait_for(engine.ready.wait(), 60)
        assert child_of(engine) != first


@pytest.mark.parametrize(
    ("source", "deadline_s", "words"),
    [
        ("import sys; print('no such device'); sys.exit(3)", 30.0, r"(?s)ended with status 3.*no such device"),
        ("import time; print('loading', flush=True); time.sleep(600)", 0.3, r"opened no port within 0\.3 s"),
    ],
)
async def test_a_first_start_that_fails_says_why(
    tmp_path: Path, model: Path, source: str, deadline_s: float, words: str
):
    engine = build(script(source), tmp_path, deadline_s)
    with pytest.raises(EngineUnreachable, match=words):
        await engine.load(model, V0)


async def test_an_engine_that_keeps_exiting_ends_the_worker(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
):
    """After so many restarts within the window the error says how the last one ended."""
    monkeypatch.setattr(managed_engine, "FIRST_BACK_OFF_S", 0.001)
    engine = build(faulty_engine_command, tmp_path)
    async with running(engine, model) as supervision:
        engine._command = script("print('segmentation fault'); raise SystemExit(139)")
        os.kill(child_of(engine), signal.SIGKILL)
        with pytest.raises(
            EngineRestartLimit,
            match=rf"(?s)exited {managed_engine.MAX_RESTARTS + 1} times within.*status 139.*segmentation fault",
        ):
            await asyncio.wait_for(supervision, 60)
