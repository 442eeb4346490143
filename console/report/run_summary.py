"""The totals of a run, in the report and in the line of `--json`, as one frozen model.

Field names are stored keys: they do not change.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

_SLOW_ATTENTION = {  # those whose cost a run should show
    "dense": "dense: memory and time grow with the square of the tokens (trainer.attention)",
    "sdpa": "sdpa: slower than flash attention, which a GPU has for model.dtype = bfloat16 (docs/memory.md)",
    "padded": "padded: rows are not packed, and prompts are not shared (docs/memory.md)",
}


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GroupCounts(_Frozen):
    issued: int = Field(default=0, description="Groups the trainer issued.")
    generated: int = Field(default=0, description="Groups the workers stored, including repeats after a restart.")
    scored: int = Field(default=0, description="Groups that got rewards.")
    trained: int = Field(default=0, description="Groups that went into an optimizer step, each once.")
    in_flight: int = Field(
        default=0, description="Groups in flight after the last step: issued, and neither trained nor dropped."
    )
    dropped: dict[str, int] = Field(default={}, description="Groups deliberately not trained, by reason.")
    dead_lettered: dict[str, int] = Field(default={}, description="Groups that were dead-lettered, by reason.")


class WorkerWeights(_Frozen):
    versions_applied: int = Field(default=0, description="Versions its engine applied.")
    newest_version: int = Field(default=0, description="Newest version its engine served.")
    mean_pause_s: float = Field(default=0.0, description="Mean seconds the engine paused for a version.")
    mean_fetch_s: float = Field(default=0.0, description="Mean seconds to fetch a version from the object store.")
    # The stored key; "starts" everywhere else.
    num_lives: int = Field(default=1, description="Times the process was started.")


class Spread(_Frozen):
    mean: float
    smallest: float
    largest: float
    first: float | None = Field(default=None, description="Mean over the first steps, a tenth of them.")
    last: float | None = Field(default=None, description="Mean over the last steps, a tenth of them.")


class Diagnosis(_Frozen):
    key: str = Field(description="Which rule found it; the names are those of `console/report/diagnoses.py`.")
    what: str = Field(description="What was seen, with its figures.")
    cause: str = Field(description="The usual cause.")
    cure: str = Field(description="What to do about it.")


class ScorerShare(_Frozen):
    groups: int = Field(default=0, description="Groups trained with its rewards.")
    first_step: int = Field(description="First step that trained one of them.")
    last_step: int = Field(description="Last step that did.")


class WeightsSummary(_Frozen):
    raw_bytes: int = Field(default=0, description="Bytes of all versions as full snapshots.")
    sent_bytes: int = Field(default=0, description="Bytes the trainer published.")
    fetched_bytes: int = Field(default=0, description="Bytes fetched by all workers.")
    mean_density: float | None = Field(default=None, description="Mean share of the values that a patch changes.")
    pause_p50_s: float | None = Field(default=None, description="Median seconds an engine paused for a version.")
    pause_p99_s: float | None = Field(default=None, description="99th percentile of the same.")
    refused: int = Field(default=0, description="Times a worker could not use a version.")


class Overlap(_Frozen):
    trained_stale_share: float | None = Field(
        default=None, description="Share of trained tokens that an older version had sampled (staleness 1 or more)."
    )
    both_working_s: float = Field(
        default=0.0, description="Seconds in which trainer and a worker were both busy; a lower bound from heartbeats."
    )
    both_working_share: float | None = Field(
        default=None, description="The same as a share of the training's wall time."
    )


def attention_text(name: str) -> str:
    """Return the name of an attention backend, with what it costs if it is a slow one."""
    return _SLOW_ATTENTION.get(name, name)


class RunSummary(_Frozen):
    """All totals of a run; times in seconds, shares from 0 to 1."""

    run_id: str
    steps: int = Field(default=0, description="Optimizer steps taken.")
    attention: str = Field(
        default="",
        description="What computes attention in the trainer: a backend of trainer.attention, or padded; empty: not reported.",
    )
    accuracy_before: float | None = Field(
        default=None, description="Held-out accuracy of version 0; none: the reward does not say what is correct."
    )
    accuracy_after: float | None = Field(default=None, description="Held-out accuracy of the last evaluated version.")
    eval_reward_before: float | None = Field(default=None, description="Held-out mean reward of version 0.")
    eval_reward_after: float | None = Field(default=None, description="The same of the last evaluated version.")
    success: str = Field(default="", description="What counts as correct; empty: of a reward without such a rule.")
    eval_prompts: int = Field(default=0, description="Held-out prompts; the same ones every time.")
    reward_first: float | None = Field(
        default=None, description="Mean training reward of the first steps (a tenth of them)."
    )
    reward_last: float | None = Field(
        default=None, description="Mean training reward of the last steps (a tenth of them)."
    )
    groups: GroupCounts = GroupCounts()
    scored_by: dict[str, ScorerShare] = Field(
        default={}, description="Trained groups by scorer; endpoints with their version."
    )
    staleness_tokens: dict[str, int] = Field(default={}, description="Trained tokens by staleness, in versions.")
    staleness_mean: float | None = Field(default=None, description="Mean staleness of the trained tokens.")
    staleness_max: int | None = Field(default=None, description="Largest staleness that was trained.")
    learning: dict[str, Spread] = Field(
        default={}, description="Off-policy metrics over all steps, by key (`console/report/learning.py`)."
    )
    skipped: dict[str, int] = Field(
        default={}, description="Trajectories that filters left out of their step, by reason."
    )
    versions_published: int = Field(default=0, description="Versions the trainer published, version 0 included.")
    workers: dict[str, WorkerWeights] = Field(default={}, description="Versions applied, by worker.")
    weights: WeightsSummary = WeightsSummary()
    tokens_generated: int = Field(default=0, description="Tokens sampled by all workers, including killed ones.")
    tokens_trained: int = Field(default=0, description="Sampled tokens that went into a loss.")
    idle_share: dict[str, float] = Field(
        default={}, description="Share of the training time each role waited for others."
    )
    slots_used: float | None = Field(
        default=None,
        description="Share of the engines' slots in which a sequence was decoded, from the first step to the last.",
    )
    overlap: Overlap = Overlap()
    diagnoses: tuple[Diagnosis, ...] = Field(default=(), description="What keeps the run from learning, gravest first.")
    packs_given_back: int = Field(default=0, description="Messages that engines failed; they were generated again.")
    incidents: tuple[str, ...] = Field(default=(), description="Failures and recoveries, with their time in the run.")
    unreadable: dict[str, int] = Field(
        default={}, description="Messages that could not be read and were skipped, by kind."
    )
    wall_s: float = Field(
        default=0.0, description="Seconds from first event to last, pauses between sessions excluded."
    )
    cpu_s: float = Field(default=0.0, description="CPU seconds of all services, including killed ones.")
    cpu_s_per_role: dict[str, float] = Field(default={}, description="The same by role.")

    def to_line(self) -> str:
        return self.model_dump_json()
