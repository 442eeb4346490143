"""`penstock doctor`, with working and broken machines."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pynvml
import pytest
from tests.console.command import penstock, started
from tests.protocol.metrics.nvml import Nvml
from tests.servers import secret_file

from penstock.console.tools import checks
from penstock.console.tools.checks import package_version
from penstock.protocol.config.connection import NatsSettings
from penstock.protocol.metrics import gpu
from penstock.protocol.metrics.gpu import Gpu
from penstock.trainer.attention_choice import Attention
from penstock.trainer.learner.attention import __main__ as attention


def findings(*arguments: str, cwd: Path, code: int | None = None) -> dict[str, dict[str, str]]:
    answer = penstock("doctor", "--json", *arguments, cwd=cwd, code=code)
    assert len(answer.stdout.strip().splitlines()) == 1
    document = json.loads(answer.stdout)
    assert document["ok"] is (answer.returncode == 0)
    return {finding["name"]: finding for finding in document["findings"]}


def test_a_healthy_machine_passes(tmp_path: Path):
    answer = started("doctor", cwd=tmp_path)
    assert "next: penstock quickstart" in answer.stdout
    assert "torch" in answer.stdout


def test_services_that_answer_are_ok(tmp_path: Path, typed: list[str], nats_settings: NatsSettings):
    found = findings(*typed, cwd=tmp_path)
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
    found = findings("nats.url=nats://127.0.0.1:1", "s3.endpoint=http://127.0.0.1:1", cwd=tmp_path, code=1)
    for name in ("NATS", "S3"):
        assert found[name]["level"] == "fail"
        assert "127.0.0.1:1" in found[name]["detail"]
        assert "penstock up" in found[name]["fix"]


def test_wrong_credentials_are_distinguished_from_an_unreachable_server(tmp_path: Path, nats_settings: NatsSettings):
    arguments = [f"nats.url={nats_settings.url}", "nats.user=nobody", f"nats.password_file={secret_file('wrong')}"]
    found = findings(*arguments, cwd=tmp_path)
    assert found["NATS"]["level"] == "fail"
    assert "refused user nobody" in found["NATS"]["detail"]


def test_a_lock_of_a_killed_build_is_found(tmp_path: Path):
    """A lock under torch_extensions blocks every later process without a message; the doctor lists it."""
    (tmp_path / "ext" / "cpu_adam").mkdir(parents=True)
    lock = tmp_path / "ext" / "cpu_adam" / "lock"
    lock.touch()
    answer = penstock("doctor", cwd=tmp_path, TORCH_EXTENSIONS_DIR=str(tmp_path / "ext"), code=1)
    assert str(lock) in "".join(answer.stdout.split()).replace("→", "") or "cpu_adam" in answer.stdout


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Put a shell script on the path, which has no other program."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def write(name: str, script: str) -> Path:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    return write


def test_a_missing_package_or_program_is_a_warning_and_a_broken_one_a_failure(program: Callable[[str, str], Path]):
    """A machine without the local servers can still be a worker."""
    missing = checks.installed("trainer", ("pydantic", "no-such-package"))
    assert (missing.level, "no-such-package" in missing.detail) == ("warn", True)
    assert missing.fix == "pip install 'penstock[trainer]'"
    assert checks.runnable("no-such-program", "nothing").level == "warn"
    program("broken-server", "exit 3")
    assert checks.runnable("broken-server", "nothing").level == "fail"


def test_the_sandbox_of_code_rewards_is_named(monkeypatch: pytest.MonkeyPatch):
    """The doctor names the sandbox, found by attacking it; when the probe cannot run, it warns."""
    found = checks.sandbox()
    assert (found.level, "programs run in" in found.detail) == ("ok", True), found
    monkeypatch.setattr("penstock.console.tools.checks.sys.executable", "/nonexistent")
    assert checks.sandbox().level == "warn"


def test_a_broken_driver_is_a_failure_and_a_torch_without_cuda_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gpus = [Gpu(0, "0", "NVIDIA H200", 141 * 2**30, 2**30)]
    found = checks.gpu(gpus, {})
    assert found.detail.startswith("0: NVIDIA H200, 1.0 of 141.0 GiB used")
    assert found.level == ("warn" if "+cpu" in (package_version("torch") or "") else "ok")
    with monkeypatch.context() as patched:
        patched.setattr(checks, "package_version", lambda _: "2.13.0+cu130")
        assert checks.gpu(gpus, {}).detail.endswith(
            "trainers allocate with PYTORCH_ALLOC_CONF=expandable_segments:True"
        )
        native = {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}
        assert checks.gpu(gpus, native).detail.endswith("PYTORCH_CUDA_ALLOC_CONF=backend:native")
    monkeypatch.setattr(gpu, "_package", lambda **_: Nvml(init_error=pynvml.NVML_ERROR_UNKNOWN))
    monkeypatch.setattr(checks, "_run", lambda *_, **__: OSError("not started"))
    (found,) = (one for one in checks.machine(tmp_path, {}) if one.name == "gpu")
    assert (found.level, "refuses to list the GPUs" in found.detail) == ("fail", True)


def test_a_port_in_use_is_reported_with_its_setting():
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = checks.port_use(server.getsockname()[1], "reward_service.port")
    assert found.level == "warn"
    assert "reward_service.port" in found.fix


def test_the_space_for_a_new_folder_is_that_of_its_parent(tmp_path: Path):
    assert checks.disk(tmp_path / "a" / "b" / "runs").level in {"ok", "warn"}


@pytest.mark.parametrize(
    ("name", "code", "level"), [("flash", 0, "ok"), ("sdpa", 0, "warn"), ("none: no attention kernel works", 1, "fail")]
)
def test_the_attention_of_a_gpu_is_checked_and_a_slow_one_is_a_warning(
    name: str, code: int, level: str, program: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a process that loads torch; here one that answers as such a machine does."""
    line = f" 128 dimensions, 4 query heads a key head, bfloat16 on cuda: {name}"
    python = program("python", f"echo '{line}'\nexit {code}")
    monkeypatch.setattr("penstock.console.tools.checks.sys.executable", str(python))
    found = checks.attention(has_gpu=True)
    assert (found.level, bool(found.fix)) == (level, level != "ok")
    assert found.detail.startswith(name) or level == "fail"


def test_without_a_gpu_the_trainers_attention_is_the_kernel_for_the_cpu() -> None:
    found = checks.attention(has_gpu=False)
    assert (found.level, "cpu-flash" in found.detail) == ("ok", True)


def test_the_module_behind_it_names_a_backend_for_every_head(capsys: pytest.CaptureFixture[str]) -> None:
    assert attention.main() == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) >= 8
    assert all(line.rpartition(": ")[2] in get_args(Attention) for line in lines)
