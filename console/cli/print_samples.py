"""`penstock samples`: the groups of a run in the terminal, also after its end: a list with filters, or one group in full."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.console.connections import NamedRun
from penstock.console.record.lineage import open_objects
from penstock.console.report.diagnoses import MEANINGS, OF_A_FILTER
from penstock.console.terminal import indented, one_line
from penstock.console.web.reading.recorded_groups import Entry, GroupQuery, TrajectoryQuery, group_document
from penstock.console.web.reading.stored_groups import StoredGroups
from penstock.console.web.reading.stored_logprobs import Current
from penstock.protocol import logs
from penstock.protocol.packs.group_texts import GroupTexts

if TYPE_CHECKING:
    from penstock.console.cli.options import SampleOptions

_EXCERPT = 400  # characters of a text in a list
_TURN = re.compile(r"<\|(?:im_start|start_header_id)\|>(\w+)(?:<\|end_header_id\|>)?\s*")  # ChatML, Llama 3
_MARK = re.compile(r"<\|(?:im_end|eot_id|begin_of_text|endoftext)\|>")


def print_samples(run: NamedRun, options: SampleOptions, *, as_json: bool) -> int:
    """Print what the options ask for; return 1 when nothing is found. Raises RecordBroken, QueryRefused, ConfigError, BlobError."""
    logs.configure("samples", level="error")
    groups = StoredGroups(run.id, run.settings.run.folder, *open_objects(run))
    if options.group is not None:
        entry = groups.find(options.group, chapter=None)
        group, problem = groups.group(entry)
        document = group_document(entry, group, Current(), problem)
        print(json.dumps(document) if as_json else "\n".join(_group_lines(document)))
        return 0
    found: list[dict[str, Any]] = []
    query = TrajectoryQuery(
        step_from=options.step, step_to=options.step, reward_min=options.reward_min, reward_max=options.reward_max,
        status="dropped" if options.dropped else "", reason="" if options.dropped in (None, "any") else options.dropped,
        split=options.split, version=options.version, prompt_number=options.prompt, prompt=options.search or "",
    )  # fmt: skip
    for entry, texts in groups.walk(query):
        found += list(_rows(entry, texts, query))[: options.limit - len(found)]
        if len(found) == options.limit:
            break
    if as_json:
        print(json.dumps(found))
    elif not found:
        print("no sample of the run's newest checkpoint fits; without filters: penstock samples", run)
    else:
        for _, rows in itertools.groupby(found, lambda row: (row["group_id"], row["step"])):
            print("\n".join(_group_of_list(list(rows))), end="\n\n")
        print(f"{len(found)} samples" + (", more with --limit" if len(found) == options.limit else ""))
        print(f"next: penstock samples {run} --group {found[0]['group_id']}")
    return 0 if found else 1


def _rows(entry: Entry, texts: GroupTexts | None, query: GroupQuery) -> Iterator[dict[str, Any]]:
    """Yield the completions of a group that a query accepts; of one without a pack, one row that says so."""
    scored = entry.scored
    head = {
        "group_id": entry.group_id, "status": entry.status, "reason": entry.reason, "split": entry.split, "step": entry.step,
        "versions": [scored.generated.oldest_version, scored.generated.newest_version] if scored else None,
        "prompt": texts.prompt_text if texts else None,
    }  # fmt: skip
    completions = texts.completions if texts else [None] * max(len(entry.rewards), 1)
    for index, completion in enumerate(completions):
        reward = scored.rewards[index] if scored else None
        has_text = query.prompt.casefold() in f"{head['prompt'] or ''}\n{completion or ''}".casefold()
        if not has_text or (reward is not None and not query.accepts_reward(reward)):
            continue
        yield head | {
            "index": index, "reward": reward, "completion": completion,
            "parts": {name: values[index] for name, values in scored.parts.items()} if scored else {},
            "finish_reason": texts.finish_reasons[index] if texts else None,
        }  # fmt: skip


def _group_of_list(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield one_line(f"{rows[0]['group_id']}  {_place(rows[0])}")
    yield "  " + _excerpt(rows[0]["prompt"], 2)
    for row in rows:
        yield one_line(f"  #{row['index']}  {_reward(row)}")
        yield "      " + _excerpt(row["completion"], 6)


def _excerpt(text: str | None, column: int) -> str:
    shown = as_roles(text or "(its pack is not in the object store)")
    return indented(shown if len(shown) <= _EXCERPT else f"{shown[:_EXCERPT]}…", column)


def _place(row: Mapping[str, Any]) -> str:
    words = f"step {row['step']}" if row["step"] is not None else row["status"]
    if row["reason"]:
        words += f" ({row['reason']}: {MEANINGS.get(row['reason'], OF_A_FILTER)})"
    versions = [*dict.fromkeys(row.get("versions") or ())]
    return words + (f", sampled by version {' to '.join(map(str, versions))}" if versions else "")


def _reward(row: Mapping[str, Any]) -> str:
    reward = "no recorded reward" if row["reward"] is None else f"reward {row['reward']:.3f}"
    parts = "".join(f"  {name} {value:g}" for name, value in row["parts"].items())
    return f"{reward}{parts}  {row['finish_reason'] or ''}".rstrip()


def _group_lines(group: Mapping[str, Any]) -> Iterator[str]:
    yield one_line(f"{group['group_id']}  {_place(group)}  {group['tokens']} tokens")
    if group["problem"]:
        yield one_line(f"texts cannot be shown: {group['problem']}")
    if "ground_truth" in group:
        yield one_line(
            f"reward {group['reward_name']}, data source {group['data_source']}, ground truth {group['ground_truth']}"
        )
        yield indented(as_roles(group["prompt"]), 0)
    for trajectory in group["trajectories"]:
        rewards = [f"{turn['reward']:g}" for turn in trajectory["turns"] if turn["reward"] is not None]
        by_turn = f"  by turn {', '.join(rewards)}" if rewards else ""
        yield "\n" + one_line(f"#{trajectory['index']}  {_reward(trajectory)}{by_turn}")
        for message in trajectory["messages"]:
            yield f"  {one_line(message['role'])}: {indented(message['content'], 4)}"
        if not trajectory["messages"]:
            yield "  " + indented(as_roles(trajectory["completion"]), 2)


def as_roles(text: str) -> str:
    """Return a text with the marks of chat templates as roles: ``user: …``."""
    return _MARK.sub("", _TURN.sub(r"\1: ", text)).strip()
