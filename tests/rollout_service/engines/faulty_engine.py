"""A real HTTP server that implements SGLang's contract, with faults on demand.

It passes the same basic contract as the embedded engine (`test_worker_engine_contract.py`); then a test
sets ``mode``. Completions are deterministic: token ``k`` of sample ``s`` of a prompt depends on
nothing else.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.json_server import JsonServer
from tests.servers import wait_for

Rewrite = Callable[[list[dict[str, Any]]], Any]


class FaultyEngine(JsonServer):
    """One server on a free port of the loopback. Use as a context manager."""

    def __init__(self, *, version: str = "default", api_key: str = "") -> None:
        self.version = version  # the version in model_info and the replies
        self.api_key = api_key
        self.folder: Path | None = None  # of the last weights loaded
        self.loads: list[tuple[str, str]] = []  # every requested (weight_version, model_path)
        self.pauses: list[str] = []  # every requested pause, by its mode, and every "continue"
        self.flushes: list[tuple[str, str, bool]] = []  # every requested (weight_version, model_path, flush_cache)
        self.texts = True  # whether completions have a text
        self.requests: list[dict[str, Any]] = []  # every body of /generate
        self.num_running = 0
        self.info: dict[str, Any] = {}  # the content of server_info
        self.status = 200  # /generate answers this
        self.rewrite: Rewrite = lambda rows: rows  # changes a valid reply before it is sent
        self.keeps_memory = bool(os.environ.get("FAULTY_ENGINE_KEEPS_MEMORY"))  # it cannot release it
        self.checksum = ""  # its weights checksum; empty: not supported
        self.next_checksum = ""  # once it loads the version that it serves again; empty: the same
        self.sharding: dict[str, Any] = {"tp_size": 1}
        self.adapters: dict[str, str] = {}  # name → folder, of those that are loaded
        self.refuse_adapters = ""  # why it takes none
        self.lose_adapters = False  # loads of adapters are confirmed but not done
        self.refuse_loads = 0  # so many updates are answered with success = false
        self.lose_loads = 0  # so many updates are confirmed but not done
        self.says: dict[str, Any] = {}  # fields of the answer to an update in addition to SGLang's
        self.flow = threading.Event()  # /generate waits for it before it answers
        self.flow.set()
        self._drained = threading.Condition()
        self._updating = False
        self._paused = False
        super().__init__()

    def answer(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> tuple[int, Any]:
        if method == "GET":
            return self._get(path)
        if self.api_key and headers["authorization"] != f"Bearer {self.api_key}":
            return 401, {"error": "unauthorized"}
        return self._post(path, body)

    def close(self) -> None:
        """Let waiting requests end, and stop to serve."""
        self.flow.set()
        super().close()

    def serve_until_killed(self, port_file: Path) -> None:
        """Announce the port as the embedded engine does, and keep running."""
        port_file.write_text(str(self.port))
        self.wait_until_closed()

    def wait_for_requests(self, count: int) -> None:
        wait_for(lambda: len(self.requests) >= count, f"{count} requests at the engine")

    def wait_for_pauses(self, count: int) -> None:
        wait_for(lambda: len(self.pauses) >= count, f"{count} pauses at the engine")

    def _get(self, path: str) -> tuple[int, Any]:
        if path == "/model_info":
            return 200, {"weight_version": self.version, "model_path": str(self.folder), "is_generation": True}
        if path == "/health":
            return 200, {}
        if path == "/server_info":
            return 200, self.info
        if path == "/v1/models":
            return 200, {"data": [{"id": str(self.folder)}, *({"id": name} for name in self.adapters)]}
        return 404, {"error": path}

    def _post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/update_weights_from_disk":
            return self._update(body)
        if path == "/generate":
            unknown = body.get("lora_path", "") not in {"", *self.adapters}
            return (400, {"error": {"message": "never loaded"}}) if unknown else self._generate(body)
        if path in ("/load_lora_adapter", "/unload_lora_adapter"):
            return self._change_adapter(body, loading=path.startswith("/load"))
        if path in ("/pause_generation", "/continue_generation"):
            self.pauses.append(body.get("mode", "continue"))
            with self._drained:
                self._paused = path == "/pause_generation"
                self._drained.notify_all()
            return 200, {"status": "ok"}
        if path == "/abort_request" or (path.endswith("_memory_occupation") and not self.keeps_memory):
            return 200, {}
        if path == "/weights_checker" and self.checksum:
            ranks = [{"parallelism_info": self.sharding}]
            return 200, {"success": True, "ranks": ranks, "per_engine_checksum": self.checksum}
        return 404, {"error": path}

    def _change_adapter(self, body: dict[str, Any], *, loading: bool) -> tuple[int, Any]:
        name = body["lora_name"]
        fits = (name in self.adapters) != loading and not self.refuse_adapters
        if fits and loading and not self.lose_adapters:
            self.adapters[name] = body["lora_path"]
        elif fits and not loading:
            del self.adapters[name]
        answer = {
            "success": fits,
            "error_message": "" if fits else self.refuse_adapters or f"no, {name}",
            "loaded_adapters": dict(self.adapters),
        }
        return 200 if fits else 400, answer

    def _update(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.loads.append((body["weight_version"], body["model_path"]))
        self.flushes.append((body["weight_version"], body["model_path"], body["flush_cache"]))
        with self._drained:
            self._updating = True
            self._drained.wait_for(lambda: self.num_running == 0)
            try:
                if self.refuse_loads:
                    self.refuse_loads -= 1
                    return 400, {"success": False, "message": "Failed to load weights", "num_paused_requests": 0}
                if not [*Path(body["model_path"]).glob("*.safetensors")]:
                    return 400, {"success": False, "message": "no safetensors", "num_paused_requests": 0}
                if self.lose_loads:
                    self.lose_loads -= 1
                else:
                    if self.version == body["weight_version"]:
                        self.checksum = self.next_checksum or self.checksum
                    self.version, self.folder = body["weight_version"], Path(body["model_path"])
                answer = {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
                return 200, answer | self.says
            finally:
                self._updating = False
                self._drained.notify_all()

    def _generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        with self._drained:
            self._drained.wait_for(lambda: not self._updating and not self._paused)
            self.num_running += 1
        self.requests.append(body)
        version = self.version
        try:
            self.flow.wait()
            if self.status != 200:
                return self.status, {"error": {"message": "out of luck"}}
            rows = self.rewrite([*self.rows(body, version)])
            return 200, rows
        finally:
            with self._drained:
                self.num_running -= 1
                self._drained.notify_all()

    def rows(self, body: dict[str, Any], version: str) -> list[dict[str, Any]]:
        """Return the valid reply to a request: it depends on prompt and sample only."""
        params = body["sampling_params"]
        each = params if isinstance(params, list) else [params] * len(body["input_ids"])
        rows = []
        for rid, prompt, sampling in zip(body["rid"], body["input_ids"], each, strict=True):
            stops = sampling["stop_token_ids"]
            for sample in range(sampling["n"]):
                wanted = 1 + (sum(prompt) + sample) % 7
                ids = [3 + (sum(prompt) + 5 * sample + k) % 40 for k in range(min(wanted, sampling["max_new_tokens"]))]
                stopped = bool(stops) and len(ids) < sampling["max_new_tokens"]
                if stopped:
                    ids.append(stops[0])
                rows.append(
                    {
                        "text": " ".join(map(str, ids)) if self.texts else "",
                        "output_ids": ids,
                        "meta_info": {
                            "id": rid,
                            "finish_reason": {"type": "stop", "matched": ids[-1]}
                            if stopped
                            else {"type": "length", "length": len(ids)},
                            "prompt_tokens": len(prompt),
                            "completion_tokens": len(ids),
                            "weight_version": version,
                            "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
                            "output_token_logprobs": [[-0.5 - 0.01 * k, i, None] for k, i in enumerate(ids)],
                        },
                    }
                )
        return rows


if __name__ == "__main__":  # as the child of a worker: VERSION PORT_FILE
    FaultyEngine(version=sys.argv[1]).serve_until_killed(Path(sys.argv[2]))
