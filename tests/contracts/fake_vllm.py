"""A server with vLLM's HTTP API, backed by an embedded engine: the model computes, the API is vLLM's.

Requests with fields that vLLM does not have are refused, by the OpenAPI description in ``tests/data/vllm_api.json``,
which was exported from vLLM; `test_vllm_api.py` checks requests and replies against it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx

from tests.json_server import JsonServer

API = json.loads((Path(__file__).parents[1] / "data" / "vllm_api.json").read_text("utf-8"))
_PARAMS = {"max_tokens": "max_new_tokens"}  # vLLM's name → SGLang's, where they differ
_PASSED = ("n", "temperature", "top_p", "top_k", "stop", "stop_token_ids", "ignore_eos")
_RETRY = {"error": {"message": "Request failed; please retry", "type": "ServiceUnavailableError", "code": 503}}

Answer = tuple[int, Any]


class FakeVllm(JsonServer):
    """One server on a free port of the loopback, in front of an embedded engine. Use as a context manager."""

    def __init__(self, engine_url: str, model: Path) -> None:
        self.exchanges: list[tuple[str, str, Any, int, Any]] = []  # method, path, body, status, answer
        self.dev_mode = True  # VLLM_SERVER_DEV_MODE=1
        self.scale_out = True  # --enable-scale-out
        self.logprobs_mode = "processed_logprobs"
        self._engine = httpx.Client(base_url=engine_url, timeout=120)
        self._folder, self._label = model, "default"
        self._paused = ""  # the mode of the pause
        self._num_running = 0
        self._changed = threading.Condition()
        super().__init__()

    def close(self) -> None:
        """Stop to serve and close the connections to the engine."""
        super().close()
        self._engine.close()

    def answer(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> Answer:
        """Return the status and the reply to one request, and record them in ``exchanges``."""
        status, value = self._reply(method, path, body)
        self.exchanges.append((method, path, body, status, value))
        return status, value.encode() if isinstance(value, str) else value

    def _reply(self, method: str, path: str, body: Any) -> Answer:
        url = urlsplit(path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        route = API["routes"].get(f"{method} {url.path}")
        if route is None or (route["needs"] == "VLLM_SERVER_DEV_MODE" and not self.dev_mode):
            return 404, {"detail": "Not Found"}
        if route["needs"] == "--enable-scale-out" and not self.scale_out:
            return 403, {"error": {"message": "Scale-out endpoints are disabled.", "code": 403}}
        if unknown := set(query) - set(route["query"]):
            return 400, {"error": {"message": f"unknown query parameters {sorted(unknown)}", "code": 400}}
        handler = getattr(self, "_" + url.path.strip("/").replace("/", "_"))
        return handler(body, query)

    def _version(self, body: Any, query: dict[str, str]) -> Answer:
        return 200, {"version": API["version"]}

    def _health(self, body: Any, query: dict[str, str]) -> Answer:
        return self._engine.get("/health").status_code, ""

    def _server_info(self, body: Any, query: dict[str, str]) -> Answer:
        model = {"logprobs_mode": self.logprobs_mode, "max_model_len": 8192, "skip_tokenizer_init": False}
        return 200, {"vllm_config": {"model_config": model, "lora_config": {"max_lora_rank": 8}}, "vllm_env": {}}

    def _metrics(self, body: Any, query: dict[str, str]) -> Answer:
        names = {
            "sglang:num_running_reqs": "vllm:num_requests_running",
            "sglang:num_queue_reqs": "vllm:num_requests_waiting",
            "sglang:prompt_tokens_total": "vllm:prompt_tokens_total",
            "sglang:generation_tokens_total": "vllm:generation_tokens_total",
        }
        lines = [line.split() for line in self._engine.get("/metrics").text.splitlines()]
        return 200, "".join(f'{names[one[0]]}{{engine="0"}} {one[1]}\n' for one in lines if one[0] in names)

    def _inference_v1_generate(self, body: Any, query: dict[str, str]) -> Answer:
        if problem := _problem(body, "GenerateRequest") or _problem(body["sampling_params"], "SamplingParams"):
            return 400, {"error": {"message": problem, "type": "BadRequestError", "param": None, "code": 400}}
        params = body["sampling_params"]
        if params.get("temperature", 1.0) == 0 and params.get("n", 1) > 1:
            message = f"n must be 1 when using greedy sampling, got {params['n']}."
            return 400, {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}
        if params.get("stop") and not params.get("detokenize", True):
            message = "stop strings are only supported when detokenize is True. Set detokenize=True to use stop."
            return 400, {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}
        with self._changed:
            if self._paused in ("wait", "abort"):
                return 503, _RETRY
            self._num_running += 1
        try:
            return self._generate(body)
        finally:
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    def _generate(self, body: dict[str, Any]) -> Answer:
        given = body["sampling_params"]
        params = {name: given[name] for name in _PASSED if name in given}
        params |= {theirs: given[ours] for ours, theirs in _PARAMS.items() if ours in given}
        request = {"input_ids": [body["token_ids"]], "sampling_params": params, "return_logprob": True}
        if body.get("model"):
            request["lora_path"] = body["model"]
        reply = self._engine.post("/generate", json=request)
        if reply.status_code != 200:
            return reply.status_code, {"error": {"message": reply.text, "code": reply.status_code}}
        choices = [_choice(index, row) for index, row in enumerate(reply.json())]
        usage = {"prompt_tokens": len(body["token_ids"])}
        request_id = f"generate-tokens-{body.get('request_id', '')}"
        return 200, {"request_id": request_id, "usage": usage, "output_mode": "tokens", "choices": choices}

    def _pause(self, body: Any, query: dict[str, str]) -> Answer:
        mode = query.get("mode", "abort")
        with self._changed:
            self._paused = mode
        if mode == "wait":
            with self._changed:
                self._changed.wait_for(lambda: self._num_running == 0)
        else:
            self._engine.post("/pause_generation", json={"mode": {"keep": "in_place"}.get(mode, mode)})
        return 200, {"status": "paused"}

    def _resume(self, body: Any, query: dict[str, str]) -> Answer:
        self._engine.post("/continue_generation", json={})
        with self._changed:
            self._paused = ""
        return 200, {"status": "resumed"}

    def _sleep(self, body: Any, query: dict[str, str]) -> Answer:
        assert self._paused, "the worker pauses before it has the server sleep"
        assert query == {"level": "2"}  # nothing of the weights is kept
        return self._engine.post("/release_memory_occupation", json={}).status_code, ""

    def _wake_up(self, body: Any, query: dict[str, str]) -> Answer:
        return self._engine.post("/resume_memory_occupation", json={"tags": [query["tags"]]}).status_code, ""

    def _is_paused(self, body: Any, query: dict[str, str]) -> Answer:
        return 200, {"is_paused": bool(self._paused)}

    def _collective_rpc(self, body: Any, query: dict[str, str]) -> Answer:
        assert body["method"] == "reload_weights"
        folder = Path(body["kwargs"]["weights_path"])
        if not self._load(folder):
            return 500, {"error": {"message": "Call to collective_rpc method failed", "code": 500}}
        self._folder = folder
        return 200, {"results": [None]}

    def _load(self, folder: Path) -> bool:
        body = {"model_path": str(folder), "weight_version": self._label, "flush_cache": False}
        return self._engine.post("/update_weights_from_disk", json=body).status_code == 200

    def _update_weight_version(self, body: Any, query: dict[str, str]) -> Answer:
        self._label = body["new_version"]
        assert self._load(self._folder)  # the embedded engine has no route that only labels
        return 200, {"success": True, "new_version": self._label}

    def _weight_info(self, body: Any, query: dict[str, str]) -> Answer:
        return 200, {"weight_version": self._label}

    def _weight_checker(self, body: Any, query: dict[str, str]) -> Answer:
        answer = self._engine.post("/weights_checker", json={"action": "checksum"}).json()
        return 200, {"checksums": {"dp0:pp0:pcp0:tp0:model": answer["per_engine_checksum"]}}

    def _reset_prefix_cache(self, body: Any, query: dict[str, str]) -> Answer:
        if query.get("reset_running_requests") == "true" and self._paused == "keep":
            self._engine.post("/pause_generation", json={"mode": "retract"})
        return 200, {"success": True}

    def _v1_models(self, body: Any, query: dict[str, str]) -> Answer:
        return 200, self._engine.get("/v1/models").json()

    def _v1_load_lora_adapter(self, body: Any, query: dict[str, str]) -> Answer:
        reply = self._engine.post("/load_lora_adapter", json=body)
        name = body["lora_name"]
        text = f"Success: LoRA adapter '{name}' added successfully."
        return (200, text) if reply.status_code == 200 else (400, {"error": {"message": reply.text, "code": 400}})

    def _v1_unload_lora_adapter(self, body: Any, query: dict[str, str]) -> Answer:
        reply = self._engine.post("/unload_lora_adapter", json=body)
        name = body["lora_name"]
        text = f"Success: LoRA adapter '{name}' removed successfully."
        return (200, text) if reply.status_code == 200 else (404, {"error": {"message": reply.text, "code": 404}})


def _choice(index: int, row: dict[str, Any]) -> dict[str, Any]:
    meta = row["meta_info"]
    finish = meta["finish_reason"]
    content = [
        {"token_id": token, "logprob": logprob, "rank": None, "top_logprobs": []}
        for logprob, token, _ in meta["output_token_logprobs"]
    ]
    return {
        "index": index,
        "finish_reason": finish["type"],
        "stop_reason": finish.get("matched"),
        "token_ids": row["output_ids"],
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": meta["weight_versions"],
        "logprobs": {"content": content},
    }


def _problem(body: Any, model: str) -> str:
    """Return the errors of a body by vLLM's description; empty if it is valid."""
    fields = API["models"][model]["fields"]
    if not isinstance(body, dict):
        return f"{model} must be an object"
    if unknown := sorted(set(body) - set(fields)):
        return f"{model} has no fields {unknown}"
    missing = sorted(name for name, field in fields.items() if field["required"] and name not in body)
    return f"{model} needs {missing}" if missing else ""
