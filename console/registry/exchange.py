"""Write a model's card, and exchange models with a hub (`penstock model card`, `push`, `pull`).

The only file that imports huggingface_hub, an optional dependency (the extra ``hub``). The hub is ``HF_ENDPOINT``, with the
token that ``HF_TOKEN`` or `hf auth login` gives.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.console import connections
from penstock.console.evaluation import results
from penstock.console.registry import card, versions
from penstock.console.registry.versions import Registry
from penstock.console.report import curves
from penstock.console.tools.runs import unknown_run
from penstock.console.tools.weights import export
from penstock.protocol import files
from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.subjects import check_run_id

CARD = "README.md"


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


def card_of(target: str, arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    run, at, version = target.partition("@")
    folder = connections.find(arguments, environ).settings.run.dir / check_run_id(run)
    if not folder.is_dir():
        raise unknown_run(run, folder.parent)
    if not at:
        found = card.of_run(curves.rows(folder), results.results_of(folder))
        return card.write(folder, None, "", found)
    registry = Registry.read(run, arguments, environ)
    number = registry.version(version)
    row = registry.row(number)
    root = row["state_root"] if row else next((t.state_root for t in registry.tags.values() if t.version == number), "")
    if not root and number not in registry.scores:
        raise ConfigError(f"run {run} has no version {number}; see: penstock model list {run}")
    return card.write(folder, number, root, registry.scores)


def push_model(
    target: str, repo: str, arguments: Sequence[str], environ: Mapping[str, str], *, private: bool, revision: str | None
) -> int:
    is_folder = (Path(target) / "config.json").is_file()
    text = None if is_folder else card_of(target, arguments, environ)
    with _model(target, arguments, environ) as folder:
        address = push(folder, repo, private=private, revision=revision, card=text)
    print(f"{target}: {address}")
    return 0


@contextlib.contextmanager
def _model(target: str, arguments: Sequence[str], environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield the model folder of a target; a stored version is exported for as long as it is used."""
    run, at, version = target.partition("@")
    home = connections.find(arguments, environ).settings.run.dir / run
    if (Path(target) / "config.json").is_file():
        yield Path(target)
    elif not at:
        if not (home / "model" / "config.json").is_file():
            raise ConfigError(
                f"run {run} has no final model yet ({home / 'model'}); name a version: {run}@head or {run}@best"
            )
        yield home / "model"
    elif (home / versions.MODELS / version / "config.json").is_file():
        yield home / versions.MODELS / version
    else:
        number = Registry.read(run, arguments, environ).version(version)
        with tempfile.TemporaryDirectory(prefix="penstock-push-") as scratch:
            with contextlib.redirect_stdout(sys.stderr):
                export(run, number, Path(scratch) / "model", arguments, environ)
            yield Path(scratch) / "model"
