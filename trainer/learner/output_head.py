"""The output head of a language model: logits of hidden states, scores of them in chunks of tokens, and the gradient of both.

Forward keeps the scores alone, and the logits of the last chunk. Backward computes the logits of the others again, once, and adds the weight's
gradient up in float32, whatever the model's dtype and the number of chunks. The head is one module call in each direction, so that ZeRO 3
gathers it twice for a micro-batch, and a parked one moves as often.

Kernels that fuse the head with cross-entropy (Liger, Apple's cut cross-entropy) are not used: they compute the gradient of a mean loss
while they compute that loss, and a policy's is known only when all its log-probabilities are; and they give no entropy and no KL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's name for it
from torch import Tensor, nn

from penstock.trainer.errors import UnsupportedModel
from penstock.trainer.learner import adapter

Logits = Callable[[int, int], Tensor]  # (start, end) -> logits of those tokens, [n, V] float32

MAX_LOGITS = 32 * 1024 * 1024  # elements of one chunk on a CPU: 128 MiB in float32
_MOST_LOGITS = 16 * MAX_LOGITS  # on a GPU, where larger products are no faster
_BYTES_OF_LOGIT = 24  # of a chunk, in all of its tensors: with the entropy
_SHARE_OF_FREE = 4  # a chunk takes a quarter of what is free
_TENSORS = ("hidden", "weight", "bias", "low", "up")  # of a product, by which its scores are differentiated

# What families of models do with logits behind the output head, by the setting in their config.json, with the value that changes nothing.
_TRANSFORMS: dict[str, tuple[float | None, frozenset[str], Callable[[Tensor, float], Tensor]]] = {
    "final_logit_softcapping": (
        None,
        frozenset({"gemma2", "gemma3_text", "gemma3n_text", "vaultgemma", "nanochat"}),
        lambda logits, cap: cap * torch.tanh(logits / cap),
    ),
    "logits_scaling": (
        1.0,
        frozenset({"granite", "granitemoe", "granitemoehybrid", "granitemoeshared", "minicpm3"}),
        lambda logits, scale: logits / scale,
    ),
    "logit_scale": (1.0, frozenset({"cohere", "cohere2"}), lambda logits, scale: logits * scale),
}
_NOT_COMPUTED = {
    "logits_soft_cap": None,
    "output_logit_soft_cap": None,
    "lm_head_multiplier": 1.0,
    "output_multiplier": 1.0,
}


def logit_transform(config: Any) -> Callable[[Tensor], Tensor] | None:
    """Return what a model does with its logits behind the output head, of its text config; None: nothing.

    Raises UnsupportedModel, by name, for what is not computed here: log-probabilities would silently differ from the engine's.
    """
    steps = []
    for name, neutral in {**{name: known[0] for name, known in _TRANSFORMS.items()}, **_NOT_COMPUTED}.items():
        value = getattr(config, name, neutral)
        if value is None or value == neutral:
            continue
        _, families, transform = _TRANSFORMS.get(name, (None, frozenset[str](), None))
        if transform is None or config.model_type not in families:
            raise UnsupportedModel(
                f"a model of {config.model_type} has {name} = {value}: its logits are transformed after the output head, which the trainer "
                f"computes for {', '.join(sorted(families)) or 'no model with this setting'} alone; use another model"
            )
        steps.append((transform, float(value)))
    assert len(steps) <= 1, "no family has two of them"
    return None if not steps else lambda logits: steps[0][0](logits, steps[0][1])


def logits_at_once(device: torch.device) -> int:
    """Return how many logits a chunk has on a device, by the memory that is free there now."""
    if device.type != "cuda":
        return MAX_LOGITS
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return logits_that_fit(torch.cuda.mem_get_info(device)[0] + unused)


def logits_that_fit(free_bytes: int) -> int:
    """Return how many logits a chunk has on a GPU with so much free memory: `MAX_LOGITS` times a power of two, `_MOST_LOGITS` at most."""
    fit = free_bytes // _SHARE_OF_FREE // _BYTES_OF_LOGIT
    return min(_MOST_LOGITS, MAX_LOGITS << max(0, (fit // MAX_LOGITS).bit_length() - 1))


class Head(nn.Linear):
    """A linear layer of which one call may make several products; hooks around calls then run once for all of them."""

    def forward(self, input: Tensor, use: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None) -> Tensor:
        return F.linear(input, self.weight, self.bias) if use is None else use(input, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Product:
    """Logits of hidden states [N, H]: ``W h + b``, and of a head with an adapter, ``+ scale B a``."""

    hidden: Tensor
    weight: Tensor  # [V, H]
    bias: Tensor | None
    in_float32: bool = False  # logits are not rounded to the weight's dtype
    low: Tensor | None = None  # a, [N, r]
    up: Tensor | None = None  # B, [V, r]
    scale: float = 1.0

    def __call__(self, start: int, end: int) -> Tensor:
        """Return logits [n, V], before what the model does with them."""
        logits = self._linear(self.hidden[start:end], self.weight, self.bias)
        if self.low is None or self.up is None:
            return logits
        return logits + self._linear(self.low[start:end], self.up) * self.scale

    def _linear(self, values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not self.in_float32 or weight.dtype == torch.float32:
            return F.linear(values, weight, bias)
        if values.device.type == "cuda":
            logits = torch.mm(values, weight.t(), out_dtype=torch.float32)
            return logits if bias is None else logits + bias
        return F.linear(values.float(), weight.float(), None if bias is None else bias.float())


def take_float32_gradient(head: Any) -> None:
    """Let the weight of an output head keep the gradient that `score_in_chunks` gives it; before torch 2.10 it is rounded once."""
    if head.weight.dtype in (torch.bfloat16, torch.float16) and hasattr(head.weight, "grad_dtype"):
        head.weight.grad_dtype = torch.float32


def of_head(head: Any, hidden: Tensor, use: Callable[[Product], Tensor], *, in_float32: bool) -> Tensor:
    """Return ``use`` of the product of hidden states [N, H] with an output head, whose weights are whole and on their device meanwhile."""
    parts = adapter.parts_of(head)
    if parts is None:
        return _plain(head)(hidden, lambda hidden, weight, bias: use(Product(hidden, weight, bias, in_float32)))

    def use_adapted(product: Product) -> Tensor:
        if parts.up is None:
            return use(product)
        return _plain(parts.up)(
            parts.low(hidden), lambda low, up, _: use(replace(product, low=low, up=up, scale=parts.scale))
        )

    return of_head(parts.base, hidden, use_adapted, in_float32=in_float32)


def _plain(head: Any) -> Head:
    """Return a linear layer as `Head`, which it becomes in place: its parameters, hooks and names stay."""
    if type(head) is nn.Linear:
        head.__class__ = Head
    if not isinstance(head, Head):
        raise UnsupportedModel(f"the output head is a {type(head).__name__}, not a linear layer; use another model")
    return head


# Logits [n, V] float32, start, end, a reference's logits -> scores [k, n] or [n].
Score = Callable[[Tensor, int, int, Logits | None], Tensor]
# Calls its second argument with the logits of a reference, whose head is on its device meanwhile; None: without a reference.
Beside = Callable[[Product, Callable[[Logits | None], Tensor]], Tensor]


def score_in_chunks(product: Product, score: Score, beside: Beside, chunk: int) -> Tensor:
    """Return the scores [k, N] or [N] of a product, of so many tokens at once, differentiable by its tensors."""
    work = _Work(score, beside, chunk, product.in_float32, product.scale)
    return _Chunks.apply(work, *(getattr(product, name) for name in _TENSORS))  # type: ignore[return-value]


@dataclass(slots=True)
class _Work:
    score: Score
    beside: Beside
    chunk: int  # tokens
    in_float32: bool
    scale: float
    last: Tensor | None = None  # logits of the last chunk, with which the backward pass begins

    def product(self, tensors: Sequence[Any]) -> Product:
        hidden, weight, bias, low, up = tensors
        return Product(hidden, weight, bias, self.in_float32, low, up, self.scale)

    def take_logits(self, product: Product, start: int, end: int) -> Tensor:
        logits, self.last = self.last, None
        return (product(start, end) if logits is None else logits).float()

    def pieces(self, num_tokens: int) -> list[tuple[int, int]]:
        return [(start, min(start + self.chunk, num_tokens)) for start in range(0, max(1, num_tokens), self.chunk)]


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _Work, *tensors: Tensor | None) -> Tensor:
        ctx.work, product = work, work.product(tensors)
        ctx.save_for_backward(*tensors)

        def scores(reference: Logits | None) -> Tensor:
            found = []
            for start, end in work.pieces(len(product.hidden)):
                work.last = product(start, end)
                found.append(work.score(work.last.float(), start, end, reference))
            return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

        return work.beside(product, scores)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        work: _Work = ctx.work
        product = work.product(ctx.saved_tensors)
        sums = _Gradients(product, ctx.needs_input_grad[1:])

        def add_all(reference: Logits | None) -> Tensor:
            for start, end in reversed(work.pieces(len(product.hidden))):
                found: list[Tensor] = []
                logits = work.take_logits(product, start, end)
                with torch.enable_grad():
                    begin = torch.zeros((), device=logits.device, requires_grad=True)
                    logits = _Differentiable.apply(begin, logits, found)
                    scores = work.score(logits, start, end, reference)
                del logits
                torch.autograd.grad(scores, begin, grads[0][..., start:end], allow_unused=True)
                sums.add(found.pop(), start, end)
            return product.hidden

        work.beside(product, add_all)
        return None, *sums.all()


class _Differentiable(torch.autograd.Function):
    """Logits that autograd does not hold: a leaf would stay as long as its gradient is computed, beside what the scores keep."""

    @staticmethod
    def forward(ctx: Any, begin: Tensor, logits: Tensor, found: list[Tensor]) -> Tensor:
        del begin
        ctx.found = found
        return logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.found.append(grads[0])
        return None, None, None


class _Gradients:
    """Gradients of a product's tensors, added up over chunks; those of weights in float32."""

    def __init__(self, product: Product, needed: Sequence[bool]) -> None:
        self._product = product
        self._needed: dict[str, bool] = dict(zip(_TENSORS, needed, strict=True))
        self._sums: dict[str, Tensor] = {}

    def add(self, of_logits: Tensor, start: int, end: int) -> None:
        """Add those of a chunk, whose logits have the gradient [n, V] float32."""
        product = self._product
        rounded = of_logits.to(product.weight.dtype)
        self._add_of("hidden", "weight", of_logits, rounded, start, end)
        if self._needed["bias"]:
            self._add("bias", of_logits.sum(0))
        if product.low is not None:
            self._add_of("low", "up", of_logits * product.scale, rounded * product.scale, start, end)

    def _add_of(self, values: str, weight: str, of_logits: Tensor, rounded: Tensor, start: int, end: int) -> None:
        inputs, matrix = getattr(self._product, values), getattr(self._product, weight)
        if self._needed[values]:
            if values not in self._sums:
                self._sums[values] = torch.empty_like(inputs)
            _of_inputs(rounded, matrix, self._sums[values][start:end])
        if self._needed[weight]:
            self._add(weight, _outer(of_logits, rounded, inputs[start:end]))

    def _add(self, name: str, part: Tensor) -> None:
        self._sums[name] = self._sums[name].add_(part) if name in self._sums else part

    def all(self) -> list[Tensor | None]:
        return [self._sums.get(name) for name in _TENSORS]


def _of_inputs(of_logits: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write the gradient [n, H] of inputs, of a gradient [n, V] in the weight's dtype."""
    if out.device.type == "cpu" and out.dtype == torch.bfloat16:  # oneDNN is 30 times slower with both as they are
        out.copy_((weight.t() @ of_logits.t().contiguous()).t())
    else:
        torch.mm(of_logits, weight, out=out)


def _outer(of_logits: Tensor, rounded: Tensor, inputs: Tensor) -> Tensor:
    """Return [V, H] float32, of a gradient [n, V] and of inputs [n, H]; sums and products are those of float32."""
    exact = torch.promote_types(inputs.dtype, torch.float32)
    if inputs.device.type != "cuda" or inputs.dtype == exact:
        return of_logits.to(exact).t().mm(inputs.to(exact))
    # Half-precision products of two parts of the gradient, which together have twice its bits, are faster than one of float32.
    rest = (of_logits - rounded).to(rounded.dtype)
    return torch.mm(torch.cat([rounded, rest]).t(), torch.cat([inputs, inputs]), out_dtype=torch.float32)
