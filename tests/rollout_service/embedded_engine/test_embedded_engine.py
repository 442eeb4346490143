"""The embedded engine beyond SGLang's contract: models, scheduling, exit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from safetensors.torch import save_file
from tests.contracts.engine_under_test import DEADLINE_S, EngineUnderTest, embedded_engine, start_engine
from tests.contracts.tiny_model import Dense, build_model, read_tensors, write_changed_copy
from tests.servers import wait_for

from penstock.rollout_service.embedded_engine.errors import UnsupportedModel
from penstock.rollout_service.embedded_engine.model.model_config import read_model_config

PROMPT = [5, 17, 88, 250, 31, 9]


@pytest.fixture(scope="module")
def small_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
    """An engine of few rows and little memory, so that requests have to wait."""
    scratch = tmp_path_factory.mktemp("engine")
    build_model(scratch / "model")
    arguments = ["--max-running", "12", "--max-total-tokens", "8000", "--max-prefill-tokens", "100"]
    with embedded_engine(scratch / "model", scratch, "--weight-version", "0", *arguments) as engine:
        yield engine


def test_the_answer_to_an_update_has_version_and_checksum(small_engine: EngineUnderTest, tmp_path: Path) -> None:
    """Version and checksum are those that model_info and weights_checker return afterwards."""
    answer = small_engine.update(write_changed_copy(small_engine.model, tmp_path / "v1", seed=1), "1")
    assert answer["weight_version"] == small_engine.get("/model_info")["weight_version"] == "1"
    asked = small_engine.post("/weights_checker", {"action": "checksum"})
    assert {key: answer[key] for key in ("ranks", "per_engine_checksum")} == {
        key: asked[key] for key in ("ranks", "per_engine_checksum")
    }
    small_engine.update(small_engine.model, "0")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3", {"attention_bias": True, "num_key_value_heads": 4}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    ],
)
def test_every_served_architecture_is_exact(tmp_path: Path, kind: str, changes: dict) -> None:
    """Tokens and logprobs are those of transformers' dense forward, prompt logprobs too."""
    build_model(tmp_path / "model", kind, **changes)
    dense = Dense(tmp_path / "model")
    draw = random.Random(0)
    prompts = [[draw.randrange(320) for _ in range(length)] for length in (1, 7, 7, 40, 130)]
    with embedded_engine(tmp_path / "model", tmp_path) as engine:
        replies = engine.generate(prompts, n=2, max_new_tokens=40, ignore_eos=True, logprob_start_len=0)
        greedy = engine.generate(prompts, max_new_tokens=10, temperature=0, ignore_eos=True)
    for index, reply in enumerate(replies):
        prompt = prompts[index // 2]
        dense.check_reply(prompt, reply)
        scored = [item[0] for item in reply["meta_info"]["input_token_logprobs"][1:]]
        assert scored == pytest.approx(dense.of_completion(prompt[:1], prompt[1:]), abs=1e-5)
    assert [reply["output_ids"] for reply in greedy] == [dense.greedy(prompt, 10) for prompt in prompts]


def test_half_precision_is_close(tmp_path: Path) -> None:
    """In bfloat16 logprobs are those of float32 within a tenth of a nat."""
    build_model(tmp_path / "model")
    with embedded_engine(tmp_path / "model", tmp_path, "--dtype", "bfloat16") as engine:
        replies = engine.generate([PROMPT, PROMPT[:2]], n=2, max_new_tokens=30, ignore_eos=True)
    dense = Dense(tmp_path / "model")
    for reply, prompt in zip(replies, (PROMPT, PROMPT, PROMPT[:2], PROMPT[:2]), strict=True):
        dense.check_reply(prompt, reply, 0.1)


def test_sharded_checkpoints_are_served(small_engine: EngineUnderTest, tmp_path: Path) -> None:
    """A folder of shards with an index is the same model as one file; a missing shard is named."""
    tensors = read_tensors(write_changed_copy(small_engine.model, tmp_path / "whole", seed=3))
    names = sorted(tensors)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    folder = tmp_path / "shards"
    folder.mkdir()
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert small_engine.update(folder, "s")["success"]
    reply = small_engine.generate(PROMPT, max_new_tokens=10, temperature=0, ignore_eos=True)
    assert reply["output_ids"] == Dense(tmp_path / "whole").greedy(PROMPT, 10)
    (folder / "two.safetensors").unlink()
    assert "two.safetensors" in small_engine.update(folder, "t", expect=400)["message"]
    small_engine.update(small_engine.model, "0")


def test_another_models_folder_is_refused(small_engine: EngineUnderTest, tmp_path: Path) -> None:
    """Weights whose config.json describes another shape are not loaded."""
    build_model(tmp_path / "other", num_hidden_layers=1)
    assert "another model" in small_engine.update(tmp_path / "other", "1", expect=400)["message"]
    assert small_engine.version == "0"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "Qwen3ForCausalLM"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"use_sliding_window": True}, "sliding window"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"hidden_act": "gelu"}, "gelu"),
    ],
)
def test_unserved_models_are_refused_by_name(tmp_path: Path, change: dict, word: str) -> None:
    """A model that cannot be computed exactly is refused at the start; the error names the supported models."""
    config = {"architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu"} | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=word):
        read_model_config(tmp_path)


def test_a_model_that_cannot_be_served_exits_with_the_reason(tmp_path: Path) -> None:
    """The command prints why it refuses a folder and exits with status 2."""
    log = tmp_path / "log"
    assert start_engine(tmp_path, log).wait(DEADLINE_S) == 2
    assert "config.json does not exist" in log.read_text()


def test_more_requests_than_rows_are_served_exactly(small_engine: EngineUnderTest) -> None:
    """Requests of mixed lengths that wait, move and share rows give the same completions as each alone."""
    draw = random.Random(1)
    prompts = [[draw.randrange(320) for _ in range(draw.choice([1, 3, 20, 60]))] for _ in range(40)]
    params = [{"max_new_tokens": draw.choice([1, 2, 30, 90, 700]), "ignore_eos": True} for _ in prompts]
    body = {"input_ids": prompts, "sampling_params": params, "return_logprob": True}
    dense = Dense(small_engine.model)
    for prompt, asked, reply in zip(prompts, params, small_engine.post("/generate", body), strict=True):
        assert len(reply["output_ids"]) == asked["max_new_tokens"]
        dense.check_reply(prompt, reply)


def test_a_seed_gives_the_same_completion_with_any_other_requests(small_engine: EngineUnderTest) -> None:
    params = {"max_new_tokens": 20, "sampling_seed": 7, "ignore_eos": True}
    alone = small_engine.generate(PROMPT, **params)["output_ids"]
    crowd = [{"max_new_tokens": 15, "ignore_eos": True}] * 9 + [params]
    body = {"input_ids": [PROMPT[::-1]] * 9 + [PROMPT], "sampling_params": crowd}
    assert small_engine.post("/generate", body)[-1]["output_ids"] == alone
    first, second = small_engine.generate(PROMPT, n=2, **params)
    assert first["output_ids"] == alone != second["output_ids"]


def test_samples_of_one_prompt_are_computed_once(small_engine: EngineUnderTest) -> None:
    """All but the first sample of a prompt report its tokens as cached."""
    replies = small_engine.generate([PROMPT, PROMPT[:3]], n=3, max_new_tokens=1)
    assert [reply["meta_info"]["cached_tokens"] for reply in replies] == [0, 6, 6, 0, 3, 3]


def test_an_abort_during_a_pause_answers_at_once(small_engine: EngineUnderTest) -> None:
    small_engine.post("/pause_generation", {"mode": "retract"})
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(small_engine.generate, PROMPT, rid="9" * 32, max_new_tokens=5)
        wait_for(lambda: small_engine.get("/v1/loads")["loads"][0]["num_waiting_reqs"] == 1, "the request to wait")
        small_engine.post("/abort_request", {"rid": "9" * 32})
        meta = reply.result(DEADLINE_S)["meta_info"]
    small_engine.post("/continue_generation")
    assert meta["finish_reason"]["type"] == "abort"
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 0}]


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": PROMPT, "no_such_field": 1},
        {"input_ids": PROMPT, "top_logprobs_num": 5},
        {"input_ids": PROMPT, "top_logprobs_num": 5, "return_logprob": True, "logprob_start_len": 0},  # and generate
        {"input_ids": PROMPT, "top_logprobs_num": 5, "sampling_params": {"max_new_tokens": 0}},  # of which positions?
        {"input_ids": PROMPT, "sampling_params": {"repetition_penalty": 1.2}},
        {"input_ids": PROMPT, "text": "hello"},
        {"input_ids": [PROMPT, []]},
        {"input_ids": [PROMPT] * 2, "sampling_params": [{}]},
        {"input_ids": [PROMPT] * 2, "rid": ["a", "a"]},
        {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": 6},
        {"input_ids": PROMPT, "sampling_params": {"stop_token_ids": [320]}},
        {},
    ],
)
def test_nothing_is_accepted_and_ignored(small_engine: EngineUnderTest, body: dict) -> None:
    """A field that would have no effect, or two that contradict, are a 400 with a message."""
    assert small_engine.post("/generate", body, expect=400)["error"]["message"]


def test_an_empty_rid_aborts_nothing(small_engine: EngineUnderTest) -> None:
    small_engine.post("/abort_request", {}, expect=400)


def test_flushing_drops_what_is_kept(small_engine: EngineUnderTest) -> None:
    prompt = list(range(60, 105))
    small_engine.generate(prompt, max_new_tokens=2)
    assert small_engine.generate(prompt, max_new_tokens=2)["meta_info"]["cached_tokens"] == 44
    flushed = f"{small_engine.url}/flush_cache"
    wait_for(lambda: httpx.post(flushed, timeout=60).status_code == 200, "the engine to be idle")
    assert small_engine.generate(prompt, max_new_tokens=2)["meta_info"]["cached_tokens"] == 0


def test_logits_that_are_not_finite_are_an_error(small_engine: EngineUnderTest, tmp_path: Path) -> None:
    """Weights that overflow cause a 500; a later request with finite weights is exact again."""
    folder = write_changed_copy(small_engine.model, tmp_path / "huge", seed=1, scale=0.0)
    tensors = read_tensors(folder)
    for name in tensors:
        if "proj" in name:
            tensors[name] *= 1e30
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    small_engine.update(folder, "huge")
    assert "not finite" in small_engine.generate(PROMPT, max_new_tokens=4, expect=500)["error"]["message"]
    small_engine.update(small_engine.model, "0")
    reply = small_engine.generate(PROMPT, max_new_tokens=30, ignore_eos=True)
    Dense(small_engine.model).check_reply(PROMPT, reply)


def test_images_are_refused_for_a_model_of_text(small_engine: EngineUnderTest) -> None:
    refused = small_engine.post("/generate", {"input_ids": PROMPT, "image_data": "aGVsbG8="}, expect=400)
    assert "the served model reads no images" in str(refused)
    refused = small_engine.post("/generate", {"input_ids": PROMPT, "image_positions": [0]}, expect=400)
    assert "the served model reads no images" in str(refused)
    assert not small_engine.get("/model_info")["has_image_understanding"]


def test_chat_renders_the_template(small_engine: EngineUnderTest) -> None:
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    params = {"temperature": 0, "max_new_tokens": 12}
    expected = small_engine.post("/generate", {"text": rendered, "sampling_params": params})["text"]
    body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 12}
    whole = small_engine.post("/v1/chat/completions", body)
    assert whole["choices"][0]["message"]["content"] == expected
    assert (whole["usage"]["completion_tokens"], whole["choices"][0]["finish_reason"]) == (12, "length")


def test_the_engine_exits_with_its_parent(tmp_path: Path) -> None:
    build_model(tmp_path / "model")
    port_file = tmp_path / "port"
    engine = [sys.executable, "-P", "-m", "penstock.rollout_service.embedded_engine", "--die-with-parent"]
    engine += ["--model-path", str(tmp_path / "model"), "--port", "0", "--port-file", str(port_file)]
    script = f"import subprocess; child = subprocess.Popen({engine}); print(child.pid, flush=True); child.wait()"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_for(port_file.exists, "the engine to open its port", DEADLINE_S)
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the engine to be gone")


def test_a_terminated_engine_answers_waiting_clients(tmp_path: Path) -> None:
    """At SIGTERM unfinished requests are answered with 503 and the process exits."""
    build_model(tmp_path / "model")
    port_file = tmp_path / "port"
    process = start_engine(tmp_path / "model", tmp_path / "log", "--port-file", str(port_file), "--die-with-parent")
    try:
        wait_for(port_file.exists, "the engine to open its port", DEADLINE_S)
        engine = EngineUnderTest("embedded", f"http://127.0.0.1:{port_file.read_text().strip()}", tmp_path / "model")
        engine.post("/pause_generation", {"mode": "retract"})
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(engine.generate, PROMPT, expect=503)
            wait_for(lambda: engine.get("/v1/loads")["loads"][0]["num_waiting_reqs"] == 1, "the request to wait")
            process.send_signal(signal.SIGTERM)
            assert "shutting down" in reply.result(DEADLINE_S)["error"]["message"]
        process.wait(DEADLINE_S)
    finally:
        process.kill()


def test_torch_is_the_only_framework_loaded() -> None:
    """The engine process imports torch but never transformers, whose import costs seconds."""
    script = "import sys, penstock.rollout_service.embedded_engine.run_engine; "
    script += "print('transformers' in sys.modules, 'torch' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert ended.stdout.split() == ["False", "True"]
