"""Access to the API: tokens, roles, and owners of endpoints. Pure.

| role | may |
|---|---|
| `read` | read endpoints, rewards and metrics |
| `register` | also score and test, and register, renew, drain and remove its own endpoints |
| `admin` | also change the endpoints of all owners |

A token is given as it is, or as ``sha256:`` and the 64 hexadecimal digits of its SHA-256, so that the service's file lets
nobody in. A token has a name; endpoints belong to the name that registered them. Without any token (loopback only) every
process on this machine is admin, and secrets are refused: a process that takes over the name of an endpoint could
have its signed requests sent elsewhere.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from penstock.reward_service.endpoints.endpoint import Endpoint
from penstock.reward_service.errors import NotAllowed

_MIN_CHARS = 16  # a shorter token can be guessed
_HASHED = "sha256:"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


class Role(IntEnum):
    """What a caller may do; each role includes the lower ones."""

    READ = 1
    REGISTER = 2
    ADMIN = 3


@dataclass(frozen=True, slots=True)
class Caller:
    name: str
    role: Role
    has_token: bool = True

    def check_owns(self, endpoint: Endpoint) -> None:
        if self.role is not Role.ADMIN and endpoint.owner != self.name:
            raise NotAllowed(
                f"endpoint {endpoint.name!r} belongs to {endpoint.owner!r}, your token is {self.name!r}; use its owner's token"
            )


ANONYMOUS = Caller("", Role.ADMIN, has_token=False)


@dataclass(frozen=True, slots=True)
class _Token:
    digest: bytes
    caller: Caller


class Access:
    """The tokens of one service; only digests of them are kept."""

    def __init__(self, tokens: Sequence[tuple[str, Role, str]]) -> None:
        """``tokens``: name, role and token of each caller, or its hash; none: every caller is admin."""
        self._tokens = [_Token(_digest_of(token), Caller(name, role)) for name, role, token in tokens]

    @property
    def is_open(self) -> bool:
        return not self._tokens

    def caller(self, token: str | None) -> Caller | None:
        """Return the caller with this token, compared in constant time; None for an unknown token."""
        if self.is_open:
            return ANONYMOUS
        given, found = _digest(token or ""), None
        for known in self._tokens:
            if hmac.compare_digest(known.digest, given):
                found = known.caller
        return found


def read_tokens(text: str) -> list[tuple[str, Role, str]]:
    """Read lines ``NAME ROLE TOKEN``; empty lines and those that begin with # are skipped.

    Raises ValueError with the number of the line, never its text.
    """
    found: list[tuple[str, Role, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 3 or words[1].upper() not in Role.__members__ or not _NAME.fullmatch(words[0]):
            raise ValueError(f"line {number} is not NAME ROLE TOKEN, with a role of read, register or admin")
        if len(words[2]) < _MIN_CHARS:
            raise ValueError(f"line {number}: the token has fewer than {_MIN_CHARS} characters")
        if words[2].startswith(_HASHED) and not _DIGEST.fullmatch(words[2].removeprefix(_HASHED)):
            raise ValueError(f"line {number}: after {_HASHED} come 64 hexadecimal digits, as sha256sum prints them")
        if any(words[0] == name for name, _, _ in found):
            raise ValueError(f"line {number}: {words[0]} has a token already")
        found.append((words[0], Role[words[1].upper()], words[2]))
    return found


def hashed(token: str) -> str:
    return _HASHED + _digest(token).hex()


def _digest_of(given: str) -> bytes:
    """Return the digest of a token that was configured, as it is or hashed; what a caller sends is never taken for a hash."""
    digest = given.removeprefix(_HASHED)
    return bytes.fromhex(digest) if digest != given and _DIGEST.fullmatch(digest) else _digest(given)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
