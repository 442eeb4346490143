"""Which groups are issued next, and what each must be: the tasks of the decisions in `dispatch_state.py`, no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from penstock.protocol.facts import RouterShape, Task
from penstock.protocol.packs.task_promise import TaskPromise, TaskSettings
from penstock.protocol.versions import PolicyVersion, last_chance_version, staleness
from penstock.trainer.data.data_order import DataOrder
from penstock.trainer.data.dataset import Prompt
from penstock.trainer.groups import dispatch_state
from penstock.trainer.groups.dispatch_state import NOTHING_BEFORE, DispatchState, GroupKey, was_issued_before
from penstock.trainer.groups.mixture import Mixture
from penstock.trainer.groups.task_packs import (
    TaskPack,
    choose_groups_per_message,
    in_environment,
    make_task,
    pack_tasks,
    seeded,
    task_bytes,
    training_sampling,
)
from penstock.trainer.settings import RolloutSettings

_SAMPLED_PROMPTS = 32  # their mean size is used for all prompts when packs are cut


class Prompts(Protocol):
    """The prompts that are issued, by index; a `PromptSet`."""

    @property
    def fingerprint(self) -> str:
        """Digest of their contents."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of all of them."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt: ...


class _Issued(NamedTuple):
    """What an outstanding group was issued for, and what it must be."""

    version: PolicyVersion
    promise: TaskPromise


class Dispatch:
    """The dispatch state with its prompts; what is decided is in `dispatch_state`."""

    def __init__(
        self,
        prompts: Prompts,
        *,
        order: DataOrder,
        rollout: RolloutSettings,
        stop_token_ids: Sequence[int],
        with_baseline: bool = False,
        teacher_top_k: int | None = None,
        routers: RouterShape | None = None,
        mixture: Mixture | None = None,
    ) -> None:
        """Start at the first position; call `resume` to continue from a checkpoint.

        ``with_baseline``, ``teacher_top_k`` and ``routers`` are those of every task; ``mixture`` chooses the environment of each,
        None: it is ``rollout.environment``.
        """
        self._further = {
            "with_baseline": with_baseline,
            "teacher_top_k": teacher_top_k,
            "redundant_completions": rollout.redundant_completions,
            "redundant_wait": rollout.redundant_wait,
        }
        self.order = order
        self._mixture = mixture
        self._prompts = prompts
        self._rollout = rollout
        self._sampling = training_sampling(rollout, stop_token_ids, routers)
        self.state = DispatchState(dispatch_state.order_id(order, prompts.fingerprint))
        self.issued_before = NOTHING_BEFORE  # by earlier sessions; set from the run's log
        self._issued: dict[GroupKey, _Issued] = {}  # outstanding groups that this session issued
        self._issued_for: dict[PolicyVersion, deque[GroupKey]] = {}  # those by version, but some that are not late
        sampled = [prompts[i] for i in range(0, len(prompts), max(1, len(prompts) // _SAMPLED_PROMPTS))]
        sizes = [task_bytes(self._task(GroupKey(0, prompt.index, 0), PolicyVersion(0), prompt)) for prompt in sampled]
        self.groups_per_message = choose_groups_per_message(
            rollout,
            prompt_tokens=prompts.num_tokens / len(prompts),
            bytes_per_task=sum(sizes) / len(sizes),
        )

    def resume(self, document: dict[str, Any]) -> None:
        """Continue from a checkpoint's document; raises CheckpointError when it is of other data."""
        self.state = DispatchState.from_document(document, order_id=self.state.order_id)

    def next_packs(
        self,
        version: PolicyVersion,
        most_outstanding: int | None = None,
        *,
        trainer_version: PolicyVersion | None = None,
    ) -> list[TaskPack]:
        """Issue what the staleness bound admits and the rest of the run can use; return the packs.

        Args:
            version: The newest that is announced.
            most_outstanding: What the rest of the run can use; None: no limit.
            trainer_version: The version that the next step starts from; None: ``version``.
        """
        packs, self.state = dispatch_state.plan(
            self.state,
            order=self.order,
            rollout=self._rollout,
            groups_per_message=self.groups_per_message,
            most_outstanding=most_outstanding,
            lag=0 if trainer_version is None else staleness(trainer_version, version),
        )
        self._forget(version if trainer_version is None else trainer_version)
        return [self._issue(pack, version) for pack in packs]

    def pack_again(self, group_ids: Iterable[str], version: PolicyVersion) -> TaskPack:
        """Return the pack of groups that are issued already: the same ids, and so the same pack id."""
        return self._issue([GroupKey.parse(group_id) for group_id in group_ids], version)

    def is_late(self, trainer_version: PolicyVersion, holds: Callable[[str], bool]) -> bool:
        """Return True if a group under way may be too old for every step after the one at ``trainer_version``.

        A worker may have sampled such a group with the version it was issued for. Under way is what is outstanding and not
        held (``holds`` returns True for groups that have arrived). Groups that an earlier session issued are not considered,
        since the version they were issued for is not stored.

        This is asked on every arrival while a batch is full, so groups of that version that are not under way are forgotten:
        a held group stays held until it is closed.
        """
        version = last_chance_version(trainer_version, self._rollout.max_staleness)
        groups = self._issued_for.get(version, ())
        while groups and not self._is_under_way(groups[0], version, holds):
            groups.popleft()
        return bool(groups)

    def _is_under_way(self, key: GroupKey, version: PolicyVersion, holds: Callable[[str], bool]) -> bool:
        issued = self._issued.get(key)  # for a newer version, if it was packed again
        return (
            issued is not None and issued.version == version and key in self.state.outstanding and not holds(str(key))
        )

    def may_arrive(self, group_id: str) -> bool:
        """Return True if a later attempt that an earlier session issued could still be used."""
        try:
            key = GroupKey.parse(group_id)
        except ValueError:
            return False
        if key.prompt >= self.order.num_prompts:
            return False
        is_open = any(key.place == k.place for k in (*self.state.outstanding, *self.state.again))
        return is_open or self.order.position_of(key.place) >= self.state.position

    def accept(self, group_id: str, holds: Callable[[str], bool] = lambda _: False) -> bool:
        """Record that a group arrived; return False if it must not be used: a duplicate, or an attempt given up.

        Raises ValueError for a foreign id, and for a group that was never issued.
        """
        before = self.issued_before
        state = dispatch_state.accept(self.state, group_id, order=self.order, before=before, holds=holds)
        if state is None and not dispatch_state.was_issued(self.state, group_id, order=self.order, before=before):
            raise ValueError(f"group {group_id} was never issued by this run")
        self.state = dispatch_state.refuse_attempt(self.state, group_id) if state is None else state
        return state is not None

    def settle(self, group_ids: Iterable[str]) -> None:
        """Close groups that were trained, or dropped without another attempt."""
        self.state = dispatch_state.settle(self.state, group_ids)

    def dead_letter(self, group_ids: Iterable[str]) -> None:
        """Close groups that were dead-lettered."""
        self.state = dispatch_state.dead_letter(self.state, group_ids)

    def send_back(self, group_ids: Iterable[str]) -> tuple[str, ...]:
        """Close stale groups and queue their prompts again; return the ids of those that had their last attempt."""
        self.state, given_up = dispatch_state.send_back(self.state, group_ids, max_attempts=self._rollout.max_attempts)
        return given_up

    def promise(self, group_id: str) -> TaskPromise:
        """Return what the task of a group asked for; raises ValueError for a foreign id.

        A group that an earlier session issued is held against the settings of that session. Where these are not recorded,
        only its prompt, and what it is scored by, are known.
        """
        key = GroupKey.parse(group_id)
        if (issued := self._issued.get(key)) is not None:
            return issued.promise
        earlier = self._settings_before(key) if was_issued_before(key, self.order, self.issued_before) else None
        if earlier is None:  # its line was removed, since the group was closed
            earlier = tuple(dict.fromkeys(each.train for each in self.issued_before.all_settings()))
        return TaskPromise.of(self._task(key, PolicyVersion(0), self._prompts[key.prompt]), earlier)

    def _issue(self, keys: Sequence[GroupKey], version: PolicyVersion) -> TaskPack:
        prompts = [
            self._prompts[key.prompt] for key in keys
        ]  # with images these are too large to be kept for a second reading
        tasks = [self._task(key, version, prompt) for key, prompt in zip(keys, prompts, strict=True)]
        promises = [_Issued(version, self._own_promise(key, task)) for key, task in zip(keys, tasks, strict=True)]
        self._issued.update(zip(keys, promises, strict=True))
        self._issued_for.setdefault(version, deque()).extend(keys)
        return pack_tasks(tasks, (image for prompt in prompts for image in prompt.image_files))

    def _forget(self, trainer_version: PolicyVersion) -> None:
        """Forget the promises of closed groups, and which groups were issued for versions that are too old by now."""
        may_arrive = self.state.outstanding.union(self.state.dead)
        self._issued = {key: issued for key, issued in self._issued.items() if key in may_arrive}
        oldest = last_chance_version(trainer_version, self._rollout.max_staleness)
        self._issued_for = {version: groups for version, groups in self._issued_for.items() if version >= oldest}

    def _own_promise(self, key: GroupKey, task: Task) -> TaskPromise:
        """Return the promise of a task that this session issues; an earlier one may have issued it with other settings."""
        own = TaskSettings.of(task)
        if not was_issued_before(key, self.order, self.issued_before):
            return TaskPromise.of(task, (own,))
        return TaskPromise.of(task, dict.fromkeys((own, *self._settings_before(key))))

    def _settings_before(self, key: GroupKey) -> tuple[TaskSettings, ...]:
        position = None if key.attempt else self.order.position_of(key.place)
        return self.issued_before.settings_of(str(key), position)

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
            position = self.order.position_of(key.place)
            environment = self._mixture.name(environment, position, prompt.reward.data_source)
        return seeded(in_environment(task, prompt, environment), self.order.seed)
