"""A registry whose stored value is damaged is replaced by the next registration."""

from __future__ import annotations

import pytest

from penstock.protocol.streams import BucketSpec
from penstock.protocol.transport.bus import Bus
from penstock.reward_service.endpoints.endpoint import ANONYMOUS, Endpoint
from penstock.reward_service.endpoints.endpoint_registry import KEY, EndpointRegistry, SecretStore


@pytest.mark.parametrize(
    "damaged", [b"", b"[1]", b"\xff\x00", b"null", b'{"endpoints": 7, "retired": []}', b"[" * 3000]
)
async def test_a_damaged_registry_takes_registrations(bus: Bus, run_id: str, damaged: bytes) -> None:
    """A replica that starts beside a damaged value registers an endpoint, and another replica then reads it."""
    bucket = BucketSpec(f"{run_id}-registry")
    await bus.ensure_bucket(bucket)
    store = await bus.key_value(bucket.bucket)
    await store.put(KEY, damaged)
    first = EndpointRegistry(store, SecretStore(store))
    await first.refresh()
    endpoint = Endpoint(name="digits", url="http://127.0.0.1:9/score", version="1")
    await first.add(endpoint, replace_other=False, caller=ANONYMOUS)
    second = EndpointRegistry(store, SecretStore(store))
    await second.refresh()
    assert list(second.endpoints) == ["digits"]
    await bus.delete_stream(f"KV_{bucket.bucket}")
