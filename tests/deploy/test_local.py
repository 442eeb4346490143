"""``penstock up``: two servers over one folder, which keep ports and credentials and stop with their parent."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.deploy.live_processes import processes_of
from tests.servers import require, wait_for

from penstock.deploy.bootstrap import ConnectionSettings
from penstock.deploy.local import LocalStack
from penstock.deploy.processes.child import DeployError
from penstock.deploy.processes.servers import remove_stale_uploads
from penstock.deploy.processes.supervise import Supervisor
from penstock.protocol.config.run_file import load
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _programs() -> None:
    require("nats-server")
    require("rclone")


def test_a_stack_keeps_its_data_ports_and_secrets(tmp_path: Path) -> None:
    """A second start over the same folder has the same addresses, credentials and objects."""
    with LocalStack(tmp_path / "data") as stack:
        environment = stack.environment()
        ref = Blobs(stack.s3).put("runs/x/y", b"kept")
        with Bus.connect(stack.nats, name="test") as bus:
            assert bus.down_s == 0.0
    with LocalStack(tmp_path / "data") as stack:
        assert stack.environment() == environment
        assert Blobs(stack.s3).get(ref) == b"kept"


def test_secrets_are_the_owners_alone(tmp_path: Path) -> None:
    """Password and key are in files of mode 0600, differ, and are on no command line."""
    with LocalStack(tmp_path / "data") as stack:
        secrets = [stack.nats.secret(), stack.s3.secret()]
        assert len(set(secrets)) == 2
        for name in ("nats.password", "s3.secret_key", "nats/nats.conf"):
            assert stat.S_IMODE((tmp_path / "data" / name).stat().st_mode) == 0o600
        for pid in stack.pids:
            command = Path(f"/proc/{pid}/cmdline").read_text()
            assert not any(secret in command for secret in secrets)
        assert not any(secret in value for secret in secrets for value in stack.environment().values())


def test_a_folder_in_use_is_refused_with_its_holder(tmp_path: Path) -> None:
    """The second start over a folder names the process that holds it and changes nothing."""
    with LocalStack(tmp_path / "data") as stack:
        with pytest.raises(DeployError, match=rf"{tmp_path}/data is in use by process {os.getpid()}"):
            LocalStack(tmp_path / "data").start()
        Blobs(stack.s3).check("x")


def test_a_killed_server_is_restarted(tmp_path: Path) -> None:
    supervisor = Supervisor()
    stack = LocalStack(tmp_path / "data")
    stack.start(supervisor)
    try:
        with Bus.connect(stack.nats, name="test") as bus:
            ref = Blobs(stack.s3).put("runs/x/y", b"kept")
            for pid in stack.pids:
                os.kill(pid, signal.SIGKILL)
            assert supervisor.wait_for(lambda: [e.kind for e in supervisor.events].count("restarted") == 2, 60.0)
            assert Blobs(stack.s3).get(ref) == b"kept"
            assert bus.stream_names().wait() == []
    finally:
        supervisor.close()
        stack.stop()


def test_only_old_leftovers_of_uploads_are_removed(tmp_path: Path) -> None:
    """Remains of interrupted uploads are removed after a day; running uploads and objects are kept."""
    old, new, kept = tmp_path / "b" / ".rclone_temp_put_1", tmp_path / ".rclone_temp_put_2", tmp_path / "b" / "object"
    for path in (old, new, kept):
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    for path in (old, kept):
        os.utime(path, (0, 0))
    assert remove_stale_uploads(tmp_path) == 1
    assert (old.exists(), new.exists(), kept.exists()) == (False, True, True)


# ── the command ───────────────────────────────────────────────────────────────────────────────────


@contextmanager
def penstock_up(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """The running command and the environment it printed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.deploy.local", *arguments], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    environment = {}
    try:
        while "PENSTOCK_S3__REGION" not in environment:
            line = process.stdout.readline()
            assert line, f"it ended with {process.wait()}"
            name, _, value = line.removeprefix("export ").strip().partition("=")
            environment[name] = value
        yield process, environment
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def servers_of(data: Path) -> list[int]:
    return [pid for name in ("nats-server", "rclone") for pid in processes_of(data, word=name)]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_servers_end_with_the_command(tmp_path: Path, how: signal.Signals) -> None:
    """Ctrl-C, SIGTERM and SIGKILL leave no server running, and the folder can be used again immediately."""
    data = tmp_path / "data"
    with penstock_up("--data", str(data)) as (process, _):
        assert len(servers_of(data)) == 2
        process.send_signal(how)
        assert process.wait(60.0) == (-how if how == signal.SIGKILL else 0)
        with LocalStack(data):
            pass
    wait_for(lambda: servers_of(data) == [], "the servers' end")


@pytest.mark.usefixtures("started_anew")
def test_the_printed_environment_is_enough_for_a_service(tmp_path: Path) -> None:
    """The printed variables connect to both servers; ``--run`` has created the run's streams."""
    with penstock_up("--data", str(tmp_path / "data"), "--run", "mine") as (_, environment):
        settings = load(ConnectionSettings, environ=environment).settings
        with Bus.connect(settings.nats, name="test") as bus:
            assert bus.stream_state("mine-tasks").wait().num_messages == 0
        Blobs(settings.s3).check("x")
        written = (tmp_path / "data" / "environment").read_text()
        assert all(f"export {name}={value}\n" in written for name, value in environment.items())


def test_errors_are_one_line_and_exit_code_one(tmp_path: Path) -> None:
    """A folder in use and a bad run id are reported in one line, without a traceback."""
    with LocalStack(tmp_path / "data"):
        for arguments, text in (
            (["--data", str(tmp_path / "data")], "is in use by process"),
            (["--data", str(tmp_path / "other"), "--run", "No Good"], "run id 'No Good' must be"),
        ):
            command = [sys.executable, "-m", "penstock.deploy.local", *arguments]
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=60)
            assert done.returncode == 1
            assert text in done.stderr
            assert "Traceback" not in done.stderr


def with_store(store: Path, code: str) -> list[str]:
    python = sys.executable
    return [python, "-m", "penstock.deploy.stored", str(store), "--", python, "-c", code]


def test_a_command_runs_with_the_servers_of_a_stored_run(tmp_path: Path) -> None:
    with LocalStack(tmp_path / "store") as stack:
        kept = Blobs(stack.s3).put("runs/r/x", b"kept")
    code = f"""
import os, sys
from penstock.deploy.bootstrap import ConnectionSettings
from penstock.protocol.config.run_file import load
from penstock.protocol.transport.blobs import Blobs
blobs = Blobs(load(ConnectionSettings, environ=os.environ).settings.s3)
sys.exit(7 if blobs.exists({kept.key!r}) else 1)
"""
    assert subprocess.run(with_store(tmp_path / "store", code), timeout=300, check=False).returncode == 7
    with LocalStack(tmp_path / "store"):
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_servers_of_a_store_stop_when_the_command_is_stopped(tmp_path: Path, number: int) -> None:
    """Ctrl-C as a terminal sends it, or SIGTERM: the command gets it, and the store is unlocked."""
    code = "import signal, sys; print('began', flush=True); signal.pause()"
    command, quiet = with_store(tmp_path / "store", code), subprocess.DEVNULL
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=quiet, text=True, start_new_session=True)
    assert running.stdout is not None
    assert running.stdout.readline() == "began\n"
    if number == signal.SIGINT:
        os.killpg(running.pid, number)
    else:
        running.send_signal(number)
    assert running.wait(60.0) == 128 + number
    running.stdout.close()
    with LocalStack(tmp_path / "store"):
        pass
