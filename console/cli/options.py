"""Options of the verbs that `deploy` implements: fields are options, their docstrings the help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from penstock.protocol.command_line import Least, Parameter

Page = Annotated[bool | None, Parameter(negative="--no-page")]


@dataclass(frozen=True, kw_only=True)
class QuickstartOptions:
    """Options of `penstock quickstart`."""

    task: Literal["sort", "tools"] = "sort"
    """sort: sort 8 digits; tools: ask for what it is asked, in two turns."""
    seed: Annotated[int, Least(0)] = 0
    """Seed of model, data and sampling."""
    steps: Annotated[int | None, Least(2)] = None
    """Optimizer steps; default 150 for sort, 120 for tools."""
    workers: Annotated[int | None, Least(1)] = None
    """Rollout workers; default 2, or 1 with SGLang, which needs more memory."""
    engine: Literal["embedded", "sglang"] = "embedded"
    """sglang: a real SGLang server, slowly, on the CPU; needs `make sglang-env` first."""
    run: str = "quickstart"
    """Run id; a number is appended when it is taken."""
    dir: Path = Path("runs")
    """Folder for runs."""
    json: bool = False
    """Print only one JSON object, as the last line of stdout."""
    no_kill: bool = False
    """Do not kill a worker."""
    page: Page = None
    """Serve the live page beside the run, until it ends; default: where stdout is a terminal."""


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """Options of `penstock recipe`."""

    seed: Annotated[int, Least(0)] = 0
    """Seed of data and sampling."""
    steps: Annotated[int, Least(2)] = 120
    """Optimizer steps."""
    workers: Annotated[int, Least(1)] = 1
    """Rollout workers."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 if the processor has instructions for it, else float32."""
    gguf: Path | None = None
    """Train this GGUF file instead of downloading the model."""
    task: str | None = None
    """A task of reasoning-gym instead of sums, as chain_sum:max_terms=2,max_digits=2; its extra is needed."""
    run: str = "smollm2"
    """Run id."""
    dir: Path = Path("runs")
    """Folder for runs."""
    no_train: bool = False
    """Only write the files and print the commands."""
    json: bool = False
    """Print one JSON object about the training, as the last line but one."""


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """Options of `penstock train --local`."""

    workers: int = 2
    """With --local: number of rollout workers."""
    serve: tuple[Path, ...] = ()
    """With --local: also serve this reward file as an HTTP endpoint, in a process of its own; repeatable."""
    tls: bool = False
    """With --local: encrypt the connections to NATS and S3, with own certificates."""
    page: Page = None
    """With --local: serve the live page beside the run, until it ends; default: where stdout is a terminal."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `penstock plan`; rates are in tokens per second, durations in seconds."""

    workers: int = 2
    """Rollout workers, each with one engine."""
    slots: int = 64
    """Sequences that an engine decodes at once."""
    engine_rate: float = 2000.0
    """Tokens per second of an engine with all slots in use."""
    lone_rate: float | None = None
    """Tokens per second of a single sequence; default three times its share of a full engine."""
    trainer_rate: float = 4000.0
    """Sampled tokens that the trainer trains in a second."""
    median: float | None = None
    """Median tokens of a completion; default rollout.max_new_tokens / 20."""
    load: float = 1.0
    """Seconds that an engine takes to load a version."""
    publish: float = 1.0
    """Seconds from a step to its version at the workers."""
    score: float = 1.0
    """Seconds that scoring a pack takes."""
    rank_memory: str | None = None
    """Memory of a rank, such as 80GB: print which settings make the run fit."""
    gpu: bool = False
    """Count the memory of the GPU alone, without the host's."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Options of `penstock eval`."""

    data: tuple[Path, ...]
    """File with held-out prompts, repeatable; or a folder or id as in data.eval."""
    samples: Annotated[int, Parameter(name=("--samples", "-k"))] = 1
    """Samples of each prompt, the k of avg@k and maj@k."""
    temperature: float | None = None
    """Sampling temperature; default eval.temperature, for several samples rollout.temperature."""
    max_tokens: int | None = None
    """Longest completion; default eval.max_new_tokens, else rollout.max_new_tokens."""
    num_prompts: int | None = None
    """Only the first prompts of every file."""
    reward: str | None = None
    """Reward to score with; default that of the run, or the one of --serve, or by data_source."""
    serve: tuple[Path, ...] = ()
    """File to score with: reward (.py), grader (.json) or judge (.toml); the reward has its name; repeatable."""
    answer: str | None = None
    """What votes for maj@k: auto, boxed, tags, hashes, phrase, last_line, whole, last_number; default the reward's."""
    workers: int = 1
    """Rollout workers."""
    json: bool = False
    """Print one JSON object instead of the table."""
