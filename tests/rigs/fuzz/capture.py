"""What the attackers start from: the newest real messages and objects of the run, as an administrator's connection sees them."""

from __future__ import annotations

import hashlib
import random
import threading
from collections import OrderedDict, defaultdict, deque
from typing import Any

from tests.rigs.fuzz.mutate_facts import unpack

from penstock.protocol.errors import BlobError
from penstock.protocol.transport.blobs import Blobs

_KEPT = 400
_OBJECTS = 64
Message = tuple[str, bytes]  # subject, payload


class Corpus:
    """Real messages by kind, and the bytes of the objects they name. Thread-safe."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.num_seen = 0
        self.newest_step = 0  # by the trainer's own events
        self.prompts: dict[str, dict[str, Any]] = {}  # group id -> the task as the trainer issued it
        self._messages: dict[str, deque[Message]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._objects: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, subject: str, data: bytes) -> None:
        """Add a message that a service of the run sent."""
        kind = kind_of(subject)
        with self._lock:
            self.num_seen += 1
            self._messages[kind].append((subject, data))
            if kind == "events" and subject.endswith(".step"):
                self.newest_step = max(self.newest_step, int(unpack(data)[1]["data"]["step"]))
            if kind == "tasks":
                for task in unpack(data)[1]["tasks"]:
                    self.prompts[task["group_id"]] = task

    def draw(self, rng: random.Random, kind: str) -> Message | None:
        """Return one of the newest real messages of a kind, mostly a very new one; None before the first."""
        with self._lock:
            known = self._messages.get(kind)
            if not known:
                return None
            newest = min(len(known), 12 if rng.random() < 0.7 else len(known))
            return known[len(known) - 1 - rng.randrange(newest)]

    def fetch(self, ref: dict[str, Any], blobs: Blobs) -> bytes | None:
        with self._lock:
            if (known := self._objects.get(ref["key"])) is not None:
                return known
        try:
            data = blobs.get_unverified(ref["key"])
        except BlobError:
            return None
        if hashlib.sha256(data).hexdigest() != ref["sha256"]:
            return None
        with self._lock:
            self._objects[ref["key"]] = data
            while len(self._objects) > _OBJECTS:
                self._objects.popitem(last=False)
        return data


def kind_of(subject: str) -> str:
    """Return the kind of a subject: a stage, ``weights.<what>``, or ``kv.<bucket>.<first token of the key>``."""
    parts = subject.split(".")
    if parts[0] == "$KV":
        return f"kv.{parts[1].rpartition('-')[2]}.{parts[2]}"
    return f"weights.{parts[3]}" if parts[2] == "weights" else parts[2]
