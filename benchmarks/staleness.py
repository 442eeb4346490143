"""Measure which corrections learn from stale samples: fixed lags, in one process, on tasks that are learned in a minute.

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
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks import staleness_report, tiny_policy
from torch import Tensor

from penstock.deploy import quickstart_task
from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.batch import MicroBatch
from penstock.trainer.algorithm.corrections.importance import importance
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
from penstock.trainer.learner.optimizer_state import lr_factor

RESULTS = Path(__file__).with_suffix(".jsonl")
_EVERY = 10  # steps between evaluations
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
}


@dataclass(frozen=True)
class Task:
    name: str
    symbols: str
    length: int
    answer: Callable[[str], str]
    verb: str
    sft_steps: int
    sft_batch: int
    prompts: int
    group: int
    lr: float
    num_eval: int
    steps: int
    warm_seed: int | None = None  # of the warm-up; None: that of the run

    @property
    def longest(self) -> int:
        return len(self.answer("0" * self.length)) + 1

    def problems(self, seed: int, *, held_out: bool) -> Callable[[int], list[str]]:
        rng = np.random.default_rng([seed, int(held_out), len(self.symbols), self.length])
        letters = np.array(list(self.symbols))

        def draw(count: int) -> list[str]:
            texts: list[str] = []
            while len(texts) < count:
                for row in letters[rng.integers(0, len(letters), (count, self.length))]:
                    text = "".join(row)
                    if quickstart_task.is_held_out(text) == held_out:
                        texts.append(text)
            return texts[:count]

        return draw


TASKS = {
    "sort": Task("sort", "0123456789", 8, lambda t: "".join(sorted(t)), "sort", 80, 128, 48, 8, 1e-3, 500, 100),
    "repeat": Task("repeat", "0123456789", 8, lambda t: "".join(sorted(t)) * 8, "sort", 130, 32, 16, 8, 5e-4, 200, 60),
}


class Codec:
    def __init__(self, folder: Path, task: Task) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.end = self.tokenizer.token_to_id("<|im_end|>")
        self.task = task

    def prompts(self, problems: list[str]) -> Tensor:
        texts = [f"<|im_start|>user\n{self.task.verb} {p}<|im_end|>\n<|im_start|>assistant\n" for p in problems]
        return torch.tensor([e.ids for e in self.tokenizer.encode_batch(texts)])

    def answers(self, problems: list[str]) -> Tensor:
        return torch.tensor(
            [e.ids for e in self.tokenizer.encode_batch([self.task.answer(p) + "<|im_end|>" for p in problems])]
        )


def exact(tokens: Tensor, answers: Tensor) -> Tensor:
    return (tokens == answers).all(1).double()


def _clone(weights: tiny_policy.Tensors) -> tiny_policy.Tensors:
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


def accuracy(weights: tiny_policy.Tensors, codec: Codec, shape: tiny_policy.Shape) -> float:
    task = codec.task
    problems = task.problems(0, held_out=True)(task.num_eval)
    tokens, _, _ = tiny_policy.generate(
        weights, codec.prompts(problems), groups=1, longest=task.longest, end=codec.end, shape=shape, generator=None
    )
    return float(exact(tokens, codec.answers(problems)).mean())


def warm_up(task: Task, seed: int, cache: Path) -> tuple[tiny_policy.Tensors, tiny_policy.Shape, Codec]:
    """Train briefly on correct answers; the result is the same for every method, so it is cached on disk."""
    key = hashlib.sha256(repr([task, seed]).split("lambda")[0].encode() + repr(task.sft_steps).encode()).hexdigest()[
        :12
    ]
    with tempfile.TemporaryDirectory() as folder:
        quickstart_task.write_model(Path(folder), seed=seed)
        shape, codec = tiny_policy.Shape.of(Path(folder)), Codec(Path(folder), task)
        kept = cache / f"{task.name}-{seed}-{task.sft_steps}-{key}.pt"
        if kept.exists():
            weights = torch.load(kept, weights_only=True)
            return {name: tensor.requires_grad_() for name, tensor in weights.items()}, shape, codec
        weights = tiny_policy.read(Path(folder))
    draw = task.problems(seed + 1000, held_out=False)
    optimizer = torch.optim.AdamW(weights.values(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(task.sft_steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20)
        problems = draw(task.sft_batch)
        answers = codec.answers(problems)
        logits = tiny_policy.completion_logits(weights, codec.prompts(problems), answers, shape)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
    cache.mkdir(parents=True, exist_ok=True)
    torch.save(_clone(weights), kept)
    return weights, shape, codec


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


def roll_out(
    versions: list[tuple[int, tiny_policy.Tensors]],
    problems: list[str],
    codec: Codec,
    shape: tiny_policy.Shape,
    generator: torch.Generator,
) -> Batch:
    """Sample groups, an equal share of the prompts from every version (with its age)."""
    share = len(problems) // len(versions)
    parts = []
    for number, (_, version) in enumerate(versions):
        prompts = codec.prompts(problems[number * share : (number + 1) * share])
        parts.append(
            tiny_policy.generate(
                version, prompts, groups=codec.task.group, longest=codec.task.longest, end=codec.end, shape=shape,
                generator=generator,
            )
        )  # fmt: skip
    tokens, logprobs, lengths = (torch.cat(column) for column in zip(*parts, strict=True))
    answers = codec.answers(problems).repeat_interleave(codec.task.group, 0)
    ages = torch.tensor([age for age, _ in versions]).repeat_interleave(share * codec.task.group)
    return Batch(codec.prompts(problems), tokens, logprobs, lengths, exact(tokens, answers), ages)


def micro_batch(batch: Batch, group: int, longest: int) -> tuple[MicroBatch, Tensor]:
    """Build what the trainer's objective reads, and the positions of the sampled tokens in [rows, longest]."""
    inside = torch.arange(longest) < batch.lengths[:, None]
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


def train(
    task: Task, rule: PolicyGradient, lag: str, seed: int, *, steps: int, cache: Path, lr: float,
    rows: list[dict[str, Any]] | None = None,
) -> dict:  # fmt: skip
    """Train, and return what is reported; ``rows`` takes a row for each step and evaluation, as in a run's metrics.jsonl."""
    rows = [] if rows is None else rows
    torch.set_num_threads(1)
    started = time.process_time()
    weights, shape, codec = warm_up(task, seed if task.warm_seed is None else task.warm_seed, cache)
    optimizer = torch.optim.AdamW(weights.values(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    factor = partial(lr_factor, schedule="linear", num_steps=steps, warmup_steps=10, min_lr_ratio=0.1)
    draw = task.problems(seed + 2000, held_out=False)
    generator = torch.Generator().manual_seed(seed)
    ages = lags_of(lag)
    history: deque[tiny_policy.Tensors] = deque([_clone(weights)], maxlen=max(ages) + 1)
    curve = {0: accuracy(weights, codec, shape)}
    rows.append(eval_row(0, curve[0]))
    reported: list[dict[str, float]] = []
    for step in range(steps):
        newest = len(history) - 1
        versions = [(min(age, newest), history[newest - min(age, newest)]) for age in ages]
        batch = roll_out(versions, draw(task.prompts), codec, shape, generator)
        micro, inside = micro_batch(batch, task.group, task.longest)
        logits = tiny_policy.completion_logits(weights, batch.prompts, batch.tokens, shape)
        logprobs = logits.log_softmax(-1).gather(2, batch.tokens[..., None])[..., 0][inside]
        outcome = rule(logprobs, micro)
        optimizer.zero_grad()
        outcome.loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(weights.values(), 1.0))
        sums = {name: float(value) for name, value in outcome.sums.items()}
        scale = rule.lr_factor(sums)
        for group in optimizer.param_groups:
            group["lr"] = lr * factor(step) * scale
        optimizer.step()
        rows.append(
            step_row(step + 1, batch, sums, codec.end)
            | {"update_ratio": _moved(weights, history[-1])}
            | {"lr": lr * scale, "lr_set": lr}
        )
        history.append(_clone(weights))
        names = {"kl": "gap_k3", "clipped": "clipped", "dual": "dual_clipped", "surprise": "surprise"}
        by_token = {name: sums[of] / sums["tokens"] for name, of in names.items()}
        reported.append({"reward": float(batch.rewards.mean()), "lr_factor": scale, "norm": norm, **by_token})
        if (step + 1) % _EVERY == 0:
            curve[step + 1] = accuracy(weights, codec, shape)
            rows.append(eval_row(step + 1, curve[step + 1]))

    after = [value for step, value in curve.items() if step]
    return {
        "task": task.name, "lag": lag, "seed": seed, "steps": steps, "lr": lr, "curve": curve,
        "end": after[-1], "mean": round(float(np.mean(after)), 4), "cpu_s": round(time.process_time() - started, 1),
        **{name: round(float(np.mean([step[name] for step in reported])), 4) for name in reported[0]},
    }  # fmt: skip


def _moved(weights: tiny_policy.Tensors, before: tiny_policy.Tensors) -> float:
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
    return runs + [("repeat", "default", lag, seed) for lag in ("16", "32") for seed in seeds]


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
