"""`penstock lineage`: the groups, rewards, prompts and parents of a version, or the history of a group."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.console import connections
from penstock.console.printable import printable
from penstock.console.record.ancestry import (
    GroupHistory,
    Member,
    VersionLineage,
    group_history,
    packs_of,
    version_lineage,
)
from penstock.console.tables import console
from penstock.protocol import logs, streams
from penstock.protocol.facts import BlobRef
from penstock.protocol.packs import group_pack
from penstock.protocol.record.stored_record import StoredRecord, end_of_record
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus

_TEXT = 60  # characters of a prompt or completion that are shown
_LINKS = 8  # versions of the chain that are shown


def print_lineage(
    run: str,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    *,
    version: int | None,
    group: str | None,
    full: bool,
    as_json: bool,
) -> int:
    """Print the lineage of a version (default the last) or the history of a group; return the exit code.

    Raises RecordBroken for what is not in the record, and the errors of NATS and the object store.
    """
    logs.configure("lineage", level="error")
    record, blobs = open_record(run, arguments, environ)
    if group is not None:
        found = group_history(record, group)
        read_texts([found.trained] if found.trained else [], packs_of(record), blobs)
        _print(found, console(), full=full, as_json=as_json)
        return 0
    found = version_lineage(record, record.last_version if version is None else version)
    read_texts(found.groups, packs_of(record), blobs)
    _print(found, console(), full=full, as_json=as_json)
    return 0


def open_record(run: str, arguments: Sequence[str], environ: Mapping[str, str]) -> tuple[StoredRecord, Blobs]:
    """Read a run's record; NATS is needed only when no checkpoint of the run is on this machine."""
    settings = connections.find(arguments, environ, run_id=run).settings
    blobs = Blobs(settings.s3, deadline_s=30.0)
    blobs.check(run)

    def pointer() -> bytes | None:
        with Bus.connect(settings.nats, name="lineage", deadline_s=5.0) as bus:
            entry = bus.key_value(streams.state_bucket(run).bucket).wait().get(streams.CHECKPOINT_KEY).wait()
            return None if entry is None else entry.value

    return StoredRecord.read(run, end_of_record(run, settings.run.folder, pointer), blobs.get), blobs


def read_texts(members: Iterable[Member], packs: Mapping[str, BlobRef], blobs: Blobs) -> None:
    """Fill in prompts and completions; each pack is fetched once. Raises BlobMissing, BlobCorrupt or PackError."""
    by_pack: dict[str, list[Member]] = {}
    for member in members:
        by_pack.setdefault(member.pack, []).append(member)
    for key, some in by_pack.items():
        texts = group_pack.decode_texts(blobs.get(packs[key]), [member.row_group for member in some])
        for member, text in zip(some, texts, strict=True):
            member.prompt_text, member.completions = text.prompt_text, text.completions


def _print(found: VersionLineage | GroupHistory, console: Console, *, full: bool, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(found)))
    elif isinstance(found, VersionLineage):
        _show_version(found, console, full=full)
    else:
        _show_group(found, console, full=full)


def _show_version(found: VersionLineage, console: Console, *, full: bool) -> None:
    link = found.link
    made = f"step {link.step} on version {link.parent}" if link.step is not None else _origin(link.parent)
    console.print(f"run {found.run_id}, version {found.version}: {made}, by {found.holder} (epoch {found.epoch})")
    console.print(f"weights {link.weights_digest}", highlight=False)
    if found.environment:
        made_with = ", ".join(f"{k} {v}" for k, v in found.environment.items())
        console.print(Text(printable(f"made with {made_with}")), highlight=False)
    if found.skipped:
        console.print("filtered out of the loss: " + ", ".join(f"{n} {reason}" for reason, n in found.skipped.items()))
    if found.updates:
        sizes = ", ".join(str(len(places)) for places in found.updates)
        console.print(f"{len(found.updates)} optimizer steps, on {sizes} groups")
    if found.groups:
        console.print()
        console.print(_groups_table(found.groups))
    for member in found.groups if full else ():
        _show_texts(member, console)
    console.print("\nearlier versions:")
    shown = found.chain if full or len(found.chain) <= _LINKS + 1 else [*found.chain[:_LINKS], found.chain[-1]]
    for one in shown:
        if one is shown[-1] and len(shown) < len(found.chain):
            console.print(f"  … {len(found.chain) - len(shown)} more, --full shows them")
        what = _origin(one.parent) if one.step is None else f"step {one.step}, {one.num_groups} groups"
        reward = "" if one.reward is None else f", reward {one.reward:.3f}"
        console.print(f"  version {one.version}: {what}{reward}, {one.weights_digest[:12]}…", highlight=False)
    groups, tokens = sum(one.num_groups for one in found.chain), sum(one.num_tokens for one in found.chain)
    by = ", ".join(f"{n} by {name}" for name, n in found.scorers.items()) or "none"
    total = f"in total {groups} groups of {found.num_prompts} prompts, {tokens} tokens; scored: {by}"
    console.print(Text(printable(total)), highlight=False)


def _origin(parent: int | None) -> str:
    return "the initial model" if parent is None else f"the weights of version {parent} again"


def _show_group(found: GroupHistory, console: Console, *, full: bool) -> None:
    console.print(f"run {found.run_id}, group {found.group_id}: issued in chapter {found.issued_in}")
    for use in found.uses:
        console.print(
            f"trained in step {use['step']}, on version {use['trained_version']}: version {use['made_version']}"
        )
    if found.dropped:
        console.print(f"dropped: {found.dropped}")
    elif found.evaluated:
        console.print("evaluated")
    elif not found.uses:
        console.print("in flight at the last checkpoint")
    if found.trained is not None:
        console.print()
        console.print(_groups_table([found.trained]))
        if full:
            _show_texts(found.trained, console)


def _groups_table(members: Sequence[Member]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("group", "prompt", "reward", "parts", "scored by", "versions", "tokens"):
        right = name in {"reward", "tokens"}
        widest = max(len(member.group_id) for member in members) if name == "group" else None  # ids are typed elsewhere
        table.add_column(
            name, justify="right" if right else "left", no_wrap=True, overflow="ellipsis", min_width=widest
        )
    for member in members:
        parts = " ".join(f"{name} {fmean(values):.2f}" for name, values in member.parts.items())
        versions = f"{member.oldest_version}" + (
            f" to {member.newest_version}" if member.newest_version != member.oldest_version else ""
        )
        reuse = f" (use {member.use})" if member.use > 1 else ""
        cells = (
            member.group_id + reuse,
            short(member.prompt_text),
            f"{fmean(member.rewards):.3f}",
            parts,
            member.scorer,
        )
        table.add_row(*(Text(printable(cell)) for cell in (*cells, versions, str(member.num_tokens))))
    return table


def _show_texts(member: Member, console: Console) -> None:
    console.print(Text(printable(f"\n{member.group_id}: {member.prompt_text}")))
    for number, (text, reward) in enumerate(zip(member.completions, member.rewards, strict=True)):
        parts = "".join(f"  {name}={values[number]:g}" for name, values in member.parts.items())
        console.print(Text(printable(f"{reward:8.3f}  {text!r}{parts}")))


def short(text: str) -> str:
    """Return a text on one line, truncated to the column."""
    line = " ".join(text.split())
    return line if len(line) <= _TEXT else line[: _TEXT - 1] + "…"
