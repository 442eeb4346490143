"""The head of a run in NATS KV: moved by compare-and-swap, by one trainer only."""

from __future__ import annotations

import time

from penstock.protocol import streams
from penstock.protocol.errors import BusUnreachable, CompareAndSwapFailed
from penstock.protocol.facts import Head, decode, encode
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.key_value import Entry, KeyValue
from penstock.trainer.errors import PublicationFailed

_SWAP_DEADLINE_S = 120.0


def read_head(state: KeyValue) -> Head | None:
    """Return the newest complete version of the run, None before the first."""
    entry = state.get(streams.HEAD_KEY).wait()
    return None if entry is None else decode(entry.value, Head)


class HeadKey:
    """The head as this trainer has read or moved it last."""

    def __init__(self, bus: Bus, run_id: str) -> None:
        """Read the run's head; raises MissingStream if the run was not bootstrapped."""
        self._run_id = run_id
        self._state = bus.key_value(streams.state_bucket(run_id).bucket).wait()
        self.value = read_head(self._state)

    def move(self, head: Head) -> None:
        """Move the head; a swap whose answer was lost is recognised by its value.

        Raises PublicationFailed if another trainer moved it, BusUnreachable after two minutes.
        """
        value = encode(head)
        deadline = time.monotonic() + _SWAP_DEADLINE_S
        revision = self._expected_revision(deadline)
        while True:
            try:
                self._state.swap(streams.HEAD_KEY, value, revision).wait()
                break
            except BusUnreachable:
                if time.monotonic() > deadline:
                    raise
            except CompareAndSwapFailed:
                if not self._is(value, deadline):
                    raise PublicationFailed(
                        f"another trainer moved the head of run {self._run_id} while this one published version "
                        f"{head.version}; stop one of the two, or give it another run.id"
                    ) from None
                break
        self.value = head

    def _read(self, deadline: float) -> Entry | None:
        while True:
            try:
                return self._state.get(streams.HEAD_KEY).wait()
            except BusUnreachable:
                if time.monotonic() > deadline:
                    raise

    def _is(self, value: bytes, deadline: float) -> bool:
        entry = self._read(deadline)
        return entry is not None and entry.value == value

    def _expected_revision(self, deadline: float) -> int | None:
        """Return the revision of the head in `value`, None before the first version; raises PublicationFailed."""
        entry = self._read(deadline)
        if entry is None:
            return None
        if self.value is None or decode(entry.value, Head) != self.value:
            raise PublicationFailed(
                f"the head of run {self._run_id} is not the version that this trainer published last: another trainer "
                "publishes to the run; stop one of the two, or give it another run.id"
            )
        return entry.revision
