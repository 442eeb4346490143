"""The traces of the groups that a trainer has received, by group id, until they are trained or dropped."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from penstock.protocol.facts import Task
from penstock.protocol.traces.spans import SpanContext, Value, new_context
from penstock.protocol.traces.traces import NO_TRACES, Traces

_MAX_GROUPS = 50_000


@dataclass(frozen=True, slots=True)
class _Held:
    context: SpanContext
    since: float


@dataclass(slots=True)
class HeldGroups:
    """Remembers when each traced group arrived; thread-safe. Without traces it does nothing."""

    traces: Traces = NO_TRACES
    _groups: dict[str, _Held] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def issued(self, traceparent: str, tasks: Iterable[Task], *, pack_id: str, started: float) -> None:
        """Record the first span of each group's trace: its task is published."""
        if not self.traces.is_on:
            return
        for task in tasks:
            if (context := self.traces.group(traceparent, task.group_id)) is not None:
                attributes: dict[str, Value] = {
                    "group_id": task.group_id,
                    "pack_id": pack_id,
                    "split": task.split,
                    "attempt": task.attempt,
                    "issued_version": task.issued_version,
                    "group_size": task.group_size,
                    "prompt_tokens": len(task.prompt_ids),
                }
                self.traces.record("issue", context, None, started, attributes)

    def arrived(self, traceparent: str, group_ids: Iterable[str]) -> None:
        """Remember groups that arrived scored."""
        if not self.traces.is_on:
            return
        now = time.time()
        with self._lock:
            for group_id in group_ids:
                if (context := self.traces.group(traceparent, group_id)) is not None:
                    self._groups[group_id] = _Held(context, now)
            while len(self._groups) > _MAX_GROUPS:
                del self._groups[next(iter(self._groups))]

    def ended(self, group_id: str, outcome: str, **attributes: Value) -> None:
        """Record that an arrived group is dropped or evaluated, from its arrival until now."""
        if self.traces.is_on:
            with self._lock:
                held = self._groups.pop(group_id, None)
            if held is not None:
                self.traces.record_in_group(outcome, held.context, held.since, {"group_id": group_id, **attributes})

    def trained(self, group_ids: Iterable[str], started: float, attributes: Mapping[str, Value]) -> None:
        """Record a step that links to its groups, and in each group's trace that it was trained."""
        if not self.traces.is_on:
            return
        with self._lock:
            held = {group_id: self._groups.get(group_id) for group_id in group_ids}
        traced = {group_id: one for group_id, one in held.items() if one is not None}
        step = new_context()
        links = tuple(one.context for one in traced.values())
        self.traces.record("train step", step, None, started, {**attributes, "num_groups": len(held)}, links=links)
        for group_id, one in traced.items():
            own = {**attributes, "group_id": group_id, "step_trace_id": step.trace_id}
            self.traces.record_in_group("admitted", one.context, one.since, {"group_id": group_id}, ended=started)
            self.traces.record_in_group("train", one.context, started, own)
