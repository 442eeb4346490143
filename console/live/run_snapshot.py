"""The state of a run at one moment, as plain frozen values: what the panel draws, and the totals that are kept between sessions.

A heartbeat carries totals since its process started, and expires. The program that writes the report stores them in the run's
folder (``watched.json``) while it watches, and continues with them when the run is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from pydantic import BaseModel, ConfigDict

from penstock.console.report.event_fields import StepFields
from penstock.console.report.learning import Evaluation, HeldOut
from penstock.console.report.run_summary import Diagnosis
from penstock.protocol.facts import Heartbeat
from penstock.protocol.files import atomic_write, json_value, read_document, read_regular
from penstock.protocol.record.run_folder import PLACEMENT

_SERVICE_NAMES = {"reward": "reward service", "rollout": "rollout worker"}
log = structlog.get_logger("console.watched_totals")
TOTALS_FILE = "watched.json"


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One optimizer step as the trainer reported it; ``at`` is wall-clock seconds."""

    number: int
    at: float
    tokens_trained: int
    fields: StepFields
    learning: dict[str, float]  # by the names of `console/report/learning.py`


@dataclass(frozen=True, slots=True)
class EvalPoint(Evaluation):
    at: float
    version: int
    split: str
    num_prompts: int = 0
    success: str = ""  # what counts as correct
    primary: bool = True  # of the source that versions are compared by


@dataclass(frozen=True, slots=True)
class ServiceLine:
    role: str
    service_id: str
    state: str
    alive: bool
    silent_s: float
    version: int | None
    tokens_per_s: float
    idle_share: float | None
    num_starts: int
    has_exited: bool = False  # regularly: it said so, or removed its heartbeat

    @property
    def name(self) -> str:
        return service_name(self.role, self.service_id)


def service_name(role: str, service_id: str) -> str:
    """Return the id, with the role in front unless the id already begins with it."""
    has_role = service_id.startswith((role, "worker") if role == "rollout" else role)
    return service_id if has_role else f"{role} {service_id}"


@dataclass(frozen=True, slots=True)
class Incident:
    at: float
    text: str
    kind: str = "note"  # "lost", "back", "dead_letter" or "note"


@dataclass(frozen=True, slots=True)
class Pause:
    """Time between two sessions of a run."""

    end: float  # wall-clock seconds
    seconds: float


@dataclass(slots=True)
class RewardErrors:
    """The groups that got no reward for one reason."""

    waited: int = 0  # times that groups were returned to the queue
    dead: int = 0  # groups that were given up
    newest: str = ""
    newest_at: float | None = None


def elapsed_at(at: float, started_at: float, pauses: Sequence[Pause]) -> float:
    """Return the seconds of a run until ``at``, without the pauses between its sessions."""
    paused_s = sum(max(min(at, pause.end) - (pause.end - pause.seconds), 0.0) for pause in pauses)
    return max(at - started_at - paused_s, 0.0)


@dataclass(frozen=True, slots=True)
class QueueDepths:
    """Messages in the work queues by stage: not yet delivered, and delivered but not acknowledged."""

    waiting: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    run_id: str
    started_at: float  # wall-clock seconds
    elapsed_s: float
    state: str
    step: int
    total_steps: int | None
    eta_s: float | None
    rewards: tuple[float, ...]
    reward_now: float | None
    reward_first: float | None
    held_out: HeldOut  # of the primary split
    generated_per_s: float
    trained_per_s: float
    staleness_tokens: dict[int, int]
    staleness_mean: float | None
    staleness_max: int | None
    newest_version: int
    versions_published: int
    queues: QueueDepths
    services: tuple[ServiceLine, ...]
    idle_share: dict[str, float]
    slots_used: float | None
    dropped: dict[str, int]
    groups_trained: int
    no_signal_share: float | None
    learning: dict[str, float]  # of the last step, by the names of `console/report/learning.py`
    diagnoses: tuple[Diagnosis, ...]  # what keeps the run from learning
    incidents: tuple[Incident, ...]  # the newest
    num_incidents: int  # of the whole run
    disconnected_s: float  # since the connection to NATS was lost; 0.0 while connected
    finished: bool
    attention: str = ""  # what computes it in the trainer
    placement: str = ""  # which GPUs do what
    pauses: tuple[Pause, ...] = ()
    evaluated_at: dict[int, float] = field(default_factory=dict)  # by step, of the primary split

    def elapsed_at(self, at: float) -> float:
        return elapsed_at(at, self.started_at, self.pauses)

    def versions_behind(self, line: ServiceLine) -> int:
        """Return how many versions a service is behind the trainer, each as of its newest heartbeat.

        Announcements are newer than heartbeats: compared with them, a worker of a fast run would always seem far behind.
        """
        trainers = [service.version for service in self.services if service.role == "trainer" and service.alive]
        newest = max((version for version in trainers if version is not None), default=self.newest_version)
        return 0 if line.version is None else max(newest - line.version, 0)

    @property
    def waiting_for(self) -> str:
        """Return which side is the bottleneck, or what the trainer waits for before it reports; empty while unknown."""
        here = {line.role for line in self.services if line.alive}
        if here and "trainer" not in here and not self.step:
            return ", ".join(f"no {name} yet" for role, name in _SERVICE_NAMES.items() if role not in here)
        trainer, rollout = self.idle_share.get("trainer"), self.idle_share.get("rollout")
        if trainer is None or rollout is None:
            return ""
        if max(trainer, rollout) < 0.05:
            return "no bottleneck"
        return "generation is the bottleneck" if trainer > rollout else "training is the bottleneck"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ServiceTotals(_Frozen):
    beat: Heartbeat
    num_starts: int
    earlier_cpu_s: float
    earlier: Mapping[str, float]  # counters
    busy_s: float  # from the first step on, the process of the last heartbeat included
    idle_s: float


class WatchedTotals(_Frozen):
    until: float  # wall-clock seconds: when this was the state of the run
    since: float | None = None  # when the first service of the first session was seen
    paused_s: float = 0.0  # between sessions
    pauses: tuple[Pause, ...] = ()  # the same, one by one
    both_working_s: float = 0.0
    slot_s: tuple[float, float] = (0.0, 0.0)  # of the engines' slots: used, and there
    services: tuple[ServiceTotals, ...] = ()
    incidents: tuple[Incident, ...] = ()  # those that no stored event repeats


def load_placement(folder: Path) -> str:
    """Return which GPUs engines and trainer of the newest session here have; "" where none were given out."""
    try:
        return str(json_value(read_regular(folder / PLACEMENT))["says"][0]).partition(": ")[0]
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def load_totals(folder: Path) -> WatchedTotals | None:
    try:
        return WatchedTotals.model_validate_json(read_document(folder / TOTALS_FILE))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as err:
        reason = str(err).split("\n", 1)[0]
        log.warning(
            "totals of earlier sessions cannot be read, and are not in the sums", file=TOTALS_FILE, reason=reason
        )
        return None


def save_totals(folder: Path, totals: WatchedTotals) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / TOTALS_FILE, totals.model_dump_json())
