"""Write a model's card, and exchange models with a hub (`penstock model card`, `push`, `pull`).

The only file that imports huggingface_hub, an optional dependency (the extra ``hub``). The hub is ``HF_ENDPOINT``, with the
token that ``HF_TOKEN`` or `hf auth login` gives.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.console import evaluation_results
from penstock.console.connections import NamedRun
from penstock.console.evaluation_results import EvaluationResult, estimate_text
from penstock.console.registry import versions
from penstock.console.registry.versions import OFFLINE, Registry, Scores, stored_scores
from penstock.console.report import curves
from penstock.console.report.event_fields import read_object
from penstock.console.terminal import markdown, one_line
from penstock.console.tools.runs import existing_folder
from penstock.console.tools.weights import export
from penstock.protocol import files, seals
from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.secret_values import hide

CARD = "README.md"
_MOST_POINTS = 12
_NOT_SHOWN = ("nats.", "s3.", "run.dir", "retention.")
_CHUNK = 1 << 20
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


class HubFailed(PenstockError):
    """The Hugging Face hub did not do what was asked."""


def push(folder: Path, repo: str, *, private: bool, revision: str | None, card: str | None) -> str:
    """Upload a model folder, with a card where there is none, and return the address of the commit.

    Raises ConfigError for a folder that is no model's, HubFailed when the hub refuses or cannot be reached.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is not a model folder: it has no config.json")
    hub = _library()
    with _failures(repo, "pushed"):
        api = hub.HfApi()
        api.create_repo(repo, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        if card is not None and not (folder / CARD).exists():
            api.upload_file(path_or_fileobj=card.encode(), path_in_repo=CARD, repo_id=repo, revision=revision)
        return str(api.upload_folder(repo_id=repo, folder_path=folder, revision=revision))


def pull(repo: str, to: Path, *, revision: str | None) -> Path:
    """Download a model to a folder that does not exist, whole or not at all; return the folder. Raises as `push`."""
    if to.exists():
        raise ConfigError(f"{to} exists; name another folder, or remove it")
    hub = _library()
    partial = to.with_name(to.name + ".partial")
    with _failures(repo, "pulled"):
        hub.snapshot_download(repo, revision=revision, local_dir=partial)
    if not (partial / "config.json").is_file():
        raise HubFailed(f"{repo} is not a model: it has no config.json; its files are in {partial}")
    shutil.rmtree(partial / ".cache", ignore_errors=True)  # the library's notes about the download
    return files.replace(partial, to)


def _library() -> Any:
    try:
        import huggingface_hub  # noqa: PLC0415 - optional, and half a second
    except ImportError:
        raise ConfigError("the Hugging Face hub needs huggingface_hub: pip install 'penstock[hub]'") from None
    return huggingface_hub


@contextmanager
def _failures(repo: str, what: str) -> Iterator[None]:
    try:
        yield
    except PenstockError:
        raise
    except Exception as err:  # noqa: BLE001 - of the library, of its HTTP client, or of the file system
        while isinstance(err.__cause__, Exception):  # the library wraps the failure of one file
            err = err.__cause__
        status = getattr(getattr(err, "response", None), "status_code", None)
        reason = f"{type(err).__name__}: {' '.join(str(err).split())[:300]}"
        if status in {401, 403}:
            fix = "log in with `hf auth login`, or set HF_TOKEN to a token that may write to it"
        elif status is not None:
            fix = "check the name OWNER/NAME and the revision"
        else:
            fix = "the hub cannot be reached, or a file cannot be read: check the network, the proxy and HF_ENDPOINT, and try again"
        raise HubFailed(f"{repo} was not {what}: {reason}; {fix}") from None


def card_of(target: str, arguments: Sequence[str]) -> str:
    name, at, version = target.partition("@")
    run = NamedRun(name, arguments)
    folder = existing_folder(run)
    if not at:
        return model_card(folder, None, "", stored_scores(folder))
    registry = Registry.read(run)
    number = registry.version(version)
    row = registry.row(number)
    root = row["state_root"] if row else next((t.state_root for t in registry.tags.values() if t.version == number), "")
    if not root and number not in registry.scores:
        raise ConfigError(f"run {run} has no version {number}; see: penstock model list {run}")
    return model_card(folder, number, root, registry.scores)


def push_model(target: str, repo: str, arguments: Sequence[str], *, private: bool, revision: str | None) -> int:
    is_folder = (Path(target) / "config.json").is_file()
    text = None if is_folder else card_of(target, arguments)
    with _model(target, arguments) as folder:
        address = push(folder, repo, private=private, revision=revision, card=text)
    print(f"{target}: {address}")
    return 0


@contextlib.contextmanager
def _model(target: str, arguments: Sequence[str]) -> Iterator[Path]:
    """Yield the model folder of a target; a stored version is exported for as long as it is used."""
    if (Path(target) / "config.json").is_file():
        yield Path(target)
        return
    name, at, version = target.partition("@")
    run = NamedRun(name, arguments)
    home = run.folder
    if not at:
        if not (home / "model" / "config.json").is_file():
            raise ConfigError(
                f"run {run} has no final model yet ({home / 'model'}); name a version: {run}@head or {run}@best"
            )
        yield _without_links(home / "model")
    elif (home / versions.MODELS / version / "config.json").is_file():
        yield _without_links(home / versions.MODELS / version)
    else:
        number = Registry.read(run).version(version)
        with tempfile.TemporaryDirectory(prefix="penstock-push-") as scratch:
            with contextlib.redirect_stdout(sys.stderr):
                export(run, number, Path(scratch) / "model")
            yield Path(scratch) / "model"


def _without_links(folder: Path) -> Path:
    """Return a model folder of a run; raises ConfigError for a link in it, which would upload another file of this machine."""
    if links := files.links_below(folder):
        raise ConfigError(f"{links[0]} is a link or no regular file; replace it by the file itself")
    return folder


def model_card(run_folder: Path, version: int | None, state_root: str, scores: Scores) -> str:
    """Return the card of a version, None for the final model. Raises ConfigError when the run has no settings."""
    document = _run_config(run_folder)
    settings, origins = document["settings"], document.get("origins") or {}
    is_ours = seals.is_sealed(run_folder / "config.json")  # else it may name any file of this machine
    stored = [
        evaluation
        for evaluation in evaluation_results.results_of(run_folder)
        if version is None or evaluation.version == version
    ]
    sections = [
        _front_matter(settings),
        _title(run_folder.name, version, state_root, settings),
        "## Evaluation\n\n" + ("\n".join(_evaluation(version, scores, stored)) or "No evaluation is stored."),
        "## Training\n\n" + "\n".join(_training(run_folder)),
        "## Settings\n\nWhat was set; everything else has its default.\n\n```toml\n"
        + "\n".join(_given(settings, origins))
        + "\n```",
        "## Data\n\n" + "\n".join(_data_files(settings, stored, reads_files=is_ours)),
        "## Licence\n\n<!-- Name the licence of this model here and in the field license above; that of the base model and of the data apply. -->",
    ]
    return "\n\n".join(sections) + "\n"


def _run_config(run_folder: Path) -> dict[str, Any]:
    path = run_folder / "config.json"
    document = read_object(path) or {}
    if not isinstance(document.get("settings"), dict):
        raise ConfigError(
            f"{path} has no settings of a run that can be read: a card needs the folder of the run; set run.dir"
        )
    return document


def _front_matter(settings: Mapping[str, Any]) -> str:
    path = str((settings.get("model") or {}).get("path", ""))
    is_id = _HUB_ID.fullmatch(path) is not None
    base = (
        f"base_model: {json.dumps(path)}" if is_id else f"# base_model: to be filled in; trained from {_public(path)}"
    )
    # Comments where the user is to write: the hub refuses a card whose license is there and is none that it knows.
    return (
        "---\n# license: to be filled in\nlibrary_name: transformers\npipeline_tag: text-generation\n"
        f"{base}\ntags:\n- penstock\n- reinforcement-learning\n---"
    )


def _title(run: str, version: int | None, state_root: str, settings: Mapping[str, Any]) -> str:
    name = f"# {run}, " + ("final model" if version is None else f"version {version}")
    algorithm = (settings.get("algorithm") or {}).get("name", "unknown")
    digest = f" Digest of the weights: `{state_root}`." if state_root else ""
    return f"{name}\n\nTrained with [Penstock](https://pypi.org/project/penstock/) {__version__}, algorithm {markdown(algorithm)}.{digest}"


def _evaluation(version: int | None, scores: Scores, results: Sequence[EvaluationResult]) -> Iterator[str]:
    chosen = max(scores, default=None) if version is None else version
    during = (
        {name: score for name, score in scores.get(chosen, {}).items() if not name.startswith(OFFLINE)}
        if chosen is not None
        else {}
    )
    if during:
        yield f"During the run, of version {chosen}:\n\n| metric | value | measured on |\n|---|---|---|"
        for name, score in sorted(during.items()):
            yield f"| {markdown(name)} | {score.value:.4g} | {markdown(score.conditions)} |"
        yield ""
    for result in results:
        yield from _offline(result)


def _offline(result: EvaluationResult) -> Iterator[str]:
    yield f"`penstock eval` of {markdown(_public(result.model))}, {result.k} samples of each prompt, 95 % intervals over prompts:\n"
    yield "| source | prompts | reward | correct | " + f"pass@{result.k} | maj@{result.k} |\n|---|---|---|---|---|---|"
    for source in result.sources:
        cells = [estimate_text(source.reward, as_share=False), estimate_text(source.accuracy)]
        cells += [estimate_text(source.pass_at.get(result.k)), estimate_text(source.maj)]
        yield f"| {markdown(source.source)} | {source.complete} of {source.prompts} | {' | '.join(cells)} |"
    yield f"\nCorrect: {markdown(result.success)}. Majority: {markdown(result.answer)}.\n"


def _training(run_folder: Path) -> Iterator[str]:
    run_curves = curves.read(run_folder)
    held_out = run_curves.held_out
    yield f"{run_curves.last_step or 0} steps.\n"
    for name, points in (("training reward", run_curves.rewards), (held_out.name, held_out.points)):
        if points:
            thinned = _thinned(points)
            yield f"| step | {' | '.join(str(step) for step, _ in thinned)} |"
            yield "|---" * (len(thinned) + 1) + "|"
            yield f"| {name} | {' | '.join(f'{value:.3g}' for _, value in thinned)} |\n"


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    if len(points) <= _MOST_POINTS:
        return list(points)
    numbers = sorted({round(i * (len(points) - 1) / (_MOST_POINTS - 1)) for i in range(_MOST_POINTS)})
    return [points[number] for number in numbers]


def _given(settings: Mapping[str, Any], origins: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from _given(value, origins, f"{key}.")
        elif origins.get(key, "default") != "default" and not key.startswith(_NOT_SHOWN):
            yield f"{one_line(key)} = {json.dumps(hide(key.split('.'), _public(value)), ensure_ascii=False)}"


def _public(value: Any) -> Any:
    if isinstance(value, list):
        return [_public(element) for element in value]
    return " ".join(Path(value).name.split()) if isinstance(value, str) and Path(value).is_absolute() else value


def _data_files(
    settings: Mapping[str, Any], results: Sequence[EvaluationResult], *, reads_files: bool
) -> Iterator[str]:
    yield "| use | file | sha256 |\n|---|---|---|"
    section = settings.get("data") or {}
    for use, value in (("training", section.get("train")), ("held out", section.get("eval"))):
        for file in value if isinstance(value, list) else [value] if value else []:
            yield f"| {use} | {markdown(Path(str(file)).name)} | {_digest(Path(str(file))) if reads_files else 'not read'} |"
    for name in sorted(
        {(Path(data_file.path).name, data_file.sha256) for result in results for data_file in result.data}
    ):
        yield f"| evaluation | {markdown(name[0])} | `{name[1]}` |"


def _digest(path: Path) -> str:
    """Return the sha256 of a file as it is now; the run may have read another content."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError:
        return "not on this machine"
    return f"`{digest.hexdigest()}`"
