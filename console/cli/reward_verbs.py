"""`penstock reward …`, as it is typed: serve, list, try and steer rewards."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from penstock.console import launch
from penstock.console.cli.verb_parts import OWN_HELP, REWARD_URL, SERVE, Endpoint, Flag, Raw, ServiceUrl, TokenFile

app = App(name="reward", help="Serve, list and try rewards.", help_format="plaintext", group=SERVE)


@app.command
def service(*arguments: Raw) -> None:
    """Start the reward service, which scores generated groups.

    Example:  penstock reward service run.toml reward_service.port=8700
    Then:     penstock reward list
    """
    launch.become(launch.module("penstock.reward_service", *arguments))


@app.command(help_flags=OWN_HELP)
def serve(*arguments: Raw) -> None:
    """Turn a Python file with a reward function (verl's, TRL's, OpenRLHF's, a class) into a registered endpoint.

    Example:  penstock reward serve my_reward.py --register http://127.0.0.1:8700
    Then:     penstock reward test my_reward
    """
    launch.become(launch.module("penstock.reward_service", "serve", *arguments))


@app.command(name="serve-judge", help_flags=OWN_HELP)
def serve_judge(*arguments: Raw) -> None:
    """Turn a language model into a registered reward endpoint: a judge, by score or by pairs.

    Example:  penstock reward serve-judge judge.toml --register http://127.0.0.1:8700
    Then:     penstock reward test judge
    """
    launch.become(launch.module("penstock.reward_service", "serve-judge", *arguments))


@app.command(name="serve-grader", help_flags=OWN_HELP)
def serve_grader(*arguments: Raw) -> None:
    """Turn a grader in OpenAI's JSON form into a registered reward endpoint.

    Example:  penstock reward serve-grader grader.json --register http://127.0.0.1:8700
    Then:     penstock reward test grader
    """
    launch.become(launch.module("penstock.reward_service", "serve-grader", *arguments))


@app.command(name="serve-model", help_flags=OWN_HELP)
def serve_model(*arguments: Raw) -> None:
    """Turn a reward model's folder into a registered reward endpoint.

    Example:  penstock reward serve-model rm/ --register http://127.0.0.1:8700
    Then:     penstock reward test rm
    """
    launch.become(launch.module("penstock.reward_model", *arguments))


@app.command(name="list")
def list_rewards(*, url: ServiceUrl = REWARD_URL, token_file: TokenFile = None, json: Flag = False) -> int:
    """List the rewards that a running reward service offers.

    Example:  penstock reward list
    Then:     penstock reward test NAME

    Parameters
    ----------
    json
        Print one JSON object instead of the table.
    """
    from penstock.console.tools.rewards import print_list

    return print_list(url, token_file, as_json=json)


@app.command(name="test")
def try_reward(  # noqa: PLR0913 - each is an option of the command
    name: str,
    *completions: str,
    data: Path | None = None,
    number: Annotated[int, Parameter(name=["--number", "-n"])] = 20,
    map: tuple[str, ...] = (),
    url: ServiceUrl = REWARD_URL,
    token_file: TokenFile = None,
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
        from penstock.console.tools.reward_trial import try_data

        return try_data(name, data, number, map, url, token_file, as_json=json)
    from penstock.console.tools.rewards import try_out

    return try_out(
        name, completions, url, token_file, prompt=prompt, ground_truth=ground_truth, data_source=data_source
    )


@app.command
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
    from penstock.console.record import stored_run
    from penstock.console.tools.reward_errors import print_errors

    stored_run.beside(run, arguments, os.environ, sys.argv[1:])
    return print_errors(run, arguments, os.environ, as_json=json)


@app.command
def drain(name: Endpoint, *, url: ServiceUrl = REWARD_URL, token_file: TokenFile = None) -> int:
    """Take an endpoint out of service: calls under way end, its other groups wait.

    Example:  penstock reward drain my_reward
    Then:     penstock reward resume my_reward
    """
    from penstock.console.tools.rewards import set_service

    return set_service(name, "drain", url, token_file)


@app.command
def resume(name: Endpoint, *, url: ServiceUrl = REWARD_URL, token_file: TokenFile = None) -> int:
    """Take a drained endpoint into service again.

    Example:  penstock reward resume my_reward
    Then:     penstock reward list
    """
    from penstock.console.tools.rewards import set_service

    return set_service(name, "resume", url, token_file)


@app.command
def remove(name: Endpoint, *, url: ServiceUrl = REWARD_URL, token_file: TokenFile = None) -> int:
    """Unregister an endpoint; groups that ask for it wait until it is back.

    Example:  penstock reward remove my_reward
    Then:     penstock reward list
    """
    from penstock.console.tools.rewards import remove as unregister

    return unregister(name, url, token_file)
