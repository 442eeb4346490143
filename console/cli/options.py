"""Options of the verbs that `deploy` implements, and parameters and help groups that files of verbs share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from penstock.protocol.command_line import Group, Help, Json, Least, Parameter

Page = Annotated[bool | None, Parameter(negative="--no-page")]
ServiceUrl = Annotated[str, Parameter(help="URL of the reward service.")]
AnyServiceUrl = Annotated[
    str | None,
    Parameter(
        help="URL of the reward service; by default the one at http://127.0.0.1:8700, or if none answers there, one that is "
        "started for this command and offers the built-in rewards, those of the run and those of --serve."
    ),
]
ServedFiles = Annotated[
    tuple[Path, ...],
    Parameter(
        name="--serve",
        help="File to score with: Python with a reward function, JSON with a grader, TOML with a judge; its reward has "
        "the file's name. Repeatable.",
    ),
]
TokenFile = Annotated[Path | None, Parameter(help="File with its bearer token, if it requires one.")]
Endpoint = Annotated[str, Parameter(help="Name of the endpoint.")]
START = Group("Start here", sort_key=0)
TRAIN = Group("Train", sort_key=1)
SERVE = Group("Services", sort_key=2)
INSPECT = Group("Inspect", sort_key=3)


@dataclass(frozen=True, kw_only=True)
class QuickstartOptions:
    task: Annotated[
        Literal["sort", "tools"], Help("sort: sort 8 digits; tools: ask for what it is asked, in two turns.")
    ] = "sort"
    seed: Annotated[int, Least(0), Help("Seed of model, data and sampling.")] = 0
    steps: Annotated[int | None, Least(2), Help("Optimizer steps; default 150 for sort, 120 for tools.")] = None
    workers: Annotated[
        int | None, Least(1), Help("Rollout workers; default 2, or 1 with SGLang, which needs more memory.")
    ] = None
    engine: Annotated[
        Literal["embedded", "sglang"],
        Help("sglang: a real SGLang server, slowly, on the CPU; needs `make sglang-env` first."),
    ] = "embedded"
    run: Annotated[str, Help("Run id; a number is appended when it is taken.")] = "quickstart"
    dir: Annotated[Path, Help("Folder for runs.")] = Path("runs")
    json: Annotated[bool, Help("Print only one JSON object, as the last line of stdout.")] = False
    no_kill: Annotated[bool, Help("Do not kill a worker.")] = False
    page: Annotated[
        Page, Help("Serve the live page beside the run, until it ends; default: where stdout is a terminal.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    seed: Annotated[int, Least(0), Help("Seed of data and sampling.")] = 0
    steps: Annotated[int | None, Least(2), Help("Optimizer steps; default: those of the recipe.")] = None
    workers: Annotated[int | None, Least(1), Help("Rollout workers; default: those of the recipe.")] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"] | None,
        Help(
            "Of a pretrained model; default, and auto: bfloat16 if the processor has instructions for it, else float32."
        ),
    ] = None
    gguf: Annotated[Path | None, Help("Train this GGUF file instead of downloading the model.")] = None
    task: Annotated[
        str | None,
        Help(
            "With smollm2: a task of reasoning-gym instead of sums, as chain_sum:max_terms=2,max_digits=2; its extra is needed."
        ),
    ] = None
    run: Annotated[str, Help("Run id; default: the recipe's name.")] = ""
    dir: Annotated[Path, Help("Folder for runs.")] = Path("runs")
    no_train: Annotated[bool, Help("Only write the files and print the commands.")] = False
    json: Annotated[bool, Help("Print one JSON object about the training, as the last line but one.")] = False


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    group: Annotated[str | None, Help("Print this group in full: answers, dialogue, reward parts.")] = None
    step: Annotated[int | None, Help("Only groups trained in this step.")] = None
    version: Annotated[int | None, Help("Only groups of which this version sampled tokens.")] = None
    prompt: Annotated[int | None, Help("Only samples of this prompt, by its number: 17 of e0.p17.a0.")] = None
    reward_min: Annotated[float | None, Help("Only samples with at least this reward.")] = None
    reward_max: Annotated[float | None, Help("Only samples with at most this reward.")] = None
    split: Annotated[str, Help("train, or eval, of which the record has no rewards.")] = "train"
    dropped: Annotated[str | None, Help("Only groups dropped for this reason, such as no_signal; or any.")] = None
    search: Annotated[str | None, Help("Only samples with this text in prompt or completion, in any case.")] = None
    limit: Annotated[int, Least(1), Help("Samples to print, the newest first.")] = 20


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    workers: Annotated[
        int | None,
        Help("With --local: number of rollout workers; default 2, with engines on GPUs one for all of them."),
    ] = None
    serve: Annotated[
        tuple[Path, ...],
        Help("With --local: also serve this reward file as an HTTP endpoint, in a process of its own; repeatable."),
    ] = ()
    tls: Annotated[bool, Help("With --local: encrypt the connections to NATS and S3, with own certificates.")] = False
    page: Annotated[
        Page,
        Help("With --local: serve the live page beside the run, until it ends; default: where stdout is a terminal."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    vary: Annotated[
        tuple[str, ...],
        Help("KEY=V1,V2: train with each of these values; with --random also KEY=LOW..HIGH. Repeatable."),
    ]
    command: Annotated[Literal["train", "sft", "dpo", "rm"], Help("What trains; train starts all services here.")] = (
        "train"
    )
    random: Annotated[int | None, Least(1), Help("Draw so many combinations instead of trying all.")] = None
    seed: Annotated[int, Help("With --random: seed of the draws.")] = 0
    halving: Annotated[
        int | None,
        Least(1),
        Help("Pause all runs after so many steps; the better half goes on for twice as many, and so on."),
    ] = None
    workers: Annotated[int | None, Least(1), Help("As of penstock train --local.")] = None
    serve: ServedFiles = ()
    only_print: Annotated[
        bool, Parameter(name="--print", negative=""), Help("Only print a command for each run, for a queue.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `penstock plan`; rates are in tokens per second, durations in seconds."""

    workers: Annotated[int | None, Help("Rollout workers, each with its servers; default as --gpus has, or 2.")] = None
    gpu_kind: Annotated[
        str | None,
        Help(
            "A100, H100 or H200: take rates that are not given below from public figures for this GPU and the model; implies --gpu."
        ),
    ] = None
    slots: Annotated[int | None, Help("Sequences that an engine decodes at once; default 64.")] = None
    engine_rate: Annotated[
        float | None, Help("Tokens per second of an engine with all slots in use; default 2000.")
    ] = None
    lone_rate: Annotated[
        float | None, Help("Tokens per second of a single sequence; default three times its share of a full engine.")
    ] = None
    trainer_rate: Annotated[float | None, Help("Sampled tokens that the trainer trains in a second; default 4000.")] = (
        None
    )
    median: Annotated[float | None, Help("Median tokens of a completion; default rollout.max_new_tokens / 20.")] = None
    load: Annotated[float | None, Help("Seconds that an engine takes to load a version; default 1.")] = None
    publish: Annotated[float | None, Help("Seconds from a step to its version at the workers; default 1.")] = None
    score: Annotated[float, Help("Seconds that scoring a pack takes.")] = 1.0
    rank_memory: Annotated[
        str | None, Help("Memory of a rank, such as 80GB: print which settings make the run fit.")
    ] = None
    gpu: Annotated[bool, Help("Count the memory of the GPU alone, without the host's.")] = False
    gpus: Annotated[
        str | None,
        Help("GPUs of one machine, such as 8x80GB: place engines and trainer on them, and count their memory."),
    ] = None
    json: Json = False

    @property
    def num_workers(self) -> int:
        return 2 if self.workers is None else self.workers


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    data: Annotated[
        tuple[Path, ...], Help("File with held-out prompts, repeatable; or a folder or id as in data.eval.")
    ]
    samples: Annotated[int, Help("Samples of each prompt, the k of avg@k and maj@k.", name=("--samples", "-k"))] = 1
    temperature: Annotated[
        float | None, Help("Sampling temperature; default eval.temperature, for several samples rollout.temperature.")
    ] = None
    max_tokens: Annotated[
        int | None, Help("Longest completion; default eval.max_new_tokens, else rollout.max_new_tokens.")
    ] = None
    num_prompts: Annotated[int | None, Help("Only the first prompts of every file.")] = None
    reward: Annotated[
        str | None, Help("Reward to score with; default that of the run, or the one of --serve, or by data_source.")
    ] = None
    serve: Annotated[
        tuple[Path, ...],
        Help("File to score with: reward (.py), grader (.json) or judge (.toml); the reward has its name; repeatable."),
    ] = ()
    answer: Annotated[
        str | None,
        Help(
            "What votes for maj@k: auto, boxed, tags, hashes, phrase, last_line, whole, last_number; default the reward's."
        ),
    ] = None
    workers: Annotated[int, Help("Rollout workers.")] = 1
    json: Json = False
