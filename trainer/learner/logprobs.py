"""Log-probabilities of the sampled tokens under the model that is being trained.

Only the positions that predict a sampled token go through the output head, in chunks. The logits
``[tokens, vocabulary]``, which for a 150,000-token vocabulary are larger than all other tensors
together, are never held whole, neither forward nor backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's name for it
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.trainer.algorithm.batch import StreamImages
from penstock.trainer.algorithm.kl import entropy, kl_from_teacher, kl_full
from penstock.trainer.algorithm.packed_rows import Layout
from penstock.trainer.errors import UnsupportedModel
from penstock.trainer.learner import experts
from penstock.trainer.learner.attention.models import WHOLE, pair_cost, read_rows, use_packed_rows
from penstock.trainer.learner.experts import Routing
from penstock.trainer.learner.flops import pass_cost
from penstock.trainer.learner.parallel_shares import TokenShares
from penstock.trainer.learner.vision import ImageEmbeddings, text_body, tower_of

Top = tuple[Tensor, Tensor]  # a teacher's likeliest tokens and their log-probabilities, both [N, k]
Logits = Callable[[int, int], Tensor]  # (start, end) -> logits of those sampled tokens, [n, V] float32, no gradient

MAX_LOGITS = 32 * 1024 * 1024  # elements of one chunk: 128 MiB in float32

# Settings of a model's config that change its logits after the output head. If one is active, the log-probabilities
# of the engine differ from the trainer's without any warning.
_HEAD_SETTINGS = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}


class CompletionScorer(nn.Module):
    """A language model that returns log-probabilities; one module, so that DeepSpeed sees one forward call."""

    language_model: Any  # a transformers causal language model; their classes are typed loosely

    def __init__(
        self, language_model: nn.Module, temperature: float, max_logits: int = MAX_LOGITS, shares: TokenShares = WHOLE
    ) -> None:
        super().__init__()
        config: Any = language_model.config
        for name, neutral in _HEAD_SETTINGS.items():
            value = getattr(config, name, neutral)
            if value is not None and value != neutral:
                raise UnsupportedModel(
                    f"{type(language_model).__name__} has {name} = {value}: its logits are transformed after the "
                    "output head, which the trainer does not do; use another model"
                )
        self.language_model = language_model
        self._embeddings = ImageEmbeddings(language_model) if tower_of(language_model) is not None else None
        self.padding_reason = use_packed_rows(language_model)  # why rows are padded; None: they are one stream
        self.pair_cost, self.pass_cost = pair_cost(language_model), pass_cost(language_model)  # of the whole model
        self._temperature = temperature
        self.routing: Routing | None = None  # of the last forward pass that received experts
        self._shares = shares  # of a stream's tokens; with several, every call is collective
        self._chunk_tokens = max(1, max_logits // config.get_text_config().vocab_size)

    def forward(  # noqa: PLR0913  what a policy reads, and what more it wants of the distributions
        self,
        input_ids: Tensor,
        predictors: Tensor,
        targets: Tensor,
        *,
        position_ids: Tensor | None = None,
        layout: Layout | None = None,
        with_entropy: bool = False,
        kl_to: Logits | None = None,
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
            kl_to: Also return the exact KL of every position's distribution to the one with these logits, which are of the tokens
                that ``hidden_only`` returns hidden states of.
            kl_from: Also return the KL from a teacher over these likeliest tokens of it (`kl_from_teacher`).
            hidden_only: Return what the output head receives and nothing else, for `logits`.
            experts: [T, layers, k], which compute each token, after `replay_routers`; None: those that the routers choose.
            images: Those of the rows; only for a model that reads images.

        Returns:
            [N] float32 ``log softmax(logits / temperature)[target]``, with gradient; [2 to 4, N] with the
            entropies and then the KLs; hidden states [n, H] alone when asked, of the tokens that this rank's share predicts.
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
                f"rows with {len(images.images)} images, and {type(self.language_model).__name__} reads text alone; train on them with "
                "the model that sampled them"
            )
        return None

    def replay_routers(self) -> None:
        """Let `forward` compute with the experts passed to it; raises UnsupportedModel for a model for which that is not exact."""
        if self.padding_reason is not None:
            raise UnsupportedModel(
                f"trainer.router_replay: {self.padding_reason}, so that its rows are padded; set it to false"
            )
        experts.install(self.language_model)

    def routing_figures(self) -> Tensor:
        """Return `Routing.figures` of the last forward pass, of all shares; zeros if it received no experts. Collective as `forward`."""
        if self.routing is None:
            return torch.zeros(2, dtype=torch.float64, device=self.language_model.device)
        return self._shares.sum(self.routing.figures())

    def around(self, language_model: nn.Module) -> CompletionScorer:
        return CompletionScorer(language_model, self._temperature)

    def scores(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        with_entropy: bool = False,
        kl_to: Logits | None = None,
        kl_from: Top | None = None,
    ) -> Tensor:
        pieces = self._pieces(hidden, targets)
        if len(pieces) == 1:
            return self._score(hidden, targets, with_entropy, kl_to and partial(kl_to, 0, len(targets)), kl_from)
        chunks, start = [], 0
        for pair in pieces:
            end = start + len(pair[1])
            reference_logits = kl_to and partial(kl_to, start, end)
            top = kl_from and (kl_from[0][start:end], kl_from[1][start:end])
            chunks.append(checkpoint(self._score, *pair, with_entropy, reference_logits, top, use_reentrant=False))
            start = end
        return torch.cat(chunks, dim=-1)

    def collisions(self, hidden: Tensor, predictors: Tensor, targets: Tensor, num_tokens: int) -> Tensor:
        """Return log-probabilities and logs of the sum of squared probabilities, [2, N] float32, without a gradient.

        ``hidden`` is what `forward` returns with ``hidden_only`` for a stream of ``num_tokens``.
        """
        _, places = self._shares.own_predictors(predictors, num_tokens)
        own_targets = targets if places is None else targets[places]
        pieces = []
        with torch.no_grad():
            for some_hidden, some_targets in self._pieces(hidden, own_targets):
                logprobs = F.log_softmax(self.logits(some_hidden), dim=-1)
                chosen = logprobs.gather(1, some_targets[:, None])[:, 0]
                pieces.append(torch.stack([chosen, torch.logsumexp(2.0 * logprobs, dim=-1)]))
        return self._shares.whole(torch.cat(pieces, dim=1), places, len(targets))

    def _pieces(self, hidden: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return what goes through the output head together: as many pieces on every rank, the last ones empty."""
        size, num_chunks = len(targets), self._num_chunks(len(targets))
        if num_chunks == 1:
            return [(hidden, targets)]
        hiddens, some_targets = list(hidden.split(self._chunk_tokens)), list(targets.split(self._chunk_tokens))
        missing = num_chunks - len(hiddens)
        return list(zip(hiddens + [hidden[size:]] * missing, some_targets + [targets[size:]] * missing, strict=True))

    def _num_chunks(self, num_tokens: int) -> int:
        """Return the number of chunks in which the tokens go through the output head.

        A head that ZeRO-3 shards is gathered by all ranks together, once for each chunk. So they agree on the
        largest number, and a rank with fewer tokens adds empty chunks.
        """
        count = max(1, -(-num_tokens // self._chunk_tokens))
        head = self.language_model.get_output_embeddings()
        if not hasattr(head.weight, "ds_id") or not torch.distributed.is_initialized():
            return count
        most = torch.tensor(count)  # exchanged by the hosts: none waits for its device
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        return int(most)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, V] float32, divided by the temperature, of hidden states [n, H]."""
        logits = self.language_model.get_output_embeddings()(hidden).float()
        return logits if self._temperature == 1.0 else logits / self._temperature

    def _score(
        self,
        hidden: Tensor,
        targets: Tensor,
        with_entropy: bool,
        reference_logits: Callable[[], Tensor] | None,
        top: Top | None,
    ) -> Tensor:
        logits = self.logits(hidden)
        scores = [-F.cross_entropy(logits, targets, reduction="none")]
        if with_entropy:
            scores.append(entropy(logits))
        if reference_logits is not None:
            scores.append(kl_full(logits, reference_logits()))
        if top is not None:
            scores.append(kl_from_teacher(logits, *top))
        return torch.stack(scores) if len(scores) > 1 else scores[0]
