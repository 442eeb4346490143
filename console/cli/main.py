"""The `penstock` command and its top-level verbs.

A verb is a typed function that calls what does its work; a worker, the reward service and a training replace this process
(`console/launch.py`). Verbs with a subject are in its file. Slow imports are inside the verbs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Literal, NoReturn

from penstock import __version__
from penstock.agents.hosting import commands as environments
from penstock.console.cli import model_verbs, reward_verbs, run_verbs, service_verbs, train_verbs
from penstock.console.cli.options import INSPECT, SERVE, START, SampleOptions
from penstock.protocol import command_line, process_end
from penstock.protocol.command_line import FLAT, Help, Json, RunArguments, RunName, application
from penstock.protocol.errors import PenstockError
from penstock.protocol.process_end import ends_quietly, error_text

app = application(
    "penstock",
    version=__version__,
    version_flags=["--version"],
    help="""Train language models with reinforcement learning, with services that communicate only through NATS and S3.

New here? Type: penstock quickstart
It trains a tiny model in about a minute on this machine, with no download and no GPU.

Settings come from a TOML file and from section.key=value (or --section.key value) after any command.
penstock COMMAND --help shows an example and the next command.""",
)
environments.app.group = SERVE
for verbs in (train_verbs.app, service_verbs.app, run_verbs.record):
    app.update(verbs)
for part in (
    train_verbs.config,
    train_verbs.data,
    model_verbs.app,
    reward_verbs.app,
    environments.app,
    run_verbs.runs,
    run_verbs.weights,
    run_verbs.dead_letters,
    service_verbs.console_app,
):
    app.command(part)
app["--help"].show = app["--version"].show = False  # the text above and the verb say the same


@app.command(group=START)
def doctor(*arguments: RunArguments, json: Json = False) -> int:
    """Check this machine and list each problem with a fix.

    Example:  penstock doctor
              penstock doctor run.toml     also check the NATS, S3 and GPUs of a run file
    Then:     penstock quickstart
    """
    from penstock.console.tools.checks import report
    from penstock.deploy.placement.show import finding

    return report(arguments, os.environ, as_json=json, of_run=finding)


@app.command(group=INSPECT)
def watch(
    run: RunName,
    *arguments: RunArguments,
    plain: Annotated[bool, Help("Print lines instead of the panel.")] = False,
    json: Annotated[
        bool, Help("Print lines to stderr and, at the end, one JSON object as the last line of stdout.")
    ] = False,
) -> int:
    """Show a live panel of a run; Ctrl-C ends the panel, not the run.

    Example:  penstock watch quickstart
              penstock watch my-run nats.url=nats://gpu-1:4222 nats.user=me nats.password_file=secret
    Then:     penstock runs show RUN
    """
    from penstock.console.live.panel import watch_run
    from penstock.console.record.stored_run import store_files, with_local_servers
    from penstock.console.tools.runs import print_one

    named = with_local_servers(run, arguments, finished_only=True)
    if named.folder.is_dir() and store_files(named) is not None:  # stopped or failed: nothing arrives any more
        return print_one(named) or 1
    return watch_run(named, plain=plain, as_json=json)


@app.command(group=INSPECT)
def samples(
    run: RunName,
    *arguments: RunArguments,
    options: Annotated[SampleOptions, FLAT] = SampleOptions(),
    json: Json = False,
) -> int:
    """Read what a run's model wrote, with rewards, as of its newest checkpoint; exit code 1 when no sample fits.

    Example:  penstock samples quickstart --reward-min 1
              penstock samples my-run --prompt 17 --limit 100        one prompt, by version
              penstock samples my-run --dropped no_signal
    Then:     penstock reward test FILE, to score a sample by hand
    """
    from penstock.console.cli.print_samples import print_samples
    from penstock.console.connections import NamedRun

    return print_samples(NamedRun(run, arguments), options, as_json=json)


@app.command(group=INSPECT)
def chat(
    run: RunName,
    *arguments: RunArguments,
    model: Annotated[str | None, Help("Folder of another model to use instead of the run's own.")] = None,
    prompt: Annotated[str | None, Help("Send this prompt, print the answer and exit.")] = None,
    keep: Annotated[
        bool, Help("Send the whole conversation each time, instead of each line alone as in single-turn training.")
    ] = False,
    device: Annotated[str, Help("Where the model runs: cpu or cuda.")] = "cpu",
    temperature: Annotated[float, Help("Sampling temperature; 0 is greedy.")] = 0.0,
    max_tokens: Annotated[
        int | None, Help("Maximum tokens of an answer; default 512, or half the context of a smaller model.")
    ] = None,
) -> int:
    """Chat with the model of a run.

    Example:  penstock chat quickstart
              penstock chat quickstart --prompt "sort 52704183"
    Then:     Ctrl-D ends it
    """
    from penstock.console.connections import NamedRun
    from penstock.console.tools.chat import chat as start_chat

    named = NamedRun(run, arguments)
    return start_chat(
        named, model=model, prompt=prompt, keep=keep, device=device, temperature=temperature, max_tokens=max_tokens
    )


@app.command(group=INSPECT)
def track(
    run: RunName,
    *arguments: RunArguments,
    once: Annotated[bool, Help("Write what is there and exit, instead of waiting for the end of the run.")] = False,
) -> int:
    """Write a run's metrics to experiment trackers, from where they stopped until the run ends.

    `penstock train`, `sft`, `dpo` and `rm` do it too when the run file sets trackers. Each is written by a separate process, which
    affects neither the run nor the other trackers. Without tracker=, those that the run was started with.

    Example:  penstock track quickstart tracker=tensorboard
              penstock track my-run 'tracker=["wandb", "mlflow"]' tracking.project=gsm8k
    Then:     tensorboard --logdir runs/quickstart/trackers/tensorboard
    """
    from penstock.console.connections import NamedRun
    from penstock.console.record.stored_run import with_local_servers
    from penstock.console.report import curves
    from penstock.console.tracking import trackers

    if curves.command_of(NamedRun(run, arguments).folder) not in curves.GIVEN_ANSWERS:
        with_local_servers(run, arguments, finished_only=not once)
    return trackers.track(run, arguments, os.environ, once=once)


@app.command(group=INSPECT)
def log(run: RunName, *arguments: RunArguments, step: Annotated[int, Help("Optimizer step of the figures.")]) -> int:
    """Add figures of another trainer to a run's metrics: they go where those of the run go, to its trackers.

    The run needs its streams: penstock bootstrap run.id=RUN. From Python: penstock.MetricsLog.

    Example:  penstock log my-run --step 100 train/loss=0.31 eval/accuracy=0.74
    Then:     penstock track my-run tracker=wandb
    """
    from penstock.console.tracking.metrics_log import log_once

    return log_once(run, step, arguments)


@app.command(group=INSPECT)
def completion(shell: Annotated[Literal["bash", "zsh", "fish"], Help("The shell.")], /) -> None:
    """Print the script that completes verbs, flags and settings in a shell.

    Example:  penstock completion bash >> ~/.bashrc
              penstock completion zsh > ~/.zfunc/_penstock
              penstock completion fish > ~/.config/fish/completions/penstock.fish
    Then:     start a new shell, and type: penstock train rollout.<TAB>
    """
    from penstock.console.cli.verb_help import script

    print(script(shell, app), end="")


@app.command(group=INSPECT)
def version() -> None:
    """Print the versions that a bug report needs.

    Example:  penstock version
    """
    from penstock.console.tools.versions import installed_versions

    print("\n".join(f"{name} {value}" for name, value in installed_versions()))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 1 after a PenstockError, which is one line on stderr, 130 after Ctrl-C."""
    process_end.install("command")
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if {"--help", "-h"} & set(tokens):
            from penstock.console.cli import verb_help

            verb_help.attach(app, tokens)
        with ends_quietly():
            return command_line.run(app, tokens or ["--help"])
    except PenstockError as err:
        print(f"penstock: {error_text(err)}", file=sys.stderr)
        return 1
    except EOFError:  # Ctrl-D instead of an answer
        return 1
    except KeyboardInterrupt:
        return 130


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command, and exit with its code."""
    sys.exit(run(arguments))


def run_verb(*words: str) -> NoReturn:
    """Run a verb with the arguments of this process: for ``python -m`` of the module that the verb calls."""
    main([*words, *sys.argv[1:]])


if __name__ == "__main__":
    main()
