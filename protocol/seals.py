"""Seals: which files of a run's folder this user wrote at their place, so that what they name may be used.

A folder of runs may hold a folder that somebody else sent. What it names (commands, code, addresses, files of secrets)
is used only from a sealed file. A seal is the HMAC-SHA256 of the file's absolute path and content under a key of this
user, which is outside of every folder of runs: ``$PENSTOCK_SEAL_KEY_FILE``, else ``penstock/seal.key`` below
``$XDG_STATE_HOME`` or ``~/.local/state``, and stored as ``.NAME.seal``; a copied, moved or changed file has none.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

from penstock.protocol.errors import ConfigError, UntrustedFolder
from penstock.protocol.files import atomic_write, read_regular

KEY_FILE = "PENSTOCK_SEAL_KEY_FILE"
_KEY_BYTES = 32
_MOST_SEALS = 16  # of a file, each of another user
_SEAL_CHARS = 64
_PARTS = frozenset({"store", "trackers"})  # folders inside of a run's whose files are sealed


def write(path: Path, data: bytes | str, *, at: Path | None = None, sync: bool = False, optional: bool = False) -> None:
    """Replace a file and its seal. Killed at any time, this leaves the old content or the new, and a seal that fits.

    ``at`` is the path that the file will have, where its folder is renamed later. Raises ConfigError when this user can
    have no key; with ``optional`` the file is written without a seal then, and a warning is logged. Raises OSError.
    """
    content = data.encode() if isinstance(data, str) else data
    try:
        seals = {_seal(at or path, content)}
    except ConfigError as err:
        if not optional:
            raise
        import structlog  # noqa: PLC0415  verbs that only list files start without it

        log = structlog.get_logger("protocol.seals")
        log.warning("a file of the run has no seal: the console asks before it uses what it names", error=str(err))
        seals = set[str]()
    with contextlib.suppress(OSError):
        earlier = read_regular(path)
        seals |= {_seal(path, earlier)} if seals and _fits(path, earlier) else set()
    atomic_write(_seal_file(path), "\n".join(sorted(seals)), sync=sync)
    atomic_write(path, content, sync=sync)


def seal(path: Path, content: bytes) -> None:
    """Seal the content of a file, beside the seals of other users. Raises ConfigError, OSError."""
    seals = dict.fromkeys([_seal(path, content), *_stored(path)])
    atomic_write(_seal_file(path), "\n".join([*seals][:_MOST_SEALS]), sync=True)


def digest(key: str, value: str) -> str:
    """Return the HMAC of a setting that is not stored, to notice a change; empty when this user can have no key."""
    try:
        return _mac(key.encode(), value.encode())[:32]
    except ConfigError:
        return ""


def changed_ns(path: Path) -> int:
    """Return when the seal of a file was last changed, in ns since 1970; 0 for a file without one."""
    try:
        return _seal_file(path).lstat().st_mtime_ns
    except OSError:
        return 0


def read(path: Path, most: int = 1 << 26) -> bytes | None:
    """Return the content of a sealed file, None where there is no file.

    Raises UntrustedFolder unless this user sealed it here, with the error of the key when this user can have none.
    """
    if not os.path.lexists(path):
        return None
    try:
        content = read_regular(path, most)
        if _fits(path, content):
            return content
    except OSError:
        pass  # a link, a pipe, or not readable: not what this user wrote
    except ConfigError as err:
        raise UntrustedFolder(f"{path} is not used, since no seal can be checked: {err}") from None
    folder = path.parent.parent if path.parent.name in _PARTS else path.parent
    raise UntrustedFolder(
        f"{path} was not written here by this user, or was changed or moved since: what it names, such as code, is not "
        f"used; if you trust it, see and accept it with: penstock runs trust {folder.name} run.dir={folder.parent}"
    )


def is_sealed(path: Path) -> bool:
    """Return True for a file that this user sealed at this place and that has not changed since."""
    try:
        return read(path) is not None
    except UntrustedFolder:
        return False


def _fits(path: Path, content: bytes) -> bool:
    expected = _seal(path, content)
    return any(hmac.compare_digest(expected, text) for text in _stored(path))


def _stored(path: Path) -> list[str]:
    try:
        stored = read_regular(_seal_file(path), 4096).decode("ascii").split()
        return [text for text in stored if len(text) == _SEAL_CHARS]
    except (OSError, ValueError):
        return []


def _seal(path: Path, content: bytes) -> str:
    place = os.fsencode(os.path.realpath(path.parent) + os.sep + path.name)
    return _mac(place, content)


def _mac(name: bytes, content: bytes) -> str:
    return hmac.digest(_key(os.environ), hashlib.sha256(name).digest() + content, "sha256").hex()


def _seal_file(path: Path) -> Path:
    return path.with_name(f".{path.name}.seal")


def _key(environ: Mapping[str, str]) -> bytes:
    """Return the key of this user, which is made when it is needed first. Raises ConfigError."""
    named = environ.get(KEY_FILE)
    try:
        state = environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        path = Path(named) if named else Path(state) / "penstock" / "seal.key"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=path.parent) as new, contextlib.suppress(FileExistsError):
                new.write(secrets.token_bytes(_KEY_BYTES))
                new.flush()
                os.link(new.name, path)  # another process may be faster: its key is taken
        if (mode := path.stat().st_mode) & 0o022:
            raise ConfigError(f"others can write the key {path} (mode {mode & 0o777:03o}); run: chmod go-w {path}")
        key = path.read_bytes()
    except (OSError, RuntimeError) as err:
        raise ConfigError(
            f"the key with which files of runs are sealed cannot be read or made ({err}); name another file, in a "
            f"folder that stays: head -c {_KEY_BYTES} /dev/urandom > FILE; chmod 600 FILE; export {KEY_FILE}=FILE"
        ) from None
    if len(key) < _KEY_BYTES:
        raise ConfigError(
            f"the key {path} has {len(key)} bytes, expected at least {_KEY_BYTES}; remove it, and trust your runs again"
        )
    return key
