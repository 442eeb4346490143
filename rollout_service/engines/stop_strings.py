"""Where a stop string ends a completion: with the first token that completes it; pure.

Engines end a generation there, but not all, and not always: SGLang searches only as many tokens as its own spelling of the
string has, reports the limit of tokens first, and no engine sees a string that began before an update of the weights
interrupted the request. Tokens after the end are dropped here. What remains was sampled exactly as if the engine had
ended there, since a token depends on none after it.

A stop string is searched in the text with special tokens, so that the text of one, such as "<|im_end|>", can be given.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.protocol.expert_choices import ExpertChoices
from penstock.protocol.versions import VersionRun
from penstock.rollout_service.engines.completion import Completion

Decode = Callable[[Sequence[int]], str]  # of token ids, special tokens included


def first_end(token_ids: Sequence[int], stop: Sequence[str], decode: Decode) -> int | None:
    """Return the number of tokens up to the end of the first stop string; None when the text holds none."""

    def holds(count: int) -> bool:
        text = decode(token_ids[:count])
        return any(one in text for one in stop)

    count = len(token_ids)
    if not holds(count):
        return None
    if not holds(count - 1):  # the engine ended there
        return count
    return bisect_left(range(count), True, key=holds)


def ended_at(completion: Completion, count: int) -> Completion:
    """Return the first ``count`` tokens of a completion, which a stop string ends."""
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
