"""The vLLM client's requests and the fake's replies against the description that was read from vLLM itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from penstock.protocol.groups import Sampling
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.engines.vllm.client import VllmClient, read_completions
from penstock.rollout_service.errors import EngineAborted, ReplyRefused
from tests.contracts.engine_under_test import embedded_engine
from tests.contracts.fake_vllm import API, FakeVllm
from tests.contracts.tiny_model import Adapter, build_model
from tests.servers import wait_for

V0, V1 = PolicyVersion(0), PolicyVersion(1)
PROMPT = [5, 17, 88]
BODIES = {  # routes whose body is one model
    "/inference/v1/generate": "GenerateRequest",
    "/v1/load_lora_adapter": "LoadLoRAAdapterRequest",
    "/v1/unload_lora_adapter": "UnloadLoRAAdapterRequest",
}
TYPES: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "str": str, "bool": bool, "list": list}


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeVllm]:
    scratch = tmp_path_factory.mktemp("fake")
    build_model(scratch / "model")
    with (
        embedded_engine(scratch / "model", scratch, "--weight-version", "0") as engine,
        FakeVllm(engine.url, scratch / "model") as fake,
    ):
        yield fake


@pytest.fixture
async def client(fake: FakeVllm) -> AsyncIterator[VllmClient]:
    client = VllmClient(fake.url, request_deadline_s=30)
    yield client
    await client.close()


def check_fields(name: str, value: dict[str, Any]) -> None:
    """Hold an object against a model: no unknown field, every required one, and plain types."""
    fields = API["models"][name]["fields"]
    assert set(value) <= set(fields), f"{name} has no {set(value) - set(fields)}"
    required = {field for field, said in fields.items() if said["required"]}
    assert required <= set(value), f"{name} needs {required - set(value)}"
    for field, content in value.items():
        word = fields[field]["type"].removeprefix("<class '").removesuffix("'>").partition("[")[0].partition(" ")[0]
        if word in TYPES and content is not None:
            assert isinstance(content, TYPES[word]), f"{name}.{field} is {fields[field]['type']}, got {content!r}"


async def test_every_exchange_is_of_vllms_own_form(fake: FakeVllm, client: VllmClient, tmp_path: Path) -> None:
    """Run every call of the client once; each request and reply is validated against vLLM's OpenAPI description."""
    fake.exchanges.clear()
    model = fake._folder
    await client.inspect()
    for mode in ("drain", "abort", "retract", "in_place"):
        await client.load_weights(model, V0, mode)
        await client.generate([PROMPT, PROMPT[:1]], Sampling(max_new_tokens=4, stop_token_ids=(3,)), 2)
    await client.started_with(model, V0)
    adapter = Adapter.random(model, tmp_path / "1", seed=1).write()
    await client.load_adapter(adapter.folder, V1)
    await client.generate([PROMPT], Sampling(max_new_tokens=4), 1, V1)
    await client.unload_adapter(V1)
    await client.weights_checksum()
    await client.release("drain")
    await client.load_weights(model, V0, "drain")
    await client.metrics()
    await client.health()
    seen = {(method, urlsplit(path).path) for method, path, *_ in fake.exchanges}
    assert seen == {tuple(route.split()) for route in API["routes"]} - {("GET", "/is_paused")}
    for method, path, body, _, _ in fake.exchanges:
        url = urlsplit(path)
        route = API["routes"][f"{method} {url.path}"]
        assert set(parse_qs(url.query)) <= set(route["query"])
        if url.path in BODIES and body:  # an empty body asks whether the route exists
            check_fields(BODIES[url.path], body)
        elif url.path != "/collective_rpc":  # it reads its body itself
            assert set(body or {}) <= set(route["body"]) or url.path in BODIES
        if body and "sampling_params" in body:
            check_fields("SamplingParams", body["sampling_params"])
    replies = [exchange[4] for exchange in fake.exchanges if "generate" in exchange[1] and exchange[3] == 200]
    assert len(replies) == 2 * 4 + 1
    for reply in replies:
        check_reply(reply)


def check_reply(reply: dict[str, Any]) -> None:
    """Validate the fake's reply with the response models of vLLM."""
    assert set(reply) <= set(API["models"]["GenerateTokensResponse"]["fields"])
    for choice in reply["choices"]:
        check_fields("GenerateTokensChoice", choice)
        check_fields("GenerateLogProbs", choice["logprobs"])
        for entry in choice["logprobs"]["content"]:
            check_fields("GenerateLogProbsContent", entry)
        for span in choice["weight_versions"]:
            check_fields("WeightVersionSpan", span)


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("dev_mode", False, "VLLM_SERVER_DEV_MODE=1"),
        ("scale_out", False, "--enable-scale-out"),
        ("logprobs_mode", "raw_logprobs", "--logprobs-mode raw_logprobs"),
    ],
)
async def test_a_server_started_against_the_contract_is_refused(
    fake: FakeVllm, client: VllmClient, monkeypatch: pytest.MonkeyPatch, attribute: str, value: object, words: str
) -> None:
    monkeypatch.setattr(fake, attribute, value)
    [objection] = (await client.inspect()).objections
    assert words in objection


async def test_a_request_that_arrives_after_an_abort_is_sent_again(
    fake: FakeVllm, client: VllmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is being released refuses it; it waits for the next load, as those that were running do."""
    bodies: list[Any] = []
    arrive = fake._inference_v1_generate

    def late(body: Any, query: dict[str, str]) -> Any:
        bodies.append(body)
        if len(bodies) == 1:
            wait_for(lambda: fake._paused, "the pause")
        return arrive(body, query)

    monkeypatch.setattr(fake, "_inference_v1_generate", late)
    await client.load_weights(fake._folder, V0)
    asking = asyncio.create_task(client.generate([PROMPT], Sampling(max_new_tokens=4), 1))
    await asyncio.to_thread(wait_for, lambda: bodies, "the request")
    await client.release("abort")
    await client.load_weights(fake._folder, V1)
    [[one]] = await asking
    assert {run.version for run in one.version_runs} == {V1}
    assert len(bodies) == 2


def good_choice() -> dict[str, Any]:
    content = [{"token_id": 7, "logprob": -0.5}, {"token_id": 8, "logprob": -0.25}]
    spans = [{"version": "4", "start": 0, "end": 2}]
    return {
        "index": 0, "finish_reason": "length", "token_ids": [7, 8], "logprobs": {"content": content},
        "weight_versions": spans,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("of other tokens", {"token_ids": [7, 9]}),
        ("of other tokens", {"logprobs": None}),
        ("unknown finish reason", {"finish_reason": None}),
        ("unknown finish reason", {"finish_reason": "error"}),
        ("expected 1 to 4", {"token_ids": [], "logprobs": {"content": []}}),
        ("cover 0 of 2", {"weight_versions": None}),
        ("unknown version default", {"weight_versions": [{"version": "default", "start": 0, "end": 2}]}),
        ("expected choices 0 to 0", {"index": 1}),
        ("vLLM's form", {"logprobs": {"content": [{}]}}),
    ],
)
def test_a_choice_that_contradicts_itself_is_refused(words: str, change: dict[str, Any]) -> None:
    """Each contradiction is named; nothing is built from such a reply."""
    [good] = read_completions({"choices": [good_choice()]}, [4], interrupted=False)
    assert (good.token_ids, good.logprobs) == ([7, 8], [-0.5, -0.25])
    with pytest.raises(ReplyRefused, match=words):
        read_completions({"choices": [good_choice() | change]}, [4], interrupted=False)


def test_an_abort_is_a_part_only_during_an_update_of_this_worker() -> None:
    choice = good_choice() | {"finish_reason": "abort"}
    [part] = read_completions({"choices": [choice]}, [4], interrupted=True)
    assert part.finish_reason == "abort"
    with pytest.raises(EngineAborted):
        read_completions({"choices": [choice]}, [4], interrupted=False)


def test_a_missing_choice_is_refused() -> None:
    with pytest.raises(ReplyRefused, match="expected 2 choices, got 1 choices"):
        read_completions({"choices": [good_choice()]}, [4, 4], interrupted=False)
