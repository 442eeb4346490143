"""Which tasks this worker's model can do, checked before anything is generated; pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.protocol.files import json_value, read_regular
from penstock.protocol.groups import SINGLE_TURN, Sampling, Split, Task
from penstock.protocol.token_annotations import Routers, routers_of
from penstock.rollout_service.errors import TaskRefused, WeightsUnusable


@dataclass(frozen=True, slots=True)
class ImageTokens:
    image: int  # stands for a part of one
    before: tuple[int, ...] = ()  # in a prompt of the model
    behind: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ImageTokens | None:
        image, before, behind = (config.get(f"{name}_token_id") for name in ("image", "vision_start", "vision_end"))
        if not isinstance(image, int):
            return None
        return cls(image, *((token_id,) if isinstance(token_id, int) else () for token_id in (before, behind)))


@dataclass(frozen=True, slots=True)
class ModelLimits:
    vocab_size: int | None
    context_tokens: int | None
    routers: Routers | None = None  # of a mixture of experts
    num_layers: int = 0
    images: ImageTokens | None = None  # None: it reads text alone

    @classmethod
    def of(cls, folder: Path) -> ModelLimits:
        path = folder / "config.json"
        try:
            whole = json_value(read_regular(path, follow=True))
            config = whole.get("text_config", whole)  # multimodal models keep the text part here
            return cls(
                config.get("vocab_size"),
                config.get("max_position_embeddings"),
                routers_of(config),
                config.get("num_hidden_layers") or 0,
                ImageTokens.of(whole),
            )
        except (OSError, ValueError, TypeError, AttributeError) as err:
            raise WeightsUnusable(f"{path} is not a model's config ({type(err).__name__}: {err})") from None

    def within(self, context_tokens: int | None) -> ModelLimits:
        known = [tokens for tokens in (self.context_tokens, context_tokens) if tokens is not None]
        return replace(self, context_tokens=min(known, default=None))


def check_task(task: Task, *, limits: ModelLimits, split: Split, environments: Collection[str]) -> None:
    """Raise TaskRefused when no attempt at this task can ever succeed.

    A training task must sample from the whole distribution, because only then are the engine's
    log-probabilities those of the distribution that was sampled.
    """
    if task.split != split:
        raise TaskRefused("wrong_split", f"{task.group_id} has split {task.split} but was issued as {split}")
    if task.environment not in environments:
        raise TaskRefused(
            "unknown_environment",
            f"{task.group_id} needs environment {task.environment!r}; this worker has {', '.join(sorted(environments))}",
        )
    if task.redundant_completions and (split != "train" or task.environment != SINGLE_TURN):
        raise TaskRefused(
            "redundancy_refused",
            f"{task.group_id}: {task.redundant_completions} redundant completions in a task of {split} and environment "
            f"{task.environment}; expected none outside training in {SINGLE_TURN}: an evaluation that keeps the first that end "
            "would measure short completions",
        )
    if task.images is not None and task.environment != SINGLE_TURN:
        raise TaskRefused(
            "images_refused",
            f"{task.group_id}: its row has {len(task.images.refs)} images, which environment {task.environment} would not show; use "
            f"{SINGLE_TURN} for rows with images, or an environment that shows them in its messages",
        )
    try:
        check_request(task.prompt_ids, task.sampling, limits)
    except TaskRefused as err:
        raise TaskRefused(err.reason, f"{task.group_id}: {err}") from None
    sampling = task.sampling
    if split == "train" and (sampling.temperature == 0 or sampling.top_p != 1 or sampling.top_k != -1):
        raise TaskRefused(
            "inexact_sampling",
            f"{task.group_id}: temperature {sampling.temperature}, top_p {sampling.top_p}, top_k {sampling.top_k} would "
            "give log-probabilities of another distribution than the sampled one; train with temperature > 0, "
            "top_p 1 and top_k -1",
        )


def check_request(prompt_ids: Sequence[int], sampling: Sampling, limits: ModelLimits) -> None:
    """Raise TaskRefused for a prompt beyond the model's limits; some engines crash on one."""
    if not prompt_ids:
        raise TaskRefused("empty_prompt", "a prompt without a token cannot be continued")
    known = (*prompt_ids, *sampling.stop_token_ids)
    highest, lowest = max(known), min(known)
    if lowest < 0 or (limits.vocab_size is not None and highest >= limits.vocab_size):
        raise TaskRefused(
            "token_out_of_range",
            f"token id {lowest if lowest < 0 else highest} of a model with {limits.vocab_size} tokens; "
            "the trainer uses another tokenizer",
        )
    if limits.context_tokens is not None and len(prompt_ids) + sampling.max_new_tokens > limits.context_tokens:
        raise TaskRefused(
            "too_long",
            f"{len(prompt_ids)} prompt tokens and up to {sampling.max_new_tokens} new ones exceed the context of "
            f"{limits.context_tokens} tokens",
        )
    served = limits.routers.shape if limits.routers is not None else None
    if sampling.routers is not None and sampling.routers != served:
        raise TaskRefused(
            "other_routers",
            f"the trainer wants the choices of {sampling.routers} (trainer.router_replay), and the served model has "
            f"{served or 'no experts that are known'}",
        )
