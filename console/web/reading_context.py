"""What the reading routes share: the runs that this server watches, as a dependency, and the forms of query values."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Annotated

from fastapi import Depends, FastAPI, Query, Request

from penstock.console.web.context import Context, Reader, RunName, WebContext
from penstock.console.web.problems import Problem
from penstock.console.web.reading.open_runs import OpenRuns, UnknownRun
from penstock.console.web.reading.run_reading import RunReading

MAX_NUMBER = 2**53
Step = Annotated[int | None, Query(ge=0, le=MAX_NUMBER)]
Limit = Annotated[int, Query(ge=1, le=100)]


@contextlib.asynccontextmanager
async def closing_runs(app: FastAPI) -> AsyncIterator[None]:
    """Close the runs that are watched when the server stops."""
    yield
    opened: OpenRuns | None = getattr(app.state, "open_runs", None)
    if opened is not None:
        opened.close()


def where(web: WebContext) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """Return what names the servers and the folder of runs, see `connections.find`."""
    return (*web.arguments, f"run.dir={web.runs_dir}"), web.environ


async def open_runs(request: Request, web: Context) -> OpenRuns:
    """Return the runs that this server watches."""
    state = request.app.state
    if not hasattr(state, "open_runs"):
        state.open_runs = OpenRuns(*where(web))
    return state.open_runs


Runs = Annotated[OpenRuns, Depends(open_runs)]


def reading_of(run: RunName, runs: Runs, _: Reader) -> RunReading:
    """Return the reader of a run, opening it if nobody looked at it before; a problem 404 if there is no such run."""
    return open_run(runs, run)


def open_run(runs: OpenRuns, run: str) -> RunReading:
    """Return the reader of a run; a problem 404 if there is no such run."""
    try:
        return runs.get(run)
    except UnknownRun as err:
        raise Problem(404, str(err), fix="list the runs with GET /v1/runs") from None


Reading = Annotated[RunReading, Depends(reading_of)]
