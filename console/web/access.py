"""Who may use the API: bearer tokens with a role, of which one file holds only the SHA-256.

| role | may |
|---|---|
| `read` | read runs, their figures and their texts |
| `run` | also create, start, pause, resume and stop runs |
| `admin` | also delete runs, and create and revoke tokens |

A line of the file is ``NAME ROLE sha256:HEX [EXPIRES]``, the last in Unix seconds. The file has mode 0600 and is read again
when it changes, so that a token that is added or revoked counts at once. A browser gets a token of its own through a
one-time link, as a cookie that no script can read.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from penstock.console import connections
from penstock.protocol.errors import ConfigError
from penstock.protocol.files import atomic_write

TOKENS = "console-tokens"  # the default file, in the folder of runs
BROWSER_S = 30 * 24 * 3600.0  # a browser asks for a new link after this long
LINK_S = 12 * 3600.0  # a one-time link that was not used ends after this long
MAX_TOKENS = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_LINE = re.compile(r"(\S+) (read|run|admin) sha256:([0-9a-f]{64})(?: (\d{1,12}))?")


class Role(IntEnum):
    """What a caller may do; each role includes the lower ones."""

    READ = 1
    RUN = 2
    ADMIN = 3

    @property
    def text(self) -> str:
        """The role as it is written in files and errors."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request."""

    name: str
    role: Role


@dataclass(frozen=True, slots=True)
class _Token:
    name: str
    role: Role
    digest: bytes
    expires: int = 0  # Unix seconds; 0: never

    def line(self) -> str:
        end = f" {self.expires}" if self.expires else ""
        return f"{self.name} {self.role.text} sha256:{self.digest.hex()}{end}\n"


class Access:
    """The tokens in one file, and the one-time links of this process."""

    def __init__(self, file: Path) -> None:
        """Create the file if there is none; raises ConfigError for one that others may read, or with a wrong line."""
        self.file = file
        self._lock = threading.Lock()
        self._seen: tuple[int, int, int] = (0, 0, 0)
        self._tokens: list[_Token] = []
        self._links: dict[bytes, tuple[Role, float]] = {}
        self._create()
        self._tokens = _read(self.file)

    def caller(self, token: str | None) -> Caller | None:
        """Return the caller with a token, compared in constant time; None for an unknown or expired one."""
        given, found = _digest(token or ""), None
        now = time.time()
        for known in self._current():
            is_equal = hmac.compare_digest(known.digest, given)
            if is_equal and (not known.expires or known.expires > now):
                found = Caller(known.name, known.role)
        return found

    def add(self, name: str, role: Role, *, lasts_s: float = 0.0) -> str:
        """Create a token and return it; only its SHA-256 is stored. Raises ConfigError for a name that is taken or invalid."""
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"token name {name!r}: expected 1 to 64 of A-Z, a-z, 0-9, '_', '.', '-'; choose another name"
            )
        token = secrets.token_urlsafe(32)
        expires = int(time.time() + lasts_s) if lasts_s else 0
        with self._changing() as tokens:
            if any(one.name == name for one in tokens):
                raise ConfigError(
                    f"token {name!r} exists in {self.file}; revoke it first: penstock console revoke {name}"
                )
            if len(tokens) >= MAX_TOKENS:
                raise ConfigError(f"{self.file} has {len(tokens)} tokens, the limit is {MAX_TOKENS}; revoke some")
            tokens.append(_Token(name, role, _digest(token), expires))
        return token

    def revoke(self, name: str) -> bool:
        """Remove a token; return False if there is none of that name."""
        with self._changing() as tokens:
            kept = [one for one in tokens if one.name != name]
            is_there = len(kept) < len(tokens)
            tokens[:] = kept
        return is_there

    def revoke_token(self, token: str) -> None:
        """Remove the token itself, as when a browser logs out."""
        digest = _digest(token)
        with self._changing() as tokens:
            tokens[:] = [one for one in tokens if not hmac.compare_digest(one.digest, digest)]

    def one_time_link(self, role: Role = Role.ADMIN) -> str:
        """Return a code that one browser may exchange for a token, once."""
        code = secrets.token_urlsafe(32)
        with self._lock:
            self._links[_digest(code)] = (role, time.monotonic() + LINK_S)
        return code

    def redeem(self, code: str) -> str | None:
        """Return a browser's token for a one-time code, which ends with that; None for a used, old or unknown one."""
        with self._lock:
            role, until = self._links.pop(_digest(code), (Role.READ, 0.0))
        if until < time.monotonic():
            return None
        return self.add(f"browser-{secrets.token_hex(6)}", role, lasts_s=BROWSER_S)

    def _current(self) -> list[_Token]:
        """Return the tokens of the file as it is now; those read last when it cannot be read."""
        with self._lock:
            try:
                if (seen := _stamp(self.file)) != self._seen:
                    self._tokens, self._seen = _read(self.file), seen
            except FileNotFoundError:
                self._tokens, self._seen = [], (0, 0, 0)  # somebody removed it: no token is known any more
            except (OSError, ConfigError):
                pass
            return self._tokens

    def _create(self) -> None:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as err:
            raise ConfigError(
                f"the token file {self.file} cannot be written ({err.strerror}); set --tokens to another file"
            ) from None

    @contextmanager
    def _changing(self) -> Iterator[list[_Token]]:
        """Give the tokens to change, without expired ones, and store them in one step; other processes wait."""
        with self.file.with_name(self.file.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            now = time.time()
            tokens = [one for one in _read(self.file) if not one.expires or one.expires > now]
            yield tokens
            atomic_write(self.file, "".join(one.line() for one in tokens), sync=True, mode=0o600)


def file_of(arguments: Sequence[str], environ: Mapping[str, str], given: Path | None) -> Path:
    """Return the file of the tokens: the given one, or that in the folder of runs. Raises ConfigError."""
    return (given or connections.find(arguments, environ).settings.run.dir / TOKENS).absolute()


def _read(file: Path) -> list[_Token]:
    mode = file.stat().st_mode & 0o777
    if mode & 0o077:
        raise ConfigError(f"the token file {file} has mode {mode:03o}, expected 600; run: chmod 600 {file}")
    tokens: list[_Token] = []
    for number, line in enumerate(file.read_text("utf-8", "replace").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line.strip())
        if found is None or not _NAME.fullmatch(found[1]):
            raise ConfigError(
                f"{file}:{number}: expected NAME ROLE sha256:HEX [EXPIRES] with a role of read, run or admin; remove the line, "
                "and create tokens with: penstock console token NAME"
            )
        tokens.append(_Token(found[1], Role[found[2].upper()], bytes.fromhex(found[3]), int(found[4] or 0)))
    return tokens


def _stamp(file: Path) -> tuple[int, int, int]:
    stat = file.stat()
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
