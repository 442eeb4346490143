"""Settings → the text of a run file that every service accepts: what is refused is left out, and said."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.deploy.config_import.foreign_defaults import differing
from penstock.deploy.config_import.translation import Line, Translation
from penstock.deploy.config_show import as_document, load_all
from penstock.protocol.config.run_file import SECTIONS, toml_text
from penstock.protocol.config.sources import leaves
from penstock.protocol.errors import ConfigError

PLACEHOLDER = "FOLDER-OF-THE-MODEL"


def known_keys() -> set[str]:
    return {key for service in load_all([], [f"model.path={PLACEHOLDER}"], {}) for key in service.origins}


def run_file_text(settings: Mapping[str, Any], offered: Mapping[str, tuple[Any, str]] = MappingProxyType({})) -> str:
    lists = [f"{key} = {toml_text(value)}" for key, value in settings.items() if "." not in key]
    blocks = ["\n".join(lists)] if lists else []  # before the first table, or they would belong to it
    for section in SECTIONS:
        rows = [f"{_name(key)} = {toml_text(settings[key])}" for key in sorted(_of(section, settings))]
        rows += [f"# {_name(key)} = {toml_text(offered[key][0])}  # {offered[key][1]}" for key in _of(section, offered)]
        if rows:
            blocks.append("\n".join([f"[{section}]", *rows]))
    return "\n\n".join(blocks) + "\n"


def decisions(done: Translation) -> str:
    open_lines = [line for line in done.lines if line.kind in ("decide", "unknown")]
    if not open_lines:
        return ""
    rows = [f"# - {' '.join(f'{line.key}={line.value}'.split())[:120]}: {line.text}\n" for line in open_lines]
    return "".join(["# Needs a decision before the first run:\n", *rows, "\n"])


def offer_silent_defaults(done: Translation, named: Mapping[str, Any]) -> None:
    """Report what the system does for keys that its file does not name, where the run file does something else."""
    effective = _effective(done.settings)
    for one, others in differing(done.system, named, effective):
        texts = []
        for ours, value in others.items():
            here = toml_text(effective.get(ours))
            done.offered[ours] = (value, f"{done.system}'s default; here {here}")
            texts.append(f"{ours} = {toml_text(value)} does the same; here {here}")
        done.lines.append(Line("silent", one.key, toml_text(one.value).strip('"'), "; ".join(texts)))


def _of(section: str, settings: Mapping[str, Any]) -> list[str]:
    return [key for key in settings if key.startswith(f"{section}.")]


def _name(key: str) -> str:
    return key.partition(".")[2]


def _effective(settings: Mapping[str, Any]) -> dict[str, Any]:
    with _written(settings) as file:
        document = as_document(load_all([file], [], {}))
    return {".".join(path): value for path, value in leaves(document["settings"])}


@contextlib.contextmanager
def _written(settings: Mapping[str, Any]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.toml"
        file.write_text(run_file_text(settings), encoding="utf-8")
        yield file


def leave_out_refused(done: Translation) -> None:
    """Remove what the services refuse, one setting at a time, and report each with the reason."""
    if "model.path" not in done.settings:
        done.settings["model.path"] = PLACEHOLDER
        done.lines.append(Line("decide", "model.path", "", "the file names no model: set model.path"))
    while problem := _refused(done.settings):
        named = [key for key in done.settings if re.search(rf"\b{re.escape(key)}\b", problem) and key != "model.path"]
        if not named:
            raise ConfigError(f"the translated settings are refused, and by none that can be left out: {problem}")
        culprit = named[0]
        value = done.settings.pop(culprit)
        kind = "ignored" if " does nothing " in problem else "decide"
        done.lines.append(Line(kind, culprit, value, f"left out, because it is refused: {problem}"))


def _refused(settings: Mapping[str, Any]) -> str:
    with _written(settings) as file:
        try:
            load_all([file], [], {})
        except ConfigError as err:
            problem = re.sub(rf"{re.escape(str(file))}(:\d+)?:? ?", "", str(err).splitlines()[0])
            return re.sub(r"( \[[a-z_.]+: \])+$", "", problem)
    return ""
