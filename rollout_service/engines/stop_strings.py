"""Where a completion ends: at the first token that completes a stop string; and the text of its tokens.

A completion ends with the first token that completes a stop string. Engines end a generation there, but not always: SGLang searches only
as many tokens as its spelling of the string has, reports the limit of tokens first, and no engine sees a string that began before an
update of the weights interrupted the request. Tokens after the end are dropped here. What remains was sampled exactly as if the engine had
ended there, since a token depends on none after it. A stop string is searched in the text with special tokens, so that the text of one,
such as "<|im_end|>", can be a stop string.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.protocol.token_annotations import ExpertChoices
from penstock.protocol.versions import VersionRun
from penstock.rollout_service.engines.completion import Completion

Decode = Callable[[Sequence[int]], str]  # of token ids, special tokens included


def first_end(token_ids: Sequence[int], stop: Sequence[str], decode: Decode) -> int | None:
    """Return the number of tokens up to the end of the first stop string; None when the text holds none."""

    def holds(count: int) -> bool:
        text = decode(token_ids[:count])
        return any(stop_string in text for stop_string in stop)

    count = len(token_ids)
    if not holds(count):
        return None
    if not holds(count - 1):  # the engine ended there
        return count
    return bisect_left(range(count), True, key=holds)


def ended_at(completion: Completion, count: int) -> Completion:
    runs = [
        VersionRun(run.version, run.start, min(run.end, count)) for run in completion.version_runs if run.start < count
    ]
    return replace(
        completion,
        token_ids=completion.token_ids[:count],
        logprobs=completion.logprobs[:count],
        version_runs=tuple(runs),
        finish_reason="stop",
        experts=_without_last(completion.experts, len(completion.token_ids) - count),
    )


def _without_last(experts: ExpertChoices | None, num: int) -> ExpertChoices | None:
    return experts if experts is None or not num else replace(experts, ids=experts.ids[:-num])


class Detokenizer:
    def __init__(self, folder: Path) -> None:
        from penstock.protocol.tokenizer_file import load_tokenizer  # noqa: PLC0415  (most workers never decode)

        path = folder / "tokenizer.json"
        self._tokenizer = load_tokenizer(path) if path.is_file() else None

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
