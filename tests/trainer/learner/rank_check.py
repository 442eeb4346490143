"""Trains a few steps on stored groups, publishes them, and prints the results, on one rank or several.

Arguments: FOLDER (model/, ranks.scored, setup.json: connections).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tests.servers import wait_for
from tests.trainer.learner.tiny import HOW
from tests.weights_source import NEVER

from penstock.deploy.bootstrap import bootstrap
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.facts import GroupScored, decode
from penstock.protocol.packs import group_pack
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.adapter_format import factor_names
from penstock.protocol.weights.manifest import VersionManifest
from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.credit import credit_rule
from penstock.trainer.algorithm.objective import build_objective
from penstock.trainer.connections import Connections
from penstock.trainer.learner import adapter
from penstock.trainer.learner.adapter import Lora
from penstock.trainer.learner.critic import TokenCredit, load_critic
from penstock.trainer.learner.learner import Learner
from penstock.trainer.learner.load_model import load_policy, load_reference
from penstock.trainer.learner.policy import Policy
from penstock.trainer.learner.reference import WithoutAdapter
from penstock.trainer.learner.shard_files import CaptureSlot, CheckpointWriter
from penstock.trainer.learner.step_plan import ReadyGroup, StepPlan, all_rows, make_plan, trajectories_alone
from penstock.trainer.learner.trainable import Optimisation
from penstock.trainer.optimizer_settings import CriticSettings
from penstock.trainer.parallel_dims import ParallelDims, ParallelLayout
from penstock.trainer.publishing.publish import Publisher
from penstock.trainer.publishing.rank_publisher import PublishCoordinator, RankPublisher
from penstock.trainer.publishing.weight_buckets import AdapterWeights, ModelWeights, Snapshot, copy_to_buckets
from penstock.trainer.ranks import Ranks

CASES = [
    *((f"{stage}-float32", stage, "float32", "grpo") for stage in (0, 1, 2, 3)),
    *((f"{stage}-bfloat16", stage, "bfloat16", "grpo") for stage in (1, 2)),
    *((f"ppo-{stage}", stage, "float32", "ppo") for stage in (0, 1, 2, 3)),
    ("ppo-bfloat16", 2, "bfloat16", "ppo"),
    *((f"lora-{stage}", stage, "float32", "grpo") for stage in (1, 2, 3)),
    ("lora-bfloat16", 2, "bfloat16", "grpo"),
    ("sequence-1", 1, "float32", "grpo"),  # all ranks compute the same rows
    ("sequence-ppo-3", 3, "float32", "ppo"),
    ("sequence-lora-2", 2, "float32", "grpo"),
]
CROSSED = [  # checkpoints that the other number of ranks wrote, and the ZeRO stage that resumes them
    *(("2-float32", stage) for stage in (0, 1, 3)),
    ("0-float32", 3), ("3-float32", 2), ("ppo-1", 3), ("lora-3", 1), ("2-bfloat16", 1),
    ("sequence-1", 3), ("sequence-ppo-3", 1),
]  # fmt: skip
REFUSED = "2-float32"  # whose checkpoint is also written where a rank cannot write
SAVED = "saved"  # file that says that every checkpoint is written
PUBLISHED = [
    "0-float32",
    "1-float32",
    "2-float32",
    "3-float32",
    "lora-3",
    "2-bfloat16",
    "sequence-1",
]  # each a session of one run
CRITIC = CriticSettings(updates=2, value_clip=0.2, head_start_steps=1)
NUM_STEPS = 4
BUCKET_BYTES = 40_000  # the model has several buckets
CHUNK_TOKENS = 7  # tokens per chunk of the output head: every micro-batch takes several chunks, and not equally many


def how(zero_stage: int, dtype: str) -> Optimisation:
    return replace(
        HOW, warmup_steps=2, schedule="linear", min_lr_ratio=0.1, zero_stage=zero_stage,
        dtype=dtype, gradient_checkpointing=zero_stage == 2,  # type: ignore[arg-type]
    )  # fmt: skip


class TwoWays:
    """Publishes the same weights with all ranks, and with rank 0 alone as another run (rank 0)."""

    def __init__(self, connections: Connections, coordinator: PublishCoordinator, model: Path) -> None:
        self._connections, self._coordinator, self._model = connections, coordinator, model
        self._alone = Publisher(
            Connections(f"{connections.run_id}-alone", connections.bus, connections.blobs),
            model_folder=model,
            policy=NEVER,
        )
        self._version = -1
        self.begin()

    def begin(self) -> None:
        """Start another session, which has to read the head."""
        self._together = Publisher(
            self._connections, model_folder=self._model, policy=NEVER, coordinator=self._coordinator
        )

    def publish(self, learner: Learner) -> dict:
        """Publish the next version by both methods; returns the contents of its manifests."""
        self._version += 1
        version = PolicyVersion(self._version)
        with counting_gathers(learner.policy) as gathered:
            own = learner.weights(wanted=self._together.drop_overtaken())
            assert isinstance(own, ModelWeights)
            own.buckets.wait_until_written()
        whole = ModelWeights(copy_to_buckets(learner.snapshot(), copy_id=version, bucket_bytes=BUCKET_BYTES))
        found = []
        for publisher, weights in ((self._together, own), (self._alone, whole)):
            publisher.submit(Snapshot(version, version, weights, learner.policy.dtype, must_publish=True))
            publisher.wait_until_published(version, 60.0)
            publisher.unpin(version)
            head = publisher.versions.head.value
            assert head is not None
            found.append(VersionManifest.from_json(self._connections.blobs.get(head.manifest)))
        together, alone = found
        return {
            "same": [_seen(together), together.state_root] == [_seen(alone), alone.state_root],
            "digests": len({together.state_root, whole.root(), learner.copied_root()}),
            "gathered": len(gathered),
            "kind": together.kind,
            "num_buckets": len(together.buckets),
            "num_changed": together.num_changed,
            "packs": sorted(blob.key.rpartition("/")[2] for blob in together.objects),
            "share": num_bytes(own) / num_bytes(whole),
        }


def refusals(learner: Learner, writer: CheckpointWriter, folder: Path, num_ranks: int) -> list[str]:
    """Return the errors of writes that each rank in turn cannot make; a copy that was not written is released."""
    found = []
    for rank in range(num_ranks):
        in_its_place = folder / str(rank) / "engine" / f"rank{rank:05d}.safetensors"
        in_its_place.mkdir(parents=True)
        learner.capture()
        try:
            writer.write(folder / str(rank))
        except OSError as err:
            found.append(str(err))
    return found


@contextlib.contextmanager
def counting_gathers(policy: Policy) -> Iterator[list[int]]:
    """Count on this rank how often parameters are made whole."""
    gathered, whole = list[int](), policy._trainable.whole

    def counted(*parameters: torch.Tensor) -> AbstractContextManager[tuple[torch.Tensor, ...]]:
        gathered.append(len(parameters))
        return whole(*parameters)

    policy._trainable.whole = counted  # type: ignore[method-assign]
    try:
        yield gathered
    finally:
        del policy._trainable.whole


def num_bytes(weights: ModelWeights) -> int:
    return sum(raw.size for raw in weights.buckets.raw.values())


def _seen(manifest: VersionManifest) -> list[dict]:
    """A manifest's entries of its buckets, except their object keys."""
    return [{**b.model_dump(exclude={"stored"}), "sha256": b.stored and b.stored.sha256} for b in manifest.buckets]


def lead(
    learner: Learner,
    blobs: Blobs,
    message: GroupScored,
    folder: Path,
    settings: AlgorithmSettings,
    ways: TwoWays | None,
    writer: CheckpointWriter,
) -> dict:
    """Make four steps, with a checkpoint after two; returns what must not depend on the number of ranks."""
    ready, plan = planned(learner, blobs, message, settings)
    published = [ways.publish(learner)] if ways else []
    figures = []
    for step in range(NUM_STEPS):
        if step == 2:
            learner.capture()
        figures.append(learner.step(plan, ready))
        if step == 2:  # a step after the copy, one after the write
            writer.write(folder)
    learner.load(folder)
    again = [learner.step(plan, ready) for _ in range(2)]
    tensors = learner.snapshot()
    is_whole = not learner.policy._trainable.is_partitioned and learner._dims.layout.ranks_of_rows == 1
    published += [ways.publish(learner)] if ways else []
    return {
        "published": published,
        "micro_batches": len(plan.micro_batches[0]),
        "loss": [f.loss for f in figures],
        "grad_norm": [f.grad_norm for f in figures],
        "critic": [dict(f.critic) for f in figures],
        "lr": [f.lr for f in figures],
        "tokens": figures[0].sums["tokens"],
        "clipped": figures[-1].sums["clipped"],
        "gaps": learner.reference_gaps(all_rows(ready, learner.capacity(160)), ready, form="k2"),
        "full_gaps": learner.reference_gaps(all_rows(ready, learner.capacity(160)), ready, form="full"),
        "influences": learner.influences(trajectories_alone(ready, learner.capacity(160)), ready) if is_whole else [],
        "resumed_equal": [(f.loss, f.critic) for f in again] == [(f.loss, f.critic) for f in figures[2:]],
        "names": sorted(tensors),
        "adapter": published_adapter(learner, tensors),
        "checkpoint_bytes": sum(path.stat().st_size for path in (folder / "engine").iterdir()),
        "checksum": float(sum(t.double().abs().sum() for t in tensors.values())),
    }


@dataclass(frozen=True)
class Scene:
    model: Path
    blobs: Blobs
    dims: ParallelDims
    together: ParallelDims  # all ranks compute the same rows

    @property
    def message(self) -> GroupScored:
        return decode((self.model.parent / "ranks.scored").read_bytes(), GroupScored)

    def build(self, name: str, stage: int, dtype: str, algorithm: str) -> tuple[Policy, Learner, AlgorithmSettings]:
        """Load a case's networks on this rank."""
        dims = self.together if "sequence" in name else self.dims
        full_kl = {"kl_coefficient": 0.1, "kl_form": "full"} if "lora" in name else {}
        settings = AlgorithmSettings(name=algorithm, **full_kl)  # type: ignore[arg-type]
        lora = Lora(rank=4, alpha=8.0) if "lora" in name else None
        policy = load_policy(self.model, replace(how(stage, dtype), lora=lora), dims, temperature=1.0)
        reference = (
            WithoutAdapter(policy)
            if lora
            else load_reference(self.model, how(0, "float32"), policy.device, dims, temperature=1.0)
        )
        critic = None
        if settings.has_critic:
            credit = TokenCredit(gamma=0.99, lam=0.9, kl_form="full", whiten_rewards=True)
            critic = load_critic(self.model, how(stage, dtype), CRITIC, credit, dims)
        policy._scorer._chunk_tokens = CHUNK_TOKENS
        learner = Learner(policy, dims, self.blobs, build_objective(settings), reference, critic)
        learner.bucket_bytes = BUCKET_BYTES
        return policy, learner, settings


def resume_others(scene: Scene, folder: Path) -> dict[str, dict]:
    """Resume the other number of ranks' checkpoints at other ZeRO stages, and make the two steps after them."""
    ranks, found = scene.dims.ranks, {}
    ranks.barrier()
    (folder / SAVED).touch()
    other = folder.with_name(f"out{3 - ranks.num_ranks}")
    wait_for((other / SAVED).exists, f"the checkpoints of {other.name}", 300.0)
    cases = {name: (dtype, algorithm) for name, _, dtype, algorithm in CASES}
    for name, stage in CROSSED:
        policy, learner, settings = scene.build(name, stage, *cases[name])
        if ranks.is_leader:
            learner.load(other / name)
            found[f"{name} at {stage}"] = continued(learner, scene, settings)
            learner.dismiss()
        else:
            learner.follow()
        found[f"{name} at {stage}"] = found.get(f"{name} at {stage}", {}) | {
            "older": reads_deepspeeds_own(policy, folder / f"older-{name}-{stage}", ranks)
            if stage in (1, 3) and "sequence" not in name
            else None
        }
        ranks.barrier()
    return found


def reads_deepspeeds_own(policy: Policy, folder: Path, ranks: Ranks) -> bool:
    """Return True if a checkpoint that DeepSpeed wrote, as earlier releases had it do, is read."""
    state, frozen = {"steps_done": 7, "num_ranks": ranks.num_ranks}, policy._trainable._has_frozen
    policy._trainable._engine.save_checkpoint(
        str(folder), tag="engine", client_state=state, save_latest=False, exclude_frozen_parameters=frozen
    )
    (folder / f"random_state_{ranks.rank}.bin").write_bytes(torch.get_rng_state().numpy().tobytes())
    before = policy.weights.snapshot()
    nudge(policy, frozen=False)
    ranks.barrier()
    policy.load(folder)
    after = policy.weights.snapshot()
    return policy.steps_done == 7 and all(torch.equal(after[name], tensor) for name, tensor in before.items())


def continued(learner: Learner, scene: Scene, settings: AlgorithmSettings) -> dict:
    """Make the two steps that follow the checkpoint."""
    ready, plan = planned(learner, scene.blobs, scene.message, settings)
    figures = [learner.step(plan, ready) for _ in range(2)]
    tensors = learner.snapshot()
    return {
        "loss": [f.loss for f in figures],
        "grad_norm": [f.grad_norm for f in figures],
        "lr": [f.lr for f in figures],
        "critic": [f.critic.get("value_loss", 0.0) for f in figures],
        "checksum": float(sum(t.double().abs().sum() for t in tensors.values())),
    }


def planned(
    learner: Learner, blobs: Blobs, message: GroupScored, settings: AlgorithmSettings
) -> tuple[list[ReadyGroup], StepPlan]:
    groups = group_pack.decode(blobs.get(message.pack))
    ready = [ReadyGroup(s, message.pack, groups[s.generated.row_group]) for s in message.groups]
    plan = make_plan(
        ready, credit=credit_rule(settings, longest=10), aggregation="token-mean",
        max_completion_tokens=10, capacity=learner.capacity(160),
    )  # fmt: skip
    return ready, replace(plan, token_kl=0.05) if settings.has_critic else plan


def nudge(policy: Policy, *, frozen: bool = True) -> None:
    """Change a few values of every parameter that this rank holds; the same ones where all ranks hold all."""
    for parameter in policy._scorer.parameters():
        if frozen or parameter.requires_grad:
            if hasattr(parameter, "ds_id"):
                parameter.partition()  # type: ignore[attr-defined]  # else a gathered one would keep its values
            getattr(parameter, "ds_tensor", parameter).data.view(-1)[:2] *= 1.5


def published_adapter(learner: Learner, merged: dict[str, torch.Tensor]) -> dict:
    """Return the published adapters, and True if rank 0's base and the factors give exactly the exported weights."""
    weights = learner.weights(None, as_adapter=True)
    if not isinstance(weights, AdapterWeights):
        return {}
    base, factors = weights.base.buckets.tensors(), weights.buckets.tensors()
    scale = weights.base.config.scale
    made = dict(base)
    for name in base:
        down, up = (factors.get(factor) for factor in factor_names(name.removesuffix(".weight")))
        if down is not None and up is not None:
            made[name] = adapter.merged(base[name], down, up, scale)
    return {
        "shapes": {name: list(tensor.shape) for name, tensor in factors.items()},
        "scale": scale,
        "base": weights.base.root,
        "is_exact": all(torch.equal(made[name], merged[name]) for name in made),
    }


def main(arguments: Sequence[str]) -> int:
    ranks, base = Ranks(), Path(arguments[0])
    model, folder = base / "model", base / f"out{ranks.num_ranks}"
    setup = json.loads((base / "setup.json").read_text()) | {"run_id": f"ranks-of-{ranks.num_ranks}"}
    blobs = Blobs(S3Settings.model_validate(setup["s3"]))
    dims = ParallelDims(ranks)
    own = RankPublisher(blobs, setup["run_id"], dims.buckets)
    coordinator = PublishCoordinator(own, ranks)
    ways = None
    if ranks.is_leader:
        bus = Bus.connect(NatsSettings.model_validate(setup["nats"]), name="rank_check")
        for run_id in (setup["run_id"], f"{setup['run_id']}-alone"):
            bootstrap(bus, blobs, run_id)
        ways = TwoWays(Connections(setup["run_id"], bus, blobs), coordinator, model)
    copies = CaptureSlot()
    writer = CheckpointWriter(copies, ranks)
    scene = Scene(model, blobs, dims, ParallelDims(ranks, ParallelLayout(ranks.num_ranks)))
    results = {}
    for name, stage, dtype, algorithm in CASES:
        policy, learner, settings = scene.build(name, stage, dtype, algorithm)
        learner.captured = copies
        if ranks.is_leader:
            target = folder / name
            target.mkdir(parents=True)
            published = ways if name in PUBLISHED else None
            results[name] = lead(learner, blobs, scene.message, target, settings, published, writer)
            if name == REFUSED:
                results[name]["refused"] = refusals(learner, writer, folder / "refused", ranks.num_ranks)
            learner.dismiss()
        else:
            learner.follow(own)
        if name in PUBLISHED:
            nudge(policy)
            if ranks.is_leader:
                assert ways is not None
                results[name]["published"].append(ways.publish(learner))
                ways.begin()
                learner.dismiss()
            else:
                learner.follow(own)
        ranks.barrier()
    crossed = resume_others(scene, folder)
    if ranks.is_leader:
        print(json.dumps({"cases": results, "crossed": crossed}))
    ranks.leave(0)
    return 0
