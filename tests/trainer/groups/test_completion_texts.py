"""The text that was scored is that of the tokens to train on, whatever an engine may do to spaces and cut characters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.groups import make_group, make_trajectory

from penstock.protocol.errors import TextMismatch
from penstock.protocol.groups import FinishReason
from penstock.protocol.trajectory import Group
from penstock.protocol.versions import PolicyVersion, VersionRun
from penstock.trainer.groups.pack_reader import CompletionTexts

_END = 0
_WORDS = {_END: "<end>", 1: " forty", 2: "-two", 3: " cats", 4: "\ufffd", 5: "é", 6: "."}


def decode(rows: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
    return ["".join(_WORDS[i] for i in row if i != _END or not skip_special_tokens) for row in rows]


def group(text: str, *tokens: int, finish: FinishReason = "stop", cut: bool = False) -> Group:
    """A group of one trajectory with these sampled tokens; ``cut``: an update came after the first."""
    row = make_trajectory(completion_ids=tokens, finish_reason=finish, text=text)
    if cut:
        [(_, start, end)] = row.version_runs
        later = VersionRun(PolicyVersion(1), start + 1, end)
        row = replace(row, version_runs=(VersionRun(PolicyVersion(0), start, start + 1), later))
    return replace(make_group(size=1), trajectories=(row,))


@pytest.mark.parametrize(
    "honest",
    [
        group("", 1, 2),
        group("forty-two", 1, 2, _END),
        group("forty-two<end>", 1, 2, _END),
        group("forty-two cats", 1, 2, 3),
        group("forty-two", 1, 2, 3),
        group(" forty -two", 1, 2, finish="length"),
        group("forty", 1, 4, finish="length"),
        group("forty\ufffd", 1, 5, 4, finish="length"),
        group("forty\ufffdcats", 1, 5, 3, finish="length", cut=True),
    ],
)
def test_texts_of_engines_are_accepted(honest: Group) -> None:
    """Without the stop token or with it, other spaces, a last character that is not complete, one cut by an update."""
    CompletionTexts(decode, rows=1).check([honest])


@pytest.mark.parametrize(
    "hostile",
    [
        group("42", 1, 2, finish="length"),
        group("forty", 1, 2, finish="length"),
        group("forty-two.", 1, 2, finish="length"),
        group("é", 1, finish="length"),
        group("\ufffdtwo", 1, 5, finish="length"),
        group("two", 1, 5, finish="length", cut=True),
    ],
)
def test_another_text_is_refused(hostile: Group) -> None:
    """More, less or another text than the tokens say, also beside cut characters; the error names what was scored."""
    with pytest.raises(TextMismatch, match=r"group e0\.p0\.a0: completion 0 was scored as"):
        CompletionTexts(decode, rows=1).check([group("forty", 1, finish="length"), hostile])


def test_a_missing_text_is_refused_where_others_have_one() -> None:
    """Empty beside other texts, it would be scored as such; a group without any text is of an engine that returns none."""
    [right] = group("forty", 1, finish="length").trajectories
    [missing] = group("", 2, finish="length").trajectories
    [silent] = group("", _END).trajectories
    CompletionTexts(decode, rows=None).check([replace(make_group(), trajectories=(right, silent))])
    CompletionTexts(decode, rows=None).check([replace(make_group(), trajectories=(missing, missing))])
    with pytest.raises(TextMismatch, match="completion 1 was scored as '', and its tokens say '-two'"):
        CompletionTexts(decode, rows=None).check([replace(make_group(), trajectories=(right, missing))])


def test_any_completion_of_a_group_may_be_decoded() -> None:
    """A group with one wrong text among four is found in time, and at once where all are decoded."""
    [wrong] = group("two", 1, finish="length").trajectories
    [right] = group("forty", 1, finish="length").trajectories
    mixed = replace(make_group(), trajectories=(right, right, wrong, right))
    with pytest.raises(TextMismatch, match="completion 2 was scored as 'two'"):
        CompletionTexts(decode, rows=None).check([mixed])
    with pytest.raises(TextMismatch):
        CompletionTexts(decode, rows=1).check([mixed] * 200)
