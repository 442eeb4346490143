"""Log-probabilities of the sampled tokens under the model that is being trained.

Only the positions that predict a sampled token go through the output head, in chunks. The logits
``[tokens, vocabulary]``, which for a 150,000-token vocabulary are larger than all other tensors
together, are never held whole, neither forward nor backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's name for it
from torch import Tensor, nn

from penstock.trainer.algorithm.batch import MicroBatch, StreamImages
from penstock.trainer.algorithm.kl import entropy, kl_from_teacher, kl_full
from penstock.trainer.algorithm.packed_rows import Layout
from penstock.trainer.errors import UnsupportedModel
from penstock.trainer.learner import experts
from penstock.trainer.learner.attention.models import WHOLE, pair_cost, read_rows, use_packed_rows
from penstock.trainer.learner.experts import Routing
from penstock.trainer.learner.flops import pass_cost
from penstock.trainer.learner.output_head import (
    Logits,
    Product,
    logit_transform,
    logits_at_once,
    of_head,
    score_in_chunks,
    take_float32_gradient,
)
from penstock.trainer.learner.parallel_shares import TokenShares
from penstock.trainer.learner.vision import ImageEmbeddings, text_body, tower_of

Top = tuple[Tensor, Tensor]  # a teacher's likeliest tokens and their log-probabilities, both [N, k]


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """What the output head of a frozen policy receives for sampled tokens, [n, H], and the scorer with that head."""

    values: Tensor
    scorer: CompletionScorer

    def logits(self) -> Tensor:
        """Return the logits of all, [n, V] float32."""
        return self.scorer.with_logits(self.values, lambda logits: logits(0, len(self.values)))


class CompletionScorer(nn.Module):
    """A language model that returns log-probabilities; one module, so that DeepSpeed sees one forward call."""

    language_model: Any  # a transformers causal language model; their classes are typed loosely

    def __init__(
        self,
        language_model: nn.Module,
        temperature: float,
        max_logits: int | None = None,
        shares: TokenShares = WHOLE,
        *,
        head_in_float32: bool = False,
    ) -> None:
        """``max_logits`` are those of a chunk; None: as many as the memory of the device allows (`logits_at_once`)."""
        super().__init__()
        config: Any = language_model.config
        self._transform = logit_transform(config.get_text_config())
        self._max_logits, self._head_in_float32 = max_logits, head_in_float32
        self.language_model = language_model
        take_float32_gradient(self.language_model.get_output_embeddings())
        self._embeddings = ImageEmbeddings(language_model) if tower_of(language_model) is not None else None
        self.padding_reason = use_packed_rows(language_model)  # why rows are padded; None: they are one stream
        self.pair_cost, self.pass_cost = pair_cost(language_model), pass_cost(language_model)  # of the whole model
        self._temperature = temperature
        self.routing: Routing | None = None  # of the last forward pass that received experts
        self._shares = shares  # of a stream's tokens; with several, every call is collective

    def forward(  # noqa: PLR0913  what a policy reads, and what more it wants of the distributions
        self,
        input_ids: Tensor,
        predictors: Tensor,
        targets: Tensor,
        *,
        position_ids: Tensor | None = None,
        layout: Layout | None = None,
        with_entropy: bool = False,
        kl_to: HiddenStates | None = None,
        kl_from: Top | None = None,
        hidden_only: bool = False,
        experts: Tensor | None = None,
        images: StreamImages | None = None,
    ) -> Tensor:
        """Score sampled tokens.

        Args:
            input_ids: [1, T] int64, the rows of a micro-batch in one stream.
            predictors: [N] int64, positions in the stream whose output predicts the target.
            targets: [N] int64, the sampled tokens.
            position_ids: [1, T] int64, place of each token in its row, or [3, 1, T] with images; None: 0, 1, 2, …
            layout: Which token attends to which; None: the stream is one row.
            with_entropy: Also return the entropy of every position's distribution, in nats.
            kl_to: Also return the exact KL of every position's distribution to the one of these hidden states, which
            are
                those of the tokens that ``hidden_only`` selects.
            kl_from: Also return the KL from a teacher over these likeliest tokens of it (`kl_from_teacher`).
            hidden_only: Return what the output head receives and nothing else, for `HiddenStates`.
            experts: [T, layers, k], which compute each token, after `replay_routers`; None: the routers choose.
            images: Those of the rows; only for a model that reads images.

        Returns:
            [N] float32 ``log softmax(logits / temperature)[target]``, with gradient; [2 to 4, N] with the
            entropies and then the KLs; hidden states [n, H] alone when asked, of the tokens of this rank's share.
        """
        packed, shares = self.padding_reason is None, self._shares
        self.routing = None
        if experts is not None:
            self.routing = Routing(shares.own(experts[None])[0], shares.num_own(input_ids.shape[1]))
        embedded = self._embedded(input_ids, images)
        hidden = read_rows(
            text_body(self.language_model), input_ids, position_ids, layout, packed, shares, self.routing, embedded
        )
        local_predictors, places = shares.own_predictors(predictors, input_ids.shape[1])
        hidden = hidden.index_select(0, local_predictors)
        if hidden_only:
            return hidden
        own_targets = targets if places is None else targets[places]
        if kl_from is not None and places is not None:
            kl_from = kl_from[0][places], kl_from[1][places]
        scores = self.scores(hidden, own_targets, with_entropy=with_entropy, kl_to=kl_to, kl_from=kl_from)
        return shares.whole(scores, places, len(targets))

    def _embedded(self, input_ids: Tensor, images: StreamImages | None) -> Tensor | None:
        if self._embeddings is not None:
            return self._embeddings(input_ids, images)
        if images is not None:
            raise UnsupportedModel(
                f"rows with {len(images.images)} images, and {type(self.language_model).__name__} reads text alone; "
                "train on them with the model that sampled them"
            )
        return None

    def replay_routers(self) -> None:
        """Let `forward` compute with the experts passed to it; raises UnsupportedModel where that is not exact."""
        if self.padding_reason is not None:
            raise UnsupportedModel(
                f"trainer.router_replay: {self.padding_reason}, so that its rows are padded; set it to false"
            )
        experts.install(self.language_model)

    def routing_figures(self) -> Tensor:
        """Return `Routing.figures` of the last forward pass, of all shares; zeros without experts. Collective."""
        if self.routing is None:
            return torch.zeros(2, dtype=torch.float64, device=self.language_model.device)
        return self._shares.sum(self.routing.figures())

    def around(self, language_model: nn.Module) -> CompletionScorer:
        return CompletionScorer(
            language_model, self._temperature, self._max_logits, head_in_float32=self._head_in_float32
        )

    def scores(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        with_entropy: bool = False,
        kl_to: HiddenStates | None = None,
        kl_from: Top | None = None,
    ) -> Tensor:
        def score(logits: Tensor, start: int, end: int, reference: Logits | None) -> Tensor:
            logits = self._logits_of(logits)
            scores = [-F.cross_entropy(logits, targets[start:end], reduction="none")]
            if with_entropy:
                scores.append(entropy(logits))
            if reference is not None:
                scores.append(kl_full(logits, reference(start, end).to(logits.device)))
            if kl_from is not None:
                scores.append(kl_from_teacher(logits, *(of_top[start:end] for of_top in kl_from)))
            return torch.stack(scores) if len(scores) > 1 else scores[0]

        def of_product(product: Product) -> Tensor:
            return score_in_chunks(product, score, partial(self._with_reference, kl_to), self._chunk(hidden))

        return self._of_head(hidden, of_product)

    def collisions(self, hidden: Tensor, predictors: Tensor, targets: Tensor, num_tokens: int) -> Tensor:
        """Return log-probabilities and logs of the sum of squared probabilities, [2, N] float32, without a gradient.

        ``hidden`` is what `forward` returns with ``hidden_only`` for a stream of ``num_tokens``.
        """
        _, places = self._shares.own_predictors(predictors, num_tokens)
        own_targets = targets if places is None else targets[places]

        def score(logits: Tensor, start: int, end: int, _: Logits | None) -> Tensor:
            logprobs = F.log_softmax(self._logits_of(logits), dim=-1)
            chosen = logprobs.gather(1, own_targets[start:end, None])[:, 0]
            return torch.stack([chosen, torch.logsumexp(2.0 * logprobs, dim=-1)])

        def of_product(product: Product) -> Tensor:
            return score_in_chunks(product, score, partial(self._with_reference, None), self._chunk(hidden))

        with torch.no_grad():
            return self._shares.whole(self._of_head(hidden, of_product), places, len(targets))

    def with_logits(self, hidden: Tensor, use: Callable[[Logits], Tensor]) -> Tensor:
        """Return ``use`` of the logits of hidden states [n, H], without gradient; the head is whole meanwhile."""
        with torch.no_grad():
            return self._of_head(hidden, lambda product: use(self._logits(product)))

    def _of_head(self, hidden: Tensor, use: Callable[[Product], Tensor]) -> Tensor:
        return of_head(self.language_model.get_output_embeddings(), hidden, use, in_float32=self._head_in_float32)

    def _with_reference(
        self, states: HiddenStates | None, product: Product, use: Callable[[Logits | None], Tensor]
    ) -> Tensor:
        if states is None:
            return use(None)
        if states.scorer is self:  # without the adapter; the head is called already, and is the same one
            return use(self._logits(replace(product, hidden=states.values, low=None, up=None)))
        return states.scorer.with_logits(states.values, use)

    def _logits(self, product: Product) -> Logits:
        def logits(start: int, end: int) -> Tensor:
            with torch.no_grad():
                return self._logits_of(product(start, end).float())

        return logits

    def _logits_of(self, logits: Tensor) -> Tensor:
        """Return what is sampled from, of what the output head returns; both [n, V] float32."""
        logits = logits if self._transform is None else self._transform(logits)
        return logits if self._temperature == 1.0 else logits / self._temperature

    def _chunk(self, hidden: Tensor) -> int:
        """Return how many tokens go through the output head together."""
        max_logits = logits_at_once(hidden.device) if self._max_logits is None else self._max_logits
        return max(1, max_logits // self.language_model.config.get_text_config().vocab_size)


def read_batch(scorer: Callable[..., Tensor], batch: MicroBatch, **options: Any) -> Tensor:
    """Return what `CompletionScorer.forward`, or a module around it, returns for a micro-batch on its device."""
    sampled = batch.predictors, batch.targets
    rows: dict[str, Any] = {"position_ids": batch.position_ids, "layout": batch.layout, "images": batch.images}
    return scorer(batch.input_ids, *sampled, **rows, **options)
