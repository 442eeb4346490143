"""`penstock doctor`, with working and broken machines."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

import pytest
from tests.console.cli import test_command
from tests.console.command import penstock
from tests.servers import secret_file

from penstock.console import launch
from penstock.console.tools import checks
from penstock.console.tools.checks import package_version
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.trainer.attention_choice import NAMES


def findings(answer: str) -> dict[str, dict[str, str]]:
    return {one["name"]: one for one in json.loads(answer)["findings"]}


def test_a_healthy_machine_passes(tmp_path: Path):
    answer = test_command.penstock("doctor", cwd=tmp_path)
    assert answer.returncode == 0, answer.stdout
    assert "next: penstock quickstart" in answer.stdout
    assert "torch" in answer.stdout


def test_json_is_one_object_and_agrees_with_the_exit_code(tmp_path: Path):
    answer = penstock("doctor", "--json", cwd=tmp_path)
    assert len(answer.stdout.strip().splitlines()) == 1
    assert json.loads(answer.stdout)["ok"] is (answer.returncode == 0)


def test_services_that_answer_are_ok(tmp_path: Path, nats_settings: NatsSettings, s3_settings: S3Settings):
    arguments = [f"nats.url={nats_settings.url}", f"nats.user={nats_settings.user}"]
    arguments += [f"nats.password_file={secret_file(nats_settings.secret())}", f"s3.endpoint={s3_settings.endpoint}"]
    arguments += [f"s3.access_key={s3_settings.access_key}", f"s3.secret_key_file={secret_file(s3_settings.secret())}"]
    arguments += [f"s3.bucket={s3_settings.bucket}"]
    found = findings(penstock("doctor", "--json", *arguments, cwd=tmp_path).stdout)
    assert found["NATS"]["level"] == found["S3"]["level"] == "ok"
    assert nats_settings.url in found["NATS"]["detail"]


def test_an_engine_that_is_not_installed_is_a_failure(tmp_path: Path):
    """In the worker's Python, or in the one that the run file names; other engines are not looked for."""
    (one,) = checks.engine(["worker.engine=vllm"], {})
    assert (one.level, one.name) == ("fail", "vllm")
    assert "has no vllm" in one.detail
    assert "vllm.python" in one.fix
    (other,) = checks.engine(["worker.engine=sglang", f"sglang.python={tmp_path}/python"], {})
    assert (other.level, other.name) == ("fail", "sglang")
    assert f"{tmp_path}/python does not run" in other.detail
    started_by_words = ["worker.engine=vllm", "vllm.command=['podman', 'run', 'image']"]
    assert not [*checks.engine([], {}), *checks.engine(started_by_words, {})]


def test_unreachable_servers_are_failures_with_a_fix(tmp_path: Path):
    """An unreachable address makes the exit code 1 and prints a fix."""
    arguments = ["nats.url=nats://127.0.0.1:1", "s3.endpoint=http://127.0.0.1:1"]
    answer = penstock("doctor", "--json", *arguments, cwd=tmp_path)
    assert answer.returncode == 1
    found = findings(answer.stdout)
    for name in ("NATS", "S3"):
        assert found[name]["level"] == "fail"
        assert "127.0.0.1:1" in found[name]["detail"]
        assert "penstock up" in found[name]["fix"]


def test_wrong_credentials_are_distinguished_from_an_unreachable_server(tmp_path: Path, nats_settings: NatsSettings):
    arguments = [f"nats.url={nats_settings.url}", "nats.user=nobody", f"nats.password_file={secret_file('wrong')}"]
    found = findings(penstock("doctor", "--json", *arguments, cwd=tmp_path).stdout)
    assert found["NATS"]["level"] == "fail"
    assert "refused user nobody" in found["NATS"]["detail"]


def test_a_lock_of_a_killed_build_is_found(tmp_path: Path):
    """A lock under torch_extensions blocks every later process without a message; the doctor lists it."""
    (tmp_path / "ext" / "cpu_adam").mkdir(parents=True)
    lock = tmp_path / "ext" / "cpu_adam" / "lock"
    lock.touch()
    answer = penstock("doctor", cwd=tmp_path, TORCH_EXTENSIONS_DIR=str(tmp_path / "ext"))
    assert answer.returncode == 1
    assert str(lock) in "".join(answer.stdout.split()).replace("→", "") or "cpu_adam" in answer.stdout


def test_a_missing_package_names_its_extra():
    found = checks.installed("trainer", ("pydantic", "no-such-package"))
    assert found.level == "warn"
    assert "no-such-package" in found.detail
    assert found.fix == "pip install 'penstock[trainer]'"


def test_a_missing_program_is_a_warning(tmp_path: Path):
    """A machine without the local servers can still be a worker."""
    assert checks.runnable("no-such-program", "nothing").level == "warn"


def test_a_program_that_does_not_start_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "broken-server"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checks.runnable("broken-server", "nothing").level == "fail"


def test_the_sandbox_of_code_rewards_is_named(monkeypatch: pytest.MonkeyPatch):
    """The doctor names the sandbox, found by attacking it; when the probe cannot run, it warns."""
    found = checks.sandbox()
    assert (found.level, "programs run in" in found.detail) == ("ok", True), found
    monkeypatch.setattr("penstock.console.tools.checks.sys.executable", "/nonexistent")
    assert checks.sandbox().level == "warn"


def test_a_broken_driver_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """nvidia-smi that fails means a GPU that will not work."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexit 9\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checks.gpu().level == "fail"


def test_a_gpu_without_a_cuda_torch_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = checks.gpu()
    assert "NVIDIA H200" in found.detail
    assert found.level == ("warn" if "+cpu" in (package_version("torch") or "") else "ok")


def test_a_port_in_use_is_reported_with_its_setting():
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = checks.port_use(server.getsockname()[1], "reward_service.port")
    assert found.level == "warn"
    assert "reward_service.port" in found.fix


def test_the_space_for_a_new_folder_is_that_of_its_parent(tmp_path: Path):
    assert checks.disk(tmp_path / "a" / "b" / "runs").level in {"ok", "warn"}


_SCRIPT = """#!/bin/sh
echo ' 128 dimensions, 4 query heads a key head, bfloat16 on cuda: {name}'
exit {code}
"""


@pytest.mark.parametrize(
    ("name", "code", "level"),
    [("flash", 0, "ok"), ("sdpa", 0, "warn"), ("none: no attention kernel works", 1, "fail")],
)
def test_the_attention_of_a_gpu_is_checked_and_a_slow_one_is_a_warning(
    name: str, code: int, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a process that loads torch; here one that answers as such a machine does."""
    python = tmp_path / "python"
    python.write_text(_SCRIPT.format(name=name, code=code))
    python.chmod(0o755)
    monkeypatch.setattr("penstock.console.tools.checks.sys.executable", str(python))
    found = checks.attention(has_gpu=True)
    assert (found.level, found.detail.partition(":")[0]) == (
        level,
        name if level != "fail" else found.detail.partition(":")[0],
    )
    assert bool(found.fix) == (level != "ok")


def test_without_a_gpu_the_trainers_attention_is_the_kernel_for_the_cpu() -> None:
    found = checks.attention(has_gpu=False)
    assert (found.level, "cpu-flash" in found.detail) == ("ok", True)


def test_the_module_behind_it_names_a_backend_for_every_head() -> None:
    answer = subprocess.run(
        launch.module("penstock.trainer.learner.attention"), capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.strip().splitlines()
    assert len(lines) >= 8
    assert all(line.rpartition(": ")[2] in NAMES for line in lines)
