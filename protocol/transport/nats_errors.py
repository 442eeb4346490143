"""Translate JetStream's error codes into errors with a fix; pure.

The codes are those of the server's own list (``server/errors.json`` of nats-server). A code that is not listed
here becomes a `BusError` with the server's description and code.
"""

from __future__ import annotations

from nats.js.errors import APIError

from penstock.protocol.errors import BusError, BusRefused, BusUnreachable, MissingStream, StorageFull

BOOTSTRAP = "create it with: penstock bootstrap run.toml"
ERR_FULL = 10077  # the stream's or bucket's own bound on messages or bytes
# of a cluster: it goes on when its servers have elected one
ERR_NO_LEADER = frozenset({10004, 10008, 10009, 10118, 10119})
# A majority does not have an earlier try of the same request yet, whose answer was lost: it may still be stored, or not.
ERR_PUBLICATION_UNDER_WAY = 10158  # a message of the same id
ERR_SWAP_UNDER_WAY = 10164  # a swap of the same key
ERR_OTHER_REVISION = 10071  # of the key of a swap
ERR_STORAGE_FULL = frozenset({10002, 10023, 10028, 10047})  # storage, resources or memory of the account or the server

_LIMIT = "remove finished runs (penstock runs rm RUN), or raise {limit} of the server or of the account"
_FULL = "its storage is full: " + _LIMIT
_REMEDIES: dict[int, tuple[type[BusError], str]] = {
    10002: (StorageFull, _FULL.format(limit="max_file_store and max_mem_store")),
    10023: (StorageFull, _FULL.format(limit="max_file_store")),
    10028: (StorageFull, _FULL.format(limit="max_mem_store")),
    10047: (StorageFull, _FULL.format(limit="max_file_store")),
    10026: (StorageFull, _LIMIT.format(limit="max_consumers")),
    10027: (StorageFull, _LIMIT.format(limit="max_streams")),
    10122: (StorageFull, "raise the account's limit on the bytes of one stream (max_stream_bytes)"),
    10014: (MissingStream, BOOTSTRAP),
    10059: (MissingStream, BOOTSTRAP),
    10035: (BusRefused, "give this user an account that has JetStream"),
    10039: (BusRefused, "enable JetStream for this user's account in the server's configuration"),
    10076: (BusRefused, "start nats-server with -js"),
    10003: (BusError, "the server does not support the request: check that it is 2.12 or newer"),
    10013: (BusError, "a consumer of that name exists with another purpose: remove it, then run penstock bootstrap"),
    10058: (BusError, "it exists with other settings: remove it, then run penstock bootstrap"),
    10065: (BusError, "another stream has these subjects: remove it, or use another run id"),
    10100: (BusError, "another consumer of this queue reads the same subjects: remove it, then run penstock bootstrap"),
    10054: (BusError, "the message is larger than the stream's limit; run penstock bootstrap again if an older version created the stream"),
    10005: (
        BusRefused,
        "fewer servers with JetStream answer than nats.replicas: start them, or set it to 1 (docs/guides/nats_cluster.md)",
    ),
    10074: (
        BusRefused,
        "this server is not a cluster: set nats.replicas = 1, or start a cluster (docs/guides/nats_cluster.md)",
    ),
    **dict.fromkeys(
        (10007, *ERR_NO_LEADER, ERR_PUBLICATION_UNDER_WAY, ERR_SWAP_UNDER_WAY),
        (BusUnreachable, "servers of the cluster are missing, or it has no leader yet: try again"),
    ),
}  # fmt: skip


def refusal(err: APIError, what: str, url: str) -> BusError:
    """Return the Penstock error for an error of JetStream.

    Args:
        err: The error of the client library.
        what: The request, with the name of its stream, consumer or bucket.
        url: URL of the server, for the text.
    """
    kind, remedy = _REMEDIES.get(err.err_code or 0, (BusError, ""))
    if not remedy and err.code == 404:
        kind, remedy = MissingStream, BOOTSTRAP
    said = f"NATS at {url} says: {err.description} (error {err.err_code})"
    return kind(f"{what}: {said}{'; ' if remedy else ''}{remedy}")
