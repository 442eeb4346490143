"""Preference losses: values and gradients as TRL's, in float64; and what a new one needs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.examples import examples

from penstock.trainer.algorithm.preferences.interface import PREFERENCE_LOSSES
from penstock.trainer.data.pairs import Pair
from penstock.trainer.dpo_settings import DpoSettings
from penstock.trainer.learner.preference_objective import (
    Answers,
    Preference,
    answer_sums,
    answer_weights,
    build_pairs,
    coupled_loss,
)

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "trl" / "losses.json").read_text())
# TRL 1.16 itself refuses to weigh aot, which sorts the answers of a batch
CASES = [case for case in RECORDED["cases"] if not (case["options"]["use_weighting"] and case["loss_type"] == "aot")]
_KEYS = {
    "beta": "beta", "label_smoothing": "label_smoothing", "discopop_tau": "discopop_tau", "ld_alpha": "length_alpha",
    "f_divergence_type": "divergence", "f_alpha_divergence_coef": "alpha", "loss_weights": "loss_weights",
}  # fmt: skip
_DEFAULTS = DpoSettings()


def _case_id(case: dict[str, Any]) -> str:
    changed = {
        _KEYS[key]: value
        for key, value in case["options"].items()
        if key in _KEYS and value != getattr(_DEFAULTS, _KEYS[key])
    }
    return f"{case['loss_type']}-{changed}" + ("-wpo" if case["options"]["use_weighting"] else "")


def preference(**keys: Any) -> Preference:
    chosen = DpoSettings.model_validate(keys)
    return Preference(chosen.losses, chosen.divergence, chosen.alpha, chosen.length_alpha, chosen.reward_scale)


def _pairs() -> list[Pair]:
    """Return pairs whose answers have the recorded lengths; TRL's first half are the chosen ones."""
    lengths = RECORDED["lengths"]
    half = len(lengths) // 2
    ids = [np.arange(length, dtype=np.int32) for length in lengths]
    return [Pair(np.arange(2, dtype=np.int32), ids[n], ids[half + n]) for n in range(half)]


def _flat(rows: list[list[float]]) -> list[float]:
    """Return the values of a recorded table as the tokens of our micro-batch: chosen before rejected."""
    lengths = RECORDED["lengths"]
    half = len(lengths) // 2
    return [value for n in range(half) for row in (n, half + n) for value in rows[row][: lengths[row]]]


@pytest.mark.parametrize("case", CASES, ids=_case_id)
def test_losses_and_gradients_are_those_of_trl(case: dict[str, Any]) -> None:
    """The mean loss, its gradient to every token's log-probability, and the reported rewards."""
    options = case["options"]
    given_keys = {_KEYS[key]: value for key, value in options.items() if key in _KEYS and value is not None}
    read = {name for loss in ([case["loss_type"]] if isinstance(case["loss_type"], str) else case["loss_type"])
            for name in PREFERENCE_LOSSES.find(loss).value.option_names}  # fmt: skip
    idle = {"label_smoothing", "discopop_tau", "beta"} - read
    wanted = preference(loss=case["loss_type"], **{key: value for key, value in given_keys.items() if key not in idle})
    pairs = _pairs()
    batch = build_pairs(pairs)
    logprobs = torch.tensor(_flat(RECORDED["current"]), dtype=torch.float64, requires_grad=True)
    reference = answer_sums(
        torch.tensor(_flat(RECORDED["reference"]), dtype=torch.float64), batch, wanted.length_alpha
    )[1]
    if case["float32"]:
        logprobs = logprobs.detach().float().double().requires_grad_(True)
    plain, weighed = answer_sums(logprobs, batch, wanted.length_alpha)
    lengths = torch.tensor([len(answer) for pair in pairs for answer in (pair.chosen, pair.rejected)]).double()
    weights = None
    if options["use_weighting"]:
        collisions = torch.tensor(_flat(RECORDED["log_sum_sq"]), dtype=torch.float64)
        weights = answer_weights(torch.stack([logprobs.detach(), collisions]), batch)
    answers = Answers(plain, weighed, reference, lengths, weights)
    mean_tokens = sum(len(pair.chosen) for pair in pairs) / len(pairs)
    loss = wanted.per_pair(answers, mean_chosen_tokens=mean_tokens, kl=0.0).mean()
    loss.backward()
    close: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-6} if case["float32"] else {"rtol": 1e-9, "atol": 1e-12}
    if case["loss_type"] == "exo_pair" and not case["float32"]:  # TRL's logarithm of the smoothing is float32
        close = {"rtol": 1e-7, "atol": 1e-9}
    torch.testing.assert_close(loss.detach(), torch.tensor(case["loss"], dtype=torch.float64), **close)
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor(_flat(case["grad"]), dtype=torch.float64), **close)
    figures = wanted.figures(answers)
    if "beta" in read:
        for name, value in case["metrics"].items():
            assert float(figures[name]) / len(pairs) == pytest.approx(value, rel=1e-5), name


def test_every_loss_type_of_trl_is_compared() -> None:
    """The documented ones, each with its option at two values, and every divergence."""
    types = {case["loss_type"] for case in CASES if isinstance(case["loss_type"], str)}
    assert types == {
        "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
        "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
    }  # fmt: skip
    assert set(PREFERENCE_LOSSES.names()) == types | {"cpo", "simpo", "orpo", "kto"}


NUMBERS = st.lists(st.floats(-30.0, -0.1), min_size=4, max_size=4)


@pytest.mark.parametrize("name", PREFERENCE_LOSSES.names())
@examples(10)
@given(values=NUMBERS, references=NUMBERS)
def test_the_gradient_of_the_whole_batch_is_that_of_its_pairs(
    name: str, values: list[float], references: list[float]
) -> None:
    """`coupled_loss`, with which losses that sort the batch are trained, agrees with autograd; rewards stay finite."""
    smoothing = {"label_smoothing": 0.1} if name in ("exo_pair", "robust", "aot") else {}
    wanted = preference(loss=name, **smoothing)
    leaf = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    answers = Answers(
        leaf, leaf, torch.tensor(references, dtype=torch.float64), torch.tensor([3.0, 2.0, 5.0, 4.0]).double()
    )
    losses = wanted.per_pair(answers, mean_chosen_tokens=4.0, kl=0.1)
    [direct] = torch.autograd.grad(losses.mean(), leaf)
    found, weighed, plain = coupled_loss(wanted, answers, mean_chosen_tokens=4.0, kl=0.1)
    torch.testing.assert_close(found, losses.detach())
    torch.testing.assert_close(weighed + plain, direct)
    assert bool(torch.isfinite(losses).all())
    better = replace(
        answers, plain=leaf + torch.tensor([0.01, 0.0, 0.01, 0.0]), weighed=leaf + torch.tensor([0.01, 0.0, 0.01, 0.0])
    )
    if name in ("sigmoid", "orpo", "cpo", "simpo", "sft", "bco_pair"):  # monotone in the chosen answer
        assert float(wanted.per_pair(better, mean_chosen_tokens=4.0, kl=0.1).sum().detach()) <= float(
            losses.sum().detach()
        )


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"loss": "sigmod"}, "unknown preference loss 'sigmod'; did you mean 'sigmoid'"),
        ({"loss": "hinge", "label_smoothing": 0.1}, "dpo.label_smoothing does nothing with dpo.loss = hinge"),
        ({"loss": "exo_pair"}, "exo_pair needs dpo.label_smoothing above 0"),
        ({"loss": "apo_zero", "divergence": "forward_kl"}, "dpo.divergence has no meaning for dpo.loss = apo_zero"),
        ({"loss": "simpo", "reference": "live"}, "dpo.loss = simpo has no reference"),
        ({"loss": ["sigmoid", "sft"], "loss_weights": [1.0]}, "1 factors for 2 losses"),
        ({"loss": "kto", "reference": "precomputed"}, "cannot be precomputed"),
        ({"loss": "sigmoid", "options": {"tau": 1}}, "dpo.options.tau is an option of no chosen loss"),
        ({"alpha": 0.7}, 'dpo.alpha does nothing without dpo.divergence = "alpha_divergence"'),
        ({"label_smoothing": 0.5}, "less than 0.5"),
    ],
)
def test_settings_that_do_nothing_or_contradict_are_refused(keys: dict[str, Any], expected: str) -> None:
    """Each with what to do; TRL ignores label smoothing where the loss does not read it."""
    with pytest.raises(ValidationError) as caught:
        DpoSettings.model_validate(keys)
    assert expected in str(caught.value)


def test_a_loss_of_ones_own_is_one_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from pydantic import Field\n"
        "from penstock.trainer.algorithm.preferences.interface import Beta, preference_loss\n"
        "class O(Beta):\n    power: float = Field(default=2.0, description='Power.')\n"
        "@preference_loss(options=O, source='here')\n"
        "def squared(pairs, *, beta, power):\n    '''Square.'''\n    return (beta * pairs.margin - 1.0).abs() ** power\n"
    )
    wanted = preference(loss="mine.py:squared", beta=0.5, options={"power": 3.0})
    numbers = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    answers = Answers(numbers, numbers, torch.zeros(2).double(), torch.ones(2).double())
    assert wanted.per_pair(answers, mean_chosen_tokens=1.0, kl=0.0).tolist() == [0.125]


def test_the_documentation_has_every_loss_and_its_options() -> None:
    """The table of docs/fine_tuning.md; every option is a key of [dpo] with one meaning."""
    text = (Path(__file__).parents[3] / "docs" / "fine_tuning.md").read_text()
    table = text.partition("## Preference losses")[2]
    for name in PREFERENCE_LOSSES.names():
        assert f"`{name}`" in table
        assert PREFERENCE_LOSSES.find(name).value.source
    options = {name for loss in PREFERENCE_LOSSES.built_in.values() for name in loss.option_names}
    assert options <= set(DpoSettings.model_fields)
    assert [name for name in options - {"beta"} if name not in text] == []
