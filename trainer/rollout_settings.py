"""The section [rollout] of the run file: what workers generate; imports no torch."""

from __future__ import annotations

from pydantic import Field, model_validator

from penstock.protocol.config.connection import Section
from penstock.protocol.groups import MAX_COMPLETIONS, SINGLE_TURN, StopStrings
from penstock.trainer.data_settings import ENVIRONMENT


class RolloutSettings(Section):
    """What the workers generate, and how stale it may be."""

    group_size: int = Field(default=8, ge=1, le=4096, description="Completions of one prompt; advantages compare them.")
    groups_per_step: int = Field(default=32, ge=1, description="Groups that make one optimizer step.")
    groups_per_message: int = Field(
        default=0,
        ge=0,
        description="Groups that share a message; 0 chooses by size: many tiny ones, or a single large one.",
    )
    redundant_completions: int = Field(
        default=0,
        ge=0,
        description="Completions of a prompt that are started besides group_size, so that no group waits for its longest ones: once "
        "group_size have ended, the engine aborts the rest. The first to end are the shorter ones: what is trained is biased to "
        "short completions. Not in evaluations, and only in single_turn.",
    )
    redundant_wait: float = Field(
        default=0.0,
        ge=0.0,
        le=1000.0,
        description="How much longer the rest may take, as a share of the time in which the first group_size ended: what ends by then "
        "is part of the group too, which then has group_size to group_size + redundant_completions. 0: the rest is aborted at once.",
    )
    max_staleness: int = Field(
        default=4,
        ge=0,
        description="Most versions that a sample may be behind when it is trained; 0: generation waits for every step.",
    )
    max_new_tokens: int = Field(default=256, ge=1, description="Longest completion, in tokens.")
    temperature: float = Field(
        default=1.0,
        gt=0.0,
        le=100.0,
        description="Sampling temperature; the trainer divides its logits by it too, so that log-probabilities agree.",
    )
    stop: StopStrings = Field(
        default=(),
        description='Strings that end a completion, such as ["</answer>"], in training and evaluation; the string remains part '
        "of the completion, in its tokens and in its text. At most 16, of 200 characters.",
    )
    environment: str = Field(
        default=SINGLE_TURN,
        pattern=ENVIRONMENT,
        max_length=200,
        description="Environment that generates the trajectories, by name; one of your own must be in worker.environments. "
        "mixture: all of environment.define that have a weight, in these proportions.",
    )
    max_attempts: int = Field(
        default=2, ge=1, description="How often a group is generated at most when it is too stale to be trained."
    )

    @model_validator(mode="after")
    def _redundancy_is_possible(self) -> RolloutSettings:
        started = self.group_size + self.redundant_completions
        if started > MAX_COMPLETIONS:
            raise ValueError(
                f"rollout.group_size + rollout.redundant_completions = {started}, at most {MAX_COMPLETIONS} completions of a prompt "
                "are started; lower one of them"
            )
        if self.redundant_wait and not self.redundant_completions:
            raise ValueError(
                f"rollout.redundant_wait = {self.redundant_wait:g} does nothing without rollout.redundant_completions; set it, or "
                "leave out rollout.redundant_wait"
            )
        if self.redundant_completions and self.environment != SINGLE_TURN:
            raise ValueError(
                f"rollout.redundant_completions = {self.redundant_completions} is possible in {SINGLE_TURN} only, not in the episodes "
                f"of rollout.environment = {self.environment!r}; leave it out"
            )
        return self

    @property
    def started_completions(self) -> int:
        return self.group_size + self.redundant_completions

    @property
    def largest_group(self) -> int:
        return self.started_completions if self.redundant_wait else self.group_size

    @property
    def max_outstanding(self) -> int:
        """Most groups that may be issued and neither trained nor dropped (arXiv 2505.24298)."""
        return (self.max_staleness + 1) * self.groups_per_step
