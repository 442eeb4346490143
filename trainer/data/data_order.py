"""The order in which prompts are used: a permutation for every epoch, computed on demand; pure.

A position counts prompts from the start of the run. Its prompt follows from the seed and the
position alone, so a checkpoint stores one number, and no list of the data set's length is
shuffled or stored. The permutation is a Feistel network over the next power of four, walked
until the value is in range (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

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
        return Place(epoch, self._walk(_feistel, epoch, offset) if self.shuffle else offset)

    def position_of(self, place: Place) -> int:
        offset = self._walk(_inverse_feistel, place.epoch, place.prompt) if self.shuffle else place.prompt
        return place.epoch * self.num_prompts + offset

    def _walk(self, network: Callable[[int, int, bytes], int], epoch: int, value: int) -> int:
        half_bits = max(_MIN_HALF_BITS, ((self.num_prompts - 1).bit_length() + 1) // 2)
        key = f"{self.seed}.{epoch}".encode()
        while True:
            value = network(value, half_bits, key)
            if value < self.num_prompts:
                return value


def _feistel(value: int, half_bits: int, key: bytes) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for number in range(_ROUNDS):
        left, right = right, left ^ (_mixed(right, number, key) & mask)
    return left << half_bits | right


def _inverse_feistel(value: int, half_bits: int, key: bytes) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for number in reversed(range(_ROUNDS)):
        left, right = right ^ (_mixed(left, number, key) & mask), left
    return left << half_bits | right


def _mixed(half: int, number: int, key: bytes) -> int:
    digest = hashlib.blake2b(half.to_bytes(8, "big"), digest_size=8, key=key, salt=bytes([number])).digest()
    return int.from_bytes(digest, "big")
