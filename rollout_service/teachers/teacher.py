"""Ask a teacher about the groups that a worker generated, with retries; refuse one of another vocabulary.

A kind of server is one file beside this one, with a `TeacherKind` whose client answers each `Question` with an `Answer`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import structlog

from penstock.protocol.config.shared_sections import TeacherSettings
from penstock.protocol.errors import PackError, UnsupportedModel
from penstock.protocol.extensions import Registry
from penstock.protocol.packs.optional_columns import num_sampled
from penstock.protocol.token_annotations import TeacherRow, TeacherScores
from penstock.protocol.trajectory import Group, Trajectory
from penstock.rollout_service.errors import (
    EngineError,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
    TeacherFailed,
    TeacherUnfit,
)

log = structlog.get_logger("rollout.teachers")
_PROBE_TOKENS = 512  # of the vocabulary, whose text both tokenizers encode
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 10.0
_BUSY = 429
_UNFINISHED_CHARACTER = "\ufffd"  # what an incomplete UTF-8 sequence decodes to


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A row of tokens, of which those from ``first`` on are to be scored; ``first`` is at least 1."""

    token_ids: Sequence[int]
    first: int


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What a teacher says about the M tokens of a row from the question's ``first`` on, at temperature 1."""

    logprobs: npt.NDArray[np.float32]  # [M] of the row's tokens
    top_ids: npt.NDArray[np.int32]  # [M, k] the likeliest tokens in their place
    top_logprobs: npt.NDArray[np.float32]  # [M, k]
    version: str  # of the weights, as the server labels them


class TeacherClient(Protocol):
    """One server of a teacher; every failure is an EngineError that names the URL."""

    @property
    def url(self) -> str: ...

    async def model(self, deadline_s: float) -> str: ...

    async def encode(self, text: str, deadline_s: float) -> list[int]:
        """Return the ids of a text's tokens, as the server's tokenizer makes them."""
        ...

    async def score(self, questions: Sequence[Question], top_k: int, deadline_s: float) -> list[Answer]:
        """Return an answer for each row, in order."""
        ...

    async def close(self) -> None: ...


class Connect(Protocol):
    def __call__(self, url: str, *, api_key: str) -> TeacherClient:
        """Return a client; nothing is sent yet."""
        ...


@dataclass(frozen=True, slots=True)
class TeacherKind:
    """A kind of server that answers for a teacher, by the name in ``teacher.kind``."""

    name: str
    connect: Connect


TEACHERS = Registry("teacher", TeacherKind, package="penstock.rollout_service.teachers", group="penstock.teachers")


class Teacher:
    def __init__(
        self, clients: Sequence[TeacherClient], *, deadline_s: float, attempts: int, max_requests: int
    ) -> None:
        self._clients = clients
        self._turn = itertools.cycle(range(len(clients)))
        self._deadline_s, self._attempts = deadline_s, attempts
        self._free = asyncio.Semaphore(max_requests)
        self._names: dict[str, str] = {}  # of the model, by URL

    @classmethod
    def of(cls, settings: TeacherSettings) -> Teacher | None:
        if not settings.urls:
            return None
        connect, key = TEACHERS.find(settings.kind).value.connect, settings.api_key()
        return cls(
            [connect(url, api_key=key) for url in settings.urls],
            deadline_s=settings.deadline_s,
            attempts=settings.attempts,
            max_requests=settings.max_requests,
        )

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    async def check(self, folder: Path, *, start_deadline_s: float) -> None:
        """Wait until every server answers, and compare its vocabulary with that of the policy in ``folder``.

        Raises TeacherUnfit for another vocabulary, or one that cannot be compared; TeacherFailed after the deadline.
        """
        text, expected = vocabulary_probe(folder)
        ends = time.monotonic() + start_deadline_s
        for client in self._clients:
            self._names[client.url] = await _once_it_answers(client, ends, start_deadline_s)
            tokens = await client.encode(text, self._deadline_s)
            if tokens[-len(expected) :] != expected or len(tokens) > len(expected) + 1:  # it may put one token in front
                place = next((n for n, pair in enumerate(zip(tokens, expected, strict=False)) if pair[0] != pair[1]), 0)
                raise TeacherUnfit(
                    f"the teacher {self._names[client.url]} at {client.url} has another vocabulary than the policy: a text is "
                    f"{len(tokens)} tokens {tokens[place : place + 4]}… to it and {len(expected)} tokens "
                    f"{expected[place : place + 4]}… to the policy; log-probabilities of token ids would be of other tokens: "
                    "use a teacher of the policy's family"
                )
            log.info("teacher", model=self._names[client.url], url=client.url)

    async def score(
        self, groups: Sequence[Group], top_ks: Sequence[int | None], *, vocab_size: int | None = None
    ) -> list[Group]:
        """Return the groups with the teacher's log-probabilities; one whose ``top_k`` is None is returned as it is.

        ``vocab_size`` is the policy's. Raises TeacherFailed, naming group and URL, when a group could not be scored.
        """
        try:
            async with asyncio.TaskGroup() as asking:
                asked = [
                    None if top_k is None else asking.create_task(self._score(group, top_k, vocab_size))
                    for group, top_k in zip(groups, top_ks, strict=True)
                ]
        except* EngineError as failures:
            raise failures.exceptions[0] from None
        return [
            group if task is None else replace(group, teacher=task.result())
            for group, task in zip(groups, asked, strict=True)
        ]

    async def _score(self, group: Group, top_k: int, vocab_size: int | None) -> TeacherScores:
        counts = num_sampled(group.trajectories)
        asked = [row for row, count in zip(group.trajectories, counts, strict=True) if count]
        questions = [Question(row.token_ids.tolist(), row.version_runs[0].start) for row in asked]
        async with self._free:
            answers, name = await self._ask(group.group_id, questions, top_k)
        versions = {answer.version for answer in answers}
        if len(versions) > 1:
            raise TeacherFailed(
                f"group {group.group_id}: the teacher {name} answered with the versions {', '.join(sorted(versions))}: its "
                "weights were changed meanwhile"
            )
        remaining = iter(zip(asked, answers, strict=True))
        rows = [_row(*next(remaining)) if count else _no_tokens(top_k) for count in counts]
        try:
            scores = TeacherScores(f"{name}@{versions.pop()}"[:500], top_k, tuple(rows))
            scores.check(counts, vocab_size)
        except PackError as err:
            raise TeacherFailed(
                f"group {group.group_id}: the answer of the teacher {name} cannot be used: {err}"
            ) from None
        return scores

    async def _ask(self, group_id: str, questions: Sequence[Question], top_k: int) -> tuple[list[Answer], str]:
        """Ask one server after another, up to ``attempts`` times; a question that is refused is not repeated."""
        for attempt in itertools.count(1):
            client = self._clients[next(self._turn)]
            try:
                answers = await client.score(questions, top_k, self._deadline_s)
            except EngineError as err:
                if attempt >= self._attempts or not _may_pass(err):
                    raise TeacherFailed(
                        f"group {group_id}: the teacher at {client.url} gave no log-probabilities in {attempt} of "
                        f"{self._attempts} attempts, the last time: {err}"
                    ) from None
                log.warning("teacher asked again", group_id=group_id, url=client.url, attempt=attempt, error=str(err))
                await asyncio.sleep(min(_FIRST_WAIT_S * 2 ** (attempt - 1), _LONGEST_WAIT_S))
            else:
                return answers, self._names.get(client.url, client.url)
        raise AssertionError("unreachable")


def vocabulary_probe(folder: Path) -> tuple[str, list[int]]:
    """Return a text of tokens from all over a model's vocabulary, and its token ids; raises TeacherUnfit without a tokenizer."""
    from penstock.protocol.tokenizer_file import load_tokenizer  # noqa: PLC0415  (most workers have no teacher)

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TeacherUnfit(f"{folder} has no tokenizer.json: its vocabulary cannot be compared with the teacher's")
    try:
        tokenizer = load_tokenizer(path)
    except UnsupportedModel as err:
        raise TeacherUnfit(str(err)) from None
    size = tokenizer.get_vocab_size()
    ids = range(0, size, max(1, size // _PROBE_TOKENS))
    text = "".join(tokenizer.decode([token_id]) for token_id in ids).replace(_UNFINISHED_CHARACTER, "")
    return text, tokenizer.encode(text, add_special_tokens=False).ids


async def _once_it_answers(client: TeacherClient, ends: float, deadline_s: float) -> str:
    while True:
        try:
            return await client.model(min(10.0, max(0.1, ends - time.monotonic())))
        except EngineError as err:
            if not _may_pass(err) or time.monotonic() >= ends:
                raise TeacherFailed(
                    f"the teacher at {client.url} did not answer within {deadline_s:g} s ({err}); start it, or correct teacher.url"
                ) from None
        await asyncio.sleep(_FIRST_WAIT_S)


def _may_pass(err: EngineError) -> bool:
    if isinstance(err, EngineRefused):
        return err.status is not None and (err.status >= 500 or err.status == _BUSY)
    return isinstance(err, EngineTimeout | EngineUnreachable)


def _row(row: Trajectory, answer: Answer) -> TeacherRow:
    """Keep what a teacher says about the sampled tokens; it also scored what an environment put between them."""
    sampled = row.loss_mask[row.version_runs[0].start :]
    return TeacherRow(answer.logprobs[sampled], answer.top_ids[sampled], answer.top_logprobs[sampled])


def _no_tokens(top_k: int) -> TeacherRow:
    return TeacherRow(np.empty(0, np.float32), np.empty((0, top_k), np.int32), np.empty((0, top_k), np.float32))
