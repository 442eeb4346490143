"""Adapters in addition to the weights: what a worker requires of an engine that serves several policy versions."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contracts import real_sglang
from tests.contracts.engine_under_test import EngineUnderTest
from tests.contracts.tiny_model import Adapter, Dense, build_model, write_changed_copy

PROMPT = [5, 17, 101, 44, 9, 260, 31]
SGLANG_TAKES = {"missing tensor", "unknown tensor", "wrong shape", "nan", "rank pattern", "half of what is fused"}
PARAMS: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="session")
def running_engine(
    running_engine: EngineUnderTest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineUnderTest]:
    """The engine of the other tests if it serves adapters; a local SGLang is restarted with adapters enabled."""
    if running_engine.kind == "embedded" or not real_sglang.ASKED:
        yield running_engine
        return
    scratch = tmp_path_factory.mktemp("with-adapters")
    build_model(scratch / "model")
    with real_sglang.running_sglang(scratch / "model", scratch, **real_sglang.WITH_ADAPTERS) as url:
        yield EngineUnderTest("sglang", url, scratch / "model")


@pytest.fixture(scope="session")
def adapters(running_engine: EngineUnderTest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Adapter]:
    """Three adapters of the engine's first weights: all layers, another rank, two kinds of layers in bfloat16."""
    model, folder = running_engine.model, tmp_path_factory.mktemp("adapters")
    return {
        "policy@1": Adapter.random(model, folder / "1", seed=1).write(),
        "policy@2": Adapter.random(model, folder / "2", seed=2, rank=8).write(),
        "policy@3": Adapter.random(model, folder / "3", seed=3, targets=("q_proj", "v_proj")).in_bfloat16().write(),
    }


@pytest.fixture(scope="session")
def merged(adapters: dict[str, Adapter], dense: Dense, running_engine: EngineUnderTest) -> dict[str | None, Dense]:
    """What each of them computes with the weights below it, and what those compute alone."""
    folders = {name: one.folder.with_name(f"{one.folder.name}-merged") for name, one in adapters.items()}
    found: dict[str | None, Dense] = {None: dense}
    for name, one in adapters.items():
        found[name] = Dense(one.merged_into(running_engine.model, folders[name]))
    return found


@pytest.fixture(autouse=True)
def nothing_left(engine: EngineUnderTest) -> Iterator[None]:
    """Adapters that a test, or a process before the tests, loaded are unloaded."""
    unload_all(engine)
    yield
    unload_all(engine)


@pytest.fixture
def serving(engine: EngineUnderTest, adapters: dict[str, Adapter]) -> EngineUnderTest:
    for name, one in adapters.items():
        load(engine, name, one.folder)
    return engine


def load(engine: EngineUnderTest, name: str, folder: Path, *, expect: int = 200) -> Any:
    return engine.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, expect=expect)


def unload_all(engine: EngineUnderTest) -> None:
    for name in listed(engine):
        engine.post("/unload_lora_adapter", {"lora_name": name})


def listed(engine: EngineUnderTest) -> set[str]:
    return {card["id"] for card in engine.get("/v1/models")["data"] if card["id"].startswith("policy@")}


def ask(engine: EngineUnderTest, prompts: Any, lora_path: Any, *, expect: int = 200, **params: Any) -> Any:
    body = {"input_ids": prompts, "lora_path": lora_path, "sampling_params": PARAMS | params, "return_logprob": True}
    return engine.post("/generate", body, expect=expect)


def test_adapters_and_none_share_a_batch(serving: EngineUnderTest, merged: dict[str | None, Dense]) -> None:
    """Rows of three adapters and of none, in one request, each have the log-probabilities of their merged model."""
    names = [None, "policy@1", "policy@2", "policy@3", "policy@1", None]
    prompts = [[*PROMPT, number] for number in range(len(names))]
    replies = ask(serving, prompts, names, n=2)
    for prompt, name, number in zip(prompts, names, range(0, 12, 2), strict=True):
        for reply in replies[number : number + 2]:
            merged[name].check_reply(prompt, reply)


def test_a_prompt_is_not_shared_across_adapters(serving: EngineUnderTest, merged: dict[str | None, Dense]) -> None:
    prompt = [(7 * number) % 300 + 3 for number in range(40)]
    names = [None, "policy@1", "policy@2", "policy@3"]
    for name in (*names, *reversed(names)):
        merged[name].check_reply(prompt, ask(serving, prompt, name))
    for name, reply in zip(names, ask(serving, [prompt] * 4, names), strict=True):
        merged[name].check_reply(prompt, reply)


def test_an_unknown_adapter_is_an_error(serving: EngineUnderTest) -> None:
    """A request that names an adapter which was never loaded is refused, not answered by the weights alone."""
    assert "policy@99" in str(ask(serving, PROMPT, "policy@99", expect=400))
    assert "policy@99" in str(ask(serving, [PROMPT, PROMPT], ["policy@1", "policy@99"], expect=400))


def test_a_load_reports_the_loaded_adapters(engine: EngineUnderTest, adapters: dict[str, Adapter]) -> None:
    """Load and unload answer with the names and folders of all that are loaded; the list of models has them too."""
    first, second = adapters["policy@1"].folder, adapters["policy@2"].folder
    assert load(engine, "policy@1", first)["loaded_adapters"] == {"policy@1": str(first)}
    assert load(engine, "policy@2", second)["loaded_adapters"] == {"policy@1": str(first), "policy@2": str(second)}
    assert listed(engine) == {"policy@1", "policy@2"}
    answer = engine.post("/unload_lora_adapter", {"lora_name": "policy@1"})
    assert answer["success"] is True
    assert answer["loaded_adapters"] == {"policy@2": str(second)}
    assert listed(engine) == {"policy@2"}


def test_a_name_is_given_once(serving: EngineUnderTest, adapters: dict[str, Adapter]) -> None:
    """A second adapter under a used name is refused, and the first one is kept."""
    answer = load(serving, "policy@1", adapters["policy@2"].folder, expect=400)
    assert answer["success"] is False
    assert "already loaded" in answer["error_message"]
    assert answer["loaded_adapters"]["policy@1"] == str(adapters["policy@1"].folder)


def test_an_unknown_adapter_cannot_be_unloaded(engine: EngineUnderTest) -> None:
    answer = engine.post("/unload_lora_adapter", {"lora_name": "policy@99"}, expect=400)
    assert answer["success"] is False
    assert "policy@99" in answer["error_message"]


def test_an_adapter_is_loaded_while_others_generate(
    engine: EngineUnderTest, adapters: dict[str, Adapter], merged: dict[str | None, Dense]
) -> None:
    """A load neither waits for a running generation nor changes it, and the adapter is served immediately."""
    load(engine, "policy@1", adapters["policy@1"].folder)
    with engine.streaming(PROMPT, rid="by-weights", max_new_tokens=200) as stream:
        load(engine, "policy@2", adapters["policy@2"].folder)
        merged["policy@2"].check_reply(PROMPT, ask(engine, PROMPT, "policy@2"))
        reply = stream.result()
    assert reply["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 200}]
    merged[None].check_reply(PROMPT, reply)


def test_a_rank_stabilised_adapter_has_its_scale(engine: EngineUnderTest, tmp_path: Path) -> None:
    if engine.kind == "sglang":
        pytest.skip("SGLang ignores use_rslora: published adapters have its scale in lora_alpha")
    one = Adapter.random(engine.model, tmp_path / "adapter", seed=4)
    one.config["use_rslora"] = True
    load(engine, "policy@4", one.write().folder)
    merged = Dense(one.merged_into(engine.model, tmp_path / "merged"))
    merged.check_reply(PROMPT, ask(engine, PROMPT, "policy@4"))


def test_a_retracted_generation_continues_with_its_adapter(
    serving: EngineUnderTest, merged: dict[str | None, Dense]
) -> None:
    with serving.streaming(PROMPT, rid="set-aside", lora_path="policy@1", max_new_tokens=200) as stream:
        serving.post("/pause_generation", {"mode": "retract"})
        serving.post("/continue_generation")
        merged["policy@2"].check_reply(PROMPT, ask(serving, PROMPT, "policy@2"))
        reply = stream.result()
    assert reply["meta_info"]["num_retractions"] == 1
    merged["policy@1"].check_reply(PROMPT, reply)


def test_an_unload_waits_for_requests_that_use_it(serving: EngineUnderTest, merged: dict[str | None, Dense]) -> None:
    """A generation completes with its adapter though that is unloaded in between; then the adapter is removed."""
    with (
        concurrent.futures.ThreadPoolExecutor() as pool,
        serving.streaming(PROMPT, rid="by-adapter", lora_path="policy@1", max_new_tokens=150) as stream,
    ):
        unloading = pool.submit(serving.post, "/unload_lora_adapter", {"lora_name": "policy@1"})
        reply = stream.result()
        assert unloading.result()["success"] is True
    assert len(reply["output_ids"]) == 150
    merged["policy@1"].check_reply(PROMPT, reply)
    assert listed(serving) == {"policy@2", "policy@3"}


def test_new_weights_replace_the_base_of_the_adapters(
    serving: EngineUnderTest, adapters: dict[str, Adapter], tmp_path: Path
) -> None:
    changed = write_changed_copy(serving.model, tmp_path / "changed", seed=5)
    serving.update(changed, "7")
    reply = ask(serving, PROMPT, "policy@1")
    assert reply["meta_info"]["weight_versions"] == [{"version": "7", "start": 0, "end": 12}]
    Dense(adapters["policy@1"].merged_into(changed, tmp_path / "merged")).check_reply(PROMPT, reply)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("missing folder", ""),
        ("no config", ""),
        ("cut short", ""),
        ("rank beyond the maximum", ""),
        ("missing tensor", "missing"),
        ("unknown tensor", "unknown"),
        ("wrong shape", "shape"),
        ("nan", "NaN or infinite"),
        ("rank pattern", "rank_pattern"),
        ("dora", "use_dora"),
        ("embedding", "embed_tokens"),
        ("unknown layer", "x_proj"),
        ("half of what is fused", "without q_proj"),
    ],
)
def test_an_invalid_adapter_is_refused(engine: EngineUnderTest, tmp_path: Path, change: str, says: str) -> None:
    """What cannot be read, does not fit the model or would change the sum; nothing is listed, and the engine serves."""
    if engine.kind == "sglang" and change in SGLANG_TAKES:
        pytest.skip("SGLang accepts it, and crashes or computes something else; the worker never sends it")
    rank = 512 if change == "rank beyond the maximum" else 4
    one = Adapter.random(engine.model, tmp_path / "adapter", seed=9, rank=rank)
    spoil(one, change)
    if change != "missing folder":
        one.write()
    if change == "no config":
        (one.folder / "adapter_config.json").unlink()
    if change == "cut short":
        file = one.folder / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
    answer = load(engine, "policy@9", one.folder, expect=400)
    assert answer["success"] is False
    assert answer["error_message"]
    assert says in answer["error_message"] or engine.kind == "sglang"
    assert listed(engine) == set()
    assert len(engine.generate(PROMPT, **PARAMS)["output_ids"]) == 12


def spoil(adapter: Adapter, change: str) -> None:
    name = sorted(adapter.tensors)[0]
    config: dict[str, dict[str, Any]] = {
        "rank pattern": {"rank_pattern": {"q_proj": 2}},
        "dora": {"use_dora": True},
        "embedding": {"target_modules": ["q_proj", "v_proj", "embed_tokens"]},
        "half of what is fused": {"target_modules": ["k_proj"]},
        "unknown layer": {"target_modules": ["q_proj", "v_proj", "x_proj"]},
    }
    adapter.config.update(config.get(change, {}))
    match change:
        case "missing tensor":
            del adapter.tensors[name]
        case "unknown tensor":
            adapter.tensors["base_model.model.model.norm.lora_A.weight"] = adapter.tensors[name].clone()
        case "wrong shape":
            adapter.tensors[name] = adapter.tensors[name][:, :-1].contiguous()
        case "nan":
            adapter.tensors[name][0, 0] = float("nan")
