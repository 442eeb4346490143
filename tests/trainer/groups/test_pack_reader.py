"""What the reader of packs refuses: versions that were never published, other texts, and packs that killed trainers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.groups import make_group, make_trajectory
from tests.protocol.hostile_packs import honest

from penstock.protocol.errors import PackError, TextMismatch, UnpublishedVersion
from penstock.protocol.groups import BlobRef, FinishReason, ScoredGroup
from penstock.protocol.trajectory import Group
from penstock.protocol.versions import PolicyVersion, VersionRun
from penstock.trainer.groups.pack_reader import CompletionTexts, PackReader, ReadingMark


def test_a_pack_that_names_a_version_that_was_never_published_is_refused() -> None:
    """Every token's version must be one that workers can have served; the first other one is in the error."""
    good = honest()
    pack = BlobRef(key="runs/r/p", sha256=hashlib.sha256(good.data).hexdigest(), size_bytes=len(good.data))
    num = len(good.described.completion_tokens)
    scored = ScoredGroup(generated=good.described, rewards=(0.0,) * num, scorer="a")
    asked: list[set[PolicyVersion]] = []
    unpublished: set[PolicyVersion] = set()

    def never_published(versions: Iterable[PolicyVersion]) -> list[PolicyVersion]:
        asked.append(set(versions))
        return sorted(unpublished.intersection(asked[-1]))

    reader = PackReader(lambda _: good.data, never_published=never_published)
    (group,) = reader.read(pack, [scored], [good.promise])
    assert asked == [{run.version for row in group.trajectories for run in row.version_runs}]
    unpublished.add(max(asked[0]))
    with pytest.raises(UnpublishedVersion, match=rf"runs/r/p: group {group.group_id} names version {max(asked[0])}"):
        reader.read(pack, [scored], [good.promise])


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
    """Empty beside other texts, it would be scored as such; a group without any is of an engine that returns none."""
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


PACK = BlobRef(key="runs/r/groups/p.parquet", size_bytes=1, sha256="0" * 64)
OTHER = PACK.model_copy(update={"key": "runs/r/groups/q.parquet"})


def test_the_pack_that_two_trainers_were_killed_with_is_quarantined(tmp_path: Path):
    """Two sessions end with the mark set; the third knows that pack, and no other."""
    for _ in range(2):
        mark = ReadingMark(tmp_path)
        assert not mark.is_quarantined(PACK)
        with mark.cleared_unless_fatal():
            mark.set(OTHER)
        mark.set(PACK)
        mark.close()
    assert ReadingMark(tmp_path).is_quarantined(PACK)
    assert not ReadingMark(tmp_path).is_quarantined(OTHER)


def test_a_refused_pack_leaves_no_mark_and_a_bug_does(tmp_path: Path):
    """A PackError clears the mark; an exception that ends the trainer counts as a trainer that was killed."""
    for error in (PackError, PackError, PackError, ZeroDivisionError, ZeroDivisionError):
        mark = ReadingMark(tmp_path)
        assert not mark.is_quarantined(PACK)
        with pytest.raises(error):
            _read_with(mark, error)
    assert ReadingMark(tmp_path).is_quarantined(PACK)


def test_a_damaged_file_starts_the_count_anew(tmp_path: Path):
    """Counts that do not parse are a warning, not an error that ends the trainer."""
    for content in ("{", "[]", '{"a": "b"}'):
        (tmp_path / "readers_killed.json").write_text(content)
        assert not ReadingMark(tmp_path).is_quarantined(PACK)


def _read_with(mark: ReadingMark, error: type[Exception]) -> None:
    with mark.cleared_unless_fatal():
        mark.set(PACK)
        raise error
