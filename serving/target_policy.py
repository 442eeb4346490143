"""Which addresses a service may send requests to.

Users give URLs of reward and environment servers, and the usual target *is* private (this machine, a compose network, a
cluster service), so a ban of private addresses would ban the main use. Instead: an allow-list of networks and host
names, and a list of addresses that are refused whatever the allow-list says. The HTTP clients resolve names, in a
bounded time, and check every address they connect to.

Servers of the run itself (NATS, S3 and the service's API) are never allowed as endpoints: a caller who may register
endpoints could otherwise make this service send requests to them, past their firewall.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import re
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.errors import TargetRefused

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

PRIVATE_TARGETS = ("127.0.0.0/8", "::1/128", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")
# Metadata services give a machine's credentials to any process on it.
_NEVER = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",
        "169.254.0.0/16",  # link-local, among it the metadata address of most clouds
        "100.100.100.200/32",  # Alibaba metadata
        "168.63.129.16/32",  # Azure platform address
        "192.0.0.192/32",  # Oracle metadata
        "224.0.0.0/4",
        "255.255.255.255/32",
        "::/128",
        "fe80::/10",
        "fd00:ec2::254/128",  # AWS metadata over IPv6
        "fd20:ce::254/128",  # Google metadata over IPv6
        "ff00::/8",
    )
)
# IPv6 networks whose last 32 bits are an IPv4 address that a gateway would connect to.
_CARRY_IPV4 = tuple(
    ipaddress.IPv6Network(text)
    for text in (
        "::/96",  # IPv4-compatible, RFC 4291; :: and ::1 aside
        "::ffff:0:0:0/96",  # IPv4-translated, RFC 2765
        "64:ff9b::/96",  # NAT64, RFC 6052
        "64:ff9b:1::/48",  # NAT64 of a site, RFC 8215
    )
)
_URL = re.compile(r"[!-\[\]-~]+")  # printable ASCII without the backslash
_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_FOUR_NUMBERS = re.compile(r"([0-9]+\.){3}[0-9]+\.?")
_MAX_HOST = 253  # RFC 1035
_DEADLINE_S = 5.0
# A separate pool: a name server that hangs must not block the threads of other work.
_RESOLVERS = ThreadPoolExecutor(16, thread_name_prefix="resolve")
_NATS_PORT = 4222
_MONITOR_PORT = 8222  # of NATS unless its configuration has another one; it tells accounts, subjects and addresses
_WEB_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}


@dataclass(frozen=True, slots=True)
class OwnServer:
    """A server of the run itself, which is never an endpoint: the addresses its name had, and its port."""

    name: str
    host: str
    port: int
    addresses: frozenset[Address] = frozenset()

    def is_at(self, ip: Address, port: int) -> bool:
        """Return True if an address is this server's; a server on this machine has all addresses of the machine."""
        if port != self.port:
            return False
        here = ip.is_loopback or ip.is_unspecified
        return ip in self.addresses or (
            here and any(address.is_loopback or address.is_unspecified for address in self.addresses)
        )


class TargetPolicy:
    """Decides about URLs and addresses; build it from the entries of a setting ``allowed_targets``."""

    def __init__(
        self, allowed: Sequence[str], own_servers: Sequence[OwnServer] = (), *, key: str = "allowed_targets"
    ) -> None:
        """Read the entries of the setting ``key``; ``own_servers`` are never called.

        Raises ValueError naming what is neither a network nor a host name.
        """
        self._own = tuple(own_servers)
        self._key = key
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        self._hosts: set[str] = set()
        for entry in allowed:
            try:
                self._networks.append(ipaddress.ip_network(entry, strict=False))
            except ValueError:
                if "/" in entry or not _HOST_NAME.fullmatch(entry):
                    raise ValueError(f"{key}: {entry!r} is neither a network like 10.0.0.0/8 nor a host name") from None
                self._hosts.add(entry.rstrip(".").lower())

    def check_url(self, url: str) -> tuple[str, int]:
        """Return host and port of a plain http(s) URL; raises TargetRefused for any other, or one with credentials."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as err:
            raise TargetRefused(f"{url!a} is not a URL ({err})") from None
        if parts.username is not None or parts.password is not None:
            raise TargetRefused("put no user name or password into an endpoint's URL: it is shown in listings")
        if parts.scheme not in {"http", "https"}:
            raise TargetRefused(f"{url!a}: only http:// and https:// endpoints are called")
        if not parts.hostname or port == 0:
            raise TargetRefused(f"{url!a} has no host")
        if not _URL.fullmatch(url) or not _is_host(parts.hostname):
            raise TargetRefused(
                f"{url!a} is not a URL: its host must be a name or an address, all of it in ASCII without spaces or "
                "backslashes (names of other scripts as xn--..., other characters as %XX)"
            )
        if "[" in parts.netloc and ":" not in parts.hostname:
            raise TargetRefused(f"{url!a} is not a URL: only an IPv6 address is put between brackets")
        if parts.fragment:
            raise TargetRefused(f"{url!a}: a fragment (#...) is never sent to a server")
        return parts.hostname, port or (443 if parts.scheme == "https" else 80)

    def check_address(self, host: str, address: str, port: int) -> None:
        """Raise TargetRefused unless ``address``, which ``host`` resolved to, may be connected to at ``port``."""
        ip, name = _unmapped(ipaddress.ip_address(address.partition("%")[0])), host.rstrip(".").lower()
        for server in self._own:
            if server.is_at(ip, port) or (server.port == port and server.host.rstrip(".").lower() == name):
                raise TargetRefused(
                    f"{host} port {port} is {server.name} of this run, never an endpoint; register another address"
                )
        if any(ip.version == network.version and ip in network for network in _NEVER):
            raise TargetRefused(f"{host} is {ip}: link-local, metadata and multicast addresses are never called")
        if name in self._hosts:
            return
        if not any(ip.version == network.version and ip in network for network in self._networks):
            raise TargetRefused(f"{host} is {ip}, which is in none of {self._key}; add its network or host name there")


def _is_host(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        is_number = _FOUR_NUMBERS.fullmatch(name) is not None  # of which a resolver may make any address
        return _HOST_NAME.fullmatch(name) is not None and len(name) <= _MAX_HOST and not is_number
    return "%" not in name  # an interface of this machine


def _unmapped(ip: Address) -> Address:
    """Return the IPv4 address that an IPv6 one carries, so that it cannot bypass a rule."""
    if not isinstance(ip, ipaddress.IPv6Address):
        return ip
    if ip.teredo is not None:
        return ip.teredo[1]
    if any(ip in network for network in _CARRY_IPV4) and int(ip) > 1:
        return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.ipv4_mapped or ip.sixtofour or ip


async def resolve(host: str, port: int) -> list[str]:
    """Return all addresses of a name; raises OSError when it has none, or when no name server answers in time."""
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(host))]
    look_up = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        async with asyncio.timeout(_DEADLINE_S):
            address_infos = await asyncio.get_running_loop().run_in_executor(_RESOLVERS, look_up)
    except UnicodeError:  # a part of the name is empty or too long
        raise OSError(f"{host!a} is no host name") from None
    return list(dict.fromkeys(str(entry[4][0]) for entry in address_infos))


async def find_own_servers(nats: NatsSettings, s3: S3Settings) -> list[OwnServer]:
    """Return NATS and S3 with the addresses of their names now; one that does not resolve is matched by name."""
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
    address = ipaddress.ip_address(host.partition("%")[0])
    addresses = {address}
    if address.is_unspecified:
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
