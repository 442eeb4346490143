"""Read one run: its messages while it is looked at, its folder, and its groups in S3; never write, never wait for the run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.console import connections
from penstock.console.connections import NamedRun
from penstock.console.live import run_snapshot
from penstock.console.live.run_snapshot import Snapshot
from penstock.console.live.watcher import Watcher
from penstock.console.record import stored_run
from penstock.console.report import curves
from penstock.console.tools import runs
from penstock.console.web.reading import documents
from penstock.console.web.reading.page_view import PageView
from penstock.console.web.reading.recorded_groups import Entry, QueryRefused, Storing
from penstock.protocol import streams
from penstock.protocol.errors import BusError, ConfigError, PenstockError
from penstock.protocol.secret_values import hide
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus

if TYPE_CHECKING:
    from penstock.console.web.reading.stored_groups import StoredGroups
    from penstock.console.web.reading.stored_logprobs import Current
    from penstock.protocol.trajectory import Group

_CONNECT_S = 3.0
_RETRY_S = 10.0  # between two attempts to reach the servers of a run
_GIVE_UP_S = 30.0  # of a connection that is down: a local run that is started again has other ports
_CATCH_UP_S = 60.0
_FIRST_S = 2.0  # that the first request waits for it
_BLOBS_S = 10.0
_WAIT_S = 10.0  # for another request that reads the groups of the same run
_REREAD_S = 2.0  # of metrics.jsonl, at most so often
_CONFIG_S = 60.0  # how long the settings that `known_config` read are used
_PERIOD_S = 2.0  # of heartbeats and queue depths: the page asks no more often
_GATHER_S = 0.5  # of the messages of a stream
_STATE_S = 2.0  # how long what the folder says of the run's state is used


class RunBusy(BusError):
    """Other requests read the same run."""


class RunReading:
    """One run that is looked at. Every method takes its lock; close it after the last request."""

    def __init__(self, run: NamedRun, *, clock: Callable[[], float] = time.time) -> None:
        """Read the run's folder; `step` connects, if the settings of its servers are this user's. Raises ConfigError."""
        self.run, self.run_id = run, run.id
        self._clock = clock
        self._lock = threading.RLock()
        self.folder = run.folder
        self._bus: Bus | None = None
        self._watcher: Watcher | None = None
        self._groups: StoredGroups | None = None
        self._tried_at = float("-inf")
        self._described: tuple[float, str] = (float("-inf"), "")
        self._metrics_seen: tuple[int, int] | None = None  # size and time of metrics.jsonl
        self.problem = ""  # why there is no connection
        self._read_again_at = 0.0
        self._config: tuple[float, dict[str, Any]] = (float("-inf"), {})
        self._is_known = False  # it has streams
        self._catching_up: threading.Thread | None = None
        self._caught_up: tuple[Bus, Watcher, PageView] | None = None
        self._view = self._new_view()

    @property
    def exists(self) -> bool:
        return self.folder.is_dir() or self._is_known

    def step(self) -> None:
        """Fold what has arrived, connect if there is no connection; called about twice a second."""
        with self._lock:
            if self._watcher is not None and self._bus is not None and self._bus.down_s > _GIVE_UP_S:
                self._disconnect()
            self._take_over()
            if self._watcher is not None:
                self._watcher.step()
            elif self._catching_up is None and time.monotonic() - self._tried_at > _RETRY_S:
                self._connect()
            if self._watcher is None:
                self._read_folder()

    def close(self) -> None:
        catching_up = self._catching_up
        if catching_up is not None:
            catching_up.join(_CATCH_UP_S + 1.0)
        with self._lock:
            self._take_over()
            self._disconnect()

    # ── documents ─────────────────────────────────────────────────────────────────────────────

    def summary(self) -> dict[str, Any]:
        with self._lock:
            document = documents.summary(
                self._view, self._snapshot(), state=self._state(), is_live=self._watcher is not None
            )
            series, command = self._view.series, curves.command_of(self.folder)
            kind = command or (curves.LOG if series and not self._view.steps else "train")
            failed = runs.failure_of(self.folder)
            problem = f"the run failed: {failed[0]}\n{failed[1]}" if failed else self.problem
            evaluations = documents.evaluations(self._view)
            step = document["step"] or series.last_step or 0
            return document | {"problem": problem, "evaluations": evaluations, "kind": kind, "step": step}

    def metrics(self, names: Sequence[str] | None, *, first: int, last: int | None, points: int) -> dict[str, Any]:
        with self._lock:
            series = self._view.series.sampled(names, first=first, last=last, points=points)
            return {"run_id": self.run_id, **series, "names": self._view.series.names}

    def checkpoints(self) -> list[dict[str, Any]]:
        """Return those that a script logged, each once; of a run its versions."""
        logged = {row.get("path"): row for row in curves.rows(self.folder / curves.CHECKPOINTS)}
        with self._lock:
            return list(logged.values()) or documents.checkpoints(self._view, curves.rows(self.folder / "evaluations"))

    def services(self) -> dict[str, Any]:
        with self._lock:
            snapshot = self._snapshot()
            if self._watcher is None and self._state() == "running":  # the folder has those of an earlier session
                snapshot = replace(snapshot, services=())
            return documents.services(self._view, snapshot)

    def versions(self, *, before: int | None, limit: int) -> dict[str, Any]:
        with self._lock:
            return documents.versions(self._view, before=before, limit=limit)

    def rewards(self) -> dict[str, Any]:
        """Return what is known of the rewards; ``problem`` says why there is no distribution."""
        recent, num_steps, problem = {}, 0, ""
        try:
            with self.groups() as groups:
                recent, num_steps = groups.recent_rewards()
        except PenstockError as err:
            problem = str(err)
        with self._lock:
            of_now = {"problem": problem, "is_live": self._watcher is not None}
            return documents.rewards(self._view, recent, num_steps) | of_now

    def config(self) -> dict[str, Any]:
        """Return the settings with their origins: of the folder, else of the record. Raises ConfigError."""
        if (stored := runs.stored_config(self.folder)) is not None:
            return stored
        with self.groups() as groups:
            text = groups.config()
        try:
            document = json.loads(text or b"null")
        except (ValueError, RecursionError) as err:
            raise ConfigError(f"the settings of run {self.run_id} cannot be read: {err}") from None
        if not isinstance(document, dict):
            raise ConfigError(
                f"run {self.run_id} has no settings in its folder, and none in the newest part of its record"
            )
        return document | {"settings": hide((), document.get("settings"))}

    def known_config(self) -> dict[str, Any]:
        if time.monotonic() - self._config[0] > _CONFIG_S:
            try:
                self._config = (time.monotonic(), self.config())
            except PenstockError:
                self._config = (time.monotonic(), {})
        return self._config[1]

    def group(self, group_id: str, chapter: int | None) -> tuple[Entry, Group | None, Current | None, str]:
        """Return a group of the record, its tokens and the trainer's log-probabilities of them, or why there are no tokens."""
        with self._lock:
            num_lost = self._view.series.latest("logprobs_lost")
        storing = Storing.of(self.known_config(), num_lost)
        with self.groups() as groups:
            entry = groups.find(group_id, chapter=chapter)
            stored, problem = groups.group(entry)
            current = None if stored is None else groups.logprobs.of_group(entry, stored, storing)
        return entry, stored, current, problem

    @contextmanager
    def groups(self) -> Iterator[StoredGroups]:
        """Give the run's groups to one request at a time. Raises PenstockError."""
        with self._lock:
            if self._groups is None:
                from penstock.console.web.reading.stored_groups import StoredGroups  # noqa: PLC0415 # numpy and pyarrow

                s3, files = self.run.settings.s3, stored_run.store_files(self.run)
                if files is None and not connections.may_answer(s3.endpoint):
                    raise QueryRefused(
                        f"the object store of run {self.run_id} does not answer at {s3.endpoint}; set s3.endpoint"
                    )
                blobs = files or Blobs(s3, deadline_s=_BLOBS_S)
                self._groups = StoredGroups(self.run_id, self.folder, blobs, self._checkpoint)
                self._groups_lock = threading.Lock()
            groups, lock = self._groups, self._groups_lock
        if not lock.acquire(timeout=_WAIT_S):
            raise RunBusy("another request is reading the groups of this run; try again")
        try:
            yield groups
        finally:
            lock.release()

    # ── inside ────────────────────────────────────────────────────────────────────────────────

    def _checkpoint(self) -> bytes | None:
        bus = self._bus
        return None if bus is None else connections.stored_state(bus, self.run_id, streams.CHECKPOINT_KEY)

    def _snapshot(self) -> Snapshot:
        is_over = self._watcher is None and self._view.last_at > 0  # of a run that is not watched, time has stopped
        return self._view.snapshot(self._view.last_at if is_over else self._clock())

    def _state(self) -> str:
        now = time.monotonic()
        if now - self._described[0] > _STATE_S:
            state = "finished" if self._view.finished else "idle"  # of a run without a folder here
            if self.folder.is_dir():
                state = runs.state_of(self.folder)
            if state != "finished" and any(
                service.role == "trainer" and service.alive for service in self._snapshot().services
            ):
                state = "running"
            self._described = (now, state)
        return self._described[1]

    def _new_view(self) -> PageView:
        view = PageView(self.run_id)
        totals = run_snapshot.load_totals(self.folder)
        if totals is not None:
            view.restore(totals)
        return view

    def _read_folder(self) -> None:
        """Show what metrics.jsonl holds, again when it has changed; used while there is no connection."""
        if time.monotonic() < self._read_again_at:
            return
        seen = curves.metrics_stamp(curves.metrics_file(self.folder))
        if seen is None or seen == self._metrics_seen:
            return
        self._metrics_seen = seen
        started = time.monotonic()
        view = self._new_view()
        view.add_recorded(curves.rows_of(self.folder))
        self._view = view
        self._read_again_at = time.monotonic() + max(_REREAD_S, 20 * (time.monotonic() - started))

    def _connect(self) -> None:
        self._tried_at = time.monotonic()
        try:
            settings = self.run.settings
            if not connections.may_answer(settings.nats.url):
                self._say(f"no NATS server answers at {settings.nats.url}: figures are those of the run's folder")
                return
            self._groups = None
            bus = Bus.connect(settings.nats, name="console-page", deadline_s=_CONNECT_S)
        except (BusError, ConfigError) as err:
            self._say(str(err))
            return
        try:
            view = self._new_view()
            watcher = Watcher(bus, view, clock=self._clock, period_s=_PERIOD_S, gather_s=_GATHER_S)
        except BusError as err:
            self._say(str(err))
            bus.close()
            return
        # A long run has a hundred thousand messages: until they are read the page shows the run's folder.
        self.problem = "reading the messages of the run; until then figures are those of its folder"
        self._bus, self._is_known = bus, True
        name = f"console-page-{self.run_id}"
        self._catching_up = threading.Thread(target=self._catch_up, args=(bus, watcher, view), name=name, daemon=True)
        self._catching_up.start()
        self._catching_up.join(_FIRST_S)
        self._take_over()

    def _say(self, problem: str) -> None:
        """Say why there is no connection; a training on given answers has its files alone, and misses nothing."""
        self.problem = "" if curves.command_of(self.folder) else problem

    def _catch_up(self, bus: Bus, watcher: Watcher, view: PageView) -> None:
        """Read what the streams hold, without the lock: no request uses this view yet."""
        try:
            watcher.catch_up(_CATCH_UP_S)
            view.add_recorded(curves.rows_of(self.folder))
        finally:
            self._caught_up = bus, watcher, view

    def _take_over(self) -> None:
        """Use the connection and the view of `_catch_up` once it is done."""
        if self._caught_up is not None:
            self._bus, self._watcher, self._view = self._caught_up
            self._caught_up = self._catching_up = None
            self.problem = ""

    def _disconnect(self) -> None:
        if self._bus is not None and self._catching_up is None:
            self._bus.close()
        if self._watcher is not None:  # what was seen stays until there is a connection again
            self._bus = self._watcher = self._groups = None
            self._metrics_seen = None
            self._tried_at = float("-inf")
