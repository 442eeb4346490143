"""Compare the memory that `penstock plan` estimates with the peak of the trainer that it describes.

python -m benchmarks.trainer_memory                 # every configuration; some minutes of CPU time
python -m benchmarks.trainer_memory --only llama-wide lora
python -m benchmarks.trainer_memory --phases        # the peak of each phase, beside its estimate; --record FILE: added to its JSON

The configurations are those of `trainer_memory.json`. Each runs in processes of its own, one for each rank, forked from one that has imported the libraries: random weights, two steps on rows of the planned size,
then the copy of the weights that is published. Measured is the peak of the resident memory above that of a process that has
imported the same libraries and has trained a model of a thousand parameters with them, sampled every 2 ms.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from benchmarks.rig import Peak, processor
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.deploy.plan.memory.memory_plan import CHECKPOINT, COPY, READ_LAST, MemoryPlan
from penstock.deploy.plan.memory.model_shape import Method, shape_of
from penstock.deploy.plan.memory.plan_inputs import Batch, PlanInputs
from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.batch import MicroBatch, Row, build, plan_micro_batches, prefixes_of
from penstock.trainer.algorithm.objective import build_objective
from penstock.trainer.learner import adapter
from penstock.trainer.learner.load_model import prepare
from penstock.trainer.learner.logprobs import CompletionScorer
from penstock.trainer.learner.parallel_shares import TokenShares
from penstock.trainer.learner.policy import Policy
from penstock.trainer.learner.trainable import Optimisation, Trainable, import_deepspeed
from penstock.trainer.parallel_dims import ParallelDims, ParallelLayout
from penstock.trainer.publishing.weight_buckets import WeightBuckets, assign_buckets
from penstock.trainer.ranks import Ranks

ENVIRONMENT = {  # freed memory goes back to the kernel at once, so that the resident memory is that of live tensors
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",  # as in `trainer/process_memory.py`, and the next
    "LRU_CACHE_CAPACITY": "64",
}
_DEADLINE_S = 900.0  # of one configuration
LOAD = "load"
PASSES = "forward and backward"
CPU_S = "CPU seconds of the step"


@dataclass(frozen=True)
class Configuration:
    family: str = "qwen3"
    layers: int = 8
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 2
    head_size: int = 64
    intermediate: int = 1536
    vocabulary: int = 16_384
    tied: bool = True
    dtype: Literal["float32", "bfloat16"] = "float32"
    zero_stage: Literal[0, 1, 2, 3] = 1
    num_ranks: int = 1
    sequence_parallel: int = 1
    tensor_parallel: int = 1
    checkpointing: bool = False
    gradient_dtype: Literal["float32", "as-trained"] = "float32"
    offload: Literal["none", "optimizer", "parameters"] = "none"
    lora: int = 0
    experts: int = 0  # of each layer, with `intermediate` each; 0: a gated MLP
    top_k: int = 0
    entropy: bool = False
    prompt: int = 384
    answer: int = 384
    group_size: int = 4
    groups: int = 2
    budget: int = 2048

    @property
    def what(self) -> str:
        ranks = f", {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        ranks += f" that share tokens by {self.sequence_parallel}" if self.sequence_parallel > 1 else ""
        ranks += f" that share weights by {self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        parts = [
            f"{self.family}, {self.layers} x {self.hidden}, vocabulary {self.vocabulary:,}{'' if self.tied else ', untied'}",
            f"{self.dtype}, ZeRO {self.zero_stage}{ranks}",
            "checkpointing" if self.checkpointing else "",
            f"gradients {self.gradient_dtype}" if self.dtype == "bfloat16" else "",
            f"{self.offload} offloaded" if self.offload != "none" else "",
            f"LoRA {self.lora}" if self.lora else "",
            f"{self.top_k} of {self.experts} experts of {self.intermediate}" if self.experts else "",
            "entropy in the loss" if self.entropy else "",
        ]
        return "; ".join(filter(None, parts))


OF_FAMILIES: dict[str, dict[str, Any]] = {  # what their models have, and the defaults of transformers have not
    "mistral": {"sliding_window": None},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "glm4": {"attention_bias": True},
}
RECORD = Path(__file__).with_suffix(".json")
CONFIGURATIONS = {
    name: Configuration(**record["configuration"])
    for name, record in json.loads(RECORD.read_text())["configurations"].items()
}


def inputs_of(chosen: Configuration) -> PlanInputs:
    shape = shape_of(fields_of(chosen), "config.json")
    method = Method(
        dtype=chosen.dtype, zero_stage=chosen.zero_stage, num_ranks=chosen.num_ranks, checkpointing=chosen.checkpointing,
        sequence_parallel=chosen.sequence_parallel, tensor_parallel=chosen.tensor_parallel, gradient_dtype=chosen.gradient_dtype, offload=chosen.offload, lora_rank=chosen.lora, with_entropy=chosen.entropy,
    )  # fmt: skip
    batch = Batch(chosen.prompt, chosen.answer, chosen.group_size, chosen.groups)
    return PlanInputs(shape, method, batch, chosen.budget, publishes_adapter=bool(chosen.lora))


def fields_of(chosen: Configuration) -> dict[str, Any]:
    experts: dict[str, Any] = {}
    if chosen.experts:
        experts = {
            "moe_intermediate_size": chosen.intermediate, "num_experts": chosen.experts, "num_experts_per_tok": chosen.top_k,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
    no_tokens = dict.fromkeys(
        ("bos_token_id", "eos_token_id", "pad_token_id")
    )  # of families, beyond a small vocabulary
    return OF_FAMILIES.get(chosen.family, {}) | no_tokens | experts | {
        "model_type": chosen.family, "vocab_size": chosen.vocabulary, "hidden_size": chosen.hidden,
        "intermediate_size": chosen.intermediate, "num_hidden_layers": chosen.layers, "num_attention_heads": chosen.heads,
        "num_key_value_heads": chosen.kv_heads, "head_dim": chosen.head_size, "tie_word_embeddings": chosen.tied,
    }  # fmt: skip


class Trained:
    """A configuration as the trainer holds it: the policy under DeepSpeed, packed rows, copies of the weights."""

    def __init__(self, chosen: Configuration, dims: ParallelDims, device: str = "cpu") -> None:
        """The random values are drawn on ``device``: a CPU draws 20 to 100 million in a second, of billions."""
        how = Optimisation(
            num_steps=4, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, warmup_steps=0, schedule="constant",
            min_lr_ratio=0.1, max_grad_norm=1.0, zero_stage=chosen.zero_stage, dtype=chosen.dtype,
            gradient_checkpointing=chosen.checkpointing, offload=chosen.offload, gradient_dtype=chosen.gradient_dtype,
        )  # fmt: skip
        torch.manual_seed(0)
        fields = fields_of(chosen)
        config = AutoConfig.for_model(fields.pop("model_type"), max_position_embeddings=8192, **fields)
        with torch.device(device):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, chosen.dtype))
        prepare(model, how)
        if chosen.lora:
            adapter.attach(model, adapter.Lora(chosen.lora, 32.0))
            if chosen.checkpointing:
                model.enable_input_require_grads()
        scorer = CompletionScorer(model, 1.0, shares=TokenShares(dims.token_group))
        self.trainable = Trainable(scorer, how, dims, model=model)
        self.policy = Policy(self.trainable, scorer, dims)
        self.objective = build_objective(AlgorithmSettings(entropy_coefficient=0.01 if chosen.entropy else 0.0))
        self._dims = dims

    def micro_batches(self, chosen: Configuration) -> list[MicroBatch]:
        rng = np.random.default_rng(0)
        rows = []
        for _ in range(chosen.groups):
            prompt = rng.integers(0, chosen.vocabulary, chosen.prompt)
            for _ in range(chosen.group_size):
                tokens = np.concatenate([prompt, rng.integers(0, chosen.vocabulary, chosen.answer)]).astype(np.int32)
                sampled = np.arange(len(tokens)) >= chosen.prompt
                logprobs = np.full(len(tokens), -np.log(chosen.vocabulary), np.float32)
                rows.append(Row(tokens, sampled, logprobs, 1.0, 1.0 / chosen.answer))
        tokens, masks = [row.token_ids for row in rows], [row.loss_mask for row in rows]
        plan = plan_micro_batches(
            list(map(len, tokens)), budget_tokens=chosen.budget, num_ranks=self._dims.rows.count,
            prefixes=prefixes_of(tokens, masks), pair_cost=self.policy.pair_cost,
        )  # fmt: skip
        return [build([rows[n] for n in piece]) for piece in plan[self._dims.rows.index]]

    def copy(self) -> WeightBuckets:
        layout = self.policy.weights.layout()
        share = self._dims.buckets
        buckets = WeightBuckets(layout, assign_buckets(layout, share.count)[share.index])
        self.policy.weights.copy_to(buckets, merge=False)
        return buckets


def measure_here(chosen: Configuration) -> dict[str, float]:
    """Return the peak of each phase in bytes, of this rank, and the CPU seconds of the step."""
    torch.set_num_threads(1)
    dims = ParallelDims(Ranks(), ParallelLayout(chosen.sequence_parallel, chosen.tensor_parallel))
    tiny = replace(
        chosen, layers=1, hidden=64, heads=chosen.sequence_parallel * chosen.tensor_parallel, kv_heads=chosen.tensor_parallel, intermediate=64, vocabulary=64, prompt=8, answer=8, group_size=2,
        groups=chosen.num_ranks,
    )  # fmt: skip
    warm = Trained(tiny, dims)
    warm.policy.train_step(warm.micro_batches(tiny), warm.objective)
    del warm
    peak = Peak(LOAD)
    with peak.watching():
        trained = Trained(chosen, dims)
        short = replace(chosen, prompt=8, answer=8, group_size=1, groups=chosen.num_ranks)
        trained.policy.train_step(trained.micro_batches(short), trained.objective)  # makes the optimizer's states
        held = [trained.copy()] if chosen.lora else [trained.copy(), trained.copy()]
        micro_batches = trained.micro_batches(chosen)
        update = trained.trainable.update

        def measured(*args: Any, **named: Any) -> Any:
            peak.phase = "optimizer step"
            return update(*args, **named)

        trained.trainable.update = measured  # type: ignore[method-assign]
        peak.phase, begin = PASSES, time.process_time()
        trained.policy.train_step(micro_batches, trained.objective)
        cpu_s = time.process_time() - begin
        peak.phase = COPY
        if not chosen.lora:
            held.append(trained.copy())
    del peak.peaks[LOAD]
    return {**peak.peaks, CPU_S: round(cpu_s, 2)}


def _run_rank(name: str, environment: dict[str, str], result: Connection) -> None:
    os.environ |= environment
    result.send(measure_here(CONFIGURATIONS[name]))
    os._exit(0)  # DeepSpeed's teardown on several ranks may abort


def measure(name: str) -> dict[str, float]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    num_ranks, context = CONFIGURATIONS[name].num_ranks, multiprocessing.get_context("fork")
    results = []
    for rank in range(num_ranks):
        environment = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        receiver, sender = context.Pipe(duplex=False)
        context.Process(target=_run_rank, args=(name, environment, sender), daemon=True).start()
        sender.close()
        results.append(receiver)
    rank_peaks = []
    for result in results:
        if not result.poll(_DEADLINE_S):
            raise SystemExit(f"{name}: no result of a rank within {_DEADLINE_S:g} s")
        try:
            rank_peaks.append(result.recv())
        except EOFError:
            raise SystemExit(f"{name}: a rank failed; its error is above") from None
    return {phase: max(peaks[phase] for peaks in rank_peaks) for phase in rank_peaks[0]}


def estimated(name: str) -> dict[str, int]:
    plan = MemoryPlan(inputs_of(CONFIGURATIONS[name]))
    not_held = plan.held.host[CHECKPOINT] + plan.held.host.get(
        READ_LAST, 0
    )  # here, where nothing is stored or published
    phases = {phase.name: phase.total - not_held for phase in plan.phases}
    others = {"optimizer step": phases.pop("optimizer step"), COPY: phases.pop(COPY, 0)}
    return {PASSES: max(phases.values()), **others}


def lines(name: str, *, by_phase: bool, records: dict[str, Any]) -> Iterator[str]:
    peaks, expected = measure(name), estimated(name)
    cpu_s = peaks.pop(CPU_S)
    largest = max(peaks, key=lambda phase: peaks[phase])
    yield _row(f"{name}: {CONFIGURATIONS[name].what}", largest, max(expected.values()), peaks[largest])
    records[name] = {
        "date": date.today().isoformat(),  # noqa: DTZ011
        "configuration": asdict(CONFIGURATIONS[name]),
        "fields": fields_of(CONFIGURATIONS[name]),
        "peaks": peaks,
        "cpu_s": cpu_s,
    }
    if by_phase:
        for phase, value in expected.items():
            if value:
                yield _row("", phase, value, peaks[phase])


def _row(what: str, phase: str, expected: int, peak: float) -> str:
    return f"| {what} | {phase} | {expected / 1e6:,.0f} | {peak / 1e6:,.0f} | {100 * (expected / peak - 1):+.1f} % |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CONFIGURATIONS, help="measure these configurations only")
    parser.add_argument("--phases", action="store_true", help="print every phase beside its estimate")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="add the configurations and their peaks to its JSON"
    )
    options = parser.parse_args()
    if not ENVIRONMENT.items() <= os.environ.items():  # glibc and OpenMP read it at the start of a process
        os.execve(
            sys.executable, [sys.executable, "-m", "benchmarks.trainer_memory", *sys.argv[1:]], os.environ | ENVIRONMENT
        )
    import_deepspeed()  # once, for all ranks
    records: dict[str, Any] = {}
    print("| configuration | largest phase | estimated, MB | measured, MB | error |\n|---|---|---|---|---|")
    for name in options.only or CONFIGURATIONS:
        for line in lines(name, by_phase=options.phases, records=records):
            print(line, flush=True)
        if options.record is not None:
            _add(records, options.record)


def _add(records: dict[str, Any], file: Path) -> None:
    """Add to what `tests/deploy/plan` compares the estimates with; peaks in bytes."""
    before = json.loads(file.read_text())["configurations"] if file.exists() else {}
    versions = {name: version(name) for name in ("torch", "transformers", "deepspeed", "peft")}
    machine = {"processor": f"{os.cpu_count()} x {processor()}", "python": platform.python_version(), **versions}
    file.write_text(json.dumps({"machine": machine, "configurations": before | records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
