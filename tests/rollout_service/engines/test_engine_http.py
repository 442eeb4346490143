"""Requests to an engine: what is not an answer is an error that says what came."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from penstock.rollout_service.engines.completion_sampler import RequestDeadline
from penstock.rollout_service.engines.engine_http import EngineHttp
from penstock.rollout_service.errors import EngineRefused, EngineUnreachable


class _Answers(BaseHTTPRequestHandler):
    asked: list[str]

    def do_POST(self) -> None:
        self.asked.append(self.path)
        self.send_response(307 if self.path == "/moved" else 200)
        self.send_header("Location", "/elsewhere")
        self.send_header("Set-Cookie", "a=b")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


async def test_a_prompt_is_not_sent_where_an_engine_redirects_to() -> None:
    asked: list[str] = []
    handler = type("Handler", (_Answers,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        http = EngineHttp(f"http://127.0.0.1:{served.server_port}")
        with pytest.raises(EngineRefused, match=r"/moved answered 307: \{\}") as caught:
            await http.call("POST", "/moved", {"a": 1}, 10.0)
        assert (caught.value.status, asked) == (307, ["/moved"])
        assert await http.call("POST", "/elsewhere", {"a": 1}, 10.0) == {}
        await http.close()
        with pytest.raises(EngineUnreachable, match="this client has been closed"):
            await http.call("POST", "/elsewhere", {}, 1.0)
        assert asked == ["/moved", "/elsewhere"]
        served.shutdown()


@pytest.mark.parametrize(
    ("measured", "max_new_tokens", "seconds"),
    [
        ([], 8, 600.0),  # what the settings say, where completions are short
        ([], 32_768, 4 * 32_768 * 0.05),
        ([(100, 2.0)] * 50, 32_768, 4 * 32_768 * 0.02),
        (
            [(100, 2.0)] * 50 + [(1, 60.0)] * 50,
            32_768,
            4 * 32_768 * 0.02,
        ),  # the prompt's time says nothing of a token's
        ([(100, 1.0)] * 50, 4_096, 600.0),
    ],
)
def test_long_completions_get_the_time_that_they_need(
    measured: list[tuple[int, float]], max_new_tokens: int, seconds: float
) -> None:
    deadline = RequestDeadline(600.0)
    for num_tokens, took_s in measured:
        deadline.measure(num_tokens, took_s)
    assert deadline.seconds(max_new_tokens) == pytest.approx(seconds, rel=0.01)
