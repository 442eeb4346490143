"""How the ranks of a run share its work: data, sequence and tensor parallelism; imports no torch.

Rank ``((dp * SP) + sp) * TP + tp``: ranks next to each other exchange the most. Ranks that compute the same rows have the same losses and
figures, which count once in every sum. Learner and publishing ask `ParallelDims` and never compare rank numbers themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.protocol.errors import ConfigError

if TYPE_CHECKING:
    from penstock.trainer.ranks import Ranks, RankSubgroup

# The model_type of models whose weights are divided: tests compare each of them with one process.
DIVIDED = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """How many ranks compute a micro-batch together; all others compute other rows."""

    sequence_parallel: int = 1  # ranks that share the tokens of a micro-batch
    tensor_parallel: int = 1  # ranks that share the weights

    def __str__(self) -> str:
        settings = (("sequence_parallel", self.sequence_parallel), ("tensor_parallel", self.tensor_parallel))
        return " x ".join(f"trainer.{name} = {value}" for name, value in settings if value > 1)

    @property
    def ranks_of_rows(self) -> int:
        return self.sequence_parallel * self.tensor_parallel

    def check(self, config: Mapping[str, Any], where: str) -> None:
        """Raise ConfigError if a model, by its config.json, cannot be computed in this layout."""
        text = config.get("text_config", config)
        text = text if isinstance(text, Mapping) else config
        if self.tensor_parallel > 1:
            ranks, family = self.tensor_parallel, text.get("model_type")
            if family not in DIVIDED:
                raise ConfigError(
                    f"trainer.tensor_parallel = {ranks}, and {where} is a {family} model: only the weights of {', '.join(DIVIDED)} are "
                    "divided, which are compared with one process; DeepSpeed 0.19 refuses experts, and trains others wrongly without an "
                    "error where a weight is read by a part of the heads. Set trainer.tensor_parallel = 1, and trainer.zero_stage = 3"
                )
            width = text.get("intermediate_size")
            if isinstance(width, int) and width % ranks:
                raise ConfigError(
                    f"trainer.tensor_parallel = {ranks} does not divide intermediate_size = {width} of {where}; set it to a divisor"
                )
        heads = text.get("num_attention_heads")
        if isinstance(heads, int):
            kv_heads = text.get("num_key_value_heads")
            self.check_heads(heads, kv_heads if isinstance(kv_heads, int) and kv_heads > 0 else heads, where)

    def allows(self, config: Mapping[str, Any]) -> bool:
        try:
            self.check(config, "")
        except ConfigError:
            return False
        return True

    def check_heads(self, heads: int, kv_heads: int, where: str) -> None:
        """Raise ConfigError unless every rank gets equally many attention heads; ``where`` names the model.

        Key heads may be fewer than the ranks that share tokens: then ranks next to each other compute with the same one.
        """
        ranks = self.tensor_parallel
        for number, what in ((heads, "attention"), (kv_heads, "key")):
            if number % ranks:
                raise ConfigError(
                    f"trainer.tensor_parallel = {ranks} does not divide the {number} {what} heads of {where}: each rank has the "
                    f"weights of some of the heads; set it to {_divisors(number)}"
                )
        heads, kv_heads = heads // ranks, kv_heads // ranks
        of_rank = " that a rank has" if ranks > 1 else ""
        ranks = self.sequence_parallel
        if heads % ranks:
            raise ConfigError(
                f"trainer.sequence_parallel = {ranks} does not divide the {heads} attention heads{of_rank} of {where}: in "
                f"attention each rank computes some of the heads; set it to {_divisors(heads)}"
            )
        if kv_heads % ranks and ranks % kv_heads:
            raise ConfigError(
                f"trainer.sequence_parallel = {ranks} neither divides the {kv_heads} key heads{of_rank} of {where} nor is divided "
                f"by them: in attention each rank computes some of the heads; set it to a divisor or a multiple of {kv_heads}"
            )


def _divisors(number: int) -> str:
    divisors = [str(divisor) for divisor in range(2, number + 1) if number % divisor == 0]
    return " or ".join(divisors) if divisors else "1"


@dataclass(frozen=True, slots=True)
class Share:
    index: int = 0
    count: int = 1


class ParallelDims:
    def __init__(self, ranks: Ranks, layout: ParallelLayout | None = None) -> None:
        self.ranks = ranks
        self.layout = layout or ParallelLayout()
        sequence, tensor = self.layout.sequence_parallel, self.layout.tensor_parallel
        self.token_group: RankSubgroup | None = ranks.subgroup(sequence, tensor) if sequence > 1 else None
        self.weight_group: RankSubgroup | None = ranks.subgroup(tensor) if tensor > 1 else None

    @property
    def rows(self) -> Share:
        together = self.layout.ranks_of_rows
        return Share(self.ranks.rank // together, self.ranks.num_ranks // together)

    @property
    def tokens(self) -> Share:
        size = self.layout.sequence_parallel
        return Share(self.ranks.rank // self.layout.tensor_parallel % size, size)

    @property
    def weights(self) -> Share:
        size = self.layout.tensor_parallel
        return Share(self.ranks.rank % size, size)

    @property
    def states(self) -> Share:
        """The share of the optimizer states of its weights that this rank keeps under ZeRO; DeepSpeed averages gradients over them."""
        size = self.layout.tensor_parallel
        return Share(self.ranks.rank // size, self.ranks.num_ranks // size)

    @property
    def files(self) -> Share:
        return Share(self.ranks.rank, self.ranks.num_ranks)

    @property
    def buckets(self) -> Share:
        return Share(self.ranks.rank, self.ranks.num_ranks)

    @property
    def writes_files(self) -> bool:
        """True on the one rank that writes whole models to disk, and adapters to the object store."""
        return self.ranks.is_leader

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise sum over all shares of the rows, each counted once; collective."""
        stands_for_rows = self.ranks.rank % self.layout.ranks_of_rows == 0
        return self.ranks.sum(values if stands_for_rows else [0.0] * len(values))

    def gather(self, data: bytes) -> list[bytes]:
        """Return the ``data`` of all shares of the rows on rank 0, in their order; nothing on the others; collective."""
        return self.ranks.gather(data)[:: self.layout.ranks_of_rows]

    def maximum(self, values: Sequence[float]) -> list[float]:
        return self.ranks.maximum(values)
