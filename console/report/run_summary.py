"""What a run amounted to: the figures of the report and of the `--json` line, in one frozen model."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GroupCounts(_Frozen):
    """Where the groups of the training split went."""

    issued: int = Field(default=0, description="Groups the trainer asked for.")
    generated: int = Field(
        default=0, description="Groups the workers stored, those that came again after a kill included."
    )
    scored: int = Field(default=0, description="Groups that came back with rewards.")
    trained: int = Field(default=0, description="Groups that went into an optimizer step, each once.")
    in_flight: int = Field(
        default=0, description="Groups still under way after the last step: issued, and neither trained nor dropped."
    )
    dropped: dict[str, int] = Field(default={}, description="Groups deliberately not trained, by reason.")
    dead_lettered: dict[str, int] = Field(default={}, description="Groups nobody could process, by reason.")


class WorkerWeights(_Frozen):
    """How one worker followed the weights."""

    versions_applied: int = Field(default=0, description="Times its engine took a version.")
    newest_version: int = Field(default=0, description="Newest version its engine served.")
    mean_pause_s: float = Field(default=0.0, description="Mean seconds the engine stood still for a version.")
    mean_fetch_s: float = Field(default=0.0, description="Mean seconds to fetch a version from the object store.")
    num_lives: int = Field(default=1, description="Times the process was started.")


class Spread(_Frozen):
    """One figure over the steps of a run."""

    mean: float
    smallest: float
    largest: float


class ScorerShare(_Frozen):
    """What one reward, or one version of an endpoint, scored of what was trained."""

    groups: int = Field(default=0, description="Groups trained with its rewards.")
    first_step: int = Field(description="First step that trained one of them.")
    last_step: int = Field(description="Last step that did.")


class WeightsSummary(_Frozen):
    """What moving the weights cost."""

    raw_bytes: int = Field(default=0, description="Bytes of all versions, had each been published whole.")
    sent_bytes: int = Field(default=0, description="Bytes the trainer published for them.")
    fetched_bytes: int = Field(default=0, description="Bytes the workers fetched, all together.")
    mean_density: float | None = Field(default=None, description="Mean share of the values that a patch changes.")
    pause_p50_s: float | None = Field(default=None, description="Median seconds an engine stood still for a version.")
    pause_p99_s: float | None = Field(default=None, description="The 99th percentile of the same.")
    refused: int = Field(default=0, description="Times a worker could not use a version.")


class Overlap(_Frozen):
    """The proof that generation and training went on at the same time."""

    trained_stale_share: float | None = Field(
        default=None, description="Share of trained tokens that an older version had sampled (staleness 1 or more)."
    )
    both_working_s: float = Field(
        default=0.0,
        description="Seconds in which the trainer and a worker worked at once; a lower bound from heartbeats.",
    )
    both_working_share: float | None = Field(
        default=None, description="The same as a share of the training's wall time."
    )


class RunSummary(_Frozen):
    """Everything the report says about a run; times in seconds, shares from 0 to 1."""

    run_id: str
    steps: int = Field(default=0, description="Optimizer steps taken.")
    accuracy_before: float | None = Field(default=None, description="Held-out accuracy of version 0.")
    accuracy_after: float | None = Field(default=None, description="Held-out accuracy of the last evaluated version.")
    eval_prompts: int = Field(default=0, description="Held-out prompts; the same ones every time.")
    reward_first: float | None = Field(
        default=None, description="Mean training reward of the first steps (a tenth of them)."
    )
    reward_last: float | None = Field(
        default=None, description="Mean training reward of the last steps (a tenth of them)."
    )
    groups: GroupCounts = GroupCounts()
    scored_by: dict[str, ScorerShare] = Field(
        default={}, description="Who gave the rewards of what was trained; endpoints with their version."
    )
    staleness_tokens: dict[str, int] = Field(default={}, description="Trained tokens by staleness, in versions.")
    staleness_mean: float | None = Field(default=None, description="Mean staleness of the trained tokens.")
    staleness_max: int | None = Field(default=None, description="Largest staleness that was trained.")
    learning: dict[str, Spread] = Field(
        default={},
        description="How far data and policy were apart, by figure, over all steps (`console/report/learning.py`).",
    )
    skipped: dict[str, int] = Field(
        default={}, description="Trajectories that filters left out of their step, by reason."
    )
    versions_published: int = Field(default=0, description="Versions the trainer published, version 0 included.")
    workers: dict[str, WorkerWeights] = Field(default={}, description="Weights as each worker followed them.")
    weights: WeightsSummary = WeightsSummary()
    tokens_generated: int = Field(default=0, description="Tokens sampled by all workers, killed ones included.")
    tokens_trained: int = Field(default=0, description="Sampled tokens that went into a loss.")
    idle_share: dict[str, float] = Field(
        default={}, description="Share of the training time each role waited for others."
    )
    overlap: Overlap = Overlap()
    incidents: tuple[str, ...] = Field(
        default=(), description="What broke and what came back, with its time in the run."
    )
    wall_s: float = Field(default=0.0, description="Seconds from the first sign of the run to its last.")
    cpu_s: float = Field(default=0.0, description="CPU seconds of all services, killed ones included.")
    cpu_s_per_role: dict[str, float] = Field(default={}, description="The same by role.")

    def to_line(self) -> str:
        """Return the summary as one line of JSON, for machines."""
        return self.model_dump_json()
