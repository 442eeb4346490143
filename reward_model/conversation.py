"""Build a reward model's input: prompt and completion as one text, plain or by its chat template; pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock.reward_service.endpoints.wire import GroupToScore

Form = Literal["chat", "plain"]
Messages = list[dict[str, str]]
Render = Callable[[Messages], str]


class Unusable(ValueError):
    """A row lacks a column that the model needs, or it has another type; the message names it."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The format of the texts.

    Attributes:
        form: ``chat`` renders messages with the model's template, ``plain`` joins prompt and completion.
        render: the model's chat template; not used for ``plain``.
        prompt_column: column of the row that holds the question, as a text or as messages. Empty for the prompt that
            the policy saw, which is already rendered with the policy's own template.
    """

    form: Form
    render: Render
    prompt_column: str = ""

    def texts(self, group: GroupToScore) -> list[str]:
        """Return one text for every completion; raises Unusable."""
        asked = self._asked(group)
        if self.form == "plain":
            if not isinstance(asked, str):
                raise Unusable(
                    f"column {self.prompt_column!r} holds messages, which --form plain cannot join; use --form chat"
                )
            return [asked + text for text in group.completions]
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        return [self.render([*messages, {"role": "assistant", "content": text}]) for text in group.completions]

    def _asked(self, group: GroupToScore) -> str | Messages:
        if not self.prompt_column:
            return group.prompt
        row = group.extra_info if isinstance(group.extra_info, dict) else {}
        if self.prompt_column not in row:
            there = ", ".join(sorted(row)) or "none"
            raise Unusable(f"the row has no column {self.prompt_column!r}; its columns are {there}")
        found = row[self.prompt_column]
        if isinstance(found, str):
            return found
        if isinstance(found, list) and found and all(_is_message(item) for item in found):
            return [{"role": str(item["role"]), "content": str(item["content"])} for item in found]  # type: ignore[index,call-overload]
        raise Unusable(f"column {self.prompt_column!r} holds neither a text nor messages with role and content")


def _is_message(item: Any) -> bool:
    return isinstance(item, Mapping) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str)


def batches(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Return indices grouped into batches, longest first, with at most ``max_tokens`` per batch, padding included.

    A text longer than ``max_tokens`` is a batch by itself.
    """
    found: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        widest = lengths[found[-1][0]] if found else 0
        if found and (len(found[-1]) + 1) * widest <= max_tokens:
            found[-1].append(place)
        else:
            found.append([place])
    return found
