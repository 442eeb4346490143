"""What the trainer asked for when it issued a task, in a few bytes: the group that comes back must agree; pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.protocol.errors import PackError
from penstock.protocol.groups import SINGLE_TURN, RewardRequest, RowImages, Task
from penstock.protocol.trajectory import Group


class TaskSettings(NamedTuple):
    group_size: int  # trajectories, without a baseline
    max_new_tokens: int  # of a completion
    environment: str
    with_baseline: bool = False
    teacher_top_k: int | None = None  # see `Task.teacher_top_k`
    redundant_completions: int = 0  # started besides ``group_size``
    keeps_more: bool = False  # whether these may be part of the group
    routers: str = ""  # whose choices are asked for, in words (`RouterShape`); "": of none

    @classmethod
    def of(cls, task: Task) -> TaskSettings:
        return cls(
            task.group_size, task.sampling.max_new_tokens, task.environment, task.with_baseline, task.teacher_top_k,
            task.redundant_completions, task.redundant_wait > 0.0, str(task.sampling.routers or ""),
        )  # fmt: skip

    @property
    def is_one_completion(self) -> bool:
        """Whether a trajectory is the prompt and one completion: other environments may add further tokens."""
        return self.environment == SINGLE_TURN

    def fault(
        self, num: int, longest: int, has_baseline: bool, least: int | None = None, num_abandoned: int | None = None
    ) -> str:
        """Return what is wrong with a group of ``num`` trajectories without a baseline; empty if nothing is.

        ``longest`` is the largest number of sampled tokens of a trajectory; ``least`` the number of trajectories that
        is enough, the size of the group unless set. ``num_abandoned`` completions were started and not kept: with those
        that were kept, all that were started; None: not known.
        """
        most = self.group_size + self.redundant_completions * self.keeps_more
        if not (self.group_size if least is None else least) <= num <= most:
            or_more = f" to {most}" if self.keeps_more else ""
            return f"{num} trajectories, its task asked for {self.group_size}{or_more}"
        started = self.group_size + self.redundant_completions
        if num_abandoned is not None and least is None and num + num_abandoned != started:
            return f"{num} completions and {num_abandoned} abandoned ones, its task started {started}"
        if has_baseline != self.with_baseline:
            return (
                f"{'a' if has_baseline else 'no'} baseline, its task asked for {'' if self.with_baseline else 'n'}one"
            )
        if self.is_one_completion and longest > self.max_new_tokens:
            return f"a completion of {longest} tokens, its task allows {self.max_new_tokens}"
        return ""


@dataclass(frozen=True, slots=True)
class TaskPromise:
    """What must be true of the group of one task.

    ``settings`` are those under which the task was issued: more than one if sessions of the trainer with different
    settings may have issued it, none if they are not known.
    """

    content: bytes  # `content_hash` of its prompt and reward
    split: str
    attempt: int
    settings: tuple[TaskSettings, ...] = ()
    min_episodes: int | None = None  # a group of episodes may have so few; None: it has as many as were asked for
    content_of_episodes: bytes = b""  # `content_hash` without the prompt's tokens, which environments render themselves

    @classmethod
    def of(cls, task: Task, settings: Iterable[TaskSettings] | None = None) -> TaskPromise:
        """Return the promise of a task; ``settings``: those under which it may have been issued, None: the task's."""
        prompt = np.array(task.prompt_ids, dtype=np.int32).tobytes()
        known = (TaskSettings.of(task),) if settings is None else tuple(settings)
        return cls(
            content_hash(prompt, task.prompt_text, task.reward, task.images),
            task.split,
            task.attempt,
            known,
            task.min_episodes,
            content_hash(b"", task.prompt_text, task.reward),
        )

    @property
    def is_one_completion(self) -> bool:
        """Whether a trajectory's text must be that of its tokens; False where the settings are not known."""
        return bool(self.settings) and all(settings.is_one_completion for settings in self.settings)

    def check(self, group: Group) -> None:
        """Raise PackError unless a group is one that this task asked for.

        Its trajectories must be known to have the same prompt (`Group.check_prompt`).
        """
        if group.episodes and self.is_one_completion:
            raise PackError(f"group {group.group_id} holds episodes, its task asked for one completion each")
        prompt = b"" if group.episodes else group.trajectories[0].token_ids[: group.num_prompt_tokens].tobytes()
        expected = self.content_of_episodes if group.episodes else self.content
        images = None if group.episodes else group.trajectories[0].images
        if content_hash(prompt, group.prompt_text, group.reward, images) != expected:
            raise PackError(
                f"group {group.group_id}: its prompt, images or what it is to be scored by is not that of its task; "
                f"got {group.num_prompt_tokens} prompt tokens, {group.prompt_text[:100]!r}, {group.reward.name}"
            )
        if (group.split, group.attempt) != (self.split, self.attempt):
            raise PackError(
                f"group {group.group_id}: split {group.split} and attempt {group.attempt}, "
                f"its task has {self.split} and {self.attempt}"
            )
        group.check_logprobs()
        asked = {settings.teacher_top_k for settings in self.settings}
        if asked and group.teacher_top_k not in asked:
            raise PackError(
                f"group {group.group_id}: {_of_teacher(group.teacher_top_k)}, its task asked for "
                f"{' or '.join(sorted(map(_of_teacher, asked)))}; give the workers the trainer's section [teacher]"
            )
        wanted = {settings.routers for settings in self.settings}
        if wanted and str(group.routers or "") not in wanted:
            raise PackError(
                f"group {group.group_id}: the engine's choices of {group.routers or 'no experts'}, its task asked for "
                f"those of {' or '.join(sorted(shape or 'no experts' for shape in wanted))} (trainer.router_replay)"
            )
        self.check_lengths(group.group_id, group.completion_tokens, group.has_baseline)

    def check_lengths(
        self, group_id: str, lengths: Sequence[int], has_baseline: bool, num_abandoned: int | None = None
    ) -> None:
        """Raise PackError unless the number of trajectories and of their sampled tokens are what the task asked for.

        ``num_abandoned`` are the completions that a message says were started and not kept; None: not known.
        """
        num, longest = len(lengths) - has_baseline, max(lengths)
        of_group = (num, longest, has_baseline, self.min_episodes, num_abandoned)
        faults = [settings.fault(*of_group) for settings in self.settings]
        if faults and all(faults):
            raise PackError(f"group {group_id}: {faults[0]}")


def _of_teacher(top_k: int | None) -> str:
    return "nothing of a teacher" if top_k is None else f"a teacher's log-probabilities with {top_k} likeliest tokens"


def content_hash(prompt: bytes, prompt_text: str, reward: RewardRequest, images: RowImages | None = None) -> bytes:
    """Return a hash of a prompt's token ids (int32), its text and images, and what its completions are scored by."""
    texts = (prompt_text, reward.name, reward.data_source, reward.ground_truth or "", reward.extra_info)
    parts = [prompt, *(text.encode("utf-8", "surrogatepass") for text in texts), bytes([reward.ground_truth is None])]
    digest = hashlib.sha256(b"%d %d %d %d %d %d." % tuple(map(len, parts[:6])))
    for part in parts:
        digest.update(part)
    if images is not None:
        digest.update(images.model_dump_json().encode())
    return digest.digest()
