"""The order of an engine's update calls, and the result of generations in progress."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rollout_service.engines.faulty_engine import FaultyEngine

from penstock.protocol.groups import Sampling
from penstock.protocol.versions import PolicyVersion, VersionRun
from penstock.rollout_service.engines.completion import Completion, Resumption
from penstock.rollout_service.engines.embedded import EMBEDDED
from penstock.rollout_service.engines.engine_client import LONG_TOKENS, UpdateMode, mode_of
from penstock.rollout_service.engines.sglang.client import SglangClient
from penstock.rollout_service.engines.sglang.kind import SGLANG, SGLANG_URL
from penstock.rollout_service.engines.vllm.kind import VLLM, VLLM_URL
from penstock.rollout_service.errors import EngineAborted, EngineMisconfigured, WeightsNotApplied

V1, V2 = PolicyVersion(1), PolicyVersion(2)
SAMPLING = Sampling(max_new_tokens=9, stop_token_ids=(2,))


@pytest.fixture
async def client(faulty_engine: FaultyEngine) -> AsyncIterator[SglangClient]:
    """A client of an engine without faults until a test sets one."""
    faulty_engine.version = "0"
    client = SglangClient(faulty_engine.url)
    yield client
    await client.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model, without a tokenizer."""
    (tmp_path / "model.safetensors").touch()
    return tmp_path


def cut(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A reply whose first completion was ended after two tokens, and whose second had not begun."""
    if rows[0]["meta_info"]["weight_version"] != "0":
        return rows
    for row, length in zip(rows, (2, 0), strict=False):
        meta = row["meta_info"]
        row["output_ids"] = row["output_ids"][:length]
        meta["finish_reason"] = {"type": "abort", "message": "aborted", "status_code": None}
        meta["output_token_logprobs"] = meta["output_token_logprobs"][:length]
        meta["weight_versions"] = [{"version": meta["weight_version"], "start": 0, "end": length}]
        if length == 0:
            del meta["output_token_logprobs"], meta["prompt_tokens"]
    return rows


@pytest.mark.parametrize(
    ("wanted", "serving", "version", "longest", "long_mode", "chosen"),
    [
        ("retract", V1, V2, 8, "retract", "retract"),
        ("retract", V2, V1, 8, "retract", "drain"),  # no training generation continues with an older version
        ("in_place", V1, V1, 8, "retract", "drain"),
        ("abort", None, V1, 8, "retract", "drain"),  # the first load interrupts nothing
        ("auto", V1, V2, LONG_TOKENS, "in_place", "drain"),
        ("auto", V1, V2, LONG_TOKENS + 1, "in_place", "in_place"),
        ("auto", V1, V2, 32_768, "retract", "retract"),
        ("auto", V1, V2, 32_768, "drain", "drain"),
        ("auto", V2, V1, 32_768, "retract", "drain"),
    ],
)
def test_an_update_waits_for_short_completions_and_before_an_older_version(
    wanted: UpdateMode, serving: PolicyVersion, version: PolicyVersion, longest: int, long_mode: UpdateMode, chosen: str
) -> None:
    assert mode_of(wanted, serving, version, longest=longest, long_mode=long_mode) == chosen


def test_only_an_engine_whose_tokens_stay_exact_is_updated_in_place_by_default() -> None:
    """SGLang's scheduler may still compute a step while weights are written in place (docs/sglang.md)."""
    assert {kind.name: kind.long_mode for kind in (EMBEDDED, SGLANG, SGLANG_URL, VLLM, VLLM_URL)} == {
        "embedded": "in_place", "sglang": "retract", "sglang-url": "retract", "vllm": "retract", "vllm-url": "retract",
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
async def test_an_engine_computes_on_only_once_its_version_is_confirmed(
    faulty_engine: FaultyEngine, client: SglangClient, model: Path, mode: UpdateMode
):
    faulty_engine.refuse_loads = 1
    with pytest.raises(WeightsNotApplied):
        await client.load_weights(model, V1, mode)
    assert faulty_engine.pauses == [mode]
    await client.load_weights(model, V1, mode)
    assert faulty_engine.pauses == [mode, mode, "continue"]


async def test_a_draining_update_ends_a_pause_only_where_there_may_be_one(
    faulty_engine: FaultyEngine, client: SglangClient, model: Path
):
    """The first does, since an earlier worker may have been killed; so does one after a failure while paused."""
    await client.load_weights(model, V1)
    await client.load_weights(model, V2)
    assert faulty_engine.pauses == ["continue"]
    faulty_engine.refuse_loads = 1
    with pytest.raises(WeightsNotApplied):
        await client.load_weights(model, V1, "retract")
    await client.load_weights(model, V1)
    await client.load_weights(model, V2)
    assert faulty_engine.pauses == ["continue", "retract", "continue"]


async def test_the_answer_to_an_update_is_used_before_another_request(
    faulty_engine: FaultyEngine, client: SglangClient, model: Path
):
    """A version in it must be the requested one; a checksum in it is the engine's, until the next update."""
    ranks = [{"parallelism_info": {"tp_size": 1}}]
    faulty_engine.says = {"weight_version": "1", "ranks": ranks, "per_engine_checksum": "abc"}
    faulty_engine.lose_loads = 1  # its model_info would say 0
    await client.load_weights(model, V1)
    said = await client.weights_checksum()
    assert said is not None
    assert said.value == "abc"
    with pytest.raises(WeightsNotApplied, match="loaded version 2, but its answer names 1"):
        await client.load_weights(model, V2)
    assert await client.weights_checksum() is None  # what it serves is unknown, and this engine reports no checksum


async def test_prefixes_of_versions_are_separate_without_a_flush(
    faulty_engine: FaultyEngine, client: SglangClient, model: Path
):
    """In place, requests name the version as their cache's key; after a load that flushes, they need none."""
    loads: list[tuple[PolicyVersion, UpdateMode]] = [(V1, "in_place"), (V2, "in_place"), (V1, "drain")]
    for version, mode in loads:
        await client.load_weights(model, version, mode)
        await client.generate([[5]], SAMPLING, 1)
    assert [body.get("extra_key") for body in faulty_engine.requests] == ["1", "2", None]
    assert [flush for _, _, flush in faulty_engine.flushes] == [False, False, True]


async def test_an_interrupted_completion_is_resumed_from_its_prefix(
    faulty_engine: FaultyEngine, client: SglangClient, model: Path
):
    """Each with its own prefix and remaining token limit; the parts are returned as one completion of two versions."""
    faulty_engine.rewrite = cut
    faulty_engine.flow.clear()
    generating = asyncio.create_task(client.generate([[5, 6], [7]], SAMPLING, 1))
    await asyncio.to_thread(faulty_engine.wait_for_requests, 1)
    swapping = asyncio.create_task(client.load_weights(model, V1, "abort"))
    await asyncio.to_thread(faulty_engine.wait_for_pauses, 1)
    faulty_engine.texts = False
    faulty_engine.flow.set()
    await swapping
    [[one], [other]] = await generating
    again = faulty_engine.requests[1]
    assert again["input_ids"] == [[5, 6, *one.token_ids[:2]], [7]]
    assert [params["max_new_tokens"] for params in again["sampling_params"]] == [7, 9]
    assert one.version_runs == (VersionRun(PolicyVersion(0), 0, 2), VersionRun(V1, 2, len(one.token_ids)))
    assert other.version_runs == (VersionRun(V1, 0, len(other.token_ids)),)
    assert len(one.logprobs) == len(one.token_ids)


async def test_an_abort_by_another_client_fails_the_request(faulty_engine: FaultyEngine, client: SglangClient):
    faulty_engine.rewrite = cut
    with pytest.raises(EngineAborted):
        await client.generate([[5, 6]], SAMPLING, 1)


TOKENS = st.lists(st.tuples(st.integers(0, 300), st.floats(-20, 0)), max_size=6)


@given(parts=st.lists(st.tuples(TOKENS, st.integers(0, 3)), min_size=1, max_size=6), stopped=st.booleans())
def test_parts_are_joined_without_loss(parts: list[tuple[list[tuple[int, float]], int]], stopped: bool):
    """For any cuts: tokens and logprobs are in order, runs have no gap, each token has its part's version."""
    finishes = ["abort"] * (len(parts) - 1) + ["stop" if stopped else "length"]
    sequence = Resumption([1, 2], max_new_tokens=100)
    for (sampled, version), finish in zip(parts, finishes, strict=True):
        runs = (VersionRun(PolicyVersion(version), 0, len(sampled)),) if sampled else ()
        ids, logprobs = [token for token, _ in sampled], [logprob for _, logprob in sampled]
        sequence.parts.append(Completion(ids, logprobs, runs, finish, ""))  # pyright: ignore[reportArgumentType]
        assert sequence.is_cut == (finish == "abort")
    joined = sequence.joined("text")
    flat = [(token, logprob, version) for sampled, version in parts for token, logprob in sampled]
    versions = [run.version for run in joined.version_runs for _ in range(run.start, run.end)]
    assert [*zip(joined.token_ids, joined.logprobs, versions, strict=True)] == flat
    for before, after in itertools.pairwise(joined.version_runs):
        assert before.end == after.start
        assert before.version != after.version
    assert joined.finish_reason == finishes[-1]
    assert sequence.num_left == 100 - len(flat)


def test_a_part_that_was_cut_at_its_last_token_ended_by_length():
    sequence = Resumption([1], max_new_tokens=2)
    sequence.parts.append(Completion([3, 4], [-1.0, -1.0], (VersionRun(V1, 0, 2),), "abort", ""))
    assert not sequence.is_cut
    assert sequence.joined("").finish_reason == "length"


async def test_text_that_cannot_be_decoded_as_a_whole_is_never_strung_together(
    faulty_engine: FaultyEngine, client: SglangClient, model: Path
):
    """Weights without a tokenizer, an engine that has one: the worker ends and says which mode needs none."""
    faulty_engine.rewrite = cut
    faulty_engine.flow.clear()
    generating = asyncio.create_task(client.generate([[5, 6]], SAMPLING, 1))
    await asyncio.to_thread(faulty_engine.wait_for_requests, 1)
    swapping = asyncio.create_task(client.load_weights(model, V1, "abort"))
    await asyncio.to_thread(faulty_engine.wait_for_pauses, 1)
    faulty_engine.flow.set()
    await swapping
    with pytest.raises(EngineMisconfigured, match="'abort' needs a tokenizer"):
        await generating
