"""What JetStream says when it refuses a request, translated into errors that say what is to be done; pure.

The codes are those of the server's own list (``server/errors.json`` of nats-server). One that is not listed here becomes
a `BusError` with the server's words and its number.
"""

from __future__ import annotations

from nats.js.errors import APIError

from penstock.protocol.errors import BusError, BusRefused, BusUnreachable, MissingStream, NoRoom

BOOTSTRAP = "create it with: python -m penstock.deploy.bootstrap"
ERR_FULL = 10077  # the stream's or bucket's own bound on messages or bytes
ERR_NO_ROOM = frozenset({10002, 10023, 10028, 10047})  # storage, resources or memory of the account or the server

_LIMIT = "remove runs that are over (penstock runs rm RUN), or raise {limit} of the server or of the account"
_ROOM = "it has no room in its store: " + _LIMIT
_REMEDIES: dict[int, tuple[type[BusError], str]] = {
    10002: (NoRoom, _ROOM.format(limit="max_file_store and max_mem_store")),
    10023: (NoRoom, _ROOM.format(limit="max_file_store")),
    10028: (NoRoom, _ROOM.format(limit="max_mem_store")),
    10047: (NoRoom, _ROOM.format(limit="max_file_store")),
    10026: (NoRoom, _LIMIT.format(limit="max_consumers")),
    10027: (NoRoom, _LIMIT.format(limit="max_streams")),
    10122: (NoRoom, "raise the account's limit on the bytes of one stream (max_stream_bytes)"),
    10014: (MissingStream, BOOTSTRAP),
    10059: (MissingStream, BOOTSTRAP),
    10035: (BusRefused, "give this user an account that has JetStream"),
    10039: (BusRefused, "enable JetStream for this user's account in the server's configuration"),
    10076: (BusRefused, "start nats-server with -js"),
    10003: (BusError, "server and client do not understand one another: is the server 2.12 or newer?"),
    10013: (BusError, "somebody made a consumer of that name for another purpose: remove it, then run deploy.bootstrap"),
    10058: (BusError, "somebody made it with other settings: remove it, then run deploy.bootstrap"),
    10065: (BusError, "another stream takes these subjects already: is a run of this name, or a stream of yours, in the way?"),
    10100: (BusError, "another consumer of this queue reads the same subjects: remove it, then run deploy.bootstrap"),
    10054: (BusError, "the message is larger than the stream takes; run deploy.bootstrap again if the stream is an old one"),
    **dict.fromkeys(
        (10004, 10005, 10007, 10008, 10009),
        (BusUnreachable, "the servers of the cluster are not all there, or have no leader yet: try again"),
    ),
}  # fmt: skip


def refusal(err: APIError, what: str, url: str) -> BusError:
    """Return the error of ours for an answer of JetStream's that says no.

    Args:
        err: As the client library raised it.
        what: The request, with the name of its stream, consumer or bucket.
        url: Of the server, for the text.
    """
    kind, remedy = _REMEDIES.get(err.err_code or 0, (BusError, ""))
    if not remedy and err.code == 404:
        kind, remedy = MissingStream, BOOTSTRAP
    said = f"NATS at {url} says: {err.description} (error {err.err_code})"
    return kind(f"{what}: {said}{'; ' if remedy else ''}{remedy}")
