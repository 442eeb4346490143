"""Versions as models: tags, scores that can be compared, selection, and cards."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.console import evaluation_results
from penstock.console.connections import NamedRun
from penstock.console.evaluation_results import DataFile, Estimate, EvaluationResult, SourceResult
from penstock.console.registry import exchange, versions
from penstock.console.registry.exchange import push_model
from penstock.console.registry.versions import Registry, Score, Tag, average_last, newest, set_tag
from penstock.console.tools.weights import NOT_KEPT
from penstock.protocol import seals
from penstock.protocol.errors import ConfigError, PenstockError


def row(version: int, *, best: int | None = None, head: bool = False) -> dict[str, Any]:
    kept = {**NOT_KEPT, "best": None if best is None else {"rank": best, "score": 0.5, "measure": "m"}}
    numbers = {"version": version, "step": version, "parent": version - 1}
    return {**numbers, "head": head, "kept": kept, "state_root": f"{version:064x}"}


def event(version: int, accuracy: float | None, *, split: str = "eval", prompts: int = 8) -> dict[str, Any]:
    return {
        "kind": "eval", "step": version, "version": version, "split": split, "accuracy": accuracy, "reward_mean": 0.5, "num_prompts": prompts,
        "num_samples": 4, "success": "r ≥ 1", "pass_at": {"1": accuracy, "4": 0.75},
    }  # fmt: skip


def result(version: int, value: float, *, k: int = 2, sha256: str = "a" * 64, complete: int = 10) -> EvaluationResult:
    estimate = Estimate(value, value - 0.1, value + 0.1, "wilson", complete)
    source = SourceResult(
        source="math", prompts=10, complete=complete, failed=10 - complete, accuracy=estimate, reward=estimate, pass_at={1: estimate, k: estimate}, maj=estimate,
    )  # fmt: skip
    return EvaluationResult(
        evaluation_id=f"v{version}", model=f"r@{version}", run="r", version=version, k=k, sampling={"temperature": 1.0}, sources=(source,),
        data=(DataFile(path="/x/math.jsonl", sha256=sha256, source="math"),), success="math ≥ 1", answer="boxed", finished_at=float(version),
    )  # fmt: skip


def test_a_tag_names_a_version_until_it_is_moved_or_removed(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    assert versions.read_tags(folder) == {}
    assert versions.store_tag(folder, "candidate", Tag(version=3, state_root="ab", note="good")) is None
    with pytest.raises(
        ConfigError, match="tag candidate of run r names version 3; to move it to version 4, add --move"
    ):
        versions.store_tag(folder, "candidate", Tag(version=4))
    assert versions.store_tag(folder, "candidate", Tag(version=4), move=True) == Tag(
        version=3, state_root="ab", note="good"
    )
    assert versions.read_tags(folder) == {"candidate": Tag(version=4)}
    assert versions.delete_tag(folder, "candidate").version == 4
    with pytest.raises(ConfigError, match="has no tag candidate; it has none"):
        versions.delete_tag(folder, "candidate")


@pytest.mark.parametrize("name", ["best", "head", "12", "", "a/b", "..", ".hidden", "a b", "x" * 65])
def test_a_tag_that_could_be_a_version_or_a_path_is_refused(name: str, tmp_path: Path) -> None:
    """RUN@12 stays version 12, and models/TAG stays in the run's folder."""
    with pytest.raises(ConfigError, match="expected 1 to 64"):
        versions.store_tag(tmp_path, name, Tag(version=1))


def test_damaged_tags_are_an_error_and_not_none(tmp_path: Path) -> None:
    """Writing a tag would otherwise lose all others."""
    (tmp_path / versions.FILE).write_text('{"tags": {"a": 3}}')
    with pytest.raises(ConfigError, match=r"tags.json cannot be read .*restore it"):
        versions.store_tag(tmp_path, "b", Tag(version=1))


def test_scores_are_named_by_source_and_metric() -> None:
    """Those of the run, and those of penstock eval, of which the newest of a version counts."""
    found = versions.scores_of_run(
        [event(4, 0.25), event(4, None, split="aime"), {"kind": "step", "version": 4}], [result(4, 0.5), result(4, 0.6)]
    )
    assert {name: one.value for name, one in found[4].items()} == {
        "eval.accuracy": 0.25, "eval.reward": 0.5, "eval.pass@1": 0.25, "eval.pass@4": 0.75, "aime.reward": 0.5, "aime.pass@4": 0.75,
        "eval:math.accuracy": 0.6, "eval:math.reward": 0.6, "eval:math.pass@1": 0.6, "eval:math.pass@2": 0.6, "eval:math.maj@2": 0.6,
    }  # fmt: skip


def test_the_stored_version_with_the_highest_score_is_selected() -> None:
    """Not one that is gone; of equal ones the newest; the least score is a condition."""
    found = versions.scores_of_run([event(2, 0.5), event(4, 0.5), event(6, 0.25), event(8, 0.9)], [])
    version, score = versions.best_version(found, [2, 4, 6], "eval.accuracy")
    assert (version, score.value) == (4, 0.5)
    assert versions.best_version(found, [2, 4, 6], "eval.accuracy", 0.5)[0] == 4
    for by, least, message in (
        ("eval.accuracy", 0.6, "no stored version reaches eval.accuracy = 0.6; the best is version 4 with 0.5"),
        ("aime.accuracy", None, "has the score aime.accuracy; scores of stored versions: eval.accuracy, eval.pass@1"),
    ):
        with pytest.raises(ConfigError, match=message):
            versions.best_version(found, [2, 4, 6], by, least)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (result(2, 0.5), result(4, 0.6, sha256="b" * 64)),
        (result(2, 0.5), result(4, 0.6, k=8)),
        (result(2, 0.5), result(4, 0.6, complete=7)),
    ],
    ids=["data", "samples", "incomplete"],
)
def test_scores_of_different_conditions_are_not_compared(one: EvaluationResult, other: EvaluationResult) -> None:
    """Other prompts, samples or failures: the higher number may be of the worse model."""
    found = versions.scores_of_run([], [one, other])
    with pytest.raises(
        ConfigError, match=r"different conditions and cannot be compared: version 2 with .*; version 4 with "
    ):
        versions.best_version(found, [2, 4], "eval:math.accuracy")
    assert versions.best_version(found, [4], "eval:math.accuracy")[0] == 4


def test_the_list_has_every_version_that_is_stored_tagged_or_scored(tmp_path: Path) -> None:
    """With its tags, the run's own among them; a tagged model that was written is found although its version is gone."""
    rows = [row(4, best=1), row(5, best=2), row(6, head=True)]
    (tmp_path / versions.MODELS / "old").mkdir(parents=True)
    tags = {"old": Tag(version=1), "new": Tag(version=6)}
    found = Registry("r", tmp_path, rows, {2: {"eval.accuracy": Score(0.25)}}, tags)
    listed = {one["version"]: (one["stored"], one["tags"], len(one["models"])) for one in found.listed()}
    assert listed == {
        1: (False, ["old"], 1), 2: (False, [], 0), 4: (True, ["best"], 0), 5: (True, [], 0), 6: (True, ["head", "new"], 0),
    }  # fmt: skip
    assert [found.version(name) for name in ("best", "head", "old", "5")] == [4, 6, 1, 5]
    with pytest.raises(ConfigError, match="has no version or tag newest; tags: new, old"):
        found.version("newest")


def test_the_newest_versions_are_averaged() -> None:
    assert newest([3, 1, 2], 2, "r") == [2, 3]
    with pytest.raises(ConfigError, match=r"run r has 2 stored versions \(1, 2\)"):
        newest([1, 2], 3, "r")
    with pytest.raises(ConfigError, match="a mean needs at least 2"):
        newest([1, 2], 1, "r")


def test_a_card_has_settings_curve_evaluations_and_digests(tmp_path: Path) -> None:
    """What was set, never a server or a key; the licence is left open; names cannot break the table."""
    home, data = tmp_path / "r", tmp_path / "train.jsonl"
    home.mkdir()
    data.write_text("x")
    settings = {
        "model": {"path": "/home/someone/start"}, "data": {"train": str(data), "eval": ["gone|.jsonl"]}, "algorithm": {"name": "grpo"}, "trainer": {"lr": 1e-6, "steps": 9},
        "nats": {"url": "nats://secret:4222"},
    }  # fmt: skip
    origins = {
        "model.path": "run.toml:1",
        "trainer.lr": "command line",
        "trainer.steps": "default",
        "nats.url": "run.toml:9",
    }
    seals.write(home / "config.json", json.dumps({"settings": settings, "origins": origins}))
    steps = [{"kind": "step", "step": step, "reward_mean": step / 100} for step in range(1, 31)]
    rows = [*steps, event(4, 0.25)]
    (home / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    folder = home / evaluation_results.FOLDER / "v4"
    folder.mkdir(parents=True)
    evaluation_results.write_result(folder, result(4, 0.5))
    text = exchange.model_card(home, 4, "f" * 64, versions.scores_of_run(rows, [result(4, 0.5)]))
    assert text.startswith("---\n# license: to be filled in\n")
    for line in (
        "# r, version 4",
        f"`{'f' * 64}`",
        "trainer.lr = 1e-06",
        'model.path = "start"',
        "# base_model: to be filled in; trained from start",
        "| eval.accuracy | 0.25 | 8 prompts, 4 samples, r ≥ 1 |",
        "| math | 10 of 10 | 0.500 [0.400, 0.600] | 50.0% [40.0, 60.0] |",
        "| training reward | 0.01 |",
        "| 0.3 |",
        f"| training | train.jsonl | `{hashlib.sha256(b'x').hexdigest()}` |",
        "| held out | gone\\|.jsonl | not on this machine |",
        f"| evaluation | math.jsonl | `{'a' * 64}` |",
    ):
        assert line in text
    assert not any(hidden in text for hidden in ("trainer.steps", "secret", "someone"))


def test_no_folder_is_overwritten_by_an_average(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists; name another folder"):
        average_last(NamedRun("r", []), 2, tmp_path)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("other", "no run other"),
        ("other@3", "no run other"),
        ("r@9", "run r has no version 9"),
        ("r", "run r has no final model yet"),
    ],
)
def test_a_model_that_is_not_there_is_not_pushed(
    target: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run, its versions and its final model are looked for before the hub is asked."""
    home = tmp_path / "r"
    home.mkdir()
    (home / "config.json").write_text('{"settings": {}}')
    known = Registry("r", home, [row(3)], {}, {})
    monkeypatch.setattr(Registry, "read", classmethod(lambda *_: known))
    with pytest.raises(PenstockError, match=message):
        push_model(target, "o/m", [f"run.dir={tmp_path}"], private=True, revision=None)


def test_a_tag_names_a_stored_version_and_moves_only_without_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions.store_tag(tmp_path, "kept", Tag(version=3))
    (tmp_path / versions.MODELS / "kept").mkdir(parents=True)
    known = Registry("r", tmp_path, [row(3), row(4)], {}, versions.read_tags(tmp_path))
    monkeypatch.setattr(Registry, "read", classmethod(lambda *_: known))
    with pytest.raises(ConfigError, match="has no version 5 in the object store"):
        set_tag(NamedRun("r", []), "5", "new")
    with pytest.raises(ConfigError, match="holds version 3; remove it before the tag is moved"):
        set_tag(NamedRun("r", []), "4", "kept", move=True)
    assert versions.read_tags(tmp_path) == {"kept": Tag(version=3)}


@pytest.mark.parametrize("text", [None, "{", '{"origins": {}}', '{"settings": []}'])
def test_a_card_needs_the_folder_of_a_run(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="has no settings of a run"):
        exchange.model_card(tmp_path, None, "", {})
