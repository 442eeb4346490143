"""The S3 adapter on a real server: reads return what was stored, and each failure has its own error."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.refusing_s3 import RefusingS3
from tests.servers import wait_for

from penstock.deploy.processes.servers import HOST, S3Server
from penstock.protocol.config.connection import S3Settings
from penstock.protocol.errors import BlobCorrupt, BlobLoginRefused, BlobMissing, BlobStoreRefused, BlobStoreUnreachable
from penstock.protocol.groups import BlobRef
from penstock.protocol.transport import store_errors
from penstock.protocol.transport.blobs import Blobs


@pytest.fixture
def refusing(s3_settings: S3Settings) -> Iterator[RefusingS3]:
    """The session's S3 server, behind a proxy that can refuse writes."""
    with RefusingS3(s3_settings) as proxy:
        yield proxy


@pytest.mark.parametrize("mega_bytes", [12, 65])  # fetched in memory; into the file
def test_files_of_many_parts_are_read_back(blobs: Blobs, run_id: str, tmp_path: Path, mega_bytes: int) -> None:
    """A file above the part size is stored in parts and fetched whole, under its own name only when verified."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(bytes(range(256)) * 4 * 1024 * mega_bytes)
    ref = blobs.put_file(f"runs/{run_id}/big", source)
    blobs.get_file(ref, target)
    assert target.read_bytes() == source.read_bytes()
    with pytest.raises(BlobCorrupt, match=r"does not have sha256|expected .* bytes with sha256 000000000000"):
        blobs.get_file(ref.model_copy(update={"sha256": "0" * 64}), tmp_path / "wrong")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "target"]


def test_an_altered_object_is_corrupt(blobs: Blobs, s3_server: S3Server, run_id: str, tmp_path: Path) -> None:
    """One changed byte below the server is found out on reading, with key, sizes and hashes; no file is left."""
    ref = blobs.put(f"runs/{run_id}/x", b"payload of a group")
    (s3_server.store / s3_server.settings.bucket / ref.key).write_bytes(b"payload of a grouq")
    with pytest.raises(BlobCorrupt, match=rf"{ref.key}: expected 18 bytes with sha256 {ref.sha256[:12]}.*got 18 bytes"):
        blobs.get(ref)
    with pytest.raises(BlobCorrupt, match=ref.key):
        blobs.get_file(ref, tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


def test_an_object_of_another_size_is_corrupt(blobs: Blobs, run_id: str) -> None:
    """An object shorter or longer than its message states is refused, and no more than the stated size is read."""
    ref = blobs.put(f"runs/{run_id}/x", b"payload")
    for size in (6, 8, 0):
        with pytest.raises(BlobCorrupt, match=f"expected {size} bytes"):
            blobs.get(ref.model_copy(update={"size_bytes": size}))


def test_a_large_file_of_another_size_is_not_fetched(
    blobs: Blobs, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object that is larger than its message states would fill the disk before its hash is known."""
    ref = blobs.put(f"runs/{run_id}/large", b"x" * 1000)
    monkeypatch.setattr("penstock.protocol.transport.blobs._CHUNK_BYTES", 1)
    monkeypatch.setattr(blobs, "_fetch_large", lambda *_: pytest.fail("it is fetched"))
    with pytest.raises(BlobCorrupt, match="1000 bytes, expected 500"):
        blobs.get_file(ref.model_copy(update={"size_bytes": 500}), tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_object_is_named(blobs: Blobs, run_id: str, tmp_path: Path) -> None:
    """A missing key raises BlobMissing without retries, for every way of reading."""
    ref = blobs.put(f"runs/{run_id}/x", b"x")
    blobs.delete([ref.key])
    with pytest.raises(BlobMissing, match=rf"get {ref.key}: no such object in bucket penstock"):
        blobs.get(ref)
    with pytest.raises(BlobMissing, match=ref.key):
        blobs.get_file(ref.model_copy(update={"size_bytes": 2**27}), tmp_path / "target")
    assert not blobs.exists(ref.key)


@pytest.mark.parametrize(
    "key",
    [
        "../x",
        "a/./b",
        "..",
        "//",
        "a//b",
        "/",
        "a/",
        "a\x00b",
        "a\nb",
        " ",
        "\x7f",
        "\u202e",
        "x" * 256,
        "\U0001f600" * 70,
    ],
)
def test_a_key_that_no_object_can_have_is_missing(blobs: Blobs, key: str, tmp_path: Path) -> None:
    """A message may name any key; one that clients or servers do not take raises BlobMissing at once."""
    ref = BlobRef(key=key, size_bytes=5, sha256="0" * 64)
    for read in (
        lambda: blobs.get(ref),
        lambda: blobs.get_range(ref, 1, 2, "0" * 64),
        lambda: blobs.get_file(ref, tmp_path / "target"),
        lambda: blobs.get_unverified(key),
    ):
        with pytest.raises(BlobMissing, match="is not a valid object key"):
            read()


def test_a_part_of_an_object_is_verified_alone(blobs: Blobs, run_id: str) -> None:
    """A range is fetched alone; one that was altered, or that the object is too short for, is corrupt."""
    data = bytes(range(256)) * 10
    ref = blobs.put(f"runs/{run_id}/ranged", data)
    digest = hashlib.sha256(data[100:200]).hexdigest()
    assert blobs.get_range(ref, 100, 100, digest) == data[100:200]
    with pytest.raises(BlobCorrupt, match="expected 100 bytes at 101"):
        blobs.get_range(ref, 101, 100, digest)
    blobs.put(ref.key, data[:50])
    with pytest.raises(BlobCorrupt, match="ranged"):
        blobs.get_range(ref, 100, 100, digest)


@pytest.mark.parametrize("says_partial", [True, False])
def test_a_part_takes_one_request_whatever_its_status(refusing: RefusingS3, run_id: str, says_partial: bool) -> None:
    data = bytes(range(256)) * 10
    refusing.says_partial = says_partial
    blobs = Blobs(refusing.settings)
    ref = blobs.put(f"runs/{run_id}/parts", data)
    for offset, size in ((100, 100), (256, 700), (0, len(data))):
        digest = hashlib.sha256(data[offset : offset + size]).hexdigest()
        assert blobs.get_range(ref, offset, size, digest) == data[offset : offset + size]
    assert refusing.num_gets == 3


def test_a_listing_contains_the_objects_below_its_prefix(blobs: Blobs, run_id: str) -> None:
    """Objects are listed with sizes and times, at any depth, and deleted ones are gone."""
    before = datetime.now(UTC)
    prefix = f"runs/{run_id}/"
    for name in ("a", "b/c", "b/d/e"):
        blobs.put(prefix + name, name.encode())
    found = list(blobs.list(prefix))
    assert [(stat.key, stat.size_bytes) for stat in found] == [
        (prefix + "a", 1),
        (prefix + "b/c", 3),
        (prefix + "b/d/e", 5),
    ]
    assert all(abs((stat.modified - before).total_seconds()) < 60 for stat in found)
    assert blobs.delete([prefix + "a", prefix + "b/c", prefix + "never-there"]) == 3
    assert [stat.key for stat in blobs.list(prefix)] == [prefix + "b/d/e"]
    assert list(blobs.list(f"runs/{run_id}-nothing/")) == []
    assert blobs.delete([]) == 0


def test_many_threads_share_one_client(blobs: Blobs, run_id: str) -> None:
    """Concurrent writers below a fresh prefix all succeed, and each reads its own bytes, also none."""

    def travel(number: int) -> bool:
        ref = blobs.put(f"runs/{run_id}/fresh/{number % 7}/{number}", data := bytes([number]) * number * 1000)
        return ref.size_bytes == len(data) and blobs.get(ref) == data and blobs.exists(ref.key)

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(travel, range(100)))


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("wrong", [{"secret_key": "wrong"}, {"access_key": "nobody"}])
def test_wrong_credentials_are_refused_within_the_deadline(s3_settings: S3Settings, wrong: dict[str, str]) -> None:
    blobs = Blobs(s3_settings.model_copy(update=wrong), deadline_s=0.3)
    who = wrong.get("access_key", "penstock")
    with pytest.raises(BlobLoginRefused, match=rf"refused access key {who}.*check s3\.access_key and s3\.secret_key"):
        blobs.put("runs/x/y", b"data")
    with pytest.raises(BlobLoginRefused, match=who):
        blobs.check("x", deadline_s=0.3)


def test_a_missing_bucket_is_named_with_its_remedy(s3_settings: S3Settings, blobs: Blobs, run_id: str) -> None:
    """Without the bucket the error of every call explains how to create it; ensure_bucket does, any number of times."""
    other = Blobs(s3_settings.model_copy(update={"bucket": f"other-{run_id}"}))
    with pytest.raises(BlobStoreRefused, match=rf"no bucket 'other-{run_id}'.*penstock bootstrap"):
        other.check("x")
    with pytest.raises(BlobStoreRefused, match=rf"no bucket 'other-{run_id}'.*penstock bootstrap"):
        other.put("x", b"data")
    other.ensure_bucket()
    other.ensure_bucket()
    other.check("x")


def test_no_server_and_one_that_never_answers_are_errors_within_the_deadline(s3_settings: S3Settings) -> None:
    with socket.create_server((HOST, 0)) as silent:
        settings = s3_settings.model_copy(update={"endpoint": f"http://{HOST}:{silent.getsockname()[1]}"})
        with pytest.raises(BlobStoreUnreachable, match=rf"put x: {settings.endpoint} gave no valid answer within 1"):
            Blobs(settings, deadline_s=1.0).put("x", b"data")
    with pytest.raises(BlobStoreUnreachable, match=rf"put x: {settings.endpoint} gave no valid answer within 1"):
        Blobs(settings, deadline_s=1.0).put("x", b"data")


def test_a_call_waits_for_a_server_restart(own_s3: Callable[[], S3Server]) -> None:
    """A call during an outage completes after the restart, and earlier objects are still stored."""
    server = own_s3()
    blobs = Blobs(server.settings)
    ref = blobs.put("runs/x/y", b"stored")
    server.kill()
    starter = threading.Timer(0.2, server.restart)
    starter.start()
    assert blobs.get(ref) == b"stored"
    starter.join()


# ── a server that refuses what writes ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        ((507, "InsufficientStorage"), "full"),
        ((500, "XMinioStorageFull"), "full"),
        ((403, "RequestTimeTooSkewed"), "error"),
    ],
)
def test_a_write_is_retried_while_the_store_is_full_or_clocks_differ(
    refusing: RefusingS3, run_id: str, refusal: tuple[int, str], reason: store_errors.Reason
) -> None:
    """The write is retried until there is space or the clock is right, and counted; reads work meanwhile."""
    counted = dict(store_errors.counts())
    blobs = Blobs(refusing.settings, deadline_s=30.0)
    before = blobs.put(f"runs/{run_id}/before", b"here")
    refusing.refusal = refusal
    writing = threading.Thread(target=blobs.put, args=(f"runs/{run_id}/x", b"payload"))
    writing.start()
    wait_for(lambda: refusing.num_refused >= 2, "two refusals")
    assert blobs.get(before) == b"here"
    assert not blobs.exists(f"runs/{run_id}/x")
    refusing.refusal = None
    writing.join(60.0)
    assert blobs.exists(f"runs/{run_id}/x")
    more = {cause: number - counted[cause] for cause, number in store_errors.counts().items()}
    assert more.pop(("s3", reason)) >= 1
    assert not any(more.values())
