"""Which environment plays a group of a run that mixes several: exact proportions, in an order that follows from ``run.seed``. Pure.

With weights 3 and 1, of every four positions of the data order three are of the first and one is of the second, in an order of its
own for each four. A position is played in the same environment in every attempt and after every restart.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from penstock.protocol.config.environment_settings import MIXTURE, EnvironmentSettings
from penstock.protocol.seeds import derived_seed


class Mixture:
    def __init__(self, settings: EnvironmentSettings, seed: int) -> None:
        shared = math.gcd(*settings.weights.values())
        self._block = [name for name, weight in settings.weights.items() for _ in range(weight // shared)]
        self._by_source: Mapping[str, str] = settings.by_source
        self._seed = seed
        self._shuffled: tuple[int, list[str]] = (-1, [])  # the block that was asked for last

    @classmethod
    def of(cls, settings: EnvironmentSettings, seed: int) -> Mixture | None:
        """Return the mixture of a run file; None if no environment has a weight."""
        return cls(settings, seed) if settings.weights else None

    def name(self, environment: str, position: int, data_source: str) -> str:
        """Return the environment of a row: ``environment``, unless that is the mixture.

        ``position`` is its place in the data order; of a row whose ``data_source`` has an environment it does not matter.
        """
        if environment != MIXTURE:
            return environment
        return self._by_source.get(data_source) or self._weighted(position)

    def _weighted(self, position: int) -> str:
        number, place = divmod(position, len(self._block))
        if self._shuffled[0] != number:
            block = self._block.copy()
            random.Random(derived_seed(self._seed, MIXTURE, number)).shuffle(block)  # noqa: S311 - not a secret
            self._shuffled = (number, block)
        return self._shuffled[1][place]
