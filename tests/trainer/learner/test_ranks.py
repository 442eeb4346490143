"""One process and two ranks train the same: equal losses, gradient norms, exported weights and checkpoints."""

from __future__ import annotations

import json

import pytest
from tests.trainer.groups.stored_groups import invent_group, store_scored
from tests.trainer.learner import forks, rank_check
from tests.trainer.learner.rank_check import CROSSED, PUBLISHED, REFUSED

from penstock.deploy.quickstart_task import write_model
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.facts import encode
from penstock.protocol.transport.blobs import Blobs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]  # the fixture trains every case on one process and on two ranks


@pytest.fixture(scope="module")
def outputs(nats_server, s3_server, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict]:
    """The same stored groups, trained by one process and by two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    settings: S3Settings = s3_server.settings
    write_model(folder / "model", seed=0)
    groups = [invent_group(f"e0.p{i}.a0", seed=i) for i in range(6)]
    (folder / "ranks.scored").write_bytes(encode(store_scored(Blobs(settings), "ranks", "p0", groups)))
    nats: NatsSettings = nats_server.settings
    setup = {
        "nats": {**nats.model_dump(mode="json"), "password": nats.password},
        "s3": {**settings.model_dump(mode="json"), "secret_key": settings.secret_key},
    }
    (folder / "setup.json").write_text(json.dumps(setup))
    return forks.results(folder, rank_check.__name__, str(folder), ranks=(1, 2), deadline_s=900.0)


@pytest.fixture(scope="module")
def results(outputs: dict[int, dict]) -> dict[int, dict]:
    """The cases that each number of ranks trained."""
    return {ranks: found["cases"] for ranks, found in outputs.items()}


EXACT = ["0-float32", "1-float32", "2-float32", "3-float32", "ppo-0", "ppo-1", "ppo-2", "ppo-3"]
EXACT += ["lora-1", "lora-2", "lora-3"]
SEQUENCE = ["sequence-1", "sequence-ppo-3", "sequence-lora-2"]  # the ranks share the tokens of the same rows


@pytest.mark.parametrize("case", [*EXACT, *SEQUENCE])
def test_two_ranks_equal_one_process(results: dict[int, dict], case: str) -> None:
    """In float32, losses, gradient norms and the final weights agree to 1e-5, at every ZeRO stage."""
    one, two = results[1][case], results[2][case]
    if case in SEQUENCE:
        assert one["micro_batches"] == two["micro_batches"] > 1
        assert one["full_gaps"] == pytest.approx(two["full_gaps"], rel=1e-3, abs=2e-6)
        assert one["gaps"] == pytest.approx(two["gaps"], rel=1e-3, abs=1e-6)
    else:
        assert one["micro_batches"] > two["micro_batches"] >= 1
        assert one["influences"] == pytest.approx(two["influences"], rel=1e-3)
        assert sum(influence > 0.0 for influence in one["influences"]) == (0 if "3" in case.split("-") else 24)
    assert one["loss"] == pytest.approx(two["loss"], abs=1e-5)
    assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-4)
    assert one["names"] == two["names"]
    for alone, together in zip(one["critic"], two["critic"], strict=True):
        assert alone == pytest.approx(together, rel=1e-4, abs=1e-5)
    assert one["checksum"] == pytest.approx(two["checksum"], rel=1e-6)
    assert (one["tokens"], one["clipped"]) == (two["tokens"], two["clipped"])


def test_ranks_together_measure_the_kl_of_every_trajectory(results: dict[int, dict]) -> None:
    """Each row's KL to the reference is in the order of the batch, whichever rank measured it."""
    one, two = results[1]["1-float32"]["gaps"], results[2]["1-float32"]["gaps"]
    assert len(one) == 24
    assert min(one) > 0.0
    assert two == pytest.approx(one, rel=1e-5)
    for case in ("lora-1", "lora-3"):  # the policy differs from its reference by now
        exact, shared = results[1][case]["full_gaps"], results[2][case]["full_gaps"]
        assert min(exact) > 0.0
        assert shared == pytest.approx(exact, rel=1e-3, abs=2e-6)


def test_a_critic_learns_with_the_policy_at_every_stage(results: dict[int, dict]) -> None:
    """In the head start only the critic learns; its loss falls; every ZeRO stage takes the same steps."""
    plain = results[1]["ppo-0"]
    assert [lr > 0 for lr in plain["lr"]] == [False, True, True, True]
    assert plain["lr"][1] == pytest.approx(results[1]["0-float32"]["lr"][0])  # the schedule did not advance either
    losses = [figures["value_loss"] for figures in plain["critic"]]
    assert losses == sorted(losses, reverse=True)
    assert plain["critic"][0]["value_mean"] == 0.0
    assert plain["critic"][-1]["explained_variance"] > plain["critic"][0]["explained_variance"]
    for stage in (1, 2, 3):
        other = results[1][f"ppo-{stage}"]
        assert other["loss"] == pytest.approx(plain["loss"], abs=1e-5)
        for figures, expected in zip(other["critic"], plain["critic"], strict=True):
            assert figures == pytest.approx(expected, rel=1e-4, abs=1e-5)
    rough = [figures["value_loss"] for figures in results[2]["ppo-bfloat16"]["critic"]]
    assert rough == pytest.approx(losses, rel=0.05)


def test_adapters_learn_in_place_of_the_model_at_every_stage(results: dict[int, dict]) -> None:
    """The exported model has adapters merged, the checkpoint holds them only, the reference is the initial model.

    Published base and factors make exactly the merged model, also with two ranks.
    """
    full, plain = results[1]["1-float32"], results[1]["lora-1"]
    assert plain["loss"][0] == pytest.approx(full["loss"][0], abs=1e-6)  # B is 0: the first policy is the model
    assert plain["loss"][-1] < plain["loss"][0]
    assert plain["checksum"] != full["checksum"]
    for stage in (1, 2, 3):
        other = results[1][f"lora-{stage}"]
        assert other["loss"] == pytest.approx(plain["loss"], abs=1e-5)
        assert other["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)
        assert other["checksum"] == pytest.approx(plain["checksum"], rel=1e-6)
        assert other["gaps"] == pytest.approx(full["gaps"], rel=1e-4, abs=1e-5)
        assert other["names"] == full["names"]
        published = other["adapter"]
        assert published["shapes"]["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"] == [4, 64]
        assert len(published["shapes"]) == 2 * 2 * 7  # A and B of seven linear layers in two blocks
        assert published["scale"] == 2.0
        assert published["is_exact"]
        assert published == results[2][f"lora-{stage}"]["adapter"]
        assert other["checkpoint_bytes"] < 0.6 * results[1][f"{stage}-float32"]["checkpoint_bytes"]
    assert results[2]["lora-bfloat16"]["loss"] == pytest.approx(plain["loss"], abs=2e-2)


@pytest.mark.parametrize("case", ["1-bfloat16", "2-bfloat16"])
def test_bfloat16_stays_close(results: dict[int, dict], case: str) -> None:
    """bfloat16 losses with float32 master weights equal the float32 losses within precision, on one rank and two."""
    exact = results[1]["1-float32"]["loss"]
    for num_ranks in (1, 2):
        assert results[num_ranks][case]["loss"] == pytest.approx(exact, abs=2e-2)


def test_resumed_steps_are_bitwise_equal(results: dict[int, dict]) -> None:
    """Steps after loading a checkpoint have exactly the losses of the same steps before.

    The state was copied before those steps and written by all ranks during them: later steps do not change a copy.
    """
    for of_ranks in results.values():
        assert {name: case["resumed_equal"] for name, case in of_ranks.items()} == dict.fromkeys(of_ranks, True)


def test_a_rank_that_cannot_write_its_part_is_named(results: dict[int, dict]) -> None:
    """Whichever it is, rank 0 gets the error when all have answered, and the next copy is written."""
    assert ["rank00000" in error and "Is a directory" in error for error in results[1][REFUSED]["refused"]] == [True]
    own, others = results[2][REFUSED]["refused"]
    assert "rank00000" in own
    assert others.startswith("rank 1: IsADirectoryError: ")
    assert "rank00001" in others


@pytest.mark.parametrize("case", PUBLISHED)
def test_ranks_publish_together_what_one_publishes_alone(results: dict[int, dict], case: str) -> None:
    """Every bucket has the same segment and hashes, the version the same root; each rank stores its own half.

    Each case is a session whose ranks first read their buckets of the head; another dtype starts with a full snapshot.
    """
    for num_ranks, of_ranks in results.items():
        versions = of_ranks[case]["published"]
        for version in versions:
            assert (version["same"], version["digests"]) == (True, 1)
            assert version["share"] == pytest.approx(1 / num_ranks, abs=0.1)
            assert version["num_buckets"] > 4 * num_ranks
        if case == "3-float32":  # only the first copy gathers parameters: from then on each rank compares its part
            assert [version["gathered"] > 0 for version in versions] == [True, False, False]
        nudged = versions[-1]
        assert nudged["kind"] == "patch"
        assert nudged["num_changed"] > 0
        assert nudged["packs"] == [f"r{rank:03d}.pack" for rank in range(num_ranks)]


@pytest.mark.parametrize(("name", "stage"), CROSSED)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_another_number_of_ranks_and_another_stage_resume(
    outputs: dict[int, dict], num_ranks: int, name: str, stage: int
) -> None:
    """Steps after a checkpoint of the other number of ranks, at another stage, equal those of the run that went on."""
    found, expected = outputs[num_ranks]["crossed"][f"{name} at {stage}"], outputs[3 - num_ranks]["cases"][name]
    close = 2e-3 if "bfloat16" in name else 1e-5
    assert found["lr"] == expected["lr"][2:]
    assert found["loss"] == pytest.approx(expected["loss"][2:], rel=close, abs=close)
    first, *later = zip(found["grad_norm"], expected["grad_norm"][2:], strict=True)
    assert first[0] == pytest.approx(first[1], rel=close)
    for norm, other in later:  # after a step in bfloat16, norms are 7 % from float32's on CPUs with its instructions
        assert norm == pytest.approx(other, rel=50 * close)
    assert found["checksum"] == pytest.approx(expected["checksum"], rel=close)
    if "ppo" in name:
        values = [figures["value_loss"] for figures in expected["critic"][2:]]
        assert found["critic"] == pytest.approx(values, rel=close)


def test_checkpoints_of_earlier_releases_are_read(outputs: dict[int, dict]) -> None:
    """DeepSpeed's own files, with and without adapters and partitioned parameters, on as many ranks as wrote them."""
    for of_ranks in outputs.values():
        read = [found["older"] for found in of_ranks["crossed"].values() if found["older"] is not None]
        assert read == [True] * 6
