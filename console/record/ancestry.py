"""The history of a version and of a group, from the record of a run; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from penstock.protocol.errors import RecordBroken
from penstock.protocol.facts import BlobRef
from penstock.protocol.record.lineage import RecordedGroup, RecordedSession, RecordedStep
from penstock.protocol.record.stored_record import StoredRecord


@dataclass(slots=True)
class Member:
    """One group as it was trained; texts are empty until its pack has been read. Its fields are keys of `--json`."""

    group_id: str
    prompt: int  # number in the training data
    use: int
    rewards: tuple[float, ...]
    parts: dict[str, tuple[float, ...]]
    scorer: str  # of the rewards, with its version
    oldest_version: int  # that sampled it
    newest_version: int
    num_tokens: int
    pack: str  # key
    row_group: int
    prompt_text: str = ""
    completions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Link:
    """A version and the step that made it; ``step`` is None where a session published weights under a new number."""

    version: int
    parent: int | None  # None: the initial model
    step: int | None
    weights_digest: str
    num_groups: int = 0
    num_tokens: int = 0
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class VersionLineage:
    """One version: its trainer, its groups and all versions before it; its fields are keys of `--json`."""

    run_id: str
    version: int
    epoch: int  # of the session that made it
    holder: str
    environment: dict[str, str]
    skipped: dict[str, int]  # trajectories that filters left out of the loss
    groups: list[Member]
    chain: list[Link]  # from the version itself back to the first
    scorers: dict[str, int]  # groups of the whole chain, by scorer
    num_prompts: int  # of the whole chain
    updates: list[list[int]] = field(
        default_factory=list
    )  # places of the groups of each optimizer step; none: one step

    @property
    def link(self) -> Link:
        """The version itself."""
        return self.chain[0]


@dataclass(frozen=True, slots=True)
class GroupHistory:
    """The history of one group: at most one of ``uses``, ``dropped``, ``evaluated`` is set, none while it is in flight.

    Its fields are keys of `--json`.
    """

    run_id: str
    group_id: str
    issued_in: int  # chapter
    uses: list[dict[str, int]] = field(default_factory=list)  # step, trained_version, made_version
    trained: Member | None = None
    dropped: str | None = None  # reason
    evaluated: bool = False


def version_lineage(record: StoredRecord, version: int) -> VersionLineage:
    """Return the lineage of a version; raises RecordBroken for one that is not in the record."""
    chain, steps = _chain(record, version)
    maker = record.maker_of(version)
    session = maker if isinstance(maker, RecordedSession) else record.session_of(maker)
    own = maker if isinstance(maker, RecordedStep) else None
    groups = [group for step in steps for group in step.groups]
    return VersionLineage(
        run_id=record.run_id,
        version=version,
        epoch=session.epoch,
        holder=session.holder,
        environment=session.environment,
        skipped=dict(own.skipped) if own else {},
        groups=[_member(group, own.packs) for group in own.groups] if own else [],
        chain=chain,
        scorers=dict(Counter(group.scored.scorer for group in groups)),
        num_prompts=len({group.prompt for group in groups}),
        updates=[list(places) for places in own.updates] if own else [],
    )


def packs_of(record: StoredRecord) -> dict[str, BlobRef]:
    """Return every pack that was trained on, by key."""
    return {pack.key: pack for step in record.steps for pack in step.packs}


def group_history(record: StoredRecord, group_id: str) -> GroupHistory:
    """Return the history of a group; raises RecordBroken for one that is not in the record."""
    issued = [c.number for c in record.chapters if any(group_id in ids for ids in c.issued.values())]
    if not issued:
        raise RecordBroken(
            f"run {record.run_id} has no group {group_id} in its record; training groups are named "
            "e<epoch>.p<prompt>.a<attempt>, held-out ones eval.v<version>.p<prompt>"
        )
    uses = record.uses_of(group_id)
    return GroupHistory(
        run_id=record.run_id,
        group_id=group_id,
        issued_in=issued[0],
        uses=[
            {"step": u.step.step, "trained_version": u.step.trained_version, "made_version": u.step.made_version}
            for u in uses
        ],
        trained=_member(uses[0].group, uses[0].step.packs) if uses else None,
        dropped=_drop(record, group_id),
        evaluated=any(e.group_id == group_id for chapter in record.chapters for e in chapter.evaluated),
    )


def _drop(record: StoredRecord, group_id: str) -> str | None:
    """Return why a group was dropped; None when it was not, or when its dead letter was sent again since."""
    reason: str | None = None
    for chapter in record.chapters:
        if group_id in chapter.revived:
            reason = None
        for drop in chapter.dropped:
            if drop.group_id == group_id:
                reason = drop.reason
    return reason


def _chain(record: StoredRecord, version: int) -> tuple[list[Link], list[RecordedStep]]:
    chain: list[Link] = []
    steps: list[RecordedStep] = []
    at: int | None = version
    while at is not None:
        maker = record.maker_of(at)
        if isinstance(maker, RecordedSession):
            chain.append(Link(at, maker.parent_version, None, maker.weights_digest))
        else:
            steps.append(maker)
            rewards = [reward for group in maker.groups for reward in group.scored.rewards]
            tokens = sum(group.num_tokens for group in maker.groups)
            parent, digest = maker.trained_version, maker.weights_digest
            chain.append(Link(at, parent, maker.step, digest, len(maker.groups), tokens, fmean(rewards)))
        at = chain[-1].parent
    return chain, steps


def _member(group: RecordedGroup, packs: Sequence[BlobRef]) -> Member:
    scored, generated = group.scored, group.scored.generated
    return Member(
        group_id=group.group_id,
        prompt=group.prompt,
        use=group.use,
        rewards=scored.rewards,
        parts=dict(scored.parts),
        scorer=scored.scorer,
        oldest_version=generated.oldest_version,
        newest_version=generated.newest_version,
        num_tokens=group.num_tokens,
        pack=packs[group.pack].key,
        row_group=generated.row_group,
    )
