"""The groups of a simulated run: prompts without a text, what is issued of them, and the facts about what was generated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from penstock.protocol.facts import GeneratedGroup, RewardRequest, ScoredGroup
from penstock.protocol.packs.task_promise import TaskPromise
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.data.dataset import Prompt
from penstock.trainer.groups.dispatch import Dispatch
from penstock.trainer.groups.drops import Drop


class SimulatedPrompts:
    """Prompts without a text, as many as a run may need."""

    fingerprint = "simulated"

    def __init__(self, num: int) -> None:
        self._num = num
        self.num_tokens = num

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(index, (index,), "", RewardRequest(name="simulated"))


class SimulatedIssuer:
    """Takes the place of the issuer: the same dispatch, without threads, accounting and NATS."""

    def __init__(self, dispatch: Dispatch, dropped: Counter[str]) -> None:
        """Count drops in ``dropped``."""
        self._dispatch, self._dropped = dispatch, dropped

    def outstanding(self) -> Collection[str]:
        """Return the ids issued and neither trained nor dropped."""
        return [str(key) for key in self._dispatch.state.outstanding]

    def accept(self, group_id: str, holds: Callable[[str], bool]) -> bool:
        """Record that a group arrived."""
        return self._dispatch.accept(group_id, holds)

    def promise(self, group_id: str) -> TaskPromise:
        """Return what the task of a group asked for."""
        return self._dispatch.promise(group_id)

    def is_late(self, version: PolicyVersion, holds: Callable[[str], bool]) -> bool:
        """Return True if a group under way may be too old for every later step."""
        return self._dispatch.is_late(version, holds)

    def drop(self, drop: Drop) -> None:
        """Close a group and queue its prompt again."""
        self._dropped[str(drop.reason)] += 1
        self._dispatch.send_back([drop.group_id])

    def refuse(self, drop: Drop) -> None:
        """Never happens: nothing is delivered twice."""
        raise AssertionError(drop)

    def drop_dead(self, drops: Sequence[Drop], sequence: int) -> None:
        """Never happens: nothing is dead-lettered."""
        raise AssertionError(drops)

    def pause(self, is_paused: bool) -> None:
        """Never asked for: nothing is dead-lettered."""


def scored_group(group_id: str, lengths: Sequence[int], oldest: PolicyVersion, newest: PolicyVersion) -> ScoredGroup:
    """Return the fact of a group; its values are right by construction, and checking them takes a tenth of a run."""
    generated = GeneratedGroup.model_construct(
        group_id=group_id, row_group=0, split="train", attempt=0, reward_name="simulated", issued_version=oldest,
        oldest_version=oldest, newest_version=newest, prompt_tokens=1, completion_tokens=tuple(lengths),
        finish_reasons=("stop",) * len(lengths),
    )  # fmt: skip
    return ScoredGroup.model_construct(generated=generated, rewards=(1.0,) * len(lengths), scorer="simulated")
