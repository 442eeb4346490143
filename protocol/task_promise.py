"""What the trainer asked for when it issued a task, kept in a few bytes, to hold the group that comes back against; pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.protocol.errors import PackError
from penstock.protocol.facts import RewardRequest, Task
from penstock.protocol.trajectory import Group

_ONE_COMPLETION = "single_turn"  # its trajectories are a prompt and one completion; other environments may add tokens


@dataclass(frozen=True, slots=True)
class TaskPromise:
    """What must be true of the group of one task.

    ``num_completions`` (without a baseline) and ``max_new_tokens`` are None where they are not known: another session of the
    trainer issued the task, perhaps with other settings. ``is_one_completion`` says that a trajectory's text is that of its
    tokens; other environments, and tasks of another session, may have another text.
    """

    content: bytes  # `content_hash` of its prompt and reward
    split: str
    attempt: int
    num_completions: int | None = None
    max_new_tokens: int | None = None
    is_one_completion: bool = False
    min_episodes: int | None = None  # a group of episodes may have so few; None: it has as many as were asked for
    content_of_episodes: bytes = b""  # `content_hash` without the prompt's tokens, which environments render themselves

    @classmethod
    def of(cls, task: Task, *, same_settings: bool = True) -> TaskPromise:
        """Return the promise of a task; ``same_settings`` is False if it may have been issued with other settings."""
        prompt = np.array(task.prompt_ids, dtype=np.int32).tobytes()
        is_one_completion = same_settings and task.environment == _ONE_COMPLETION
        return cls(
            content_hash(prompt, task.prompt_text, task.reward),
            task.split,
            task.attempt,
            task.group_size if same_settings else None,
            task.sampling.max_new_tokens if is_one_completion else None,
            is_one_completion,
            task.min_episodes,
            content_hash(b"", task.prompt_text, task.reward),
        )

    def check(self, group: Group) -> None:
        """Raise PackError unless a group is one that this task asked for.

        Its trajectories must be known to have the same prompt (`Group.check_prompt`).
        """
        if group.episodes and self.is_one_completion:
            raise PackError(f"group {group.group_id} holds episodes, its task asked for one completion each")
        prompt = b"" if group.episodes else group.trajectories[0].token_ids[: group.num_prompt_tokens].tobytes()
        expected = self.content_of_episodes if group.episodes else self.content
        if content_hash(prompt, group.prompt_text, group.reward) != expected:
            raise PackError(
                f"group {group.group_id}: its prompt or what it is to be scored by is not that of its task; "
                f"got {group.num_prompt_tokens} prompt tokens, {group.prompt_text[:100]!r}, {group.reward.name}"
            )
        if (group.split, group.attempt) != (self.split, self.attempt):
            raise PackError(
                f"group {group.group_id}: split {group.split} and attempt {group.attempt}, its task has {self.split} and "
                f"{self.attempt}"
            )
        self.check_lengths(group.group_id, group.completion_tokens, group.has_baseline)

    def check_lengths(self, group_id: str, lengths: Sequence[int], has_baseline: bool) -> None:
        """Raise PackError unless the number of trajectories and of their sampled tokens are what the task asked for."""
        num = len(lengths) - has_baseline
        least = self.num_completions if self.min_episodes is None else self.min_episodes
        if self.num_completions is not None and not (least or 1) <= num <= self.num_completions:
            raise PackError(f"group {group_id}: {num} trajectories, its task asked for {self.num_completions}")
        if self.max_new_tokens is not None and max(lengths) > self.max_new_tokens:
            raise PackError(
                f"group {group_id}: a completion of {max(lengths)} tokens, its task allows {self.max_new_tokens}"
            )


def content_hash(prompt: bytes, prompt_text: str, reward: RewardRequest) -> bytes:
    """Return a hash of a prompt's token ids (int32), its text, and what its completions are scored by."""
    texts = (prompt_text, reward.name, reward.data_source, reward.ground_truth or "", reward.extra_info)
    parts = [prompt, *(text.encode("utf-8", "surrogatepass") for text in texts), bytes([reward.ground_truth is None])]
    digest = hashlib.sha256(b"%d %d %d %d %d %d." % tuple(map(len, parts[:6])))
    for part in parts:
        digest.update(part)
    return digest.digest()
