"""`gem`: a text environment of GEM (the package `gem-llm`), which reads the action from the answer itself.

GEM draws from the generators of the whole process (`random` and `numpy.random`). Each call of an episode therefore runs
with that episode's states of them, and no two calls at once: equal seeds and answers make equal episodes, however many
are played.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import numpy as np

from penstock.agents.environments.adapters.text_steps import StepEnvironment, StepOptions, World, text_of
from penstock.agents.environments.shared_options import optional_library

_GENERATORS = threading.Lock()


class GemOptions(StepOptions):
    """Options of ``gem``."""


class GemWorld(World):
    def __init__(self, options: GemOptions) -> None:
        first = random.Random(0).getstate()  # noqa: S311 - a game, no secret
        self._drawn: tuple[Any, Any] = (first, np.random.RandomState(0).get_state())
        self.env = self.run(lambda: _gem().make(options.id, **options.make))
        self.version = f"{options.id}, gem-llm {metadata.version('gem-llm')}"

    def reset(self, seed: int) -> str:
        return super().reset(seed % 2**32)  # numpy takes no more bits

    def run(self, call: Callable[[], Any]) -> Any:
        with _GENERATORS:
            others = random.getstate(), np.random.get_state()
            random.setstate(self._drawn[0])
            np.random.set_state(self._drawn[1])
            try:
                return call()
            finally:
                self._drawn = random.getstate(), np.random.get_state()
                random.setstate(others[0])
                np.random.set_state(others[1])

    def seen(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Return an observation between the prefix and the suffix of its info, as GEM's wrapper joins them."""
        text = text_of(observation)
        suffix = str(info.get("suffix", ""))
        between = "\n" if suffix and text and not text.endswith("\n") else ""
        return f"{info.get('prefix', '')}{text}{between}{suffix}"


def _gem() -> Any:
    gem = optional_library("gem", "gem-llm")
    optional_library("gem.envs", "gem-llm")  # registers them
    return gem


class Gem(StepEnvironment):
    name = "gem"
    options = GemOptions
    world_class = GemWorld


GEM = Gem()
