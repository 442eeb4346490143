"""Every situation in which the protocol refuses to go on, drawn as one tree.

    PenstockError
    ├── WireError                 a message from outside is not what it claims to be
    │   ├── UnknownSchema         no such fact, or a version this build does not read
    │   ├── MalformedFact         the fields do not fit the schema
    │   └── MessageTooLarge       above the 64 KB every message keeps
    ├── PackError                 a group pack (Parquet) is not readable or not what the message says
    ├── MalformedWeights          weights are not the safetensors or the adapter that they should be
    ├── SegmentRefused            a patch segment is damaged, hostile, or meant for another bucket
    ├── ChainBroken               manifests do not continue one another: wrong parent, epoch, layout or base
    ├── StateMismatch             a version was put together, and its bytes are not what its manifest promised
    ├── RecordBroken              a run's record is not there, or its chapters do not follow on one another
    ├── BusError
    │   ├── BusUnreachable        no NATS server, or it did not answer within the deadline
    │   │   └── NoRoom            it answered that it has no room: its store, an account or a bucket is full
    │   ├── BusRefused            wrong credentials or missing permission
    │   ├── MissingStream         the run was not bootstrapped
    │   ├── StreamFull            back-pressure lasted longer than the deadline
    │   └── CompareAndSwapFailed  somebody else moved the key first
    ├── BlobError
    │   ├── BlobStoreUnreachable  no S3 server, or it did not answer within the deadline
    │   ├── BlobStoreRefused      wrong credentials, missing bucket
    │   ├── BlobMissing           the key named by a message does not exist
    │   └── BlobCorrupt           size or sha256 differs from the message
    └── ConfigError               the run file is wrong; lists every mistake with file and line

Texts say what, which id, expected and got, and what to do. A new error goes where a caller
would want to catch it; one that nobody catches separately needs no class of its own.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Base of everything Penstock raises on purpose; the text is written for the person reading it."""


class WireError(PenstockError):
    """A message from outside is not what it claims to be; the receiver sends it to the dead letters."""


class UnknownSchema(WireError):
    """The schema tag names no fact that this build reads."""


class MalformedFact(WireError):
    """The message carries a known schema tag, but its fields do not fit."""


class MessageTooLarge(WireError):
    """The encoded message exceeds the limit; payload belongs into the object store."""


class PackError(PenstockError):
    """A group pack cannot be read, or does not hold what the message says it holds."""


class MalformedWeights(PenstockError):
    """Weights are not the safetensors, or not the adapter of their base, that they should be."""


class SegmentRefused(PenstockError):
    """A patch segment is damaged, hostile, or meant for another bucket; nothing was written."""


class ChainBroken(PenstockError):
    """Manifests of weights do not continue one another: wrong parent, epoch, layout or base."""


class StateMismatch(PenstockError):
    """A version was put together from its objects, and the result is not what its manifest promised."""


class RecordBroken(PenstockError):
    """The record of a run is not there, or its chapters, steps or versions do not follow on one another."""


class BusError(PenstockError):
    """Base of everything that can go wrong between a service and NATS."""


class BusUnreachable(BusError):
    """No NATS server answered within the deadline."""


class NoRoom(BusUnreachable):
    """NATS has no room: its store, the account or the bucket is full. Whoever outlasts an absent server outlasts this."""


class BusRefused(BusError):
    """NATS answered and said no: wrong credentials, or a permission is missing."""


class MissingStream(BusError):
    """The stream, consumer or bucket of this run does not exist."""


class StreamFull(BusError):
    """The stream stayed full until the deadline: its readers are down or too slow."""


class CompareAndSwapFailed(BusError):
    """The key was moved by somebody else between read and write."""


class BlobError(PenstockError):
    """Base of everything that can go wrong between a service and the object store."""


class BlobStoreUnreachable(BlobError):
    """No S3 server answered within the deadline."""


class BlobStoreRefused(BlobError):
    """The S3 server answered and said no: wrong credentials, or the bucket does not exist."""


class BlobMissing(BlobError):
    """The object named by a message does not exist."""


class BlobCorrupt(BlobError):
    """The object's size or sha256 is not the one its message promised."""


class ConfigError(PenstockError):
    """The run file is wrong; the text lists every mistake with file, line and the nearest right name."""
