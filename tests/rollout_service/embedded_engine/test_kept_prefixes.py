"""What the embedded engine keeps of ended sequences: exact, bounded, and never of other weights."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.contracts.tiny_model import VOCAB, Dense
from tests.examples import examples
from tests.rollout_service.embedded_engine.in_process import Model

from penstock.rollout_service.embedded_engine.caches import FEWEST_TOKENS, NOTHING, PrefixCache, Reused
from penstock.rollout_service.embedded_engine.model.kv_cache import Computed
from penstock.rollout_service.embedded_engine.prompts import prompts_of
from penstock.rollout_service.embedded_engine.runner import Runner
from penstock.rollout_service.embedded_engine.scheduler import Limits, choose_admissions
from penstock.rollout_service.embedded_engine.sequence import Prefix, Sampling, Sequence

TOLERANCE = 1e-5  # nats; float32 against float32
Tokens = tuple[int, ...]


def prefix(tokens: Tokens, key: str | None = None, adapter: int = 0) -> Prefix:
    return (key, adapter), tokens


def values_of(tokens: Tokens, start: int, end: int) -> Computed:
    """Stand-ins for keys, values and experts: each is a hash of its token and of all before it."""
    hashes = torch.tensor([hash(tokens[: at + 1]) % 10007 for at in range(start, end)])
    return Computed(hashes.float().view(1, 1, 1, -1, 1), hashes.to(torch.int16).view(-1, 1, 1))


def keep(kept: PrefixCache, tokens: Tokens, key: str | None = None) -> None:
    kept.keep(prefix(tokens, key), lambda start, end: values_of(tokens, start, end))


def num_common(first: Tokens, second: Tokens) -> int:
    pairs = zip(first, second, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def conversations(draw: random.Random, num: int) -> list[Tokens]:
    """Sequences of which each continues, or cuts and continues, an earlier one."""
    made: list[Tokens] = [tuple(draw.randrange(3) for _ in range(draw.randrange(20, 70)))]
    for _ in range(num):
        base = draw.choice(made)
        cut = draw.choice([len(base), len(base), draw.randrange(len(base) + 1)])
        made.append((*base[:cut], *(draw.randrange(3) for _ in range(draw.randrange(1, 40)))))
    return made


def check_found(found: Reused, tokens: Tokens) -> None:
    if found.length:
        expected = values_of(tokens, 0, found.length)
        assert torch.equal(torch.cat([part.values for part in found.parts], dim=3), expected.values)
        assert torch.equal(torch.cat([part.experts for part in found.parts]), expected.experts)


@given(st.integers(0, 2**32), st.sampled_from([10**6, 900, 250, 40]))
@examples(60)
def test_what_is_found_is_what_was_computed_under_these_tokens(seed: int, max_tokens: int) -> None:
    """Values are of the same tokens behind the same tokens; with room for all, the longest common beginning."""
    draw = random.Random(seed)
    kept, all_kept = PrefixCache(max_tokens), list[Tokens]()
    for tokens in conversations(draw, 40):
        at_most = draw.choice([len(tokens) - 1, draw.randrange(len(tokens))])
        found = kept.find(prefix(tokens), at_most)
        check_found(found, tokens)
        longest = max((min(at_most, num_common(tokens, other)) for other in all_kept), default=0)
        if max_tokens == 10**6:
            assert found.length == (longest if longest >= FEWEST_TOKENS else 0)
            assert kept.num_evicted == 0
        assert found.length <= longest
        if draw.random() < 0.8:
            keep(kept, tokens)
            all_kept += [tokens] if len(tokens) >= FEWEST_TOKENS else []
        assert kept.num_tokens <= max_tokens
    distinct = {tokens[: at + 1] for tokens in all_kept for at in range(len(tokens))}
    assert kept.num_tokens + kept.num_evicted >= len(distinct) or max_tokens == 40, "equal beginnings are held once"
    if max_tokens == 10**6:
        assert kept.num_tokens == len(distinct)


def test_what_was_used_last_stays() -> None:
    """A conversation that goes on outlives those that ended, however many come."""
    kept = PrefixCache(1000)
    going_on = tuple(range(100))
    keep(kept, going_on)
    for number in range(1, 60):
        assert kept.find(prefix(going_on), 100).length == 100
        keep(kept, tuple(range(number * 1000, number * 1000 + 60)))
        assert kept.num_tokens <= 1000
    assert kept.num_tokens + kept.num_evicted == 100 + 59 * 60


def test_keys_and_adapters_share_nothing() -> None:
    """The same tokens under another key, or with another adapter, are other values."""
    kept, tokens = PrefixCache(1000), tuple(range(50))
    keep(kept, tokens, "a")
    assert kept.find(prefix(tokens, "b"), 49) == kept.find(prefix(tokens, "a", 1), 49) == NOTHING
    kept.keep(prefix(tokens, None, 1), lambda start, end: values_of(tokens, start, end))
    kept.drop_adapter(1)
    assert kept.find(prefix(tokens, None, 1), 49) == NOTHING
    assert (kept.find(prefix(tokens, "a"), 49).length, kept.num_tokens) == (49, 50)
    kept.clear()
    assert (kept.find(prefix(tokens, "a"), 49), kept.num_tokens) == (NOTHING, 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"), 2, num_hidden_layers=3, eos_token_id=None)


def complete(runner: Runner, *batches: list[Sequence]) -> None:
    """Start the batches one step after another, and run all to their end."""
    with runner.computing():
        for batch in batches:
            runner.start(batch)
            if runner.running:
                runner.step()
        while runner.running:
            runner.step()


def sequence(prompt: Tokens, new: int = 6, **fields: object) -> Sequence:
    more: Any = fields
    return Sequence("r", prompt, Sampling(max_new_tokens=new, seed=hash(prompt) % 2**63), **more)


def check_exact(one: Sequence, dense: Dense) -> None:
    """The log-probabilities are those of a forward over the whole sequence."""
    expected = dense.of_completion(list(one.prompt), one.output_ids)
    assert one.output_logprobs == pytest.approx(expected, abs=TOLERANCE)


def random_tokens(draw: random.Random, num: int) -> Tokens:
    return tuple(draw.randrange(VOCAB) for _ in range(num))


def test_the_turns_of_episodes_are_exact_and_computed_once(model: Model) -> None:
    """Turns, branches and episodes of a group, in any batches: exact to 1e-5, and only new tokens are computed."""
    draw, runner = random.Random(0), model.runner()
    shared = random_tokens(draw, 70)  # a system prompt
    histories = [shared + random_tokens(draw, draw.choice([5, 5, 30])) for _ in range(5)]
    ended: list[Sequence] = []
    for turn in range(4):
        group = [sequence(history, draw.choice([1, 6, 40])) for history in histories for _ in range(2)]
        complete(runner, group[:3], group[3:])
        for one in group:
            assert one.cached_tokens >= (70 if turn or one in group[3:] else 0)
        ended += group
        grown = [(*one.prompt, *one.output_ids) for one in group[::2]]
        cut = draw.randrange(80, len(grown[0]))
        histories = [history + random_tokens(draw, draw.choice([3, 3, 25])) for history in (grown[0][:cut], *grown[1:])]
    for one in ended:
        check_exact(one, model.dense[0])
    again = [sequence(one.prompt) for one in ended[-4:]]  # equal prompts: one token is computed
    complete(runner, again)
    assert [one.cached_tokens for one in again[::2]] == [len(one.prompt) - 1 for one in again[::2]]
    check_exact(again[0], model.dense[0])
    assert runner.kept.num_evicted == 0


def test_a_long_new_part_behind_a_short_known_one_is_exact(model: Model) -> None:
    """Queries are computed some hundred at a time; so are prompt log-probabilities, from where they are wanted."""
    draw, runner = random.Random(1), model.runner()
    first = sequence(random_tokens(draw, 40), 1)
    complete(runner, [first])
    longer = sequence(first.prompt + random_tokens(draw, 1300), 3, input_logprobs_from=50)
    whole = sequence(first.prompt + random_tokens(draw, 9), 3, input_logprobs_from=0)
    complete(runner, [longer, whole])
    assert (longer.cached_tokens, whole.cached_tokens) == (40, 0), "what is to be reported has to be computed"
    for one in (longer, whole):
        check_exact(one, model.dense[0])
        start, table = one.input_logprobs_from or 0, model.dense[0].logprobs(list(one.prompt))
        wanted = [table[at - 1, one.prompt[at]].item() for at in range(start + 1, len(one.prompt))]
        assert one.input_logprobs == pytest.approx(wanted, abs=TOLERANCE)


def test_short_prompts_beside_a_long_sequence_leave_its_keys_and_values(model: Model) -> None:
    """More rows in a cache at its limit: what runs keeps its columns, though the newcomers need fewer."""
    draw = random.Random(8)
    long, short = sequence(random_tokens(draw, 100), 20), [sequence(random_tokens(draw, 5), 4) for _ in range(7)]
    limits = Limits(max_running=8, max_total_tokens=8 * long.max_tokens, max_prefill_tokens=10**5)
    assert choose_admissions(deque(short), [long], limits) == short
    complete(model.runner(max_tokens=limits.max_total_tokens), [long], short)
    for one in (long, *short):
        check_exact(one, model.dense[0])


@pytest.mark.parametrize("max_new_tokens", [6, 0])
def test_a_prompt_that_is_not_finite_spoils_no_other(model: Model, max_new_tokens: int) -> None:
    """One token's values overflow: its sequence fails, and a prompt with the same beginning is as exact as before."""
    draw, runner = random.Random(6), model.runner()
    embedding = model.weights[0].embedding.clone()
    embedding[7] = torch.nan
    runner.weights = replace(model.weights[0], embedding=embedding)
    shared = tuple(token if token != 7 else 8 for token in random_tokens(draw, 60))
    failing = sequence((*shared, 7), max_new_tokens, input_logprobs_from=0)
    other, shorter = sequence((*shared, 9), input_logprobs_from=59), sequence(shared[:9], 9)
    complete(runner, [failing])
    assert failing.finish is not None
    assert failing.finish.status_code == 500
    complete(runner, [shorter, other])  # in the row of the one that failed, with columns left over of it
    check_exact(other, model.dense[0])
    check_exact(shorter, model.dense[0])


def test_a_pass_computes_no_more_tokens_than_its_limit(model: Model) -> None:
    """What the scheduler counts is what the runner computes, whatever is known and whatever is wanted of it."""
    draw, runner = random.Random(7), model.runner()
    shared = random_tokens(draw, 20)  # too few to be found
    prompts = [shared + random_tokens(draw, 50) for _ in range(6)]
    complete(runner, [sequence(prompt, 1) for prompt in prompts[:4]])
    wanted: list[dict[str, object]] = [
        {},
        {"input_logprobs_from": 0},
        {"input_logprobs_from": 20},  # fewer than are reused
        {"input_logprobs_from": 40},
    ]
    for _ in range(50):
        waiting = deque(sequence(draw.choice(prompts), 1, **draw.choice(wanted)) for _ in range(12))
        limits = Limits(16, 10**5, max_prefill_tokens=draw.choice([1, 90, 200]))
        chosen = choose_admissions(waiting, [], limits, runner.kept.num_known)
        computed = [len(one.new_tokens) for one in prompts_of(chosen, runner.kept)]
        assert len(computed) == 1 or sum(computed) <= limits.max_prefill_tokens


def test_new_weights_reuse_nothing_of_the_old_ones(model: Model) -> None:
    """Nothing of the weights before serves a later token, not even of a sequence that ran across the update."""
    draw, runner = random.Random(2), model.runner()
    ended, across = sequence(random_tokens(draw, 60)), sequence(random_tokens(draw, 60), 30)
    complete(runner, [ended])
    with runner.computing():
        runner.start([across])
        runner.step()
    runner.weights = model.weights[1]
    assert runner.kept.num_tokens == 0
    complete(runner)
    assert runner.kept.num_tokens == 0, "its keys and values are of both versions"
    later = [sequence((*one.prompt, *one.output_ids, 5, 6)) for one in (ended, across)]
    complete(runner, later)
    assert [one.cached_tokens for one in later] == [0, 0]
    for one in later:
        check_exact(one, model.dense[1])
    turn = sequence((*later[0].prompt, *later[0].output_ids, 7))
    complete(runner, [turn])
    assert turn.cached_tokens > 60
    check_exact(turn, model.dense[1])


def test_little_memory_evicts_and_stays_exact(model: Model) -> None:
    """More histories than fit: tokens are evicted and counted, what is computed again is the same."""
    draw, runner = random.Random(3), model.runner(max_kept_tokens=300)
    histories = [random_tokens(draw, 90) for _ in range(6)]
    for _ in range(3):
        group = [sequence(history, draw.choice([1, 9])) for history in histories]
        for one in group:
            complete(runner, [one])
            assert runner.kept.num_tokens <= 300
            check_exact(one, model.dense[0])
        histories = [(*one.prompt, *one.output_ids, 1, 2) for one in group]
    assert runner.kept.num_evicted > 1000
    off = model.runner(max_kept_tokens=0)
    complete(off, [sequence(histories[0])])
    complete(off, [again := sequence(histories[0])])
    assert (again.cached_tokens, off.kept.num_tokens) == (0, 0)
