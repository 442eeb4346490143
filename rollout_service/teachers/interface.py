"""What a file that holds a kind of teacher needs: `TeacherKind`, `TeacherClient`, `Question`, `Answer`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock.protocol.extensions import Registry


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A row of tokens, of which those from ``first`` on are to be scored; ``first`` is at least 1."""

    token_ids: Sequence[int]
    first: int


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What a teacher says about the M tokens of a row from the question's ``first`` on, at temperature 1."""

    logprobs: npt.NDArray[np.float32]  # [M] of the row's own tokens
    top_ids: npt.NDArray[np.int32]  # [M, k] the likeliest tokens in their place
    top_logprobs: npt.NDArray[np.float32]  # [M, k]
    version: str  # of the weights, as the server labels them


class TeacherClient(Protocol):
    """One server of a teacher; every failure is an EngineError that names the URL."""

    @property
    def url(self) -> str:
        """Where it is."""
        ...

    async def model(self, deadline_s: float) -> str:
        """Return the name of the model that is served."""
        ...

    async def encode(self, text: str, deadline_s: float) -> list[int]:
        """Return the ids of a text's tokens, as the server's tokenizer makes them."""
        ...

    async def score(self, questions: Sequence[Question], top_k: int, deadline_s: float) -> list[Answer]:
        """Return an answer for each row, in order."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


class Connect(Protocol):
    """Makes a client of one server."""

    def __call__(self, url: str, *, api_key: str) -> TeacherClient:
        """Return a client; nothing is sent yet."""
        ...


@dataclass(frozen=True, slots=True)
class TeacherKind:
    """A kind of server that answers for a teacher, by the name in ``teacher.kind``."""

    name: str
    connect: Connect


TEACHERS = Registry("teacher", TeacherKind, package="penstock.rollout_service.teachers", group="penstock.teachers")
