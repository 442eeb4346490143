"""What the routes share: the folder of runs, the settings the console was started with, and the dependencies of routes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request
from fastapi import Path as PathParameter
from fastapi.security import HTTPBearer

from penstock.console import connections
from penstock.console.web.access import CALLER, Access, Caller, Role
from penstock.console.web.problems import Problem
from penstock.protocol.config.run_file import Loaded
from penstock.protocol.subjects import RUN_ID
from penstock.protocol.transport.bus import Bus

_SCHEME = HTTPBearer(auto_error=False, description="A token: penstock console token NAME --role read|log|run|admin")
_BUS_S = 3.0
RunName = Annotated[str, PathParameter(pattern=f"^{RUN_ID.pattern}$", description="Name of the run: a-z, 0-9 and '-'.")]


@dataclass(frozen=True)
class WebContext:
    """What every route may use; nothing in it is a state of a run."""

    runs_dir: Path
    access: Access
    arguments: tuple[str, ...] = ()  # run files and overrides the console was started with
    environ: Mapping[str, str] = field(default_factory=dict)
    at_a_time: int = 1  # runs on this machine; the others wait in the queue
    closing: asyncio.Event = field(default_factory=asyncio.Event)  # set when the server stops: streams end then

    def settings_of(self, run: str) -> Loaded[connections.ConsoleSettings]:
        """Return the settings of a run; raises ConfigError, for a run file that is not this user's UntrustedFolder."""
        run_files = connections.run_file_of(self.runs_dir / run)
        arguments = [*self.arguments, *run_files, f"run.dir={self.runs_dir}"]
        return connections.find(arguments, self.environ, run_id=run)

    def bus(self, run: str, *, name: str = "console") -> Bus:
        """Return a new connection to a run's NATS, to be used as a context manager; raises BusError within seconds."""
        return Bus.connect(self.settings_of(run).settings.nats, name=name, deadline_s=_BUS_S)


async def context(request: Request) -> WebContext:  # async: what does not wait needs no thread of the pool
    return request.app.state.context


Context = Annotated[WebContext, Depends(context)]


def run_folder(run: RunName, web: Context) -> Path:
    folder = web.runs_dir / run
    if folder.is_symlink() or not folder.is_dir():
        raise Problem(404, f"there is no run {run}", fix="list the runs with GET /v1/runs")
    return folder


RunFolder = Annotated[Path, Depends(run_folder)]


def require(role: Role) -> Callable[..., Awaitable[Caller]]:
    """Return a dependency that checks a role and gives the route its caller: ``Depends(require(Role.READ))``."""

    async def check(request: Request, _scheme: Annotated[object, Depends(_SCHEME)]) -> Caller:
        caller: Caller | None = request.scope.get(CALLER)
        if caller is None:  # a path that the gate calls public
            raise Problem(401, "a token is needed", fix="send it as Authorization: Bearer")
        if caller.role < role:
            raise Problem(
                403,
                f"the token {caller.name!r} may not do this",
                expected=f"role {role.text}",
                got=f"role {caller.role.text}",
                fix=f"create a token with: penstock console token NAME --role {role.text}",
            )
        return caller

    check.__penstock_role__ = role  # type: ignore[attr-defined] # the test that walks the routes reads it
    return check


Reader = Annotated[Caller, Depends(require(Role.READ))]
Logger = Annotated[Caller, Depends(require(Role.LOG))]
Runner = Annotated[Caller, Depends(require(Role.RUN))]
Admin = Annotated[Caller, Depends(require(Role.ADMIN))]
