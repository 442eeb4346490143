"""Several engines of one worker: distribution of groups, common version, and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.rollout_service.engines.faulty_engine import FaultyEngine
from tests.rollout_service.registered import until

from penstock.protocol.groups import Sampling
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.engines.attached_engine import AttachedEngine
from penstock.rollout_service.engines.engine_client import PlacesEpisodes, aggregate_metrics
from penstock.rollout_service.engines.engine_pool import EnginePool
from penstock.rollout_service.engines.sglang.client import SglangClient
from penstock.rollout_service.engines.sglang.messages import objections, read_metrics, read_slots
from penstock.rollout_service.errors import (
    EngineMisconfigured,
    EngineRefused,
    EngineUnreachable,
    TaskRefused,
    WeightsUnverified,
)

V0, V1 = PolicyVersion(0), PolicyVersion(1)
SAMPLING = Sampling(max_new_tokens=8)
Pair = tuple[FaultyEngine, FaultyEngine, EnginePool]
Single = tuple[FaultyEngine, AttachedEngine]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text('{"vocab_size": 300, "max_position_embeddings": 64}')
    return tmp_path


def attached(server: FaultyEngine) -> AttachedEngine:
    return AttachedEngine(SglangClient(server.url, request_deadline_s=10), start_deadline_s=10)


@pytest.fixture
async def pair(model: Path) -> AsyncIterator[Pair]:
    """Two servers, and the pool of their engines, which serves version 0."""
    with FaultyEngine() as one, FaultyEngine() as other:
        pool = EnginePool([attached(one), attached(other)])
        await pool.load(model, V0)
        yield one, other, pool
        await pool.stop()


@pytest.fixture
async def single(model: Path) -> AsyncIterator[Single]:
    """A server, and an engine that has not loaded a version."""
    with FaultyEngine() as server:
        engine = attached(server)
        yield server, engine
        await engine.stop()


async def test_groups_are_spread_and_stay_whole(pair: Pair):
    """Four groups over two engines are two each; all samples of a group come from one request; order is kept."""
    one, other, pool = pair
    prompts = [[5, 6], [7], [8, 9, 10], [11]]
    groups = await pool.client.generate(prompts, SAMPLING, 3)
    assert [len(server.requests[0]["input_ids"]) for server in (one, other)] == [2, 2]
    alone = SglangClient(one.url)
    assert groups == await alone.generate(prompts, SAMPLING, 3)
    await alone.close()


async def test_an_engine_is_idle_when_its_part_of_a_call_is_answered(pair: Pair):
    """Not when the slowest is: the next group goes to it, whole."""
    one, other, pool = pair
    other.flow.clear()
    call = asyncio.create_task(pool.client.generate([[5], [6]], Sampling(max_new_tokens=60), 1))
    await until(lambda: pool.client._pending_tokens == [0, 60], "the answer of the first engine")
    for prompt in (7, 8):
        await pool.client.generate([[prompt]], SAMPLING, 4)
    assert [len(server.requests) for server in (one, other)] == [3, 1]
    other.flow.set()
    await call


async def test_an_episode_stays_on_its_engine(pair: Pair):
    """All turns of an episode go to one engine, those of a new one to the engine with the fewest episodes."""
    one, other, pool = pair
    router = pool.client
    assert isinstance(router, PlacesEpisodes)
    with router.placed() as first, router.placed() as second, router.placed() as third:
        for turn in range(3):
            for number, place in enumerate((first, second, third)):
                [[answer]] = await place.generate([[10 * number + 5] * (turn + 1)], SAMPLING, 1)
                assert answer.token_ids
    asked = [{request["input_ids"][0][0] for request in server.requests} for server in (one, other)]
    assert asked == [{5, 25}, {15}]
    with router.placed() as fourth:  # the others have ended
        await fourth.generate([[35]], SAMPLING, 1)
    assert one.requests[-1]["input_ids"] == [[35]]


async def test_an_episode_moves_when_its_engine_cannot_be_asked_or_is_behind(pair: Pair, model: Path):
    """An engine that is not ready, or serves an older version, gets no turn; an engine's error is raised as it is."""
    one, other, pool = pair
    router = pool.client
    assert isinstance(router, PlacesEpisodes)
    with router.placed() as place:
        await place.generate([[5]], SAMPLING, 1)
        pool._engines[0].ready.clear()  # pyright: ignore[reportAttributeAccessIssue]
        await place.generate([[5, 6]], SAMPLING, 1)
        pool._engines[0].ready.set()  # pyright: ignore[reportAttributeAccessIssue]
        await place.generate([[5, 6, 7]], SAMPLING, 1)
        assert (len(one.requests), len(other.requests)) == (1, 2)
        await pool._engines[0].load(model, V1)
        [[newest]] = await place.generate([[5, 6, 7, 8]], SAMPLING, 1)
        assert {run.version for run in newest.version_runs} == {V1}
        assert (len(one.requests), len(other.requests)) == (2, 2)
        one.status = 500
        with pytest.raises(EngineRefused, match="500"):
            await place.generate([[5]], SAMPLING, 1)


async def test_an_engine_that_is_not_ready_gets_no_requests(pair: Pair):
    one, other, pool = pair
    pool._engines[0].ready.clear()  # pyright: ignore[reportAttributeAccessIssue]
    await pool.client.generate([[5], [6], [7]], SAMPLING, 1)
    assert (len(one.requests), len(other.requests[0]["input_ids"])) == (0, 3)
    assert pool.ready.is_set()
    pool._engines[1].ready.clear()  # pyright: ignore[reportAttributeAccessIssue]
    assert not pool.ready.is_set()
    with pytest.raises(EngineUnreachable, match="none of the 2 engines"):
        await pool.client.generate([[5]], SAMPLING, 1)
    waiting = asyncio.create_task(pool.ready.wait())
    await asyncio.sleep(0)
    pool._engines[0].ready.set()  # pyright: ignore[reportAttributeAccessIssue]
    await asyncio.wait_for(waiting, 60)


async def test_a_patch_that_one_engine_refuses_is_withdrawn_from_the_others(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    """Where one takes none, it is not tried; else what was sampled meanwhile is of weights that nobody has verified."""
    one, other, pool = pair
    begun_at = time.monotonic()
    for engine, takes in zip(pool._engines, (True, False), strict=True):

        async def answers(*_: object, answer: bool = takes) -> bool:
            return answer

        for name in ("stage", "patch"):
            monkeypatch.setattr(engine.client, name, answers)
        monkeypatch.setattr(SglangClient, "max_changed_share", property(lambda client: 0.1 * (client.url == one.url)))
        engine.applied.add(V1)  # from its folder, before it went back to version 0
    assert pool.max_changed_share == 0.0
    assert not await pool.stage("chain")
    assert not await pool.patch(V1, "retract")
    assert (pool.version, pool.applied) == (V0, {V0})
    assert [[version for version, _ in engine.loads] for engine in (one, other)] == [["0", "0"], ["0"]]
    assert pool.withdrawn_at >= begun_at


async def test_an_engine_that_has_its_version_serves_it_while_another_still_drains(pair: Pair, model: Path):
    """New groups go to the engine that has loaded; a wait for the version waits for that engine only."""
    one, other, pool = pair
    one.flow.clear()
    long = asyncio.create_task(pool.client.generate([[5]], Sampling(max_new_tokens=60), 1))
    await asyncio.to_thread(one.wait_for_requests, 1)
    loading = asyncio.create_task(pool.load(model, V1))
    await asyncio.wait_for(pool.wait_for_version(V1), 60)
    assert (pool.version, pool.applied, loading.done()) == (V0, {V0, V1}, False)
    groups = await pool.client.generate([[6], [7], [8]], SAMPLING, 2)
    assert {run.version for group in groups for row in group for run in row.version_runs} == {V1}
    assert (len(one.requests), len(other.requests[0]["input_ids"])) == (1, 3)
    one.flow.set()
    [[late]] = await long
    assert {run.version for run in late.version_runs} == {V0}
    await loading
    assert pool.version == V1
    await pool.client.generate([[6], [7]], SAMPLING, 2)
    assert [len(server.requests[-1]["input_ids"]) for server in (one, other)] == [1, 1]


async def test_one_failing_engine_fails_the_request_alone(pair: Pair):
    """The engine's error is raised, and its reserved tokens are released."""
    one, _, pool = pair
    one.status = 500
    with pytest.raises(EngineRefused, match="500"):
        await pool.client.generate([[5], [6]], SAMPLING, 1)
    one.status = 200
    assert len(await pool.client.generate([[5], [6]], SAMPLING, 1)) == 2
    assert pool.client._pending_tokens == [0, 0]


async def test_samples_across_a_failed_update_are_refused(single: Single, model: Path):
    """A reply to a request in progress when an update failed is not used, though it names a known version."""
    server, engine = single
    await engine.load(model, V0)
    server.flow.clear()
    under_way = asyncio.create_task(engine.client.generate([[5]], SAMPLING, 1))
    await asyncio.to_thread(server.wait_for_requests, 1)
    engine.client.mark_unverified("version 1 was not applied")
    with pytest.raises(WeightsUnverified, match="version 1 was not applied"):
        await engine.client.generate([[6]], SAMPLING, 1)
    engine.client.mark_verified()
    server.flow.set()
    with pytest.raises(WeightsUnverified):
        await under_way
    assert len(await engine.client.generate([[6]], SAMPLING, 1)) == 1


async def test_requests_that_could_kill_an_engine_are_never_sent(single: Single, model: Path):
    """Unknown token ids, empty prompts and more than the context are refused before anything is sent."""
    server, engine = single
    await engine.load(model, V0)
    for prompt, reason in (([300], "token_out_of_range"), ([-1], "token_out_of_range"), ([], "empty_prompt"),
                           ([5] * 57, "too_long")):  # fmt: skip
        with pytest.raises(TaskRefused) as refusal:
            await engine.client.generate([[5], prompt], SAMPLING, 1)
        assert refusal.value.reason == reason
    assert server.requests == []


async def test_a_server_started_against_the_contract_is_refused(single: Single, model: Path):
    server, engine = single
    server.info = {"version": "0.5.23", "enable_deterministic_inference": True}
    with pytest.raises(EngineMisconfigured, match="all samples of a group are the same"):
        await engine.load(model, V0)
    assert server.loads == []


async def test_a_server_with_a_shorter_context_is_respected(single: Single, model: Path):
    server, engine = single
    server.info = {"context_length": 16}
    await engine.load(model, V0)
    with pytest.raises(TaskRefused, match="context of 16 tokens"):
        await engine.client.generate([[5] * 9], SAMPLING, 1)


@pytest.mark.parametrize(
    "info", [{"skip_tokenizer_init": True}, {"tokenizer_worker_num": 2}, {"weight_cache_mode": "cpu"}]
)
def test_every_flag_against_the_contract_is_an_objection(info: dict[str, object]):
    assert len(objections(info)) == 1
    assert not objections({"tokenizer_worker_num": 1, "weight_cache_mode": "off", "version": "0.5.23"})


@pytest.mark.parametrize(
    ("info", "slots"),
    [
        ({"dp_size": 2, "internal_states": [{"effective_max_running_requests_per_dp": 52}] * 2}, 104),
        ({"max_running_requests": 256}, 256),  # the embedded engine
        ({"max_running_requests": None, "internal_states": [{}]}, None),
        ({"internal_states": []}, None),
        ("nothing", None),
    ],
)  # fmt: skip
def test_the_slots_are_those_that_the_server_chose(info: object, slots: int | None) -> None:
    assert read_slots(info) == ({} if slots is None else {"engine_slots": slots})


def test_metrics_of_a_metrics_page():
    """Known metrics get Penstock's names, those of several ranks are summed or averaged; others are omitted."""
    page = """# HELP sglang:num_running_reqs running
sglang:num_running_reqs{model_name="m",tp_rank="0"} 3.0
sglang:num_running_reqs{model_name="m",tp_rank="1"} 4.0
sglang:token_usage{tp_rank="0"} 0.25
sglang:token_usage{tp_rank="1"} 0.75
sglang:gen_throughput NaN
sglang:e2e_request_latency_seconds_bucket{le="1"} 9
python_gc_objects_total 12
"""
    one = read_metrics(page)
    assert one == {"engine_running": 7.0, "engine_kv_usage": 0.5}
    assert aggregate_metrics([one, {"engine_running": 1.0, "engine_kv_usage": 0.0}, {}]) == {
        "engine_running": 8.0,
        "engine_kv_usage": 0.25,
    }
