"""The `penstock` command: one verb for each thing a person does.

Verbs that are a service become that service's process (`console/launch.py`); the others are told
here, or in the file of their subject (`reward_verbs`, `run_verbs`, `dead_letter_verbs`). Every import
that costs time is inside its verb, so that ``--help`` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cyclopts import App

from penstock.console import launch
from penstock.console.cli import dead_letter_verbs, reward_verbs, run_verbs
from penstock.console.cli.verb_parts import LOOK, SERVE, START, TRAIN, Flag, Raw
from penstock.protocol.errors import PenstockError

app = App(
    name="penstock",
    help_format="plaintext",
    version_flags=[],
    help="""Train language models with reinforcement learning, through services that meet only on NATS and S3.

New here? Type: penstock quickstart
It trains a tiny model in about a minute on this machine, with no download and no GPU.

Settings come from a TOML file and from section.key=value (or --section.key value) behind any command.
penstock COMMAND --help shows an example and what to type next.""",
)
config = App(name="config", help="Show what a run file means.", help_format="plaintext", group=TRAIN)
data = App(name="data", help="Say what a data file can train.", help_format="plaintext", group=TRAIN)
for part in (config, data, reward_verbs.app, run_verbs.runs, run_verbs.weights, dead_letter_verbs.app):
    app.command(part)
app.update(run_verbs.record)
app["--help"].show = False  # the text above says it


@app.command(group=START)
def quickstart(*arguments: Raw) -> None:
    """Watch a tiny model learn to sort digits, through every service.

    Example:  penstock quickstart
              penstock quickstart --json        one JSON object as the last line, for machines
    Then:     penstock chat quickstart
    """
    launch.become(launch.module("penstock.deploy.quickstart", *arguments))


@app.command(group=TRAIN)
def train(*arguments: Raw) -> None:
    """Train a model as the run file says.

    The trainer alone starts here, under torchrun when trainer.num_ranks is above 1. It meets the
    reward service and the rollout workers on NATS. With --local all of them start on this machine.

    Example:  penstock train run.toml --local
              penstock train run.toml trainer.lr=1e-6 --trainer.steps 200
    Then:     penstock watch RUN, in another terminal
    """
    launch.become(launch.train(arguments, os.environ))


@app.command(group=TRAIN)
def sft(*arguments: Raw) -> None:
    """Warm a model up on examples (supervised fine-tuning).

    Example:  penstock sft run.toml sft.steps=300
    Then:     penstock train run.toml model.path=FOLDER, with the folder it wrote
    """
    launch.become(launch.module("penstock.trainer", "sft", *arguments))


@config.command
def show(*arguments: Raw) -> None:
    """Show every setting of a run file with its value and where the value comes from.

    Example:  penstock config show run.toml trainer.lr=1e-6
    Then:     penstock train run.toml
    """
    launch.become(launch.module("penstock.trainer", "config", *arguments))


@data.command
def check(*arguments: Raw) -> None:
    """Say what a data file can train and what is wrong with which row.

    Example:  penstock data check train.parquet --model Qwen3-0.6B
    Then:     penstock train run.toml data.train=train.parquet
    """
    launch.become(launch.module("penstock.trainer", "data-check", *arguments))


@app.command(group=SERVE)
def rollout(*arguments: Raw) -> None:
    """Start a rollout worker: it generates groups and follows the weights.

    Start as many as you like, anywhere: a worker needs NATS, S3 and the run's name, and may be killed.

    Example:  penstock rollout run.toml worker.device=cuda
    Then:     penstock watch RUN
    """
    launch.become(launch.module("penstock.rollout_service", *arguments))


@app.command(group=SERVE)
def up(*arguments: Raw) -> None:
    """Start NATS and an S3 server on this machine, and say how to reach them.

    Example:  penstock up --data runs/store
    Then:     paste the printed lines into another terminal, and: penstock train run.toml
    """
    launch.become(launch.module("penstock.deploy.local", *arguments))


@app.command(group=START)
def doctor(*arguments: Raw, json: Flag = False) -> int:
    """Check this machine; every complaint comes with its cure.

    Example:  penstock doctor
              penstock doctor run.toml     also NATS and S3, as the run file names them
    Then:     penstock quickstart

    Parameters
    ----------
    json
        Print one JSON object instead of the table.
    """
    from penstock.console.tools.doctor import report

    return report(arguments, os.environ, as_json=json)


@app.command(group=LOOK)
def watch(run: str, *arguments: Raw, plain: Flag = False, json: Flag = False) -> int:
    """Show the live panel of a run; Ctrl-C leaves the run alone.

    Example:  penstock watch quickstart
              penstock watch my-run nats.url=nats://gpu-1:4222 nats.user=me nats.password_file=secret
    Then:     penstock runs show RUN

    Parameters
    ----------
    run
        Name of the run.
    plain
        Write lines instead of the panel.
    json
        Write lines to stderr and, at the end, one JSON object as the last line of stdout.
    """
    from penstock.console.live.watch import watch_run
    from penstock.console.record import stored_run

    stored_run.beside(run, arguments, os.environ, sys.argv[1:], finished_only=True)
    return watch_run(run, arguments, os.environ, plain=plain, as_json=json)


@app.command(group=LOOK)
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
    """Talk to what a run has trained.

    Example:  penstock chat quickstart
              penstock chat quickstart --prompt "sort 52704183"
    Then:     Ctrl-D ends it

    Parameters
    ----------
    run
        Name of the run.
    model
        Folder of another model to talk to instead of the run's own.
    prompt
        Ask this once and print the answer, instead of a conversation.
    keep
        Keep the conversation, instead of asking each line alone as in single-turn training.
    device
        Where the model runs: cpu or cuda.
    temperature
        0 takes the likeliest token every time.
    max_tokens
        Most tokens of one answer; by default 512, less for a model with a small context.
    """
    from penstock.console.tools.chat import How, talk

    how = How(model=model, prompt=prompt, keep=keep, device=device, temperature=temperature, max_tokens=max_tokens)
    return talk(run, arguments, os.environ, how)


@app.command(group=LOOK)
def version() -> None:
    """Print the versions that matter in a bug report.

    Example:  penstock version
    """
    from penstock.console.tools.doctor import versions

    print("\n".join(f"{name} {value}" for name, value in versions()))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; errors of ours are one line on stderr and exit code 1, Ctrl-C is 130."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.exit(app(tokens or ["--help"]) or 0)
    except PenstockError as err:
        print(f"penstock: {err}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
