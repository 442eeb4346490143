"""Anchors beside the patches: when one is due, a thread of its own writes it; no version ever waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

import structlog

from penstock.protocol.errors import PenstockError
from penstock.protocol.versions import PolicyVersion, is_newer
from penstock.protocol.weights.manifest import AnchorRef, VersionManifest
from penstock.trainer.crash_points import CrashPoint
from penstock.trainer.publishing.publish_coordinator import Shares
from penstock.trainer.publishing.snapshot import Snapshot
from penstock.trainer.publishing.version_writer import Label, VersionWriter
from penstock.trainer.publishing.weight_retention import AnchorPolicy

log = structlog.get_logger("trainer.anchors")

_MAX_ANSWERS = 3
_DENSE = 0.5  # a patch of this share of an anchor's size costs about as much as the anchor itself
# From this share on it costs more: each worker decodes it and writes it twice, after the one before; whole weights are
# written once, over whatever was there. Patches of float32 weights stay above it, of bfloat16 far below.
_POINTLESS = 0.8


class FullSnapshots:
    """Knows the newest anchor and what was published since, and has the next one written when it is due."""

    def __init__(self, writer: VersionWriter, shares: Shares, policy: AnchorPolicy) -> None:
        """Begin without an anchor."""
        self._writer = writer
        self._shares = shares
        self._policy = policy
        self._newest: AnchorRef | None = None
        self._patches: list[tuple[PolicyVersion, int]] = []  # since the newest anchor: version, bytes
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.num_written = 0

    @property
    def newest(self) -> AnchorRef | None:
        """The newest complete anchor."""
        with self._lock:
            return self._newest

    def restart(self, anchor: AnchorRef, patches: Iterable[VersionManifest] = ()) -> None:
        """Go on from an anchor and the patches that follow it."""
        with self._lock:
            if self._newest is None or not is_newer(PolicyVersion(self._newest.version), PolicyVersion(anchor.version)):
                self._newest = anchor
            self._patches += [(PolicyVersion(m.version), m.num_bytes) for m in patches]
            self._forget()

    def is_better_whole(self, patch_bytes: int) -> bool:
        """Say whether the next version should be an anchor itself: the patch is hardly smaller, or not much and one is due."""
        with self._lock:
            if self._newest is None or patch_bytes <= _DENSE * self._newest.num_bytes:
                return False
            return patch_bytes > _POINTLESS * self._newest.num_bytes or self._is_due(extra=patch_bytes)

    def follow(self, version: PolicyVersion, patch: VersionManifest) -> bool:
        """Take note of a patch that was committed; say whether its weights are to be kept, for `write_kept`."""
        with self._lock:
            self._patches.append((version, patch.num_bytes))
            due = self._is_due()
        return due and (self._thread is None or not self._thread.is_alive())

    def write_kept(self, snapshot: Snapshot, patch: VersionManifest) -> None:
        """Begin the anchor of a version whose weights were kept."""
        self._thread = threading.Thread(target=self._write, args=(snapshot, patch), name="anchor", daemon=True)
        self._thread.start()

    def close(self, deadline_s: float) -> None:
        """Wait for an anchor that is being written; one that is not finished is no loss."""
        if self._thread is not None:
            self._thread.join(deadline_s)

    def _write(self, snapshot: Snapshot, patch: VersionManifest) -> None:
        started = time.monotonic()
        try:
            written = self._writer.whole(
                Label(snapshot.version, snapshot.step, patch.epoch),
                snapshot.part.layout,
                patch.model_files,
                self._shares.store_kept_beside(snapshot.version),
                state_root=patch.state_root,
                parent=patch.parent,
                point=CrashPoint.ANCHOR_STORED,
            )
        except PenstockError as err:
            log.warning("an anchor was not written; the next due one is tried", error=str(err))
            return
        self.num_written += 1
        self.restart(written.as_anchor)
        log.info(
            "anchor",
            policy_version=snapshot.version,
            num_bytes=written.manifest.num_bytes,
            anchor_s=round(time.monotonic() - started, 3),
        )

    def _is_due(self, *, extra: int = 0) -> bool:
        assert self._newest is not None
        return self._policy.is_due(
            patch_bytes=sum(size for _, size in self._patches) + extra,
            anchor_bytes=self._newest.num_bytes,
            num_versions=len(self._patches) + (extra > 0),
        )

    def _forget(self) -> None:
        newest = self._newest
        assert newest is not None
        self._patches = [p for p in self._patches if is_newer(p[0], PolicyVersion(newest.version))]


def answer_is_due(kind: str, refused_by: set[str], num_answers: int) -> bool:
    """Say whether a version that workers refuse is published again, whole; ``num_answers`` times it was already.

    One worker is enough for a patch or an adapter: something that it needs is gone or wrong. A whole model, or an
    answer, that a single worker refuses is that worker's own trouble; what many refuse again and again is not mended
    by storing it once more.
    """
    if num_answers >= _MAX_ANSWERS:
        return False
    return len(refused_by) >= (1 if kind != "anchor" and num_answers == 0 else 2)
