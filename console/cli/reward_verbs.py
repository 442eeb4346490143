"""The verbs of `penstock reward`: serve, list, test, drain and remove rewards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from penstock.console import launch
from penstock.console.cli.options import SERVE, AnyServiceUrl, Endpoint, ServedFiles, ServiceUrl, TokenFile
from penstock.protocol.command_line import Help, Json, RunArguments, RunName, UsageError, application, typed
from penstock.reward_model.commands import serve_model
from penstock.reward_service.hosting import commands

app = application("reward", help="Serve, list and test rewards.", group=SERVE)


@app.command
def service(*arguments: RunArguments) -> None:
    """Start the reward service, which scores generated groups.

    Example:  penstock reward service run.toml reward_service.port=8700
    Then:     penstock reward list
    """
    from penstock.console.connections import require_servers

    require_servers(arguments, os.environ)
    launch.replace_process(launch.module("penstock.reward_service", *arguments))


app.command(commands.serve)
app.command(commands.serve_judge)
app.command(commands.serve_grader)
app.command(serve_model)


@app.command(name="list")
def list_rewards(*, url: AnyServiceUrl = None, token_file: TokenFile = None, json: Json = False) -> int:
    """List the rewards that a reward service offers.

    Example:  penstock reward list
    Then:     penstock reward test NAME
    """
    from penstock.console.tools.rewards import print_list, service_url, warn_of_new_service

    if url is None and not json:
        warn_of_new_service()
    return print_list(service_url(url, (), (), typed()), token_file, as_json=json)


@app.command(name="test")
def try_reward(  # noqa: PLR0913 - each is an option of the command
    name: Annotated[str, Help("Name of the reward.")],
    *completions: Annotated[str, Help("Texts to score; without any an example is scored.")],
    data: Annotated[
        Path | None,
        Help("Data file; its rows are scored with right and wrong answers, with a warning when all scores are equal."),
    ] = None,
    number: Annotated[int, Help("Number of rows of the data file.", name=["--number", "-n"])] = 20,
    map: Annotated[tuple[str, ...], Help("Column names that differ, as OURS=THEIRS; with --data.")] = (),
    run_file: Annotated[
        Path | None,
        Help(
            "Run file whose data.train is the data file, with its columns and form of rows, and whose rewards are offered."
        ),
    ] = None,
    serve: ServedFiles = (),
    url: AnyServiceUrl = None,
    token_file: TokenFile = None,
    prompt: Annotated[str, Help("Prompt of the completions.")] = "What is 2 + 2?",
    ground_truth: Annotated[str, Help("Reference answer.")] = "4",
    data_source: Annotated[str, Help("Name of the data set.")] = "example",
    extra_info: Annotated[str, Help("A JSON object, as a row's column of that name.")] = "{}",
    json: Annotated[bool, Help("Print one JSON object instead of the table; with --data.")] = False,
) -> int:
    """Score completions with a reward as a run would, or show its score distribution on rows of a data file.

    Example:  penstock reward test gsm8k
              penstock reward test my_reward --serve my_reward.py --data train.parquet
              penstock reward test gsm8k "#### 7" "it is 8" --ground-truth 7
              penstock reward test gsm8k --data gsm8k/train.parquet -n 20
              penstock reward test my_reward --serve my_reward.py --run-file run.toml
    Then:     name it in the run file: reward.name = "gsm8k"
    """
    from penstock.console.tools.rewards import read_extra_info, score_texts, service_url

    if data is not None or run_file is not None:
        from penstock.console.tools.rewards import RowSource, try_data

        source = RowSource.of(data, run_file, map)
        at = service_url(url, serve, () if run_file is None else (str(run_file),), typed())
        return try_data(name, source, number, at, token_file, as_json=json)
    if json or map:
        raise UsageError("--json and --map are for rows; give --data or --run-file")
    texts = {"prompt": prompt, "ground_truth": ground_truth, "data_source": data_source}
    row = {**texts, "extra_info": read_extra_info(extra_info)}
    return score_texts(name, completions, service_url(url, serve, (), typed()), token_file, row)


@app.command
def errors(run: RunName, *arguments: RunArguments, json: Json = False) -> int:
    """List the groups of a run that got no reward, with the reason and their state.

    Example:  penstock reward errors gsm8k
              penstock reward errors gsm8k nats.url=nats://gpu-1:4222 nats.user=me
    Then:     penstock reward test NAME
    """
    from penstock.console.record.stored_run import with_local_servers
    from penstock.console.tools.reward_errors import print_errors

    return print_errors(with_local_servers(run, arguments), as_json=json)


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
