"""The embedded engine's sampler: correct frequencies, correct logprobs, reproducible draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.rollout_service.embedded_engine.model.sampler import Choice, sample, uniforms

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, -3.0, 0.0])
DRAWS = 40_000


def choice(num: int, **fields: torch.Tensor | None) -> Choice:
    """Sampling parameters of ``num`` rows: temperature 1 unless a field is given."""
    numbers = torch.from_numpy(uniforms(np.arange(num, dtype=np.uint64), np.zeros(num, dtype=np.int64)))
    defaults: dict[str, torch.Tensor | None] = dict.fromkeys(("temperatures", "greedy", "top_p", "top_k"))
    return Choice(**({"uniforms": numbers} | defaults | fields))


def frequencies(**fields: torch.Tensor | None) -> torch.Tensor:
    tokens, _ = sample(LOGITS.expand(DRAWS, -1).clone(), choice(DRAWS, **fields))
    return torch.bincount(tokens, minlength=len(LOGITS)) / DRAWS


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_tokens_are_drawn_by_their_probability(temperature: float) -> None:
    """Frequencies are softmax(logits / temperature) within five standard errors."""
    expected = (LOGITS / temperature).softmax(-1)
    error = (expected * (1 - expected) / DRAWS).sqrt()
    found = frequencies(temperatures=torch.full((DRAWS,), temperature))
    assert ((found - expected).abs() <= 5 * error).all()


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_k": torch.full((DRAWS,), 2)}, [0, 1]),
        # probabilities: 0.584 0.215 0.130 0.079 (token 5) 0.029 0.004; kept while those before it sum to <= p
        ({"top_p": torch.full((DRAWS,), 0.7)}, [0, 1]),
    ],
)
def test_filters_exclude_and_renormalise(fields: dict, kept: list[int]) -> None:
    expected = torch.zeros(len(LOGITS))
    expected[kept] = LOGITS.softmax(-1)[kept]
    expected /= expected.sum()
    assert (frequencies(**fields) - expected).abs().max() < 0.015
    assert frequencies(**fields)[expected == 0].sum() == 0


def test_logprobs_ignore_the_filters() -> None:
    """The reported logprob is over the whole vocabulary, including excluded tokens."""
    tokens, logprobs = sample(LOGITS.expand(64, -1).clone(), choice(64, top_k=torch.full((64,), 2)))
    assert torch.allclose(logprobs, LOGITS.log_softmax(-1)[tokens])


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    greedy = torch.arange(1000) % 2 == 0
    tokens, _ = sample(LOGITS.expand(1000, -1).clone(), choice(1000, greedy=greedy))
    assert (tokens[greedy] == 0).all()
    assert torch.equal(tokens[~greedy], sample(LOGITS.expand(1000, -1).clone(), choice(1000))[0][~greedy])


def test_forbidden_tokens_are_never_drawn() -> None:
    """A logit of minus infinity has probability 0, also at the ends of the range."""
    logits = torch.full((4096, 5), -torch.inf)
    logits[:, 2] = 0.0
    assert (sample(logits, choice(4096))[0] == 2).all()


def test_uniforms_are_uniform_and_independent() -> None:
    """Numbers of neighbouring seeds and counters are uniform in [0, 1) and uncorrelated."""
    seeds, counters = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200))
    numbers = uniforms(seeds.ravel(), counters.ravel()).reshape(200, 200)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    shares = np.histogram(numbers, bins=20, range=(0, 1))[0] / numbers.size
    assert np.abs(shares - 0.05).max() < 0.006
    for one, other in ((numbers[:-1], numbers[1:]), (numbers[:, :-1], numbers[:, 1:])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.03
