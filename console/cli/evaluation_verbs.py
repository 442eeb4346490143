"""The verb `penstock eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from penstock.console import launch
from penstock.console.cli.verb_parts import TRAIN, Flag, Raw, ServedFiles

app = App(help_format="plaintext", version_flags=[])  # its verb is a top-level verb of `penstock`


@app.command(name="eval", group=TRAIN)
def evaluate(  # noqa: PLR0913 - each is an option of the command
    target: str,
    *arguments: Raw,
    data: Annotated[tuple[Path, ...], Parameter(negative=())],
    samples: Annotated[int, Parameter(name=("--samples", "-k"))] = 1,
    temperature: float | None = None,
    max_tokens: int | None = None,
    num_prompts: int | None = None,
    reward: str | None = None,
    serve: ServedFiles = (),
    answer: str | None = None,
    workers: int = 1,
    json: Flag = False,
) -> None:
    """Evaluate a model or a version of a run: avg@k, pass@k and maj@k with confidence intervals, for each source.

    Samples with the workers and reward services of training, on servers of its own on this machine; the run is not
    touched. A version of a run is evaluated with the run's settings of data, sampling and rewards. The result is stored
    in the run's folder, under evaluations. A prompt that failed is counted as failed, never as 0: the exit code is
    then 3. Given again after a stop, the same command samples only what is missing.

    Example:  penstock eval my-run@best --data aime.parquet --data math500.parquet -k 8
              penstock eval models/average --data test.jsonl -k 16 --temperature 0.8 --reward math
    Then:     penstock model list RUN

    Parameters
    ----------
    target
        Model folder, or RUN for its final model, or RUN@VERSION, RUN@best, RUN@head, RUN@TAG.
    data
        File with held-out prompts, repeatable; or a folder or id as in data.eval.
    samples
        Samples of each prompt, the k of avg@k and maj@k.
    temperature
        Sampling temperature; default eval.temperature, for several samples rollout.temperature.
    max_tokens
        Longest completion; default eval.max_new_tokens, else rollout.max_new_tokens.
    num_prompts
        Only the first prompts of every file.
    reward
        Reward to score with; default that of the run, or the one of --serve, or by data_source.
    answer
        Place of the answer that votes for maj@k: auto, boxed, tags, hashes, phrase, last_line, whole or last_number; default: as
        the reward reads it, and no maj@k where it reads none.
    workers
        Rollout workers.
    json
        Print one JSON object instead of the table.
    """
    given: dict[str, object] = {
        "--samples": samples,
        "--temperature": temperature,
        "--max-tokens": max_tokens,
        "--num-prompts": num_prompts,
        "--reward": reward,
        "--answer": answer,
        "--workers": workers,
    }
    options = [f"--data={one}" for one in data] + [f"--serve={one}" for one in serve]
    options += [f"{name}={value}" for name, value in given.items() if value is not None]
    options += ["--json"] if json else []
    launch.replace_process(launch.module("penstock.deploy.evaluation.evaluate", target, *options, *arguments))
