"""`penstock config import FILE`: turn a configuration of another system into a run file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from penstock.deploy.config_import import translation
from penstock.deploy.config_import.found import Found, read_json, read_yaml
from penstock.deploy.config_import.read_shell import read_shell
from penstock.deploy.config_import.run_file_text import (
    decisions,
    known_keys,
    leave_out_refused,
    offer_silent_defaults,
    run_file_text,
)
from penstock.deploy.config_import.translate import detect, own_section, translate
from penstock.protocol.config.foreign_config import SYSTEMS
from penstock.protocol.config.sources import MAX_FILE_BYTES
from penstock.protocol.errors import ConfigError

_DECIDE, _ERROR = 1, 2  # exit codes
_NAMES = [name for name in SYSTEMS if name != "shared"]


def read(file: Path) -> Found:
    """Read a file by the end of its name: .yaml, .yml, .json, else a shell script; raises ConfigError."""
    try:
        if file.is_file() and file.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{file}: {file.stat().st_size} bytes, the limit is {MAX_FILE_BYTES}")
        text = file.read_text(encoding="utf-8")
    except OSError as err:
        raise ConfigError(f"{file}: not readable ({err.strerror})") from None
    except UnicodeDecodeError as err:
        raise ConfigError(f"{file}: not UTF-8 text (at byte {err.start})") from None
    suffix = file.suffix.lower()
    if suffix in (".yaml", ".yml"):
        return read_yaml(str(file), text)
    if suffix == ".json":
        return read_json(str(file), text)
    if suffix in (".py", ".toml", ".ipynb"):
        raise ConfigError(f"{file}: not a YAML, JSON or shell file; write its keys into one of these")
    return read_shell(str(file), text)


def import_config(file: Path, system: str | None, to: Path, *, as_json: bool) -> int:
    """Write the run file and print the report; returns 1 when a key needs a decision, 2 when nothing was written."""
    try:
        found = read(file)
        system = system or detect(found)
        if not system:
            raise ConfigError(
                f"{file}: no key of {', '.join(_NAMES)} found in {len(found.values)} keys; name the system with --from"
            )
        done = translate(found, system, known_keys())
        leave_out_refused(done)
        if own_section(found) is None:
            offer_silent_defaults(done, found.values)
        if to.exists():
            raise ConfigError(f"{to} exists; name another file with --to")
        header = f"# Imported from {file.name} ({system}) by `penstock config import`.\n\n"
        to.write_text(header + decisions(done) + run_file_text(done.settings, done.offered), encoding="utf-8")
    except (ConfigError, OSError) as err:
        sys.stderr.write(f"{err}\n")
        return _ERROR
    if as_json:
        sys.stdout.write(json.dumps(translation.as_document(done)) + "\n")
    else:
        command = own_section(found)
        verb = command.section if command is not None else "train"
        sys.stdout.write(f"{file}: a configuration of {system}\n\n{translation.as_text(done)}\n")
        sys.stdout.write(f"wrote {to}; see it: penstock config show {to}; then: penstock {verb} {to}\n")
    return _DECIDE if done.needs_decision else 0
