"""The HTTP application: SGLang's endpoints, translated into jobs and commands.

Every handler checks the body, passes it to the engine thread and awaits the answer. A client's error is a 400 whose
text names it; an engine's failure is a 500 or 503.
"""

from __future__ import annotations

from starlette.applications import Starlette

from penstock.rollout_service.embedded_engine.http import control_endpoints, generate_endpoints, status_endpoints
from penstock.rollout_service.embedded_engine.http.request_errors import route
from penstock.rollout_service.embedded_engine.http.server_state import ServerState


def build_app(server: ServerState) -> Starlette:
    """Return the ASGI application."""
    app = Starlette(
        routes=[
            route("/generate", generate_endpoints.generate, "POST", "PUT"),
            route("/v1/chat/completions", generate_endpoints.chat_completions, "POST"),
            route("/pause_generation", control_endpoints.pause_generation, "POST"),
            route("/continue_generation", control_endpoints.continue_generation, "POST"),
            route("/abort_request", control_endpoints.abort_request, "POST"),
            route("/update_weights_from_disk", control_endpoints.update_weights_from_disk, "POST"),
            route("/load_lora_adapter", control_endpoints.load_lora_adapter, "POST"),
            route("/unload_lora_adapter", control_endpoints.unload_lora_adapter, "POST"),
            route("/v1/models", status_endpoints.models, "GET"),
            route("/weights_checker", status_endpoints.weights_checker, "POST"),
            route("/flush_cache", control_endpoints.flush_cache, "GET", "POST"),
            route("/model_info", status_endpoints.model_info, "GET"),
            route("/get_model_info", status_endpoints.model_info, "GET"),
            route("/server_info", status_endpoints.server_info, "GET"),
            route("/get_server_info", status_endpoints.server_info, "GET"),
            route("/health", status_endpoints.health, "GET"),
            route("/health_generate", status_endpoints.health_generate, "GET"),
            route("/ready", status_endpoints.ready, "GET"),
            route("/v1/loads", status_endpoints.loads, "GET"),
            route("/metrics", status_endpoints.metrics, "GET"),
        ]
    )
    app.state.server = server
    return app
