"""Downloads models and data sets from the Hugging Face hub into its cache: the adapter of huggingface_hub.

The hub is ``HF_ENDPOINT``, with the token that ``HF_TOKEN`` or `hf auth login` gives. What was downloaded before is used where
the hub cannot be reached.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
import structlog
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from penstock.protocol.errors import ConfigError

log = structlog.get_logger("trainer.data.hub")

REACH_S = 1.4
"""Longest wait for the hub's answer to the first request, name lookup included, in s."""

_MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
_MISSING = (401, 403, 404)

Kind = Literal["model", "dataset"]
Choose = Callable[[Sequence[str]], list[str]]


def download_model(model_id: str, revision: str | None, key: str) -> Path:
    def choose(names: Sequence[str]) -> list[str]:
        return [name for name in names if "/" not in name and any(fnmatchcase(name, like) for like in _MODEL_FILES)]

    files = _download("model", model_id, revision, key, choose)
    return files[0].parent


def download_data(dataset_id: str, revision: str | None, key: str, choose: Choose) -> list[Path]:
    return _download("dataset", dataset_id, revision, key, choose)


def _download(kind: Kind, repo_id: str, revision: str | None, key: str, choose: Choose) -> list[Path]:
    try:
        commit, names = _ask(kind, repo_id, revision)
    except HfHubHTTPError as err:
        status = err.response.status_code
        raise ConfigError(
            f"{key} = {repo_id}: there is no such folder or file here, and the hub has no {kind} of this id and revision that this "
            f"login may read ({status}); check the id, or log in with `hf auth login`"
            if status in _MISSING
            else f"{key} = {repo_id}: the hub answers {status}; try again, or set {key} to a local path"
        ) from None
    except (OSError, TimeoutError) as err:
        return _cached(kind, repo_id, revision, key, choose, _reason(err))
    try:
        files = [_fetch(kind, repo_id, commit, name) for name in choose(names)]
    except (HfHubHTTPError, OSError) as err:
        raise ConfigError(
            f"{key} = {repo_id}: the download ended early ({_reason(err)}); start again to continue it"
        ) from None
    if not files:
        raise ConfigError(
            f"{key} = {repo_id}: the hub's {kind} has no file to use; it has {', '.join(names[:8]) or 'none'}"
        )
    storage = next(parent for parent in files[0].parents if parent.name == commit).parent.parent
    reference = storage / "refs" / (revision or "main")
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(commit)
    log.info("from the hub", id=repo_id, revision=commit, files=len(files))
    return files


def _ask(kind: Kind, repo_id: str, revision: str | None) -> tuple[str, list[str]]:
    """Return commit and file names of a repository; raises TimeoutError if the hub does not answer in time."""
    answer: list[Any] = []

    def ask() -> None:
        try:
            api = huggingface_hub.HfApi(endpoint=constants.ENDPOINT)
            answer.append(api.repo_info(repo_id, repo_type=kind, revision=revision, timeout=REACH_S))
        except Exception as err:  # noqa: BLE001 - raised again below, in the caller's thread
            answer.append(err)

    thread = threading.Thread(target=ask, name="hub", daemon=True)  # a name lookup has no timeout
    thread.start()
    thread.join(REACH_S)
    if not answer:
        raise TimeoutError(f"no answer within {REACH_S} s")
    [reply] = answer
    if isinstance(reply, HfHubHTTPError):
        raise reply
    if isinstance(reply, Exception):
        raise TimeoutError(_reason(reply)) from None
    return reply.sha, [file.rfilename for file in reply.siblings]


def _fetch(kind: Kind, repo_id: str, commit: str, name: str) -> Path:
    return Path(
        huggingface_hub.hf_hub_download(
            repo_id,
            name,
            repo_type=kind,
            revision=commit,
            endpoint=constants.ENDPOINT,
            cache_dir=constants.HF_HUB_CACHE,
        )
    )


def _cached(kind: Kind, repo_id: str, revision: str | None, key: str, choose: Choose, why: str) -> list[Path]:
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                repo_id, repo_type=kind, revision=revision, cache_dir=constants.HF_HUB_CACHE, local_files_only=True
            )
        )
        files = [
            folder / name for name in choose([str(path.relative_to(folder)) for path in sorted(folder.rglob("*"))])
        ]
    except (LocalEntryNotFoundError, OSError, ConfigError):
        files = []
    if not files:
        raise ConfigError(
            f"{key} = {repo_id}: there is no such folder or file here, and the Hugging Face hub cannot be reached ({why}); set "
            f"{key} to a local path, download it where the hub is reachable, or check HF_ENDPOINT and the proxy"
        )
    log.warning("hub not reached; using the copy of an earlier download", id=repo_id, first=str(files[0]))
    return files


def _reason(err: BaseException) -> str:
    return f"{type(err).__name__}: {' '.join(str(err).split())[:160]}" if str(err) else type(err).__name__
