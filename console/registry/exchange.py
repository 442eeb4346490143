"""`penstock model card` and `push`: find the model that was named, and write its card."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from penstock.console import connections
from penstock.console.evaluation import stored_results
from penstock.console.registry import card, hub, scores, tags
from penstock.console.registry.versions import Registry
from penstock.console.report import curves
from penstock.console.tools.runs import unknown_run
from penstock.console.tools.weights import export
from penstock.protocol.errors import ConfigError
from penstock.protocol.subjects import check_run_id


def card_of(target: str, arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the model card of RUN or RUN@VERSION. Raises PenstockError."""
    run, at, version = target.partition("@")
    folder = connections.find(arguments, environ).settings.run.dir / check_run_id(run)
    if not folder.is_dir():
        raise unknown_run(run, folder.parent)
    if not at:
        found = scores.of_run(curves.rows(folder), stored_results.results_of(folder))
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
    """Upload a model to the hub, of a run with its card; return the exit code. Raises PenstockError."""
    is_folder = (Path(target) / "config.json").is_file()
    text = None if is_folder else card_of(target, arguments, environ)
    with _model(target, arguments, environ) as folder:
        address = hub.push(folder, repo, private=private, revision=revision, card=text)
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
    elif (home / tags.MODELS / version / "config.json").is_file():
        yield home / tags.MODELS / version
    else:
        number = Registry.read(run, arguments, environ).version(version)
        with tempfile.TemporaryDirectory(prefix="penstock-push-") as scratch:
            with contextlib.redirect_stdout(sys.stderr):
                export(run, number, Path(scratch) / "model", arguments, environ)
            yield Path(scratch) / "model"
