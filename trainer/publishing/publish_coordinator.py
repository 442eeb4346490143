"""Rank 0's side of publishing a model: each request goes to the `RankPublisher` of every rank, its own included.

Requests and answers have channels of their own, one for publications and one for full snapshots in the background, so
training continues on all ranks meanwhile. They carry little data: each rank sends its weights to the object store itself.
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
from penstock.trainer.publishing.rank_publisher import Digests, Done, PatchSize, RankPublisher, Request, StoredBuckets
from penstock.trainer.publishing.weight_buckets import WeightBuckets
from penstock.trainer.ranks import RankChannel

W = TypeVar("W", bound=Wire)
log = structlog.get_logger("trainer.publish_coordinator")


@dataclass(frozen=True, slots=True)
class PublishChannels:
    """Between rank 0 and the others, used while they train."""

    publication: RankChannel
    full_snapshot: RankChannel


@dataclass(frozen=True, slots=True)
class StoredObjects:
    """The objects of a version, and the state of every bucket in the layout's order."""

    attempt: str
    objects: tuple[BlobRef, ...]
    buckets: tuple[BucketState, ...]


class PublishCoordinator:
    """Has every rank publish its buckets. Used by one thread; `store_retained` may run at the same time in another."""

    def __init__(self, own: RankPublisher, channels: PublishChannels | None = None) -> None:
        """``own`` is rank 0's publisher; ``channels`` are None where one process trains alone."""
        self._own = own
        self._channels = channels

    def hold(self, buckets: WeightBuckets) -> None:
        """Hold rank 0's buckets of a version that may be published."""
        self._own.hold(buckets)

    def discard(self, wanted: Collection[int]) -> None:
        """Release rank 0's copies except the ``wanted`` ids; the other ranks do so with the order of the next copy."""
        self._own.discard(wanted)

    def state_root(self, copy_id: int) -> str:
        """Return the root of a copy of the weights."""
        return _root(self._ask(Request(action="digests", copy_id=copy_id), Digests))

    def read_head(self, head: BlobRef, version: PolicyVersion) -> str:
        """Have every rank read its buckets of the head; returns the root, raises PublicationFailed."""
        answers = self._ask(Request(action="read_head", head=head, version=version), Digests)
        problems = [answer.problem for answer in answers if answer.problem is not None]
        if problems:
            raise PublicationFailed(problems[0])
        return _root(answers)

    def compare(self, copy_id: int) -> PatchSize:
        """Have every rank compare and encode its buckets; returns the size of the whole patch."""
        answers = self._ask(Request(action="compare", copy_id=copy_id), PatchSize)
        return PatchSize(num_bytes=sum(a.num_bytes for a in answers), num_changed=sum(a.num_changed for a in answers))

    def store_patch(self, copy_id: int, version: PolicyVersion) -> StoredObjects:
        """Have every rank store what it compared last."""
        return self._store(Request(action="store_patch", copy_id=copy_id, version=version, attempt=_attempt()))

    def store_whole(self, copy_id: int, version: PolicyVersion, *, file_name: str = "") -> StoredObjects:
        """Have every rank store its buckets of a copy whole; ``file_name`` is for a copy of one bucket."""
        return self._store(
            Request(action="store_whole", copy_id=copy_id, version=version, attempt=_attempt(), file_name=file_name)
        )

    def store_committed(self, version: PolicyVersion) -> StoredObjects:
        """Have every rank store its buckets of the committed version whole."""
        return self._store(Request(action="store_whole", source="committed", version=version, attempt=_attempt()))

    def commit(self, copy_id: int, *, retain: bool) -> None:
        """Tell every rank that a copy was committed; ``retain`` it for a full snapshot as well."""
        self._ask(Request(action="commit", copy_id=copy_id, retain=retain), Done)

    def store_retained(self, version: PolicyVersion) -> StoredObjects:
        """Have every rank store its retained buckets whole, and release them."""
        try:
            return self._store(
                Request(action="store_whole", source="retained", version=version, attempt=_attempt()),
                in_background=True,
            )
        finally:
            self._ask(Request(action="release"), Done, in_background=True)

    def _store(self, request: Request, *, in_background: bool = False) -> StoredObjects:
        objects: list[BlobRef] = []
        buckets: dict[int, BucketState] = {}
        for answer in self._ask(request, StoredBuckets, in_background=in_background):
            for number, state in zip(answer.numbers, answer.states, strict=True):
                stored = state.stored and state.stored.model_copy(update={"object": state.stored.object + len(objects)})
                buckets[number] = state.model_copy(update={"stored": stored})
            objects += answer.objects
        return StoredObjects(request.attempt, tuple(objects), tuple(buckets[number] for number in sorted(buckets)))

    def _ask(self, request: Request, kind: type[W], *, in_background: bool = False) -> list[W]:
        if self._channels is None:
            return [_checked(self._own.answer(request), kind)]
        channel = self._channels.full_snapshot if in_background else self._channels.publication
        own, others = channel.ask(request.model_dump_json().encode(), lambda: self._own.answer(request))
        found = [_checked(own, kind)]
        for rank, data in enumerate(others, start=1):
            answer, problem = msgpack.unpackb(data)
            if problem is not None:
                raise PublicationFailed(f"rank {rank}: {problem}")
            found.append(kind.model_validate_json(answer))
        return found


def serve_requests(publisher: RankPublisher, channels: PublishChannels) -> None:
    """Answer rank 0's requests in daemon threads until the process exits (all other ranks)."""

    def answer(data: bytes) -> bytes:
        request = Request.model_validate_json(data)
        try:
            return _packed(publisher.answer(request).model_dump_json().encode(), None)
        except PenstockError as err:
            problem = str(err)
        except Exception as err:  # noqa: BLE001  rank 0 has to receive any error, or it would wait for an answer
            problem = f"{type(err).__name__}: {err}"
        log.error("publishing failed on this rank", action=request.action, error=problem)
        return _packed(b"", problem)

    for channel, name in ((channels.publication, "publisher"), (channels.full_snapshot, "full-snapshot")):
        threading.Thread(target=channel.listen, args=(answer,), name=name, daemon=True).start()


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
    """Return a name for one attempt to store a version, so that no object is ever overwritten."""
    return secrets.token_hex(4)
