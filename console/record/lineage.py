"""Trace a version to its groups, rewards, prompts and parents, and a group through its history (`penstock lineage`)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.console import connections
from penstock.console.connections import NamedRun
from penstock.console.record import stored_run
from penstock.console.terminal import console, indented, one_line, table
from penstock.protocol import logs, streams
from penstock.protocol.errors import RecordBroken
from penstock.protocol.groups import BlobRef
from penstock.protocol.packs import group_pack
from penstock.protocol.record.lineage import RecordedGroup, RecordedSession, RecordedStep
from penstock.protocol.record.stored_record import StoredRecord, end_of_record
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus

_TEXT = 60  # characters of a prompt or completion that are shown
_LINKS = 8  # versions of the chain that are shown


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
    staleness: int
    rolled_back: bool  # a session that was rolled back sampled it
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
    chain, steps = _chain(record, version)
    maker = record.maker_of(version)
    session = maker if isinstance(maker, RecordedSession) else record.session_of(maker)
    maker_step = maker if isinstance(maker, RecordedStep) else None
    groups = [group for step in steps for group in step.groups]
    return VersionLineage(
        run_id=record.run_id,
        version=version,
        epoch=session.epoch,
        holder=session.holder,
        environment=session.environment,
        skipped=dict(maker_step.skipped) if maker_step else {},
        groups=[_member(record, maker_step, group) for group in maker_step.groups] if maker_step else [],
        chain=chain,
        scorers=dict(Counter(group.scored.scorer for group in groups)),
        num_prompts=len({group.prompt for group in groups}),
        updates=[list(places) for places in maker_step.updates] if maker_step else [],
    )


def packs_of(record: StoredRecord) -> dict[str, BlobRef]:
    return {pack.key: pack for step in record.steps for pack in step.packs}


def group_history(record: StoredRecord, group_id: str) -> GroupHistory:
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
        trained=_member(record, uses[0].step, uses[0].group) if uses else None,
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


def _member(record: StoredRecord, step: RecordedStep, group: RecordedGroup) -> Member:
    scored, generated = group.scored, group.scored.generated
    ends = (generated.oldest_version, generated.newest_version)
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
        pack=step.packs[group.pack].key,
        row_group=generated.row_group,
        staleness=step.staleness(group),
        rolled_back=any(record.rolled_back_by(version) is not None for version in ends),
    )


def print_lineage(run: NamedRun, *, version: int | None, group: str | None, full: bool, as_json: bool) -> int:
    """Print the lineage of a version (default the last) or the history of a group; return the exit code.

    Raises RecordBroken for what is not in the record, and the errors of NATS and the object store.
    """
    logs.configure("lineage", level="error")
    record, blobs = open_record(run)
    if group is not None:
        lineage = group_history(record, group)
        members = [lineage.trained] if lineage.trained else []
    else:
        lineage = version_lineage(record, record.last_version if version is None else version)
        members = lineage.groups
    read_texts(members, packs_of(record), blobs)
    if as_json:
        print(json.dumps(asdict(lineage)))
    elif isinstance(lineage, VersionLineage):
        _show_version(lineage, console(), full=full)
    else:
        _show_group(lineage, console(), full=full)
    return 0


def open_record(run: NamedRun) -> tuple[StoredRecord, Blobs]:
    blobs, pointer = open_objects(run)
    return StoredRecord.read(run.id, end_of_record(run.id, run.settings.run.folder, pointer), blobs.get), blobs


def open_objects(run: NamedRun) -> tuple[Blobs, Callable[[], bytes | None]]:
    """Return the objects of a run, and what reads the end of its record from NATS. Raises ConfigError or BlobError."""
    settings, files = run.settings, stored_run.store_files(run)
    blobs = files or Blobs(settings.s3, deadline_s=30.0)
    if files is None:
        blobs.check(run.id)

    def pointer() -> bytes | None:
        if files is not None:
            return None
        with Bus.connect(settings.nats, name="lineage", deadline_s=5.0) as bus:
            return connections.stored_state(bus, run.id, streams.CHECKPOINT_KEY)

    return blobs, pointer


def read_texts(members: Iterable[Member], packs: Mapping[str, BlobRef], blobs: Blobs) -> None:
    """Fill in prompts and completions; each pack is fetched once. Raises BlobMissing, BlobCorrupt or PackError."""
    by_pack: dict[str, list[Member]] = {}
    for member in members:
        by_pack.setdefault(member.pack, []).append(member)
    for key, some in by_pack.items():
        texts = group_pack.decode_texts(blobs.get(packs[key]), [member.row_group for member in some])
        for member, text in zip(some, texts, strict=True):
            member.prompt_text, member.completions = text.prompt_text, text.completions


def _show_version(lineage: VersionLineage, console: Console, *, full: bool) -> None:
    for line in _about(lineage):
        console.print(Text(one_line(line)), highlight=False)
    if lineage.groups:
        console.print()
        console.print(_groups_table(lineage.groups))
    for member in lineage.groups if full else ():
        _show_texts(member, console)
    console.print()
    for line in _earlier(lineage, full=full):
        console.print(Text(line), highlight=False)


def _about(lineage: VersionLineage) -> Iterator[str]:
    link = lineage.link
    made = f"step {link.step} on version {link.parent}" if link.step is not None else _origin(link.parent)
    yield f"run {lineage.run_id}, version {lineage.version}: {made}, by {lineage.holder} (epoch {lineage.epoch})"
    yield f"weights {link.weights_digest}"
    if lineage.environment:
        yield "made with " + ", ".join(f"{k} {v}" for k, v in lineage.environment.items())
    if lineage.skipped:
        yield "filtered out of the loss: " + ", ".join(f"{n} {reason}" for reason, n in lineage.skipped.items())
    if lineage.updates:
        sizes = ", ".join(str(len(places)) for places in lineage.updates)
        yield f"{len(lineage.updates)} optimizer steps, on {sizes} groups"


def _earlier(lineage: VersionLineage, *, full: bool) -> Iterator[str]:
    yield "earlier versions:"
    chain = lineage.chain
    num_hidden = 0 if full else max(len(chain) - _LINKS - 1, 0)
    for link in [*chain[: len(chain) - num_hidden - 1], chain[-1]]:
        if link is chain[-1] and num_hidden:
            yield f"  … {num_hidden} more, --full shows them"
        what = _origin(link.parent) if link.step is None else f"step {link.step}, {link.num_groups} groups"
        reward = "" if link.reward is None else f", reward {link.reward:.3f}"
        yield f"  version {link.version}: {what}{reward}, {link.weights_digest[:12]}…"
    groups, tokens = (sum(getattr(link, name) for link in chain) for name in ("num_groups", "num_tokens"))
    by = ", ".join(f"{n} by {name}" for name, n in lineage.scorers.items()) or "none"
    yield one_line(f"in total {groups} groups of {lineage.num_prompts} prompts, {tokens} tokens; scored: {by}")


def _origin(parent: int | None) -> str:
    return "the initial model" if parent is None else f"the weights of version {parent} again"


def _show_group(history: GroupHistory, console: Console, *, full: bool) -> None:
    console.print(f"run {history.run_id}, group {history.group_id}: issued in chapter {history.issued_in}")
    for use in history.uses:
        console.print(
            f"trained in step {use['step']}, on version {use['trained_version']}: version {use['made_version']}"
        )
    if history.dropped:
        console.print(Text(one_line(f"dropped: {history.dropped}")))
    elif history.evaluated:
        console.print("evaluated")
    elif not history.uses:
        console.print("in flight at the last checkpoint")
    if history.trained is not None:
        console.print()
        console.print(_groups_table([history.trained]))
        if full:
            _show_texts(history.trained, console)


def _groups_table(members: Sequence[Member]) -> Table:
    shown = table("group", "prompt", "reward", "parts", "scored by", "versions", "tokens", right=("reward", "tokens"))
    shown.columns[0].min_width = max(len(member.group_id) for member in members)  # ids are typed elsewhere
    for member in members:
        parts = " ".join(f"{name} {fmean(values):.2f}" for name, values in member.parts.items())
        versions = " to ".join(map(str, dict.fromkeys((member.oldest_version, member.newest_version))))
        versions += " (rolled back)" if member.rolled_back else ""
        reuse = f" (use {member.use})" if member.use > 1 else ""
        cells = (member.group_id + reuse, short(member.prompt_text), f"{fmean(member.rewards):.3f}", parts)
        shown.add_row(*(Text(one_line(cell)) for cell in (*cells, member.scorer, versions, str(member.num_tokens))))
    return shown


def _show_texts(member: Member, console: Console) -> None:
    console.print(Text(f"\n{one_line(member.group_id)}: {indented(member.prompt_text, 2)}"))
    for number, (text, reward) in enumerate(zip(member.completions, member.rewards, strict=True)):
        parts = "".join(f"  {name}={values[number]:g}" for name, values in member.parts.items())
        console.print(Text(one_line(f"{reward:8.3f}  {text!r}{parts}")))


def short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _TEXT else line[: _TEXT - 1] + "…"
