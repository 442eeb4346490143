"""Which tasks a model can do: pure rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.groups import make_task

from penstock.protocol.groups import ImageRef, RowImages, Task
from penstock.rollout_service.checks.check_task import ModelLimits, check_task
from penstock.rollout_service.errors import TaskRefused, WeightsUnusable

LIMITS = ModelLimits(vocab_size=100, context_tokens=20)


def check(task: Task, limits: ModelLimits = LIMITS) -> None:
    check_task(task, limits=limits, split="train", environments=("single_turn", "played"))


def test_a_task_that_just_fits_is_accepted():
    """The last token id and the last place of the context may be used."""
    check(make_task(prompt_ids=[99] * 4, max_new_tokens=16))


def changed(**changes: Any) -> Task:
    return make_task().model_copy(update=changes)


def sampled(**changes: Any) -> Task:
    return changed(sampling=make_task().sampling.model_copy(update=changes))


IMAGE = ImageRef(position=0, num_tokens=1, grid_thw=(1, 2, 2), sha256="b" * 64, size_bytes=9)


@pytest.mark.parametrize(
    ("reason", "task"),
    [
        ("token_out_of_range", make_task(prompt_ids=[100])),
        ("too_long", make_task(prompt_ids=[5] * 5, max_new_tokens=16)),
        ("wrong_split", make_task(split="eval")),
        ("inexact_sampling", make_task(temperature=0.0)),
        ("unknown_environment", changed(environment="maze")),
        ("images_refused", changed(environment="played", images=RowImages(processor="a" * 64, refs=(IMAGE,)))),
        ("redundancy_refused", changed(environment="played", redundant_completions=1)),
        ("inexact_sampling", sampled(top_p=0.9)),
        ("inexact_sampling", sampled(top_k=50)),
    ],
)
def test_a_hopeless_task_is_refused_with_its_reason(reason: str, task: Task):
    """The reason is one word for the dead letter; the text names the group."""
    with pytest.raises(TaskRefused, match=task.group_id) as refusal:
        check(task)
    assert refusal.value.reason == reason


def test_evaluation_may_be_greedy():
    """Only training tasks must sample from the whole distribution."""
    task = make_task(split="eval", temperature=0.0)
    check_task(task, limits=LIMITS, split="eval", environments=("single_turn",))


def test_an_evaluation_keeps_every_completion():
    """The first that end are the short ones: a mean over them would be of another policy."""
    task = make_task(split="eval").model_copy(update={"redundant_completions": 2})
    with pytest.raises(TaskRefused, match="2 redundant completions in a task of eval") as refusal:
        check_task(task, limits=LIMITS, split="eval", environments=("single_turn",))
    assert refusal.value.reason == "redundancy_refused"


def test_limits_that_a_config_does_not_name_are_not_checked():
    """Without a vocabulary or context in ``config.json`` the engine decides."""
    check(make_task(prompt_ids=[10**6], max_new_tokens=10**6), ModelLimits(None, None))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"vocab_size": 7, "max_position_embeddings": 9}, ModelLimits(7, 9)),
        ({"text_config": {"vocab_size": 7}}, ModelLimits(7, None)),
        ({}, ModelLimits(None, None)),
    ],
)
def test_limits_are_read_from_the_config(tmp_path: Path, config: dict[str, Any], expected: ModelLimits):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelLimits.of(tmp_path) == expected


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_a_config_that_is_none_is_named(tmp_path: Path, content: str):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(WeightsUnusable, match=r"config\.json is not a model's config"):
        ModelLimits.of(tmp_path)
