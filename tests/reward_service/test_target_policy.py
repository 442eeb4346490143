"""Where endpoints may live: allow-listed networks and hosts, and addresses that are never right."""

from __future__ import annotations

import pytest

from reward_service.errors import EndpointRefused
from reward_service.target_policy import PRIVATE_TARGETS, TargetPolicy


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.1.2.3", "172.31.0.1", "192.168.1.1", "::1", "fd12::1", "::ffff:10.0.0.1"]
)
def test_loopback_and_private_addresses_are_allowed_unless_said_otherwise(address: str) -> None:
    """The usual endpoint is on this machine, in a compose network or in the cluster."""
    TargetPolicy(PRIVATE_TARGETS).check_address("host", address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "172.32.0.1", "2001:4860:4860::8888", "::ffff:8.8.8.8", "2002:808:808::1"]
)
def test_public_addresses_need_to_be_listed(address: str) -> None:
    """A public address is refused, also in IPv6 dress, until its network or host name is listed."""
    with pytest.raises(EndpointRefused, match="allowed_targets"):
        TargetPolicy(PRIVATE_TARGETS).check_address("host.example", address)
    TargetPolicy(["host.example"]).check_address("Host.Example.", address)
    TargetPolicy(["0.0.0.0/0", "::/0"]).check_address("host.example", address)


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
    """No allow-list opens the way to a machine's credentials."""
    with pytest.raises(EndpointRefused, match="never called"):
        TargetPolicy(["0.0.0.0/0", "::/0", "metadata.example"]).check_address("metadata.example", address)


@pytest.mark.parametrize("entry", ["10.0.0.0/33", "http://x", "a b", "", "10.0.0.0/8/8", "-x.example"])
def test_an_entry_that_is_neither_network_nor_host_is_refused(entry: str) -> None:
    """A typo in the allow-list is an error at the start."""
    with pytest.raises(ValueError, match="allowed_targets"):
        TargetPolicy([entry])
