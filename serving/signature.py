"""Signatures of the requests to an endpoint, by Standard Webhooks (https://www.standardwebhooks.com).

``webhook-signature: v1,base64(HMAC-SHA256(key, "{webhook-id}.{webhook-timestamp}.{body}"))``, one for every
key, separated by a space. The id is the call's idempotency key, the same for all its tries; the timestamp is
the try's. An endpoint checks the signature in constant time and refuses timestamps that are minutes old.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.protocol.errors import ConfigError
from penstock.protocol.secret_values import content_of

PREFIX = "whsec_"
TOLERANCE_S = 300  # as the specification's libraries have it
_MIN_BYTES, _MAX_BYTES = 24, 64  # as the specification has it
_TIMESTAMP = re.compile(r"[0-9]{1,12}")


class BadSignature(ValueError):
    """A request that was not signed with one of the keys, or not recently; the text never shows a key."""


def key_bytes(secret: str) -> bytes:
    """Return the key of a secret ``whsec_<base64>``; raises ValueError, which never shows the secret."""
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True) if secret.startswith(PREFIX) else b""
    except binascii.Error:
        key = b""
    if not _MIN_BYTES <= len(key) <= _MAX_BYTES:
        raise ValueError(
            f"a signing secret is {PREFIX} and the base64 of {_MIN_BYTES} to {_MAX_BYTES} random bytes; make one: "
            "python -c \"import base64, secrets; print('whsec_' + base64.b64encode(secrets.token_bytes(32)).decode())\""
        )
    return key


def read_secrets(file: Path | None, key: str) -> tuple[str, ...]:
    """Return the signing keys of a file, if any; raises ConfigError that names the setting ``key``, and shows no key."""
    if file is None:
        return ()
    secrets = tuple(content_of(file, key).split())
    try:
        for secret in secrets:
            key_bytes(secret)
    except ValueError as err:
        raise ConfigError(f"{key} = {file}: {err}") from None
    if not 1 <= len(secrets) <= 2:
        raise ConfigError(f"{key} = {file}: expected one or two keys, got {len(secrets)}")
    return secrets


def headers(secrets: Sequence[str], *, message_id: str, body: bytes, timestamp: int | None = None) -> dict[str, str]:
    """Return the headers of a signed request; ``timestamp`` in whole seconds since the epoch; None: now."""
    if not secrets:
        return {}
    timestamp = int(time.time()) if timestamp is None else timestamp
    signed = f"{message_id}.{timestamp}.".encode() + body
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{_sign(key_bytes(secret), signed)}" for secret in secrets),
    }


def verify(secrets: Sequence[str], headers: Mapping[str, str], body: bytes, *, now_s: float) -> str:
    """Return the id of a request that was signed with one of the secrets; raises BadSignature.

    ``headers`` are the request's headers with names in lower case, ``body`` the bytes as received, and ``now_s``
    seconds since the epoch. The id is the same for all tries of a call.
    """
    message_id, timestamp = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    signatures = headers.get("webhook-signature", "")
    if not (message_id and timestamp and signatures):
        raise BadSignature("the request is not signed: webhook-id, webhook-timestamp and webhook-signature are needed")
    if not _TIMESTAMP.fullmatch(timestamp) or abs(now_s - int(timestamp)) > TOLERANCE_S:
        raise BadSignature(
            f"webhook-timestamp {timestamp[:20]!r} is not within {TOLERANCE_S} s of now; check both clocks"
        )
    signed = f"{message_id}.{timestamp}.".encode() + body
    right = [f"v1,{_sign(key_bytes(secret), signed)}".encode() for secret in secrets]
    for signature in signatures.split(" "):
        if any(hmac.compare_digest(signature.encode(), expected) for expected in right):
            return message_id
    raise BadSignature("the request was signed with another secret, or changed in transit")


def _sign(key: bytes, signed: bytes) -> str:
    return base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
