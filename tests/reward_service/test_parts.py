"""Records of packs, waits before a redelivery, and settings that are refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol import streams
from penstock.protocol.config.run_file import load
from penstock.protocol.errors import ConfigError
from penstock.protocol.streams import BucketSpec
from penstock.protocol.transport.bus import Bus
from penstock.reward_service import pack_progress
from penstock.reward_service.announce import hash_of
from penstock.reward_service.endpoints.endpoint import ANONYMOUS, Endpoint, Role
from penstock.reward_service.endpoints.endpoint_registry import KEY, EndpointRegistry, SecretStore
from penstock.reward_service.errors import BreakerOpen, EndpointBusy
from penstock.reward_service.metrics import WINDOW, Timings
from penstock.reward_service.pack_progress import PackProgress, ProgressStore
from penstock.reward_service.pack_scoring import RetryPolicy
from penstock.reward_service.rewards.reward import Verdict
from penstock.reward_service.scores import GroupScores
from penstock.reward_service.settings import RewardSettings


def test_a_delivery_without_a_call_does_not_count_as_an_attempt() -> None:
    progress = PackProgress().settle(["a"]).excuse(["b", "c"]).excuse(["b"])
    assert progress.settled == {"a"}
    assert [progress.attempt(name, num_delivered=3) for name in ("b", "c", "d")] == [1, 2, 3]
    waits = progress.not_called(["b"], now=10.0).not_called(["b", "c"], now=20.0)
    assert dict(waits.refused_since) == {"b": 10.0, "c": 20.0}
    assert dict(waits.called(["b"]).refused_since) == {"c": 20.0}
    stored = pack_progress._STORED.dump_json(waits)
    assert json.loads(stored).keys() == {"settled", "excused", "refused_since"}
    assert pack_progress._STORED.validate_json(stored) == waits


def test_progress_is_shared_by_replicas_and_bounded(bus: Bus, run_streams: str) -> None:
    """A record that one replica saved is loaded by the next one at a redelivery, until it is deleted."""
    store = bus.key_value(streams.scoring_bucket(run_streams).bucket).wait()

    async def scenario() -> None:
        first, second = ProgressStore(store, max_messages=1), ProgressStore(store)
        assert await first.load(7, num_delivered=1) == PackProgress()
        await first.save(7, PackProgress().settle(["a"]).excuse(["b"]))
        await first.save(8, PackProgress().settle(["x"]))
        assert (await first.load(7, num_delivered=1)).settled == frozenset(), "the memory is bounded"
        found = await second.load(7, num_delivered=2)
        assert found.settled == {"a"}
        assert found.attempt("b", num_delivered=2) == 1
        await second.forget(7, num_delivered=2)
        assert await ProgressStore(store).load(7, num_delivered=3) == PackProgress()
        store_size = len(await store.entries())
        await first.save(9, PackProgress())
        assert len(await store.entries()) == store_size, "an empty record is not stored"

    asyncio.run(scenario())


def test_the_wait_of_groups_that_were_not_called_grows_and_has_jitter() -> None:
    policy = RetryPolicy(attempts=5, delay_s=2.0, not_called_limit_s=600.0)
    waits = [policy.delay_not_called(EndpointBusy("busy", retry_in_s=0.5), excused) for excused in range(20)]
    assert 0.3 <= waits[0] <= 0.7
    assert 6.0 <= waits[-1] <= 10.0
    assert len(set(waits)) == len(waits)
    assert policy.delay_not_called(BreakerOpen("open", retry_in_s=30.0), 0) >= 22.5


@given(st.integers(1, 10**6), st.floats(0.01, 3600))
def test_the_wait_grows_and_stays_bounded(attempt: int, delay_s: float) -> None:
    """Each redelivery waits at least as long as the one before, and at most a minute or the first wait."""
    policy = RetryPolicy(attempts=5, delay_s=delay_s, not_called_limit_s=600.0)
    assert policy.delay_after(1) == delay_s
    assert delay_s <= policy.delay_after(attempt) <= policy.delay_after(attempt + 1)
    assert policy.delay_after(attempt) <= max(60.0, delay_s)


def test_the_name_of_a_set_of_groups_does_not_depend_on_their_order() -> None:
    """The same groups announced twice carry the same message id; others another."""
    assert hash_of(["a", "b"]) == hash_of(["b", "a"])
    assert hash_of(["a", "b"]) != hash_of(["ab"])


def test_quantiles_are_of_the_recent_calls_only() -> None:
    """Old durations leave the window; counts are kept."""
    timings = Timings()
    assert timings.quantile(0.5) == 0.0
    timings.record(100.0, failed=True)
    for number in range(WINDOW):
        timings.record(number / WINDOW, failed=False)
    assert timings.quantile(1.0) < 1.0
    assert timings.quantile(0.5) == 0.5
    assert (timings.num_calls, timings.num_failed) == (WINDOW + 1, 1)


def test_parts_become_columns() -> None:
    scores = GroupScores.of([Verdict(1.0, {"a": 2.0}), Verdict(0.0, {"b": 3.0})], "me")
    assert scores.rewards == (1.0, 0.0)
    assert scores.parts == {"a": (2.0, 0.0), "b": (0.0, 3.0)}


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("reward_service.host=0.0.0.0", "token_file"),
        ('reward_service.allowed_targets=["10.0.0.0/99"]', "allowed_targets"),
        ("reward_service.endpoint_attempts=0", "endpoint_attempts"),
        ("reward_service.prot=1", "port"),
        ("reward_service.id=a b", "id"),
    ],
)
def test_wrong_settings_are_refused(override: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load(RewardSettings, overrides=[override])


def test_tokens_and_roles_come_from_their_files(tmp_path: Path) -> None:
    file = tmp_path / "token"
    settings = load(RewardSettings, overrides=[f"reward_service.token_file={file}"]).settings.reward_service
    with pytest.raises(ConfigError, match="not readable"):
        settings.access()
    file.write_text("\n")
    with pytest.raises(ConfigError, match="empty"):
        settings.access()
    file.write_text("abc\n")
    caller = settings.access().caller("abc")
    assert caller is not None
    assert (caller.name, caller.role) == ("admin", Role.ADMIN)
    assert settings.access().caller("abd") is None
    file = tmp_path / "tokens"
    settings = load(RewardSettings, overrides=[f"reward_service.tokens_file={file}"]).settings.reward_service
    file.write_text("lab register 0123456789abcdef\n")
    caller = settings.access().caller("0123456789abcdef")
    assert caller is not None
    assert caller.role is Role.REGISTER
    file.write_text("lab register\n")
    with pytest.raises(ConfigError, match=r"tokens: line 1 is not NAME ROLE TOKEN"):
        settings.access()


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
