"""`penstock runs stopped`: the batch at which a run stopped by itself, group by group."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np

from penstock.console.connections import NamedRun
from penstock.console.terminal import one_line, print_table
from penstock.console.tools.runs import existing_folder
from penstock.protocol.errors import ConfigError, MalformedFact, PackError
from penstock.protocol.groups import ScoredGroup
from penstock.protocol.record.stopped_batch import FOLDER, read_batch, stopped_batches
from penstock.protocol.trajectory import Group

_FAR_REWARD = 1e4  # of a reward; a loss in float32 of products of these soon is infinite
_FAR_LOGPROB = -30.0  # nats: one in 10^13 samples
_PROMPT = 40  # characters


@dataclass(frozen=True, slots=True)
class StoppedGroup:
    group_id: str
    prompt_text: str
    rewards: tuple[float, ...]
    completion_tokens: tuple[int, ...]
    versions: tuple[int, int]  # oldest and newest that sampled a token
    least_logprob: float  # of all sampled tokens, by the engine, in nats
    scorer: str
    far_out: tuple[str, ...]  # what is unusual about it


def print_stopped(run: NamedRun, *, step: int | None, as_json: bool) -> int:
    folder = existing_folder(run)
    batch_folders = {int(path.name.removeprefix("step")): path for path in stopped_batches(folder)}
    if not batch_folders:
        raise ConfigError(f"{folder / FOLDER}: no saved batch; the run has not stopped by itself")
    if step is not None and step not in batch_folders:
        raise ConfigError(
            f"{folder / FOLDER}: no batch of step {step}; saved are those of {', '.join(map(str, batch_folders))}"
        )
    chosen = batch_folders[max(batch_folders) if step is None else step]
    try:
        batch, groups = read_batch(chosen)
    except (MalformedFact, PackError, OSError) as err:
        raise ConfigError(f"{chosen} cannot be read ({err}); restore it") from None
    shown = [_describe(scored, group) for scored, group in zip(batch.groups, groups, strict=True)]
    if as_json:
        document = {
            **batch.model_dump(exclude={"groups"}),
            "folder": str(chosen),
            "groups": [asdict(row) for row in shown],
        }
        print(json.dumps(document))
        return 0
    print(f"run {run}, step {batch.step} on version {batch.version}: {one_line(batch.reason)}\n{chosen}\n")
    columns = ("group", "prompt", "rewards", "tokens", "versions", "least log-probability", "scorer", "far out")
    print_table(columns, map(_cells, shown), wide=columns)
    return 0


def _describe(scored: ScoredGroup, group: Group) -> StoppedGroup:
    summary = scored.generated
    least = min(float(np.min(row.behaviour_logprobs[row.loss_mask], initial=0.0)) for row in group.trajectories)
    far = [f"reward {reward:.3g}" for reward in scored.rewards if abs(reward) > _FAR_REWARD][:1]
    far += [f"log-probability {least:.3g}"] if least < _FAR_LOGPROB else []
    return StoppedGroup(
        group_id=summary.group_id,
        prompt_text=group.prompt_text,
        rewards=scored.rewards,
        completion_tokens=summary.completion_tokens,
        versions=(summary.oldest_version, summary.newest_version),
        least_logprob=least,
        scorer=scored.scorer,
        far_out=tuple(far),
    )


def _cells(group: StoppedGroup) -> tuple[str, ...]:
    return (
        group.group_id,
        group.prompt_text[:_PROMPT].replace("\n", " "),
        " ".join(f"{reward:.3g}" for reward in group.rewards),
        " ".join(map(str, group.completion_tokens)),
        "–".join(map(str, dict.fromkeys(group.versions))),
        f"{group.least_logprob:.3g}",
        group.scorer,
        ", ".join(group.far_out),
    )
