"""The contract that the worker's client relies on, for the embedded engine and the one with faults on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.rollout_service.engines.faulty_engine import FaultyEngine

from penstock.deploy.quickstart_task import write_model
from penstock.protocol.groups import Sampling
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.engines.embedded import embedded_command
from penstock.rollout_service.engines.engine_process import EngineProcess
from penstock.rollout_service.engines.sglang.client import SglangClient
from penstock.rollout_service.errors import (
    EngineError,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
    ReplyRefused,
    WeightsNotApplied,
)
from penstock.rollout_service.settings import WorkerSettings

SAMPLING = Sampling(max_new_tokens=9, temperature=1.0, stop_token_ids=(2,))
V0, V1 = PolicyVersion(0), PolicyVersion(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, seed=0)
    return folder


@pytest.fixture(scope="module", params=["embedded", "faulty"])
def engine_url(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Each engine in turn, serving version 0."""
    if request.param == "faulty":
        with FaultyEngine(version="0") as engine:
            yield engine.url
        return
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    command = embedded_command(WorkerSettings())  # pyright: ignore[reportCallIssue]
    with asyncio.Runner() as runner:
        process, url = runner.run(EngineProcess.start(command, model, V0, log=log, deadline_s=60))
        yield url
        runner.run(process.stop())


async def test_completions_are_in_the_order_of_their_prompts(engine_url: str):
    client = SglangClient(engine_url)
    prompts = [[5, 6, 7], [8, 9], [10]]
    groups = await client.generate(prompts, SAMPLING, 4)
    await client.close()
    assert [len(group) for group in groups] == [4, 4, 4]
    for completion in (completion for group in groups for completion in group):
        assert len(completion.token_ids) == len(completion.logprobs)
        assert completion.version_runs[-1].end == len(completion.token_ids)
        assert (completion.finish_reason == "stop") == (len(completion.token_ids) < 9 or completion.token_ids[-1] == 2)


async def test_a_loaded_version_is_confirmed_and_stamped(engine_url: str, model: Path):
    client = SglangClient(engine_url)
    await client.load_weights(model, V1)
    assert await client.served_version() == V1
    [[completion]] = await client.generate([[5, 6]], SAMPLING, 1)
    assert {run.version for run in completion.version_runs} == {V1}
    await client.load_weights(model, V0)
    await client.close()


async def test_requests_and_swaps_may_overlap(engine_url: str, model: Path):
    """A swap waits for running requests and holds back new ones; every completion is of one version."""
    client = SglangClient(engine_url)
    replies, _, more = await asyncio.gather(
        client.generate([[5 + i] for i in range(16)], SAMPLING, 8),
        client.load_weights(model, V1),
        client.generate([[9 + i] for i in range(16)], SAMPLING, 8),
    )
    await client.load_weights(model, V0)
    await client.close()
    for group in (*replies, *more):
        assert {run.version for completion in group for run in completion.version_runs} <= {V0, V1}


async def test_weights_that_are_not_there_are_refused(engine_url: str, tmp_path: Path):
    client = SglangClient(engine_url)
    before = await client.served_version()
    with pytest.raises(WeightsNotApplied, match="version 9"):
        await client.load_weights(tmp_path, PolicyVersion(9))
    assert await client.served_version() == before
    await client.close()


async def test_stop_strings_are_sent_to_the_engine(faulty_engine: FaultyEngine, model: Path):
    client = SglangClient(faulty_engine.url)
    await client.load_weights(model, V0)
    await client.generate([[5]], SAMPLING, 1)
    await client.generate([[5]], SAMPLING.model_copy(update={"stop": ("</a>", "b")}), 1)
    await client.close()
    without, with_stop = (request["sampling_params"] for request in faulty_engine.requests)
    assert with_stop == without | {"stop": ["</a>", "b"], "no_stop_trim": True}


Fault = Callable[[FaultyEngine], object]


def answers(value: object) -> Fault:
    return lambda engine: setattr(engine, "rewrite", lambda _: value)


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        (FaultyEngine.close, EngineUnreachable, r"127\.0\.0\.1:\d+/generate"),
        (lambda engine: engine.flow.clear(), EngineTimeout, r"within \d+\.?\d* s"),
        (lambda engine: setattr(engine, "status", 500), EngineRefused, "answered 500: .*out of luck"),
        (lambda engine: setattr(engine, "status", 400), EngineRefused, "answered 400"),
        (answers(b"<html>busy</html>"), ReplyRefused, "not JSON"),
        (answers([]), ReplyRefused, "expected 6 completions, got 0 rows"),
        (answers({"output_ids": []}), ReplyRefused, "expected 6 completions, got 1 rows"),
        (answers(7), ReplyRefused, "expected 6 completions, got int"),
    ],
)
async def test_what_is_not_an_answer_is_an_error_that_says_what_came(
    faulty_engine: FaultyEngine, fault: Fault, error: type[EngineError], words: str
):
    fault(faulty_engine)
    client = SglangClient(faulty_engine.url, request_deadline_s=0.2)
    with pytest.raises(error, match=words):
        await client.generate([[5], [6]], SAMPLING, 3)
    await client.close()
