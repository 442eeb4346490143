"""Settings → the text of a run file that every service accepts: what is refused is left out, and said."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.deploy.config_import.translation import Line, Translation
from penstock.deploy.config_show import load_all
from penstock.protocol.config.run_file import SECTIONS, toml_text
from penstock.protocol.errors import ConfigError

PLACEHOLDER = "FOLDER-OF-THE-MODEL"


def known_keys() -> set[str]:
    """Return every key that a run file may have."""
    return {key for service in load_all([], [f"model.path={PLACEHOLDER}"], {}) for key in service.origins}


def run_file_text(settings: Mapping[str, Any]) -> str:
    """Return the settings as TOML, section by section in the order of the documentation."""
    lists = [f"{key} = {toml_text(value)}" for key, value in settings.items() if "." not in key]
    blocks = ["\n".join(lists)] if lists else []  # before the first table, or they would belong to it
    for section in SECTIONS:
        rows = [(key.partition(".")[2], value) for key, value in settings.items() if key.startswith(f"{section}.")]
        if rows:
            blocks.append(
                "\n".join([f"[{section}]", *(f"{name} = {toml_text(value)}" for name, value in sorted(rows))])
            )
    return "\n\n".join(blocks) + "\n"


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
    """Return the first error about some settings; empty when all services accept them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.toml"
        file.write_text(run_file_text(settings), encoding="utf-8")
        try:
            load_all([file], [], {})
        except ConfigError as err:
            problem = re.sub(rf"{re.escape(str(file))}(:\d+)?:? ?", "", str(err).splitlines()[0])
            return re.sub(r"( \[[a-z_.]+: \])+$", "", problem)
    return ""
