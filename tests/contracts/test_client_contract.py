"""The contract of every `EngineClient` with the worker, tested against each engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from penstock.protocol.groups import Sampling
from penstock.protocol.versions import PolicyVersion, VersionRun
from penstock.rollout_service.checks.check_task import ModelLimits
from penstock.rollout_service.engines.completion import Completion
from penstock.rollout_service.engines.engine_client import EngineClient, ReleasesMemory, UpdateMode, able_to_abandon
from penstock.rollout_service.engines.redundancy import Redundancy
from penstock.rollout_service.engines.stop_strings import Detokenizer
from penstock.rollout_service.errors import EngineRefused, TaskRefused, WeightsNotApplied, WeightsUnverified
from tests.contracts.engine_under_test import DEADLINE_S
from tests.contracts.servers_under_test import KINDS, ServerUnderTest, running_server
from tests.contracts.tiny_model import Adapter, Dense, logprobs_by_version, logprobs_over_kept_cache, write_changed_copy

PROMPTS = [[5, 17, 88, 250, 31, 9], [44, 45], [7] * 40, [100, 101, 102, 103]]
NUM_SAMPLES = 4
SAMPLING = Sampling(max_new_tokens=3000, temperature=1.0, stop_token_ids=(3,))
GREEDY = Sampling(max_new_tokens=12, temperature=0.0)
V0, V1, V2, V3 = map(PolicyVersion, range(4))
TOLERANCE = 1e-5  # nats; float32 against float32
SPAN_SLACK = 2  # tokens: SGLang may attribute the running step, when it stops in place, to either version


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    with running_server(request.param, tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture(scope="module")
def dense(server: ServerUnderTest) -> Dense:
    """What the server's first weights compute."""
    return Dense(server.model)


@pytest.fixture
def a_model(server: ServerUnderTest) -> None:
    if not server.computes:
        pytest.skip("the simulated engine's tokens are of no model; what it does with requests is tested")


@pytest.fixture
async def client(server: ServerUnderTest) -> AsyncIterator[EngineClient]:
    """A client of a server that serves its first weights as version 0, without adapters."""
    client = server.connect()
    client.limits = ModelLimits.of(server.model)
    await client.drop_adapters()
    await client.load_weights(server.model, V0)
    yield client
    await client.close()


async def wait_until_generating(client: EngineClient) -> None:
    """Wait until samples run, so that an update interrupts them: SGLang first runs the prompts alone."""
    deadline = time.monotonic() + DEADLINE_S
    while (await client.metrics()).get("engine_running", 0) <= len(PROMPTS):
        assert time.monotonic() < deadline, "no sample was ever running"
        await asyncio.sleep(0.005)


async def test_a_server_as_the_worker_starts_it_has_no_objections(client: EngineClient) -> None:
    """The probe reports no problem, and the engine can load adapters if it reports that."""
    report = await client.inspect()
    assert report.objections == []
    await client.health()


@pytest.mark.usefixtures("a_model")
async def test_greedy_completions_are_those_of_the_dense_forward(client: EngineClient, dense: Dense) -> None:
    """Tokens, log-probabilities, version, finish reason and text of every sample, in the order of the prompts."""
    text = Detokenizer(dense.folder)
    groups = await client.generate(PROMPTS, GREEDY, 2)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        expected = dense.greedy(prompt, GREEDY.max_new_tokens)
        expected = expected[: expected.index(2) + 1] if 2 in expected else expected
        for one in group:
            assert one.token_ids == expected
            assert one.version_runs == (VersionRun(V0, 0, len(expected)),)
            assert one.finish_reason == ("stop" if expected[-1] == 2 else "length")
            assert one.text == text.decode([token for token in expected if token != 2])


@pytest.mark.usefixtures("a_model")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_the_sampled_distribution(
    client: EngineClient, dense: Dense, temperature: float
) -> None:
    """Each log-probability is log softmax(logits / temperature) of the dense forward, and samples differ."""
    groups = await client.generate(PROMPTS, Sampling(max_new_tokens=40, temperature=temperature), NUM_SAMPLES)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for one in group:
            expected = dense.of_completion(prompt, one.token_ids, temperature)
            assert one.logprobs == pytest.approx(expected, abs=TOLERANCE)
        assert len({tuple(one.token_ids) for one in group}) > 1


@pytest.mark.usefixtures("a_model")
async def test_a_stop_string_ends_a_completion_and_is_part_of_it(client: EngineClient, dense: Dense) -> None:
    """The last token is the first that completes it; tokens, log-probabilities and text hold it on every engine."""
    text = Detokenizer(dense.folder)
    greedy = dense.greedy(PROMPTS[0], 30)
    written = text.decode(greedy, skip_special_tokens=False)
    stop = next(two for i in range(6, 40) if (two := written[i : i + 2]).isascii() and len(two) == 2)
    end = next(n for n in range(31) if stop in text.decode(greedy[:n], skip_special_tokens=False))
    sampling = Sampling(max_new_tokens=60, temperature=0.0, stop=("never written", stop))
    [[one]] = await client.generate(PROMPTS[:1], sampling, 1)
    assert (one.token_ids, one.finish_reason) == (greedy[:end], "stop")
    assert one.logprobs == pytest.approx(dense.of_completion(PROMPTS[0], greedy[:end]), abs=TOLERANCE)
    assert one.text == text.decode(greedy[:end])
    assert one.version_runs == (VersionRun(V0, 0, end),)


async def test_every_sample_ends_at_the_first_stop_string(client: EngineClient, dense: Dense) -> None:
    text = Detokenizer(dense.folder)
    for most in (1, 60):
        groups = await client.generate(PROMPTS, Sampling(max_new_tokens=most, stop=("e", "a", "t")), NUM_SAMPLES)
        completions = [one for group in groups for one in group]
        for completion in completions:
            shorter, whole = (
                text.decode(ids, skip_special_tokens=False) for ids in (completion.token_ids[:-1], completion.token_ids)
            )
            assert not set("eat") & set(shorter)
            has_ended = bool(set("eat") & set(whole)) or completion.token_ids[-1] == 2
            assert completion.finish_reason == ("stop" if has_ended else "length")
        assert most == 1 or any(set("eat") & set(completion.text) for completion in completions)


@pytest.mark.usefixtures("a_model")
async def test_an_update_switches_to_the_new_weights(
    client: EngineClient, server: ServerUnderTest, tmp_path: Path
) -> None:
    """Tokens, log-probabilities and version are those of the new folder, and no cached prefix is of the old one."""
    folder = write_changed_copy(server.model, tmp_path / "v1", seed=1)
    await client.generate(PROMPTS, GREEDY, 1)
    await client.load_weights(folder, V1)
    assert await client.served_version() == V1
    new = Dense(folder)
    for prompt, [one] in zip(PROMPTS, await client.generate(PROMPTS, GREEDY, 1), strict=True):
        assert one.token_ids == new.greedy(prompt, len(one.token_ids))
        assert one.version_runs == (VersionRun(V1, 0, len(one.token_ids)),)


async def test_the_checksum_follows_the_weights(client: EngineClient, server: ServerUnderTest, tmp_path: Path) -> None:
    first = await client.weights_checksum()
    await client.load_weights(write_changed_copy(server.model, tmp_path / "v1", seed=1), V1)
    other = await client.weights_checksum()
    await client.load_weights(server.model, V2)
    assert await client.weights_checksum() == first != other
    assert first is not None
    assert other is not None
    assert first.layout == other.layout


@pytest.mark.parametrize("mode", ["drain", "abort"])
async def test_redundant_completions_are_aborted_and_counted(
    client: EngineClient, server: ServerUnderTest, dense: Dense, tmp_path: Path, mode: UpdateMode
) -> None:
    """The first to end are kept whole, the rest is stopped, and each token is kept or counted."""
    if not server.speaks_sglang:
        with pytest.raises(TaskRefused, match=r"VllmClient cannot end .* rollout\.redundant_completions = 0"):
            able_to_abandon(client)
        return
    before = await client.metrics()
    redundancy = Redundancy(enough=2, extra=NUM_SAMPLES)
    redundant = able_to_abandon(client)

    async def update() -> None:
        await wait_until_generating(client)
        await client.load_weights(write_changed_copy(server.model, tmp_path / "v1", seed=1), V1, mode)

    groups, _ = await asyncio.gather(redundant.generate_redundantly(PROMPTS, SAMPLING, redundancy), update())
    after = await client.metrics()
    assert after["engine_running"] == after["engine_queued"] == 0
    assert [(len(one.completions), len(one.abandoned)) for one in groups] == [(2, NUM_SAMPLES)] * len(PROMPTS)
    abandoned = [one for group in groups for one in group.abandoned]
    assert {one.reason for one in abandoned} <= {"aborted", "surplus"}
    assert any(one.reason == "aborted" for one in abandoned)
    kept = [completion for group in groups for completion in group.completions]
    assert all(one.finish_reason in ("stop", "length") for one in kept)
    num_tokens = sum(len(one.token_ids) for one in kept) + sum(one.num_tokens for one in abandoned)
    assert after["engine_generated_tokens"] - before.get("engine_generated_tokens", 0) == num_tokens
    models = {0: dense, 1: Dense(tmp_path / "v1")}
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group.completions:
            check_versions(server, models, prompt, completion, mode)


@pytest.mark.parametrize("mode", ["drain", "retract", "in_place", "abort"])
async def test_every_token_is_of_the_version_that_sampled_it(
    client: EngineClient, server: ServerUnderTest, dense: Dense, tmp_path: Path, mode: UpdateMode
) -> None:
    """Completions are complete with any loads in between; tokens, logprobs, versions and text belong together."""
    folders = [write_changed_copy(server.model, tmp_path / f"v{i}", seed=i) for i in (1, 2)]
    models = {0: dense, 1: Dense(folders[0]), 2: Dense(folders[1])}

    async def update_twice() -> None:
        await wait_until_generating(client)
        for number, folder in enumerate(folders, start=1):
            await client.load_weights(folder, PolicyVersion(number), mode)

    groups, _ = await asyncio.gather(client.generate(PROMPTS, SAMPLING, NUM_SAMPLES), update_twice())
    [[after]] = await client.generate(PROMPTS[:1], SAMPLING, 1)
    assert {run.version for run in after.version_runs} == {2}
    assert [len(group) for group in groups] == [NUM_SAMPLES] * len(PROMPTS)
    pairs = [(prompt, one) for prompt, group in zip(PROMPTS, groups, strict=True) for one in group]
    num_spanning = sum(len(one.version_runs) > 1 for _, one in pairs)
    assert (num_spanning == 0) if mode == "drain" else (num_spanning > 0)
    text = Detokenizer(server.model)
    for prompt, one in pairs:
        check_versions(server, models, prompt, one, mode)
        assert one.finish_reason == ("stop" if one.token_ids[-1] in (2, 3) else "length")
        assert one.text == text.decode(one.token_ids[:-1] if one.finish_reason == "stop" else one.token_ids)


def check_versions(
    server: ServerUnderTest, models: dict[int, Dense], prompt: list[int], one: Completion, mode: UpdateMode
) -> None:
    """Recompute every token's logprob under the version that its run names."""
    runs = one.version_runs
    assert [run.version for run in runs] == sorted({run.version for run in runs})
    assert (runs[0].start, runs[-1].end) == (0, len(one.token_ids))
    if not server.computes:
        return
    if mode == "in_place" and server.kind in ("sglang", "vllm"):  # where exactly its cache turns is not reported
        if runs[0].version != 0:  # its prompt may have been computed, for another sample of it, before the update
            return
        end = max(0, runs[0].end - SPAN_SLACK) if len(runs) > 1 else runs[0].end
        expected = logprobs_by_version(models, prompt, one.token_ids[:end], [(0, 0, end)])
    else:
        recompute = logprobs_over_kept_cache if mode == "in_place" else logprobs_by_version
        expected = recompute(models, prompt, one.token_ids, runs)
    assert one.logprobs[: len(expected)] == pytest.approx(expected, abs=TOLERANCE)


async def test_requests_during_an_update_wait_for_its_end(
    client: EngineClient, server: ServerUnderTest, tmp_path: Path
) -> None:
    """Requests sent while an update runs are served afterwards, none is refused."""
    folder = write_changed_copy(server.model, tmp_path / "v1", seed=1)
    under_way = asyncio.create_task(client.generate(PROMPTS, SAMPLING, NUM_SAMPLES))
    await wait_until_generating(client)
    loading = asyncio.create_task(client.load_weights(folder, V1))
    await asyncio.sleep(0)
    [[later]] = await client.generate(PROMPTS[:1], GREEDY, 1)
    await loading
    assert {run.version for group in await under_way for one in group for run in one.version_runs} == {V0}
    assert {run.version for run in later.version_runs} <= {V0, V1}


@pytest.mark.parametrize("mode", ["drain", "abort"])
async def test_what_is_asked_of_a_released_server_waits_for_the_next_load(
    client: EngineClient, server: ServerUnderTest, dense: Dense, tmp_path: Path, mode: UpdateMode
) -> None:
    """Running completions end, or continue after it; a real SGLang without a GPU answers, and frees nothing."""
    assert isinstance(client, ReleasesMemory)
    folder = write_changed_copy(server.model, tmp_path / "v1", seed=1)
    running = asyncio.create_task(client.generate(PROMPTS, SAMPLING, NUM_SAMPLES))
    await wait_until_generating(client)
    await client.release(mode)
    waiting = asyncio.create_task(client.generate(PROMPTS[:1], GREEDY, 1))
    figures = await client.metrics()
    assert figures["engine_running"] == figures["engine_queued"] == 0
    assert not waiting.done()
    await client.load_weights(folder, V1)
    models = {0: dense, 1: Dense(folder)}
    pairs = [(prompt, one) for prompt, group in zip(PROMPTS, await running, strict=True) for one in group]
    assert any(len(one.version_runs) > 1 for _, one in pairs) == (mode == "abort")
    for prompt, one in pairs:
        check_versions(server, models, prompt, one, mode)
    [[later]] = await waiting
    assert {run.version for run in later.version_runs} == {V1}


async def test_adapters_stay_loaded_while_the_memory_is_released(
    client: EngineClient, server: ServerUnderTest, tmp_path: Path
) -> None:
    """A request with one waits for its base weights; under other base weights it is refused, and never sampled."""
    if not server.speaks_sglang:
        pytest.skip("vLLM restores no adapters: the settings refuse them with shared GPUs")
    assert isinstance(client, ReleasesMemory)
    await client.load_adapter(Adapter.random(server.model, tmp_path / "v2", seed=2).write().folder, V2)
    [[before]] = await client.generate(PROMPTS[:1], GREEDY, 1, V2)
    for folder, version in ((server.model, V0), (write_changed_copy(server.model, tmp_path / "v1", seed=1), V1)):
        await client.release("abort")
        waiting = asyncio.create_task(client.generate(PROMPTS[:1], GREEDY, 1, V2))
        await client.metrics()
        await client.load_weights(folder, version)
        if version == V0:
            [[again]] = await waiting
            assert again.version_runs == before.version_runs
            assert again == before or not server.computes
        else:
            with pytest.raises(WeightsUnverified, match="base weights changed"):
                await waiting
    client.mark_verified()


async def test_a_server_that_was_left_paused_generates_again(
    server: ServerUnderTest, client: EngineClient, tmp_path: Path
) -> None:
    """A worker that was killed between pause and update leaves a server that the next worker's first load resumes."""
    await client._pause("retract")  # pyright: ignore[reportAttributeAccessIssue]
    successor = server.connect()
    await successor.load_weights(server.model, PolicyVersion(4))
    [[completion]] = await successor.generate(PROMPTS[:1], Sampling(max_new_tokens=4), 1)
    await successor.close()
    assert {run.version for run in completion.version_runs} == {4}


async def test_a_folder_that_is_missing_is_not_applied(
    server: ServerUnderTest, client: EngineClient, tmp_path: Path
) -> None:
    """The error names the version; the next load serves again."""
    if server.kind == "vllm":
        pytest.skip("vLLM 0.32 has no usable weights after a failed load: it crashes at the next request")
    with pytest.raises(WeightsNotApplied, match="version 1"):
        await client.load_weights(tmp_path / "nowhere", V1)
    await client.load_weights(server.model, V2)
    [[completion]] = await client.generate(PROMPTS[:1], GREEDY, 1)
    assert {run.version for run in completion.version_runs} == {V2}


async def test_adapters_are_served_next_to_the_weights(
    server: ServerUnderTest, client: EngineClient, dense: Dense, tmp_path: Path
) -> None:
    """Two adapters and the base concurrently: each computes as its merged model does, with tokens of its version."""
    if server.kind == "vllm" and not (await client.inspect()).takes_adapters:
        pytest.skip("this server was started without --enable-lora")
    adapters = {
        V1: Adapter.random(server.model, tmp_path / "1", seed=1).write(),
        V2: Adapter.random(server.model, tmp_path / "2", seed=2, rank=8).write(),
    }
    models = {
        version: Dense(one.merged_into(server.model, tmp_path / f"m{version}")) for version, one in adapters.items()
    }
    for version, one in adapters.items():
        await client.load_adapter(one.folder, version)
    sampling = Sampling(max_new_tokens=12)
    versions = (None, V1, V2)
    replies = await asyncio.gather(*(client.generate(PROMPTS, sampling, 2, version) for version in versions))
    for version, groups in zip(versions, replies, strict=True):
        model = dense if version is None else models[version]
        for prompt, group in zip(PROMPTS, groups, strict=True):
            for one in group:
                if server.computes:
                    assert one.logprobs == pytest.approx(model.of_completion(prompt, one.token_ids), abs=1e-4)
                assert {run.version for run in one.version_runs} == {V0 if version is None else version}
    await client.unload_adapter(V1)
    with pytest.raises(EngineRefused, match="adapter of version 1 is not loaded; loaded are: 2"):
        await client.generate(PROMPTS[:1], sampling, 1, V1)
    await client.load_weights(server.model, V3)  # unloads what was loaded on other weights
    with pytest.raises(EngineRefused, match="loaded are: none"):
        await client.generate(PROMPTS[:1], sampling, 1, V2)


async def test_metrics_have_the_workers_names(client: EngineClient) -> None:
    await client.generate(PROMPTS[:1], GREEDY, 1)
    metrics = await client.metrics()
    assert {"engine_running", "engine_queued", "engine_generated_tokens", "engine_prompt_tokens"} <= set(metrics)
    assert metrics["engine_generated_tokens"] >= 1
