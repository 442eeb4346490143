"""Compute what the scheduler decided: the prompts of new sequences, one token for every running one.

Row i of the KV cache belongs to ``running[i]``; numpy arrays hold the numbers of each row. When sequences end, the last
rows move into their places, so that the running rows stay 0..n-1.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
import torch

from penstock.protocol.images.processor import next_position
from penstock.rollout_service.embedded_engine.caches import ImageFeatureCache, PrefixCache
from penstock.rollout_service.embedded_engine.model.kv_cache import KVCache
from penstock.rollout_service.embedded_engine.model.low_rank import Adapter, AdapterMix, RowAdapters
from penstock.rollout_service.embedded_engine.model.sampler import GREEDY_BELOW, Choice, sample, uniforms
from penstock.rollout_service.embedded_engine.model.transformer import ImageTokens, PromptBatch, Transformer
from penstock.rollout_service.embedded_engine.model.weights import Weights
from penstock.rollout_service.embedded_engine.prompts import Prompt, packed, prompts_of, shown_parts, spans_of
from penstock.rollout_service.embedded_engine.scheduler import padded_rows
from penstock.rollout_service.embedded_engine.sequence import NO_ADAPTER, FinishReason, Image, Sequence

NO_TOKEN = -1  # pads `Rows.stop_ids`
_LOGPROB_CHUNK_TOKENS = 1024  # prompt logprobs need [tokens, vocab] floats; bounded by working in chunks
# of images that were computed; a picture of 1,920 x 1,080 has 22 MiB with 2,048 numbers a token
_MAX_FEATURE_BYTES = 256 * 2**20
_KEPT_MIXES = 8  # two or three adapters among new and running sequences make about as many combinations


@dataclass(slots=True)
class Rows:
    last_token: np.ndarray  # int64, sampled, not yet in the cache
    position: np.ndarray  # int64, position of the last token; equals the number of tokens in the cache
    # int64, by how much the position for rotary embeddings is less: tokens of an image share positions
    skipped: np.ndarray
    adapter: np.ndarray  # int64, the adapter's number or NO_ADAPTER
    num_output: np.ndarray  # int64
    max_output: np.ndarray  # int64
    seed: np.ndarray  # uint64
    temperature: np.ndarray  # float32
    greedy: np.ndarray  # bool
    top_p: np.ndarray  # float32
    top_k: np.ndarray  # int64
    filtered: np.ndarray  # bool: top_p or top_k restricts the row
    has_stop_strings: np.ndarray  # bool
    stop_ids: np.ndarray  # [rows, k] int64, padded with -1

    @classmethod
    def empty(cls, num_rows: int) -> Rows:
        kinds = {"seed": np.uint64, "temperature": np.float32, "top_p": np.float32}
        flags = {"greedy", "filtered", "has_stop_strings"}
        arrays = {
            item.name: np.zeros(num_rows, dtype=np.bool_ if item.name in flags else kinds.get(item.name, np.int64))
            for item in fields(cls)
            if item.name != "stop_ids"
        }
        return cls(**arrays, stop_ids=np.full((num_rows, 1), NO_TOKEN, dtype=np.int64))

    def fill(self, row: int, sequence: Sequence, *, merge_size: int = 1) -> None:
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
        self.seed[row] = sampling.seed
        self.greedy[row] = sampling.temperature < GREEDY_BELOW
        self.temperature[row] = 1.0 if self.greedy[row] else sampling.temperature
        self.top_p[row] = sampling.top_p
        self.top_k[row] = sampling.top_k if sampling.top_k > 0 else np.iinfo(np.int64).max
        self.filtered[row] = sampling.top_p < 1.0 or sampling.top_k > 0
        self.has_stop_strings[row] = bool(sampling.stop_strings)
        self.stop_ids[row] = NO_TOKEN
        self.stop_ids[row, : len(stops)] = stops

    def move(self, sources: list[int], targets: list[int]) -> None:
        for item in fields(self):
            array = getattr(self, item.name)
            array[targets] = array[sources]


class Runner:
    """The running sequences with their keys and values. For one thread."""

    def __init__(
        self,
        model: Transformer,
        weights: Weights,
        cache: KVCache,
        *,
        max_running: int,
        find_stop_string: Callable[[Sequence], str | None],
        max_kept_tokens: int = 0,
    ) -> None:
        """Start with nothing running; ``find_stop_string`` looks for a stop string at a completion's end.

        Keys and values of up to ``max_kept_tokens`` tokens are kept for sequences that begin alike.
        """
        self.kept = PrefixCache(max_kept_tokens)
        self._weights: Weights | None = weights  # None: released
        self._num_weights = 1  # sets of weights since the start
        self.running: list[Sequence] = []
        self._model = model
        self._cache = cache
        self._rows = Rows.empty(padded_rows(max_running))
        self._device = cache.data.device
        self._find_stop_string = find_stop_string
        self._mixes: OrderedDict[tuple[int, ...], AdapterMix] = OrderedDict()  # least recently used first
        self._merge_size = 1 if model.config.vision is None else model.config.vision.merge_size
        self._features = ImageFeatureCache(_MAX_FEATURE_BYTES)

    @property
    def weights(self) -> Weights:
        """What the next token is computed with; setting it drops what others computed, except of running sequences."""
        assert self._weights is not None  # else nothing is computed
        return self._weights

    @weights.setter
    def weights(self, weights: Weights) -> None:
        self._weights = weights
        self._num_weights += 1
        self.kept.clear()
        self._features.clear()

    @property
    def has_weights(self) -> bool:
        return self._weights is not None

    def release(self, tags: Collection[str]) -> None:
        """Free the memory of weights, keys and values while nothing runs; what is computed next allocates it again."""
        if "weights" in tags:
            self._weights = None
        if "kv_cache" in tags:
            self._cache.release()
        for computed in (self.kept, self._features):
            computed.clear()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # else the allocator would keep it from other processes

    @property
    def num_stored_tokens(self) -> int:
        """Tokens whose keys and values are in the cache; callable from any thread."""
        return int(self._rows.position[: len(self.running)].sum())

    def computing(self) -> AbstractContextManager[object]:
        """Return the context of all other methods: tensors made in it cannot be changed outside of it."""
        return torch.inference_mode()

    def start(self, admitted: list[Sequence]) -> list[Sequence]:
        prompts = prompts_of(admitted, self.kept)
        first, copies = len(self.running), [len(one.sequences) for one in prompts]
        # Those that run count too: a rectangle at its limit is reallocated with exactly these rows and columns.
        longest = max(int(self._rows.position[:first].max(initial=0)), *(len(one.tokens) for one in prompts))
        self._cache.ensure(padded_rows(first + len(admitted)), longest + 1)
        starts = (first + np.cumsum([0, *copies[:-1]])).tolist()
        for prompt, row in zip(prompts, starts, strict=True):
            self._cache.fill_rows(row, len(prompt.sequences), prompt.reused.parts)
        ids, positions = map(self._to_device, packed(prompts, self._merge_size))
        batch = PromptBatch(ids, positions, spans_of(prompts), copies, first, self._image_tokens(prompts))
        hidden = self._model.prefill(self.weights, batch, self._cache, self._prompt_adapters(prompts))
        ends = np.cumsum([len(one.new_tokens) for one in prompts])
        last = np.zeros(padded_rows(len(prompts)), dtype=np.int64)
        last[: len(prompts)] = ends - 1
        last_hidden = hidden[self._to_device(last)]
        finite = torch.isfinite(last_hidden[: len(prompts)]).all(1).tolist()
        for prompt, row, end, is_finite in zip(prompts, starts, ends.tolist(), finite, strict=True):
            self._report_prompt(prompt, hidden[end - len(prompt.new_tokens) : end])
            if is_finite:  # one NaN makes those of the tokens before it NaN too: 0 x NaN in a masked product
                self.kept.keep(prompt.prefix, partial(self._cache.read, row))
        for row, sequence in enumerate((one for prompt in prompts for one in prompt.sequences), start=first):
            self._rows.fill(row, sequence, merge_size=self._merge_size)
            self._rows.position[row] = sequence.num_tokens
            sequence.computed_with = self._num_weights
            self.running.append(sequence)
        logits = self._model.logits(self.weights, last_hidden)[: len(prompts)]
        logits = logits.repeat_interleave(torch.tensor(copies, device=self._device), dim=0)
        return self._advance(logits, first)

    def step(self) -> list[Sequence]:
        num, rows = len(self.running), padded_rows(len(self.running))
        running = self._rows.position[:num]
        columns = int(running.max()) + 1
        self._cache.ensure(rows, columns)
        # Rows beyond num are padding: token 0 at position 0, computed and discarded.
        self._rows.position[num:rows] = 0
        self._rows.last_token[num:rows] = 0
        at = self._to_device(self._rows.position[:rows])
        mask = None
        if int(running.min()) + 1 != columns:
            beyond = torch.arange(columns, device=self._device) > at.unsqueeze(1)
            mask = torch.zeros(rows, columns, device=self._device).masked_fill_(beyond, -torch.inf)
        tokens = self._to_device(self._rows.last_token[:rows])
        adapters, rotary = self._running_adapters(rows), self._rotary_positions(rows)
        logits = self._model.decode(self.weights, tokens, at, columns, mask, self._cache, adapters, rotary)[:num]
        self._rows.position[:num] += 1
        return self._advance(logits, 0)

    def remove(self, leaving: Collection[Sequence]) -> None:
        if not leaving:
            return
        gone = set(map(id, leaving))
        num = len(self.running)
        for row, sequence in enumerate(self.running):
            if sequence.wants_experts and id(sequence) in gone:
                sequence.experts = self._cache.experts[row, : sequence.num_tokens - 1].cpu().numpy().copy()
        kept = num - len(gone)
        targets = [row for row in range(kept) if id(self.running[row]) in gone]
        sources = [row for row in range(kept, num) if id(self.running[row]) not in gone]
        if targets:
            columns = int(self._rows.position[sources].max())
            self._cache.move_rows(sources, targets, columns)
            self._rows.move(sources, targets)
            for source, target in zip(sources, targets, strict=True):
                self.running[target] = self.running[source]
        del self.running[kept:]

    def drop_adapter(self, adapter: Adapter) -> None:
        self.kept.drop_adapter(adapter.number)
        for numbers in [numbers for numbers in self._mixes if adapter.number in numbers]:
            del self._mixes[numbers]

    def _image_tokens(self, prompts: list[Prompt]) -> ImageTokens | None:
        parts = shown_parts(prompts)
        if not parts:
            return None
        features = [self._features_of(part.image)[part.start : part.end] for part in parts]
        rows = np.concatenate([np.arange(part.row, part.row + part.end - part.start) for part in parts])
        return ImageTokens(self._to_device(rows), torch.cat(features))

    def _features_of(self, image: Image) -> torch.Tensor:
        features = self._features.find(image.number)
        if features is None:
            features = self._model.features(self.weights, torch.from_numpy(image.pixel_values), image.grid)
            self._features.keep(image.number, features)
        return features

    def _rotary_positions(self, num_rows: int) -> torch.Tensor | None:
        num = len(self.running)
        if not self._rows.skipped[:num].any():
            return None
        self._rows.skipped[num:num_rows] = 0
        return self._to_device(self._rows.position[:num_rows] - self._rows.skipped[:num_rows])

    def _prompt_adapters(self, prompts: list[Prompt]) -> RowAdapters | None:
        adapters = [prompt.sequences[0].adapter for prompt in prompts]
        used_adapters = [adapter for adapter in adapters if adapter is not None]
        if not used_adapters:
            return None
        lengths = [len(prompt.new_tokens) for prompt in prompts]
        numbers = [NO_ADAPTER if adapter is None else adapter.number for adapter in adapters]
        padding = padded_rows(sum(lengths)) - sum(lengths)
        return self._mix(used_adapters).of_rows(
            self._to_device(np.repeat([*numbers, numbers[-1]], [*lengths, padding]))
        )

    def _running_adapters(self, num_rows: int) -> RowAdapters | None:
        num, numbers = len(self.running), self._rows.adapter
        if not numbers[:num].any():
            return None
        numbers[num:num_rows] = numbers[num - 1]  # one more row of an adapter costs less than a row of another
        used_adapters = [sequence.adapter for sequence in self.running if sequence.adapter is not None]
        return self._mix(used_adapters).of_rows(self._to_device(numbers[:num_rows]))

    def _mix(self, used_adapters: list[Adapter]) -> AdapterMix:
        adapters = {adapter.number: adapter for adapter in used_adapters}
        numbers = tuple(sorted(adapters))
        mix = self._mixes.pop(numbers, None) or AdapterMix([adapters[number] for number in numbers])
        self._mixes[numbers] = mix
        if len(self._mixes) > _KEPT_MIXES:
            self._mixes.popitem(last=False)
        return mix

    def _report_prompt(self, prompt: Prompt, hidden: torch.Tensor) -> None:
        """Set cached tokens and prompt logprobs of sequences of one prompt. ``hidden`` is [new tokens, hidden]."""
        sequences, known = prompt.sequences, prompt.reused.length
        sequences[0].cached_tokens = min(known, len(sequences[0].prompt))
        for sequence in sequences[1:]:
            sequence.cached_tokens = len(sequence.prompt)
        requesting = [
            item for item in sequences if item.input_logprobs_from is not None and item.input_logprobs is None
        ]
        for sequence in requesting:
            first, last = sequence.input_logprobs_from or 0, len(sequence.prompt) - 1
            targets = torch.tensor(sequence.prompt[first + 1 :], device=self._device)
            input_logprobs: list[float] = []
            tops: list[list[tuple[float, int]]] = []
            for start in range(first, last, _LOGPROB_CHUNK_TOKENS):
                end = min(start + _LOGPROB_CHUNK_TOKENS, last)
                logprobs = self._model.logits(self.weights, hidden[start - known : end - known]).log_softmax(-1)
                input_logprobs += (
                    logprobs.gather(1, targets[start - first : end - first].unsqueeze(1)).squeeze(1).tolist()
                )
                if sequence.num_top_logprobs:
                    values, tokens = logprobs.topk(sequence.num_top_logprobs, dim=1)
                    pairs = zip(values.tolist(), tokens.tolist(), strict=True)
                    tops += [list(zip(*pair, strict=True)) for pair in pairs]
            sequence.input_logprobs = input_logprobs
            sequence.input_top_logprobs = tops if sequence.num_top_logprobs else None

    def _advance(self, logits: torch.Tensor, first: int) -> list[Sequence]:
        rows, here = self._rows, slice(first, len(self.running))
        chosen, their_logprobs = sample(logits, self._choice(here))
        tokens, logprobs = chosen.cpu().numpy(), their_logprobs.cpu().numpy()
        sequences = self.running[first:]
        for sequence, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True):
            sequence.output_ids.append(token)
            sequence.output_logprobs.append(logprob)
        rows.last_token[here] = tokens
        rows.num_output[here] += 1
        stopped = (tokens[:, None] == rows.stop_ids[here]).any(1)
        ended = stopped | (rows.num_output[here] >= rows.max_output[here]) | ~np.isfinite(logprobs)
        ended |= rows.has_stop_strings[here]
        finished = [first + index for index in np.flatnonzero(ended).tolist() if self._has_ended(sequences[index])]
        for row in finished:
            self._keep_row(row)
        finished = [self.running[row] for row in finished]
        self._clear_not_finite(finished)
        self.remove(finished)
        return finished

    def _has_ended(self, sequence: Sequence) -> bool:
        sampling, token = sequence.sampling, sequence.output_ids[-1]
        if not all(map(math.isfinite, (sequence.output_logprobs[-1], *(sequence.input_logprobs or ())))):
            message = "the model's logits are not finite; the served weights overflow on this input"
            sequence.finish = FinishReason("abort", message=message, status_code=500)
        elif sampling.max_new_tokens == 0:  # only prompt logprobs were requested
            sequence.output_ids.clear()
            sequence.output_logprobs.clear()
            sequence.finish = FinishReason("length")
        elif token in sampling.stop_token_ids:
            sequence.finish = FinishReason("stop", matched=token)
        elif sampling.stop_strings and (stop_string := self._find_stop_string(sequence)) is not None:
            sequence.finish = FinishReason("stop", matched=stop_string)
        elif len(sequence.output_ids) >= sampling.max_new_tokens:
            sequence.finish = FinishReason("length")
        return sequence.finish is not None

    def _keep_row(self, row: int) -> None:
        """Keep keys and values of a sequence that has ended, unless they are not finite or of several weights."""
        sequence = self.running[row]
        failed = sequence.finish is not None and sequence.finish.status_code is not None
        if not failed and sequence.computed_with == self._num_weights:
            key, tokens = sequence.prefix()
            self.kept.keep((key, tokens[: int(self._rows.position[row])]), partial(self._cache.read, row))

    def _clear_not_finite(self, finished: list[Sequence]) -> None:
        not_finite = {id(sequence) for sequence in finished if sequence.finish and sequence.finish.status_code}
        if not_finite:
            self._cache.clear_rows([row for row, item in enumerate(self.running) if id(item) in not_finite])

    def _choice(self, here: slice) -> Choice:
        rows = self._rows
        greedy, temperature = rows.greedy[here], rows.temperature[here]
        num_greedy = int(greedy.sum())
        numbers = None
        if num_greedy < len(greedy):
            numbers = self._to_device(uniforms(rows.seed[here], rows.num_output[here]))
        filtered = bool(rows.filtered[here].any())
        return Choice(
            uniforms=numbers,
            temperatures=self._to_device(temperature) if (temperature != 1.0).any() else None,
            greedy=self._to_device(greedy) if 0 < num_greedy < len(greedy) else None,
            top_p=self._to_device(rows.top_p[here]) if filtered else None,
            top_k=self._to_device(rows.top_k[here]) if filtered else None,
        )

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)
