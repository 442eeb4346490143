"""The tasks of `benchmarks/staleness.py`: their problems, their policies as plain functions of tensors, and the warm-up on correct answers.

A policy is a small Qwen3 or Llama model. The same weights give the same log-probabilities as transformers, several times faster for groups of
short completions: the prompt of a group, and how all prompts begin, is computed once. Weights may be bfloat16; the optimizer's are float32,
as are softmax and log-probabilities.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from penstock.deploy import quickstart_task, recipe
from penstock.trainer.learner.gguf_model import model_folder
from penstock.trainer.learner.optimizer_state import lr_factor
from penstock.trainer.learner.trainable import Optimisation

Tensors = dict[str, Tensor]
KeysValues = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Shape:
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    eps: float

    @classmethod
    def of(cls, folder: Path) -> Shape:
        config = json.loads((folder / "config.json").read_text())
        rope = config.get("rope_parameters") or {"rope_type": "default", "rope_theta": config["rope_theta"]}
        if config["model_type"] not in ("llama", "qwen3") or rope["rope_type"] != "default":
            raise ValueError(
                f"{folder}: {config['model_type']} with {rope}; expected llama or qwen3 without scaled positions"
            )
        heads = config["num_attention_heads"]
        return cls(
            config["num_hidden_layers"], heads, config["num_key_value_heads"],
            config.get("head_dim") or config["hidden_size"] // heads, rope["rope_theta"], config["rms_norm_eps"],
        )  # fmt: skip


def read(folder: Path, dtype: torch.dtype = torch.float32) -> Tensors:
    """Return the tensors of a folder with one file, whose head is its embedding."""
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    return {name: tensor.to(dtype).requires_grad_() for name, tensor in tensors.items()}


def _rotated(x: Tensor, start: int, shape: Shape) -> Tensor:
    half = shape.head_dim // 2
    positions = torch.arange(start, start + x.shape[2], dtype=torch.float32)
    angles = positions[:, None] * shape.theta ** (-torch.arange(half, dtype=torch.float32) / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def _projected(w: Tensors, layer: int, hidden: Tensor, start: int, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    name = f"model.layers.{layer}."
    normed = F.rms_norm(hidden, hidden.shape[-1:], w[name + "input_layernorm.weight"], shape.eps)

    def heads(which: str, count: int) -> Tensor:
        return F.linear(normed, w[f"{name}self_attn.{which}_proj.weight"]).unflatten(-1, (count, -1)).transpose(1, 2)

    query, key = heads("q", shape.heads), heads("k", shape.kv_heads)
    if name + "self_attn.q_norm.weight" in w:
        query = F.rms_norm(query, (shape.head_dim,), w[name + "self_attn.q_norm.weight"], shape.eps)
        key = F.rms_norm(key, (shape.head_dim,), w[name + "self_attn.k_norm.weight"], shape.eps)
    return _rotated(query, start, shape), _rotated(key, start, shape), heads("v", shape.kv_heads)


def _finished(w: Tensors, layer: int, hidden: Tensor, attended: Tensor, shape: Shape) -> Tensor:
    name = f"model.layers.{layer}."
    hidden = hidden + F.linear(attended.transpose(1, 2).flatten(2), w[name + "self_attn.o_proj.weight"])
    normed = F.rms_norm(hidden, hidden.shape[-1:], w[name + "post_attention_layernorm.weight"], shape.eps)
    gate, up = F.linear(normed, w[name + "mlp.gate_proj.weight"]), F.linear(normed, w[name + "mlp.up_proj.weight"])
    return hidden + F.linear(F.silu(gate) * up, w[name + "mlp.down_proj.weight"])


def logits_of(w: Tensors, hidden: Tensor, shape: Shape) -> Tensor:
    normed = F.rms_norm(hidden, hidden.shape[-1:], w["model.norm.weight"], shape.eps)
    return F.linear(normed, w["model.embed_tokens.weight"]).float()


def read_prompts(w: Tensors, prompts: Tensor, shape: Shape) -> tuple[Tensor, KeysValues]:
    """Return the last hidden state [P, H] and every layer's keys and values of prompts [P, T]."""
    common = int((prompts == prompts[:1]).all(0)[:-1].long().cumprod(0).sum())
    nothing = w["model.embed_tokens.weight"].new_empty(1, shape.kv_heads, 0, shape.head_dim)
    _, beginning = _read(w, prompts[:1, :common], [(nothing, nothing)] * shape.layers, shape)
    hidden, rest = _read(w, prompts[:, common:], beginning, shape)
    return hidden[:, -1], _joined(beginning, rest)


def _joined(before: KeysValues, own: KeysValues) -> KeysValues:
    def both(first: Tensor, then: Tensor) -> Tensor:
        return torch.cat([first.expand(len(then), -1, -1, -1), then], 2)

    return [(both(k, own_k), both(v, own_v)) for (k, v), (own_k, own_v) in zip(before, own, strict=True)]


def _read(w: Tensors, tokens: Tensor, before: KeysValues, shape: Shape) -> tuple[Tensor, KeysValues]:
    """Return hidden states [P*G, T, H], keys and values of tokens [P*G, T] after ``before`` [P, ...], G in a row for each."""
    hidden, own = F.embedding(tokens, w["model.embed_tokens.weight"]), []
    mask = torch.full((tokens.shape[1], tokens.shape[1]), float("-inf")).triu(1)
    for layer in range(shape.layers):
        query, key, value = _projected(w, layer, hidden, before[layer][0].shape[2], shape)
        own.append((key, value))
        hidden = _finished(w, layer, hidden, _attend(query, before[layer], (key, value), shape, mask), shape)
    return hidden, own


def _attend(
    query: Tensor, prompt: tuple[Tensor, Tensor], completion: tuple[Tensor, Tensor], shape: Shape, mask: Tensor
) -> Tensor:
    """Attend from completions [P*G, heads, T, D] to their prompt's keys [P, ...] and the completions' keys [P*G, ...]."""
    rows, heads, steps, dim = query.shape
    repeats, groups = heads // shape.kv_heads, rows // prompt[0].shape[0]
    query = query * dim**-0.5
    wide = query.unflatten(0, (-1, groups)).unflatten(2, (-1, repeats))  # [P, G, kv, repeats, T, D]
    wide = wide.permute(0, 2, 1, 3, 4, 5).flatten(2, 4)  # [P, kv, G*repeats*T, D]
    to_prompt = wide @ prompt[0].transpose(-1, -2)
    narrow = query.unflatten(1, (-1, repeats)).flatten(2, 3)  # [P*G, kv, repeats*T, D]
    to_own = (narrow @ completion[0].transpose(-1, -2)).unflatten(2, (repeats, steps)) + mask

    def regroup(x: Tensor) -> Tensor:  # [P, kv, G*repeats*T, X] -> [P*G, kv, repeats, T, X]
        return x.unflatten(2, (groups, repeats, steps)).permute(0, 2, 1, 3, 4, 5).flatten(0, 1)

    weights = torch.cat([regroup(to_prompt), to_own], -1).float().softmax(-1).to(query.dtype)
    on_prompt, on_own = weights.split([to_prompt.shape[-1], to_own.shape[-1]], -1)
    wide = on_prompt.unflatten(0, (-1, groups)).permute(0, 2, 1, 3, 4, 5).flatten(2, 4)
    result = regroup(wide @ prompt[1]) + (on_own.flatten(2, 3) @ completion[1]).unflatten(2, (repeats, steps))
    return result.flatten(1, 2)


def completion_logprobs(w: Tensors, prompts: Tensor, completions: Tensor, inside: Tensor, shape: Shape) -> Tensor:
    """Return the log-probabilities [N] of the tokens ``inside`` completions [P*G, T] of prompts [P, Tp], G in a row for each."""
    last, kept = read_prompts(w, prompts, shape)
    hidden, _ = _read(w, completions[:, :-1], kept, shape)
    groups = len(completions) // len(prompts)
    whole = torch.cat([last.repeat_interleave(groups, 0)[:, None], hidden], 1)
    return -F.cross_entropy(logits_of(w, whole[inside], shape), completions[inside], reduction="none")


@torch.no_grad()
def generate(
    w: Tensors, prompts: Tensor, *, groups: int, longest: int, end: int, shape: Shape, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample (greedily without a generator): tokens, log-probabilities [P*G, longest] and lengths [P*G]."""
    last, kept = read_prompts(w, prompts, shape)
    total = len(prompts) * groups
    logits = logits_of(w, last, shape).repeat_interleave(groups, 0)
    tokens, logprobs = torch.full((total, longest), end), torch.zeros(total, longest)
    lengths = torch.full((total,), longest)
    rows = torch.arange(total)  # that have not ended
    kept = [(k[rows // groups], v[rows // groups]) for k, v in kept]
    for step in range(longest):
        scores = logits.log_softmax(-1)
        if generator is None:
            chosen = scores.argmax(-1)
        else:
            below = scores.exp().cumsum(-1)
            drawn = torch.rand(total, generator=generator)[rows, None] * below[:, -1:]
            chosen = torch.searchsorted(below, drawn, right=True)[:, 0].clamp(max=below.shape[1] - 1)
        tokens[rows, step] = chosen
        logprobs[rows, step] = scores.gather(1, chosen[:, None])[:, 0]
        is_open = chosen != end
        lengths[rows[~is_open]] = step + 1
        rows = rows[is_open]
        if step + 1 == longest or not len(rows):
            break
        kept = [(k[is_open], v[is_open]) for k, v in kept]
        hidden, own = _read(w, chosen[is_open, None], kept, shape)
        kept, logits = _joined(kept, own), logits_of(w, hidden[:, 0], shape)
    return tokens, logprobs, lengths


Draw = Callable[[int], list[str]]  # the next so many problems


def eight_digits(seed: int, *, held_out: bool) -> Draw:
    rng = np.random.default_rng([seed, int(held_out), 10, quickstart_task.NUM_DIGITS])

    def draw(count: int) -> list[str]:
        texts: list[str] = []
        while len(texts) < count:
            rows = rng.integers(0, 10, (count, quickstart_task.NUM_DIGITS))
            texts += [t for t in ("".join(map(str, row)) for row in rows) if quickstart_task.is_held_out(t) == held_out]
        return texts[:count]

    return draw


def _passes(pairs: list[tuple[int, int]], seed: int) -> Draw:
    random.Random(seed).shuffle(pairs)
    questions = itertools.cycle(recipe.sum_question(*pair) for pair in pairs)
    return lambda count: list(itertools.islice(questions, count))


def two_digit_sums(seed: int, *, held_out: bool) -> Draw:
    return _passes(recipe.sums(held_out=held_out), seed)


def one_digit_sums(seed: int, *, held_out: bool) -> Draw:
    del held_out  # all of them: held out are sums of two digits
    return _passes([(a, b) for a in range(10) for b in range(10)], seed)


def _quickstart_model(folder: Path, seed: int) -> Path:
    quickstart_task.write_model(folder / f"model-{seed}", seed=seed)
    return folder / f"model-{seed}"


def _smollm2(folder: Path, seed: int) -> Path:
    del seed
    return model_folder(recipe.fetch_model(folder))


_USER = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def optimisation(
    steps: int, lr: float, betas: tuple[float, float], warmup_steps: int, last: float = 1.0
) -> Optimisation:
    return Optimisation(
        num_steps=steps, lr=lr, betas=betas, weight_decay=0.0, warmup_steps=warmup_steps, schedule="linear",
        min_lr_ratio=last, max_grad_norm=1.0, zero_stage=0, dtype="float32",
    )  # fmt: skip


@dataclass(frozen=True)
class Task:
    name: str
    answer: Callable[[str], str]
    longest: int  # answer, in tokens
    sft_steps: int
    sft_batch: int
    prompts: int
    group: int
    lr: float
    num_eval: int
    steps: int
    warm_seed: int | None = None  # of the warm-up; None: that of the run
    problems: Callable[..., Draw] = eight_digits  # of a seed, held_out or not
    sft_problems: Callable[..., Draw] = eight_digits
    prompt: str = _USER.format("sort {}")
    model: Callable[[Path, int], Path] = _quickstart_model
    dtype: torch.dtype = torch.float32
    sft_lr: float = 3e-3
    sft_betas: tuple[float, float] = (0.9, 0.98)
    sft_warmup: int = 20
    last_lr: float = 0.1  # at the end, as a share of lr
    every: int = 10  # steps between evaluations


_SUMS = Task(
    "sums", lambda t: str(sum(map(int, t[:-1].split("+")))), 4, recipe.SFT_STEPS, recipe.SFT_BATCH,
    16, 8, recipe.LR, recipe.HELD_OUT, 60, None, two_digit_sums, one_digit_sums,
    f"<|im_start|>system\n{recipe.SUMS_SYSTEM_PROMPT}<|im_end|>\n{_USER}", _smollm2, torch.bfloat16,
    recipe.SFT_LR, (0.9, 0.95), 5, 1.0, 15,
)  # fmt: skip
TASKS = {
    "sort": Task("sort", lambda t: "".join(sorted(t)), 9, 80, 128, 48, 8, 1e-3, 500, 100),
    "repeat": Task("repeat", lambda t: "".join(sorted(t)) * 8, 65, 130, 32, 16, 8, 5e-4, 200, 60),
    "sums": _SUMS,
}


class Codec:
    def __init__(self, folder: Path, task: Task) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        [[self.end]] = self._encoded(["<|im_end|>"])
        self.task = task

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        return [e.ids for e in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def prompts(self, problems: list[str]) -> Tensor:
        return torch.tensor(self._encoded([self.task.prompt.format(p) for p in problems]))

    def answers(self, problems: list[str]) -> Tensor:
        """Return the answers [P, longest], filled up with the end of turn."""
        rows = self._encoded([self.task.answer(p) for p in problems])
        return torch.tensor([row + [self.end] * (self.task.longest - len(row)) for row in rows])

    def inside(self, tokens: Tensor) -> Tensor:
        """Return which tokens [R, T] belong to the answer, its end of turn included."""
        return (tokens == self.end).long().cumsum(1) - (tokens == self.end).long() == 0


def exact(tokens: Tensor, answers: Tensor) -> Tensor:
    return (tokens == answers).all(1).double()


def copy_of(weights: Tensors) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


def accuracy(weights: Tensors, codec: Codec, shape: Shape) -> float:
    task = codec.task
    problems = task.problems(0, held_out=True)(task.num_eval)
    tokens, _, _ = generate(
        weights, codec.prompts(problems), groups=1, longest=task.longest, end=codec.end, shape=shape, generator=None
    )
    return float(exact(tokens, codec.answers(problems)).mean())


class Optimizer:
    """AdamW on float32 copies of the weights, with the trainer's learning rates over the steps."""

    def __init__(self, weights: Tensors, how: Optimisation) -> None:
        self.how, self.num_steps = how, 0
        self.weights = list(weights.values())
        self.copies = [weight.detach().float() for weight in self.weights]
        for copy in self.copies:
            copy.grad = torch.empty_like(copy)
        self._adamw = torch.optim.AdamW(self.copies, lr=how.lr, betas=how.betas, weight_decay=0.0, fused=True)

    def step(self, loss: Tensor, factor: float = 1.0) -> float:
        """Make a step at ``factor`` times the scheduled rate; return the norm of the gradient."""
        loss.backward()
        norms = [torch.linalg.vector_norm(weight.grad, dtype=torch.float32) for weight in self.weights]
        norm = float(torch.stack(norms).norm())
        for copy, weight in zip(self.copies, self.weights, strict=True):
            assert copy.grad is not None
            assert weight.grad is not None
            copy.grad.copy_(weight.grad)
            if norm > self.how.max_grad_norm:
                copy.grad.mul_(self.how.max_grad_norm / norm)
            weight.grad = None
        for group in self._adamw.param_groups:
            group["lr"] = self.how.lr * lr_factor(self.how, self.num_steps) * factor
        self._adamw.step()
        self.num_steps += 1
        with torch.no_grad():
            for copy, weight in zip(self.copies, self.weights, strict=True):
                weight.copy_(copy)
        return norm


def warm_up(task: Task, seed: int, cache: Path) -> tuple[Tensors, Shape, Codec]:
    """Train briefly on correct answers; the result is the same for every method, so it is cached on disk."""
    cache.mkdir(parents=True, exist_ok=True)
    folder = task.model(cache, seed)
    shape, codec = Shape.of(folder), Codec(folder, task)
    kept = cache / f"{task.name}-{seed}-{task.sft_steps}x{task.sft_batch}-{task.sft_lr}.pt"
    if kept.exists():
        weights = torch.load(kept, weights_only=True)
        return {name: tensor.requires_grad_() for name, tensor in weights.items()}, shape, codec
    weights = read(folder, task.dtype)
    draw = task.sft_problems(seed + 1000, held_out=False)
    optimizer = Optimizer(weights, optimisation(task.sft_steps, task.sft_lr, task.sft_betas, task.sft_warmup))
    for _ in range(task.sft_steps):
        problems = draw(task.sft_batch)
        answers = codec.answers(problems)
        inside = codec.inside(answers)
        logprobs = completion_logprobs(weights, codec.prompts(problems), answers, inside, shape)
        optimizer.step(-logprobs.mean())
    torch.save(copy_of(weights), kept)
    return weights, shape, codec
