"""What only a GPU can show, in parts with deadlines of their own: `make gpu-check`, at most nine minutes; a table, and JSON in OUT.

    python -m tests.rigs.gpu_check                      # every part, on the GPU
    python -m tests.rigs.gpu_check --only attention     # one part
    python -m tests.rigs.gpu_check --toy                # tiny shapes on the CPU: the check itself works

| part | shows |
|---|---|
| attention | the backend that is chosen for each head size in bfloat16, and its time and memory over packed rows |
| step | three optimizer steps of Qwen3-0.6B's shape at ZeRO 1, 2 and 3: how far loss and norm differ between them, tokens/s, MFU, peak beside the plan's, time by kernel |
| segments | the same at ZeRO 1 with expandable segments of the allocator |
| adapter | LoRA steps of Qwen2.5-7B's shape, and one of half of its layers with the optimizer in host memory |
| publish | a copy of 2 GB of weights to the host: into fresh, reused and pinned memory; compared there and on the device |
| run | `penstock quickstart`, the policy and its embedded engine on the GPU: exit code, and the attention in its report |

A part that fails or is late does not stop the others; the exit code is 1 if one did. Several GPUs are not tried.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from benchmarks.trainer_memory import Configuration, Trained, inputs_of

from penstock.deploy.plan.memory.memory_plan import MemoryPlan
from penstock.protocol.files import atomic_write
from penstock.trainer.algorithm.packed_rows import Layout, pack
from penstock.trainer.learner.attention import backends
from penstock.trainer.learner.flops import peak_of
from penstock.trainer.learner.trainable import import_deepspeed
from penstock.trainer.parallel_dims import ParallelDims, ParallelLayout
from penstock.trainer.ranks import Ranks

QWEN3_06B = Configuration(
    layers=28, hidden=1024, heads=16, kv_heads=8, head_size=128, intermediate=3072, vocabulary=151_936, dtype="bfloat16",
    checkpointing=True, prompt=1024, answer=1920, group_size=8, groups=1, budget=16_384,
)  # fmt: skip
QWEN25_7B = Configuration(
    family="qwen2", layers=28, hidden=3584, heads=28, kv_heads=4, head_size=128, intermediate=18_944, vocabulary=152_064,
    tied=False, dtype="bfloat16", checkpointing=True, prompt=1024, answer=1920, group_size=8, groups=1, budget=16_384,
)  # fmt: skip
# Of all its layers the host would hold 137 GB, and the GPU 79 GB.
OFFLOADED = replace(QWEN25_7B, layers=14, offload="optimizer")
HEADS = ((64, 2), (96, 1), (128, 2), (128, 8), (256, 2))  # dimensions, and query heads for each key head
_ENDED = "gpu-check "  # what comes before a part's JSON on its last line


def tiny(chosen: Configuration) -> Configuration:
    """Return the same at a size for which a CPU needs a second; the heads keep their dimensions."""
    return replace(
        chosen, layers=2, hidden=128, heads=4, kv_heads=2, intermediate=256, vocabulary=1024, prompt=24, answer=40,
        group_size=4, budget=256,
    )  # fmt: skip


class Check:
    """The parts, at the size of the models people train or at toy size."""

    def __init__(self, *, toy: bool) -> None:
        self.toy = toy
        self.device = torch.device("cpu" if toy else "cuda")

    @cached_property
    def dims(self) -> ParallelDims:
        return ParallelDims(Ranks(), ParallelLayout())

    def shape(self, chosen: Configuration) -> Configuration:
        return tiny(chosen) if self.toy else chosen

    def wait(self) -> float:
        """Return the time when all that was asked of the device is done, in seconds."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def peak_gb(self) -> float:
        return torch.cuda.max_memory_allocated() / 1e9 if self.device.type == "cuda" else 0.0

    def attention(self) -> dict[str, Any]:
        """Return backend, milliseconds and peak of one forward and backward pass, for each kind of head."""
        rows = [[n % 500 for n in range(256 if self.toy else 6144)] for _ in range(4)]
        for number, row in enumerate(rows):
            row[len(row) // 2 :] = [number] * (len(row) - len(row) // 2)
        layout = pack([torch.tensor(row).numpy() for row in rows], [len(rows[0]) // 2] * 4).layout
        return {f"{size} x {ratio}": self._attention(size, ratio, layout) for size, ratio in HEADS}

    def _attention(self, size: int, ratio: int, layout: Layout) -> dict[str, Any]:
        num_tokens = len(layout.depths)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        generator = torch.Generator(self.device).manual_seed(0)
        q, k, v, gradient = (
            torch.randn(1, heads, num_tokens, size, generator=generator, device=self.device, dtype=torch.bfloat16)
            for heads in (2 * ratio, 2, 2, 2 * ratio)
        )
        given = [one.requires_grad_() for one in (q, k, v)]
        found = backends.choose(q, k, v, num_tokens)
        times = []
        for _ in range(3):
            began = self.wait()
            found.attend(*given, layout, size**-0.5).backward(gradient)
            times.append(self.wait() - began)
        return {
            "backend": found.name,
            "tokens": num_tokens,
            "ms": round(1e3 * min(times), 2),
            "peak_gb": round(self.peak_gb(), 3),
        }

    def step(self) -> dict[str, Any]:
        """Return what `_steps` does for each stage of ZeRO, and by how much loss and norm differ between them."""
        found = {f"zero {stage}": self._steps(replace(self.shape(QWEN3_06B), zero_stage=stage)) for stage in (1, 2, 3)}
        losses, norms = ([one[name][0] for one in found.values()] for name in ("losses", "norms"))
        found["spread"] = {"loss": max(losses) - min(losses), "norm": (max(norms) - min(norms)) / max(norms)}
        return found

    def segments(self) -> dict[str, Any]:
        """Return what `_steps` does at ZeRO 1, in a process whose allocator has expandable segments."""
        return self._steps(self.shape(QWEN3_06B))

    def adapter(self) -> dict[str, Any]:
        """Return what `_steps` does for LoRA and for the optimizer in host memory."""
        return {
            "lora 16": self._steps(self.shape(replace(QWEN25_7B, lora=16)), num_steps=2),
            "optimizer offloaded": self._steps(self.shape(OFFLOADED), num_steps=1),
        }

    def _steps(self, chosen: Configuration, num_steps: int = 3) -> dict[str, Any]:
        gc.collect()  # the policy before this one, whose parts refer to one another
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        trained = Trained(chosen, self.dims, self.device.type)
        micro_batches = trained.micro_batches(chosen)
        num_tokens = sum(micro_batch.input_ids.numel() for micro_batch in micro_batches)
        figures, seconds = [], []
        for _ in range(num_steps):
            began = self.wait()
            figures.append(trained.policy.train_step(micro_batches, trained.objective))
            seconds.append(self.wait() - began)
        plan = MemoryPlan(inputs_of(chosen))
        parameters = sum(
            getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained.trainable.module.parameters()
        )
        rate = num_tokens / min(seconds)
        return {
            "losses": [figure.loss for figure in figures],
            "norms": [figure.grad_norm for figure in figures],
            "tokens_per_s": round(rate),
            "mfu": self._mfu(6 * parameters * rate),
            "peak_gb": round(self.peak_gb(), 2),
            "planned_gb": round(plan.peak(on_gpu=True) / 1e9, 2),
            "kernels": self._kernels(lambda: trained.policy.train_step(micro_batches, trained.objective)),
        }

    def _mfu(self, flops: float) -> float | None:
        """Return the share of the device's peak; None for a device whose peak is not known here."""
        peak = peak_of(torch.cuda.get_device_name(), "bfloat16") if self.device.type == "cuda" else None
        return None if peak is None else round(flops / peak, 3)

    def _kernels(self, work: Callable[[], Any]) -> dict[str, float]:
        """Return the milliseconds of the ten slowest operations."""
        with torch.profiler.profile() as profile:
            work()
        on_device = self.device.type == "cuda"
        times = {
            key_average.key: (key_average.self_device_time_total if on_device else key_average.self_cpu_time_total)
            for key_average in profile.key_averages()
        }
        return {name: round(times[name] / 1e3, 2) for name in sorted(times, key=lambda name: -times[name])[:10]}

    def publish(self) -> dict[str, Any]:
        """Return GB/s of a copy to the host into fresh, reused and pinned memory, and of comparing with the copy before."""
        count = 2**20 if self.toy else 2**30
        weights = torch.randn(count, device=self.device, dtype=torch.bfloat16)
        before = weights.cpu()
        on_device = weights.clone()
        reused = torch.empty_like(before)
        pinned = torch.empty(count, dtype=torch.bfloat16, pin_memory=not self.toy)
        ways: dict[str, Callable[[], Any]] = {
            "fresh": weights.cpu,
            "reused": lambda: reused.copy_(weights),
            "pinned": lambda: pinned.copy_(weights, non_blocking=True),
            "compared on the device": lambda: int((weights != on_device).sum()),
            "compared on the host": lambda: int((reused != before).sum()),
        }
        return {
            name: round(2 * count / 1e9 / min(self._seconds(way) for _ in range(3)), 2) for name, way in ways.items()
        }

    def _seconds(self, work: Callable[[], Any]) -> float:
        began = self.wait()
        work()
        return self.wait() - began

    def run(self) -> dict[str, Any]:
        """Return the exit code of a quickstart and what its report says of the attention."""
        with tempfile.TemporaryDirectory() as folder:
            words = ["quickstart", "--dir", folder, "--no-page", *(["--no-kill", "--steps", "2"] if self.toy else [])]
            began = time.perf_counter()
            command = [sys.executable, "-m", "penstock", *words]
            child = subprocess.run(command, capture_output=True, text=True, check=False)  # it ends with this part
            report = next(iter(Path(folder).rglob("report.md")), None)
            lines = [] if report is None else report.read_text().splitlines()
        return {
            "exit_code": child.returncode,
            "seconds": round(time.perf_counter() - began),
            "attention": [line.strip() for line in lines if "attention" in line.lower()][:2],
            "error": child.stderr[-800:] if child.returncode else "",
        }


DEADLINES_S = {"attention": 60, "step": 150, "segments": 60, "adapter": 120, "publish": 45, "run": 100}
_ENVIRONMENT = {"segments": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}


def measure(part: str, *, toy: bool) -> dict[str, Any]:
    """Run a part in a process of its own; return its figures, or why it has none."""
    command = [sys.executable, "-m", "tests.rigs.gpu_check", "--part", part, *(["--toy"] if toy else [])]
    environ = {**os.environ, "DS_ACCELERATOR": "cpu" if toy else "cuda", **_ENVIRONMENT.get(part, {})}
    deadline_s = DEADLINES_S[part] * (4 if toy else 1)  # a busy CPU is slow
    began = time.perf_counter()
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, start_new_session=True
    )
    try:
        out, errors = child.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # with what it started, so that the next part has the GPU alone
        child.communicate()
        return {"failed": f"no result within {deadline_s} s"}
    ended = next((line for line in reversed(out.splitlines()) if line.startswith(_ENDED)), None)
    if child.returncode or ended is None:
        return {"failed": f"exit code {child.returncode}: {errors[-1500:]}"}
    return {**json.loads(ended.removeprefix(_ENDED)), "wall_s": round(time.perf_counter() - began, 1)}


def rows(found: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each figure with its path, ``a · b``."""
    for name, value in found.items():
        if isinstance(value, dict):
            yield from rows(value, f"{before}{name} · ")
        else:
            yield f"{before}{name}", value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=DEADLINES_S, default=list(DEADLINES_S), help="these parts")
    parser.add_argument("--toy", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder of gpu-check.json")
    parser.add_argument("--part", choices=DEADLINES_S, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        if options.part in ("step", "segments", "adapter"):
            import_deepspeed()
        print(_ENDED + json.dumps(getattr(Check(toy=options.toy), options.part)()))
        return 0
    if not options.toy and not torch.cuda.is_available():
        print("gpu-check: torch sees no GPU; give --toy to try the check itself on the CPU", file=sys.stderr)
        return 2
    device = "cpu" if options.toy else torch.cuda.get_device_name()
    parts: dict[str, Any] = {}
    for part in options.only:
        parts[part] = measure(part, toy=options.toy)
        for name, value in rows(parts[part], f"{part} · "):
            print(f"| {name} | {value} |", flush=True)
        document = {"device": device, "torch": torch.__version__, "toy": options.toy, "parts": parts}
        atomic_write(options.out / "gpu-check.json", json.dumps(document, indent=1).encode())
    return int(any("failed" in one or one.get("exit_code") for one in parts.values()))


if __name__ == "__main__":
    sys.exit(main())
