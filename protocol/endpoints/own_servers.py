"""The servers of the run itself, which the target policy never allows as endpoints: NATS, S3 and the service's own API.

A caller who may register endpoints could otherwise make this service send requests to them, past their firewall.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.endpoints.target_policy import OwnServer, resolve

_NATS_PORT = 4222
_MONITOR_PORT = 8222  # of NATS unless its configuration has another one; it tells accounts, subjects and addresses
_WEB_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}


async def find(nats: NatsSettings, s3: S3Settings) -> list[OwnServer]:
    """Return NATS and S3 with the addresses their names have now; one that does not resolve is matched by its name alone."""
    servers = []
    for name, host, port in _named(nats, s3):
        try:
            addresses = frozenset(ipaddress.ip_address(text.partition("%")[0]) for text in await resolve(host, port))
        except OSError:
            addresses = frozenset()
        servers.append(OwnServer(name, host, port, addresses))
    return servers


async def find_own_api(bound: socket.socket) -> OwnServer:
    """Return this service's API; on all addresses, it has those of this machine's name too."""
    host, port = bound.getsockname()[:2]
    own = ipaddress.ip_address(host.partition("%")[0])
    addresses = {own}
    if own.is_unspecified:
        with contextlib.suppress(OSError):
            addresses |= {ipaddress.ip_address(a.partition("%")[0]) for a in await resolve(socket.gethostname(), port)}
    return OwnServer("the API of this service", host, port, frozenset(addresses))


def _named(nats: NatsSettings, s3: S3Settings) -> Iterator[tuple[str, str, int]]:
    for url in nats.url.split(","):
        parts = urlsplit(url.strip() if "://" in url else f"nats://{url.strip()}")
        if parts.hostname:
            yield "NATS", parts.hostname, parts.port or _WEB_PORTS.get(parts.scheme, _NATS_PORT)
            yield "NATS' monitoring", parts.hostname, _MONITOR_PORT
    parts = urlsplit(s3.endpoint)
    if parts.hostname:
        yield "the object store", parts.hostname, parts.port or _WEB_PORTS[parts.scheme]
