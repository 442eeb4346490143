"""Updates in mid-generation through the worker's own client, asked of every engine."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
import pytest

from penstock.protocol.facts import Sampling
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.embedded_engine.http.text import Text
from penstock.rollout_service.engines.completion import Completion
from penstock.rollout_service.engines.sglang.client import SglangClient
from penstock.rollout_service.engines.update_mode import UpdateMode
from tests.contracts.engine_under_test import DEADLINE_S, EngineUnderTest
from tests.contracts.tiny_model import Dense, logprobs_by_version, logprobs_over_kept_cache, write_changed_copy

PROMPTS = [[5, 17, 88, 250, 31, 9], [44, 45], [7] * 40, [100, 101, 102, 103]]
NUM_SAMPLES = 4
SAMPLING = Sampling(max_new_tokens=3000, temperature=1.0, stop_token_ids=(3,))
TOLERANCE = 1e-5  # nats; float32 against float32
SPAN_SLACK = 2  # tokens: SGLang may attribute the step under way, when it stops in place, to either version


async def wait_until_generating(engine: EngineUnderTest) -> None:
    """Wait until samples run, so that an update meets them: SGLang runs the prompts alone before, one sequence each."""
    deadline = time.monotonic() + DEADLINE_S
    async with httpx.AsyncClient(timeout=60) as http:
        while True:
            [load] = (await http.get(f"{engine.url}/v1/loads")).json()["loads"]
            if load["num_running_reqs"] > len(PROMPTS):
                return
            assert time.monotonic() < deadline, "nothing was ever running"
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("mode", ["drain", "retract", "in_place", "abort"])
async def test_every_token_is_of_the_version_that_sampled_it(
    engine: EngineUnderTest, dense: Dense, tmp_path: Path, mode: UpdateMode
) -> None:
    """Completions are whole whatever was loaded meanwhile; tokens, logprobs, versions and text belong together."""
    folders = [write_changed_copy(engine.model, tmp_path / f"v{i}", seed=i) for i in (1, 2)]
    models = {0: dense, 1: Dense(folders[0]), 2: Dense(folders[1])}
    client = SglangClient(engine.url, request_deadline_s=DEADLINE_S)

    async def update_twice() -> None:
        await wait_until_generating(engine)
        for number, folder in enumerate(folders, start=1):
            await client.load_weights(folder, PolicyVersion(number), mode)

    groups, _ = await asyncio.gather(client.generate(PROMPTS, SAMPLING, NUM_SAMPLES), update_twice())
    [[after]] = await client.generate(PROMPTS[:1], SAMPLING, 1)
    await client.close()
    assert {run.version for run in after.version_runs} == {2}
    assert [len(group) for group in groups] == [NUM_SAMPLES] * len(PROMPTS)
    pairs = [(prompt, one) for prompt, group in zip(PROMPTS, groups, strict=True) for one in group]
    num_spanning = sum(len(one.version_runs) > 1 for _, one in pairs)
    assert (num_spanning == 0) if mode == "drain" else (num_spanning > 0)
    text = Text(engine.model)
    for prompt, one in pairs:
        check_versions(engine, models, prompt, one, mode)
        assert one.finish_reason == ("stop" if one.token_ids[-1] in (2, 3) else "length")
        visible = one.token_ids[:-1] if one.finish_reason == "stop" else one.token_ids
        assert [one.text] == text.decode([visible], skip_special_tokens=True)


def check_versions(
    engine: EngineUnderTest, models: dict[int, Dense], prompt: list[int], one: Completion, mode: UpdateMode
) -> None:
    """Recompute every token's logprob under the version that its run names."""
    runs = one.version_runs
    assert [run.version for run in runs] == sorted({run.version for run in runs})
    assert (runs[0].start, runs[-1].end) == (0, len(one.token_ids))
    if mode == "in_place" and engine.kind != "embedded":  # where exactly its cache turns is not told
        if runs[0].version != 0:  # its prompt may have been computed, for a sample beside it, before the update
            return
        end = max(0, runs[0].end - SPAN_SLACK) if len(runs) > 1 else runs[0].end
        expected = logprobs_by_version(models, prompt, one.token_ids[:end], [(0, 0, end)])
    else:
        recompute = logprobs_over_kept_cache if mode == "in_place" else logprobs_by_version
        expected = recompute(models, prompt, one.token_ids, runs)
    assert one.logprobs[: len(expected)] == pytest.approx(expected, abs=TOLERANCE)


async def test_a_server_that_was_left_paused_generates_again(engine: EngineUnderTest) -> None:
    """A worker that was killed between pause and update leaves nothing that the next one's first load does not mend."""
    engine.post("/pause_generation", {"mode": "retract"})
    client = SglangClient(engine.url, request_deadline_s=DEADLINE_S)
    await client.load_weights(engine.model, PolicyVersion(4))
    [[completion]] = await client.generate(PROMPTS[:1], Sampling(max_new_tokens=4), 1)
    await client.close()
    assert {run.version for run in completion.version_runs} == {4}
