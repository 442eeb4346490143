"""How the ranks of a run are divided: data, sequence and tensor parallelism, and what a model allows; pure, without torch.

Rank ``((dp * SP) + sp) * TP + tp``: ranks next to each other exchange the most.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """How many ranks compute a micro-batch together; all others compute other rows."""

    sequence_parallel: int = 1  # ranks that share the tokens of a micro-batch

    @property
    def ranks_of_rows(self) -> int:
        """Ranks that compute the same rows."""
        return self.sequence_parallel

    def check_heads(self, heads: int, kv_heads: int, where: str) -> None:
        """Raise ConfigError unless every rank gets equally many attention heads; ``where`` names the model.

        Key heads may be fewer than the ranks: then ranks next to each other compute with the same one.
        """
        ranks = self.sequence_parallel
        if heads % ranks:
            raise ConfigError(
                f"trainer.sequence_parallel = {ranks} does not divide the {heads} attention heads of {where}: in attention each "
                f"rank computes some of the heads; set it to {_divisors(heads)}"
            )
        if kv_heads % ranks and ranks % kv_heads:
            raise ConfigError(
                f"trainer.sequence_parallel = {ranks} neither divides the {kv_heads} key heads of {where} nor is divided by them: "
                f"in attention each rank computes some of the heads; set it to a divisor or a multiple of {kv_heads}"
            )


def _divisors(number: int) -> str:
    found = [str(one) for one in range(2, number + 1) if number % one == 0]
    return " or ".join(found) if found else "1"
