"""`penstock model push` and `pull`: the adapter of huggingface_hub, an optional dependency (the extra ``hub``).

The hub is ``HF_ENDPOINT``, with the token that ``HF_TOKEN`` or `hf auth login` gives.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.protocol import files
from penstock.protocol.errors import ConfigError, PenstockError

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
    """Turn what the library raises into HubFailed with the reason and what to do."""
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
