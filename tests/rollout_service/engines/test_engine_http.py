"""Requests to an engine: what is not an answer is an error that says what came."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from penstock.rollout_service.engines.completion_sampler import RequestDeadline
from penstock.rollout_service.engines.engine_http import EngineHttp
from penstock.rollout_service.errors import EngineRefused, EngineUnreachable, ReplyRefused


class _Answers(BaseHTTPRequestHandler):
    asked: list[str]

    def do_POST(self) -> None:
        self.asked.append(self.path)
        moved = self.path == "/moved"
        body = b"{}" if self.path == "/elsewhere" else b"no JSON"
        self.send_response(307 if moved else 200)
        self.send_header("Location", "/elsewhere")
        self.send_header("Set-Cookie", "a=b")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []
    handler = type("Handler", (_Answers,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}", asked
        served.shutdown()
        thread.join()


async def _call(url: str, path: str) -> object:
    http = EngineHttp(url)
    try:
        return await http.call("POST", path, {"a": 1}, 10.0)
    finally:
        await http.close()


def test_a_prompt_is_not_sent_where_an_engine_redirects_to(server: tuple[str, list[str]]) -> None:
    url, asked = server
    with pytest.raises(EngineRefused, match="/moved answered 307: no JSON") as caught:
        asyncio.run(_call(url, "/moved"))
    assert (caught.value.status, asked) == (307, ["/moved"])
    assert asyncio.run(_call(url, "/elsewhere")) == {}


def test_what_is_not_json_is_shown(server: tuple[str, list[str]]) -> None:
    with pytest.raises(ReplyRefused, match=r"/text answered what is not JSON .*: no JSON"):
        asyncio.run(_call(server[0], "/text"))


def test_a_closed_client_sends_nothing(server: tuple[str, list[str]]) -> None:
    async def late() -> None:
        http = EngineHttp(server[0])
        await http.close()
        await http.call("POST", "/elsewhere", {}, 1.0)

    with pytest.raises(EngineUnreachable, match="this client has been closed"):
        asyncio.run(late())
    assert server[1] == []


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
