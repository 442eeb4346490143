"""The order in which prompts are used: a permutation for every epoch, computed on demand; pure.

A position counts prompts from the start of the run. Its prompt follows from the seed and the position alone, so a
checkpoint stores one number, and no list of the data set's length is shuffled or stored. The permutation is a Feistel
network over the next power of four, walked until the value is in range (Black and Rogaway, "Ciphers with Arbitrary
Finite Domains", 2002).

With ``data.weights`` each source has an order of its own, and a schedule that repeats says which source is next
(`WeightedOrder`).

`with_steps` makes steps of the passes of `trainer.epochs`, once the usable rows are counted.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from penstock.protocol.config.run_file import Loaded
from penstock.protocol.config.sources import OVERRIDE
from penstock.protocol.errors import ConfigError
from penstock.trainer.data.dataset import PromptSet, training_prompts
from penstock.trainer.data.row_checks import read_tokenizer
from penstock.trainer.errors import MalformedData
from penstock.trainer.settings import TrainerSettings

_ROUNDS = 6
_MOST_TURNS = 10_000  # of sources, until their order repeats
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

    @property
    def identity(self) -> str:
        """What the order follows from, beside the rows."""
        return f"{self.num_prompts} {self.seed} {self.shuffle}"

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


class WeightedOrder:
    """Prompts of sources by share: among the first N of them a source with share p has p N, to less than one.

    The epoch of a place counts the passes over its source.
    """

    def __init__(
        self, prompts: Mapping[str, Sequence[int]], shares: Mapping[str, int], seed: int, *, shuffle: bool
    ) -> None:
        """Order the ``prompts`` of each source, ascending numbers; ``shares`` add up to the length of the schedule."""
        self.num_prompts, self.seed, self._prompts = sum(map(len, prompts.values())), seed, prompts
        self._orders = {name: DataOrder(len(rows), seed, shuffle) for name, rows in prompts.items()}
        self._schedule, self._turns = list[str](), {name: list[int]() for name in shares}
        for turn in range(total := sum(shares.values())):  # Tijdeman, "The chairman assignment problem", 1980
            behind = [name for name, share in shares.items() if len(self._turns[name]) * total < share * (turn + 1)]
            due_first = min(behind, key=lambda name: Fraction(len(self._turns[name]) + 1, shares[name]))
            self._schedule.append(due_first)
            self._turns[due_first].append(turn)
        digest = hashlib.sha256(repr([(name, list(prompts[name])) for name in shares]).encode()).hexdigest()
        self.identity = f"{self.num_prompts} {seed} {shuffle} {list(shares.values())} {digest}"

    def at(self, position: int) -> Place:
        cycle, turn = divmod(position, len(self._schedule))
        name = self._schedule[turn]
        turns = self._turns[name]
        epoch, number = self._orders[name].at(cycle * len(turns) + bisect_left(turns, turn))
        return Place(epoch, self._prompts[name][number])

    def position_of(self, place: Place) -> int:
        for name, rows in self._prompts.items():
            number = bisect_left(rows, place.prompt)
            if number < len(rows) and rows[number] == place.prompt:
                turns = self._turns[name]
                cycle, turn = divmod(self._orders[name].position_of(Place(place.epoch, number)), len(turns))
                return cycle * len(self._schedule) + turns[turn]
        raise ValueError(f"no source has the prompt {place.prompt}")


def prompt_order(prompts: PromptSet, settings: TrainerSettings) -> DataOrder | WeightedOrder:
    """Return the order of a run's prompts; raises MalformedData where ``data.weights`` are of other sources."""
    seed, shuffle, weights = settings.run.seed, settings.data.shuffle, settings.data.weights
    if not weights:
        return DataOrder(len(prompts), seed, shuffle)
    rows = prompts.rows_of_source
    sources = weighted_sources(weights, {source: len(numbers) for source, numbers in rows.items()})
    members = {name: sorted(n for source in named for n in rows[source]) for name, named in sources.items()}
    return WeightedOrder(members, whole_shares(weights), seed, shuffle=shuffle)


def whole_shares(weights: Mapping[str, float]) -> dict[str, int]:
    """Return ``data.weights`` as the smallest whole numbers; raises MalformedData for more than 10,000 together."""
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    common = math.lcm(*(weight.denominator for weight in exact.values()))
    unit = Fraction(math.gcd(*(int(weight * common) for weight in exact.values())), common)
    if (length := int(sum(exact.values()) / unit)) > _MOST_TURNS:
        raise MalformedData(
            f"data.weights: in whole numbers their sum is {length}, the limit is {_MOST_TURNS}; round them"
        )
    return {name: int(weight / unit) for name, weight in exact.items()}


def weighted_sources(weights: Mapping[str, float], num_rows: Mapping[str, int]) -> dict[str, list[str]]:
    """Return the data_sources of each of ``data.weights``; raises MalformedData unless each is in one, and has rows."""
    found = {name: [source for source in name.split(",") if source in num_rows] for name in weights}
    counts = Counter(source for sources in found.values() for source in sources)
    wrong = {f"no row has the data_source {name}": not sources for name, sources in found.items()}
    wrong |= {
        f"the data_source {source or '(none)'} has {counts[source]} weights, not one": counts[source] != 1
        for source in num_rows
    }
    if problem := next((text for text, is_wrong in wrong.items() if is_wrong), ""):
        present = ", ".join(f"{source or '(none)'} ({count} rows)" for source, count in num_rows.items())
        raise MalformedData(f"data.weights: {problem}; there are {present}: name each once, or remove its rows")
    return found


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

    ``epochs`` passes over the rows of ``data.train`` that are not left out, ``rollout.groups_per_step`` a step, rounded
    up. Raises ConfigError for both in one place, or a length that other settings do not allow, MalformedData for bad
    rows.
    """
    settings = loaded.settings
    if settings.trainer.epochs is None:
        return loaded
    if steps_replace_epochs(loaded):
        chosen = settings.trainer.model_copy(update={"epochs": None})
        return Loaded(_checked(settings.model_copy(update={"trainer": chosen})), loaded.origins)
    num_prompts = len(training_prompts(settings, read_tokenizer(settings)))
    steps = max(1, math.ceil(round(settings.trainer.epochs * num_prompts) / settings.rollout.groups_per_step))
    chosen = settings.trainer.model_copy(update={"steps": steps})
    origin = f"{loaded.origins['trainer.epochs']}: {settings.trainer.epochs:g} x {num_prompts} rows"
    return Loaded(
        _checked(settings.model_copy(update={"trainer": chosen})), {**loaded.origins, "trainer.steps": origin}
    )


def known_steps(loaded: Loaded[TrainerSettings]) -> int | None:
    """Return the steps of a run before its rows are counted; None where epochs make them."""
    trainer = loaded.settings.trainer
    return trainer.steps if trainer.epochs is None or steps_replace_epochs(loaded) else None


def steps_replace_epochs(loaded: Loaded[TrainerSettings]) -> bool:
    """Return True if steps of the command line replace epochs of a file; raises ConfigError for both in one place."""
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
