"""The `penstock` command: one verb for each thing a person does.

Verbs that are a service become that service's process (`console/launch.py`); the others are told
here. Every import that costs time is inside its verb, so that ``--help`` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from console import dead_letter_verbs, launch
from console.verb_parts import LOOK as _LOOK
from console.verb_parts import SERVE as _SERVE
from console.verb_parts import START as _START
from console.verb_parts import TRAIN as _TRAIN
from console.verb_parts import Flag, Raw
from protocol.errors import PenstockError

_REWARD_URL = "http://127.0.0.1:8700"
_OWN_HELP = ()  # no flags of ours: --help goes to the process that the command becomes, which lists its options

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
config = App(name="config", help="Show what a run file means.", help_format="plaintext", group=_TRAIN)
data = App(name="data", help="Say what a data file can train.", help_format="plaintext", group=_TRAIN)
reward = App(name="reward", help="Serve, list and try rewards.", help_format="plaintext", group=_SERVE)
runs = App(name="runs", help="List runs and print their reports.", help_format="plaintext", group=_LOOK)
weights = App(
    name="weights", help="List the versions of a run, write one to disk.", help_format="plaintext", group=_LOOK
)
for part in (config, data, reward, runs, weights, dead_letter_verbs.app):
    app.command(part)
app["--help"].show = False  # the text above says it


@app.command(group=_START)
def quickstart(*arguments: Raw) -> None:
    """Watch a tiny model learn to sort digits, through every service.

    Example:  penstock quickstart
              penstock quickstart --json        one JSON object as the last line, for machines
    Then:     penstock chat quickstart
    """
    launch.become(launch.module("deploy.quickstart", *arguments))


@app.command(group=_TRAIN)
def train(*arguments: Raw) -> None:
    """Train a model as the run file says.

    The trainer alone starts here, under torchrun when trainer.num_ranks is above 1. It meets the
    reward service and the rollout workers on NATS. With --local all of them start on this machine.

    Example:  penstock train run.toml --local
              penstock train run.toml trainer.lr=1e-6 --trainer.steps 200
    Then:     penstock watch RUN, in another terminal
    """
    launch.become(launch.train(arguments, os.environ))


@app.command(group=_TRAIN)
def sft(*arguments: Raw) -> None:
    """Warm a model up on examples (supervised fine-tuning).

    Example:  penstock sft run.toml sft.steps=300
    Then:     penstock train run.toml model.path=FOLDER, with the folder it wrote
    """
    launch.become(launch.module("trainer", "sft", *arguments))


@config.command
def show(*arguments: Raw) -> None:
    """Show every setting of a run file with its value and where the value comes from.

    Example:  penstock config show run.toml trainer.lr=1e-6
    Then:     penstock train run.toml
    """
    launch.become(launch.module("trainer", "config", *arguments))


@data.command
def check(*arguments: Raw) -> None:
    """Say what a data file can train and what is wrong with which row.

    Example:  penstock data check train.parquet --model Qwen3-0.6B
    Then:     penstock train run.toml data.train=train.parquet
    """
    launch.become(launch.module("trainer", "data-check", *arguments))


@app.command(group=_SERVE)
def rollout(*arguments: Raw) -> None:
    """Start a rollout worker: it generates groups and follows the weights.

    Start as many as you like, anywhere: a worker needs NATS, S3 and the run's name, and may be killed.

    Example:  penstock rollout run.toml worker.device=cuda
    Then:     penstock watch RUN
    """
    launch.become(launch.module("rollout_service", *arguments))


@reward.command
def service(*arguments: Raw) -> None:
    """Start the reward service, which scores generated groups.

    Example:  penstock reward service run.toml reward_service.port=8700
    Then:     penstock reward list
    """
    launch.become(launch.module("reward_service", *arguments))


@reward.command(help_flags=_OWN_HELP)
def serve(*arguments: Raw) -> None:
    """Turn a Python file with a reward function (verl's, TRL's, OpenRLHF's, a class) into a registered endpoint.

    Example:  penstock reward serve my_reward.py --register http://127.0.0.1:8700
    Then:     penstock reward test my_reward
    """
    launch.become(launch.module("reward_service", "serve", *arguments))


@reward.command(name="serve-judge", help_flags=_OWN_HELP)
def serve_judge(*arguments: Raw) -> None:
    """Turn a language model into a registered reward endpoint: a judge, by score or by pairs.

    Example:  penstock reward serve-judge judge.toml --register http://127.0.0.1:8700
    Then:     penstock reward test judge
    """
    launch.become(launch.module("reward_service", "serve-judge", *arguments))


@reward.command(name="serve-grader", help_flags=_OWN_HELP)
def serve_grader(*arguments: Raw) -> None:
    """Turn a grader in OpenAI's JSON form into a registered reward endpoint.

    Example:  penstock reward serve-grader grader.json --register http://127.0.0.1:8700
    Then:     penstock reward test grader
    """
    launch.become(launch.module("reward_service", "serve-grader", *arguments))


@reward.command(name="serve-model", help_flags=_OWN_HELP)
def serve_model(*arguments: Raw) -> None:
    """Turn a reward model's folder into a registered reward endpoint.

    Example:  penstock reward serve-model rm/ --register http://127.0.0.1:8700
    Then:     penstock reward test rm
    """
    launch.become(launch.module("reward_model", *arguments))


@reward.command(name="list")
def list_rewards(*, url: str = _REWARD_URL, token_file: Path | None = None, json: Flag = False) -> int:
    """List the rewards that a running reward service offers.

    Example:  penstock reward list
    Then:     penstock reward test NAME

    Parameters
    ----------
    url
        Where the reward service is.
    token_file
        File with its bearer token, if it wants one.
    json
        Print one JSON object instead of the table.
    """
    from console.rewards import print_list

    return print_list(url, token_file, as_json=json)


@reward.command(name="test")
def try_reward(  # noqa: PLR0913 - each is an option of the command
    name: str,
    *completions: str,
    data: Path | None = None,
    number: Annotated[int, Parameter(name=["--number", "-n"])] = 20,
    map: tuple[str, ...] = (),
    url: str = _REWARD_URL,
    token_file: Path | None = None,
    prompt: str = "What is 2 + 2?",
    ground_truth: str = "4",
    data_source: str = "example",
    json: Flag = False,
) -> int:
    """Score completions with a reward, as a run would, or see how its scores lie on rows of a data file.

    Example:  penstock reward test gsm8k
              penstock reward test gsm8k "#### 7" "it is 8" --ground-truth 7
              penstock reward test gsm8k --data gsm8k/train.parquet -n 20
    Then:     name it in the run file: reward.name = "gsm8k"

    Parameters
    ----------
    name
        Name of the reward.
    completions
        Texts to score; an example when there are none.
    data
        Data file; its rows are tried with right and wrong answers, and equal scores are warned of.
    number
        How many rows of the data file.
    map
        Columns of other names, as OURS=THEIRS; with --data.
    url
        Where the reward service is.
    token_file
        File with its bearer token, if it wants one.
    prompt
        The prompt that the texts answer.
    ground_truth
        The row's right answer.
    data_source
        The row's data set.
    json
        Print one JSON object instead of the table; with --data.
    """
    if data is not None:
        from console.reward_trial import try_data

        return try_data(name, data, number, map, url, token_file, as_json=json)
    from console.rewards import try_out

    return try_out(
        name, completions, url, token_file, prompt=prompt, ground_truth=ground_truth, data_source=data_source
    )


@reward.command
def errors(run: str, *arguments: Raw, json: Flag = False) -> int:
    """Say which groups of a run got no reward, why, and what became of them.

    Example:  penstock reward errors gsm8k
              penstock reward errors gsm8k nats.url=nats://gpu-1:4222 nats.user=me
    Then:     penstock reward test NAME

    Parameters
    ----------
    run
        Id of the run.
    json
        Print one JSON array instead of the table.
    """
    from console.reward_errors import print_errors

    return print_errors(run, arguments, os.environ, as_json=json)


@reward.command
def drain(name: str, *, url: str = _REWARD_URL, token_file: Path | None = None) -> int:
    """Take an endpoint out of service: calls under way end, its other groups wait.

    Example:  penstock reward drain my_reward
    Then:     penstock reward resume my_reward

    Parameters
    ----------
    name
        Name of the endpoint.
    url
        Where the reward service is.
    token_file
        File with its bearer token, if it wants one.
    """
    from console.rewards import set_service

    return set_service(name, "drain", url, token_file)


@reward.command
def resume(name: str, *, url: str = _REWARD_URL, token_file: Path | None = None) -> int:
    """Take a drained endpoint into service again.

    Example:  penstock reward resume my_reward
    Then:     penstock reward list

    Parameters
    ----------
    name
        Name of the endpoint.
    url
        Where the reward service is.
    token_file
        File with its bearer token, if it wants one.
    """
    from console.rewards import set_service

    return set_service(name, "resume", url, token_file)


@reward.command
def remove(name: str, *, url: str = _REWARD_URL, token_file: Path | None = None) -> int:
    """Unregister an endpoint; groups that ask for it wait until it is back.

    Example:  penstock reward remove my_reward
    Then:     penstock reward list

    Parameters
    ----------
    name
        Name of the endpoint.
    url
        Where the reward service is.
    token_file
        File with its bearer token, if it wants one.
    """
    from console.rewards import remove as unregister

    return unregister(name, url, token_file)


@app.command(group=_SERVE)
def up(*arguments: Raw) -> None:
    """Start NATS and an S3 server on this machine, and say how to reach them.

    Example:  penstock up --data runs/store
    Then:     paste the printed lines into another terminal, and: penstock train run.toml
    """
    launch.become(launch.module("deploy.local", *arguments))


@app.command(group=_START)
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
    from console.doctor import report

    return report(arguments, os.environ, as_json=json)


@runs.default
@runs.command(name="list")
def list_runs(*arguments: Raw, json: Flag = False) -> int:
    """List the runs of this machine, and those of the broker when one is configured.

    Example:  penstock runs
    Then:     penstock runs show RUN

    Parameters
    ----------
    json
        Print one JSON array instead of the table.
    """
    from console.runs import print_list

    return print_list(arguments, os.environ, as_json=json)


@runs.command(name="show")
def show_run(run: str, *arguments: Raw) -> int:
    """Print a run's report.

    Example:  penstock runs show quickstart
    Then:     penstock chat RUN

    Parameters
    ----------
    run
        Name of the run.
    """
    from console.runs import print_one

    return print_one(run, arguments, os.environ)


@weights.default
def list_weights(run: str, *arguments: Raw, json: Flag = False) -> int:
    """List the stored versions of a run: parent, kind, what changed, bytes, seconds, and who serves which.

    Example:  penstock weights quickstart
    Then:     penstock weights export RUN --version V --to FOLDER

    Parameters
    ----------
    run
        Name of the run.
    json
        Print one JSON array instead of the table.
    """
    from console.weights import print_versions

    return print_versions(run, arguments, os.environ, as_json=json)


@weights.command(name="export")
def export_weights(run: str, *arguments: Raw, version: int, to: Path) -> int:
    """Write a version as a Hugging Face model folder, from its anchor and the patches that follow.

    Example:  penstock weights export quickstart --version 12 --to models/v12
    Then:     penstock chat RUN --model models/v12

    Parameters
    ----------
    run
        Name of the run.
    version
        Which version.
    to
        Folder that does not exist yet.
    """
    from console.weights import export

    return export(run, version, to, arguments, os.environ)


@app.command(group=_LOOK)
def replay(
    run: str,
    *arguments: Raw,
    first: Annotated[int | None, Parameter(name="--from")] = None,
    last: Annotated[int | None, Parameter(name="--to")] = None,
    model: Path | None = None,
    json: Flag = False,
) -> None:
    """Train a run again from its stored groups, and compare the weights of every version, hash by hash.

    No worker, reward or queue is needed: only the object store, and the model that the run began with. Groups,
    their order and all settings come from the run's record. On the same kind of machine every version comes
    out the same, and the exit code is 0; otherwise it is 1, and the first version that differs is named, with
    all that is not as it was: packs, settings, libraries, machine.

    Example:  penstock replay quickstart
              penstock replay my-run run.toml --from 40 --to 60
    Then:     penstock lineage RUN --version V

    Parameters
    ----------
    run
        Name of the run.
    first
        Begin with the newest stored checkpoint at or before this version, not with the initial model.
    last
        The last version to make.
    model
        Folder of the initial model, when it is no longer where the run had it.
    json
        Print one JSON object.
    """
    from console import stored_run

    given = {"--from": first, "--to": last, "--model": model}
    options = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    stored_run.become(run, arguments, os.environ, stored_run.replay(run, arguments, os.environ, options, as_json=json))


@app.command(group=_TRAIN)
def rescore(
    run: str,
    *arguments: Raw,
    reward: str | None = None,
    weights: str = "",
    into: str | None = None,
    url: str = _REWARD_URL,
    token_file: Path | None = None,
    leave_out_failed: Flag = False,
    json: Flag = False,
) -> int:
    """Score a run's groups again, by another reward or other weights of its parts, for a run without engines.

    The groups that the run trained are scored by the reward service; packs, new rewards and their order become the
    input of another run, which trains on them with the corrections for samples of other policies. A group that
    cannot be scored is an error, never a 0.

    Example:  penstock rescore my-run --reward my_reward
              penstock rescore my-run --weights correct=1,format=0.2 --into my-run-format
    Then:     penstock train run.toml run.id=NEW data.from_run=INPUT

    Parameters
    ----------
    run
        Name of the run.
    reward
        Reward to score by; none: the stored rewards, weighed anew.
    weights
        What each named part counts, part=NUMBER, comma-separated; "reward" is the reward itself. In a reward that the
        run file made of parts the other weights and the gates stay.
    into
        Name of the input; made of the run's and the reward's by default.
    url
        Where the reward service is.
    token_file
        File with its bearer token, if it wants one.
    leave_out_failed
        Go on without the groups that could not be scored; they are listed in the input.
    json
        Print one JSON object.
    """
    from console import stored_run
    from console.rescore import How, rescore
    from console.rescoring import Rule, parse_weights

    stored_run.reach(run, arguments, os.environ, sys.argv[1:])
    how = How(Rule(reward, parse_weights(weights)), into, url, token_file, leave_out_failed)
    return rescore(run, arguments, os.environ, how, as_json=json)


@app.command(group=_LOOK)
def lineage(
    run: str,
    *arguments: Raw,
    version: int | None = None,
    group: str | None = None,
    full: Flag = False,
    json: Flag = False,
) -> int:
    """Say what a version was made of: groups, prompts, rewards, who scored them, and every version before it.

    With --group: what became of one group, from its issue to the versions it is in.

    Example:  penstock lineage quickstart --version 12
              penstock lineage quickstart --group e0.p17.a0 --full
    Then:     penstock replay RUN --to V

    Parameters
    ----------
    run
        Name of the run.
    version
        The version; the last one by default.
    group
        Id of a group.
    full
        Also every completion with its reward, and the whole chain.
    json
        Print one JSON object.
    """
    from console import stored_run
    from console.lineage import print_lineage

    stored_run.reach(run, arguments, os.environ, sys.argv[1:])
    return print_lineage(run, arguments, os.environ, version=version, group=group, full=full, as_json=json)


@runs.command(name="rm")
def remove_run(run: str, *arguments: Raw, yes: Flag = False, folder: Flag = False, force: Flag = False) -> int:
    """Remove a run: its objects, streams and buckets, and, asked separately, its folder on this machine.

    It says what and how much, and asks first. What lives is not removed. An interrupted removal is repeated as it was typed.

    Example:  penstock runs rm quickstart
              penstock runs rm my-run nats.url=nats://gpu-1:4222 s3.endpoint=http://gpu-1:9000 --yes
    Then:     penstock runs

    Parameters
    ----------
    run
        Name of the run.
    yes
        Do not ask; the folder is kept, unless --folder is given too.
    folder
        Remove the folder without asking.
    force
        Remove it although services of it are alive.
    """
    from console.removal import remove_run as remove_it

    return remove_it(run, arguments, os.environ, yes=yes, folder=folder, force=force)


@app.command(group=_LOOK)
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
    from console.watch import watch_run

    return watch_run(run, arguments, os.environ, plain=plain, as_json=json)


@app.command(group=_LOOK)
def audit(run: str, *arguments: Raw, fast: Flag = False, json: Flag = False) -> int:
    """Prove that every group of a run counts once, or name those that do not.

    Reads the streams, the checkpoint and the object store, of a run that goes on or is over; takes nothing from it.
    The exit code is 0 when issued = trained + dropped + dead letters + in flight, group by group, else 1.

    Example:  penstock audit my-run
              penstock audit my-run nats.url=nats://gpu-1:4222 run.dir=/shared/runs
    Then:     penstock runs show RUN

    Parameters
    ----------
    run
        Name of the run.
    fast
        Do not fetch the packs of trained groups to verify their hash; see only whether they are there.
    json
        Print one JSON object instead of the table.
    """
    from console.audit import audit_run

    return audit_run(run, arguments, os.environ, fast=fast, as_json=json)


@app.command(group=_LOOK)
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
    from console.chat import How, talk

    how = How(model=model, prompt=prompt, keep=keep, device=device, temperature=temperature, max_tokens=max_tokens)
    return talk(run, arguments, os.environ, how)


@app.command(group=_LOOK)
def version() -> None:
    """Print the versions that matter in a bug report.

    Example:  penstock version
    """
    from console.doctor import versions

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
