"""Several optimizer steps on a batch: which groups each has, and that they are those of plain torch, on any number of ranks."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from pydantic_core import to_json
from tests.examples import examples
from tests.trainer.algorithm.test_algorithm_parts import ready
from tests.trainer.groups.stored_groups import invent_group
from tests.trainer.learner.batch_check import results_by_ranks

from penstock.protocol.packs.step_logprobs import CLIPPED
from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.credit import credit_rule
from penstock.trainer.learner.learner import Learner
from penstock.trainer.learner.planning import num_kept_rows
from penstock.trainer.learner.step_metrics import StepMetrics, batch_metrics
from penstock.trainer.learner.step_plan import Capacity, Passes, StepPlan, make_plan, plan_passes
from penstock.trainer.rank_orders import pack_order, read_order
from penstock.trainer.recovery.resume_checks import what_steps_read

NUM_GROUPS = 5


@examples(40)
@given(
    places=st.lists(st.integers(0, 99), min_size=1, max_size=12, unique=True).map(sorted),
    epochs=st.integers(1, 4),
    minibatches=st.integers(1, 6),
    seed=st.integers(0, 3),
    step=st.integers(0, 1000),
)
def test_every_pass_trains_each_group_once(
    places: list[int], epochs: int, minibatches: int, seed: int, step: int
) -> None:
    """Mini-batches hold whole groups, differ by at most one in size, and are as many as there can be; each pass has all."""
    found = plan_passes(places, epochs=epochs, minibatches=minibatches, seed=seed, step=step)
    assert sorted(place for part in found.groups for place in part) == places
    sizes = [len(part) for part in found.groups]
    assert len(sizes) == min(minibatches, len(places))
    assert max(sizes) - min(sizes) <= 1
    assert [sorted(order) for order in found.orders] == [list(range(len(sizes)))] * epochs
    assert len(found.updates(1)) == len(sizes)
    assert TypeAdapter(Passes).validate_json(to_json(found), strict=True) == found


def test_split_and_order_follow_from_seed_and_step() -> None:
    found = plan_passes(range(8), epochs=3, minibatches=4, seed=1, step=2)
    assert found.groups == ((0, 2), (1, 5), (4, 7), (3, 6))
    assert found.orders == ((0, 1, 2, 3), (1, 2, 0, 3), (3, 0, 1, 2))
    others = {
        plan_passes(range(8), epochs=3, minibatches=4, seed=seed, step=step) for seed in (1, 2) for step in (2, 3)
    }
    assert len({(other.groups, other.orders) for other in others}) == 4


def plan_of(rewards: list[tuple[float, ...]], minibatches: int, **settings: object) -> StepPlan:
    algorithm = AlgorithmSettings(minibatches=minibatches, **settings)  # type: ignore[arg-type]
    split = (
        (lambda groups: plan_passes(groups, epochs=1, minibatches=minibatches, seed=0, step=0))
        if minibatches > 1
        else None
    )
    return make_plan(
        [ready(number, some) for number, some in enumerate(rewards)], credit=credit_rule(algorithm, longest=10),
        aggregation=algorithm.aggregation, max_completion_tokens=10, capacity=Capacity(60, num_shares=2), sft_coefficient=0.5,
        split=split,
    )  # fmt: skip


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum"])
def test_advantages_are_of_the_batch_and_weights_of_the_mini_batch(aggregation: str) -> None:
    """Whitening sees all tokens of the batch; each mini-batch is a mean of its own, on equally many micro-batches per rank."""
    rewards = [(1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 0.0, 1.0), (0.0, 0.0, 1.0, 0.5), (3.0, 0.0, 0.0, 1.0)]
    whole = plan_of(rewards, 1, aggregation=aggregation, whiten_advantages=True)
    split = plan_of(rewards, 2, aggregation=aggregation, whiten_advantages=True)
    assert [row.advantage for row in split.rows] == [row.advantage for row in whole.rows]
    passes = split.passes
    assert passes is not None
    assert whole.passes is None
    for share in split.micro_batches:
        assert sum(passes.sizes) == len(share)
    assert read_order(Learner, pack_order(Learner.step, split))[1] == {"plan": replace(split)}
    groups = [ready(number, some) for number, some in enumerate(rewards)]
    for number, places in enumerate(passes.groups):
        rows = sorted(row for share in split.micro_batches for piece in passes.cut(share)[number] for row in piece)
        assert rows == [4 * place + member for place in places for member in range(4)]
        lengths = [count for place in places for count in groups[place].trained.lengths]
        weights = {round(split.rows[row].weight, 12) for row in rows}
        assert weights == {round(1 / (sum(lengths) if aggregation == "token-mean" else len(lengths)), 12)}
        rewarded = sum(n for row, n in zip(rows, lengths, strict=True) if rewards[row // 4][row % 4] > 0)
        assert {split.rows[row].sft_weight for row in rows} == {0.0, 0.5 / rewarded}


def test_groups_that_filters_left_out_make_no_mini_batch_empty() -> None:
    """The groups that have a trajectory to train on are split; an optimizer step on none of them would be one without data."""
    flat, mixed = (1.0, 1.0), (1.0, 0.0)
    plan = plan_of([flat, mixed, flat, flat, mixed], 3, drop_zero_advantage=True)
    assert plan.passes is not None
    assert sorted(plan.passes.groups) == [(1,), (4,)]


def test_sessions_with_other_seeds_are_not_replayed_as_one() -> None:
    """The seed decides which groups are in which mini-batch, so it is among the settings that a step's weights depend on."""
    assert what_steps_read({"run.seed": 3, "run.id": "a", "nats.url": "b"}) == {"run.seed": 3}


def test_sessions_that_sign_or_save_otherwise_are_replayed_as_one() -> None:
    """A key that is changed during a run, or checkpoints that are also stored, change no weights."""
    saved = {"trainer.signing_key_file": "new.key", "trainer.store_checkpoints": True, "trainer.lr": 1e-6}
    assert what_steps_read(saved) == {"trainer.lr": 1e-6}


def figures(loss: float, *, tokens: float, clipped: float, fresh: float) -> StepMetrics:
    sums = {"tokens": tokens, "clipped": clipped, "kl_proximal": clipped / 10}
    fresh_sums = {"fresh_tokens": fresh, "fresh_k1": fresh, "fresh_k3": fresh, "fresh_abs": fresh}
    return StepMetrics(
        loss, loss, 1e-3 * loss, {**sums, **fresh_sums}, {"ratio": loss, "fresh_abs": fresh}, lr_factor=loss
    )


def test_the_figures_of_a_batch_are_means_over_its_optimizer_steps() -> None:
    """Every token counts once; only the first optimizer step compares engine and trainer: then their weights were the same."""
    found = batch_metrics(
        [
            [figures(1.0, tokens=10, clipped=0, fresh=10), figures(2.0, tokens=30, clipped=2, fresh=30)],
            [figures(3.0, tokens=30, clipped=6, fresh=30), figures(4.0, tokens=10, clipped=4, fresh=10)],
        ]
    )
    assert (found.loss, found.grad_norm, found.lr, found.lr_factor) == (2.5, 2.5, 2.5e-3, 2.5)
    assert (found.sums["tokens"], found.sums["clipped"]) == (40, 6)
    assert (found.sums["fresh_tokens"], found.maxima) == (10, {"ratio": 4.0, "fresh_abs": 10})
    assert [(one.num_updates, one.clip_fraction, one.kl_proximal) for one in found.passes] == [
        (2, 2 / 40, pytest.approx(0.2 / 40)), (2, 10 / 40, pytest.approx(1.0 / 40)),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def results(s3_server, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict]:
    """Batches of five groups, trained in several passes by one process and by two ranks."""
    groups = [invent_group(f"e0.p{i}.a0", seed=i) for i in range(NUM_GROUPS)]
    return results_by_ranks(tmp_path_factory.mktemp("passes"), s3_server.settings, "passes", groups)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_passes_by_two_mini_batches_are_those_of_plain_torch(results: dict[int, dict]) -> None:
    """Losses, gradient norms, clipped tokens and weights after two batches, and one learning rate for a batch."""
    found, hand = results[1]["plain"], results[1]["hand"]
    assert [[sorted(places) for places in updates] for updates in found["updates"]] == found["updates"]
    assert [len(updates) for updates in found["updates"]] == [4, 4]
    for step in range(2):
        mine = hand["losses"][4 * step : 4 * step + 4]
        assert found["loss"][step] == pytest.approx(fmean(mine), abs=2e-6)
        assert found["grad_norm"][step] == pytest.approx(fmean(hand["norms"][4 * step : 4 * step + 4]), rel=1e-4)
        clipped = sum(hand["clipped"][4 * step + 2 : 4 * step + 4])
        assert clipped > 0
        assert found["passes"][step][1][1] == pytest.approx(clipped / found["tokens"][step])
        assert found["passes"][step][0][2] < found["passes"][step][1][2]
    assert found["lr"] == pytest.approx([2e-3, 4e-3])
    assert found["weights"].keys() == hand["weights"].keys()
    for name, values in found["weights"].items():
        assert values == pytest.approx(hand["weights"][name], rel=1e-4, abs=1e-4), name


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_log_probabilities_that_a_step_keeps_are_those_of_a_forward_pass(
    results: dict[int, dict], num_ranks: int
) -> None:
    """Of every token before the optimizer step that trains it first, from whichever rank; of two groups if only two are kept."""
    kept, hand = results[num_ranks]["plain"]["kept"], results[1]["hand"]["first"]
    assert sorted(kept[0]) == [f"{place}.{row}" for place in (0, 1) for row in range(4)]
    assert sorted(kept[1]) == sorted(hand[1])
    for found, expected in zip(kept, hand, strict=True):
        for row, (logprobs, _) in found.items():
            assert logprobs == pytest.approx(expected[row], abs=1e-5), row
    whole = results[num_ranks]["plain"]
    clipped = sum(outcome & CLIPPED for _, outcomes in kept[1].values() for outcome in outcomes)
    assert clipped == pytest.approx(whole["passes"][1][0][1] * whole["tokens"][1])
    in_head_start = results[num_ranks]["critic"]["kept"][
        0
    ]  # measured, without an optimizer step before any of its groups
    first = [row for row in kept[0] if int(row[0]) in whole["updates"][0][0]]
    assert first
    for row in first:
        assert in_head_start[row] == [pytest.approx(hand[0][row], abs=1e-5), [0] * len(hand[0][row])]


def test_groups_are_kept_whole_and_as_many_as_fit() -> None:
    plan = plan_of([(1.0, 1.0), (1.0, 0.0), (1.0, 0.0), (0.0, 1.0)], 1, drop_zero_advantage=True)
    groups = [ready(number, some) for number, some in enumerate([(1.0, 1.0), (1.0, 0.0), (1.0, 0.0), (0.0, 1.0)])]
    sizes = [group.num_tokens for group in groups]
    assert [num_kept_rows(plan, groups, wanted) for wanted in (0, 1, 2, 9, "all")] == [0, 2, 4, 6, 6]
    assert num_kept_rows(plan, groups, "all", max_tokens=sizes[1] + sizes[2]) == 4
    assert num_kept_rows(plan, groups, "all", max_tokens=sizes[1] - 1) == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ["plain", "critic", "stopped"])
def test_ranks_agree_on_the_optimizer_steps(results: dict[int, dict], case: str) -> None:
    """Two ranks, which share five groups unequally, make the optimizer steps of one process, on the same groups."""
    one, two = results[1][case], results[2][case]
    assert one["updates"] == two["updates"]
    assert one["loss"] == pytest.approx(two["loss"], abs=1e-5)
    assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-4)
    for alone, together in zip(one["passes"], two["passes"], strict=True):
        assert alone == [pytest.approx(some, rel=1e-3, abs=1e-6) for some in together]
    for name, values in one["weights"].items():
        assert values == pytest.approx(two["weights"][name], rel=1e-4, abs=1e-4), name


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", ["plain", "critic", "stopped"])
def test_a_batch_trained_again_from_a_checkpoint_is_bitwise_the_same(results: dict[int, dict], case: str) -> None:
    """A batch is one step, whatever number of optimizer steps it had: split, order, rate, figures and weights are equal."""
    for of_ranks in results.values():
        assert of_ranks[case]["steps_done"] == 2
        assert of_ranks[case]["again_equal"] == [True, True]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_passes_end_when_the_policy_has_moved(results: dict[int, dict]) -> None:
    """The pass in which the KL is measured above the limit is the last; the record has the optimizer steps that were made."""
    found = results[1]["stopped"]
    assert found["updates"] == [[list(range(NUM_GROUPS))] * 2] * 2
    for first, second in found["passes"]:
        assert first[2] == 0.0  # the first optimizer step is that of the policy before the batch
        assert second[2] > 1e-9


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_optimizer_step_scales_the_rate_of_the_schedule(results: dict[int, dict]) -> None:
    """By the effective sample size of its own mini-batch; the factors of a batch's optimizer steps do not add up."""
    found = results[1]["stopped"]
    assert max(found["lr_factor"]) < 0.9
    assert found["lr"] == pytest.approx([2e-3 * found["lr_factor"][0], 4e-3 * found["lr_factor"][1]])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_critic_alone_measures_the_policy_in_one_pass(results: dict[int, dict]) -> None:
    """In its head start no optimizer step of the policy is made and the schedule stays; its own updates see the whole batch."""
    found = results[1]["critic"]
    assert found["lr"] == [0.0, pytest.approx(2e-3)]
    assert [[one[0] for one in passes] for passes in found["passes"]] == [[3], [3]]
    assert found["critic"][1]["value_loss"] < found["critic"][0]["value_loss"]
