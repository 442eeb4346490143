"""Groups for the quickstart's model as a worker and a reward service store and score them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from penstock.protocol import blob_keys
from penstock.protocol.facts import GroupScored
from penstock.protocol.groups import RewardRequest, ScoredGroup
from penstock.protocol.packs import group_pack
from penstock.protocol.packs.optional_columns import num_sampled
from penstock.protocol.token_annotations import TeacherRow, TeacherScores
from penstock.protocol.trajectory import Group, Trajectory
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.versions import PolicyVersion, VersionRun
from penstock.trainer.learner.step_plan import ReadyGroup

VOCABULARY = 55


def invent_group(group_id: str, *, version: int = 0, size: int = 4, seed: int = 0) -> Group:
    """A group of random tokens, lengths and log-probabilities, the same for the same seed."""
    random = np.random.default_rng(seed)
    prompt = random.integers(3, VOCABULARY, size=int(random.integers(4, 20)))
    trajectories = []
    for _ in range(size):
        completion = random.integers(3, VOCABULARY, size=int(random.integers(1, 10)))
        tokens = np.concatenate([prompt, completion]).astype(np.int32)
        mask = np.arange(len(tokens)) >= len(prompt)
        logprobs = np.where(mask, random.normal(-4.0, 0.3, size=len(tokens)), 0.0).astype(np.float32)
        run = VersionRun(PolicyVersion(version), len(prompt), len(tokens))
        trajectories.append(Trajectory(tokens, mask, logprobs, (run,), "stop", "text"))
    return Group(
        group_id=group_id,
        split="train",
        attempt=0,
        issued_version=version,
        prompt_text="prompt",
        num_prompt_tokens=len(prompt),
        reward=RewardRequest(name="exact_match", ground_truth=json.dumps("text")),
        trajectories=tuple(trajectories),
    )


def taught(group: Group, top_k: int, *, model: str = "teacher@7") -> Group:
    """Return a group with invented numbers of a teacher over a vocabulary of 50 tokens."""
    draw, rows = np.random.default_rng(3), []
    for count in num_sampled(group.trajectories):
        logits = draw.normal(size=(count, 50))
        logprobs = (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)
        ids = np.argsort(-logprobs, axis=1)[:, :top_k].astype(np.int32)
        rows.append(TeacherRow(logprobs[:, 0], ids, np.take_along_axis(logprobs, ids, axis=1)))
    return replace(group, teacher=TeacherScores(model, top_k, tuple(rows)))


def store_scored(blobs: Blobs, run_id: str, pack_id: str, groups: list[Group], *, seed: int = 0) -> GroupScored:
    random = np.random.default_rng(seed)
    version = PolicyVersion(min(t.oldest_version for group in groups for t in group.trajectories))
    key = blob_keys.group_pack(run_id, version, pack_id, "0")
    pack = blobs.put(key, group_pack.encode(groups))
    scored = tuple(
        ScoredGroup(
            generated=group.summary(number),
            rewards=tuple(float(r) for r in random.integers(0, 2, size=len(group.trajectories))),
            scorer="test",
        )
        for number, group in enumerate(groups)
    )
    return GroupScored(run_id=run_id, pack_id=pack_id, worker_id="w0", pack=pack, groups=scored)


def ready(message: GroupScored, groups: list[Group]) -> list[ReadyGroup]:
    """The groups of a message as the collector passes them to the loop."""
    return [ReadyGroup(s, message.pack, groups[s.generated.row_group]) for s in message.groups]
