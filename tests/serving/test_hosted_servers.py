"""What a served reward and environment refuse before their code sees a request: the same, each in its form."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from tests.agents.environments.played import Script
from tests.agents.environments.test_over_http import SECRET

from penstock.agents.hosting import serve
from penstock.agents.hosting.episodes import Episodes
from penstock.protocol.errors import ConfigError
from penstock.reward_service.hosting import served_reward
from penstock.reward_service.hosting.served_reward import Calls
from penstock.serving.signature import read_secrets
from penstock.serving.web_server import allowed_hosts

Build = Callable[..., FastAPI]


def reward(secrets: Sequence[str], hosts: Sequence[str] | None) -> FastAPI:
    served = SimpleNamespace(title="none", version="1", batched=True, figures={})
    return served_reward.build_app(cast(Any, served), Calls(asyncio.get_running_loop()), secrets=secrets, hosts=hosts)


def environment(secrets: Sequence[str], hosts: Sequence[str] | None) -> FastAPI:
    episodes = Episodes(Script(), "1", capacity=1, reply_deadline_s=1.0, idle_s=60.0)
    return serve.build_app(episodes, secrets=secrets, hosts=hosts)


JSON = {"content-type": "application/json"}
LONG = {"content-length": str(10**9)}
REQUESTS: list[tuple[dict[str, Any], int, int, str]] = [
    ({"headers": {"host": "evil.example"}}, 403, 403, "the Host header must be localhost"),
    ({"headers": {"x": "a" * 40_000}}, 431, 431, "are longer than 32768 bytes"),
    ({"headers": LONG}, 413, 400, "the body is longer than"),
    ({"content": b'{"a": 1, "a": 2}'}, 400, 400, "the key 'a' twice"),
    ({"content": b'{"a": 1e999}'}, 400, 400, "1e999 is not a JSON number"),
    ({"content": b'{"a": "\\ud800"}'}, 400, 400, "half of a surrogate pair"),
]


@pytest.mark.parametrize(("build", "path"), [(reward, "/score"), (environment, "/episodes")])
async def test_a_request_that_cannot_be_is_refused_with_the_reason(build: Build, path: str) -> None:
    """Headers, Host, length and JSON; a signature before the body is read as JSON; a name of --url is a right Host."""
    transport = httpx.ASGITransport(build((), ()))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:1") as client:
        for request, of_reward, of_environment, reason in REQUESTS:
            more = {"headers": {}, **request}
            more["headers"] = [*dict(more["headers"]).items()] if isinstance(more["headers"], dict) else more["headers"]
            more["headers"] += JSON.items()
            answer = await client.post(path, **more)
            expected = of_reward if build is reward else of_environment
            said = answer.json()["detail" if build is reward else "message"]
            assert build is reward or answer.json()["code"] == "bad_request"  # no key makes it right
            assert (answer.status_code, reason in said) == (expected, True), (request, answer.text)
    for secrets, hosts, status in (((), ("gpu.example",), 400), ((SECRET,), None, 401)):
        transport = httpx.ASGITransport(build(secrets, hosts))
        async with httpx.AsyncClient(transport=transport, base_url="http://gpu.example:1") as client:
            assert (await client.post(path, content=b"{", headers=JSON)).status_code == status


def test_who_trusts_its_machine_answers_its_names_only() -> None:
    """Without keys, on the loopback; a server for other machines, or with keys, answers any name."""
    assert allowed_hosts("127.0.0.1", None, ()) == ()
    assert allowed_hosts("localhost", "https://gpu.example/x", ()) == ("gpu.example",)
    assert allowed_hosts("0.0.0.0", None, ()) is None
    assert allowed_hosts("127.0.0.1", None, (SECRET,)) is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "not readable"), (b"\xff", "not readable .not UTF-8"), (b"whsec_short", "a signing secret is"),
        (b"", "expected one or two keys, got 0"),
    ],
)  # fmt: skip
def test_a_file_of_keys_is_refused_by_its_option(tmp_path: Path, content: bytes | None, reason: str) -> None:
    """The option and the file are named, and no key is shown."""
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--secret-file .*keys: {reason}") as refused:
        read_secrets(file, "--secret-file")
    assert "short" not in str(refused.value)
