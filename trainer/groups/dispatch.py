"""Which groups are issued next, what each must be, and what happens to its prompt when it is closed; no I/O.

`RunGroups` has all groups of a run, those that are trained on and those of evaluations, and the lock of both.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.protocol.groups import RouterShape, Split, Task
from penstock.protocol.packs.task_promise import TaskPromise, TaskSettings
from penstock.protocol.record.checkpoint_state import CheckpointState
from penstock.protocol.record.lineage import AccountState
from penstock.protocol.versions import Branch, PolicyVersion, Remade, staleness
from penstock.trainer.data.data_order import DataOrder, WeightedOrder
from penstock.trainer.data.dataset import Prompt
from penstock.trainer.errors import CheckpointError
from penstock.trainer.groups.group_states import GroupStates, State
from penstock.trainer.groups.group_totals import Drop, DropReason, Entries, GroupTotals
from penstock.trainer.groups.prompt_cursor import GroupKey, PromptCursor, order_id
from penstock.trainer.groups.task_packs import (
    Mixture,
    TaskPack,
    choose_groups_per_message,
    in_environment,
    make_task,
    pack_tasks,
    seeded,
    task_bytes,
    training_sampling,
)
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.settings import RolloutSettings

_SAMPLED_PROMPTS = 32  # their mean size is used for all prompts when packs are cut


@dataclass(frozen=True, slots=True)
class RunGroups:
    """Changed by the threads of issuer, collector and evaluator and by the training thread, each with ``lock`` held."""

    train: GroupStates = field(default_factory=GroupStates)
    held_out: GroupStates = field(default_factory=GroupStates)
    lock: threading.RLock = field(default_factory=threading.RLock, compare=False)

    @classmethod
    def of(cls, state: CheckpointState | None, *, max_staleness: int, max_trained_count: int = 1) -> RunGroups:
        """Return the groups of a checkpoint; raises CheckpointError when its parts contradict one another."""
        if state is None:
            return cls(GroupStates(max_staleness=max_staleness, max_trained_count=max_trained_count))
        totals, in_flight = state.account.totals, state.account.in_flight
        outstanding = in_flight.get("train", ())
        listed = state.dispatch.get("outstanding", outstanding)  # a run on stored groups lists none there
        trained = {group_id for _, ids in state.ledger for group_id in ids}
        if contradiction := (set(outstanding) ^ set(listed)) | (set(outstanding) & trained):
            raise CheckpointError(
                f"checkpoint of step {state.step}: group {min(contradiction)} is outstanding by one of its parts "
                "and closed by another; restore its state.json, or remove its folder to resume the checkpoint before it"
            )
        train = GroupStates(
            max_staleness=max_staleness,
            max_trained_count=max_trained_count,
            totals=GroupTotals(totals.get("train"), state.totals),
            outstanding=outstanding,
            dead=state.dispatch.get("dead", ()),
            ledger=state.ledger,
        )
        train.letters_read = state.letters_read
        train.versions.branches = [Branch(*map(PolicyVersion, pair)) for pair in state.abandoned]
        train.versions.remade = [Remade(PolicyVersion(u), PolicyVersion(f), n) for u, f, n in state.remade]
        return cls(train, GroupStates(totals=GroupTotals(totals.get("eval")), outstanding=in_flight.get("eval", ())))

    def sampled_by_abandoned(self) -> set[PolicyVersion]:
        """Return the versions of sessions that were rolled back whose samples are held: their manifests are kept."""
        with self.lock:
            held = [g for state in (State.READY, State.IN_USE, State.KEPT) for g in self.train.held(state)]
            ends = {
                PolicyVersion(v)
                for g in held
                for v in (g.scored.generated.oldest_version, g.scored.generated.newest_version)
            }
            return {version for version in ends if self.train.versions.is_abandoned(version)}

    def take_entries(self) -> Entries:
        splits: dict[Split, GroupStates] = {"train": self.train, "eval": self.held_out}
        account = AccountState(
            totals={
                split: states.totals.sums.model_copy(update={"in_flight": states.num_outstanding})
                for split, states in splits.items()
            },
            in_flight={split: tuple(sorted(states.outstanding())) for split, states in splits.items()},
        )
        return Entries.of({split: states.totals.take_new() for split, states in splits.items()}, account)


class Prompts(Protocol):
    @property
    def fingerprint(self) -> str: ...

    @property
    def num_tokens(self) -> int: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt: ...


class Dispatch:
    def __init__(  # noqa: PLR0913  what its tasks are made of
        self,
        prompts: Prompts,
        *,
        order: DataOrder | WeightedOrder,
        rollout: RolloutSettings,
        stop_token_ids: Sequence[int],
        groups: GroupStates | None = None,
        with_baseline: bool = False,
        teacher_top_k: int | None = None,
        routers: RouterShape | None = None,
        mixture: Mixture | None = None,
    ) -> None:
        """Start at the first position; call ``cursor.resume`` to continue from a checkpoint, of which ``groups`` are.

        ``with_baseline``, ``teacher_top_k`` and ``routers`` are those of every task; ``mixture`` chooses the
        environment of each, None: it is ``rollout.environment``.
        """
        self._further = {
            "with_baseline": with_baseline,
            "teacher_top_k": teacher_top_k,
            "redundant_completions": rollout.redundant_completions,
            "redundant_wait": rollout.redundant_wait,
        }
        self.groups = GroupStates(max_staleness=rollout.max_staleness) if groups is None else groups
        self.cursor = PromptCursor(order, order_id(order, prompts.fingerprint), self.groups)
        self._mixture, self._prompts, self._rollout = mixture, prompts, rollout
        self._sampling = training_sampling(rollout, stop_token_ids, routers)
        sampled = [prompts[i] for i in range(0, len(prompts), max(1, len(prompts) // _SAMPLED_PROMPTS))]
        sizes = [task_bytes(self._task(GroupKey(0, prompt.index, 0), PolicyVersion(0), prompt)) for prompt in sampled]
        self.groups_per_message = choose_groups_per_message(
            rollout, prompt_tokens=prompts.num_tokens / len(prompts), bytes_per_task=sum(sizes) / len(sizes)
        )

    def next_packs(
        self,
        version: PolicyVersion,
        most_outstanding: int | None = None,
        *,
        trainer_version: PolicyVersion | None = None,
    ) -> list[TaskPack]:
        """Issue what the staleness bound and ``most_outstanding`` admit at the announced ``version``."""
        packs = self.cursor.plan(
            self._rollout,
            self.groups_per_message,
            most_outstanding=most_outstanding,
            lag=0 if trainer_version is None else staleness(trainer_version, version),
        )
        return [self._pack(keys, version) for keys in packs]

    def pack_again(self, group_ids: Iterable[str], version: PolicyVersion) -> TaskPack:
        return self._pack([GroupKey.parse(group_id) for group_id in group_ids], version)

    def accept(self, group_id: str, *, is_preferred: bool = False) -> DropReason | None:
        return self.cursor.accept(group_id, is_preferred=is_preferred)

    def train(
        self, version: PolicyVersion, batch: Sequence[ReadyGroup], staleness_tokens: Mapping[int, int]
    ) -> dict[str, int]:
        uses = self.groups.train(version, batch, staleness_tokens)
        self.cursor.close(uses)
        return uses

    def drop(self, drop: Drop) -> bool:
        self.groups.drop(drop)
        if drop.is_final:
            self.cursor.close([drop.group_id])
            return True
        return self.cursor.queue_again(drop.group_id, max_attempts=self._rollout.max_attempts)

    def promise(self, group_id: str) -> TaskPromise:
        """Return what the task of a group asked for; raises ValueError for a foreign id.

        A group that an earlier session issued is held against the settings of that session. Where these are not
        recorded, only its prompt, and what it is scored by, are known.
        """
        if (promise := self.groups.promise(group_id)) is not None:
            return promise
        key = GroupKey.parse(group_id)
        earlier = self._settings_before(key) if self.cursor.was_issued_before(key) else None
        if earlier is None:  # its line was removed, since the group was closed
            earlier = tuple(dict.fromkeys(each.train for each in self.cursor.before.all_settings()))
        return TaskPromise.of(self._task(key, PolicyVersion(0), self._prompts[key.prompt]), earlier)

    def _pack(self, keys: Sequence[GroupKey], version: PolicyVersion) -> TaskPack:
        prompts = [
            self._prompts[key.prompt] for key in keys
        ]  # with images these are too large to be kept for a second reading
        tasks = [self._task(key, version, prompt) for key, prompt in zip(keys, prompts, strict=True)]
        for key, task in zip(keys, tasks, strict=True):
            self.groups.set_task(str(key), version, self._own_promise(key, task))
        return pack_tasks(tasks, (image for prompt in prompts for image in prompt.image_files))

    def _own_promise(self, key: GroupKey, task: Task) -> TaskPromise:
        current = TaskSettings.of(task)
        if not self.cursor.was_issued_before(key):
            return TaskPromise.of(task, (current,))
        return TaskPromise.of(task, dict.fromkeys((current, *self._settings_before(key))))

    def _settings_before(self, key: GroupKey) -> tuple[TaskSettings, ...]:
        position = None if key.attempt else self.cursor.order.position_of(key.place)
        return self.cursor.before.settings_of(str(key), position)

    def _task(self, key: GroupKey, version: PolicyVersion, prompt: Prompt) -> Task:
        task = make_task(
            prompt,
            str(key),
            sampling=self._sampling,
            group_size=self._rollout.group_size,
            split="train",
            issued_version=version,
            attempt=key.attempt,
        ).model_copy(update=self._further)
        environment = self._rollout.environment
        if self._mixture is not None:
            position = self.cursor.order.position_of(key.place)
            environment = self._mixture.name(environment, position, prompt.reward.data_source)
        return seeded(in_environment(task, prompt, environment), self.cursor.order.seed)
