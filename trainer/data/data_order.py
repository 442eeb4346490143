"""The order in which prompts are used: a permutation for every epoch, computed on demand; pure.

A position counts prompts from the start of the run. Its prompt follows from the seed and the position alone, so a checkpoint stores one
number, and no list of the data set's length is shuffled or stored. The permutation is a Feistel network over the next power of four,
walked until the value is in range (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).

`with_steps` makes steps of the passes of `trainer.epochs`, once the usable rows are counted.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import NamedTuple

from penstock.protocol.config.run_file import Loaded
from penstock.protocol.config.sources import OVERRIDE
from penstock.protocol.errors import ConfigError
from penstock.protocol.images.processor import read_processor
from penstock.trainer.data.dataset import PromptSet
from penstock.trainer.data.row_checks import read_tokenizer
from penstock.trainer.settings import TrainerSettings

_ROUNDS = 6
_MIN_HALF_BITS = 3  # a smaller network permutes badly


class Place(NamedTuple):
    epoch: int
    prompt: int


@dataclass(frozen=True, slots=True)
class DataOrder:
    num_prompts: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise ValueError("an order needs at least one prompt")

    def at(self, position: int) -> Place:
        epoch, offset = divmod(position, self.num_prompts)
        return Place(epoch, self._walk(epoch, offset) if self.shuffle else offset)

    def position_of(self, place: Place) -> int:
        offset = self._walk(place.epoch, place.prompt, inverse=True) if self.shuffle else place.prompt
        return place.epoch * self.num_prompts + offset

    def _walk(self, epoch: int, value: int, *, inverse: bool = False) -> int:
        half_bits = max(_MIN_HALF_BITS, ((self.num_prompts - 1).bit_length() + 1) // 2)
        key = f"{self.seed}.{epoch}".encode()
        while True:
            value = _feistel(value, half_bits, key, inverse=inverse)
            if value < self.num_prompts:
                return value


def _feistel(value: int, half_bits: int, key: bytes, *, inverse: bool = False) -> int:
    mask = (1 << half_bits) - 1
    first, second = (value >> half_bits, value & mask)[:: -1 if inverse else 1]
    for number in reversed(range(_ROUNDS)) if inverse else range(_ROUNDS):
        first, second = second, first ^ (_mixed(second, number, key) & mask)
    left, right = (second, first) if inverse else (first, second)
    return left << half_bits | right


def _mixed(half: int, number: int, key: bytes) -> int:
    digest = hashlib.blake2b(half.to_bytes(8, "big"), digest_size=8, key=key, salt=bytes([number])).digest()
    return int.from_bytes(digest, "big")


def with_steps(loaded: Loaded[TrainerSettings]) -> Loaded[TrainerSettings]:
    """Return the settings with the ``trainer.steps`` that ``trainer.epochs`` make; the same ones without epochs.

    ``epochs`` passes over the rows of ``data.train`` that are not left out, ``rollout.groups_per_step`` a step, rounded up.
    Raises ConfigError for both in one place, or a length that other settings do not allow, MalformedData for bad rows.
    """
    settings = loaded.settings
    if settings.trainer.epochs is None:
        return loaded
    if steps_replace_epochs(loaded):
        chosen = settings.trainer.model_copy(update={"epochs": None})
        return Loaded(_checked(settings.model_copy(update={"trainer": chosen})), loaded.origins)
    prompts = PromptSet(
        settings.data.train_files,
        data=settings.data,
        reward=settings.reward,
        tokenizer=read_tokenizer(settings),
        max_new_tokens=settings.rollout.max_new_tokens,
        skips_pairs=settings.algorithm.dpo_coefficient > 0.0,
        processor=read_processor(settings.model.path),
    )
    steps = max(1, math.ceil(round(settings.trainer.epochs * len(prompts)) / settings.rollout.groups_per_step))
    chosen = settings.trainer.model_copy(update={"steps": steps})
    origin = f"{loaded.origins['trainer.epochs']}: {settings.trainer.epochs:g} x {len(prompts)} rows"
    return Loaded(
        _checked(settings.model_copy(update={"trainer": chosen})), {**loaded.origins, "trainer.steps": origin}
    )


def known_steps(loaded: Loaded[TrainerSettings]) -> int | None:
    """Return the steps of a run before its rows are counted; None where epochs make them."""
    trainer = loaded.settings.trainer
    return trainer.steps if trainer.epochs is None or steps_replace_epochs(loaded) else None


def steps_replace_epochs(loaded: Loaded[TrainerSettings]) -> bool:
    """Return True if steps of the command line replace epochs of a run file; raises ConfigError for both in one place."""
    steps, epochs = loaded.origins["trainer.steps"], loaded.origins["trainer.epochs"]
    if "default" in (steps, epochs):
        return False
    typed = [origin == OVERRIDE or origin.startswith(f"{OVERRIDE} ") for origin in (steps, epochs)]
    if typed[0] == typed[1]:
        raise ConfigError(f"{epochs}: trainer.steps and trainer.epochs are both given; leave one out")
    return typed[0]


def _checked(settings: TrainerSettings) -> TrainerSettings:
    if problem := settings.problem_of_length():
        raise ConfigError(problem)
    return settings
