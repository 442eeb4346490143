"""Describe the part of vLLM's HTTP API that the worker uses, from vLLM's own code: ``vllm_api.json``.

Run with the Python of an environment that has vLLM, without a server or a GPU:

    /opt/vllm/bin/python tests/data/extract_vllm_api.py > tests/data/vllm_api.json
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import vllm
from fastapi import FastAPI
from fastapi.routing import APIRoute

_ENTRY = "vllm.entrypoints."
_ROUTERS = {  # module → what a server needs to have its routes
    "scale_out.token_in_token_out.api_router": "--enable-scale-out",
    "rl.online.api_router": "VLLM_SERVER_DEV_MODE",
    "serve.dev.rpc.api_router": "VLLM_SERVER_DEV_MODE",
    "serve.dev.cache.api_router": "VLLM_SERVER_DEV_MODE",
    "serve.dev.server_info.api_router": "VLLM_SERVER_DEV_MODE",
    "serve.instrumentator.health": "",
    "serve.instrumentator.basic": "",
    "openai.models.api_router": "",
    "serve.lora.api_router": "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
}
_USED = {
    "/inference/v1/generate", "/pause", "/resume", "/is_paused", "/collective_rpc", "/update_weight_version",
    "/weight_info", "/weight_checker", "/reset_prefix_cache", "/server_info", "/health", "/version", "/v1/models",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
}  # fmt: skip
_TOKENS = "vllm.entrypoints.scale_out.token_in_token_out.protocol"
_MODELS = {
    "GenerateRequest": _TOKENS,
    "GenerateTokensResponse": _TOKENS,
    "GenerateTokensChoice": _TOKENS,
    "GenerateLogProbs": _TOKENS,
    "GenerateLogProbsContent": _TOKENS,
    "SamplingParams": "vllm.sampling_params",
    "WeightVersionSpan": "vllm.outputs",
    "LoadLoRAAdapterRequest": "vllm.entrypoints.serve.lora.protocol",
    "UnloadLoRAAdapterRequest": "vllm.entrypoints.serve.lora.protocol",
}
_ROOT = Path(vllm.__file__).parents[1]


def routes() -> dict[str, Any]:
    """Return method and path → source file, query parameters, body fields, and what enables the route."""
    found: dict[str, Any] = {"GET /metrics": {"file": "", "needs": "", "query": [], "body": []}}
    for name, needs in _ROUTERS.items():
        module = importlib.import_module(_ENTRY + name)
        if name == "serve.lora.api_router":
            module._attach_router(FastAPI())
        for route in module.router.routes:
            if not isinstance(route, APIRoute) or route.path not in _USED:
                continue
            file = inspect.getsourcefile(inspect.unwrap(route.endpoint))
            for method in route.methods:
                found[f"{method} {route.path}"] = {
                    "file": str(Path(str(file)).relative_to(_ROOT)),
                    "needs": needs,
                    "query": sorted(field.alias for field in route.dependant.query_params),
                    "body": sorted(field.alias for field in route.dependant.body_params),
                }
    return dict(sorted(found.items()))


def model(name: str, module: str) -> dict[str, Any]:
    """Return a model's source file and its fields with type and whether they are required."""
    kind = getattr(importlib.import_module(module), name)
    if hasattr(kind, "model_fields"):
        fields = {
            field: {"type": str(info.annotation), "required": info.is_required()}
            for field, info in kind.model_fields.items()
        }
    elif dataclasses.is_dataclass(kind):
        fields = {
            field.name: {"type": str(field.type), "required": field.default is dataclasses.MISSING}
            for field in dataclasses.fields(kind)
        }
    else:
        fields = {
            field.name: {"type": str(field.type), "required": field.required}
            for field in msgspec.structs.fields(kind)
            if not field.name.startswith("_")
        }
    return {"file": str(Path(str(inspect.getsourcefile(kind))).relative_to(_ROOT)), "fields": fields}


def main() -> None:
    described = {
        "version": vllm.__version__.partition("+")[0],
        "routes": routes(),
        "models": {name: model(name, module) for name, module in _MODELS.items()},
    }
    json.dump(described, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
