"""The verbs of `penstock model`: the versions of a run as models, and tools for model folders."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from penstock.console.cli.options import INSPECT
from penstock.protocol.command_line import Help, Json, RunArguments, RunName, UsageError, application

app = application("model", help="List, tag, select, merge and exchange models.", group=INSPECT)


@app.command(name="list")
def list_models(run: RunName, *arguments: RunArguments, json: Json = False) -> int:
    """List the versions of a run with their scores, tags, parents, and whether their weights are stored.

    A score SOURCE.METRIC is of an evaluation during the run, eval:SOURCE.METRIC of penstock eval.

    Example:  penstock model list quickstart
    Then:     penstock model select RUN --by eval.accuracy
    """
    from penstock.console.record.stored_run import with_local_servers
    from penstock.console.registry.versions import print_list

    return print_list(with_local_servers(run, arguments), as_json=json)


@app.command
def tag(
    target: Annotated[str, Help("RUN@VERSION, RUN@best, RUN@head or RUN@TAG; with --remove the run.")],
    name: Annotated[str, Help("The tag; a letter is among its characters.")],
    *arguments: RunArguments,
    keep: Annotated[bool, Help("Also write the model to models/NAME in the run's folder.")] = False,
    move: Annotated[bool, Help("Move a tag that names another version.")] = False,
    remove: Annotated[bool, Help("Remove the tag; a model that was written stays.")] = False,
    note: Annotated[str, Help("A text that is stored with the tag.")] = "",
) -> int:
    """Give a version of a run a name, which RUN@NAME means from then on.

    A tag does not keep the weights: the run retires old versions. With --keep the model is also written to the run's folder.

    Example:  penstock model tag quickstart@12 candidate --keep
              penstock model tag quickstart candidate --remove
    Then:     penstock eval RUN@candidate --data test.jsonl
    """
    from penstock.console.connections import NamedRun
    from penstock.console.record.stored_run import with_local_servers
    from penstock.console.registry import versions
    from penstock.protocol.errors import ConfigError

    run, _, version = target.partition("@")
    if remove:
        if keep or move or note:
            raise UsageError("--remove takes no --keep, --move or --note")
        return versions.remove_tag(NamedRun(run, arguments), name)
    if not version:
        raise ConfigError(f"name a version: {run}@VERSION, {run}@best or {run}@head; see: penstock model list {run}")
    return versions.set_tag(with_local_servers(run, arguments), version, name, keep=keep, move=move, note=note)


@app.command
def select(
    run: RunName,
    *arguments: RunArguments,
    by: Annotated[str, Help("Name of the score, as penstock model list shows it.")],
    least: Annotated[float | None, Help("The lowest score that is accepted.", name="--min")] = None,
    tag: Annotated[str | None, Help("Tag the version with this name; a tag of another version is moved.")] = None,
    json: Json = False,
) -> int:
    """Print the stored version of a run with the highest score; exit code 1 when none reaches --min.

    Scores that were measured under different conditions (prompts, samples, sampling, rule of success) are not compared.

    Example:  penstock model select quickstart --by eval.accuracy
              penstock model select my-run --by eval:math500.pass@8 --min 0.6 --tag release
    Then:     penstock weights export RUN --version V --to FOLDER
    """
    from penstock.console.record.stored_run import with_local_servers
    from penstock.console.registry.versions import print_selected

    return print_selected(with_local_servers(run, arguments), by, least=least, tag=tag, as_json=json)


@app.command
def card(
    target: Annotated[str, Help("RUN for its final model, or RUN@VERSION, RUN@best, RUN@head, RUN@TAG.")],
    *arguments: RunArguments,
    to: Annotated[Path | None, Help("File to write; it must not exist.")] = None,
) -> int:
    """Print the model card of a run or of one of its versions, in Markdown: settings, curve, evaluations, digests of the data.

    The licence is left for you to fill in.

    Example:  penstock model card quickstart
              penstock model card my-run@best --to README.md
    Then:     penstock model push RUN@best OWNER/NAME
    """
    from penstock.console.registry.exchange import card_of
    from penstock.protocol.errors import ConfigError

    _ensure_servers(target, arguments)
    text = card_of(target, arguments)
    if to is None:
        print(text, end="")
        return 0
    if to.exists():
        raise ConfigError(f"{to} exists; name another file, or remove it")
    to.write_text(text, encoding="utf-8")
    return 0


@app.command
def push(
    target: Annotated[str, Help("Model folder, RUN for its final model, or RUN@VERSION, RUN@best, RUN@head, RUN@TAG.")],
    repo: Annotated[str, Help("OWNER/NAME of the repository; created if there is none.")],
    *arguments: RunArguments,
    public: Annotated[bool, Help("Create it public.")] = False,
    revision: Annotated[str | None, Help("Branch to push to; created if there is none.")] = None,
) -> int:
    """Upload a model to the Hugging Face hub, with its model card; the repository is private unless --public.

    Needs huggingface_hub (pip install 'penstock[hub]') and a login (hf auth login, or HF_TOKEN). HF_ENDPOINT names another hub.

    Example:  penstock model push my-run@best OWNER/NAME
              penstock model push models/average OWNER/NAME --public
    Then:     penstock model pull OWNER/NAME --to models/copy
    """
    from penstock.console.registry.exchange import push_model

    _ensure_servers(target, arguments)
    return push_model(target, repo, arguments, private=not public, revision=revision)


@app.command
def pull(
    repo: Annotated[str, Help("OWNER/NAME of the repository.")],
    *,
    to: Annotated[Path, Help("Folder to create; it must not exist.")],
    revision: Annotated[str | None, Help("Branch, tag or commit.")] = None,
) -> int:
    """Download a model from the Hugging Face hub to a folder.

    Needs huggingface_hub (pip install 'penstock[hub]').

    Example:  penstock model pull Qwen/Qwen3-0.6B --to models/start
    Then:     penstock train run.toml model.path=models/start
    """
    from penstock.console.registry import exchange

    print(f"{exchange.pull(repo, to, revision=revision)}: {repo}", file=sys.stderr)
    return 0


def _ensure_servers(target: str, arguments: tuple[str, ...]) -> None:
    """Start the servers of a finished local run whose version is named; a folder or a final model needs none."""
    from penstock.console.record.stored_run import with_local_servers

    run, at, _ = target.partition("@")
    if at and not Path(target).is_dir():
        with_local_servers(run, arguments)


@app.command
def merge(  # noqa: PLR0913 - each is an option of the command
    *models: Annotated[
        str,
        Help(
            "Model folders, at least two; the first gives dtype, config and tokenizer. With --average-last the name of a run."
        ),
    ],
    to: Annotated[Path, Help("Folder to create; it must not exist.")],
    method: Annotated[
        Literal["linear", "slerp", "task_arithmetic", "ties", "dare"],
        Help(
            "linear: weighted mean. slerp: arc between two. task_arithmetic, ties, dare: changes against --base, added."
        ),
    ] = "linear",
    weights: Annotated[str | None, Help("One number for each model, comma-separated; default 1 each.")] = None,
    base: Annotated[Path | None, Help("Model that the others were trained from.")] = None,
    t: Annotated[float, Help("Of slerp: 0 is the first model, 1 the second.")] = 0.5,
    density: Annotated[float, Help("Of ties and dare: share of the changes that is kept.")] = 0.5,
    scale: Annotated[float, Help("Of task_arithmetic, ties and dare: factor of the added changes.")] = 1.0,
    seed: Annotated[int, Help("Of dare's random choice.")] = 0,
    adapter: Annotated[
        Path | None, Help("Folder of a PEFT adapter to merge into the one model named, which is its base.")
    ] = None,
    average_last: Annotated[
        int | None, Help("Merge so many of the newest stored versions of a run, all with the same weight.")
    ] = None,
) -> int:
    """Merge model folders of one architecture into a new one, tensor by tensor, without a GPU and without torch.

    Folders of a run's versions come from `penstock weights export`. Memory: one tensor of each model.

    Example:  penstock model merge my-run --average-last 4 --to models/average
              penstock model merge models/v80 models/v90 models/v100 --to models/average
              penstock model merge math code --base start --method ties --density 0.3 --to both
              penstock model merge models/base --adapter my-adapter --to models/mine
    Then:     penstock chat RUN --model models/average
    """
    if average_last is not None or adapter is not None:
        if weights or base or (method, t, density, scale, seed) != ("linear", 0.5, 0.5, 1.0, 0):
            raise UsageError("--average-last and --adapter merge in one way; leave out --method and its options")
        return _merge_adapter(models, adapter, to) if average_last is None else _average_last(models, average_last, to)
    from penstock.console.registry.model_merge import Recipe, merge_folders, parse_weights

    recipe = Recipe(method, parse_weights(weights, len(models)), t=t, density=density, scale=scale, seed=seed)
    count = merge_folders([Path(model) for model in models], base, to, recipe)
    print(f"{count} tensors of {len(models)} models merged ({method}): {to}", file=sys.stderr)
    return 0


def _merge_adapter(models: tuple[str, ...], adapter: Path | None, to: Path) -> int:
    from penstock.console.registry.adapter_merge import merge_adapter

    if len(models) != 1 or adapter is None:
        raise UsageError("--adapter is merged into its base model: name that one folder")
    print(f"{merge_adapter(Path(models[0]), adapter, to)} tensors changed: {to}", file=sys.stderr)
    return 0


def _average_last(models: tuple[str, ...], count: int, to: Path) -> int:
    from penstock.console.record.stored_run import with_local_servers
    from penstock.console.registry.versions import average_last
    from penstock.protocol.errors import ConfigError

    if not models:
        raise ConfigError("--average-last merges versions of a run: name the run")
    run, *settings = models
    versions = average_last(with_local_servers(run, settings), count, to)
    print(f"versions {', '.join(map(str, versions))} of run {run} averaged: {to}", file=sys.stderr)
    return 0
