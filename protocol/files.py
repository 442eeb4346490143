"""Read and write files of a run's folder: a reader finds the old content or the new one, also after a crash.

A rename alone protects from a killed process. Only with ``sync`` is the content on disk, and only with ``sync_folder``
the new name, when the machine loses power. No other file renames. `read_regular` reads what may be from somebody else:
never a pipe or a device, and through a link only where ``follow`` says so, as into the cache of Hugging Face.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

MOST_BYTES = 4 * 1024**3
MOST_JSON_BYTES = 448 * 1024**2  # of memory, for a JSON text and its values
_MOST_LINE_BYTES = 64 * 1024**2


def atomic_write(
    path: Path, data: bytes | str, *, sync: bool = False, sync_folder: bool = False, mode: int | None = None
) -> Path:
    """Replace a file, or create it, in one step; return its path. Raises OSError, and leaves the old file.

    With ``sync`` the content (text as UTF-8) is on disk before the file gets its name, with ``sync_folder`` the name
    is, too, when this returns. ``mode`` are the permission bits from the first byte on; None: as the process's umask
    leaves 0o666.
    """
    partial = path.with_name(f".{path.name}.{threading.get_native_id()}.partial")
    partial.unlink(missing_ok=True)  # of a killed process of the same id
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 if mode is None else mode)
    try:
        with os.fdopen(handle, "wb") as file:
            if mode is not None:
                os.fchmod(handle, mode)
            file.write(data.encode() if isinstance(data, str) else data)
            if sync:
                file.flush()
                os.fsync(handle)
        return replace(partial, path, sync_folder=sync_folder)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def replace(partial: Path, final: Path, *, sync_folder: bool = False) -> Path:
    """Give a file or folder that is whole its final name, and return this; a file of that name is replaced.

    Raises OSError, also when both are folders and ``final`` is not empty.
    """
    partial.replace(final)
    if sync_folder:
        fsync(final.parent)
    return final


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder beside that gets the name ``folder`` when the block succeeds, and is removed otherwise.

    Raises FileExistsError when ``folder`` exists.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists; name another folder, or remove it")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_regular(path: Path, most: int = MOST_JSON_BYTES // 2, *, follow: bool = False) -> bytes:
    """Return the first ``most`` bytes of a regular file.

    Raises OSError for a link, which could lead to any file here, unless ``follow``, and for no regular file: a pipe is
    waited for, a device has no end.
    """
    with open_regular(path, follow=follow) as file:
        return file.read(min(most, os.fstat(file.fileno()).st_size))  # `read` takes as much memory as it is asked for


def read_document(path: Path) -> bytes:
    """Return a file with a JSON text for a parser that takes more memory than `json_value`, such as pydantic's.

    Raises as `read_regular`, and JsonTooLarge for what may take over `MOST_JSON_BYTES`.
    """
    data = read_regular(path)
    size = 5 * len(data) + 500 * data.count(b"{") + 110 * data.count(b"[") + 64 * data.count(b",")  # measured
    if size > MOST_JSON_BYTES:
        raise JsonTooLarge(f"it may take {size} bytes of memory, the limit is {MOST_JSON_BYTES}")
    return data


def regular_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a regular file, up to one that is too long; raises as `read_regular`."""
    with open_regular(path) as file:
        while len(line := file.readline(_MOST_LINE_BYTES)) in range(1, _MOST_LINE_BYTES):
            yield line


def open_regular(path: Path, *, follow: bool = False) -> BinaryIO:
    """Open a regular file for reading; raises as `read_regular`."""
    descriptor = os.open(path, os.O_RDONLY | (0 if follow else os.O_NOFOLLOW) | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file; remove it", str(path))
    return os.fdopen(descriptor, "rb")


class JsonTooLarge(ValueError):
    """A JSON text whose values may take more memory than is allowed."""


_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # of a surrogate pair: alone it is no text, and in no UTF-8
_MOST_BYTES_OF_A_CHARACTER = 260  # by `json_bytes`, which takes longer than to read a short text


def json_bytes(text: str) -> int:
    """Return an upper bound of the memory that a JSON text and its values take: an empty list takes 72 bytes."""
    values = 4 * len(text) if "\\u" in text else sys.getsizeof(text)
    return sys.getsizeof(text) + values + 250 * text.count("{") + 80 * text.count("[") + 64 * text.count(",")


def json_value(data: bytes, most: int = MOST_JSON_BYTES, **hooks: Any) -> Any:
    """Return the value of a JSON text that is not trusted; ``hooks`` are those of `json.loads`.

    Raises ValueError for what is not valid JSON or is nested too deeply, JsonTooLarge for what may take over ``most`` bytes,
    and without ``hooks`` UnicodeEncodeError, a ValueError, for half of a surrogate pair.
    """
    text = data.decode(json.detect_encoding(data))
    if _MOST_BYTES_OF_A_CHARACTER * len(text) > most and (size := json_bytes(text)) > most:
        raise JsonTooLarge(f"it may take {size} bytes of memory, the limit is {most}")
    try:
        value = json.loads(text, **hooks)
        refuse_halves("" if hooks else text, value)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def refuse_halves(text: str, value: Any) -> None:
    """Raise UnicodeEncodeError if a text in the value of a JSON text has half of a surrogate pair."""
    if _HALF.search(text):
        json.dumps(value, ensure_ascii=False).encode()


def target_outside(path: Path, folder: Path) -> Path | None:
    """Return what a path below a folder leads to outside of it, and of a Hugging Face cache's blobs; else None."""
    target, inside = path.resolve(), folder.resolve()
    blobs = inside.parent.parent / "blobs" if inside.parent.name == "snapshots" else inside
    return None if target.is_relative_to(inside) or target.is_relative_to(blobs) else target


def links_below(folder: Path) -> list[Path]:
    """Return a folder, if it is a link, every link below it, and every file that is neither regular nor a folder."""
    links = [folder] if folder.is_symlink() else []
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            mode = (Path(parent) / name).lstat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                links.append(Path(parent) / name)
    return links
