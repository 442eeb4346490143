"""What waits in the queues of a run, and what is in work, as NATS counts it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.protocol import heartbeats, streams
from penstock.protocol.errors import PenstockError
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.stream_admin import ConsumerState


@dataclass(frozen=True, slots=True)
class PipeState:
    tasks: ConsumerState
    generated: ConsumerState
    scored: ConsumerState

    def is_empty(self, held_by_us: int) -> bool:
        upstream = (self.tasks, self.generated)
        return (
            not any(state.num_pending or state.num_ack_pending for state in upstream)
            and not self.scored.num_pending
            and self.scored.num_ack_pending <= held_by_us
        )


def read_pipe(bus: Bus, run_id: str) -> PipeState:
    specs = (
        streams.tasks_consumer(run_id, "train"),
        streams.generated_consumer(run_id),
        streams.scored_consumer(run_id, "train"),
    )
    tasks, generated, scored = [asked.wait() for asked in [bus.consumer_state(spec) for spec in specs]]
    return PipeState(tasks, generated, scored)


def num_to_sample(bus: Bus, run_id: str, groups_per_message: int) -> int:
    """Return how many groups, at most, were issued and are not sampled yet, those of evaluations included."""
    specs = [streams.tasks_consumer(run_id, split) for split in ("train", "eval")]
    states = [asked.wait() for asked in [bus.consumer_state(spec) for spec in specs]]
    return groups_per_message * sum(state.num_pending + state.num_ack_pending for state in states)


def describe_queues(bus: Bus, run_id: str) -> str:
    """Describe queue depths and services alive, for error messages; never raises."""
    try:
        pipe = read_pipe(bus, run_id)
        beats = bus.key_value(streams.live_bucket(run_id).bucket).wait().entries().wait()
        services = heartbeats.readable(entry.value for entry in beats)
    except PenstockError as err:
        return f"queue depths unknown: {err}"
    stages = "; ".join(
        f"{name}: {state.num_pending} messages waiting, {state.num_ack_pending} in work"
        for name, state in (("tasks", pipe.tasks), ("generated", pipe.generated), ("scored", pipe.scored))
    )
    workers = [f"{b.service_id} ({b.state}, version {b.version})" for b in services if b.role == "rollout"]
    rewards = [f"{b.service_id} ({b.state})" for b in services if b.role == "reward"]
    alive = f"rollout workers alive: {', '.join(sorted(workers)) or 'NONE'}"
    return f"{stages}; {alive}; reward services alive: {', '.join(sorted(rewards)) or 'NONE'}"
