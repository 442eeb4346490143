"""Groups of episodes that a server plays: over connections that lose answers, by servers that fail, refuse and lie."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.agents.environments.played import Script, engine_of, once, rolled, said, task_of
from tests.json_server import JsonServer
from tests.pictures import picture, picture_bytes

from penstock.agents.environments.episode_environment import group_seed
from penstock.agents.environments.games.lookup import LOOKUP, value_of
from penstock.agents.environments.over_http.http_environment import HTTP, Http
from penstock.agents.environments.over_http.servers import Server, Servers, open_session
from penstock.agents.environments.play import Reply, done, say
from penstock.agents.environments.turn_environment import TurnEnvironment
from penstock.agents.hosting import serve
from penstock.agents.hosting.episodes import Episodes
from penstock.agents.proxy.messages import Message
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.config.environment_settings import EnvironmentDefinition
from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.groups import Task
from penstock.protocol.transport.blobs import Blobs
from penstock.rollout_service.environments.environment import load_environments
from penstock.rollout_service.errors import TaskRefused
from penstock.rollout_service.run_images import RunImages
from penstock.serving import target_policy
from penstock.serving.http_connections import ConnectionFailed
from penstock.serving.web_server import serving_app

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()


@contextlib.asynccontextmanager
async def served(
    environment: TurnEnvironment, *, capacity: int = 64, secrets: tuple[str, ...] = (), idle_s: float = 60.0
) -> AsyncIterator[tuple[str, Episodes]]:
    episodes = Episodes(environment, environment.version, capacity=capacity, reply_deadline_s=20.0, idle_s=idle_s)
    try:
        async with serving_app(serve.build_app(episodes, secrets=secrets), "127.0.0.1", 0, key="--port") as url:
            yield url, episodes
    finally:
        await episodes.close()


class LosesAnswers:
    """Forwards connections to a server, and closes them in place of some answers: the server has acted by then."""

    def __init__(self, url: str, lose: Callable[[bytes], bool]) -> None:
        self.port, self.lose, self.lost = int(url.rpartition(":")[2]), lose, 0

    @contextlib.asynccontextmanager
    async def forwarding(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            while request := await reader.read(1 << 16):
                back.write(request)
                answer = await there.read(1 << 16)
                if self.lose(request):
                    self.lost += 1
                    return
                writer.write(answer)
        finally:
            writer.close()
            back.close()


def over_http(model: Path, url: str | list[str], **settings: Any) -> Http:
    options = {"url": url, **settings.pop("options", {})}
    definition = EnvironmentDefinition.model_validate({"type": "http", "options": options, **settings})
    own = load_environments((), {"mine": definition})["mine"]
    assert isinstance(own, Http)
    own.use_model(model, 8192)
    return own


async def play(model: Path, environment: Http, script: list[str], task: Task | None = None) -> Any:
    """Play one task with an engine that answers with texts; return what became of it."""
    return await rolled(environment, engine_of(model, script), task)


async def test_a_group_is_played_by_a_server(model: Path) -> None:
    """Equal to the same environment in the worker: turns, rewards, parts, version; the server keeps no episode."""
    value = value_of(group_seed(task_of()), "37")
    async with served(LOOKUP, secrets=(SECRET,)) as (url, episodes):
        (model / "secret").write_text(SECRET)
        own = over_http(model, url, options={"secret_file": str(model / "secret"), "version": "1"})
        (episode,) = await play(model, own, ["?37", value])
        assert episodes.running == 0
    assert (episode.status, episode.reward, dict(episode.reward_parts)) == ("done", 1.0, {"asked": 1.0})
    assert (episode.environment, episode.environment_version, episode.seed) == ("mine", "1", group_seed(task_of()))
    assert [turn.reward for turn in episode.rows[0].turns] == [0.0, 1.0]
    assert [content for _, content in said(episode)] == ["get 37", "?37", value, value]


async def test_a_step_whose_answer_is_lost_moves_the_world_once(model: Path) -> None:
    """It is sent again with its number, and answered as before; nothing is started again."""
    script = Script(lambda: say("on", 0.25), lambda: say("on", 0.25), lambda: done(0.5))
    lost = {b"/step": 4}

    def lose(request: bytes) -> bool:
        is_step = b"/step" in request.partition(b"\r\n")[0]
        lost[b"/step"] -= is_step
        return is_step and lost[b"/step"] >= 0 and lost[b"/step"] % 2 == 1

    async with served(script) as (url, episodes):
        wire = LosesAnswers(url, lose)
        async with wire.forwarding() as forwarded:
            (episode,) = await play(model, over_http(model, forwarded), ["a", "b", "c"])
        assert episodes.running == 0
    assert wire.lost == 2
    assert (episode.status, episode.reward, episode.attempt) == ("done", 1.0, 0)
    assert script.closed == [3]


async def test_a_score_is_added_where_a_limit_of_the_run_ended_the_episode(model: Path) -> None:
    """As in the worker, once although an answer is lost, and not after a last reply; one without is not asked."""
    asked: list[bytes] = []

    def lose(request: bytes) -> bool:
        if is_score := b"/score" in request.partition(b"\r\n")[0]:
            asked.append(request)
        return is_score and len(asked) == 1

    async def ended(script: Script) -> tuple[Any, list[float]]:
        async with served(script, secrets=(SECRET,)) as (url, episodes), LosesAnswers(url, lose).forwarding() as there:
            own = over_http(model, there, max_turns=2, attempts=1, options={"secret_file": str(model / "secret")})
            (episode,) = await play(model, own, ["a", "b"])
            assert episodes.running == 0
        return episode, [turn.reward for turn in episode.rows[0].turns]

    (model / "secret").write_text(SECRET)
    scored = Script(lambda: say("on", 0.25), score=lambda: 0.5)
    episode, rewards = await ended(scored)
    assert (episode.status, episode.reward, rewards) == ("truncated", 1.0, [0.25, 0.75])
    assert (len(asked), scored.asked) == (2, 1)
    episode, rewards = await ended(Script(lambda: say("on", 0.25), lambda: done(1.0), score=lambda: 0.5))
    assert (episode.status, rewards) == ("done", [0.25, 1.0])
    episode, rewards = await ended(Script(lambda: say("on", 0.25)))
    assert (episode.status, rewards) == ("truncated", [0.25, 0.25])
    assert len(asked) == 2


async def test_a_full_server_is_waited_for(model: Path) -> None:
    """Episodes beyond its capacity wait, and are all played; the wait is not part of their time."""
    most = [0]

    def step() -> Reply:
        most[0] = max(most[0], episodes.running)
        return done(1.0)

    async with served(Script(step), capacity=1) as (url, episodes):
        own = over_http(model, url, episode_deadline_s=60)
        group = await play(model, own, ["a"] * 3, task_of(size=3))
    assert [one.status for one in group] == ["done"] * 3
    assert most == [1]


async def test_an_episode_whose_server_fails_is_begun_again_with_its_seed(model: Path) -> None:
    """An exception of the environment, and a server that knows the episode no more: a failure is no reward."""

    def fails() -> Reply:
        raise OSError("the world is gone")

    def forgets() -> Reply:
        episodes._held.clear()
        return say("on")

    for failing in (fails, forgets):
        script = Script(once(failing, done(0.5)), lambda: done(0.5))
        async with served(script) as (url, episodes):
            (episode,) = await play(model, over_http(model, url), ["a", "b", "c"])
        assert (episode.status, episode.reward, episode.attempt) == ("done", 0.5, 1)
        assert script.seeds == [group_seed(task_of())] * 2


async def test_an_episode_goes_to_a_server_that_works(model: Path) -> None:
    """One of two URLs answers nobody; with none that works, or in time, the group is refused with the reason."""
    nobody = "http://127.0.0.1:9"
    async with served(Script(lambda: done(1.0))) as (url, _):
        group = await play(model, over_http(model, [nobody, url]), ["a"] * 4, task_of(size=4))
        assert [one.reward for one in group] == [1.0] * 4
    found = await play(model, over_http(model, nobody, attempts=1, options={"place_deadline_s": 0.2}), [])
    assert isinstance(found, TaskRefused)
    assert "no session within 0.2 s (options.place_deadline_s): http://127.0.0.1:9/episodes: " in str(found)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        options = {"place_deadline_s": 0.4, "start_deadline_s": 0.1}
        found = await play(model, over_http(model, url, attempts=1, options=options), [])
    assert f"{url}/episodes: no answer within 0.1 s (options.start_deadline_s)" in str(found)


async def test_a_gateway_without_a_server_costs_no_attempt(model: Path) -> None:
    """Its own answers are none of an environment: the start is tried again until there is a server."""

    class Gateway(Hostile):
        starts = 0

        def answer(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> tuple[int, Any]:
            self.starts += path == "/episodes"
            return (404, b"<html>") if self.starts < 3 else super().answer(method, path, body, headers)

    with Gateway("nowhere", b"") as server:
        (episode,) = await play(model, over_http(model, server.url, attempts=1), ["a"])
    assert (episode.reward, server.starts) == (1.0, 3)


async def test_a_row_that_the_server_refuses_is_not_tried_again(model: Path) -> None:
    async with served(LOOKUP) as (url, _):
        found = await play(model, over_http(model, url), [], task_of("get"))
        assert isinstance(found, TaskRefused)
        assert "no play for this row" in str(found)
        assert "row_refused: ValueError: the prompt names 0 keys" in str(found)
        found = await play(model, over_http(model, url, options={"options": {"size": 3}}), [])
        assert "Extra inputs are not permitted" in str(found)
        found = await play(model, over_http(model, url, options={"version": "2"}, attempts=1), [])
        assert "wrong_version: version '1' is played here, not '2'" in str(found)


STARTED = {"messages": [{"role": "user", "content": "go"}], "version": "1"}
HOSTILE = {
    "nan": ("step", b'{"done": true, "reward": NaN}', "NaN is not a JSON number"),
    "infinite": ("step", b'{"done": true, "reward": 1e999}', "Stepped: reward: Input should be a finite number"),
    "huge": ("step", b'{"done": true, "reward": 1e300}', "Stepped: reward: Input should be less than or equal to"),
    "text": ("step", b'{"done": true, "reward": "1"}', "Stepped: reward: Input should be a valid number"),
    "yes": ("step", b'{"done": true, "reward": true}', "Stepped: reward: Input should be a valid number"),
    "part": ("step", b'{"done": true, "parts": {"a": 1e999}}', "Stepped: parts.a: Input should be a finite number"),
    "twice": ("step", b'{"done": true, "reward": 1, "reward": 0}', "has the key 'reward' twice"),
    "unknown": ("step", b'{"done": true, "rewards": 1}', "Stepped: rewards: Extra inputs are not permitted"),
    "deep": ("step", b'{"done": true, "messages": [' + b'{"a":' * 70 + b"1" + b"}" * 70 + b"]}", "more than 64 times"),
    "deeper": ("step", b"[" * 200_000, "nested too deeply"),
    "long": ("step", b'{"done": true, "state": "' + b"x" * 20_000 + b'"}', "with more than 8192 bytes"),
    "role": ("step", b'{"messages": [{"role": "root", "content": "x"}]}', "messages[0].role must be one of"),
    "assistant": ("step", b'{"messages": [{"role": "assistant", "content": "x"}]}', "the last of role user or tool"),
    "empty": ("step", b"{}", "at least one Message"),
    "html": ("step", b"<html>", "what is no Stepped: it is not JSON"),
    "list": ("step", b"[]", "Stepped: the body: Input should be a valid dictionary"),
    "score": ("score", b'{"reward": 1e999}', "Scored: reward: Input should be a finite number"),
    "scores": ("score", b'{"reward": 1, "parts": {}}', "Scored: parts: Extra inputs are not permitted"),
    "no score": ("score", b"{}", "Scored: reward: Field required"),
    "start": ("start", b'{"messages": []}', "Started: messages: List should have at least 1 item"),
    "tools": ("start", b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "shell"}]}', "tools"),
    "answers": ("start", b'{"messages": [{"role": "user", "content": 3}]}', "messages[0].content"),
}  # fmt: skip


class Hostile(JsonServer):
    """Answers as the protocol says, but for one call."""

    def __init__(self, where: str, body: bytes, status: int = 200) -> None:
        self.where, self.body, self.status = where, body, status
        super().__init__()

    def answer(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> tuple[int, Any]:
        where = "start" if path == "/episodes" else path.rpartition("/")[2]
        if method == "POST" and where == self.where:
            return self.status, self.body
        if self.where == "score":
            return 200, {**STARTED, "scores": True} if where == "start" else {"messages": STARTED["messages"]}
        return 200, STARTED if where == "start" else {"done": True, "reward": 1.0}


@pytest.mark.parametrize("case", HOSTILE)
async def test_an_answer_that_is_none_is_refused_with_the_reason(model: Path, case: str) -> None:
    """Nothing of it is used: the group is refused, and gets no reward."""
    where, body, said = HOSTILE[case]
    options = {"max_reply_bytes": 8192} if case == "long" else {}
    with Hostile(where, body) as server:
        own = over_http(model, server.url, attempts=1, max_turns=1, options=options)
        found = await play(model, own, ["a"])
    assert isinstance(found, TaskRefused)
    assert said in str(found)


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (302, b"", "answers HTTP 302, 0 bytes that are no Problem"),
        (500, b"secret of another server", "answers HTTP 500, 24 bytes that are no Problem"),
        (409, b'{"code": "step_refused", "message": "late\\u001b[2J"}', "HTTP 409: step_refused: late?[2J"),
        (201, b'{"done": true, "reward": 1.0}', "answers HTTP 201"),
    ],
)
async def test_another_status_ends_the_attempt(model: Path, status: int, body: bytes, said: str) -> None:
    """Redirects are not followed, a body that is no `Problem` is not quoted, control characters are not printed."""
    with Hostile("step", body, status) as server:
        found = await play(model, over_http(model, server.url, attempts=1), ["a"])
    assert isinstance(found, TaskRefused)
    assert said in str(found)
    assert "secret" not in str(found)


@pytest.mark.parametrize(
    ("url", "allowed", "said"),
    [
        ("http://8.8.8.8", ("10.0.0.0/8",), "8.8.8.8 is 8.8.8.8, which is in none of options.allowed_targets"),
        ("http://169.254.169.254", ("0.0.0.0/0",), "metadata and multicast addresses are never called"),
        ("http://localhost:9", ("10.0.0.0/8",), "in none of options.allowed_targets"),
        ("http://127.0.0.1:4999", ("127.0.0.0/8",), "is NATS of this run"),
        ("http://localhost:4999", ("127.0.0.0/8", "::1/128"), "is NATS of this run"),
    ],
)
async def test_an_address_that_may_not_be_called_is_not(
    model: Path, url: str, allowed: tuple[str, ...], said: str
) -> None:
    """By number and by name; the run's own servers are none of an environment."""
    options = {"url": url, "allowed_targets": list(allowed), "place_deadline_s": 0.2}
    own = HTTP.defined("mine", EnvironmentDefinition(type="http", attempts=1, options=options))
    own.never_call(await target_policy.find_own_servers(NatsSettings(url="nats://127.0.0.1:4999"), S3Settings()))
    own.use_model(model, 8192)
    found = await play(model, own, [])
    assert isinstance(found, TaskRefused)
    assert said in str(found)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "give either url, or the name under which servers are registered"),
        ({"url": "ftp://a"}, "only http:// and https://"),
        ({"url": "http://me:hunter2@a"}, "put no user name or password"),
        ({"url": "http://a/?x=1"}, "has no ?query"),
        ({"url": ["http://a", "http://a"]}, "1 to 256 different URLs"),
        ({"url": "http://a", "allowed_targets": ["10.0.0.0/99"]}, "neither a network"),
        ({"url": "http://a", "registered": "guess"}, "give either url, or the name"),
        ({"registered": "a.b"}, "String should match pattern"),
    ],
)
def test_a_definition_that_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    """On reading the run file."""
    with pytest.raises(ConfigError) as caught:
        load_environments((), {"mine": EnvironmentDefinition.model_validate({"type": "http", "options": options})})
    assert said in str(caught.value)
    assert "hunter2" not in str(caught.value)


async def test_http_needs_a_definition_and_its_secret_a_key(model: Path, tmp_path: Path) -> None:
    plain = Http()
    plain.use_model(model, 8192)
    found = await play(model, plain, [])
    assert "write [environment.define.NAME]" in str(found)
    (tmp_path / "key").write_text("hunter2")
    with pytest.raises(ConfigError, match=r"options\.secret_file .*a signing secret is whsec_") as caught:
        over_http(model, "http://127.0.0.1:9", options={"secret_file": str(tmp_path / "key")})
    assert "hunter2" not in str(caught.value)


async def test_a_cancelled_pack_ends_its_episodes_at_the_server(model: Path) -> None:
    """Also those that were waiting for a reply."""
    stepping, released = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hang() -> Reply:
        loop.call_soon_threadsafe(stepping.set)
        released.wait(60)
        return done(1.0)

    async with served(Script(hang)) as (url, episodes):
        playing = asyncio.create_task(play(model, over_http(model, url), ["a"]))
        async with asyncio.timeout(60):
            await stepping.wait()
            assert episodes.running == 1
            playing.cancel()
            await asyncio.wait([playing])
        assert playing.cancelled()
        assert episodes.running == 0
        released.set()


def test_servers_share_the_episodes_and_rest_after_failures() -> None:
    """The one with the fewest gets the next; a failing one rests longer each time, a full one as long as it says."""
    servers = Servers(["a", "b"])
    first = servers.choose(0.0)
    assert first is not None
    first.running += 1
    second = servers.choose(0.0)
    assert second is not None
    assert (first.url, second.url) == ("a", "b")
    for one in (first, second):
        for now in (0.0, 0.1, 0.2):  # the calls that were in flight
            one.failed(now)
    second.failed(0.5)
    assert servers.choose(0.4) is None
    assert servers.ready_in_s(0.4) == pytest.approx(0.1)
    assert servers.choose(0.6) is first
    assert (second.failures, second.rests_until) == (2, 1.5)
    full = Server("c")
    full.is_full(0.0, 7.0)
    assert (full.rests_until, full.failures) == (7.0, 0)
    for number in range(99):
        full.failed(100.0 * number)
    assert full.rests_until == 9830.0
    full.works()
    assert (full.failures, full.rests_until) == (0, 0.0)


async def test_an_image_of_a_server_is_shown_where_the_model_reads_images(
    model: Path, blobs: Blobs, run_id: str
) -> None:
    """As one of an environment in the worker: this model reads text alone, and says so."""
    images = RunImages(blobs, run_id)
    images.use_model(model)
    asked = Message.of_parts("user", "What is this?", picture_bytes(picture(24, 24)))
    async with served(Script(start=lambda: [asked])) as (url, _):
        own = over_http(model, url, attempts=1)
        own.use_images(images)
        found = await play(model, own, [])
    assert "reads text alone" in str(found)


async def test_a_compressed_answer_is_refused(model: Path) -> None:
    """Nothing asks for one, and a small one may be a large one."""
    with Hostile("start", b"{}") as server:
        server.headers = {"content-encoding": "gzip"}
        found = await play(model, over_http(model, server.url, attempts=1), [])
    assert "compresses its answer" in str(found)


async def test_a_server_that_failed_rests_before_what_was_opened_on_it_is_closed() -> None:
    """Closing may take seconds, in which no other episode must be sent there."""
    servers = Servers(["a", "b"])
    closed: list[tuple[str, bool, int]] = []

    async def start(server: Server, undo: contextlib.AsyncExitStack) -> str:
        async def close() -> None:
            closed.append((server.url, server.rests_until > time.monotonic(), server.running))

        undo.push_async_callback(close)
        if not closed:
            raise ConnectionFailed(server.url, "it did not answer")
        return server.url

    session = await open_session(servers, start, 5.0, PenstockError)
    assert len(closed) == 1
    assert closed[0] == ({"a": "b", "b": "a"}[session], True, 0)
