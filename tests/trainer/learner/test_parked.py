"""A parked model stays in host memory, and each of its layers is on the device while it computes."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.trainer.algorithm.test_full_kl import OTHER, POLICY
from tests.trainer.learner.tiny import row_of
from torch import nn

from penstock.trainer.algorithm.batch import build
from penstock.trainer.learner.logprobs import CompletionScorer
from penstock.trainer.learner.reference import Reference, park

META = torch.device("meta")  # stands for a device that is not the host


def test_one_layer_at_a_time_is_on_the_device() -> None:
    """Each has its weights there during its own call alone; afterwards all are where they were, also after an error."""
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).requires_grad_(False).eval()
    before = [parameter.data_ptr() for parameter in module.parameters()]
    park(module, META)
    seen: list[list[str]] = []
    for layer in module:
        layer.register_forward_pre_hook(
            lambda *_: seen.append([str(part.weight.device) for part in module])  # after the hook that fetches
        )
    assert module(torch.zeros(5, 3, device=META)).device == META
    assert seen == [["meta", "cpu", "cpu"], ["cpu", "meta", "cpu"], ["cpu", "cpu", "meta"]]
    assert {str(buffer.device) for buffer in module.buffers()} == {"meta"}
    with pytest.raises(RuntimeError, match="same reduction dim"):
        module[0](torch.zeros(5, 9, device=META))
    assert [parameter.data_ptr() for parameter in module.parameters()] == before


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
        ),
    ],
)
def test_a_parked_reference_is_the_reference(device: str) -> None:
    """To the last bit, log-probabilities and logits of some tokens, with a head that is the embedding too."""
    model = copy.deepcopy(OTHER)
    model.lm_head.weight = model.model.embed_tokens.weight
    here, parked = (
        Reference(CompletionScorer(copy.deepcopy(model), 1.0), torch.device(device), parked=parked)
        for parked in (False, True)
    )
    batch = build([row_of([1, 2, 3], [4, 5, 6, 7], 1.0), row_of([1, 2, 3], [8, 9, 2, 0], 1.0)]).to(torch.device(device))
    assert torch.equal(here.logprobs(batch), parked.logprobs(batch))
    assert torch.equal(here.hidden_states(batch).logits(), parked.hidden_states(batch).logits())
    assert {str(p.device) for p in parked._scorer.parameters()} == {"cpu"}


def test_the_head_is_transferred_once_for_a_pass() -> None:
    """Not once for a chunk: log-probabilities take one transfer, and a KL in the loss one forward and one backward."""
    policy, parked = (CompletionScorer(copy.deepcopy(model), 1.0, max_logits=2 * 17) for model in (POLICY, OTHER))
    reference, transfers = Reference(parked, torch.device("cpu"), parked=True), list[str]()
    parked.language_model.lm_head.register_forward_pre_hook(lambda *_: transfers.append("head"))
    batch = build([row_of([1, 2, 3], [4, 5, 6, 7, 8, 9], 1.0)])
    reference.logprobs(batch)
    assert len(transfers) == 1
    _, kl = policy(batch.input_ids, batch.predictors, batch.targets, kl_to=reference.hidden_states(batch))
    assert len(transfers) == 2
    kl.sum().backward()
    assert len(transfers) == 3
