"""Check a run file with the settings code of every service, in a process of its own: the console imports no service."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.console import launch
from penstock.console.web.problems import Problem

_CHECK_S = 60.0
_at_a_time = threading.BoundedSemaphore(2)  # each takes a second of one core


def check(
    arguments: Sequence[str], environ: Mapping[str, str], directory: Path, hide: Path, *, command: str
) -> dict[str, Any]:
    """Return settings and origins; a problem 422 that lists every error. Errors name files without the folder ``hide``.

    ``command`` is the command of penstock that is to read them: train, sft, dpo or rm; ``unread`` lists the keys of files in
    ``hide`` that it does not read.
    """
    if not _at_a_time.acquire(timeout=_CHECK_S / 2):
        raise Problem(429, "many requests check settings now", fix="try again in a few seconds")
    try:
        answer = subprocess.run(
            launch.module("penstock.deploy.config_show", *arguments, "--command", command, "--json"),
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_CHECK_S,
            check=False,
            env=dict(environ),
            cwd=directory,
        )
    except subprocess.TimeoutExpired:
        raise Problem(503, f"the settings were not checked within {_CHECK_S:.0f} s", fix="try again") from None
    finally:
        _at_a_time.release()
    if answer.returncode == 0:
        return hidden(json.loads(answer.stdout), hide)
    errors = [line.replace(f"{hide}/", "") for line in answer.stderr.splitlines() if line.strip()]
    if answer.returncode != 2:
        raise Problem(500, "the settings could not be checked", got="\n".join(errors[-5:]), fix="report it, please")
    raise Problem(
        422,
        errors[0] if errors else "the settings are refused",
        expected=f"settings that penstock {command} accepts",
        errors=errors,
        fix="correct each key; every error names its key and what to write",
    )


def hidden(document: dict[str, Any], hide: Path) -> dict[str, Any]:
    """Return the document that `penstock config show --json` prints without the folder ``hide``."""
    own = [key for key in document.get("unread", []) if document["origins"][key].startswith(f"{hide}/")]
    return json.loads(json.dumps({**document, "unread": own}).replace(f"{hide}/", ""))
