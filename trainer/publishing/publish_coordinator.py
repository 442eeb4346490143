"""The shares of all ranks, as rank 0 sees them: each question goes to every rank, rank 0's own included.

While a version is published the ranks' training threads go on: questions and answers have lines of their own, one for
publications and one for anchors beside them. What they carry is small; the weights go from each rank to the object store.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgpack
import structlog

from penstock.protocol.errors import PenstockError
from penstock.protocol.facts import BlobRef, Wire
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.digest import weights_digest
from penstock.protocol.weights.manifest import BucketState
from penstock.trainer.errors import PublicationFailed
from penstock.trainer.publishing.rank_publisher import Compared, Digests, Done, Question, Share, Stored
from penstock.trainer.publishing.weight_buckets import Part
from penstock.trainer.ranks import RankChannel

W = TypeVar("W", bound=Wire)
log = structlog.get_logger("trainer.publish")


@dataclass(frozen=True, slots=True)
class Lines:
    """How rank 0 and the others speak while they train."""

    publication: RankChannel
    anchor: RankChannel


@dataclass(frozen=True, slots=True)
class Assembled:
    """The objects of a version, and the state of every bucket in the layout's order."""

    attempt: str
    objects: tuple[BlobRef, ...]
    buckets: tuple[BucketState, ...]


class Shares:
    """Rank 0's view of every rank's `Share`. The ``*_beside`` calls may run beside the others."""

    def __init__(self, own: Share, lines: Lines | None = None) -> None:
        """``lines`` are None where one process trains alone."""
        self._own = own
        self._lines = lines

    def hold(self, part: Part) -> None:
        """Take rank 0's part of a version that may be published."""
        self._own.hold(part)

    def discard(self, wanted: Collection[int]) -> None:
        """Let go of rank 0's parts that will not be published; the others hear of it with the next copy."""
        self._own.discard(wanted)

    def state_root(self, taken: int) -> str:
        """Return the root of a copy of the weights."""
        return _root(self._ask(Question(what="digests", taken=taken), Digests))

    def read_head(self, head: BlobRef, version: PolicyVersion) -> str:
        """Have every rank put its buckets of the head together; returns the root, raises PublicationFailed."""
        answers = self._ask(Question(what="read_head", head=head, version=version), Digests)
        problems = [answer.problem for answer in answers if answer.problem is not None]
        if problems:
            raise PublicationFailed(problems[0])
        return _root(answers)

    def compare(self, taken: int) -> Compared:
        """Have every rank compare and encode its buckets; returns what all patches come to."""
        answers = self._ask(Question(what="compare", taken=taken), Compared)
        return Compared(num_bytes=sum(a.num_bytes for a in answers), num_changed=sum(a.num_changed for a in answers))

    def store_changes(self, taken: int, version: PolicyVersion) -> Assembled:
        """Have every rank store what it compared last."""
        return self._store(Question(what="store_changes", taken=taken, version=version, attempt=_attempt()))

    def store_whole(self, taken: int, version: PolicyVersion, *, name: str = "") -> Assembled:
        """Have every rank store its buckets of a copy whole; ``name`` is the file's, where there is one bucket."""
        return self._store(Question(what="store_whole", taken=taken, version=version, attempt=_attempt(), name=name))

    def store_base(self, version: PolicyVersion) -> Assembled:
        """Have every rank store its buckets of the committed version whole."""
        return self._store(Question(what="store_whole", of_base=True, version=version, attempt=_attempt()))

    def settle(self, taken: int, *, keep: bool) -> None:
        """Say that a copy was committed; ``keep`` it for an anchor as well."""
        self._ask(Question(what="settle", taken=taken, keep=keep), Done)

    def store_kept_beside(self, version: PolicyVersion) -> Assembled:
        """Have every rank store what it kept whole, and let go of it."""
        try:
            return self._store(
                Question(what="store_whole", keep=True, version=version, attempt=_attempt()), beside=True
            )
        finally:
            self._ask(Question(what="release"), Done, beside=True)

    def _store(self, question: Question, *, beside: bool = False) -> Assembled:
        objects: list[BlobRef] = []
        buckets: dict[int, BucketState] = {}
        for stored in self._ask(question, Stored, beside=beside):
            for number, state in zip(stored.numbers, stored.states, strict=True):
                place = state.stored and state.stored.model_copy(update={"object": state.stored.object + len(objects)})
                buckets[number] = state.model_copy(update={"stored": place})
            objects += stored.objects
        return Assembled(question.attempt, tuple(objects), tuple(buckets[number] for number in sorted(buckets)))

    def _ask(self, question: Question, kind: type[W], *, beside: bool = False) -> list[W]:
        if self._lines is None:
            return [_checked(self._own.answer(question), kind)]
        line = self._lines.anchor if beside else self._lines.publication
        mine, others = line.ask(question.model_dump_json().encode(), lambda: self._own.answer(question))
        found = [_checked(mine, kind)]
        for rank, data in enumerate(others, start=1):
            answer, problem = msgpack.unpackb(data)
            if problem is not None:
                raise PublicationFailed(f"rank {rank}: {problem}")
            found.append(kind.model_validate_json(answer))
        return found


def serve(share: Share, lines: Lines) -> None:
    """Answer rank 0's questions in threads of their own, for the life of the process (all other ranks)."""

    def answer(data: bytes) -> bytes:
        question = Question.model_validate_json(data)
        try:
            return _packed(share.answer(question).model_dump_json().encode(), None)
        except PenstockError as err:
            problem = str(err)
        except Exception as err:  # noqa: BLE001  whatever it was, rank 0 has to hear of it, or it would wait in vain
            problem = f"{type(err).__name__}: {err}"
        log.error("this rank's part of a publication failed", question=question.what, error=problem)
        return _packed(b"", problem)

    for line, name in ((lines.publication, "publisher"), (lines.anchor, "anchor")):
        threading.Thread(target=line.listen, args=(answer,), name=name, daemon=True).start()


def _packed(answer: bytes, problem: str | None) -> bytes:
    data = msgpack.packb([answer, problem])
    assert data is not None
    return data


def _checked(answer: Wire, kind: type[W]) -> W:
    assert isinstance(answer, kind)
    return answer


def _root(answers: Sequence[Digests]) -> str:
    return weights_digest(digest for answer in answers for digest in answer.unwrap())


def _attempt() -> str:
    """Return a name for one attempt to store a version: nothing is ever overwritten."""
    return secrets.token_hex(4)
