"""Every situation in which the protocol refuses to go on: the classes are one tree.

Texts say what happened, which id, expected and got, and the fix. A new error belongs where a caller
would catch it; an error that no caller catches separately needs no separate class.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Base of all errors of Penstock; the text is written for people."""


class WireError(PenstockError):
    """A message does not decode to the expected fact; its receiver dead-letters it."""


class UnknownSchema(WireError):
    """The schema tag is not the expected one."""


class MalformedFact(WireError):
    """The message carries a known schema tag, but its fields do not fit."""


class MessageTooLarge(WireError):
    """The encoded message exceeds the 64 KB of every message; large payloads belong in the object store."""


class PackError(PenstockError):
    """A group pack, or the stored log-probabilities of a step, cannot be read or does not match its message."""


class UnpublishedVersion(PackError):
    """A pack says that tokens were sampled by a version which the run has never published: no engine had its weights."""


class TextMismatch(PackError):
    """A completion's text, which was scored, is not what its token ids decode to."""


class ReaderKilled(PenstockError):
    """Two readers were killed while they processed a message; it is dead-lettered and not processed a third time."""


class TemplateRefused(PenstockError):
    """A model's chat template is invalid, refuses a chat, or exceeds the limits of a rendering."""


class UnsupportedModel(PenstockError):
    """The model folder is missing, unreadable, or of a kind that would be trained wrongly."""


class MalformedData(PenstockError):
    """Rows of a data file are malformed; the text gives file, line and column of each. Or messages of a chat."""


class ImageRefused(PenstockError):
    """An image is of another format, does not decode, exceeds a limit, or does not fit what its row says of it."""


class MalformedWeights(PenstockError):
    """Weights are not valid safetensors, or not a valid adapter of their base."""


class SegmentRefused(PenstockError):
    """A patch segment is damaged, hostile, or meant for another bucket; nothing was written."""


class ChainBroken(PenstockError):
    """Manifests of weights do not continue one another: wrong parent, epoch, layout or base."""


class SignatureRefused(PenstockError):
    """A manifest of weights has no signature of a trusted key."""


class StateMismatch(PenstockError):
    """A version assembled from its objects differs from its manifest."""


class RecordBroken(PenstockError):
    """The record of a run is missing, or its chapters, steps or versions are not consecutive."""


class BusError(PenstockError):
    """Base of all errors between a service and NATS."""


class BusUnreachable(BusError):
    """No NATS server answered within the deadline."""


class StorageFull(BusUnreachable):
    """The storage of NATS, of the account or of the bucket is full; retried like an unreachable server."""


class BusRefused(BusError):
    """NATS refused: wrong credentials, or a permission is missing."""


class MissingStream(BusError):
    """The stream, consumer or bucket of this run does not exist: the run was not bootstrapped."""


class StreamFull(BusError):
    """The stream stayed full until the deadline (back-pressure): its readers are down or too slow."""


class CompareAndSwapFailed(BusError):
    """Another writer changed the key between read and write."""


class BlobError(PenstockError):
    """Base of all errors between a service and the object store."""


class BlobStoreUnreachable(BlobError):
    """No S3 server answered within the deadline."""


class BlobStoreRefused(BlobError):
    """The S3 server refused: the bucket does not exist, its certificate is wrong, or the login was refused."""


class BlobLoginRefused(BlobStoreRefused, BlobStoreUnreachable):
    """The login or the region was refused until the deadline; retried like an unreachable server, since logins are replaced."""


class BlobMissing(BlobError):
    """The object that a message references does not exist."""


class BlobDenied(BlobMissing):
    """An object may not be read, or does not exist, says a store that accepts the login for the run."""


class BlobCorrupt(BlobError):
    """The object's size or sha256 differs from its message."""


class TargetRefused(PenstockError):
    """A URL that is none, or an address that this service may not call; the text names the rule."""


class ConfigError(PenstockError):
    """The run file is wrong; the text lists every problem with file, line and the nearest valid name."""


class GpusUnknown(PenstockError):
    """The driver of this machine's GPUs does not answer, or refuses, so that no process can be given one."""


class DeviceTaken(ConfigError):
    """Another run uses a GPU that this process is to share with processes of its own run."""


class DeviceNotFreed(PenstockError):
    """The turn on a shared GPU did not come within ``placement.turn_deadline_s``; the text names who has it."""


class UntrustedFolder(ConfigError):
    """A file in the folder of a run was not sealed there by this user, so that what it names is not used; the text has the command."""
