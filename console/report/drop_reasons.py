"""What each reason means for which a group was not trained, and what to do about it; by the values in events."""

from __future__ import annotations

MEANINGS: dict[str, str] = {
    "stale": "older than rollout.max_staleness when it was its turn; its prompt is sampled again. Many: a worker "
    "or a reward is slow (penstock watch shows which), or raise rollout.max_staleness",
    "duplicate": "delivered a second time, and left out: NATS redelivers what a worker or service held when it was stopped or "
    "killed, or did not confirm in time. Harmless",
    "foreign": "not a group of this run's data: from a run of the same name with other data",
    "future": "sampled by a version that a rolled-back session had published; its prompt is sampled again",
    "unreadable": "its object is missing, corrupt or not what the message says; check the object store: penstock audit RUN",
    "quarantined": "two services were killed while they processed its message",
    "dead": "given up by another service: penstock dead-letters RUN",
    "no_signal": "all its rewards were equal, and algorithm.dynamic_sampling sampled another group instead",
    "no_baseline": "issued before the algorithm was remax, without a greedy completion",
    "lost": "every queue was empty and it had not arrived; its prompt is sampled again",
    "superseded": "dropped by an earlier session, and its next attempt has arrived",
    "abandoned": "held-out: its evaluation failed, or ended with the trainer that started it",
}

OF_A_FILTER = "left out by a group filter of the run file (algorithm.group_filters), or a reason of another build"
REPEATS = (
    "more than once: NATS redelivers a task whose worker was stopped or killed, whose engine failed, or which was not "
    "confirmed within 9 s (a machine under load). The second result is dropped as duplicate: nothing is trained twice"
)
