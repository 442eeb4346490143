"""All processes of a run on one machine: it trains, restarts what crashes, and stops all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.console.command import server_arguments
from tests.deploy.live_processes import processes_of
from tests.deploy.placement.hosts import stand_in, started
from tests.servers import require, wait_for
from tests.small_run import write_small_run

from penstock.deploy.local_run import REWARD, LocalRun, endpoint_name, fails_at_first_start, worker_name
from penstock.deploy.local_settings import worker_overrides
from penstock.deploy.processes.servers import find_program
from penstock.deploy.processes.supervise import ProcessEvent
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.config.run_file import load
from penstock.protocol.errors import ConfigError
from penstock.protocol.transport.bus import Bus
from penstock.rollout_service.settings import RolloutSettings
from penstock.trainer.settings import TrainerSettings

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _programs() -> None:
    require("nats-server")
    require("rclone")


def python_without(folder: Path, *modules: str) -> str:
    """Return a Python whose processes of modules only wait: what they do is of no interest, and they take long to start."""
    (folder / "bin").mkdir()
    for name in ("nats-server", "rclone"):  # looked for beside it
        (folder / "bin" / name).symlink_to(find_program(name))
    file = folder / "bin" / "python"
    waits = "|".join(f'*" {module} "*' for module in modules)
    file.write_text(f'#!/bin/sh\ncase " $* " in {waits}) exec sleep 600;; esac\nexec {sys.executable} "$@"\n')
    file.chmod(0o755)
    return str(file)


@pytest.fixture
def run_file(tmp_path: Path, run_id: str) -> Path:
    """A run of a few steps of a tiny model."""
    return write_small_run(tmp_path, run_id, trainer={"steps": 12})


def test_workers_and_ranks_share_the_cores(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that is set counts."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(192)))
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}

    def threads(*arguments: str, **more: str) -> str:
        run = LocalRun([str(run_file), *arguments], environ=environ | more)
        child = run._service("trainer", [])
        assert child._environ is not None
        return child._environ["OMP_NUM_THREADS"]

    assert [threads(), threads("trainer.num_ranks=8")] == ["64", "19"]
    assert threads("trainer.num_ranks=8", OMP_NUM_THREADS="5") == "5"


def test_sglang_servers_of_a_run_follow_its_adapters_and_head(run_file: Path) -> None:
    """The rank of adapters and a head in float32 are passed on to SGLang, unless the run file sets them there."""

    def overrides(*arguments: str) -> list[str]:
        trainer = load(TrainerSettings, files=[run_file], overrides=arguments, environ={}).settings
        rollout = load(RolloutSettings, files=[run_file], overrides=arguments, environ={}).settings
        return worker_overrides(trainer, rollout)

    assert overrides("model.lora.rank=8", "worker.engine=sglang") == ["sglang.max_lora_rank=8"]
    in_float32 = ("model.dtype=bfloat16", "model.head_dtype=float32")
    assert overrides(*in_float32, "worker.engine=sglang") == ["sglang.fp32_lm_head=true"]
    for others in (
        [*in_float32],
        [*in_float32, "worker.engine=sglang", "sglang.fp32_lm_head=false"],
        ["model.lora.rank=8"],
        ["worker.engine=sglang"],
        ["model.lora.rank=8", "worker.engine=sglang", "sglang.max_lora_rank=64"],
        ["model.lora.rank=8", "model.lora.publish=merged", "worker.engine=sglang"],
    ):
        assert overrides(*others) == []


@pytest.mark.slow
@pytest.mark.usefixtures("started_anew")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_all_processes_exit_with_the_starter(run_file: Path, tmp_path: Path, how: signal.Signals) -> None:
    """Ctrl-C, SIGTERM and SIGKILL of the starter leave no server, no service and no engine."""
    command = [sys.executable, "-m", "penstock.deploy.train", "--local", str(run_file), "--workers", "1"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as run:
        try:
            for word in ("penstock.trainer", "penstock.reward_service", "embedded_engine"):
                wait_for(lambda word=word: processes_of(tmp_path, word=word), word)
            run.send_signal(how)
            assert run.wait(60.0) == (130 if how == signal.SIGTERM else -how)
            wait_for(lambda: processes_of(tmp_path) == [], "the end of all processes")
        finally:
            run.kill()


def test_services_use_the_servers_that_the_run_file_names(
    run_file: Path,
    tmp_path: Path,
    run_id: str,
    nats_settings: NatsSettings,
    s3_settings: S3Settings,
    bus: Bus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With NATS and S3 given, none are started, and the run's streams are created there."""
    where = server_arguments(nats_settings, s3_settings)
    with LocalRun([str(run_file), *where], num_workers=1) as run:
        monkeypatch.setattr(sys, "executable", str(stand_in(tmp_path)))
        run.start_services()
        assert {view.name for view in run.processes()} == {REWARD, worker_name(0)}
        assert f"{run_id}-tasks" in bus.stream_names().wait()
        assert {process.environ["PENSTOCK_NATS__URL"] for process in started(tmp_path, 2)} == {nats_settings.url}
    assert processes_of(tmp_path) == []


def test_a_restarted_reward_service_keeps_its_port_and_its_endpoints(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward file is served by a separate process; both are killed, and its reward is offered at the same address."""
    file = ROOT / "examples" / "my_reward.py"
    monkeypatch.setattr(sys, "executable", python_without(tmp_path, "penstock.rollout_service"))
    with LocalRun([str(run_file)], num_workers=1, reward_files=[file]) as run:
        run.start_services()
        url = run.reward_url

        def score() -> int:
            group = {"prompt": "1", "completions": ["1 2"], "ground_truth": "1 2"}
            try:
                body = {"reward": "my_reward", "groups": [group]}
                answer = httpx.post(f"{url}/v1/score", json=body, trust_env=False, timeout=60).json()
                return answer["results"][0]["scores"][0]["score"]
            except (httpx.HTTPError, LookupError, TypeError):
                return 0

        wait_for(lambda: score() == 1, "the endpoint's first answer")
        for name in (REWARD, endpoint_name(file)):
            run.kill(name)
            wait_for(lambda name=name: [e.kind for e in run.events if e.name == name][-1] == "restarted", name)
        wait_for(lambda: score() == 1, "an answer after both restarts")
        assert run.reward_url == url
    assert processes_of(tmp_path) == []


def test_an_endpoint_that_fails_at_its_first_start_is_not_restarted() -> None:
    """An import error in a reward file would only be repeated; what was killed, or had run before, is started again."""
    crashed = ProcessEvent(0.0, "endpoint-a", "crashed", "SIGKILL")
    assert fails_at_first_start("endpoint-a", 1, [])
    assert fails_at_first_start("endpoint-b", 1, [crashed])
    assert not fails_at_first_start("endpoint-a", -9, [])
    assert not fails_at_first_start("endpoint-a", 1, [crashed])


def test_a_missing_reward_file_is_refused(run_file: Path, tmp_path: Path) -> None:
    """The error names the file, before anything starts."""
    with pytest.raises(ConfigError, match=r"--serve .*none\.py: there is no such file"):
        LocalRun([str(run_file)], reward_files=[tmp_path / "none.py"])


@pytest.mark.slow
def test_a_trainer_that_cannot_start_ends_the_run(run_file: Path, tmp_path: Path) -> None:
    """The command exits with the trainer's exit code and shows the end of its log."""
    (tmp_path / "nowhere").mkdir()  # a folder that is missing is refused before anything starts
    code = "import runpy, sys; sys.executable = sys.argv.pop(1); runpy.run_module('penstock.deploy.train', None, '__main__', True)"
    python = python_without(tmp_path, "penstock.rollout_service", "penstock.reward_service")
    words = ["--local", str(run_file), "--workers=1", f"model.path={tmp_path}/nowhere"]
    done = subprocess.run(
        [sys.executable, "-c", code, python, *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 2
    assert "the trainer ended with exit code 2; its log ends with" in done.stderr
    assert f"{tmp_path}/nowhere" in done.stderr
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (["trainer.stepz=1"], "did you mean trainer.steps?"),
        (["worker.packs_in_flight=-1"], "worker.packs_in_flight"),
        (["nats.url=nats://127.0.0.1:1"], "nats.url is given but s3.endpoint is not"),
        (["s3.endpoint=http://127.0.0.1:1"], "s3.endpoint is given but nats.url is not"),
        (["worker.trusted_keys_file=keys.pem"], "no worker would load the trainer's weights"),
    ],
)
def test_a_bad_run_file_is_refused_before_anything_starts(run_file: Path, extra: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text.replace("?", r"\?")):
        LocalRun([str(run_file), *extra])
    with pytest.raises(ConfigError, match="at least one rollout worker"):
        LocalRun([str(run_file)], num_workers=0)


def test_a_run_on_a_rescored_input_starts_no_engines(run_file: Path, tmp_path: Path) -> None:
    """No worker and no reward service; an input that no run here has is refused before anything starts."""
    run = LocalRun([str(run_file), "data.from_run=first-strict"])
    assert run._local.num_workers == 0
    with pytest.raises(ConfigError, match=r"no local run in .* has a rescored input of that name; found: none"):
        run.check()
    with pytest.raises(ConfigError, match="leave out --serve"):
        LocalRun([str(run_file), "data.from_run=first-strict"], reward_files=[tmp_path / "reward.py"])
