"""Show a run while it runs (`penstock watch`): a panel on a terminal, plain lines elsewhere, or nothing at all.

    with LivePanel("quickstart", bus, total_steps=150) as panel:
        panel.note("killed rollout-1 on purpose")
        ...                                   # a thread draws the panel
    print(panel.summary().to_line())

Watching never affects a run: errors of the panel are shown in the panel.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TextIO

from rich.console import Console
from rich.live import Live

from penstock.console.connections import NamedRun
from penstock.console.live import run_snapshot
from penstock.console.live.frame import figure, rate, render
from penstock.console.live.run_snapshot import Snapshot
from penstock.console.live.run_view import RunView
from penstock.console.live.watcher import Watcher
from penstock.console.report import curves
from penstock.console.report.run_summary import RunSummary
from penstock.console.terminal import clock, one_line
from penstock.protocol import logs
from penstock.protocol.errors import PenstockError
from penstock.protocol.transport.bus import Bus

Mode = Literal["auto", "rich", "plain", "quiet"]
_TICK_S = 0.25
_FRAME_S = 1.0
_KEEP_S = 10.0  # between two writes of the totals
_FRAME_SHARE = 0.01  # of a core: slower frames are drawn less often
_LEARNING = {"KL": "kl_behaviour", "KL to reference": "kl_reference", "loss": "loss", "lr": "lr"}  # of a plain line
_MAX_DISCONNECTED_S = 60.0  # a restart of NATS takes seconds


class LivePanel:
    """Watches one run and shows it while the block runs; `summary` has the totals at the end."""

    def __init__(
        self,
        run_id: str,
        bus: Bus,
        *,
        total_steps: int | None = None,
        mode: Mode = "auto",
        stream: TextIO | None = None,
        lines_every: int = 10,
        folder: Path | None = None,
    ) -> None:
        """Prepare; watching starts when the block is entered.

        ``folder`` is the run's, of the one program that will write its report: what heartbeats showed in earlier sessions is
        read from it and kept there, so that a resumed run's totals are those of all sessions.

        ``mode`` auto draws the panel on a terminal and writes a line every ``lines_every`` steps
        elsewhere; quiet only watches. ``stream`` is where it is written, stdout by default.
        """
        self._bus = bus
        self._view = RunView(run_id, total_steps=total_steps)
        self._stream = stream or sys.stdout
        self._mode: Mode = ("rich" if self._stream.isatty() else "plain") if mode == "auto" else mode
        # the program that writes the report resumes a run: what earlier sessions wrote is not written again
        since = 0.0 if folder is None else time.time()
        self._lines = PlainLines(self._write, every=lines_every, since=since)
        self._notes: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the view: the panel's thread folds, others read
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._live: Live | None = None
        self._watcher: Watcher | None = None
        self._has_caught_up = False
        self._problem = ""  # the last one shown
        self._folder = folder
        if folder is not None:
            self.show_placement(folder)
        if folder is not None and (earlier := run_snapshot.load_totals(folder)) is not None:
            self._view.restore(earlier)

    def __enter__(self) -> LivePanel:
        self._watcher = Watcher(self._bus, self._view)
        if self._mode == "rich":
            self._live = Live(console=Console(file=self._stream), auto_refresh=False)
            self._live.start()
        self._thread = threading.Thread(target=self._run, name="panel", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join(30.0)
        if self._watcher is not None and kind is None:
            self._watcher.catch_up()
        if self._folder is not None:
            self._view.add_recorded(curves.rows(self._folder))
            self._keep(self._folder)
        self._show(last=True)
        if self._live is not None:
            self._live.stop()

    def show_placement(self, folder: Path) -> None:
        """Show which GPUs the processes of a run have, where its folder is here and says so."""
        self._view.placement = run_snapshot.load_placement(folder)

    def note(self, text: str) -> None:
        self._notes.put((time.time(), text))

    def snapshot(self) -> Snapshot:
        with self._lock:
            return self._view.snapshot(time.time())

    def summary(self) -> RunSummary:
        with self._lock:
            return self._view.summary()

    def wait(self, until: Callable[[Snapshot], bool], *, deadline_s: float = float("inf")) -> bool:
        give_up = time.monotonic() + deadline_s
        while not until(self.snapshot()):
            if time.monotonic() > give_up:
                return False
            self._ending.wait(_TICK_S)
        return True

    def _keep(self, folder: Path) -> None:
        try:
            run_snapshot.save_totals(folder, self._view.totals())
        except OSError as err:
            self._note_once(f"the totals of this session are not kept for the next: {err}")

    def _note_once(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            self.note(problem)

    def _run(self) -> None:
        next_frame, next_keep = 0.0, time.monotonic() + _KEEP_S
        while not self._ending.wait(_TICK_S):
            try:
                with self._lock:
                    assert self._watcher is not None
                    if not self._has_caught_up:  # no line or frame shows a state of the run's past as today's
                        self._has_caught_up = True
                        self._watcher.catch_up()
                    self._watcher.step()
                    self._fold_notes()
            except Exception as err:  # noqa: BLE001 without its thread the panel would stand still without a word
                problem = str(err) if isinstance(err, PenstockError) else f"{type(err).__name__}: {err}"
                self._note_once(f"the panel could not read the run: {problem}")
            if self._folder is not None and time.monotonic() >= next_keep:
                next_keep = time.monotonic() + _KEEP_S
                with self._lock:
                    self._keep(self._folder)
            if time.monotonic() >= next_frame:
                before_s = time.thread_time()
                self._show()
                next_frame = time.monotonic() + max(_FRAME_S, (time.thread_time() - before_s) / _FRAME_SHARE)

    def _fold_notes(self) -> None:
        while not self._notes.empty():
            self._view.note(*self._notes.get())

    def _show(self, *, last: bool = False) -> None:
        with self._lock:
            self._fold_notes()
            snapshot = self._view.snapshot(time.time())
        if self._live is not None:
            self._live.update(render(snapshot, *self._live.console.size), refresh=True)
        elif self._mode == "plain":
            self._lines.show(snapshot, last=last)

    def _write(self, line: str) -> None:
        print(one_line(line), file=self._stream, flush=True)


class PlainLines:
    """Plain text for logs and pipes: a line every ``every`` steps, one for each evaluation and incident."""

    def __init__(self, write: Callable[[str], None], *, every: int, since: float = 0.0) -> None:
        """Write through ``write``, one line per call; what was before ``since``, seconds since 1970, is left out."""
        self._write = write
        self._since = since
        self._every = every
        self._next_step = 1
        self._num_incidents = 0
        self._held_out: set[tuple[int, float]] = set()
        self._diagnoses: set[str] = set()  # keys
        self._state = ""

    def show(self, s: Snapshot, *, last: bool = False) -> None:
        """Write what is new since the last call; ``last`` writes the final step whatever its number."""
        if s.state not in {self._state, "training"}:
            self._write(f"{clock(s.elapsed_s)} {s.state}")
        self._state = s.state
        num_new = s.num_incidents - self._num_incidents
        for incident in s.incidents[max(len(s.incidents) - num_new, 0) :]:
            if incident.at >= self._since:
                self._write(f"{clock(s.elapsed_at(incident.at))} {incident.text}")
        self._num_incidents = s.num_incidents
        for step, value in s.held_out.points:
            if (step, value) not in self._held_out:
                self._held_out.add((step, value))
                at = s.evaluated_at[step]
                if at >= self._since:
                    self._write(f"{clock(s.elapsed_at(at))} {s.held_out.name} {value:.3f} after step {step}")
        for diagnosis in s.diagnoses:
            if diagnosis.key not in self._diagnoses:
                self._diagnoses.add(diagnosis.key)
                self._write(f"{clock(s.elapsed_s)} problem: {diagnosis.what} {diagnosis.cause} {diagnosis.cure}")
        if s.step >= self._next_step or (last and s.step > self._next_step - self._every):
            self._write(line(s))
            self._next_step = (s.step // self._every + 1) * self._every


def line(s: Snapshot) -> str:
    steps = f"{s.step}/{s.total_steps}" if s.total_steps else str(s.step)
    parts = [
        f"{clock(s.elapsed_s)} step {steps}",
        f"reward {figure(s.reward_now)}",
        *(f"{name} {s.learning[key]:.3g}" for name, key in _LEARNING.items() if key in s.learning),
        f"staleness {figure(s.staleness_mean)} (max {s.staleness_max if s.staleness_max is not None else '–'})",
        f"tokens/s {rate(s.generated_per_s)} generated {rate(s.trained_per_s)} trained",
    ]
    if s.dropped:
        parts.append(f"dropped {sum(s.dropped.values())}")
    if s.eta_s is not None and s.step != s.total_steps:
        parts.append(f"eta {clock(s.eta_s)}")
    return "  ".join(parts)


def watch_run(run: NamedRun, *, plain: bool, as_json: bool) -> int:
    """Watch until the run ends or Ctrl-C; returns the exit code.

    With ``as_json`` the lines go to stderr, and stdout gets one JSON object, the last thing printed.
    Raises ConfigError, BusUnreachable or MissingStream.
    """
    settings = run.settings
    logs.configure("watch", level="error")  # the panel shows when NATS is unreachable
    mode: Mode = "plain" if plain or as_json else "auto"
    code = 0
    with Bus.connect(settings.nats, name="watch", deadline_s=5.0) as bus:
        panel = LivePanel(run.id, bus, mode=mode, stream=sys.stderr if as_json else sys.stdout)
        panel.show_placement(settings.run.folder)
        try:
            with panel:
                panel.wait(lambda snapshot: has_ended(snapshot) or is_cut_off(snapshot))
        except KeyboardInterrupt:
            print(f"stopped watching; the run continues. To watch again: penstock watch {run}", file=sys.stderr)
        if not has_ended(panel.snapshot()) and is_cut_off(panel.snapshot()):
            code = 1
            print(
                f"penstock: NATS at {bus.url} unreachable for {_MAX_DISCONNECTED_S:.0f} s; the run may have ended. "
                f"See its report: penstock runs show {run}",
                file=sys.stderr,
            )
        if as_json:
            print(panel.summary().to_line(), flush=True)
    return code


def has_ended(snapshot: Snapshot) -> bool:
    """Return True if the trainer reported the end, or took the last step and exited."""
    if snapshot.finished:
        return True
    trainers = [line for line in snapshot.services if line.role == "trainer"]
    complete = snapshot.total_steps is not None and snapshot.step >= snapshot.total_steps
    return complete and not any(line.alive for line in trainers)


def is_cut_off(snapshot: Snapshot) -> bool:
    """Return True if NATS has been unreachable for too long to continue watching."""
    return snapshot.disconnected_s > _MAX_DISCONNECTED_S
