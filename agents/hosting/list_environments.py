"""``penstock env list``: the environments that a run may name, with their options; the servers that are registered on its NATS."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.agents.environments.episode_environment import EpisodeEnvironment
from penstock.agents.environments.over_http import registry
from penstock.agents.environments.over_http.registry import Listed
from penstock.agents.hosting import registration
from penstock.protocol import streams
from penstock.protocol.config.run_file import load
from penstock.protocol.errors import ConfigError
from penstock.protocol.transport.bus import Bus
from penstock.rollout_service.environments.environment import Environment, load_environments
from penstock.rollout_service.settings import RolloutSettings


def print_environments(arguments: Sequence[str], *, as_json: bool, registered: bool) -> int:
    """Print the built-in and installed environments, and those of a run file; or the ``registered`` servers instead.

    Raises ConfigError.
    """
    if registered:
        return _list_registered(arguments, is_json=as_json)
    files = [Path(argument) for argument in arguments]
    if unfit := [argument for argument in arguments if "=" in argument] or arguments[1:]:
        raise ConfigError(f"{unfit[0]} is needed with --registered only; without it, give one run file")
    if not files:
        environments = load_environments(())
    else:
        settings = load(RolloutSettings, files=files).settings
        environments = load_environments(settings.worker.environments, settings.environment.define)
    rows = {name: _about(environment) for name, environment in sorted(environments.items())}
    if as_json:
        sys.stdout.write(json.dumps(rows) + "\n")
        return 0
    for name, about in rows.items():
        sys.stdout.write(f"{name}: {about['about']}\n")
        for key, what in about["options"].items():
            sys.stdout.write(f"    {key} = {what['default']}: {what['description']}\n")
    return 0


def _list_registered(arguments: Sequence[str], *, is_json: bool) -> int:
    settings = registration.read_settings(arguments, dict(os.environ))

    async def read() -> dict[str, Listed]:
        with Bus.connect(settings.nats, name="environment-list") as bus:
            return await registry.list_environments(await bus.key_value(streams.environments_bucket().bucket))

    rows = {name: _registered(listed, time.time()) for name, listed in sorted(asyncio.run(read()).items())}
    if is_json:
        sys.stdout.write(json.dumps(rows) + "\n")
        return 0
    if not rows:
        sys.stdout.write("no environment server is registered; register one: penstock env register URL\n")
    for name, row in rows.items():
        sys.stdout.write(f"{name}: {row['problem'] or 'version ' + row['version']}\n")
        for server in row["servers"]:
            lease = "" if server["renewed_s_ago"] is None else (
                f", {server['running']} of {server['capacity']} episodes, lease of {server['lease_s']:g} s renewed "
                f"{server['renewed_s_ago']:.0f} s ago"
            )  # fmt: skip
            sys.stdout.write(f"    {server['url']}  version {server['version']}: {server['state']}{lease}\n")
    return 0


def _registered(listed: Listed, now_s: float) -> dict[str, Any]:
    registered = listed.registered
    servers: list[dict[str, Any]] = []
    for server in registered.servers if registered is not None else ():
        lease = listed.leases.get(server.id)
        about = {"url": server.url, "version": server.version, "state": listed.state(server)}
        about |= {"capacity": server.capacity, "running": None, "lease_s": None, "renewed_s_ago": None}
        if lease is not None:
            about |= {"running": lease.running, "lease_s": lease.lease_s, "renewed_s_ago": max(0.0, now_s - lease.at)}
        servers.append(about)
    return {"version": "" if registered is None else registered.version, "problem": listed.problem, "servers": servers}


def _about(environment: Environment) -> dict[str, Any]:
    text = (inspect.getmodule(type(environment)).__doc__ or "").strip().partition("\n")[0]  # pyright: ignore[reportOptionalMemberAccess]
    text = text.removeprefix(f"`{environment.name}`: ")
    if not isinstance(environment, EpisodeEnvironment):
        return {"about": text, "version": "", "options": {}}
    options: dict[str, dict[str, str]] = {}
    for name, field in environment.options.model_fields.items():
        default = json.dumps(field.get_default(call_default_factory=True), default=str)
        default = "needed" if field.is_required() else default
        options[name] = {"default": default, "description": field.description or ""}
    return {"about": text, "version": environment.version, "options": options}
