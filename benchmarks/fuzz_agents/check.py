"""Check an episode's rows against the fuzzer's own record of what the engine returned; pure but for the judge's forward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from benchmarks.fuzz_agents.model import Recorded, Sampled

from penstock.protocol.episode import Episode
from penstock.protocol.errors import PackError
from penstock.rollout_service.proxy.build_episode import counts_of, messages_json, stored_rows
from penstock.rollout_service.proxy.rows import TreeRow, TreeRows
from penstock.rollout_service.proxy.session import EpisodeSession

TOLERANCE = 1e-5
_LONGEST_ANSWER = 64


@dataclass(slots=True)
class Findings:
    """What was found wrong, and what was looked at."""

    problems: list[str] = field(default_factory=list)
    rows: int = 0
    trained_tokens: int = 0
    worst_logprob: float = 0.0


def check_episode(episode: EpisodeSession, made: TreeRows, recorded: Recorded, engine: Any, findings: Findings) -> None:
    """Add what is wrong with an episode's rows to ``findings``."""
    num_trained = 0
    for number, row in enumerate(made.rows):
        where = f"episode {episode.id} row {number}"
        findings.rows += 1
        for start, end in _stretches(row.loss_mask):
            sampled = _record_of(row, start, end, recorded)
            if sampled is None:
                findings.problems.append(
                    f"{where}: tokens {start} to {end} are trained and were not sampled after this prompt"
                )
                continue
            offset = start - len(sampled.prompt)
            if offset < sampled.num_trained:
                findings.problems.append(f"{where}: tokens {start} to {end} are trained twice")
            sampled.num_trained = offset + end - start
            num_trained += end - start
        if row.logprobs[~row.loss_mask].any():
            findings.problems.append(f"{where}: tokens of the context have log-probabilities")
        if row.loss_mask.any():
            expected = engine.check(row.token_ids, row.loss_mask)
            worst = float(np.abs(expected - row.logprobs[row.loss_mask]).max())
            findings.worst_logprob = max(findings.worst_logprob, worst)
            if not worst <= TOLERANCE:
                findings.problems.append(
                    f"{where}: a log-probability is {worst:.2g} from that of a forward over the row"
                )
    orphaned = (made.orphaned_tokens + episode.orphaned_tokens).total()
    if num_trained + orphaned != recorded.num_tokens:
        findings.problems.append(
            f"episode {episode.id}: {num_trained} tokens trained and {orphaned} orphaned of {recorded.num_tokens} sampled"
        )
    findings.trained_tokens += num_trained
    try:
        store(episode, made)
    except PackError as err:
        findings.problems.append(f"episode {episode.id} cannot be stored: {err}")


def store(episode: EpisodeSession, made: TreeRows) -> Episode:
    """Return an episode as packs store it; raises PackError for rows that contradict each other."""
    return Episode(
        episode_id=episode.id,
        group_id="g",
        index=0,
        environment="agent",
        environment_version="",
        seed=0,
        status="done" if made.rows else "failed",
        rows=stored_rows(made, episode.tree.turns),
        messages=messages_json(episode.messages),
        counts=counts_of(episode.counts, made),
    )


def _stretches(mask: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _record_of(row: TreeRow, start: int, end: int, recorded: Recorded) -> Sampled | None:
    """Return the answer that these tokens are of; its prompt is everything before it in the row.

    Of several that begin alike, the shortest: a longer one is another row's.
    """
    ids = row.token_ids
    for begin in range(start, max(-1, start - _LONGEST_ANSWER), -1):
        for sampled in sorted(recorded.by_prompt.get(ids[:begin].tobytes(), ()), key=lambda one: len(one.token_ids)):
            offset = start - begin
            same = sampled.token_ids[: end - begin] == ids[begin:end].tolist()
            logprobs = np.asarray(sampled.logprobs[offset : end - begin], dtype=np.float32)
            if same and sampled.num_trained <= offset and np.array_equal(logprobs, row.logprobs[start:end]):
                return sampled
    return None
