"""How a worker starts SGLang: flags, environment, and its exit together with the worker."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.deploy.quickstart_task import write_model
from penstock.protocol.config.run_file import load
from penstock.protocol.errors import ConfigError
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.engines.embedded import EmbeddedClient, embedded_command
from penstock.rollout_service.engines.engine_process import EngineProcess, Inherited, group_members
from penstock.rollout_service.engines.managed_engine import ManagedEngine
from penstock.rollout_service.engines.sglang.client import SglangClient
from penstock.rollout_service.engines.sglang.kind import SglangSettings, sglang_command, sglang_environ
from penstock.rollout_service.errors import EngineUnreachable
from penstock.rollout_service.settings import RolloutSettings

V7 = PolicyVersion(7)


def flags(number: int = 0, **changes: Any) -> list[str]:
    """The arguments after SGLang's module name."""
    words = sglang_command(SglangSettings(**changes), number)(Path("/cache/v7"), V7, Path("/cache/port"))
    return words[words.index("sglang.launch_server") + 1 :]


def pairs(words: list[str]) -> set[tuple[str, str]]:
    return set(itertools.pairwise(words))


def test_settings_become_flags():
    words = flags(
        python="/opt/sglang/bin/python", tp_size=4, ep_size=2, dp_size=2, mem_fraction_static=0.8, dtype="bfloat16",
        context_length=4096, attention_backend="fa3", quantization="fp8", fp32_lm_head=True,
        extra_args=("--disable-radix-cache",),
    )  # fmt: skip
    assert pairs(words) >= {
        ("--model-path", "/cache/v7"), ("--weight-version", "7"), ("--tp-size", "4"), ("--ep-size", "2"),
        ("--dp-size", "2"), ("--mem-fraction-static", "0.8"), ("--dtype", "bfloat16"), ("--context-length", "4096"),
        ("--attention-backend", "fa3"), ("--quantization", "fp8"), ("--load-format", "auto"),
        ("--tokenizer-worker-num", "1"), ("--sampling-defaults", "openai"), ("--port", "{port}"),
    }  # fmt: skip
    assert {"--enable-metrics", "--enable-fp32-lm-head"} < set(words)
    assert words[-1] == "--disable-radix-cache"


def test_a_server_gets_the_plugin_for_patches():
    """Before the import path of the settings, and beside the plugins that they choose; not where patches are off."""
    settings = SglangSettings(environ={"PYTHONPATH": "/mine", "SGLANG_PLUGINS": "one"})
    environ = sglang_environ(settings, {"PYTHONPATH": "/workers", "HOME": "/root"})
    folder, _, rest = environ["PYTHONPATH"].partition(os.pathsep)
    assert (Path(folder) / "penstock_sglang_plugin.py").exists()
    assert (rest, environ["SGLANG_PLUGINS"]) == ("/mine", "one,penstock_weight_patch")
    assert sglang_environ(SglangSettings(), {})["PYTHONPATH"] == folder
    assert sglang_environ(settings.model_copy(update={"patches": "off"}), {})["PYTHONPATH"] == "/mine"
    entry_points = (Path(folder) / "penstock_weight_patch-1.dist-info" / "entry_points.txt").read_text()
    assert entry_points.split() == [
        "[sglang.srt.plugins]",
        "penstock_weight_patch",
        "=",
        "penstock_sglang_plugin:register",
    ]


def test_adapters_are_enabled_if_requested():
    """A largest rank enables adapters, whose tensors are all taken or refused; without it no such flag is passed."""
    words = flags(max_lora_rank=16, max_loras_per_batch=4, max_loaded_loras=6, lora_backend="triton")
    assert pairs(words) >= {
        ("--max-lora-rank", "16"), ("--max-loras-per-batch", "4"), ("--max-loaded-loras", "6"),
        ("--lora-backend", "triton"), ("--lora-target-modules", "q_proj"), ("q_proj", "k_proj"),
        ("up_proj", "down_proj"),
    }  # fmt: skip
    assert {"--enable-lora", "--lora-strict-loading"} <= set(words)
    assert not [word for word in flags() if "lora" in word]


def test_unset_options_are_left_to_sglang():
    """A setting that is not given has no flag, metrics can be off, and a command may stand in place of Python."""
    words = flags(metrics=False)
    unset = {"--mem-fraction-static", "--quantization", "--device", "--enable-metrics", "--enable-fp32-lm-head"}
    assert not {*unset, "--base-gpu-id"} & set(words)
    # Servers of one worker do not share GPUs.
    assert ("--base-gpu-id", "4") in pairs(flags(1, tp_size=2, dp_size=2))
    assert ("--base-gpu-id", "6") in pairs(flags(2, tp_size=8, gpus_per_engine=3))
    own = sglang_command(SglangSettings(command=("docker", "run", "sglang")))(Path("m"), V7, Path("p"))
    assert own[own.index("docker") :][:4] == ["docker", "run", "sglang", "--model-path"]


@pytest.mark.parametrize(
    ("overrides", "reply"),
    [
        (["sglang.extra_args=['--port', '1']"], "--port cannot be passed on"),
        (["sglang.extra_args=['--weight-version=9']"], "--weight-version cannot be passed on"),
        (["sglang.command=['x']", "sglang.python=/bin/python"], "command and sglang.python are both set"),
        (["sglang.tp=2"], "sglang.tp"),
        (["sglang.max_loaded_loras=4"], "max_loaded_loras has no effect without sglang.max_lora_rank"),
        (["sglang.max_lora_rank=8", "sglang.dp_size=2"], "use sglang.engines"),
        (["sglang.extra_args=['--enable-lora']"], "--enable-lora cannot be passed on"),
        (["worker.engine=sglang", "worker.engine_url=http://a:1"], "set worker.engine = 'sglang-url' too"),
        (["worker.engine=sglang-url", "worker.engine_url=http://a:1,ftp://b"], "needs worker.engine_url"),
        (["worker.engine=sglang-url", "worker.engine_url=http://a:1,http://a:1/"], "names a server twice"),
    ],
)
def test_contradictions_are_refused(overrides: list[str], reply: str):
    with pytest.raises(ConfigError, match=reply.replace("(", r"\(")):
        load(RolloutSettings, overrides=["run.id=demo", *overrides])


def test_several_urls_are_several_engines():
    urls = "worker.engine_url=http://a:1/, https://b:2"
    settings = load(RolloutSettings, overrides=["run.id=demo", "worker.engine=sglang-url", urls]).settings
    assert settings.worker.engine_urls == ("http://a:1", "https://b:2")


def test_a_server_does_not_get_our_environment():
    """Neither our passwords nor our Python's paths reach it; what the settings add does."""
    ours = {"PATH": "/bin", "PYTHONPATH": "/us", "PENSTOCK_NATS__PASSWORD": "secret", "VIRTUAL_ENV": "/v"}
    settings = SglangSettings(environ={"PYTHONPATH": "/stubs", "HF_HUB_OFFLINE": "1"}, patches="off")
    environ = sglang_environ(settings, ours)
    assert environ == {"PATH": "/bin", "PYTHONSAFEPATH": "1", "PYTHONPATH": "/stubs", "HF_HUB_OFFLINE": "1"}


def as_server(source: str) -> SglangSettings:
    """A 'server' that is some lines of Python, started as SGLang would be."""
    return SglangSettings(command=(sys.executable, "-c", source))


_EXITS_WHEN_ASKED = """
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
server.accept()
print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.11 GiB "
      "of which 1.02 GiB is free.")
raise SystemExit(1)
"""


async def test_a_server_that_exits_before_it_answers_shows_the_end_of_its_log(tmp_path: Path):
    """The error is raised immediately, not at the deadline, although the process had a port; no connection is left."""
    engine = ManagedEngine(
        sglang_command(as_server(_EXITS_WHEN_ASKED)),
        SglangClient,
        log_file=tmp_path / "engine.log",
        start_deadline_s=600,
        kind="sglang",
    )
    named = r"status 1: out of GPU memory on GPU 1 \(2\.00 GiB requested, .*\); set sglang\.mem_fraction_static down"
    with pytest.raises(EngineUnreachable, match=rf"(?s)ended before it answered.*{named}.*CUDA out of memory"):
        await asyncio.wait_for(engine.load(tmp_path, V7), 30)
    with pytest.raises(EngineUnreachable, match="client has been closed"):
        await engine.client.served_version()


async def test_the_embedded_engine_names_a_gpu_that_its_torch_cannot_use(tmp_path: Path):
    write_model(tmp_path / "model", seed=0)
    options: Any = SimpleNamespace(max_running=2, kept_tokens=None, device="cuda", dtype="float32")
    engine = ManagedEngine(
        embedded_command(options),
        EmbeddedClient,
        log_file=tmp_path / "engine.log",
        start_deadline_s=60,
        inherited=Inherited({**os.environ, "CUDA_VISIBLE_DEVICES": ""}),
        kind="embedded",
    )
    named = r"status 1: (this PyTorch has no code for the GPU|no GPU is visible|there is no usable NVIDIA driver) \("
    with pytest.raises(EngineUnreachable, match=named) as raised:
        await asyncio.wait_for(engine.load(tmp_path / "model", V7), 90)
    assert "internal error" not in str(raised.value)


async def test_a_program_that_is_not_there_is_named(tmp_path: Path):
    engine = ManagedEngine(
        sglang_command(SglangSettings(python=Path("/nowhere/python"))),
        SglangClient,
        log_file=tmp_path / "engine.log",
        start_deadline_s=600,
    )
    with pytest.raises(EngineUnreachable, match="cannot start /nowhere/python: No such file"):
        await asyncio.wait_for(engine.load(tmp_path, V7), 30)


_WITH_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("by", ["us", "itself"])
async def test_nothing_of_a_servers_group_is_left(tmp_path: Path, by: str):
    """However its first process ends, the processes that it started end with it, and their CPU time was seen."""
    log = tmp_path / "engine.log"
    process, _ = await EngineProcess.start(sglang_command(as_server(_WITH_CHILD)), tmp_path, V7, log=log, deadline_s=20)
    async with asyncio.timeout(60):
        while "child" not in log.read_text() or len(group_members(process.pid)) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    process.started()
    assert process.cpu_seconds() > 0
    if by == "us":
        await process.stop()
    else:
        os.kill(process.pid, 9)
        await process.wait()
    async with asyncio.timeout(60):
        while group_members(process.pid):  # noqa: ASYNC110  (the kernel's)
            await asyncio.sleep(0.01)
