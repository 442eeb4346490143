"""The head of a run in NATS KV, moved by compare-and-swap by one trainer only; and which versions workers can have sampled with."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from penstock.protocol import streams
from penstock.protocol.errors import BusUnreachable, CompareAndSwapFailed
from penstock.protocol.facts import Head, decode, encode
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.key_value import Entry, KeyValue
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.errors import PublicationFailed

_SWAP_DEADLINE_S = 120.0


def read_head(state: KeyValue) -> Head | None:
    entry = state.get(streams.HEAD_KEY).wait()
    return None if entry is None else decode(entry.value, Head)


class HeadKey:
    def __init__(self, bus: Bus, run_id: str) -> None:
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
        entry = self._read(deadline)
        if entry is None:
            return None
        if self.value is None or decode(entry.value, Head) != self.value:
            raise PublicationFailed(
                f"the head of run {self._run_id} is not the version that this trainer published last: another trainer "
                "publishes to the run; stop one of the two, or give it another run.id"
            )
        return entry.revision


MOST_KNOWN = 4096  # groups that are sampled by an older version are stale


class PublishedVersions:
    """Versions of all sessions of a run. Not thread-safe: the owner locks."""

    def __init__(self, announced: Collection[PolicyVersion], head: PolicyVersion | None) -> None:
        """Know what earlier sessions published.

        Args:
            announced: The announcements that the stream still has. It loses the oldest first, so nothing is known about
                versions before these.
            head: The newest complete version, which may not have been announced.
        """
        self._versions = {*announced, *(() if head is None else (head,))}
        self._unknown_before = min(self._versions, default=PolicyVersion(0))

    def add(self, version: PolicyVersion) -> None:
        self._versions.add(version)
        if len(self._versions) > 2 * MOST_KNOWN:
            self._versions = set(sorted(self._versions)[-MOST_KNOWN:])
            self._unknown_before = min(self._versions)

    def never_published(self, versions: Iterable[PolicyVersion]) -> list[PolicyVersion]:
        return sorted(v for v in {*versions} - self._versions if v >= self._unknown_before)
