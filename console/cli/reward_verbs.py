"""The verbs of `penstock reward`: serve, list, test, drain and remove rewards."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from penstock.console import launch
from penstock.console.cli.verb_parts import (
    SERVE,
    AnyServiceUrl,
    Endpoint,
    Flag,
    Raw,
    ServedFiles,
    ServiceUrl,
    TokenFile,
)

app = App(name="reward", help="Serve, list and test rewards.", help_format="plaintext", group=SERVE)


@app.command
def service(*arguments: Raw) -> None:
    """Start the reward service, which scores generated groups.

    Example:  penstock reward service run.toml reward_service.port=8700
    Then:     penstock reward list
    """
    from penstock.console.connections import require_servers

    require_servers(arguments, os.environ)
    launch.replace_process(launch.module("penstock.reward_service", *arguments))


@app.command
def serve(*arguments: Raw) -> None:
    """Serve the reward function or class of a Python file (verl, TRL, OpenRLHF) as a reward endpoint.

    Example:  penstock reward serve my_reward.py --register http://127.0.0.1:8700
    Then:     penstock reward test my_reward
    """
    launch.replace_process(launch.module("penstock.reward_service", "serve", *arguments))


@app.command(name="serve-judge")
def serve_judge(*arguments: Raw) -> None:
    """Serve a language model as a judge endpoint, scoring single answers or comparing pairs.

    Example:  penstock reward serve-judge judge.toml --register http://127.0.0.1:8700
    Then:     penstock reward test judge
    """
    launch.replace_process(launch.module("penstock.reward_service", "serve-judge", *arguments))


@app.command(name="serve-grader")
def serve_grader(*arguments: Raw) -> None:
    """Serve a grader in OpenAI's JSON format as a reward endpoint.

    Example:  penstock reward serve-grader grader.json --register http://127.0.0.1:8700
    Then:     penstock reward test grader
    """
    launch.replace_process(launch.module("penstock.reward_service", "serve-grader", *arguments))


@app.command(name="serve-model")
def serve_model(*arguments: Raw) -> None:
    """Serve a reward model from its folder as a reward endpoint.

    Example:  penstock reward serve-model rm/ --register http://127.0.0.1:8700
    Then:     penstock reward test rm
    """
    launch.replace_process(launch.module("penstock.reward_model", *arguments))


@app.command(name="list")
def list_rewards(*, url: AnyServiceUrl = None, token_file: TokenFile = None, json: Flag = False) -> int:
    """List the rewards that a reward service offers.

    Example:  penstock reward list
    Then:     penstock reward test NAME

    Parameters
    ----------
    json
        Print one JSON object instead of the table.
    """
    from penstock.console.tools.rewards import print_list, service_url, warn_of_new_service

    if url is None and not json:
        warn_of_new_service()
    return print_list(service_url(url, (), (), sys.argv[1:]), token_file, as_json=json)


@app.command(name="test")
def try_reward(  # noqa: PLR0913 - each is an option of the command
    name: str,
    *completions: str,
    data: Path | None = None,
    number: Annotated[int, Parameter(name=["--number", "-n"])] = 20,
    map: tuple[str, ...] = (),
    run_file: Path | None = None,
    serve: ServedFiles = (),
    url: AnyServiceUrl = None,
    token_file: TokenFile = None,
    prompt: str = "What is 2 + 2?",
    ground_truth: str = "4",
    data_source: str = "example",
    extra_info: str = "{}",
    json: Flag = False,
) -> int:
    """Score completions with a reward as a run would, or show its score distribution on rows of a data file.

    Example:  penstock reward test gsm8k
              penstock reward test my_reward --serve my_reward.py --data train.parquet
              penstock reward test gsm8k "#### 7" "it is 8" --ground-truth 7
              penstock reward test gsm8k --data gsm8k/train.parquet -n 20
              penstock reward test my_reward --serve my_reward.py --run-file run.toml
    Then:     name it in the run file: reward.name = "gsm8k"

    Parameters
    ----------
    name
        Name of the reward.
    completions
        Texts to score; without any an example is scored.
    data
        Data file; its rows are scored with right and wrong answers, with a warning when all scores are equal.
    number
        Number of rows of the data file.
    map
        Column names that differ, as OURS=THEIRS; with --data.
    run_file
        Run file whose data.train is the data file, with its columns and form of rows, and whose rewards are offered.
    prompt
        Prompt of the completions.
    ground_truth
        Reference answer.
    data_source
        Name of the data set.
    extra_info
        A JSON object, as a row's column of that name.
    json
        Print one JSON object instead of the table; with --data.
    """
    from penstock.console.tools.rewards import read_extra_info, score_texts, service_url

    if data is not None or run_file is not None:
        from penstock.console.tools.rewards import RowSource, try_data

        source = RowSource.of(data, run_file, map)
        at = service_url(url, serve, () if run_file is None else (str(run_file),), sys.argv[1:])
        return try_data(name, source, number, at, token_file, as_json=json)
    extra = read_extra_info(extra_info)
    at = service_url(url, serve, (), sys.argv[1:])
    return score_texts(
        name,
        completions,
        at,
        token_file,
        prompt=prompt,
        ground_truth=ground_truth,
        data_source=data_source,
        extra_info=extra,
    )


@app.command
def errors(run: str, *arguments: Raw, json: Flag = False) -> int:
    """List the groups of a run that got no reward, with the reason and their state.

    Example:  penstock reward errors gsm8k
              penstock reward errors gsm8k nats.url=nats://gpu-1:4222 nats.user=me
    Then:     penstock reward test NAME

    Parameters
    ----------
    run
        Name of the run.
    json
        Print one JSON array instead of the table.
    """
    from penstock.console.record import stored_run
    from penstock.console.tools.reward_errors import print_errors

    stored_run.ensure_local_servers(run, arguments, os.environ, sys.argv[1:])
    return print_errors(run, arguments, os.environ, as_json=json)


@app.command
def drain(name: Endpoint, *, url: ServiceUrl = launch.REWARD_URL, token_file: TokenFile = None) -> int:
    """Take an endpoint out of service: running calls finish, other groups wait.

    Example:  penstock reward drain my_reward
    Then:     penstock reward resume my_reward
    """
    from penstock.console.tools.rewards import set_service

    return set_service(name, "drain", url, token_file)


@app.command
def resume(name: Endpoint, *, url: ServiceUrl = launch.REWARD_URL, token_file: TokenFile = None) -> int:
    """Return a drained endpoint to service.

    Example:  penstock reward resume my_reward
    Then:     penstock reward list
    """
    from penstock.console.tools.rewards import set_service

    return set_service(name, "resume", url, token_file)


@app.command
def remove(name: Endpoint, *, url: ServiceUrl = launch.REWARD_URL, token_file: TokenFile = None) -> int:
    """Unregister an endpoint; groups that need it wait until it is registered again.

    Example:  penstock reward remove my_reward
    Then:     penstock reward list
    """
    from penstock.console.tools.rewards import remove as unregister

    return unregister(name, url, token_file)
