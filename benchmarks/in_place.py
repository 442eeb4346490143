"""How long generation pauses for a version that changes few words: written in place, beside a load of the whole folder.

    make bench NAME=in-place ARGS="--model 135m --density 0.0002 0.001 0.003 0.01"

A real SGLang on this machine's CPU (`make sglang-env`) serves random weights in bfloat16, of the shape of SmolLM2-135M or of Qwen2-0.5B, or tiny. Both ways
alternate in one run, between two folders that differ in the stated share of the words; both folders stay in the page cache. The pause is
the whole of `ManagedEngine.patch` or `load`: pause (retract), load, confirmation, continue. What a worker does before it, staging, is timed apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tests.contracts.tiny_model import write_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from penstock.deploy import sglang_cpu
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.engines.engine_process import Inherited
from penstock.rollout_service.engines.managed_engine import ManagedEngine
from penstock.rollout_service.engines.sglang import weight_patch
from penstock.rollout_service.engines.sglang.client import SglangClient
from penstock.rollout_service.engines.sglang.kind import SglangSettings, sglang_command, sglang_environ
from penstock.rollout_service.engines.weight_changes import TensorChange, WeightChanges

_CONFIGS: dict[str, Any] = {
    "tiny": LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "135m": LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True,
    ),
    "494m": Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True,
    ),
}  # fmt: skip


def write_folder(folder: Path, config: Any) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: (0.02 * torch.randn(tensor.shape, generator=generator)).bfloat16()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    folder.mkdir()
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    write_tokenizer(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def write_changed(folder: Path, source: Path, tensors: dict[str, torch.Tensor], density: float) -> WeightChanges:
    """Write the folder with another last bit in a share of the words, and return what changed."""
    random = np.random.default_rng(1)
    tensor_changes = []
    after = dict(tensors)
    for name, tensor in tensors.items():
        words = tensor.clone().view(torch.int16).reshape(-1).numpy().view(np.uint16)
        at = np.unique(random.integers(0, len(words), max(1, round(density * len(words)))))
        old = words[at]
        words[at] ^= 1
        tensor_changes.append(TensorChange(name, "bfloat16", at, words[at], old))
        after[name] = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16).reshape(tensor.shape)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(after, folder / "model.safetensors", metadata={"format": "pt"})
    num_words = sum(tensor.numel() for tensor in tensors.values())
    return WeightChanges(PolicyVersion(0), PolicyVersion(1), num_words, tuple(tensor_changes))


def between(changes: WeightChanges, base: int, *, back: bool) -> WeightChanges:
    tensors = tuple(TensorChange(t.name, t.dtype, t.positions, t.old, t.new) for t in changes.tensors)
    return WeightChanges(
        PolicyVersion(base), PolicyVersion(base + 1), changes.num_words, tensors if back else changes.tensors
    )


async def measure(
    engine: ManagedEngine, folders: list[Path], changes: WeightChanges, first: int, swaps: int
) -> tuple[int, dict[str, Any]]:
    """Swap between the folders, each way in turn both forth and back; return the version that is served, and medians in ms."""
    client = engine.client
    assert isinstance(client, SglangClient)
    patches_before = client._patcher.figures()["engine_loads_patch"]
    times: dict[str, list[float]] = {"stage": [], "patch": [], "folder": []}
    version = first
    for number in range(2 * swaps):
        way = ("patch", "folder")[number // 2 % 2]
        back = number % 2 == 1
        if way == "patch":
            started = time.perf_counter()
            await engine.stage(between(changes, version, back=back))
            times["stage"].append(time.perf_counter() - started)
        version += 1
        started = time.perf_counter()
        folder = folders[0 if back else 1]
        if way == "patch":
            assert await engine.patch(PolicyVersion(version), "retract")
            await engine.keep(folder, PolicyVersion(version))
        else:
            await engine.load(folder, PolicyVersion(version), "retract")
        times[way].append(time.perf_counter() - started)
    medians = {f"{name}_ms": round(1000 * statistics.median(all_of), 1) for name, all_of in times.items()}
    assert client._patcher.figures()["engine_loads_patch"] == patches_before + len(times["patch"])
    return version, medians | {"patch_of_folder": round(medians["patch_ms"] / medians["folder_ms"], 2)}


async def run(model: str, densities: list[float], swaps: int, scratch: Path) -> None:
    base = scratch / "a"
    tensors = write_folder(base, _CONFIGS[model])
    section = sglang_cpu.section()
    section |= {"python": Path(section["python"]), "extra_args": tuple(section["extra_args"]), "dtype": "bfloat16"}
    settings = SglangSettings(**{**section, "max_total_tokens": 4096, "max_running_requests": 8})
    engine = ManagedEngine(
        sglang_command(settings), SglangClient, log_file=scratch / "log", start_deadline_s=900.0,
        inherited=Inherited(sglang_environ(settings, os.environ)),
    )  # fmt: skip
    version = 0
    try:
        await engine.load(base, PolicyVersion(version))
        for density in densities:
            other = scratch / "b"
            shutil.rmtree(other, ignore_errors=True)
            changes = write_changed(other, base, tensors, density)
            before = engine.client._patcher.num_bytes
            version, medians = await measure(engine, [base, other], changes, version, swaps)
            touched = (engine.client._patcher.num_bytes - before) // swaps
            row = {
                "model": model,
                "density": density,
                "words": changes.num_changed,
                "bytes_in_pause": touched,
                **medians,
            }
            print(json.dumps(row | {"load": os.getloadavg()[0]}), flush=True)
    finally:
        await engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=_CONFIGS, default="135m")
    parser.add_argument("--density", type=float, nargs="+", default=[0.0002, 0.001, 0.003, 0.01])
    parser.add_argument("--swaps", type=int, default=12, help="of each way, at each density; even")
    options = parser.parse_args()
    weight_patch.MAX_CHANGED_SHARE = {"cpu": 1.0}  # type: ignore[assignment]  # every density is measured
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        asyncio.run(run(options.model, options.density, options.swaps, Path(scratch)))


if __name__ == "__main__":
    main()
