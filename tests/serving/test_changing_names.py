"""Names that resolve to another address later: what is connected to is what was checked."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from tests.reward_service.processes import EndpointServer, raw

from penstock.protocol.errors import TargetRefused
from penstock.reward_service.endpoints.endpoint_call import describe
from penstock.serving.http_connections import ConnectionFailed, HttpConnections
from penstock.serving.target_policy import OwnServer, TargetPolicy

METADATA, HERE = "169.254.169.254", "127.0.0.1"


class NameServer:
    """Answers look-ups of ``*.test`` from a list that each look-up shortens to its last entry; others are real."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, list[list[str]]] = {}
        self.num_asked = 0
        really = socket.getaddrinfo

        def look_up(host: str, port: int, *args: object, **more: object) -> list[tuple[object, ...]]:
            if not str(host).endswith(".test"):
                return really(host, port, *args, **more)  # type: ignore[arg-type]
            self.num_asked += 1
            left = self.answers[host]
            found = left.pop(0) if len(left) > 1 else left[0]
            if not found:
                raise socket.gaierror(-2, "Name or service not known")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

        monkeypatch.setattr(socket, "getaddrinfo", look_up)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> NameServer:
    return NameServer(monkeypatch)


@pytest.fixture
def server() -> Iterator[EndpointServer]:
    found = EndpointServer(raw("{}"))
    yield found
    found.close()


def http(*own: OwnServer) -> HttpConnections:
    return HttpConnections(keep_s=5.0, policy=TargetPolicy(["127.0.0.0/8"], own), max_answer_bytes=1000)


async def post(client: HttpConnections, url: str) -> int:
    return (await client.send("POST", url, b"{}")).status


async def refused(client: HttpConnections, url: str, match: str) -> None:
    with pytest.raises(TargetRefused, match=match):
        await post(client, url)
    await client.close()


async def test_a_name_that_changes_after_its_registration_is_checked_again(
    names: NameServer, server: EndpointServer
) -> None:
    """A name that was allowed when it was registered is refused at the call when it leads to another address by then."""
    client, url = http(), server.url.replace(HERE, "moves.test")
    names.answers["moves.test"] = [[HERE], [METADATA]]
    await client.check(url)
    with pytest.raises(TargetRefused, match="never called"):
        await post(client, url)
    names.answers["moves.test"] = [[HERE], ["8.8.8.8"]]
    await client.check(url)
    with pytest.raises(TargetRefused, match="allowed_targets"):
        await post(client, url)
    names.answers["later.test"] = [[], [METADATA]]
    await client.check(url.replace("moves", "later"))
    with pytest.raises(TargetRefused, match="never called"):
        await post(client, url.replace("moves", "later"))
    await client.close()
    assert not server.requests


async def test_a_name_is_resolved_once_for_a_connection(names: NameServer, server: EndpointServer) -> None:
    """Between the check and the connection there is no second look-up, and a kept connection needs none."""
    client, url = http(), server.url.replace(HERE, "turns.test")
    names.answers["turns.test"] = [[HERE], [METADATA]]
    assert [await post(client, url) for _ in range(3)] == [200, 200, 200]
    await client.close()
    assert names.num_asked == 1
    assert server.hosts == [url.split("/")[2]] * 3


async def test_one_forbidden_address_forbids_the_name(names: NameServer, server: EndpointServer) -> None:
    """A name with an allowed and a forbidden address is refused, whichever comes first, and so is one of the run's servers."""
    own = OwnServer("NATS", HERE, int(server.url.split(":")[2].split("/")[0]), frozenset())
    url = server.url.replace(HERE, "both.test")
    for addresses in ([HERE, METADATA], [METADATA, HERE]):
        names.answers["both.test"] = [addresses]
        with pytest.raises(TargetRefused, match="never called"):
            await http().check(url)
        await refused(http(), url, "never called")
    names.answers["both.test"] = [[HERE]]
    named = OwnServer("NATS", "both.test", own.port)
    await refused(http(named), url, "is NATS of this run")
    assert not server.requests


async def test_a_connection_serves_only_the_name_it_was_made_for(names: NameServer, server: EndpointServer) -> None:
    """Two names at one address do not share a connection: its certificate was checked for one of them only."""
    client = http()
    for name in ("one.test", "two.test", "one.test"):
        names.answers[name] = [[HERE]]
        await post(client, server.url.replace(HERE, name))
    assert names.num_asked == 2, "one connection for each name"
    await client.close()


async def test_what_a_server_sends_is_in_no_error() -> None:
    """A banner instead of HTTP, a status line and a redirect are described without their words; a given reason is shown."""
    with socket.create_server((HERE, 0)) as listening:
        url = f"http://{HERE}:{listening.getsockname()[1]}/"
        client = http()
        listening.settimeout(5)

        def banner() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"SSH-2.0-OpenSSH_9.9 root:hunter2\r\n\r\n")
                connection.recv(65536)

        thread = threading.Thread(target=banner)
        thread.start()
        with pytest.raises(ConnectionFailed) as failed:
            await post(client, url)
        assert failed.value.reason == "ClientResponseError: what it sends is not HTTP"
        await client.close()
        thread.join(5)
    for more, text in (
        ({"location": "http://10.0.0.1/hunter2"}, "HTTP 307, 7 bytes"),
        ({"content-type": "text/hunter2 hunter2"}, "HTTP 307, 7 bytes"),
        ({"content-type": "text/plain; charset=hunter2"}, "HTTP 307, 7 bytes of text/plain"),
        ({"penstock-error": "not\tsigned"}, "HTTP 307, 7 bytes: not?signed"),
    ):
        server = EndpointServer(raw(b"hunter2", 307, **more))
        client = http()
        answer = await client.send("POST", server.url, b"{}")
        await client.close()
        server.close()
        assert describe(answer) == text
