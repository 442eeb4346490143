"""`program`: a program that somebody else wrote, run once for each episode against a URL of the token-exact proxy.

How an episode ends: `episode_end.py`. Where a program ends after the engine failed, the pack is requeued.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, FiniteFloat, StringConstraints, ValidationError, model_validator

from penstock.agents.environments import program_process
from penstock.agents.environments.episode_end import EpisodeEnd, Happened, end_of, spender_of
from penstock.agents.environments.episode_environment import (
    Attempt,
    Begun,
    EpisodeEnvironment,
    PlayOptions,
    RowUnfit,
    Site,
)
from penstock.agents.environments.play import Played, Row
from penstock.agents.environments.program_process import Ended
from penstock.agents.environments.shared_options import ProcessOptions
from penstock.agents.proxy.calls import Spent
from penstock.agents.proxy.server import serving, serving_at
from penstock.agents.proxy.session import AgentProxy, EpisodeSession, path
from penstock.protocol.config.connection import Section
from penstock.protocol.config.environment_settings import EnvironmentDefinition
from penstock.protocol.errors import ConfigError
from penstock.protocol.files import read_regular
from penstock.rollout_service.environments.environment import Sampler
from penstock.rollout_service.errors import EngineError
from penstock.serving import strict_json

MAX_RESULT_BYTES = 65_536
_PartName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:#/-]{1,200}$")]


class ProgramResult(Section):
    """The file that a program writes to the path in ``PENSTOCK_RESULT``."""

    reward: FiniteFloat = Field(strict=True)
    parts: dict[_PartName, Annotated[FiniteFloat, Field(strict=True)]] = Field(default_factory=dict, max_length=64)


def outcome(
    ended: Ended, result: bytes | str | None, session: EpisodeSession, *, last_turn: int | None, needs_result: bool,
    spent: Spent, total_s: float,
) -> Played:  # fmt: skip
    """Return how an episode ended; its reward is that of ``last_turn``, the last one that is trained.

    ``result``: the result file's bytes, or what is wrong with it; None: there is none. ``total_s``: of the program.
    Raises EngineError.
    """
    report = _report(result) if isinstance(result, bytes) else result
    kind = "wrong" if isinstance(report, str) else "given"
    happened = Happened(
        is_answered=last_turn is not None, limit=session.truncated_by, failed_by=session.failed_by,
        over_time=spender_of(spent, total_s, has_result=kind == "given") if ended.status is None else None,
        exit_status=ended.status or 0,
        report=("missing" if needs_result else "not_needed") if report is None else kind,
    )  # fmt: skip
    end = end_of(happened)
    if end.then == "requeued":
        raise EngineError(
            f"the engine failed in episode {session.id}, and its program ended with {ended.status}{_said(ended)}"
        )
    problem = report if isinstance(report, str) else _problem(end, happened, ended, spent, total_s)
    played = Played(end.status, problem=problem)
    if end.status == "timeout":
        played.time_spent_by = "policy" if end.then == "trained" else "tools"
    if end.then == "trained" and isinstance(report, ProgramResult) and last_turn is not None:
        played.rewards[last_turn] = report.reward
        played.parts.update(report.parts)
    return played


def _problem(end: EpisodeEnd, happened: Happened, ended: Ended, spent: Spent, total_s: float) -> str:
    """Return why an episode is not trained, or ended at a deadline."""
    status = f"exit status {happened.exit_status}" if happened.exit_status > 0 else f"signal {-happened.exit_status}"
    reasons = {
        "request_failed": f"its last request failed with {happened.failed_by}{_said(ended)}",
        "over_time": f"not over after {total_s:.1f} s, {spent.policy_s:.1f} s of them by the policy{_said(ended)}",
        "crashed": f"its program ended with {status}{_said(ended)}",
        "no_answer": f"its program ended without an answer of the policy{_said(ended)}",
        "no_report": f"its program wrote no result to PENSTOCK_RESULT{_said(ended)}",
    }
    return reasons.get(end.cause, "")


def _report(result: bytes) -> ProgramResult | str:
    """Return what a result file holds, or what is wrong with it."""
    if len(result) > MAX_RESULT_BYTES:
        return f"its program's result: more than {MAX_RESULT_BYTES} bytes"
    try:
        return ProgramResult.model_validate(strict_json.loads(result))
    except strict_json.AmbiguousJson as err:
        problems = str(err)
    except ValidationError as err:
        problems = "; ".join(
            f"{'.'.join(map(str, error['loc'])) or 'file'}: {error['msg']}" for error in err.errors()[:4]
        )
    return f'its program\'s result is not {{"reward": NUMBER, "parts": {{...}}}}: {problems[:1000]}'


def _said(ended: Ended) -> str:
    return f"; the end of its output:\n{ended.output}" if ended.output else "; it printed nothing"


class ProgramOptions(ProcessOptions, PlayOptions):
    """What is run, and how."""

    command: list[str] = Field(min_length=1, description="Program and arguments; no shell reads them.")
    sandbox: bool = Field(
        False,
        description="Confine it with bubblewrap: no network but the episode's URL, nothing to write but TMPDIR, "
        "processes of its own.",
    )
    readable: list[str] = Field(
        default_factory=list,
        description="Absolute paths that it may read in the sandbox, besides folder, system and Python.",
    )
    version: str = Field(
        "", max_length=200, description="Recorded with each episode; raise it when the program changes."
    )

    @model_validator(mode="after")
    def _readable_in_a_sandbox(self) -> ProgramOptions:
        if self.readable and not self.sandbox:
            raise ValueError("readable is read in the sandbox alone: set sandbox = true, or leave it out")
        if self.sandbox and Path.cwd().is_relative_to(Path(self.folder).resolve()):
            raise ValueError(
                "sandbox = true needs a folder that does not hold the worker's own: the program can read it whole, and "
                "the worker's may hold the logins of the run file"
            )
        for entry in self.readable:
            if not Path(entry).is_absolute():
                raise ValueError(f"readable: {entry!r} is not an absolute path")
        return self


class Program(EpisodeEnvironment):
    name = "program"
    options = ProgramOptions

    def __init__(self) -> None:
        super().__init__()
        self._served: _ServedProxy | None = None
        self._sweeper: program_process.Sweeper | None = None

    def defined(self, name: str, definition: EnvironmentDefinition) -> Self:
        if definition.system_prompt:
            raise ConfigError(
                f"environment.define.{name}.system_prompt: a program writes its own messages; leave it out"
            )
        return super().defined(name, definition)

    def use_model(self, folder: Path, context_tokens: int | None) -> None:
        super().use_model(folder, context_tokens)
        if self.chosen is not None and self.chosen.sandbox:
            program_process.bubblewrap()
        self.version = self.chosen.version if self.chosen else ""  # pyright: ignore[reportAttributeAccessIssue]
        self._served = _ServedProxy(AgentProxy(self.limits(), self._images))
        if self.chosen is not None and self._sweeper is None:
            self._sweeper = program_process.Sweeper(Path(tempfile.gettempdir()))

    async def attempt(self, site: Site, begun: Begun, sampler: Sampler) -> Attempt:
        served = self._served
        if self.chosen is None or served is None:
            raise RowUnfit(self.needs_definition("options.command"))
        try:
            Row.of(begun.task)
        except ValueError as err:
            raise RowUnfit(str(err)) from None
        url = await self._served_url()
        proxy = served.proxy
        session = proxy.begin(begun.name, site.model, sampler, begun.task.sampling, begun.sampling_seed)
        loop = asyncio.get_running_loop()
        folder = await loop.run_in_executor(site.executor, write_task, begun)
        try:
            variables = self._variables(begun, folder, url + path(session))
            ended, result, program_s = await self._run(begun, folder, variables)
            spent = session.clock.spent()
        finally:
            made = proxy.end(session)
            shutil.rmtree(folder, ignore_errors=True)
        trained = [span.turn for row in made.rows for span in row.spans if span.is_trained]
        played = outcome(
            ended, result, session, last_turn=max(trained, default=None),
            needs_result=begun.task.reward.name == "environment",
            spent=spent, total_s=program_s,
        )  # fmt: skip
        return Attempt(session, made, played)

    async def _served_url(self) -> str:
        assert self._served is not None
        return await self._served.url(on_socket=self.chosen.sandbox)

    async def _run(
        self, begun: Begun, folder: Path, variables: Mapping[str, str]
    ) -> tuple[Ended, bytes | str | None, float]:
        """Run the program; return how it ended, its result, and its seconds."""
        del begun
        started = time.monotonic()
        command = self._confined(folder) if self.chosen.sandbox else self.chosen.command
        ended = await program_process.run(
            command, Path(self.chosen.folder), variables, self.settings.episode_deadline_s
        )
        return ended, _result_bytes(folder), time.monotonic() - started

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.close()
        if self._served is not None:
            await self._served.close()

    def _confined(self, folder: Path) -> list[str]:
        served = self._served
        assert served is not None
        return program_process.confined(
            self.chosen.command, start_in=Path(self.chosen.folder), readable=self.chosen.readable, writable=folder,
            socket=served.socket,
        )  # fmt: skip

    def _variables(self, begun: Begun, folder: Path, url: str) -> dict[str, str]:
        return {
            **program_process.passed(self.chosen.pass_variables),
            **self.chosen.variables,
            "OPENAI_BASE_URL": url,
            "OPENAI_API_KEY": "any",
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": "any",
            "TMPDIR": str(folder),
            "PENSTOCK_TASK": str(folder / "task.json"),
            "PENSTOCK_RESULT": str(folder / "result.json"),
            "PENSTOCK_SEED": str(begun.seed),
            "PENSTOCK_DEADLINE": f"{time.time() + self.settings.episode_deadline_s:.3f}",
            program_process.MARK: program_process.episode_mark(),
        }


class _ServedProxy:
    def __init__(self, proxy: AgentProxy) -> None:
        self.proxy = proxy
        self._running = contextlib.AsyncExitStack()
        self._starting = asyncio.Lock()
        self._url = ""
        self.socket = Path()  # once it is served there

    async def url(self, *, on_socket: bool) -> str:
        async with self._starting:
            if not self._url and on_socket:
                folder = Path(tempfile.mkdtemp(prefix=f"{program_process.PREFIX}{program_process.mark()}-"))
                self._running.callback(shutil.rmtree, folder, ignore_errors=True)
                self.socket = folder / "proxy"
                await self._running.enter_async_context(serving_at(self.proxy, self.socket))
                self._url = f"http://127.0.0.1:{program_process.PROXY_PORT}"
            self._url = self._url or await self._running.enter_async_context(serving(self.proxy))
        return self._url

    async def close(self) -> None:
        await self._running.aclose()


def write_task(begun: Begun) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=f"{program_process.PREFIX}{program_process.mark()}-"))
    task = begun.task
    truth = None if task.reward.ground_truth is None else json.loads(task.reward.ground_truth)
    row = {"messages": json.loads(task.messages or "[]"), "ground_truth": truth, "data_source": task.reward.data_source}
    row |= {"extra_info": json.loads(task.reward.extra_info), "seed": begun.seed}
    (folder / "task.json").write_text(json.dumps({**row, "episode": begun.name, "attempt": begun.attempt}))
    return folder


def _result_bytes(folder: Path) -> bytes | None:
    with contextlib.suppress(OSError):
        return read_regular(folder / "result.json", MAX_RESULT_BYTES + 1)
    return None


PROGRAM = Program()
