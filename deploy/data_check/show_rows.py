"""The rendered text of rows with what is trained marked, from the token ids that the trainer would put into its batches."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Literal

from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.reward_settings import RewardSettings
from penstock.protocol.images.processor import ImageProcessor
from penstock.protocol.process_end import printable
from penstock.trainer.data.dataset import PromptSet
from penstock.trainer.data.pairs import PairSet
from penstock.trainer.data.turns import TurnSet
from penstock.trainer.errors import MalformedData
from penstock.trainer.settings import DataSettings, TrainerSettings

Purpose = Literal["grpo", "sft", "dpo"]
Part = tuple[Sequence[int], bool]  # token ids, and whether they are trained

MARKS = ("\u27e6", "\u27e7")  # mathematical brackets, which texts hardly have
_COLOURS = ("\x1b[30;42m", "\x1b[0m")
_ANY_LENGTH = 2**31 - 1


def marks() -> tuple[str, str]:
    return _COLOURS if sys.stdout.isatty() and "NO_COLOR" not in os.environ else MARKS


def shown_rows(
    path: Path,
    number: int,
    purpose: Purpose,
    settings: TrainerSettings,
    tokenizer: ChatTokenizer,
    processor: ImageProcessor | None,
) -> list[str]:
    """Return the texts of the first rows of a file that can be trained on; a bad row among them is what is returned instead."""
    data = settings.data.model_copy(update={"max_samples": number, "max_prompt_tokens": _ANY_LENGTH})
    try:
        parts = _parts(path, purpose, data, settings, tokenizer, processor)
    except MalformedData as err:
        return [f"not shown, for {purpose}: {printable(err)}"]
    opening, closing = marks()
    lines = []
    for title, example in parts:
        counts = f"{sum(len(ids) for ids, _ in example)} tokens, {sum(len(ids) for ids, is_trained in example if is_trained)} trained"
        texts = (
            f"{opening}{text}{closing}" if is_trained else text
            for text, is_trained in ((printable(tokenizer.decode(ids)), is_trained) for ids, is_trained in example)
        )
        lines.append(f"{path}, {title}: {counts}\n{''.join(texts)}")
    return lines


def _parts(
    path: Path,
    purpose: Purpose,
    data: DataSettings,
    settings: TrainerSettings,
    tokenizer: ChatTokenizer,
    processor: ImageProcessor | None,
) -> list[tuple[str, list[Part]]]:
    if purpose == "sft":
        turns = TurnSet([path], data=data, tokenizer=tokenizer, max_tokens=_ANY_LENGTH, mask=settings.sft.mask)
        return [
            (f"sft example {n + 1}", list(_stretches(turns[n].token_ids.tolist(), turns[n].loss_mask.tolist())))
            for n in range(len(turns))
        ]
    if purpose == "grpo":
        reward = RewardSettings(name="any")
        prompts = PromptSet(
            [path], data=data, reward=reward, tokenizer=tokenizer, skips_pairs=True, processor=processor
        )
        return [(f"prompt {n + 1}", [(prompts[n].token_ids, False)]) for n in range(len(prompts))]
    pairs = PairSet(
        [path], data=data, tokenizer=tokenizer, max_tokens=_ANY_LENGTH, takes_one_answer=True, skips_prompts=True
    )
    return [
        (f"pair {n + 1} {name}", [(pairs[n].prompt.tolist(), False), (ids.tolist(), True)])
        for n in range(len(pairs))
        for name, ids in (("chosen", pairs[n].chosen), ("rejected", pairs[n].rejected))
        if len(ids)
    ]


def _stretches(token_ids: Sequence[int], loss_mask: Sequence[bool]) -> Iterator[Part]:
    for is_trained, stretch in groupby(zip(token_ids, loss_mask, strict=True), key=lambda pair: pair[1]):
        yield [token for token, _ in stretch], is_trained
