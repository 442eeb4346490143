"""Credit of episodes: by episode and never by row, by turn, by state; ratios by turn. Exact small cases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.episodes import forked, group_of, one_turn

from penstock.protocol.episode import Turn
from penstock.protocol.groups import BlobRef, ScoredGroup
from penstock.protocol.packs import group_pack
from penstock.protocol.record.lineage import RecordedGroup
from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.batch import Row, build
from penstock.trainer.algorithm.credit import Scored, credit_rule
from penstock.trainer.algorithm.losses.tokens import Sequences, Tokens
from penstock.trainer.algorithm.losses.turn_ratio import turn_ratio
from penstock.trainer.groups.batcher import staleness_tokens
from penstock.trainer.groups.pack_reader import ready_groups
from penstock.trainer.learner.critic import TokenCredit
from penstock.trainer.learner.learner import Learner
from penstock.trainer.learner.step_plan import Capacity, ReadyGroup, StepPlan, by_trajectory, make_plan, rows_of
from penstock.trainer.rank_orders import pack_order, read_order


def _turns(*rewards: float, states: Sequence[str] = (), tokens: int = 2) -> list[Turn]:
    return [
        Turn(number, number * 5, number * 5 + tokens, reward, states[number] if states else "")
        for number, reward in enumerate(rewards)
    ]


def _group(*episodes: tuple[float, list[Turn]]) -> Scored:
    lengths = [sum(turn.end - turn.start for turn in turns) for _, turns in episodes]
    rewards = [reward for reward, _ in episodes]
    return Scored(rewards, lengths, [False] * len(episodes), turns=[turns for _, turns in episodes])


def _credit(*groups: Scored, longest: int = 10, **settings: object):
    return credit_rule(AlgorithmSettings(**settings), longest=longest)(groups)  # type: ignore[arg-type]


def _ready(aggregation: str = "seq-mean-token-mean", **settings: object) -> tuple[ReadyGroup, StepPlan]:
    group = group_of(forked(0), one_turn(1), one_turn(2), one_turn(3))
    scored = ScoredGroup(generated=group.summary(0), rewards=(1.0, 1.0, 0.0, 0.0), scorer="environment")
    ready = ReadyGroup(scored, BlobRef(key="k", size_bytes=1, sha256="0" * 64), group)
    rule = credit_rule(AlgorithmSettings(**{"name": "grpo", "normalise_by_std": False} | settings), longest=10)  # type: ignore[arg-type]
    plan = make_plan(
        [ready],
        credit=rule,
        aggregation=aggregation,
        max_completion_tokens=10,
        capacity=Capacity(100),
        version=3,  # type: ignore[arg-type]
    )
    return ready, plan


def test_rows_change_neither_baselines_nor_weights() -> None:
    """The baseline of rewards 1, 1, 0, 0 is .5 however many rows the first has, and its rows share one episode's weight."""
    _, plan = _ready()
    assert [row.advantage for row in plan.rows] == [0.5, 0.5, 0.5, 0.5, -0.5, -0.5]
    assert [row.weight for row in plan.rows] == pytest.approx([1 / (4 * 7)] * 3 + [1 / (4 * 2)] * 3)
    _, by_token = _ready("token-mean")
    assert [row.weight for row in by_token.rows] == pytest.approx([1 / 13] * 6)
    _, by_prompt = _ready("prompt-mean")
    assert [row.weight for row in by_prompt.rows] == pytest.approx([1 / 13] * 6)


def test_every_sampled_token_is_in_one_row_of_the_plan() -> None:
    """The masks of all rows add up to the sampled tokens of the episodes; ages are those of the tokens' own versions."""
    ready, plan = _ready()
    rows = rows_of(plan, range(len(plan.rows)), {(0, 0): ready.group})
    assert sum(int(row.loss_mask.sum()) for row in rows) == ready.num_tokens == 13
    assert [row.ages[row.loss_mask].tolist() for row in rows[:3] if row.ages is not None] == [[2, 2, 1, 1], [1, 1], [0]]
    assert staleness_tokens([ready], 3) == {0: 1, 1: 10, 2: 2}  # type: ignore[arg-type]
    assert ready.scored.generated.oldest_version == 1


def test_a_plan_survives_the_way_to_other_ranks() -> None:
    """What a rank that follows builds is what rank 0 built, advantages by turn included."""
    ready, plan = _ready(name="return_to_go", normalise_by_std=True)
    _, received = read_order(Learner, pack_order(Learner.step, plan))
    assert received == {"plan": plan}
    assert [len(row.turn_advantages) for row in plan.rows] == [2, 1, 1, 1, 1, 1]
    rows = rows_of(received["plan"], [0, 1], {(0, 0): ready.group})
    batch = build(rows)
    assert batch.turns.index.tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.sequences.index.tolist() == [0, 0, 0, 0, 1, 1]


def test_a_replay_reads_the_rows_that_were_trained() -> None:
    """From the stored pack and the run's record come the same plan and the same rows, and the record holds episodes."""
    ready, plan = _ready(name="return_to_go", normalise_by_std=True)
    recorded = RecordedGroup(prompt=0, pack=0, scored=ready.scored)
    recorded = RecordedGroup.model_validate_json(recorded.model_dump_json(), strict=False)
    assert recorded.num_tokens == 13
    [again] = ready_groups([ready.pack], [recorded], lambda _: group_pack.encode([ready.group]))
    assert again.trained == ready.trained
    for one, two in zip(*(rows_of(plan, range(6), {(0, 0): it.group}) for it in (ready, again)), strict=True):
        assert (one.turns, one.turn_advantages, one.weight) == (two.turns, two.turn_advantages, two.weight)
        assert one.token_ids.tolist() == two.token_ids.tolist()
        assert one.loss_mask.tolist() == two.loss_mask.tolist()


def test_rows_share_a_prompt_only_where_they_begin_alike() -> None:
    _, plan = _ready()
    assert sorted(row for share in plan.micro_batches for part in share for row in part) == list(range(6))
    assert by_trajectory([_ready()[0]], [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]) == [7.0, 8.0, 16.0, 32.0]


def test_stopping_early_and_going_on_are_equal_where_their_returns_are() -> None:
    """Stop now for 1, or .5 now and .5 next: no turn is preferred (verl issue 7244)."""
    group = _group((1.0, _turns(1.0)), (1.0, _turns(0.5, 0.5)))
    assert _credit(group, name="return_to_go").turns == [[0.0], [0.0, 0.0]]


def test_returns_are_compared_with_one_mean_over_the_episodes_alive() -> None:
    """Returns 3, 2 | 1, 0 | 2 with a discount of 1; the second turn compares two episodes, the first three."""
    group = _group((3.0, _turns(1.0, 2.0)), (1.0, _turns(1.0, 0.0)), (2.0, _turns(2.0)))
    assert _credit(group, name="return_to_go").turns == [[1.0, 1.0], [-1.0, -1.0], [0.0]]
    halved = _credit(group, name="return_to_go", turn_discount=0.5).turns  # returns 2, 2 | 1, 0 | 2
    assert halved == [pytest.approx([1 / 3, 1.0]), pytest.approx([-2 / 3, -1.0]), pytest.approx([1 / 3])]


def test_what_no_turn_was_given_is_in_the_last_one() -> None:
    """An outcome without rewards by turn credits all turns alike: Dr. GRPO over episodes."""
    group = _group((1.0, _turns(0.0, 0.0)), (0.0, _turns(0.0, 0.0)))
    assert _credit(group, name="return_to_go").turns == [[0.5, 0.5], [-0.5, -0.5]]
    plain = Scored([1.0, 0.0], [3, 3], [False, False])
    assert _credit(plain, name="return_to_go").advantages == [0.5, -0.5]


def test_turns_of_one_state_are_compared_where_states_are_known() -> None:
    group = _group((1.0, _turns(0.0, 1.0, states=("a", "b"))), (0.0, _turns(0.0, 0.0, states=("b", "c"))))
    assert _credit(group, name="return_to_go", turn_baseline="state").turns == [[0.0, 0.5], [-0.5, 0.0]]


def test_gigpo_adds_the_turn_among_its_state_to_the_episode_in_its_group() -> None:
    """Episodes 1 and 0; both pass state b, one with return .5 x 1 = .5 behind it, one with 0; state a is alone."""
    group = _group((1.0, _turns(0.0, 0.0, states=("b", "a"))), (0.0, _turns(0.0, 0.0, states=("b", ""))))
    found = _credit(group, name="gigpo", normalise_by_std=False, step_discount=0.5)
    assert found.turns == [[0.5 + 0.25, 0.5], [-0.5 - 0.25, -0.5]]
    weighed = _credit(
        group, name="gigpo", normalise_by_std=False, step_discount=0.5, episode_weight=2.0, step_weight=4.0
    )
    assert weighed.turns == [[1.0 + 1.0, 1.0], [-1.0 - 1.0, -1.0]]
    scaled = _credit(group, name="gigpo", step_discount=0.5).turns
    assert scaled[0] == pytest.approx([2 / math.sqrt(2), 1 / math.sqrt(2)], rel=1e-5)
    other = _group((1.0, _turns(0.0, states=("b",))), (0.0, _turns(0.0, states=("x",))))
    apart = _credit(group, other, name="gigpo", normalise_by_std=False, step_discount=0.5)
    assert apart.turns[:2] == found.turns, "a state of another group is another state"


def test_turns_are_compared_with_all_turns_of_their_group_source_or_batch() -> None:
    """Returns 1, 1 | 0 in the first group, 3 in the second, which has the same source, 8 in the third, which has another."""
    first = _group((1.0, _turns(0.0, 1.0)), (0.0, _turns(0.0)))
    second, third = _group((3.0, _turns(3.0))), replace(_group((8.0, _turns(8.0))), source="other")
    groups = (first, second, third)
    within = _credit(*groups, name="step_reinforce", turn_discount=1.0).turns
    assert within == [pytest.approx([1 / 3, 1 / 3]), pytest.approx([-2 / 3]), [0.0], [0.0]]
    by_source = _credit(*groups, name="step_reinforce", turn_discount=1.0, turn_baseline="source").turns
    assert by_source == [pytest.approx([-0.25, -0.25]), [-1.25], [1.75], [0.0]]
    batch = _credit(*groups, name="step_reinforce", turn_discount=1.0, turn_baseline="batch").turns
    assert batch == [pytest.approx([-1.6, -1.6]), pytest.approx([-2.6]), pytest.approx([0.4]), pytest.approx([5.4])]
    deviation = math.sqrt((0.25 * 0.25 * 2 + 1.25 * 1.25 + 1.75 * 1.75) / 3)
    scaled = _credit(*groups, name="step_reinforce", turn_discount=1.0, turn_baseline="source", turn_scale=True).turns
    assert scaled[0] == pytest.approx([-0.25 / deviation] * 2, rel=1e-5)
    assert _credit(first, name="step_reinforce").turns[0] == pytest.approx([0.95 - 1.95 / 3, 1.0 - 1.95 / 3])


def test_gigpo_compares_episodes_with_their_group_source_or_batch() -> None:
    """Episodes of 1 and 0, of 4, and of 7 of another source; no two turns share a state, so that episodes alone count."""
    groups = (
        _group((1.0, _turns(1.0)), (0.0, _turns(0.0))),
        _group((4.0, _turns(4.0))),
        replace(_group((7.0, _turns(7.0))), source="other"),
    )
    found = {
        over: [
            turns[0] for turns in _credit(*groups, name="gigpo", normalise_by_std=False, episode_baseline=over).turns
        ]
        for over in ("group", "source", "batch")
    }
    assert found["group"] == [0.5, -0.5, 0.0, 0.0]
    assert found["source"] == pytest.approx([-2 / 3, -5 / 3, 7 / 3, 0.0])
    assert found["batch"] == [-2.0, -3.0, 1.0, 4.0]


def test_short_successes_gain_and_short_failures_lose_by_rank() -> None:
    """Successes of 1, 2, 2 and 4 turns and failures of 1 and 3, as AgentRL: ranks 0, 1.5, 1.5, 3 and 0, 1; zero-sum in each."""
    episodes = [(1.0, 1), (1.0, 2), (1.0, 2), (1.0, 4), (0.0, 1), (0.2, 3)]
    group = _group(*[(reward, _turns(*[0.0] * turns)) for reward, turns in episodes])
    alone = _group((1.0, _turns(0.0)), (0.0, _turns(0.0, 0.0)))
    settings: dict[str, object] = {"name": "reinforce", "efficiency_spread": 0.2, "efficiency_failure_spread": 0.2}
    found = _credit(group, alone, **settings)
    assert found.rewards == pytest.approx([1.1, 1.0, 1.0, 0.9, -0.1, 0.3, 1.0, 0.0])
    assert sum(found.rewards) == pytest.approx(4.2 + 1.0)
    only = _credit(group, name="reinforce", efficiency_spread=0.6, efficiency_success=0.1).rewards
    assert only == pytest.approx([1.3, 1.075, 1.075, 0.7, 0.0, 0.05])  # ranks 0, 1.5, 1.5, 4 and 3 of five
    by_turn = _credit(group, name="return_to_go", **{k: v for k, v in settings.items() if k != "name"}).turns
    assert by_turn[0][0] - by_turn[3][0] == pytest.approx(0.2)
    with pytest.raises(ValueError, match="efficiency_success does nothing while"):
        AlgorithmSettings(name="grpo", efficiency_success=1.0)


def test_successes_of_too_few_turns_are_left_out() -> None:
    """With ``success_turns = 1`` a right answer at once teaches nothing; a wrong one does, and so does a longer right one."""
    group = _group((1.0, _turns(1.0)), (0.0, _turns(0.0)), (1.0, _turns(0.0, 1.0)))
    found = _credit(group, name="grpo", success_turns=1)
    assert found.weights == [0.0, 1.0, 1.0]
    assert found.skipped == {"too_few_turns": 1}


def test_turns_are_credited_only_with_rewards_as_they_are() -> None:
    with pytest.raises(ValueError, match="reward_norm changes the rewards of whole episodes"):
        AlgorithmSettings(name="gigpo", reward_norm="batch")


def test_an_overlong_penalty_judges_the_longest_turn() -> None:
    group = _group((1.0, _turns(0.0, 0.0, 0.0, tokens=4)), (1.0, _turns(0.0, tokens=10)))
    found = _credit(group, name="reinforce", overlong_buffer=0.5)
    assert found.rewards == [1.0, 0.0]


def _row(turn_rewards: Sequence[float]) -> Row:
    """Two turns of two tokens, with three tokens of a tool between them."""
    mask = np.array([0, 0, 1, 1, 0, 0, 0, 1, 1], dtype=np.bool_)
    return Row(
        np.arange(9, dtype=np.int32), mask, np.zeros(9, np.float32), 0.0, 1.0, turns=[(2, 4), (7, 9)],
        turn_advantages=turn_rewards,
    )  # fmt: skip


def test_gae_passes_from_turn_to_turn_without_decay_over_what_lies_between() -> None:
    """Rewards 1 and 2 at the ends of two turns, values 0, gamma lambda = .5: three tokens of a tool halve nothing."""
    batch = build([_row((1.0, 2.0))])
    credited = TokenCredit(gamma=1.0, lam=0.5, whiten=False)([batch], [torch.zeros(4)])
    assert credited.micro_batches[0].advantages.tolist() == [0.5 + 0.25, 1 + 0.5 * 1.0, 1.0, 2.0]


def test_a_critic_sees_in_every_row_the_return_of_the_episode() -> None:
    """Turns 0, 1, 2 rewarded 1, 2, 4; the first row has turns 0 and 2, the second turn 1: what lies between counts before."""
    credit = _credit(_group((7.0, _turns(1.0, 2.0, 4.0))), name="ppo")
    assert credit.of_turns(0, [0, 2]) == (3.0, 4.0)
    assert credit.of_turns(0, [1]) == (6.0,)
    assert replace(credit, turns_are_rewards=False).of_turns(0, [0, 2]) == (1.0, 4.0)


def test_the_ratio_of_a_turn_is_the_geometric_mean_of_its_tokens() -> None:
    """Turns of log-ratios .1, .3 and -.2: ratios e^.2 and e^-.2, the first clipped at 1.2; one turn a row is GSPO's ratio."""
    current = torch.tensor([0.1, 0.3, -0.2], requires_grad=True)
    zero, ones = torch.zeros(3), torch.ones(3)
    row, turns = Sequences(torch.tensor([0, 0, 0]), 1), Sequences(torch.tensor([0, 0, 1]), 2)
    terms = turn_ratio(Tokens(current, zero, zero, ones, row, turns), clip_low=0.2, clip_high=0.2)
    assert terms.ratio.tolist() == pytest.approx([math.exp(0.2), math.exp(0.2), math.exp(-0.2)])
    assert terms.clipped.tolist() == [True, True, False]
    assert terms.loss.tolist() == pytest.approx([-1.2, -1.2, -math.exp(-0.2)])
    whole = turn_ratio(Tokens(current, zero, zero, ones, row), clip_low=0.2, clip_high=0.2)
    assert whole.ratio.tolist() == pytest.approx([math.exp(0.2 / 3)] * 3)
