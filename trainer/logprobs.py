"""Log-probabilities of the sampled tokens under the model that is being trained.

Only the positions that predict a sampled token go through the output head, in chunks: the logits
``[tokens, vocabulary]``, which for a 150,000-token vocabulary are larger than everything else
together, never exist whole, neither forward nor backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.errors import UnsupportedModel
from trainer.losses.supervised import entropy

MAX_LOGITS = 32 * 1024 * 1024  # elements of one chunk: 128 MiB in float32

# Settings of a model's config that change its logits after the output head; where one is active,
# the engine's log-probabilities would differ from ours without any warning.
_HEAD_SETTINGS = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}


class CompletionScorer(nn.Module):
    """A causal language model that answers with log-probabilities instead of logits.

    One module around the model, so that DeepSpeed's hooks see one forward call, output head included.
    """

    language_model: Any  # a transformers causal language model; their classes are typed loosely

    def __init__(self, language_model: nn.Module, temperature: float, max_logits: int = MAX_LOGITS) -> None:
        """Wrap a `transformers` causal language model; raises UnsupportedModel for one with a special head."""
        super().__init__()
        config: Any = language_model.config
        for name, neutral in _HEAD_SETTINGS.items():
            value = getattr(config, name, neutral)
            if value is not None and value != neutral:
                raise UnsupportedModel(
                    f"{type(language_model).__name__} has {name} = {value}: its logits are transformed after the "
                    "output head, which the trainer's chunked log-probabilities do not do"
                )
        self.language_model = language_model
        self._temperature = temperature
        self._chunk_tokens = max(1, max_logits // config.get_text_config().vocab_size)

    def forward(
        self,
        input_ids: Tensor,
        predictors: Tensor,
        targets: Tensor,
        *,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        with_entropy: bool = False,
    ) -> Tensor:
        """Score sampled tokens.

        Args:
            input_ids: [R, T] int64, rows padded on the right; a causal model needs no mask for that.
            predictors: [N] int64, flat positions in ``input_ids`` whose output predicts the target.
            targets: [N] int64, the sampled tokens.
            position_ids: [R, T] int64, where completions share a prompt; None: 0, 1, 2, …
            attention_mask: [R, 1, T, T] bool, who sees whom there; None: causal.
            with_entropy: Also return the entropy of every position's distribution, in nats.

        Returns:
            [N] float32 ``log softmax(logits / temperature)[target]``, with gradient; [2, N] with the entropies.
        """
        backbone = self.language_model.base_model
        hidden = backbone(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        hidden = hidden.flatten(0, 1).index_select(0, predictors)
        if len(targets) <= self._chunk_tokens:
            return self._score(hidden, targets, with_entropy)
        chunks = [
            checkpoint(self._score, some_hidden, some_targets, with_entropy, use_reentrant=False)
            for some_hidden, some_targets in zip(
                hidden.split(self._chunk_tokens), targets.split(self._chunk_tokens), strict=True
            )
        ]
        return torch.cat(chunks, dim=-1)

    def _score(self, hidden: Tensor, targets: Tensor, with_entropy: bool) -> Tensor:
        logits = self.language_model.get_output_embeddings()(hidden).float()
        if self._temperature != 1.0:
            logits = logits / self._temperature
        logprobs = -F.cross_entropy(logits, targets, reduction="none")
        return torch.stack([logprobs, entropy(logits)]) if with_entropy else logprobs
