"""Check what this machine has and what is missing (`penstock doctor`): a function each, returning findings with a fix.

Nothing here imports torch or another slow package: versions come from installed metadata, or from running
a program with --version.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.text import Text

from penstock.console import connections, launch
from penstock.console.terminal import console, table
from penstock.console.tools.versions import package_version
from penstock.protocol import logs
from penstock.protocol.config.run_file import Loaded
from penstock.protocol.config.sources import split_arguments
from penstock.protocol.errors import PenstockError
from penstock.protocol.metrics.gpu import Gpu, visible_gpus
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus

Level = Literal["ok", "warn", "fail"]

_GIB = 1024**3
_EXTRAS = {  # extra of the distribution -> packages that its part of the project needs
    "trainer": ("torch", "deepspeed", "transformers", "safetensors", "accelerate"),
    "engine": ("torch", "tokenizers", "safetensors", "fastapi", "uvicorn"),
    "rollout": ("tokenizers", "jinja2"),
    "reward": ("fastapi", "uvicorn", "math-verify"),
    "report": ("matplotlib",),
}
_PROGRAMS = {"nats-server": "nats-server", "rclone": "the local S3 server"}
_ENGINES = {"vllm": "docs/vllm.md", "sglang": "docs/sglang.md"}  # those that a worker starts in a separate Python
_PORTS = {4222: "nats.url", 9000: "s3.endpoint", 8700: "reward_service.port"}
_PROBE_S = 10.0  # a program that takes longer to print its version is a problem itself
_SANDBOX_S = 60.0  # it starts up to two interpreters
_ATTENTION_S = 300.0  # kernels may be compiled
_REACH_S = 3.0  # for a server to answer
_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; ``fix`` is what to type or change, empty when there is no problem."""

    name: str
    level: Level
    detail: str
    fix: str = ""


def machine(folder: Path, environ: Mapping[str, str]) -> Iterator[Finding]:
    yield python()
    for extra, packages in _EXTRAS.items():
        yield installed(extra, packages)
    for program, purpose in _PROGRAMS.items():
        yield runnable(program, purpose)
    yield sandbox()
    try:
        gpus = visible_gpus(environ)
        gpu_finding = gpu(gpus, environ)
    except PenstockError as err:
        gpus, gpu_finding = [], Finding("gpu", "fail", str(err), "check the driver: run nvidia-smi")
    yield gpu_finding
    yield attention(has_gpu=bool(gpus) and gpu_finding.level == "ok")
    yield from memory()
    yield copies_of_weights()
    yield disk(folder)
    yield loopback()
    for port, key in _PORTS.items():
        yield port_use(port, key)
    yield from build_locks(environ)


def engine(arguments: Sequence[str], environ: Mapping[str, str]) -> Iterator[Finding]:
    chosen = launch.given(arguments, environ, "worker", "engine")
    name = str(chosen.value) if chosen is not None else "embedded"
    if name not in _ENGINES or launch.given(arguments, environ, name, "command") is not None:
        return
    python_setting = launch.given(arguments, environ, name, "python")
    python = str(python_setting.value) if python_setting is not None else sys.executable
    fix = (
        f"install {name} into an environment of its own and set {name}.python to its Python ({_ENGINES[name]}), or "
        f'choose worker.engine = "embedded" and take the section [{name}] out'
    )
    command = [python, "-I", "-c", f"import importlib.metadata as found; print(found.version({name!r}))"]
    if isinstance(answer := _run(command), Exception) or answer.returncode:
        why = f"does not run: {answer}" if isinstance(answer, Exception) else f"has no {name}"
        yield Finding(name, "fail", f"worker.engine = {name!r}, and {python} {why}", fix)
    else:
        yield Finding(name, "ok", f"{answer.stdout.strip()} of {python}")


def _run(command: Sequence[str], timeout_s: float = _PROBE_S) -> subprocess.CompletedProcess[str] | Exception:
    """Run a program and return what came of it, or why it did not run to its end."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.SubprocessError) as err:
        return err


def _failure(answer: subprocess.CompletedProcess[str] | Exception) -> str:
    return str(answer) if isinstance(answer, Exception) else f"exit code {answer.returncode}"


def services(loaded: Loaded[connections.ConsoleSettings]) -> Iterator[Finding]:
    settings = loaded.settings
    nats, s3 = settings.nats, settings.s3
    servers: tuple[tuple[str, str, str, Callable[[], object]], ...] = (
        ("NATS", "nats.url", nats.url, lambda: Bus.connect(nats, name="doctor", deadline_s=_REACH_S).close()),
        ("S3", "s3.endpoint", f"{s3.endpoint}/{s3.bucket}",
         lambda: Blobs(s3).check(settings.run.id, deadline_s=_REACH_S)),
    )  # fmt: skip
    for name, key, where, attempt in servers:
        if loaded.origins[key] == "default":
            yield Finding(name, "ok", "not configured; the quickstart starts its own (or: penstock up)")
        else:
            yield _reach(name, where, attempt)


def python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")


def installed(extra: str, packages: tuple[str, ...]) -> Finding:
    versions = {name: package_version(name) for name in packages}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return Finding(extra, "warn", f"missing: {', '.join(missing)}", f"pip install 'penstock[{extra}]'")
    return Finding(extra, "ok", ", ".join(f"{name} {version}" for name, version in versions.items()))


def runnable(program: str, purpose: str) -> Finding:
    installed_here = Path(sys.executable).with_name(program)
    path = str(installed_here) if installed_here.exists() else shutil.which(program)
    fix = "pip install 'penstock[local]'"
    if path is None:
        return Finding(program, "warn", f"not found; {purpose} cannot start on this machine", fix)
    if isinstance(answer := _run([path, "--version"]), Exception) or answer.returncode:
        return Finding(program, "fail", f"{path} does not run: {_failure(answer)}", f"{fix} --force-reinstall")
    return Finding(program, "ok", f"{(answer.stdout or answer.stderr).splitlines()[0]} at {path}")


def sandbox() -> Finding:
    fix = "only code rewards need it: apt install bubblewrap, or a kernel with Landlock (5.13)"
    answer = _run(launch.module("penstock.reward_service", "sandbox"), _SANDBOX_S)
    if isinstance(answer, Exception):
        return Finding("sandbox", "warn", f"the probe did not finish: {answer}", fix)
    printed = (answer.stdout or answer.stderr).strip().splitlines() or ["the probe printed nothing"]
    level, fix = ("warn", fix) if answer.returncode else ("ok", "")
    return Finding("sandbox", level, printed[-1][:500], fix)


def gpu(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> Finding:
    if not gpus:
        return Finding("gpu", "ok", "none; the quickstart and small models run on the CPU")
    detail = "; ".join(
        f"{gpu.number}: {gpu.name}, {gpu.used / _GIB:.1f} of {gpu.total / _GIB:.1f} GiB used" for gpu in gpus
    )
    if "+cpu" in (package_version("torch") or ""):
        return Finding("gpu", "warn", detail, "this torch has no CUDA: install a CUDA build of torch")
    return Finding("gpu", "ok", f"{detail}; trainers allocate with {_allocator(environ)}")


def _allocator(environ: Mapping[str, str]) -> str:
    """Return what configures the memory of a trainer's GPU, as `trainer/process_memory.py` sets it unless it is set."""
    given = (f"{name}={environ[name]}" for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF") if name in environ)
    return next(given, "PYTORCH_ALLOC_CONF=expandable_segments:True")


def attention(has_gpu: bool) -> Finding:
    """Check which kernels compute the trainer's attention here, in a separate process: it loads torch."""
    if package_version("torch") is None:
        return Finding("attention", "ok", "no torch here, so nothing trains on this machine")
    if not has_gpu:
        return Finding("attention", "ok", "no GPU; the trainer uses torch's flash kernel for the CPU (cpu-flash)")
    fix = "install the torch of constraints.txt in a build for this GPU; see docs/memory.md"
    answer = _run(launch.module("penstock.trainer.learner.attention"), _ATTENTION_S)
    if isinstance(answer, Exception):
        return Finding("attention", "warn", f"the check did not finish: {answer}", fix)
    lines = answer.stdout.strip().splitlines()
    backends = {line.rpartition(": ")[2] for line in lines}
    if answer.returncode == 0 and lines:
        slow = "sdpa" in backends or "flex" in backends
        detail = lines[0].rpartition(": ")[2] if len(backends) == 1 else "; ".join(lines)
        return Finding("attention", "warn" if slow else "ok", detail, fix if slow else "")
    refused = [line for line in lines if ": none: " in line] or answer.stderr.strip().splitlines()[-1:] or ["no output"]
    return Finding("attention", "fail", "; ".join(refused)[:1000], fix)


def memory() -> Iterator[Finding]:
    """Check free memory, the limit of virtual memory, shared memory and open files."""
    available = _available_bytes()
    if available is not None:
        level, fix = ("warn", "free 2 GiB or more") if available < 2 * _GIB else ("ok", "")
        yield Finding("memory", level, f"{available / _GIB:.1f} GiB free", fix)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < 16 * _GIB:
        detail = f"limited to {limit / _GIB:.1f} GiB; torch maps more"
        yield Finding("virtual memory", "warn", detail, "ulimit -v unlimited")
    else:
        yield Finding("virtual memory", "ok", "not limited" if limit == resource.RLIM_INFINITY else f"{limit} bytes")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < 1024:
        yield Finding("open files", "warn", f"limited to {files}", "ulimit -n 4096")
    shared = Path("/dev/shm")  # noqa: S108 - its size is the question
    if shared.exists() and shutil.disk_usage(shared).total < _GIB // 4:
        yield Finding("shared memory", "warn", "below 256 MiB; several ranks need more", "docker run --shm-size=2g")


def copies_of_weights() -> Finding:
    """Check where a worker that starts its own engines would keep its copies (worker.cache_dir = auto)."""
    answer = _run(launch.module("penstock.rollout_service.weights.cache_folder"), _SANDBOX_S)
    if isinstance(answer, Exception) or answer.returncode:
        return Finding(
            "copies of weights", "warn", f"the check did not finish: {_failure(answer)}", "set worker.cache_dir"
        )
    return Finding("copies of weights", "ok", answer.stdout.strip())


def disk(folder: Path) -> Finding:
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    detail = f"{free / _GIB:.1f} GiB free for {folder}/"
    if not os.access(existing, os.W_OK):
        return Finding("disk", "fail", f"{existing} is not writable", "choose another folder: run.dir=FOLDER")
    if free < _GIB:
        return Finding("disk", "fail", detail, "free 1 GiB, or choose another folder: run.dir=FOLDER")
    if free < 10 * _GIB:
        return Finding("disk", "warn", detail, "enough for the quickstart; larger models need more")
    return Finding("disk", "ok", detail)


def loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)):
            return Finding("loopback", "ok", "a free port can be bound on 127.0.0.1")
    except OSError as err:
        detail = f"cannot bind a port on 127.0.0.1: {err.strerror}"
        return Finding("loopback", "fail", detail, "allow sockets in this sandbox")


def port_use(port: int, key: str) -> Finding:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return Finding(f"port {port}", "ok", f"free (default of {key})")
    except OSError:
        fix = f"fine if the service is yours; else change {key}"
        return Finding(f"port {port}", "warn", f"in use (default of {key})", fix)


def build_locks(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Find lock files left by a killed build of a torch extension; later builds wait for them without a message."""
    root = Path(environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    for lock in sorted(root.glob("**/lock")):
        yield Finding("torch extensions", "fail", f"{lock} blocks every later build", f"rm -r {lock.parent}")


def _reach(name: str, where: str, attempt: Callable[[], object]) -> Finding:
    try:
        attempt()
    except PenstockError as err:
        return Finding(name, "fail", str(err), "correct the address or the credentials, or start a server: penstock up")
    return Finding(name, "ok", f"answers at {where}")


def _available_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def report(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    *,
    as_json: bool,
    of_run: Callable[[Sequence[str], Mapping[str, str]], Iterator[Finding]],
) -> int:
    """Run all checks, and those of a run file, and print the findings; return 1 when one failed. Raises ConfigError."""
    loaded = connections.find(arguments, environ)
    logs.configure("doctor", level="critical")  # problems are reported as findings
    here = [*machine(loaded.settings.run.dir, environ), *of_run(arguments, environ), *engine(arguments, environ)]
    findings = [*here, *services(loaded)]
    failed = [finding for finding in findings if finding.level == "fail"]
    if as_json:
        print(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in findings]}))
    else:
        _print(findings)
        print("\nnext: " + ("fix the lines marked fail" if failed else _next(arguments)))
    return 1 if failed else 0


def _next(arguments: Sequence[str]) -> str:
    files, _ = split_arguments(arguments)
    return f"penstock train {files[0]} --local" if files else "penstock quickstart"


def _print(findings: Sequence[Finding]) -> None:
    shown = table("", "name", "detail", wide=("detail",))
    shown.show_header = False
    for finding in findings:
        fix = ("\n→ " + finding.fix, "bold") if finding.fix else ""
        shown.add_row(Text(finding.level, _STYLES[finding.level]), finding.name, Text.assemble(finding.detail, fix))
    console().print(shown)
