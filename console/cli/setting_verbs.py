"""The verbs about run files: `penstock init` writes one, `penstock settings` explains what it may hold."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from penstock.console.cli.verb_parts import START
from penstock.protocol.command_line import Help, Json, application

app = application()  # its verbs are top-level verbs of `penstock`


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
    gpus: Annotated[int | None, Help("GPUs of this machine to use; 0: the CPU.")] = None,
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
              penstock init --model Qwen3-0.6B --data train.jsonl --reward my_reward.py --gpus 1
    Then:     penstock config show run.toml
    """
    from penstock.console.tools.init_run_file import Answers
    from penstock.console.tools.init_run_file import init as write

    answers = Answers(model, data, eval, reward, gpus, steps, run, algorithm)
    ask = input if sys.stdin.isatty() and sys.stdout.isatty() else None
    return write(file, answers, schema=not no_schema, ask=ask)


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
        return explain_settings.print_schema()
    return explain_settings.print_settings(topic, as_json=json)
