"""Every flag that a worker, or the compose file, gives to SGLang is supported by the pinned version."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from penstock.deploy import sglang_cpu
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.engines.sglang.kind import SglangSettings, sglang_command

pytestmark = [pytest.mark.slow, pytest.mark.sglang]

_COMPOSE = Path(__file__).parents[2] / "deploy" / "compose.yaml"


@pytest.fixture(scope="module")
def known() -> set[str]:
    """What ``launch_server --help`` lists."""
    environ = os.environ | sglang_cpu.environment()
    command = [str(sglang_cpu.find_python(os.environ)), "-m", "sglang.launch_server", "--help"]
    text = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=300).stdout
    return set(re.findall(r"--[a-z0-9-]+", text))


def flags_in(words: list[str]) -> set[str]:
    return {word.split("=", 1)[0] for word in words if word.startswith("--")}


def test_the_workers_flags_are_known(known: set[str]):
    settings = SglangSettings(
        device="cuda", mem_fraction_static=0.5, context_length=8, max_running_requests=1, max_total_tokens=8,
        attention_backend="triton", quantization="fp8", engines=2,
        max_lora_rank=16, max_loras_per_batch=4, max_loaded_loras=8, lora_backend="triton",
    )  # fmt: skip
    words = sglang_command(settings, 1)(Path("m"), PolicyVersion(0), Path("p"))
    ours = flags_in(words[words.index("sglang.launch_server") :])
    assert len(ours) > 20
    assert ours <= known


def test_the_compose_files_flags_are_known_and_those_of_the_contract(known: set[str]):
    words = yaml.safe_load(_COMPOSE.read_text())["services"]["sglang"]["command"]
    assert flags_in(words) <= known
    assert set(words) >= {"--load-format=auto", "--tokenizer-worker-num=1", "--sampling-defaults=openai"}
