"""The trainer as a process on real streams: it learns, resumes after SIGKILL, and stops on SIGTERM."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.servers import wait_for
from tests.trainer.producer import Answer, ScriptedProducer, recite
from tests.trainer.trained_run import Run
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.deploy.bootstrap import bootstrap, delete_run
from penstock.deploy.certificates import signing_key
from penstock.deploy.quickstart_task import write_data, write_model
from penstock.protocol import streams, subjects
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.facts import RunEvent, decode
from penstock.protocol.groups import Task
from penstock.protocol.record.checkpoint_state import committed
from penstock.protocol.record.stopped_batch import read_batch
from penstock.protocol.record.stored_record import StoredRecord
from penstock.protocol.trajectory import Trajectory
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.export import export_version
from penstock.protocol.weights.version_reader import WeightReader
from penstock.trainer.publishing.publication import read_head

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def unbootstrapped(tmp_path: Path, run_id: str, nats_settings: NatsSettings, s3_settings: S3Settings) -> Iterator[Run]:
    write_model(tmp_path / "model", seed=0)
    write_data(tmp_path, seed=0, num_sft=64, num_train=200, num_eval=20)
    run = Run(tmp_path, run_id, nats_settings, s3_settings, [])
    yield run
    for session in run.sessions:
        session.kill()


@pytest.fixture
def run(unbootstrapped: Run, run_streams: str) -> Run:
    return replace(unbootstrapped, id=run_streams)


def typed(*words: str) -> None:
    """Run a Python module as a command."""
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *words], env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_run_learns_overlaps_and_exports_a_model(run: Run) -> None:
    """Reward rises from chance to nearly 1 through published weights; the exported model loads with transformers."""
    run.write(
        steps=25,
        rollout={"group_size": 8, "max_new_tokens": 1},
        data={"eval": [str(run.folder / "eval.jsonl")]},
        trainer={"lr": 1e-2, "checkpoint_every": 10, "keep_versions": 4, "max_mismatch": 0.001},
        eval={"every": 10, "temperature": 1.0, "samples": 4},
    )
    with run.sampler() as producer:
        run.start().wait()
        producer.head()
        last = producer.weights(producer.head())
    steps, evals = run.steps(), run.steps("eval")
    assert [row["step"] for row in steps] == list(range(1, 26))
    assert [row["step"] for row in evals] == [0, 10, 20, 25]
    assert evals[0]["accuracy"] < 0.7
    assert evals[-1]["accuracy"] > 0.9
    assert evals[-1]["num_prompts"] == 20
    assert set(evals[-1]["pass_at"]) == {"1", "2", "4"}
    assert all(min(row["record_s"], row["submit_s"]) > 0.0 for row in steps)
    assert [row["step"] for row in steps if row["checkpoint_s"] > 0.0] == [11, 21], "the steps after checkpoints"
    assert [row["staleness_max"] for row in steps[:3]] == [0, 1, 2]  # three steps' groups were out at the start
    assert max(row["staleness_max"] for row in steps) <= 2
    summary = run.summary()
    groups = summary["groups"]
    assert groups["trained"] == 100
    assert groups["issued"] - groups["outstanding"] == groups["trained"] + sum(groups["dropped"].values())
    assert groups["outstanding"] == 0  # no more was issued than the run needed
    assert summary["versions_published"] + summary["versions_skipped"] == 26
    assert sum(summary["staleness_tokens"].values()) == summary["tokens_trained"] == 800
    exported = run.home / "model"
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokens = AutoTokenizer.from_pretrained(exported)("sort 1", return_tensors="pt").input_ids
    assert model(tokens).logits.shape[-1] == 55
    for name, tensor in load_file(exported / "model.safetensors").items():
        torch.testing.assert_close(last[name], tensor, rtol=0, atol=0)


def test_held_messages_are_acknowledged_before_their_stream_is_full(run: Run, bus: Bus, blobs: Blobs) -> None:
    """24 messages fit, and 28 groups are under way while the first evaluation waits; no checkpoint is due otherwise."""
    bootstrap(bus, blobs, run.id, streams.StreamLimits(max_scored=24))
    run.write(
        steps=12,
        rollout={"groups_per_message": 1, "max_staleness": 6},
        data={"eval": [str(run.folder / "eval.jsonl")]},
        eval={"every": 100},
        trainer={"checkpoint_every": 100, "checkpoint_every_s": 0, "collect_deadline_s": 60},
    )
    with run.producer():
        run.start().wait()
    steps = run.steps()
    assert [row["step"] for row in steps] == list(range(1, 13))
    assert [row["step"] for row in steps if row["checkpoint_s"] > 0.0] == [4, 7, 10], "half of 24 is three steps"
    assert [row["step"] for row in run.steps("eval")] == [0, 12]


def test_an_engine_with_other_log_probabilities_stops_the_run(run: Run) -> None:
    """Log-probabilities at another temperature stop the run at the first step, before its weights are published."""
    run.write(steps=5, rollout={"group_size": 8, "max_new_tokens": 1}, trainer={"max_mismatch": 0.1})
    with run.sampler(lambda answer, _: with_logprobs(answer, lambda row: row.behaviour_logprobs / 2)) as producer:
        (stopped := run.start()).wait(expected=2)
        assert producer.head() == 0
    assert re.search(r"tokens of version 0 .*differ by [12]\.\d+ nats.*at the first comparison", stopped.err)
    assert "SGLANG_RETURN_ORIGINAL_LOGPROB" in stopped.err
    assert "penstock runs stopped" in stopped.err
    batch, groups = read_batch(run.home / "stopped" / "step00000001")
    assert (batch.step, batch.version, len(groups)) == (1, 0, 4)
    found = run.replay("--batch", "1")
    assert (found["is_reproduced"], found["error"], found["weights_from"]) == (
        True,
        "EngineMismatch",
        "the initial model",
    )
    for one in found["groups"]:
        assert one["engine_mean"] == pytest.approx(one["logprob_mean"] / 2, rel=1e-4)
    assert found["figures"]["grad_norm"] > 0.0


def test_a_bad_step_saves_its_batch_keeps_the_checkpoint_and_can_be_left_out(run: Run) -> None:
    """A gradient that is not finite ends the run at ZeRO 0, and again at ZeRO 2 from the checkpoint before it.

    Once the reward is limited the step is only an outlier, and left out: in the run, its record, its metrics and its
    replay.
    """
    home = run.home
    private, public = signing_key(run.folder / "keys")

    run.write(
        steps=4,
        algorithm={"name": "dr_grpo"},
        rollout={"max_staleness": 0, "groups_per_message": 4},
        trainer={
            "checkpoint_every": 1,
            "zero_stage": 0,
            "lease_s": 2.0,
            "peak_flops": 1e12,
            "skip_step_above_grad_norm": 20.0,
            "skip_step_after": 2,
            "signing_key_file": str(private),
        },
    )

    def huge(task: Task, version: PolicyVersion) -> Answer:
        group, rewards = recite(task, version)
        return group, (1e25, *rewards[1:]) if version == 2 else rewards  # its square is beyond float32, the loss is not

    with run.producer(huge):
        for stage in (0, 2):
            stopped = run.start(f"trainer.zero_stage={stage}")
            stopped.wait(expected=2)
            folder = home / "stopped" / "step00000003"
            assert re.search(rf"gradient norm is (inf|nan).*The batch of step 3 is saved in {folder}", stopped.err)
            assert {path.name for path in (home / "checkpoints").iterdir()} == {"step00000001", "step00000002"}
            batch, groups = read_batch(folder)
            assert (batch.run_id, batch.step, batch.version) == (run.id, 3, 2)
            assert [scored.rewards[0] for scored in batch.groups] == [1e25] * 4
            assert [group.group_id for group in groups] == [scored.generated.group_id for scored in batch.groups]
            if stage == 0:  # then the published version is the only one before the step
                (home / "checkpoints").rename(home / "hidden")
            options = ("--batch", "3", "--trusted-keys", str(public))
            found = run.replay(*options)
            assert (found["is_reproduced"], found["error"]) == (True, "TrainingDiverged")
            assert found["weights_from"] == (
                "version 2 as it was published" if stage == 0 else "the checkpoint step00000002"
            )
            assert re.search(r"gradient norm is (inf|nan)", found["failure"])
            assert [one["rewards"][0] for one in found["groups"]] == [1e25] * 4
            assert math.isfinite(found["figures"]["loss"])
            if stage == 0:
                (home / "hidden").rename(home / "checkpoints")
            shutil.rmtree(folder)
        assert "resumed" in stopped.err
        run.start("algorithm.reward_clip=1000").wait()
    steps = run.steps()
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert [row.get("updates_left_out", 0) for row in steps] == [0, 0, 1, 0]
    assert [row["skipped"] for row in steps] == [{}, {}, {"outlier_step": 16}, {}]
    assert "update_ratio" not in steps[2]
    record = committed(home / "checkpoints")[-1][1].record
    made = StoredRecord.read(run.id, record, Blobs(run.s3).get).steps
    assert [step.left_out for step in made] == [(), (), (0,), ()]
    assert [step.skipped for step in made] == [row["skipped"] for row in steps]
    assert made[2].weights_digest == made[1].weights_digest != made[3].weights_digest
    verdict = run.replay()
    assert (verdict["same"], verdict["findings"]) == ([0, 1, 2, 3, 4], [])
    for row in [steps[0], steps[1], steps[3]]:
        assert sum(row["grad_norm_by_layers"][kind] ** 2 for kind in ("embedding", "attention", "mlp", "norm")) == (
            pytest.approx(row["grad_norm"] ** 2)
        )
        assert 0.0 < row["update_ratio"] < 1.0
        assert row["mfu"] == pytest.approx(row["flops_per_s"] / 1e12)
        assert row["computed_tokens"] > row["tokens_trained"] > 0


def test_stopped_killed_and_resumed_equals_uninterrupted(unbootstrapped: Run, bus: Bus, blobs: Blobs) -> None:
    """A run that is stopped, resumed, killed with SIGKILL and resumed again ends with the same weights, bit for bit.

    It has a critic, whose weights, optimizer and head start must be restored with the policy's.
    """

    def drive(one: Run, run_all: Callable[[Run, ScriptedProducer], object]) -> list[dict[str, float]]:
        bootstrap(bus, blobs, one.id)
        one.write(
            steps=6,
            rollout={"groups_per_message": 2, "max_staleness": 0, "max_attempts": 4},
            algorithm={"name": "ppo"},
            critic={"lr": 1e-3, "updates": 2, "value_clip": 0.2, "head_start_steps": 1},
            trainer={"checkpoint_every": 2, "lease_s": 2.0},  # the session after the SIGKILL waits this long
        )
        with one.producer() as producer:
            run_all(one, producer)
        delete_run(bus, one.id)
        wanted = ("loss", "value_loss", "explained_variance", "critic_grad_norm")
        return [{key: row[key] for key in wanted} for row in one.steps()]

    def interrupted(one: Run, producer: ScriptedProducer) -> None:
        producer.limit = 12  # three steps
        first = one.start()
        wait_for(lambda: len(one.steps()) == 3, "three steps")
        first.signal(signal.SIGTERM)
        first.wait(expected=128 + signal.SIGTERM)
        assert (one.home / "checkpoints" / "step00000003").is_dir()
        producer.limit = 20  # two more; the checkpoint after step 4 is the last
        second = one.start()
        wait_for(lambda: len(one.steps()) == 5, "five steps")
        second.kill()
        producer.limit = None
        (last := one.start()).wait()
        assert "step00000004" in last.err
        assert "resumed at step 4: rolled back 1 steps, 4 groups" in last.err

    run, resumed = unbootstrapped, replace(unbootstrapped, id=f"{unbootstrapped.id}-again")
    losses = drive(run, lambda one, _: one.start().wait())
    assert len(losses) == 6
    assert drive(resumed, interrupted) == losses
    resumed_weights = resumed.weights()
    for name, tensor in run.weights().items():
        assert torch.equal(tensor, resumed_weights[name]), name
    assert resumed.summary()["groups"]["trained"] == 24  # each effect once


def test_ppo_learns_with_its_critic(run: Run) -> None:
    """Rewards rise with one sample per prompt, and the critic learns to predict the returns.

    A batch at which it stops is trained again with the critic of a checkpoint, and not without one.
    """
    run.write(
        steps=20,
        algorithm={"name": "ppo"},
        critic={"lr": 1e-2},
        rollout={"group_size": 1, "groups_per_step": 32, "max_new_tokens": 1},
        trainer={"lr": 1e-2},
    )
    with run.sampler():
        run.start().wait()
    steps = run.steps()
    assert steps[0]["reward_mean"] < 0.8
    assert sum(row["reward_mean"] for row in steps[-3:]) / 3 > 0.9
    assert steps[0]["value_mean"] == 0.0
    assert steps[-1]["value_mean"] == pytest.approx(steps[-1]["return_mean"], abs=0.2)
    assert steps[-1]["value_loss"] < steps[0]["value_loss"]
    with run.sampler(lambda answer, _: with_logprobs(answer, lambda row: row.behaviour_logprobs - row.loss_mask)):
        run.start("trainer.steps=21", "trainer.max_mismatch=0.5").wait(expected=2)
    found = run.replay("--batch", "21")
    assert (found["error"], found["weights_from"]) == ("EngineMismatch", "the checkpoint step00000020")
    assert found["figures"]["value_mean"] == pytest.approx(found["figures"]["return_mean"], abs=0.2)
    (run.home / "checkpoints").rename(run.home / "hidden")
    (refused := run.start_replay("--batch", "21")).wait(expected=2)
    assert "a critic is in checkpoints only, and there is none of version 20" in refused.err


def with_logprobs(answer: Answer, change: Callable[[Trajectory], Any]) -> Answer:
    group, rewards = answer
    rows = tuple(replace(row, behaviour_logprobs=change(row)) for row in group.trajectories)
    return replace(group, trajectories=rows), rewards


def test_batches_of_cut_answers_alone_are_steps_without_an_update_also_in_a_replay(run: Run) -> None:
    """With mask_truncated, three such batches leave the weights as they are and are no collapse; a 4th is trained."""
    run.write(
        steps=4,
        algorithm={"mask_truncated": True, "epochs": 2},
        rollout={"max_staleness": 0, "group_size": 4, "groups_per_step": 4, "max_new_tokens": 1},
        trainer={"min_entropy": 0.01},
    )

    def cut_at_first(answer: Answer, version: PolicyVersion) -> Answer:
        reason = "length" if version < 3 else "stop"
        rows = tuple(replace(row, finish_reason=reason) for row in answer[0].trajectories)
        return replace(answer[0], trajectories=rows), (1.0, 0.0, 1.0, 0.0)

    with run.sampler(cut_at_first):
        (trainer := run.start()).wait()
    steps = run.steps()
    assert [(row["skipped"], row["tokens_trained"]) for row in steps] == [({"truncated": 16}, 0)] * 3 + [({}, 16)]
    assert all((row["grad_norm"] > 0.0) == (row["step"] == 4) for row in steps)
    assert trainer.err.count("filters left no completion of the batch to train on") == 3
    weights = run.weights()
    start = load_file(run.folder / "model" / "model.safetensors")
    assert any(not torch.equal(weights[name], tensor) for name, tensor in start.items())
    verdict = run.replay()
    assert (verdict["same"], verdict["findings"]) == ([0, 1, 2, 3, 4], [])


def test_versions_in_which_nothing_changed_raise_an_alarm(run: Run, bus: Bus) -> None:
    """Merged adapters whose changes are rounded away: workers go on to sample the first model, which is told once."""
    run.write(
        steps=4, model={"lora.rank": 4, "lora.publish": "merged"}, rollout={"max_staleness": 0}, trainer={"lr": 1e-14}
    )
    with run.producer():
        (trainer := run.start()).wait()
    assert all(row["grad_norm"] > 0.0 for row in run.steps())
    assert trainer.err.count("although the optimizer made steps") == 1
    messages = bus.read_stream(f"{run.id}-events", subjects.events(run.id, "alarm")).wait()
    (alarm,) = [decode(message.data, RunEvent) for message in messages]
    assert alarm.data["text"].startswith("version 2, and the one before it, serve the same as the version before them")


def test_two_ranks_run_reuse_and_resume(run: Run, bus: Bus, blobs: Blobs) -> None:
    """Two ranks make steps, use groups again, checkpoint, export, resume and stop; also under torchrun.

    The batch at which they stop is trained again on two ranks, on the weights of a checkpoint and on adapters as they
    were published. They train adapters, with a KL to the model without them. Adapters are published on the first model,
    which the second session finds again; the export is a whole model. At the end of each session no group is kept for
    another use, and every message is acknowledged.
    """
    torchrun = ("torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m")
    scored = streams.scored_consumer(run.id, "train").stream
    for steps in (2, 3):
        run.write(
            steps=steps,
            model={"lora.rank": 4, "lora.alpha": 8.0},
            rollout={"groups_per_message": 2},
            algorithm={"kl_coefficient": 0.01, "max_trained_count": 3},
            trainer={"num_ranks": 2, "zero_stage": 2, "micro_batch_tokens": 256, "sequence_parallel": steps - 1},
        )
        producer = run.producer()
        producer.limit = 4  # the second step has no new group to train on
        with producer:
            if steps == 2:
                typed(*torchrun, "penstock.trainer", "train", str(run.file))
            else:
                run.start(num_ranks=2).wait()
        assert bus.stream_state(scored).wait().num_messages == 0
    rows = run.steps()
    assert [(row["step"], row["reused_groups"]) for row in rows] == [(1, 0), (2, 4), (3, 0)]
    assert all(row["kl_reference"] >= 0.0 and row["grad_norm"] > 0 for row in rows)
    start = load_file(run.folder / "model" / "model.safetensors")
    end = run.weights()
    assert {name: tensor.shape for name, tensor in end.items()} == {
        name: tensor.shape for name, tensor in start.items()
    }
    changed = {name for name, tensor in end.items() if not torch.equal(tensor, start[name])}
    assert changed
    assert all("_proj" in name for name in changed)
    head = read_head(bus.key_value(streams.state_bucket(run.id).bucket).wait())
    assert head is not None
    reader = WeightReader(blobs, run.id)
    published = reader.manifest(head.manifest, PolicyVersion(head.version))
    assert (published.version, published.kind, published.start) == (3, "adapter", 3)
    assert published.num_bytes < 0.2 * reader.base(published).num_bytes
    export_version(published, run.folder / "exported", reader=reader, blobs=blobs)
    (shard,) = (run.folder / "exported").glob("*.safetensors")
    for name, tensor in load_file(shard).items():  # numpy and torch sum in another order
        torch.testing.assert_close(tensor, end[name], rtol=1e-6, atol=1e-7)
    assert (run.home / "checkpoints" / "step00000003").is_dir()
    assert run.replay(num_ranks=2)["same"] == [0, 1, 2, 3]
    with run.producer():
        overrides = ("trainer.steps=4", "trainer.max_mismatch=0.001")  # no policy sampled what is recited
        stopped = run.start(*overrides, num_ranks=2)
        leader = stopped.processes[0]
        leader.wait(150.0)
        assert leader.returncode == 2, stopped.err[-4000:]
        stopped.kill()  # as torchrun does with the ranks that are left
    home = run.home
    found = []
    for _ in range(2):
        found.append(run.replay("--batch", "4", num_ranks=2))
        (home / "checkpoints").rename(home / "hidden") if len(found) == 1 else None
    assert [one["weights_from"] for one in found] == ["the checkpoint step00000003", "version 3 as it was published"]
    assert [(one["is_reproduced"], one["error"]) for one in found] == [(True, "EngineMismatch")] * 2
    held, published = (one["figures"] for one in found)
    assert held["grad_norm"] > 0.0
    for name in ("loss", "grad_norm", "kl_reference", "entropy"):
        assert published[name] == pytest.approx(held[name], rel=1e-5, abs=1e-7), name
