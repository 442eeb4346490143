"""A language model with a score instead of an output head: the reward models that `transformers` loads as sequence classifiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from penstock.trainer.algorithm.packed_rows import Layout
from penstock.trainer.errors import UnsupportedModel
from penstock.trainer.learner.attention.models import WHOLE, pair_cost, read_rows, use_packed_rows
from penstock.trainer.learner.flops import pass_cost
from penstock.trainer.learner.load_model import attach_adapters, check_attention, check_loaded, from_folder, prepare
from penstock.trainer.learner.policy import Policy
from penstock.trainer.learner.sequence_parallel import TokenShares
from penstock.trainer.learner.step_watch import layer_groups
from penstock.trainer.learner.trainable import Optimisation, Trainable
from penstock.trainer.parallel_dims import ParallelDims

_HEAD = "score"


class RewardScorer(nn.Module):
    """A sequence classifier of one label that scores the last token of texts; `Policy` calls it like a language model."""

    language_model: Any  # the part of the parameter names that `Policy` removes

    def __init__(self, classifier: nn.Module, shares: TokenShares = WHOLE) -> None:
        super().__init__()
        self._shares = shares
        self.pair_cost, self.pass_cost = pair_cost(classifier), pass_cost(classifier)  # of the whole model
        self.language_model = classifier
        self.padding_reason = use_packed_rows(classifier)  # why rows are padded; None: they are one stream

    def forward(  # noqa: PLR0913  the arguments of `CompletionScorer`
        self,
        input_ids: Tensor,
        predictors: Tensor,
        targets: Tensor,
        *,
        position_ids: Tensor | None = None,
        layout: Layout | None = None,
        with_entropy: bool = False,
        kl_to: None = None,
        kl_from: None = None,
        images: None = None,
    ) -> Tensor:
        """Return the reward [N] float32 at each of ``predictors``; the other arguments are those of `CompletionScorer`."""
        del targets, with_entropy, kl_to, kl_from, images  # models that read images are refused
        packed = self.padding_reason is None
        hidden = read_rows(self.language_model.base_model, input_ids, position_ids, layout, packed, self._shares)
        own, places = self._shares.own_predictors(predictors, input_ids.shape[1])
        rewards = self.language_model.score(hidden.index_select(0, own)).squeeze(-1).float()
        return self._shares.whole(rewards, places, len(predictors))

    def around(self, classifier: nn.Module) -> RewardScorer:
        return RewardScorer(classifier)


def load_reward_model(folder: Path, how: Optimisation, dims: ParallelDims) -> tuple[Policy, dict[str, Any]]:
    """Load a language model, or a reward model, to train its score; returns it with what differs in its config.json.

    A score that the folder does not have is 0 at first, so that the first loss is that of equal rewards. With adapters it is
    trained whole, beside them.

    Raises:
        UnsupportedModel: The folder is no usable model, transformers has no classifier of its kind, or adapters match no layer.
        ConfigError: The model cannot be computed in the layout of the ranks.
    """
    model, report = from_folder(
        "AutoModelForSequenceClassification", "a usable sequence classifier", folder, how.dtype, dims, num_labels=1
    )
    missing = set(report["missing_keys"])
    if not hasattr(model, "score") or tuple(model.score.weight.shape) != (
        1,
        model.config.get_text_config().hidden_size,
    ):
        raise UnsupportedModel(
            f"model.path = {folder}: {type(model).__name__} has no linear score; use a decoder model"
        )
    check_loaded(model, {**report, "missing_keys": missing - {f"{_HEAD}.weight"}}, folder)
    if f"{_HEAD}.weight" in missing:
        with torch.no_grad():
            model.score.weight.zero_()
    prepare(model, how)
    attach_adapters(model, how, head=_HEAD)
    scorer = RewardScorer(model, TokenShares(dims.token_group))
    changed = {
        "architectures": [type(model).__name__],
        "num_labels": 1,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
    layers = layer_groups(name for name, parameter in scorer.named_parameters() if parameter.requires_grad)
    trainable = Trainable(scorer, how, dims, layers, model=model)
    attention = check_attention(model, scorer.padding_reason, trainable.device, dims)
    return Policy(trainable, cast(Any, scorer), dims, attention=attention), changed
