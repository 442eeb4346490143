"""Addresses that endpoints may have: allow-listed networks and hosts, and addresses that are always refused."""

from __future__ import annotations

import ipaddress

import pytest

from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.errors import TargetRefused
from penstock.serving import target_policy
from penstock.serving.target_policy import PRIVATE_TARGETS, OwnServer, TargetPolicy


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.1.2.3", "172.31.0.1", "192.168.1.1", "::1", "fd12::1", "::ffff:10.0.0.1"]
)
def test_loopback_and_private_addresses_are_allowed_by_default(address: str) -> None:
    """The usual endpoint is on this machine, in a compose network or in the cluster."""
    TargetPolicy(PRIVATE_TARGETS).check_address("host", address, 80)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "172.32.0.1", "2001:4860:4860::8888", "::ffff:8.8.8.8", "2002:808:808::1"]
)
def test_public_addresses_need_to_be_listed(address: str) -> None:
    """A public address is refused, also as mapped IPv6, until its network or host name is listed."""
    with pytest.raises(TargetRefused, match="allowed_targets"):
        TargetPolicy(PRIVATE_TARGETS).check_address("host.example", address, 80)
    TargetPolicy(["host.example"]).check_address("Host.Example.", address, 80)
    TargetPolicy(["0.0.0.0/0", "::/0"]).check_address("host.example", address, 80)


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "169.254.170.2",
        "100.100.100.200",
        "168.63.129.16",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::",
        "fe80::1",
        "fe80::1%eth0",
        "fd00:ec2::254",
        "ff02::1",
        "::ffff:169.254.169.254",
        "2002:a9fe:a9fe::1",
        "::a9fe:a9fe",
        "::ffff:0:a9fe:a9fe",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::a9fe:a9fe",
        "2001:0:808:808:0:0:5601:5601",
    ],
)
def test_metadata_and_link_local_addresses_are_never_called(address: str) -> None:
    """No allow-list permits the addresses of a machine's credentials."""
    with pytest.raises(TargetRefused, match="never called"):
        TargetPolicy(["0.0.0.0/0", "::/0", "metadata.example"]).check_address("metadata.example", address, 80)


@pytest.mark.parametrize("entry", ["10.0.0.0/33", "http://x", "a b", "", "10.0.0.0/8/8", "-x.example"])
def test_an_entry_that_is_neither_network_nor_host_is_refused(entry: str) -> None:
    """A typo in the allow-list is an error at the start."""
    with pytest.raises(ValueError, match="allowed_targets"):
        TargetPolicy([entry])


@pytest.mark.parametrize(
    ("host", "address", "port", "refused"),
    [
        ("127.0.0.1", "127.0.0.1", 4222, True),
        ("elsewhere", "127.9.9.9", 4222, True),
        ("elsewhere", "::1", 4222, True),
        ("127.0.0.1", "127.0.0.1", 4223, False),
        ("store.example", "10.0.0.7", 9000, True),
        ("Store.Example.", "10.0.0.8", 9000, True),
        ("alias", "10.0.0.7", 9000, True),
        ("alias", "10.0.0.7", 8000, False),
        ("alias", "10.0.0.8", 9000, False),
    ],
)
def test_the_runs_own_servers_are_never_endpoints(host: str, address: str, port: int, *, refused: bool) -> None:
    """NATS and S3 are refused by every name and address they have here, other ports of the same hosts are not."""
    nats = OwnServer("NATS", "localhost", 4222, frozenset({ipaddress.ip_address("127.0.0.1")}))
    store = OwnServer("the object store", "store.example", 9000, frozenset({ipaddress.ip_address("10.0.0.7")}))
    policy = TargetPolicy(PRIVATE_TARGETS, [nats, store])
    if refused:
        with pytest.raises(TargetRefused, match="of this run"):
            policy.check_address(host, address, port)
    else:
        policy.check_address(host, address, port)


async def test_own_servers_are_read_from_the_run_file() -> None:
    """Every NATS URL of a list counts, with the port its scheme implies; so does the object store."""
    nats = NatsSettings(url="nats://127.0.0.1:5222, 127.0.0.2,wss://127.0.0.3")
    found = await target_policy.find_own_servers(nats, S3Settings(endpoint="https://127.0.0.4"))
    assert [(server.name, server.host, server.port) for server in found] == [
        ("NATS", "127.0.0.1", 5222),
        ("NATS' monitoring", "127.0.0.1", 8222),
        ("NATS", "127.0.0.2", 4222),
        ("NATS' monitoring", "127.0.0.2", 8222),
        ("NATS", "127.0.0.3", 443),
        ("NATS' monitoring", "127.0.0.3", 8222),
        ("the object store", "127.0.0.4", 443),
    ]
    assert found[0].addresses == {ipaddress.ip_address("127.0.0.1")}
