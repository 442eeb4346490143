"""A model that holds a folder's tensors as an inference server does: fused, sharded over ranks, padded, tied, with derived weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

HIDDEN, HEAD, HEADS, KV_HEADS = 96, 128, 4, 2
INNER, EXPERTS, EXPERT_INNER = 192, 3, 32
VOCAB, PADDED = 301, 320
QKV = (HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD)


def random_tensors(dtype: torch.dtype, *, tied: bool, seed: int = 0) -> dict[str, Tensor]:
    shapes = {
        "embed.weight": (VOCAB, HIDDEN),
        **({} if tied else {"head.weight": (VOCAB, HIDDEN)}),
        **{f"{name}_proj.weight": (rows, HIDDEN) for name, rows in zip("qkv", QKV, strict=True)},
        "o_proj.weight": (HIDDEN, QKV[0]),
        "gate_proj.weight": (INNER, HIDDEN),
        "up_proj.weight": (INNER, HIDDEN),
        "down_proj.weight": (HIDDEN, INNER),
        "norm.weight": (HIDDEN,),
        "scale": (),
    }
    for number in range(EXPERTS):
        for name in ("gate", "up"):
            shapes[f"experts.{number}.{name}.weight"] = (EXPERT_INNER, HIDDEN)
        shapes[f"experts.{number}.down.weight"] = (HIDDEN, EXPERT_INNER)
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


@dataclass(frozen=True)
class Faults:
    computes: bool = False  # o_proj is loaded from a computed tensor
    pools: bool = False  # copies in a thread pool, unless the tensor has SGLang's mark


class FusedModel(nn.Module):
    def __init__(
        self, dtype: torch.dtype, *, tied: bool = True, rank: int = 0, ranks: int = 1, faults: Faults | None = None
    ) -> None:
        super().__init__()
        self.rank, self.ranks, self.faults = rank, ranks, faults or Faults()

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.full(shape, 7.0, dtype=dtype), requires_grad=False)

        self.embed = parameter(PADDED // ranks, HIDDEN)
        self.head = self.embed if tied else parameter(PADDED // ranks, HIDDEN)
        self.qkv = parameter(sum(QKV) // ranks, HIDDEN)
        self.o = parameter(HIDDEN, QKV[0] // ranks)
        self.gate_up = parameter(2 * INNER // ranks, HIDDEN)
        self.down = parameter(HIDDEN, INNER // ranks)
        self.norm = parameter(HIDDEN)
        self.scale = parameter()
        self.w13 = parameter(EXPERTS, 2 * EXPERT_INNER // ranks, HIDDEN)
        self.w2 = nn.Parameter(  # stored with its last two dimensions exchanged
            torch.zeros(EXPERTS, EXPERT_INNER // ranks, HIDDEN, dtype=dtype).transpose(1, 2), requires_grad=False
        )
        self.register_buffer("rotary", torch.arange(8, dtype=torch.float32))
        self.absorbed = torch.empty(0)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        with ThreadPoolExecutor(1) as pool:
            for name, tensor in weights:
                if self.faults.pools and not hasattr(tensor, "_sglang_runai_streamer_tensor"):
                    pool.submit(self._load, name, tensor).result()
                else:
                    self._load(name, tensor)
        self.post_load_weights()

    def post_load_weights(self) -> None:
        self.absorbed = self.o.t().contiguous()

    def words(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that it computes with, as integers."""
        for name, tensor in (*self.named_parameters(), ("absorbed", self.absorbed)):
            yield name, tensor.detach().contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])

    def _load(self, name: str, tensor: Tensor) -> None:
        if name in ("embed.weight", "head.weight"):
            target = self.embed if name == "embed.weight" else self.head
            start = self.rank * len(target)
            own = tensor[start : start + len(target)]
            target.data[: len(own)].copy_(own)
            target.data[len(own) :].fill_(0)
        elif name in ("norm.weight", "scale"):
            (self.norm if name == "norm.weight" else self.scale).data.copy_(tensor)
        elif name == "o_proj.weight" and self.faults.computes:
            self.o.data.copy_(torch.cat([self._share(tensor, 1)]))
        elif name in ("o_proj.weight", "down_proj.weight"):
            (self.o if name[0] == "o" else self.down).data.copy_(self._share(tensor, 1))
        elif name.startswith("experts."):
            _, number, which, _ = name.split(".")
            if which == "down":
                self.w2.data[int(number)].copy_(self._share(tensor, 1))
            else:
                half = self.w13.shape[1] // 2
                at = half if which == "up" else 0
                self.w13.data[int(number)].narrow(0, at, half).copy_(self._share(tensor, 0))
        elif name in ("gate_proj.weight", "up_proj.weight"):
            half = len(self.gate_up) // 2
            self.gate_up.data.narrow(0, half if name[0] == "u" else 0, half).copy_(self._share(tensor, 0))
        else:
            index = "qkv".index(name[0])
            start, rows = sum(QKV[:index]) // self.ranks, QKV[index] // self.ranks
            self.qkv.data.narrow(0, start, rows).copy_(self._share(tensor, 0))

    def _share(self, tensor: Tensor, dim: int) -> Tensor:
        size = tensor.shape[dim] // self.ranks
        return tensor.narrow(dim, self.rank * size, size)
