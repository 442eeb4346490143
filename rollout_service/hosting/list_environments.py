"""``penstock env list``: the environments that a run may name, with their options."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.protocol.config.run_file import load
from penstock.rollout_service.environments.environment import Environment, load_environments
from penstock.rollout_service.environments.episode_environment import EpisodeEnvironment
from penstock.rollout_service.settings import RolloutSettings


def main(arguments: Sequence[str]) -> int:
    """Print the built-in and installed environments, and those of a run file."""
    parser = argparse.ArgumentParser(prog="penstock env list", description="List environments and their options.")
    parser.add_argument("run_file", nargs="?", type=Path, help="run file; what it defines is listed too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.run_file is None:
        found = load_environments(())
    else:
        settings = load(RolloutSettings, files=[options.run_file]).settings
        found = load_environments(settings.worker.environments, settings.environment.define)
    rows = {name: _about(environment) for name, environment in sorted(found.items())}
    if options.json:
        sys.stdout.write(json.dumps(rows) + "\n")
        return 0
    for name, about in rows.items():
        sys.stdout.write(f"{name}: {about['about']}\n")
        for key, what in about["options"].items():
            sys.stdout.write(f"    {key} = {what['default']}: {what['description']}\n")
    return 0


def _about(environment: Environment) -> dict[str, Any]:
    text = (inspect.getmodule(type(environment)).__doc__ or "").strip().partition("\n")[0]  # pyright: ignore[reportOptionalMemberAccess]
    text = text.removeprefix(f"`{environment.name}`: ")
    if not isinstance(environment, EpisodeEnvironment):
        return {"about": text, "version": "", "options": {}}
    fields = environment.options.model_fields
    options = {
        name: {
            "default": "needed"
            if one.is_required()
            else json.dumps(one.get_default(call_default_factory=True), default=str),
            "description": one.description or "",
        }
        for name, one in fields.items()
    }
    return {"about": text, "version": environment.version, "options": options}
