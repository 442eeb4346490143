"""Translate a checked body into sequences, refusing what this model cannot serve; and the adapter for tokenizers.

A tokenizer is optional: without a tokenizer.json the engine serves token ids only. Pure but for random ids and seeds.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from collections.abc import Sequence as Items
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.protocol.errors import TemplateRefused
from penstock.rollout_service.embedded_engine.errors import RequestRefused
from penstock.rollout_service.embedded_engine.http.bodies import GenerateBody, ReadImage, SamplingParams, with_images
from penstock.rollout_service.embedded_engine.sequence import Sampling, Sequence

if TYPE_CHECKING:
    from penstock.protocol.chat_template import ChatTemplate
    from penstock.protocol.images.processor import ImageProcessor
    from penstock.rollout_service.embedded_engine.model.low_rank import Adapter
    from penstock.rollout_service.embedded_engine.sequence import Sequence


_SPARE_TOKENS = 8  # a stop string is searched in as many tokens as it has UTF-8 bytes, plus these
_SEED_STRIDE = 0xD1342543DE82EF95  # odd, so the n samples of one seed get n different seeds
_SEED_MASK = 2**64 - 1


class Text:
    def __init__(self, folder: Path) -> None:
        """Read a model folder; raises UnsupportedModel of the protocol for a file that is not read."""
        # A token-only engine is built without it.
        from penstock.protocol.chat_tokenizer import read_json, special_tokens_of, template_text  # noqa: PLC0415
        from penstock.protocol.tokenizer_file import load_tokenizer  # noqa: PLC0415

        path = folder / "tokenizer.json"
        self._tokenizer = load_tokenizer(path) if path.is_file() else None
        settings = read_json(folder / "tokenizer_config.json")
        self._special_tokens = special_tokens_of(settings, folder)
        self._template = template_text(folder, settings)
        self._compiled: ChatTemplate | None = None  # compiled at the first chat

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        if self._tokenizer is None:
            raise RequestRefused("this model folder holds no tokenizer.json; send input_ids instead of text")
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, batch: Items[Items[int]], *, skip_special_tokens: bool) -> list[str]:
        if self._tokenizer is None:
            return [""] * len(batch)
        return self._tokenizer.decode_batch(batch, skip_special_tokens=skip_special_tokens)

    def eos_token_ids(self) -> tuple[int, ...]:
        text = self._special_tokens.get("eos_token")
        token_id = self._tokenizer.token_to_id(text) if self._tokenizer is not None and text else None
        return () if token_id is None else (token_id,)

    def find_stop_string(self, sequence: Sequence) -> str | None:
        stops = sequence.sampling.stop_strings
        window = max(len(stop.encode()) for stop in stops) + _SPARE_TOKENS
        tail = self.decode([sequence.output_ids[-window:]], skip_special_tokens=False)[0]
        return next((stop for stop in stops if stop in tail), None)

    def render_chat(self, messages: list[dict[str, Any]]) -> str:
        if self._template is None:
            raise RequestRefused("this model folder holds no chat template; use /generate")
        from penstock.protocol.chat_template import ChatTemplate  # noqa: PLC0415  (only chat needs jinja2)

        try:
            self._compiled = self._compiled or ChatTemplate(self._template)
            return self._compiled.render(messages, add_generation_prompt=True, tools=None, **self._special_tokens)
        except TemplateRefused as error:
            raise RequestRefused(f"the chat template refuses the conversation: {error}") from error


@dataclass(frozen=True, slots=True)
class ServedModel:
    vocab_size: int
    max_tokens: int  # prompt and completion: the model's context, or the whole KV cache if that is less
    end_token_ids: tuple[int, ...]
    text: Text
    adapters: Mapping[str, Adapter]  # by name; a live view
    expert_layers: tuple[int, ...] = ()  # numbers of the layers that have experts
    num_layers: int = 0
    image_processor: ImageProcessor | None = None  # None: it reads no images


@dataclass(frozen=True, slots=True)
class RequestedJob:
    sequences: list[Sequence]
    params: list[SamplingParams]  # of each sequence
    is_list: bool  # the reply is a list: a batch was sent, or n > 1
    return_logprob: bool
    return_prompt_token_ids: bool
    expert_layers: tuple[int, ...] = ()  # of the model, where the reply names the experts of each token
    num_layers: int = 0


def build_job(body: GenerateBody, model: ServedModel, images: Sequences[Sequences[ReadImage]] = ()) -> RequestedJob:
    """Return the sequences that ``body`` requests; raises RequestRefused, which names the value that cannot be served.

    ``images`` are those of each prompt, or none for any.
    """
    prompts, is_batch = _prompts(body, model.text)
    if body.return_routed_experts and not model.expert_layers:
        raise RequestRefused("return_routed_experts=true, but the model has no experts")
    params = _per_prompt(body.sampling_params, len(prompts), "sampling_params")
    num_samples = params[0].n
    if any(item.n != num_samples for item in params):
        raise RequestRefused("sampling_params.n must be the same for all prompts of a batch")
    rids = _rids(body.rid, len(prompts))
    adapters = _adapters(body.lora_path, len(prompts), model)
    positions = _image_positions(body.image_positions, len(prompts), model)
    sequences = []
    for raw_prompt, shown, places, requested, rid, adapter in zip(
        prompts, images or [()] * len(prompts), positions, params, rids, adapters, strict=True
    ):
        prompt, placed = raw_prompt, None
        if model.image_processor is not None:
            _check_prompt(raw_prompt, model)  # while a number below 0 is the sender's
            prompt, placed = with_images(raw_prompt, shown, places, model.image_processor)
        _check_prompt(prompt, model)
        start = _input_logprob_start(body, prompt)
        for index in range(num_samples):
            sampling = _sampling(requested, index, len(prompt), model)
            sequences.append(
                Sequence(
                    rid if num_samples == 1 else f"{rid}-{index}",
                    prompt,
                    sampling,
                    extra_key=body.extra_key,
                    adapter=adapter,
                    images=placed,
                    input_logprobs_from=start,
                    num_top_logprobs=_num_top_logprobs(body, start, sampling, model),
                    wants_experts=body.return_routed_experts,
                )
            )
    return RequestedJob(
        sequences,
        [requested for requested in params for _ in range(num_samples)],
        is_list=is_batch or num_samples > 1,
        return_logprob=bool(body.return_logprob),
        return_prompt_token_ids=body.return_prompt_token_ids,
        expert_layers=model.expert_layers,
        num_layers=model.num_layers,
    )


def _prompts(body: GenerateBody, text: Text) -> tuple[list[tuple[int, ...]], bool]:
    if (body.input_ids is None) == (body.text is None):
        raise RequestRefused("exactly one of input_ids and text must be given")
    if body.text is not None:
        texts = [body.text] if isinstance(body.text, str) else body.text
        return [tuple(text.encode(item)) for item in texts], not isinstance(body.text, str)
    rows = body.input_ids or []
    if not rows:
        raise RequestRefused("input_ids is empty; a prompt needs at least one token")
    if isinstance(rows[0], int):
        return [tuple(rows)], False  # type: ignore[arg-type]
    return [tuple(row) for row in rows], True  # type: ignore[arg-type]


def _per_prompt(params: SamplingParams | list[SamplingParams], num_prompts: int, name: str) -> list[SamplingParams]:
    if not isinstance(params, list):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise RequestRefused(f"{name} holds {len(params)} entries for {num_prompts} prompts")
    return params


def _rids(rid: str | list[str] | None, num_prompts: int) -> list[str]:
    if isinstance(rid, str) and num_prompts > 1:
        return [f"{rid}_{index}" for index in range(num_prompts)]
    rids = [rid] if isinstance(rid, str) else rid or [secrets.token_hex(16) for _ in range(num_prompts)]
    if len(rids) != num_prompts:
        raise RequestRefused(f"rid holds {len(rids)} entries for {num_prompts} prompts")
    if len(set(rids)) != len(rids):
        raise RequestRefused("rid holds the same id twice")
    return rids


def _adapters(named: str | list[str | None] | None, num_prompts: int, model: ServedModel) -> list[Adapter | None]:
    names = named if isinstance(named, list) else [named] * num_prompts
    if len(names) != num_prompts:
        raise RequestRefused(f"lora_path holds {len(names)} entries for {num_prompts} prompts")
    unknown = next((name for name in names if name is not None and name not in model.adapters), None)
    if unknown is not None:
        loaded = ", ".join(model.adapters) or "none"
        raise RequestRefused(f"lora_path names {unknown!r}, which is not loaded; loaded are: {loaded}")
    return [None if name is None else model.adapters[name] for name in names]


def _image_positions(
    positions: list[int] | list[list[int]] | None, num_prompts: int, model: ServedModel
) -> Sequences[list[int] | None]:
    if positions is None:
        return [None] * num_prompts
    if model.image_processor is None:
        raise RequestRefused("image_positions: the served model reads no images")
    lists = [entry for entry in positions if isinstance(entry, list)]
    if len(lists) == num_prompts == len(positions):
        return lists
    numbers = [entry for entry in positions if isinstance(entry, int)]
    if num_prompts == 1 and len(numbers) == len(positions):
        return [numbers]
    raise RequestRefused(f"image_positions must hold a list for each of {num_prompts} prompts")


def _check_prompt(prompt: tuple[int, ...], model: ServedModel) -> None:
    if not prompt:
        raise RequestRefused("input_ids is empty; a prompt needs at least one token")
    if min(prompt) < 0 or max(prompt) >= model.vocab_size:
        wrong = next(item for item in prompt if not 0 <= item < model.vocab_size)
        raise RequestRefused(f"input_ids holds {wrong}; token ids of this model are 0..{model.vocab_size - 1}")
    if len(prompt) >= model.max_tokens:
        raise RequestRefused(
            f"The input ({len(prompt)} tokens) is longer than the model's context length ({model.max_tokens} tokens)."
        )


def _sampling(requested: SamplingParams, index: int, prompt_tokens: int, model: ServedModel) -> Sampling:
    available = model.max_tokens - prompt_tokens
    wanted = available if requested.max_new_tokens is None else requested.max_new_tokens
    if wanted > available:
        raise RequestRefused(
            f"Requested token count exceeds the model's maximum context length of {model.max_tokens} tokens: "
            f"{prompt_tokens} tokens from the prompt and {wanted} for the completion. Send at most "
            f"max_new_tokens={available}."
        )
    if requested.top_k == 0:
        raise RequestRefused("top_k must be -1 (disable) or at least 1, got 0.")
    stops = (requested.stop,) if isinstance(requested.stop, str) else tuple(requested.stop or ())
    if any(stops) and not model.text.has_tokenizer:
        raise RequestRefused("stop strings need a tokenizer.json in the model folder; send stop_token_ids")
    ends = (
        () if requested.ignore_eos else tuple(dict.fromkeys((*(requested.stop_token_ids or ()), *model.end_token_ids)))
    )
    outside = [item for item in ends if not 0 <= item < model.vocab_size]
    if outside:
        raise RequestRefused(
            f"stop_token_ids holds {outside[0]}; token ids of this model are 0..{model.vocab_size - 1}"
        )
    seed = secrets.randbits(64) if requested.sampling_seed is None else requested.sampling_seed
    return Sampling(
        max_new_tokens=wanted,
        temperature=requested.temperature,
        top_p=requested.top_p,
        top_k=requested.top_k,
        seed=(seed + index * _SEED_STRIDE) & _SEED_MASK,
        stop_token_ids=ends,
        stop_strings=tuple(filter(None, stops)),
    )


def _num_top_logprobs(body: GenerateBody, start: int | None, sampling: Sampling, model: ServedModel) -> int:
    num = body.top_logprobs_num or 0
    if num and (start is None or sampling.max_new_tokens):
        raise RequestRefused(
            f"top_logprobs_num={num} is answered for the positions of a prompt alone: it needs return_logprob=true, "
            "logprob_start_len of 0 or more, and max_new_tokens=0"
        )
    if num > model.vocab_size:
        raise RequestRefused(f"top_logprobs_num={num} is more than the {model.vocab_size} tokens of the vocabulary")
    return num


def _input_logprob_start(body: GenerateBody, prompt: tuple[int, ...]) -> int | None:
    start = body.logprob_start_len
    if not body.return_logprob or start is None or start < 0:
        return None
    if start >= len(prompt):
        raise RequestRefused(f"logprob_start_len={start} must be less than the {len(prompt)} tokens of the prompt")
    return start
