"""Change a value of a bucket that several processes change, by compare-and-swap."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.protocol.errors import CompareAndSwapFailed
from penstock.protocol.transport.key_value import KeyValue

V = TypeVar("V")

_TRIES = 16  # that many writers would have to meet in a few milliseconds


async def change_value(
    store: KeyValue,
    key: str,
    read: Callable[[], Awaitable[tuple[V, int | None]]],
    change: Callable[[V], V],
    write: Callable[[V], bytes],
) -> tuple[V, int | None]:
    """Return the changed value and its revision; ``change`` is called again with what another process wrote meanwhile.

    Nothing is written if ``change`` returns an equal value. Raises CompareAndSwapFailed if others are always faster, and
    what ``read`` and ``change`` raise.

    Args:
        store: The bucket.
        key: The key of the value.
        read: Returns the present value and its revision; None: it does not exist.
        change: Returns the value to write.
        write: Returns a value as bytes.
    """
    tries_left = _TRIES
    while True:
        before, revision = await read()
        after = change(before)
        if after == before:
            return before, revision
        tries_left -= 1
        try:
            return after, await store.swap(key, write(after), revision)
        except CompareAndSwapFailed:
            if not tries_left:
                raise
