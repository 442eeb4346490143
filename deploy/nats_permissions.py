"""NATS permissions of one role, made from its rights in `protocol/rights.py`; pure.

Everything a client asks of JetStream is a message to a subject below ``$JS.API``, so the permissions
are patterns of subjects. A NATS wildcard stands for a whole token and a stream's name is one token
(``my-run-tasks``): rights for any run have a wildcard there, and refuse by name what is the same in
every run, which are the buckets that runs share. Rights for one run name its streams and buckets.

Permissions do not cover the reply subject of a request, to which the server sends stored messages.
That each role has an account of its own (`deploy/nats_config.py`) keeps replies away from the streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from penstock.protocol import streams, subjects
from penstock.protocol.rights import ANY_KEY, KeyRight, Rights, TailRight

_API = "$JS.API"


@dataclass(frozen=True, slots=True)
class Permissions:
    """What one user may publish and subscribe to; a subject that is both allowed and denied is refused."""

    publish: tuple[str, ...]
    deny_publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def permissions(rights: Rights) -> Permissions:
    """Return the permissions that grant these rights."""
    allowed = _unique(_whole_tokens(subject) for subject in _allowed(rights))
    denied = _unique(_denied(rights))
    announced = (_whole_tokens(subjects.stored(tail.subject)) for tail in rights.tails)
    return Permissions(allowed, denied, _unique([f"_INBOX_{rights.role}.>", *announced]))


def _allowed(rights: Rights) -> Iterator[str]:
    yield f"{_API}.INFO"
    if rights.lists_streams:
        yield from (f"{_API}.STREAM.LIST", f"{_API}.STREAM.NAMES")
    yield from rights.publishes
    for spec in rights.fetches:
        yield f"{_API}.CONSUMER.MSG.NEXT.{spec.stream}.{spec.durable}"
        # Of exact length: in a longer pattern the names could stand for other parts of another consumer's acknowledgement.
        yield f"$JS.ACK.{spec.stream}.{spec.durable}.*.*.*.*.*"
    for spec in rights.resets:
        yield f"{_API}.CONSUMER.RESET.{spec.stream}.{spec.durable}"
    for spec in rights.observes:
        yield f"{_API}.CONSUMER.INFO.{spec.stream}.{spec.durable}"
    for tail in rights.tails:
        yield from _to_tail(tail)
    for stream in rights.scans:
        yield from (f"{_API}.STREAM.INFO.{stream}", f"{_API}.DIRECT.GET.{stream}", f"{_API}.STREAM.MSG.GET.{stream}")
    for right in rights.reads:
        yield from _to_read(right)
    for right in rights.writes:
        yield f"{_API}.STREAM.INFO.{_stream(right)}"  # binding to a bucket asks for it
        yield _subject(right)


def _to_tail(tail: TailRight) -> Iterator[str]:
    yield from (f"{_API}.STREAM.INFO.{tail.stream}", f"{_API}.DIRECT.GET.{tail.stream}")


def _to_read(right: KeyRight) -> Iterator[str]:
    yield f"{_API}.STREAM.INFO.{_stream(right)}"
    yield f"{_API}.DIRECT.GET.{_stream(right)}.{_subject(right)}"
    if right.key == ANY_KEY:  # all keys in one request, whose body says which
        yield f"{_API}.DIRECT.GET.{_stream(right)}"
    if right.newest:
        yield f"{_API}.STREAM.MSG.GET.{_stream(right)}"


def _denied(rights: Rights) -> Iterator[str]:
    """Refuse what the wildcards for any run would let through."""
    read = {right.bucket for right in rights.reads}
    written = {right.bucket for right in rights.writes}
    for bucket in streams.shared_buckets():
        stream = f"KV_{bucket.bucket}"
        if bucket not in written:
            yield f"$KV.{bucket.bucket}.>"
        if bucket not in read:
            yield from (f"{_API}.STREAM.INFO.{stream}", f"{_API}.DIRECT.GET.{stream}", f"{_API}.DIRECT.GET.{stream}.>")
        if bucket not in {right.bucket for right in rights.reads if right.newest}:
            yield f"{_API}.STREAM.MSG.GET.{stream}"


def _stream(right: KeyRight) -> str:
    return f"KV_{right.bucket.bucket}"


def _subject(right: KeyRight) -> str:
    return f"$KV.{right.bucket.bucket}.{right.key}"


def _whole_tokens(subject: str) -> str:
    """Return the subject with every token that contains a wildcard replaced by the wildcard: ``*-tasks`` by ``*``."""
    return ".".join("*" if "*" in token else token for token in subject.split("."))


def _unique(subjects: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(subjects))
