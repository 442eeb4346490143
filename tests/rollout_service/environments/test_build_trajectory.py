"""Engine reply → completion → trajectory → group, as pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.groups import make_task

from penstock.protocol.packs import group_pack
from penstock.protocol.versions import PolicyVersion, VersionRun
from penstock.rollout_service.engines.completion import Completion, read_version
from penstock.rollout_service.engines.sglang.messages import read_completion
from penstock.rollout_service.environments.environment import build_group, build_trajectory
from penstock.rollout_service.errors import EngineAborted, ReplyRefused

Row = dict[str, Any]

tokens = st.integers(0, 2**31 - 1)
logprobs = st.floats(-104, 0, width=32)


@st.composite
def replies(draw: st.DrawFn) -> tuple[list[int], Row]:
    """A prompt and a valid reply to it, with any number of versions in the middle of it."""
    prompt = draw(st.lists(tokens, min_size=1, max_size=20))
    sampled = draw(st.lists(st.tuples(logprobs, tokens), min_size=1, max_size=40))
    cuts = sorted(draw(st.lists(st.integers(0, len(sampled)), max_size=4)))
    edges = [0, *cuts, len(sampled)]
    versions = draw(st.lists(st.integers(0, 10**9), min_size=len(edges), max_size=len(edges)))
    finish = draw(st.sampled_from([{"type": "stop", "matched": 2}, {"type": "length", "length": len(sampled)}]))
    meta = {
        "id": "r",
        "finish_reason": finish,
        "prompt_tokens": len(prompt),
        "output_token_logprobs": [[value, token, None] for value, token in sampled],
        "weight_versions": [
            {"version": str(version), "start": start, "end": end}
            for version, start, end in zip(versions, edges, edges[1:], strict=False)
        ],
    }
    return prompt, {"text": draw(st.text(max_size=20)), "output_ids": [t for _, t in sampled], "meta_info": meta}


def read(row: Row, num_prompt_tokens: int = 2, max_new_tokens: int = 64) -> Completion:
    return read_completion(row, num_prompt_tokens=num_prompt_tokens, max_new_tokens=max_new_tokens)


@given(replies())
def test_every_token_keeps_its_id_logprob_and_version(reply: tuple[list[int], Row]):
    """A trajectory is the prompt, then the completion token for token, with the values that the engine reported."""
    prompt, row = reply
    trajectory = build_trajectory(prompt, read(row, len(prompt)))
    said = row["meta_info"]["output_token_logprobs"]
    start = len(prompt)
    assert trajectory.token_ids.tolist() == prompt + row["output_ids"]
    assert trajectory.loss_mask.tolist() == [False] * start + [True] * len(said)
    assert trajectory.behaviour_logprobs.tolist() == [0.0] * start + [value for value, _, _ in said]
    versions = [run.version for run in trajectory.version_runs for _ in range(run.start, run.end)]
    spans = row["meta_info"]["weight_versions"]
    assert versions == [int(s["version"]) for s in spans for _ in range(s["start"], s["end"])]
    assert trajectory.version_runs[0].start == start
    assert trajectory.finish_reason == row["meta_info"]["finish_reason"]["type"]
    assert trajectory.completion_text == row["text"]


@given(replies())
def test_a_built_trajectory_round_trips_through_its_pack(reply: tuple[list[int], Row]):
    """A group encoded as Parquet and decoded again is the same, token for token."""
    prompt, row = reply
    task = make_task(prompt_ids=prompt, group_size=2)
    group = build_group(task, [build_trajectory(prompt, read(row, len(prompt)))] * 2)
    [decoded] = group_pack.decode(group_pack.encode([group]))
    assert decoded.group_id == task.group_id
    for before, after in zip(group.trajectories, decoded.trajectories, strict=True):
        np.testing.assert_array_equal(before.token_ids, after.token_ids)
        np.testing.assert_array_equal(before.behaviour_logprobs, after.behaviour_logprobs)
        assert before.version_runs == after.version_runs


@given(st.text(max_size=6) | st.none() | st.integers() | st.lists(st.integers(), max_size=2))
def test_only_decimal_labels_are_versions(label: object):
    """Any label but a decimal number is not a Penstock version, nor is the engine's default."""
    version = read_version(label)
    if version is not None:
        assert isinstance(label, str)
        assert int(label) == version
    assert read_version("default") is None
    assert read_version("12") == 12


def good_row() -> Row:
    """Three tokens sampled by version 4 after a prompt of two."""
    return {
        "text": "abc",
        "output_ids": [7, 8, 2],
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": 2},
            "prompt_tokens": 2,
            "output_token_logprobs": [[-0.1, 7, None], [-0.2, 8, None], [-0.3, 2, None]],
            "weight_versions": [{"version": "4", "start": 0, "end": 3}],
        },
    }


def test_a_valid_row_is_read():
    assert read(good_row()) == Completion(
        [7, 8, 2], [-0.1, -0.2, -0.3], (VersionRun(PolicyVersion(4), 0, 3),), "stop", "abc"
    )


def meta(row: Row) -> Row:
    return row["meta_info"]


@pytest.mark.parametrize(
    ("words", "spoil"),
    [
        ("SGLang's form", lambda row: row.pop("meta_info")),
        ("SGLang's form", lambda row: row.pop("output_ids")),
        ("SGLang's form", lambda row: meta(row).pop("output_token_logprobs")),
        ("SGLang's form", lambda row: meta(row).update(output_token_logprobs=[1, 2, 3])),
        ("SGLang's form", lambda row: meta(row).update(finish_reason=None)),
        ("SGLang's form", lambda row: meta(row).update(weight_versions=[{"version": "4"}])),
        ("unknown finish reason", lambda row: meta(row).update(finish_reason={"type": "tired"})),
        ("prompt of 9 tokens", lambda row: meta(row).update(prompt_tokens=9)),
        ("0 completion tokens", lambda row: row.update(output_ids=[])),
        ("of other tokens", lambda row: row.update(output_ids=[7, 8])),
        ("of other tokens", lambda row: row.update(output_ids=[7, 9, 2])),
        ("of other tokens", lambda row: meta(row)["output_token_logprobs"].pop()),
        ("not finite", lambda row: meta(row)["output_token_logprobs"][1].__setitem__(0, math.nan)),
        ("not finite", lambda row: meta(row)["output_token_logprobs"][1].__setitem__(0, -math.inf)),
        ("above 0", lambda row: meta(row)["output_token_logprobs"][1].__setitem__(0, 0.5)),
        ("is never drawn", lambda row: meta(row)["output_token_logprobs"][1].__setitem__(0, -104.5)),
        ("missing", lambda row: meta(row)["output_token_logprobs"][1].__setitem__(0, None)),
        ("--skip-tokenizer-init", lambda row: row.pop("text")),
        ("unknown version default", lambda row: meta(row)["weight_versions"][0].update(version="default")),
        ("cover 0 of 3", lambda row: meta(row).pop("weight_versions")),
        ("cover 2 of 3", lambda row: meta(row)["weight_versions"][0].update(end=2)),
        ("cover 4 of 3", lambda row: meta(row)["weight_versions"][0].update(end=4)),
        ("gap or overlap", lambda row: meta(row)["weight_versions"][0].update(start=1)),
        ("gap or overlap", lambda row: meta(row)["weight_versions"].append({"version": "5", "start": 2, "end": 3})),
        ("gap or overlap", lambda row: meta(row)["weight_versions"][0].update(end="3")),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(words: str, spoil: Callable[[Row], object]):
    row = good_row()
    spoil(row)
    with pytest.raises(ReplyRefused, match=words):
        read(row)


@pytest.mark.parametrize("ids", [["7", 8, 2], [True, 8, 2], [-1, 8, 2]])
def test_token_ids_are_numbers(ids: list[Any]):
    """Texts, booleans and negative numbers are not token ids, even when the log-probabilities name the same."""
    row = good_row()
    row["output_ids"] = ids
    meta(row)["output_token_logprobs"] = [[-0.1, token, None] for token in ids]
    with pytest.raises(ReplyRefused, match="not token ids"):
        read(row)


def test_what_is_no_data_is_an_error():
    """More tokens than were asked for, and a sample that the engine aborted."""
    row = good_row()
    with pytest.raises(ReplyRefused, match="3 completion tokens, expected 1 to 2"):
        read(row, max_new_tokens=2)
    meta(row)["finish_reason"] = {"type": "abort", "message": "out of memory"}
    with pytest.raises(EngineAborted, match="out of memory"):
        read(row)
