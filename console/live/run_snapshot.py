"""One look at a run: what the panel draws, as plain frozen values."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One optimizer step as the trainer reported it; ``at`` is wall-clock seconds."""

    step: int
    at: float
    version: int = 0
    reward_mean: float | None = None
    loss: float | None = None
    tokens_trained: int = 0
    staleness_tokens: dict[int, int] = field(default_factory=dict)
    no_signal_share: float | None = None  # groups whose rewards are all equal: nothing to learn from
    learning: dict[str, float] = field(default_factory=dict)  # by the names of `console/report/learning.py`
    skipped: dict[str, int] = field(default_factory=dict)  # trajectories left out by filters, by reason
    scored_by: dict[str, int] = field(default_factory=dict)  # groups by who gave their rewards, with version


@dataclass(frozen=True, slots=True)
class EvalPoint:
    """One evaluation of one version on the held-out prompts of one split."""

    step: int
    at: float
    version: int
    split: str
    accuracy: float
    num_prompts: int = 0


@dataclass(frozen=True, slots=True)
class ServiceLine:
    """One service as its heartbeats describe it."""

    role: str
    service_id: str
    state: str
    alive: bool
    silent_s: float
    version: int | None
    tokens_per_s: float
    idle_share: float | None
    num_lives: int

    @property
    def name(self) -> str:
        """What people call it."""
        return service_name(self.role, self.service_id)


def service_name(role: str, service_id: str) -> str:
    """Return an id that says its role, whether or not it does so by itself."""
    speaks = service_id.startswith((role, "worker") if role == "rollout" else role)
    return service_id if speaks else f"{role} {service_id}"


@dataclass(frozen=True, slots=True)
class Incident:
    """Something broke, or came back; ``at`` is wall-clock seconds."""

    at: float
    text: str
    kind: str = "note"  # "lost", "back", "dead_letter" or "note"


@dataclass(frozen=True, slots=True)
class QueueDepths:
    """What the broker holds between the services: messages not yet taken, and taken but not done."""

    waiting: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything one frame of the panel shows."""

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
    accuracies: tuple[tuple[int, float], ...]  # (step, accuracy) of the primary split
    accuracy_before: float | None
    accuracy_now: float | None
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
    dropped: dict[str, int]
    groups_trained: int
    no_signal_share: float | None
    learning: dict[str, float]  # of the last step, by the names of `console/report/learning.py`
    incidents: tuple[Incident, ...]  # the newest
    num_incidents: int  # of the whole run
    bus_away_s: float
    finished: bool

    @property
    def waiting_for(self) -> str:
        """Say in words who waits for whom; empty while nothing is known."""
        trainer, rollout = self.idle_share.get("trainer"), self.idle_share.get("rollout")
        if trainer is None or rollout is None:
            return ""
        if max(trainer, rollout) < 0.05:
            return "nobody waits"
        return "generation is the bottleneck" if trainer > rollout else "training is the bottleneck"
