"""The contract of every engine with the rollout worker: the part of SGLang's HTTP API that Penstock relies on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from tests.contracts.engine_under_test import DEADLINE_S, EngineUnderTest
from tests.contracts.tiny_model import Dense, read_tensors, write_changed_copy, write_tensors
from tests.servers import wait_for

PROMPT = [5, 17, 88, 250, 31, 9]
LONG = 6000  # tokens: many seconds of generation, so that other requests can be sent during it


def embedded_only(engine: EngineUnderTest, why: str) -> None:
    """Skip tests that are known to crash the real SGLang."""
    if engine.kind != "embedded":
        pytest.skip(why)


def test_ignore_eos_ignores_stop_tokens(engine: EngineUnderTest, dense: Dense) -> None:
    greedy = dense.greedy(PROMPT, 8)
    reply = engine.generate(PROMPT, max_new_tokens=8, temperature=0, stop_token_ids=[greedy[0]], ignore_eos=True)
    assert reply["output_ids"] == greedy


@pytest.mark.parametrize(
    ("input_ids", "params"),
    [
        (PROMPT, {"temperature": -1.0}),
        (PROMPT, {"no_such_parameter": 1}),
        (PROMPT, {"top_p": 0.0}),
        (PROMPT, {"top_k": 0}),
        (PROMPT, {"min_new_tokens": 5, "max_new_tokens": 4}),
        ([], {}),
        (PROMPT * 2000, {}),
        (PROMPT, {"max_new_tokens": 10**6}),
    ],
)
def test_impossible_requests_are_answered_with_400(engine: EngineUnderTest, input_ids: list, params: dict) -> None:
    engine.generate(input_ids, expect=400, **params)
    assert len(engine.generate(PROMPT, max_new_tokens=2, ignore_eos=True)["output_ids"]) == 2


def test_a_token_outside_the_vocabulary_is_refused(engine: EngineUnderTest) -> None:
    embedded_only(engine, "SGLang 0.5.23 on a CPU crashes with an index error")
    assert "100000" in str(engine.generate([5, 100000], expect=400))
    assert "-1" in str(engine.generate([5, -1], expect=400))


def test_abort_returns_what_there_is(engine: EngineUnderTest, dense: Dense) -> None:
    """An aborted generation answers 200 with its tokens, their logprobs and their version."""
    with engine.streaming(PROMPT, rid="b" * 32, max_new_tokens=LONG) as stream:
        engine.post("/abort_request", {"rid": "b" * 32})
        reply = stream.result()
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert 8 <= len(reply["output_ids"]) < LONG
    assert reply["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": len(reply["output_ids"])}]
    dense.check_reply(PROMPT, reply)


def test_requests_during_a_pause_wait_for_its_end(engine: EngineUnderTest, tmp_path: Path) -> None:
    folder = write_changed_copy(engine.model, tmp_path / "v1", seed=1)
    engine.post("/pause_generation", {"mode": "retract"})
    engine.get("/ready", expect=503)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(engine.generate, PROMPT, max_new_tokens=3, ignore_eos=True)
        engine.update(folder, "1")
        engine.post("/continue_generation")
        assert reply.result(DEADLINE_S)["meta_info"]["weight_versions"] == [{"version": "1", "start": 0, "end": 3}]
    engine.get("/ready")


@pytest.mark.parametrize(
    "fault", ["no folder", "truncated", "wrong shape", "missing tensor", "unknown tensor", "nan", "integers"]
)
def test_a_faulty_checkpoint_is_refused_and_the_old_weights_stay(
    engine: EngineUnderTest, tmp_path: Path, fault: str
) -> None:
    if fault != "no folder":
        embedded_only(engine, "SGLang 0.5.23 crashes, or serves it")
    tensors = read_tensors(engine.model)
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "wrong shape":
        tensors[name] = tensors[name][:-1].contiguous()
    elif fault == "missing tensor":
        del tensors[name]
    elif fault == "unknown tensor":
        tensors["model.layers.9.mlp.up_proj.weight"] = tensors[name].clone()
    elif fault == "nan":
        tensors[name][3, 4] = torch.nan
    elif fault == "integers":
        tensors[name] = tensors[name].to(torch.int32)
    folder = tmp_path / "bad"
    if fault != "no folder":
        write_tensors(engine.model, folder, tensors)
    if fault == "truncated":
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1000])
    before = engine.generate(PROMPT, max_new_tokens=10, temperature=0, ignore_eos=True)["output_ids"]
    refusal = engine.update(folder, "1", expect=400)
    assert refusal["success"] is False
    assert str(folder) in refusal["message"] or engine.kind != "embedded"
    assert (engine.version, engine.get("/model_info")["model_path"]) == ("0", str(engine.model))
    assert engine.generate(PROMPT, max_new_tokens=10, temperature=0, ignore_eos=True)["output_ids"] == before


def test_flush_is_refused_while_a_request_runs(engine: EngineUnderTest) -> None:
    """flush_cache answers 200 when idle and 400 when busy."""
    engine.post("/flush_cache")
    with engine.streaming(PROMPT, rid="5" * 32, max_new_tokens=LONG) as stream:
        engine.post("/flush_cache", expect=400)
        engine.post("/abort_request", {"rid": "5" * 32})
        stream.result()
    wait_for(lambda: httpx.post(f"{engine.url}/flush_cache", timeout=60).status_code == 200, "the engine to be idle")


def test_an_update_whose_flush_is_refused_is_no_success(engine: EngineUnderTest, tmp_path: Path) -> None:
    """Paused in place with requests that hold the cache, an update that is to flush it answers success false.

    SGLang has swapped the weights by then, and names the new version for every token, but the old one in its
    model_info: the worker detects the failure by this disagreement.
    """
    folder = write_changed_copy(engine.model, tmp_path / "v1", seed=1)
    with engine.streaming(PROMPT, rid="7" * 32, max_new_tokens=LONG) as stream:
        engine.post("/pause_generation", {"mode": "in_place"})
        assert engine.update(folder, "1", expect=400, flush_cache=True)["success"] is False
        assert engine.version == "0"
        engine.post("/continue_generation")
        stream.wait_for_tokens(200)
        engine.post("/abort_request", {"rid": "7" * 32})
        reply = stream.result()
    versions = [span["version"] for span in reply["meta_info"]["weight_versions"]]
    assert versions == (["0"] if engine.kind == "embedded" else ["0", "1"])


def test_the_clients_neutral_parameters_change_nothing(engine: EngineUnderTest, dense: Dense) -> None:
    """The values that the worker sends for min_p and penalties leave the distribution unchanged."""
    neutral = {
        "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0,
        "min_new_tokens": 0, "top_p": 1.0, "top_k": -1,
    }  # fmt: skip
    for reply in engine.generate([PROMPT] * 4, max_new_tokens=40, **neutral):
        dense.check_reply(PROMPT, reply)


def test_a_stop_token_beyond_the_vocabulary_does_no_harm(engine: EngineUnderTest) -> None:
    """It can never be sampled: the embedded engine refuses it, SGLang takes it, and both serve the next request."""
    expect = 400 if engine.kind == "embedded" else 200
    engine.generate(PROMPT, expect=expect, max_new_tokens=6, stop_token_ids=[10**6])
    assert len(engine.generate(PROMPT, max_new_tokens=2, ignore_eos=True)["output_ids"]) == 2


def test_a_client_that_leaves_ends_its_request(engine: EngineUnderTest) -> None:
    with engine.streaming(PROMPT, rid="6" * 32, max_new_tokens=LONG):
        pass
    # Were it still running, the flush would be refused until LONG tokens are done.
    wait_for(lambda: httpx.post(f"{engine.url}/flush_cache", timeout=60).status_code == 200, "the request to end")


def test_health_and_load_are_reported(engine: EngineUnderTest) -> None:
    """The endpoints that routers and probes read answer 200."""
    engine.get("/health")
    engine.get("/health_generate")
    engine.get("/ready")
    [load] = engine.get("/v1/loads")["loads"]
    assert load["num_running_reqs"] == 0
    assert "sglang:num_running_reqs" in engine.get("/metrics")
    assert "weight_version" in engine.get("/server_info")
