"""The proof at the end: what was trained, recomputed from the published weights and from the tasks as they were issued.

Of every group that the record says was trained:

| compared                    | with                                                                          | within   |
|-----------------------------|-------------------------------------------------------------------------------|----------|
| its prompt                  | the prompt of the task with its id, as the trainer issued it                  | equal    |
| its number of trajectories  | the task's group size                                                         | equal    |
| its log-probabilities       | a dense forward with the weights of the version that each token names         | 1e-5     |
| its rewards                 | the reward function, on its completions and the task's ground truth           | equal    |
| its pack                    | the objects that the attackers stored                                         | counted  |

Two faults are declared in docs/security.md as not defended, and are counted apart, without being a finding: in a pack that the
rollout login forged, log-probabilities that an engine could report and that are not those of the tokens; and a text without
its last token, where a task that the trainer's login forged let the completion end at another token than the model's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nats
import nats.js.errors
import numpy as np
import torch
from safetensors.torch import load_file
from tests.rigs.chaos.chaos_reward import compute_score
from tests.rigs.fuzz.capture import Corpus
from tests.rigs.fuzz.sender import Sent
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from penstock.deploy.quickstart_task import MAX_NEW_TOKENS
from penstock.protocol import blob_keys
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.connection import NatsSettings
from penstock.protocol.config.reward_settings import RewardSettings
from penstock.protocol.errors import PenstockError, WireError
from penstock.protocol.facts import DeadLetter, GroupGenerated, GroupScored, TaskIssued, WeightsPublished, decode
from penstock.protocol.groups import BlobRef, Sampling
from penstock.protocol.record.lineage import LineageChapter, RecordedStep
from penstock.protocol.trajectory import LOGPROB_SLACK, LOWEST_SAMPLED_LOGPROB, Group
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.export import export_version
from penstock.protocol.weights.version_reader import WeightReader
from penstock.trainer.data.dataset import PromptSet
from penstock.trainer.groups.pack_reader import ready_groups
from penstock.trainer.groups.prompt_cursor import GroupKey
from penstock.trainer.groups.task_packs import make_task
from penstock.trainer.settings import DataSettings

TOLERANCE = 1e-5  # nats, float32 against float32
_SHOWN = 12


@dataclass(slots=True)
class Trained:
    groups: int = 0
    tokens: int = 0
    versions: int = 0
    worst: float = 0.0  # largest difference of a log-probability in a pack that was not forged, in nats
    forged_objects: dict[str, int] = field(default_factory=dict)  # packs of attackers that were trained, by attack
    foreign: list[str] = field(default_factory=list)
    not_captured: int = 0  # groups whose task was sent while no NATS server ran for the capture
    by_fault: dict[str, int] = field(default_factory=dict)
    not_defended: dict[str, int] = field(default_factory=dict)  # groups with a fault that is declared as not defended

    def add(self, fault: str, text: str, *, is_declared: bool = False) -> None:
        """Count a fault; ``is_declared``: as one that is not defended."""
        if is_declared:
            self.not_defended[fault] = self.not_defended.get(fault, 0) + 1
            return
        self.by_fault[fault] = self.by_fault.get(fault, 0) + 1
        if len(self.foreign) < _SHOWN:
            self.foreign.append(f"{fault}: {text}")


def is_believable(group: Group) -> bool:
    """Return True if every log-probability is one that a trainer accepts: nothing recomputes those."""
    return all(
        row.behaviour_logprobs.min() >= LOWEST_SAMPLED_LOGPROB and row.behaviour_logprobs.max() <= LOGPROB_SLACK
        for row in group.trajectories
    )


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a run is judged by.

    Attributes:
        run_id: The run.
        corpus: Its captured messages: tasks as the trainer issued them.
        blobs: Its object store.
        folder: The folder of the initial model, and of training prompts for tasks that were not captured.
        group_size: Trajectories of a group.
        announced: All announcements of weights, forged ones too: the record says which are real.
        forged: Objects of attackers, by sha256.
        captures_all: Whether NATS ran all the time, so that a task that was not captured was not issued.
    """

    run_id: str
    corpus: Corpus
    blobs: Blobs
    folder: Path
    group_size: int
    announced: Sequence[WeightsPublished]
    forged: Mapping[str, Sent]
    captures_all: bool


class Judge:
    def __init__(self, evidence: Evidence, scratch: Path) -> None:
        """Judge by the tasks as they were captured; export weights into ``scratch``."""
        self._evidence, self._scratch, self._blobs = evidence, scratch, evidence.blobs
        model = evidence.folder / "model"
        self._prompts = PromptSet(
            [evidence.folder / "data" / "train.jsonl"],
            data=DataSettings(max_prompt_tokens=32),
            reward=RewardSettings(name="chaos_reward"),
            tokenizer=ChatTokenizer.read(model),
        )
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._text = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._roots: dict[int, str] = {}
        self._reader = WeightReader(evidence.blobs, evidence.run_id)
        self.found = Trained()
        self._forged_groups = set[tuple[str, bytes]]()  # by the rollout login: id, and tokens of the first trajectory

    def judge(self, chapters: Sequence[LineageChapter]) -> Trained:
        """Return what is foreign among the groups of a record's chapters, the oldest first."""
        steps = [step for chapter in chapters for step in chapter.steps]
        self._roots = {session.version: session.weights_digest for chapter in chapters for session in chapter.lives}
        self._roots |= {step.made_version: step.weights_digest for step in steps}
        by_versions: dict[int, list[Group]] = defaultdict(list)
        for group in (group for step in steps for group in self._groups(step)):
            for version in {run.version for row in group.trajectories for run in row.version_runs}:
                by_versions[version].append(group)
        self.found.versions = len(by_versions)
        for version, groups in sorted(by_versions.items()):
            if problems := self._load(version):
                self.found.add(
                    "unknown version", f"{groups[0].group_id}: no published weights of version {version} ({problems})"
                )
                continue
            for group in groups:
                self._check_logprobs(group, version)
        return self.found

    def _groups(self, step: RecordedStep) -> list[Group]:
        try:
            ready = ready_groups(step.packs, step.groups, self._blobs.get)
        except PenstockError as err:
            self.found.add("unreadable", f"step {step.step}: {err}")
            return []
        for one in ready:
            if (sent := self._evidence.forged.get(one.pack.sha256)) is not None:
                if sent.role == "rollout":
                    self._forged_groups.add(_identity(one.group))
                name = f"{sent.kind}: {sent.name}"
                self.found.forged_objects[name] = self.found.forged_objects.get(name, 0) + 1
            self._check_task(one.group, one.scored.rewards, f"step {step.step}, pack {one.pack.key}")
        return [one.group for one in ready]

    def _check_task(self, group: Group, rewards: Sequence[float], where: str) -> None:
        self.found.groups += 1
        self.found.tokens += sum(row.num_completion_tokens for row in group.trajectories)
        task = self._evidence.corpus.prompts.get(group.group_id)
        if task is None:
            self.found.not_captured += 1
            task = self._task_of_data(group.group_id)
        if task is None or (self._evidence.captures_all and self.found.not_captured):
            self.found.add("never issued", f"{group.group_id} ({where})")
            return
        prompt = list(task["prompt_ids"])
        if any(
            row.token_ids[: len(prompt)].tolist() != prompt or row.loss_mask[: len(prompt)].any()
            for row in group.trajectories
        ):
            self.found.add("another prompt", f"{group.group_id} ({where})")
        if len(group.trajectories) != task["group_size"] + task["with_baseline"]:
            self.found.add("another group size", f"{group.group_id}: {len(group.trajectories)} ({where})")
        longest = max(len(row.token_ids) for row in group.trajectories)
        if longest > len(prompt) + task["sampling"]["max_new_tokens"]:
            self.found.add("too long", f"{group.group_id}: {longest} tokens ({where})")
        truth = json.loads(task["reward"]["ground_truth"])
        expected = [compute_score("", row.completion_text, truth) for row in group.trajectories]
        if list(rewards) != expected:
            self.found.add("other rewards", f"{group.group_id}: {list(rewards)[:4]} for {expected[:4]} ({where})")
        sampled = [(row, row.token_ids[len(prompt) :].tolist()) for row in group.trajectories]
        if others := [(row, ids) for row, ids in sampled if row.completion_text != self._decode(ids)]:
            row, ids = others[0]
            self.found.add(
                "other text",
                f"{group.group_id}: {row.completion_text!r} for {self._decode(ids)!r} ({where})",
                is_declared=all(
                    row.finish_reason == "stop" and row.completion_text == self._decode(ids[:-1]) for row, ids in others
                ),
            )

    def _decode(self, ids: list[int]) -> str:
        return self._text.decode(ids, skip_special_tokens=True)

    def _is_forged(self, group: Group) -> bool:
        return _identity(group) in self._forged_groups

    def _task_of_data(self, group_id: str) -> dict[str, Any] | None:
        try:
            key = GroupKey.parse(group_id)
            prompt = self._prompts[key.prompt]
        except (ValueError, IndexError):
            return None
        sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS)
        task = make_task(
            prompt,
            group_id,
            sampling=sampling,
            group_size=self._evidence.group_size,
            split="train",
            issued_version=PolicyVersion(0),
        )
        return task.model_dump()

    def _manifests(self, version: int) -> dict[BlobRef, None]:
        """Return the announced manifests of a version, and those stored: an announcement may be lost, or too old to be kept."""
        found = {fact.manifest: None for fact in self._evidence.announced if fact.version == version}
        key = blob_keys.weights_manifest(self._evidence.run_id, PolicyVersion(version), "any")
        for stat in self._blobs.list(key.rsplit("/", 2)[0] + "/"):
            if stat.key.endswith("/manifest.json"):
                data = self._blobs.get_unverified(stat.key)
                found[BlobRef(key=stat.key, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())] = None
        return found

    def _load(self, version: int) -> str:
        """Load a version's published weights; returns why no manifest with the root that the record states can be read."""
        folder = self._scratch / f"v{version}"
        problems = []
        for ref in self._manifests(version):
            shutil.rmtree(folder, ignore_errors=True)
            try:
                manifest = self._reader.manifest(ref, PolicyVersion(version))
                if manifest.state_root != self._roots.get(version, manifest.state_root):
                    problems.append(f"{ref.key} has another root")
                    continue
                export_version(manifest, folder, reader=self._reader, blobs=self._blobs)
            except PenstockError as err:
                problems.append(f"{type(err).__name__}: {err}"[:300])
                continue
            state = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
            self._model.load_state_dict(state, strict=False)
            return ""
        return "; ".join(problems[:8]) or "no manifest"

    @torch.inference_mode()
    def _check_logprobs(self, group: Group, version: int) -> None:
        longest = max(len(row.token_ids) for row in group.trajectories)
        ids = torch.zeros(len(group.trajectories), longest, dtype=torch.long)
        vocabulary = self._model.config.vocab_size
        for number, row in enumerate(group.trajectories):
            if row.token_ids.min() < 0 or row.token_ids.max() >= vocabulary:
                self.found.add("outside the vocabulary", group.group_id)
                return
            ids[number, : len(row.token_ids)] = torch.from_numpy(row.token_ids.astype(np.int64))
        logprobs = self._model(ids).logits.float().log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0].numpy()
        for number, row in enumerate(group.trajectories):
            for run in row.version_runs:
                if run.version == version:
                    stated = row.behaviour_logprobs[run.start : run.end]
                    off = float(np.abs(logprobs[number, run.start - 1 : run.end - 1] - stated).max())
                    if not self._is_forged(group):
                        self.found.worst = max(self.found.worst, off)
                    if off > TOLERANCE:
                        self.found.add(
                            "other log-probabilities",
                            f"{group.group_id} by {off:.3g} nats, version {version}",
                            is_declared=self._is_forged(group) and is_believable(group),
                        )
                        return


def _identity(group: Group) -> tuple[str, bytes]:
    return group.group_id, group.trajectories[0].token_ids.tobytes()


def announcements(run_id: str, bus: Bus) -> list[WeightsPublished]:
    found = []
    for message in bus.read_stream(f"{run_id}-weights").wait():
        with contextlib.suppress(WireError):
            found.append(decode(message.data, WeightsPublished))
    return found


def remove_undecodable(run_id: str, admin: NatsSettings) -> None:
    """Delete what does not decode from queues and dead letters, so that the rest can be audited."""
    facts = {"tasks": TaskIssued, "generated": GroupGenerated, "scored": GroupScored, "dead": DeadLetter}

    async def delete(places: Sequence[tuple[str, int]]) -> None:
        client = await nats.connect(admin.url, user=admin.user, password=admin.secret())
        for stream, sequence in places:
            with contextlib.suppress(nats.js.errors.Error):
                await client.jetstream().delete_msg(stream, sequence)
        await client.close()

    found = []
    with Bus.connect(admin, name="fuzz-clean") as bus:
        for stage, fact in facts.items():
            for message in bus.read_stream(f"{run_id}-{stage}").wait():
                try:
                    known = decode(message.data, fact)
                    if isinstance(known, DeadLetter) and known.stage in facts:
                        decode(known.payload, facts[known.stage])
                except WireError:
                    found.append((f"{run_id}-{stage}", message.sequence))
    asyncio.run(delete(found))
