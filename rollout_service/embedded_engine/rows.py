"""Per-row numbers of the running sequences, in numpy arrays: what sampling and stop conditions need at every step."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from penstock.protocol.images.processor import next_position
from penstock.rollout_service.embedded_engine.model.sampler import GREEDY_BELOW
from penstock.rollout_service.embedded_engine.sequence import Sequence

NO_TOKEN = -1  # pads `Rows.stop_ids`


@dataclass(slots=True)
class Rows:
    """Per-row numbers of the running sequences; only the first n entries are meaningful."""

    last_token: np.ndarray  # int64, sampled, not yet in the cache
    position: np.ndarray  # int64, position of the last token; equals the number of tokens in the cache
    skipped: (
        np.ndarray
    )  # int64, by how much the position for rotary embeddings is less: tokens of an image share positions
    adapter: np.ndarray  # int64, the adapter's number or NO_ADAPTER
    num_output: np.ndarray  # int64
    max_output: np.ndarray  # int64
    min_output: np.ndarray  # int64
    seed: np.ndarray  # uint64
    temperature: np.ndarray  # float32
    greedy: np.ndarray  # bool
    top_p: np.ndarray  # float32
    top_k: np.ndarray  # int64
    min_p: np.ndarray  # float32
    filtered: np.ndarray  # bool: top_p, top_k or min_p restrict the row
    has_stop_strings: np.ndarray  # bool
    stop_ids: np.ndarray  # [rows, k] int64, padded with -1

    @classmethod
    def empty(cls, num_rows: int) -> Rows:
        """Return rows with unspecified contents."""
        kinds = {"seed": np.uint64, "temperature": np.float32, "top_p": np.float32, "min_p": np.float32}
        flags = {"greedy", "filtered", "has_stop_strings"}
        arrays = {
            item.name: np.zeros(num_rows, dtype=np.bool_ if item.name in flags else kinds.get(item.name, np.int64))
            for item in fields(cls)
            if item.name != "stop_ids"
        }
        return cls(**arrays, stop_ids=np.full((num_rows, 1), NO_TOKEN, dtype=np.int64))

    def fill(self, row: int, sequence: Sequence, *, merge_size: int = 1) -> None:
        """Fill one row from its sequence."""
        sampling = sequence.sampling
        stops = sampling.stop_token_ids
        if len(stops) > self.stop_ids.shape[1]:
            widen = ((0, 0), (0, len(stops) - self.stop_ids.shape[1]))
            self.stop_ids = np.pad(self.stop_ids, widen, constant_values=NO_TOKEN)
        length = len(sequence.prompt)
        images = sequence.images
        self.skipped[row] = 0 if images is None else length - next_position(length, images.places, merge_size)
        self.adapter[row] = sequence.adapter_number
        self.num_output[row] = len(sequence.output_ids)
        self.max_output[row] = sampling.max_new_tokens
        self.min_output[row] = sampling.min_new_tokens
        self.seed[row] = sampling.seed
        self.greedy[row] = sampling.temperature < GREEDY_BELOW
        self.temperature[row] = 1.0 if self.greedy[row] else sampling.temperature
        self.top_p[row] = sampling.top_p
        self.top_k[row] = sampling.top_k if sampling.top_k > 0 else np.iinfo(np.int64).max
        self.min_p[row] = sampling.min_p
        self.filtered[row] = sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0
        self.has_stop_strings[row] = bool(sampling.stop_strings)
        self.stop_ids[row] = NO_TOKEN
        self.stop_ids[row, : len(stops)] = stops

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy rows over others."""
        for item in fields(self):
            array = getattr(self, item.name)
            array[targets] = array[sources]
