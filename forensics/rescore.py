"""`penstock rescore`: new rewards for the groups of a run, stored as the input of a run without engines."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from penstock.console import connections, launch
from penstock.console.connections import NamedRun
from penstock.console.record.lineage import open_record
from penstock.console.tools.rewards import RewardService, service_url
from penstock.protocol import blob_keys
from penstock.protocol.config.reward_settings import RewardDefinition, RewardSettings
from penstock.protocol.errors import ConfigError, PackError, RecordBroken
from penstock.protocol.facts import encode_unbounded
from penstock.protocol.groups import BlobRef, ScoredGroup
from penstock.protocol.packs import group_pack
from penstock.protocol.packs.group_pack import GroupTexts
from penstock.protocol.process_end import error_text
from penstock.protocol.record.lineage import LineageChapter, RecordedGroup, SplitTotals
from penstock.protocol.record.stored_record import RescoredInput, RescoredPiece, StoredRecord
from penstock.protocol.subjects import check_run_id
from penstock.protocol.transport.blobs import Blobs

WHOLE = "reward"  # the name of the reward itself among the weights
_ATTEMPTS = 3  # for failures that a run would retry
_RETRY_S = 0.5
_CALL_GROUPS = 32  # per request
Outcome = ScoredGroup | str  # or the reason why there is none


@dataclass(frozen=True, slots=True)
class Rule:
    """How to compute the new rewards; without ``reward`` from the stored ones."""

    reward: str | None
    weights: dict[str, float] = field(default_factory=dict)
    define: Mapping[str, RewardDefinition] = field(default_factory=dict)  # rewards by parts in the run's settings

    def __post_init__(self) -> None:
        if self.reward is None and not self.weights:
            raise ConfigError("no new reward given; add --reward NAME, --weights part=0.5,other=1, or both")


@dataclass(frozen=True, slots=True)
class GroupToScore:
    member: RecordedGroup
    pack: BlobRef
    text: GroupTexts


def parse_weights(text: str) -> dict[str, float]:
    """Read ``part=0.5,other=1``; raises ConfigError for anything else."""
    try:
        pairs = [pair.split("=") for pair in text.split(",") if pair]
        return {name.strip(): float(value) for name, value in pairs}
    except ValueError:
        raise ConfigError(
            f"--weights {text!r}: expected part=NUMBER, comma-separated; {WHOLE} is the reward itself"
        ) from None


def score_again(groups: Sequence[GroupToScore], rule: Rule, service: RewardService) -> dict[str, Outcome]:
    if rule.reward is None:
        outcomes: dict[str, Outcome] = {group.member.group_id: group.member.scored for group in groups}
    else:
        outcomes = {}
        for start in range(0, len(groups), _CALL_GROUPS):
            outcomes |= _from_service(groups[start : start + _CALL_GROUPS], rule.reward, service)
    define = rule.define if rule.reward is None else {}
    return {i: reweight(o, rule.weights, define) if isinstance(o, ScoredGroup) else o for i, o in outcomes.items()}


def reweight(
    scored: ScoredGroup, weights: Mapping[str, float], define: Mapping[str, RewardDefinition] = MappingProxyType({})
) -> Outcome:
    """Return a group with rewards by other weights, or the reason when it lacks a part.

    For a reward defined by parts (``define``), other weights and gates are kept. Any other becomes the weighted sum of
    the named parts; ``reward`` is the reward itself.
    """
    if not weights:
        return scored
    columns = {**scored.parts, WHOLE: scored.rewards}
    definition = None if WHOLE in weights else define.get(scored.scorer.partition("(")[0])
    missing = sorted(set(weights) - set(columns))
    if missing and definition is None:
        return f"it has no part {missing[0]}; it has {', '.join(sorted(columns))}"
    if definition is not None:
        try:
            rewards = definition.reweighted(weights).totals(scored.parts)
        except ConfigError as err:
            return str(err)
    else:
        rows = range(len(scored.rewards))
        rewards = tuple(sum(weight * columns[name][row] for name, weight in weights.items()) for row in rows)
    shown = ",".join(f"{name}={weight:g}" for name, weight in weights.items())
    return scored.model_copy(update={"rewards": rewards, "scorer": f"{scored.scorer} weighed {shown}"})


def _from_service(groups: Sequence[GroupToScore], reward: str, service: RewardService) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    waiting = list(groups)
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_RETRY_S * 2 ** (attempt - 1))
        answer = service.call("POST", "/v1/score", {"reward": reward, "groups": [_wire(group) for group in waiting]})
        retried = []
        for pending_group, result in zip(waiting, answer["results"], strict=True):
            outcomes[pending_group.member.group_id] = _outcome(pending_group, result)
            if result["error"] is not None and not result["error"]["permanent"]:
                retried.append(pending_group)
        waiting = retried
        if not waiting:
            break
    return outcomes


def _wire(group: GroupToScore) -> dict[str, Any]:
    text, truth = group.text, group.text.reward.ground_truth
    return {
        "group_id": text.group_id,
        "prompt": text.prompt_text,
        "completions": list(text.completions),
        "completion_tokens": list(group.member.scored.generated.completion_tokens),
        "data_source": text.reward.data_source,
        "ground_truth": None if truth is None else json.loads(truth),
        "extra_info": json.loads(text.reward.extra_info),
    }


def _outcome(group: GroupToScore, result: Mapping[str, Any]) -> Outcome:
    if result["error"] is not None:
        return f"{result['error']['reason']}: {result['error']['detail']}"
    scores = result["scores"]
    names = sorted({name for score in scores for name in score["parts"]})
    parts = {name: tuple(float(score["parts"].get(name, 0.0)) for score in scores) for name in names}
    rewards = tuple(float(score["score"]) for score in scores)
    try:
        return ScoredGroup(
            generated=group.member.scored.generated, rewards=rewards, parts=parts, scorer=result["scorer"]
        )
    except ValidationError as err:
        return f"invalid answer: {err.errors()[0]['msg']}"


@dataclass(frozen=True, slots=True)
class RescoreOptions:
    rule: Rule
    into: str | None  # id of the input; None: made from run and reward
    url: str
    token_file: Path | None
    leave_out: bool  # continue without groups that could not be scored


def rescore(run: NamedRun, options: RescoreOptions, *, as_json: bool) -> int:
    """Score a run's trained groups again and store them as an input; return 1 when a group could not be scored.

    Raises ConfigError, RecordBroken, RewardServiceError, PackError, and the errors of the object store.
    """
    into = check_run_id(options.into or _name(run.id, options.rule))
    record, blobs = open_record(run)
    if any(blobs.list(blob_keys.run_prefix(into))):
        raise ConfigError(f"runs/{into}/ already holds objects, which are not overwritten; choose another --into")
    service = RewardService(options.url, options.token_file)
    rule = replace(options.rule, define=_definitions(record, blobs)) if options.rule.weights else options.rule
    outcomes: dict[str, Outcome] = {}
    for chapter in record.chapters:
        outcomes |= score_again(list(_groups_to_score(chapter, blobs)), rule, service)
    failed = {group_id: why for group_id, why in outcomes.items() if isinstance(why, str)}
    for why, group_ids in _by_reason(failed).items():
        more = f" and {len(group_ids) - 1} more" if len(group_ids) > 1 else ""
        print(error_text(f"penstock: group {group_ids[0]}{more}: {why}"), file=sys.stderr)
    if len(failed) == len(outcomes) or (failed and not options.leave_out):
        print(
            f"penstock: {len(failed)} of {len(outcomes)} groups could not be scored; nothing was written. Fix the "
            "reward, name another, serve your own file for this command (--serve FILE), or skip the failed groups with "
            "--leave-out-failed",
            file=sys.stderr,
        )
        return 1
    written = _write(into, record, outcomes, options.rule, blobs)
    store = run.folder / connections.STORE
    _print_result(written, not_trained(record), as_json=as_json, store=store if store.is_dir() else None)
    return 0


def service_for(run: NamedRun, rule: Rule, *, url: str | None, serve: Sequence[Path], typed: Sequence[str]) -> str:
    """Return the URL of the reward service, which is started for this command if none answers (`service_url`).

    It offers the rewards that the run's settings define too. Nothing is started when the rule names no reward.
    """
    if rule.reward is None:
        return url or launch.REWARD_URL
    recorded = run.folder / "config.json"
    more = [*(["--recorded", str(recorded)] if recorded.is_file() else []), *run.arguments]
    return service_url(url, serve, more, typed)


def not_trained(record: StoredRecord) -> dict[str, int]:
    """Count the training groups of a run that no step used, by state: an input does not include them."""
    totals = record.chapters[-1].account.totals.get("train", SplitTotals())
    counts = {f"dropped: {reason}": number for reason, number in sorted(totals.dropped.items())}
    return {what: number for what, number in {**counts, "in flight": totals.in_flight}.items() if number}


def _by_reason(failed: Mapping[str, str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for group_id, why in failed.items():
        groups.setdefault(why, []).append(group_id)
    return groups


def _name(run: str, rule: Rule) -> str:
    kind = re.sub(r"[^a-z0-9]+", "-", (rule.reward or "weighed").lower()).strip("-")
    return f"{run}-{kind or 'rescored'}"


def _first_uses(chapter: LineageChapter) -> list[tuple[RecordedGroup, BlobRef]]:
    return [(g, step.packs[g.pack]) for step in chapter.steps for g in step.groups if g.use == 1]


def _groups_to_score(chapter: LineageChapter, blobs: Blobs) -> Iterator[GroupToScore]:
    by_pack: dict[BlobRef, list[RecordedGroup]] = {}
    for group, pack in _first_uses(chapter):
        by_pack.setdefault(pack, []).append(group)
    for pack, groups in by_pack.items():
        rows = [group.scored.generated.row_group for group in groups]
        for group, text in zip(groups, group_pack.decode_texts(blobs.get(pack), rows), strict=True):
            if text.group_id != group.group_id:
                raise PackError(f"{pack.key} holds group {text.group_id} where the record has {group.group_id}")
            yield GroupToScore(group, pack, text)


def _write(into: str, record: StoredRecord, outcomes: Mapping[str, Outcome], rule: Rule, blobs: Blobs) -> RescoredInput:
    pieces, copied, num_groups = list[BlobRef](), dict[BlobRef, BlobRef](), 0
    for chapter in record.chapters:
        groups = [(g, pack, outcomes[g.group_id]) for g, pack in _first_uses(chapter)]
        scored = [(g, pack, new) for g, pack, new in groups if isinstance(new, ScoredGroup)]
        if not scored:
            continue
        packs = list(dict.fromkeys(pack for _, pack, _ in scored))
        for pack in packs:
            if pack not in copied:
                copied[pack] = blobs.put(blob_keys.copied_pack(into, pack.key), blobs.get(pack))
        members = tuple(RecordedGroup(prompt=g.prompt, pack=packs.index(pack), scored=new) for g, pack, new in scored)
        data = encode_unbounded(RescoredPiece(packs=tuple(copied[pack] for pack in packs), groups=members))
        key = blob_keys.rescored_piece(into, chapter.number, hashlib.sha256(data).hexdigest())
        pieces.append(blobs.put(key, data))
        num_groups += len(members)
    written = RescoredInput(
        run_id=into,
        source=record.run_id,
        source_record=record.end,
        source_version=record.last_version,
        reward=rule.reward,
        weights=rule.weights,
        temperature=_temperature(record, blobs),
        pieces=tuple(pieces),
        num_groups=num_groups,
        left_out={group_id: why for group_id, why in outcomes.items() if isinstance(why, str)},
    )
    data = encode_unbounded(written)
    blobs.put(blob_keys.rescored_input(into, hashlib.sha256(data).hexdigest()), data)
    return written


def _definitions(record: StoredRecord, blobs: Blobs) -> dict[str, RewardDefinition]:
    if not record.sessions:
        return {}
    try:
        settings = json.loads(blobs.get(record.sessions[-1].config))["settings"]
        return dict(RewardSettings.model_validate(settings.get("reward", {})).define)
    except (ValueError, KeyError, TypeError) as err:
        raise RecordBroken(f"run {record.run_id}: its recorded settings of [reward] cannot be read ({err})") from None


def _temperature(record: StoredRecord, blobs: Blobs) -> float:
    documents = {session.config.key: session.config for session in record.sessions}
    try:
        temperatures = {
            float(json.loads(blobs.get(document))["settings"]["rollout"]["temperature"])
            for document in documents.values()
        }
    except (ValueError, KeyError, TypeError) as err:
        raise RecordBroken(f"run {record.run_id}: its recorded settings have no rollout.temperature ({err})") from None
    if len(temperatures) != 1:
        raise RecordBroken(
            f"run {record.run_id} sampled at temperatures {sorted(temperatures)}; log-probabilities of several temperatures "
            "cannot be trained on together"
        )
    return temperatures.pop()


def _print_result(written: RescoredInput, others: Mapping[str, int], *, as_json: bool, store: Path | None) -> None:
    if as_json:
        document = written.model_dump(
            mode="json", include={"run_id", "source", "num_groups", "left_out", "reward", "weights"}
        )
        print(json.dumps(document | {"not_trained": dict(others)}))
        return
    left = f", {len(written.left_out)} left out" if written.left_out else ""
    print(f"{written.run_id}: {written.num_groups} groups of run {written.source} with new rewards{left}")
    if others:
        counts = ", ".join(f"{what} {number}" for what, number in others.items())
        print(f"not included: {sum(others.values())} groups that no step of run {written.source} trained on ({counts})")
    local = "" if store is None else "--local "
    print(f"next: penstock train run.toml {local}run.id=NEW data.from_run={written.run_id} eval.every=0")
