"""The states of groups alone, in any order of events: each group is in one, and nothing is settled or counted twice."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.examples import examples

from penstock.protocol.groups import BlobRef, GeneratedGroup, ScoredGroup
from penstock.protocol.versions import PolicyVersion, is_fresh
from penstock.trainer.errors import GroupStateError
from penstock.trainer.groups.group_states import GroupStates, State
from penstock.trainer.groups.group_totals import Drop, DropReason, GroupTotals
from penstock.trainer.learner.step_plan import ReadyGroup

PACK = BlobRef(key="pack", size_bytes=1, sha256="0" * 64)
TOKENS = 3
IDS = st.integers(0, 3).map(lambda n: f"g{n}")
REASONS = st.sampled_from([DropReason.STALE, DropReason.DEAD, DropReason.LOST])


def ready(group_id: str) -> ReadyGroup:
    generated = GeneratedGroup.model_construct(group_id=group_id, completion_tokens=(TOKENS,), abandoned=())
    return ReadyGroup(ScoredGroup.model_construct(generated=generated), PACK, None)  # type: ignore[arg-type]


class GroupStatesMachine(RuleBasedStateMachine):
    """Any event for any group: it is allowed exactly where a model of one group allows it, or changes nothing."""

    @initialize(max_trained_count=st.integers(1, 2), max_staleness=st.integers(0, 2))
    def begin(self, max_trained_count, max_staleness):
        self.uses_allowed, self.max_staleness = max_trained_count, max_staleness
        self.groups = GroupStates(max_staleness=max_staleness, max_trained_count=max_trained_count)
        self.model: dict[str, str] = {}  # state of each group that is known
        self.uses: dict[str, list[int]] = {}
        self.message: dict[str, int] = {}  # of each group that has arrived
        self.messages: set[int] = set()  # received and not acknowledged
        self.version, self.sequence = PolicyVersion(0), 0
        self.closed: Counter[str] = Counter()  # how often each group was closed since it was last revived
        self.sums: Counter[str] = Counter()
        self.ended = False

    def _try(self, is_allowed, event, *given):
        before = self._snapshot()
        if is_allowed:
            event(*given)
            return True
        refused = rf"internal error, please report: group g\d is .+, and {event.__name__} is not allowed there"
        with pytest.raises(GroupStateError, match=refused):
            event(*given)
        assert self._snapshot() == before
        return False

    def _snapshot(self):
        groups = self.groups
        states = {group_id: (record.state, record.uses) for group_id, record in groups._groups.items()}
        new = groups.totals.new
        return states, groups.totals.sums, groups.settled(), groups.rows(), len(new.issued), len(new.dropped)

    def _is_in_window(self, version):
        newest = max(v for uses in self.uses.values() for v in uses)
        return is_fresh(newest, PolicyVersion(version), self.max_staleness)

    def _close(self, group_id):
        self.message.pop(group_id, None)
        self.closed[group_id] += 1

    @rule(group_id=IDS)
    def issue(self, group_id):
        if self._try(group_id not in self.model, self.groups.issue, [group_id]):
            self.model[group_id] = "issued"
            self.closed.pop(group_id, None)
            self.uses.pop(group_id, None)
            self.sums["issued"] += 1

    @rule(group_id=IDS, more=IDS)
    def arrive(self, group_id, more):
        """One message with one or two groups."""
        self.sequence += 1
        self.groups.receive(self.sequence)
        self.messages.add(self.sequence)
        for fromkey in dict.fromkeys((group_id, more)):
            is_returning = self.model.get(fromkey) == "kept" and fromkey not in self.message
            if self._try(
                self.model.get(fromkey) == "issued" or is_returning, self.groups.arrive, fromkey, self.sequence
            ):
                self.model[fromkey], self.message[fromkey] = "arrived", self.sequence

    @rule(group_id=IDS)
    def offer(self, group_id):
        if self._try(self.model.get(group_id) == "arrived", self.groups.offer, ready(group_id)):
            self.model[group_id] = "kept" if self.uses.get(group_id) else "ready"
            if self.uses.get(group_id) and self.ended:
                self.model[group_id] = "closed"
                self._close(group_id)

    @rule(group_ids=st.sets(IDS, min_size=1, max_size=2))
    def take_and_train(self, group_ids):
        ids = sorted(group_ids)
        allowed = all(self.model.get(i) == "ready" or (self.model.get(i) == "kept" and i in self.message) for i in ids)
        if not self._try(allowed, self.groups.take, ids):
            self._try(False, self.groups.train, self.version, [ready(i) for i in ids], {})
            return
        assert all(self.groups.state(i) is State.IN_USE for i in ids)
        self._try(False, self.groups.drop, Drop(ids[0], DropReason.STALE, TOKENS))
        uses = self.groups.train(self.version, [ready(i) for i in ids], {0: TOKENS * len(ids)})
        for group_id in ids:
            self.sums["used"] += not self.uses.get(group_id)
            self.uses.setdefault(group_id, []).append(self.version)
            assert uses[group_id] == len(self.uses[group_id]) <= self.uses_allowed
            self.model[group_id] = "kept" if uses[group_id] < self.uses_allowed else "closed"
            if self.model[group_id] == "closed":
                self._close(group_id)
        for group_id in [i for i, state in self.model.items() if state == "closed" and self.uses.get(i)]:
            if not is_fresh(self.version, PolicyVersion(self.uses[group_id][-1]), self.max_staleness):
                del self.model[group_id]

    @rule(group_id=IDS, num_events=st.integers(1, 4))
    def advance(self, group_id, num_events):
        """Allowed events alone, towards the next use: at random a group seldom comes so far."""
        for _ in range(num_events):
            match self.model.get(group_id):
                case None:
                    self.issue(group_id)
                case "issued":
                    self.arrive(group_id, group_id)
                case "arrived":
                    self.offer(group_id)
                case "ready" | "kept" if group_id in self.message:
                    self.take_and_train({group_id})
                case "kept":
                    self.arrive(group_id, group_id)
                case "dead":
                    self.revive(group_id)

    @rule()
    def next_version(self):
        self.version = PolicyVersion(self.version + 1)

    @rule(group_id=IDS)
    def retire(self, group_id):
        is_kept = self.model.get(group_id) in ("kept", "arrived") and bool(self.uses.get(group_id))
        if self._try(is_kept, self.groups.retire, group_id):
            self.model[group_id] = "closed"
            self._close(group_id)

    @rule(group_id=IDS, reason=REASONS)
    def drop(self, group_id, reason):
        is_open = self.model.get(group_id) in ("issued", "arrived", "ready") and not self.uses.get(group_id)
        if self._try(is_open, self.groups.drop, Drop(group_id, reason, 0)):
            self.sums[f"dropped {reason}"] += 1
            self._close(group_id)
            if reason is DropReason.DEAD:
                self.model[group_id] = "dead"
            else:
                del self.model[group_id]

    @rule(group_id=IDS)
    def revive(self, group_id):
        if self._try(self.model.get(group_id) == "dead", self.groups.revive, group_id):
            self.model[group_id] = "issued"
            self.closed[group_id] -= 1
            self.sums["dropped dead"] -= 1

    @rule()
    def end(self):
        self.groups.end()
        self.ended = True
        for group_id in [i for i, state in self.model.items() if state == "kept"]:
            self.model[group_id] = "closed"
            self._close(group_id)

    @rule()
    def acknowledge(self):
        settled = self.groups.settled()
        self.groups.forget_messages(settled)
        self.messages -= set(settled)
        assert self.groups.settled() == []

    @rule()
    def resume(self):
        """A checkpoint, and a session that continues from it: what was not acknowledged is delivered again."""
        groups = self.groups
        rows = groups.rows()
        assert {(v, i) for v, ids in rows for i in ids} == {
            (v, i) for i, uses in self.uses.items() for v in uses if i in self.model and self._is_in_window(v)
        }
        outstanding = sorted(groups.outstanding())
        totals = GroupTotals(groups.totals.sums, groups.totals.counts_document())
        self.groups = GroupStates(
            max_staleness=self.max_staleness, max_trained_count=self.uses_allowed, totals=totals,
            outstanding=outstanding, dead=groups.dead(), ledger=rows,
        )  # fmt: skip
        assert (self.groups.rows(), sorted(self.groups.outstanding()), self.groups.dead()) == (
            rows, outstanding, groups.dead(),
        )  # fmt: skip
        self.messages, self.message, self.ended = set(), {}, False
        in_window = {i: [v for v, ids in rows for one in ids if one == i] for i in {i for _, ids in rows for i in ids}}
        dead = [group_id for group_id, state in self.model.items() if state == "dead"]
        self.model = {i: "closed" if len(uses) == self.uses_allowed else "kept" for i, uses in in_window.items()}
        self.model |= dict.fromkeys(outstanding, "issued") | dict.fromkeys(dead, "dead")
        self.uses = in_window
        for group_id, state in self.model.items():
            if state == "kept":
                self.closed.pop(group_id, None)

    @invariant()
    def each_group_is_in_one_state(self):
        if not hasattr(self, "groups"):
            return
        known = {i: str(record.state) for i, record in self.groups._groups.items()}
        assert known == {i: "closed" if state == "dead" else state for i, state in self.model.items()}
        indexed = [i for ids in self.groups._by_state.values() for i in ids]
        assert sorted(indexed) == sorted(known)
        assert all(record.state is state for state, of in self.groups._by_state.items() for record in of.values())

    @invariant()
    def totals_add_up(self):
        if not hasattr(self, "groups"):
            return
        sums, open_ids = self.groups.totals.sums, set(self.groups.outstanding())
        assert sums.issued == sums.used + sum(sums.dropped.values()) + len(open_ids)
        assert (sums.issued, sums.used) == (self.sums["issued"], self.sums["used"])
        assert sums.used_tokens == TOKENS * sums.used
        assert {f"dropped {reason}": n for reason, n in sums.dropped.items()} == {
            name: n for name, n in self.sums.items() if name.startswith("dropped")
        }

    @invariant()
    def no_message_is_settled_early_and_no_group_twice(self):
        if not hasattr(self, "groups"):
            return
        assert set(self.groups.settled()) == self.messages - set(self.message.values())
        assert all(count <= 1 for count in self.closed.values())


TestGroupStatesMachine = GroupStatesMachine.TestCase
TestGroupStatesMachine.settings = examples(60, stateful_step_count=50)
