"""Bytes that hosts pass to one another: what is applied is what the manifest says, and the object store is asked after any doubt."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.rollout_service.weights.test_worker_mirror import Run
from tests.servers import wait_for

from penstock.deploy.certificates import write_certificates
from penstock.deploy.processes.child import Child
from penstock.deploy.quickstart_task import write_model
from penstock.protocol import streams
from penstock.protocol.transport import tls
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.weights.shared_segments import SharedSegments
from penstock.rollout_service.weights import peers
from penstock.rollout_service.weights.mirror import Mirror
from penstock.rollout_service.weights.peers import FAN_OUT, ROOTS, UPLOADS, PeerOffer, Peers, ancestors

DATA = os.urandom(1 << 20)
NAME = hashlib.sha256(DATA).hexdigest()
Join = Callable[..., tuple[SharedSegments, Peers]]


@pytest.fixture
def join(tmp_path: Path, bus: Bus, run_streams: str) -> Iterator[Join]:
    """Hosts of one run, each with a shared memory of its own."""
    hosts: list[tuple[SharedSegments, Peers]] = []
    with ExitStack() as stack:

        def start(run_id: str = run_streams) -> tuple[SharedSegments, Peers]:
            (root := tmp_path / f"host{len(hosts)}").mkdir()
            stack.callback((shared := SharedSegments(run_id, root)).close)
            shared.join()
            stack.callback((peer := Peers(bus, shared, run_id, 0)).close)
            hosts.append((shared, peer))
            return hosts[-1]

        yield start


def know_each_other(*hosts: Peers) -> None:
    wait_for(lambda: all({host.host for host in hosts} <= peer._offers.keys() for peer in hosts), "offers", 20.0)


def test_what_leaves_the_object_store_does_not_grow_with_the_hosts(
    join: Join, bus: Bus, blobs: Blobs, run_streams: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All fetch at once: each bucket is read from S3 by the first hosts alone, and every folder is the trainer's, tensor by tensor."""
    for limit in ("WAIT_S", "_GRACE_S"):  # else a busy machine reads the object store
        monkeypatch.setattr(peers, limit, 60.0)
    write_model(tmp_path / "model", seed=0)
    run, hosts = Run(bus, blobs, run_streams, tmp_path / "model"), [join() for _ in range(8)]
    mirrors = [Mirror(blobs, tmp_path / f"w{n}", run_streams, shared=shared) for n, (shared, _) in enumerate(hosts)]
    know_each_other(*(peer for _, peer in hosts))
    for version in range(3):
        run.publish(version)
        with ThreadPoolExecutor(len(mirrors)) as pool:
            fetched = list(pool.map(lambda mirror: run.fetch(mirror, version, keep=(version - 1,)), mirrors))  # noqa: B023
        for mirrored, mirror in zip(fetched, mirrors, strict=True):
            run.assert_is(mirrored, version)
            mirror.trim([])
    figures = sum((Counter(shared.figures()) for shared, _ in hosts), Counter())
    published = sum(fact.num_bytes for fact in run.facts.values())
    assert figures["weights_bytes_s3"] == ROOTS * published
    assert figures["weights_bytes_peer"] == (len(hosts) - ROOTS) * published
    assert not {name: value for name, value in figures.items() if "peer_misses" in name and value}
    late, peer = join()
    know_each_other(peer, *(other for _, other in hosts))
    mirror = Mirror(blobs, tmp_path / "late", run_streams, shared=late)
    run.assert_is(run.fetch(mirror, 2), 2)
    sizes = {file.name: file.stat().st_size for file in late.folder.iterdir() if len(file.name) == len(NAME)}
    own = sum(size for name, size in sizes.items() if not ancestors(name, peer._offers, peer.host))
    assert late.figures()["weights_bytes_s3"] == own
    for opened in (*mirrors, mirror):
        opened.close()


def answer(status: str, body: bytes, size: int | None = None) -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body) if size is None else size}\r\n\r\n".encode() + body


# What a peer sends, how many bytes at a time (with pauses), and how its miss is counted.
FAULTS: dict[str, tuple[bytes, int, str]] = {
    "other bytes": (answer("200 OK", DATA[:-1] + bytes([DATA[-1] ^ 1])), 0, "altered"),
    "too short": (answer("200 OK", DATA[:-1]), 0, "altered"),
    "too long": (answer("200 OK", DATA + b"x"), 0, "altered"),
    "ends in the middle": (answer("200 OK", DATA[:1000], len(DATA)), 0, "unreachable"),
    "compressed": (
        answer("200 OK", DATA).replace(b"content-l", b"content-encoding: gzip\r\ncontent-l", 1),
        0,
        "altered",
    ),
    "no HTTP": (b"\x00" * 100, 0, "unreachable"),
    "elsewhere": (b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1/\r\ncontent-length: 0\r\n\r\n", 0, "refused"),
    "stale": (answer("404 Not Found", b""), 0, "absent"),
    "full": (answer("503 Service Unavailable", b""), 0, "busy"),
    "a header byte now and then": (answer("200 OK", DATA), 1, "slow"),
    "a body byte now and then": (answer("200 OK", DATA), 60, "slow"),
    "nothing": (b"", 0, "slow"),
}


def serve(listener: socket.socket, sent: bytes, at_once: int, stopped: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                for start in range(0, len(sent), at_once or 1 << 30):
                    connection.sendall(sent[start : start + (at_once or 1 << 30)])
                    if at_once and stopped.wait(0.05):
                        return
                if not sent:
                    stopped.wait(2.0)


@pytest.mark.parametrize("fault", [*FAULTS, "gone"])
def test_a_peer_that_fails_costs_a_bounded_time_and_is_counted(
    join: Join, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The bytes are those of the object store then; after a few failures no peer is asked for a while."""
    monkeypatch.setattr(Peers, "_renew", lambda *_, **__: asyncio.sleep(0))  # the offers are those below
    shared, peer = join()
    sent, at_once, reason = FAULTS.get(fault, (b"", 0, "unreachable"))
    for name, value in {"WAIT_S": 0.5, "_GRACE_S": 0.2, "MOST_FAILURES": 3}.items():
        monkeypatch.setattr(peers, name, value)
    stopped = threading.Event()

    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        threading.Thread(target=serve, args=(listener, sent, at_once, stopped), daemon=True).start()
        stack.callback(lambda: listener.shutdown(socket.SHUT_RDWR) if listener.fileno() >= 0 else None)
        stack.callback(stopped.set)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        if fault == "gone":
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        offers = {f"{n:016}": PeerOffer(url=url, secret="whsec_" + "A" * 43 + "=") for n in range(3)}
        started = time.monotonic()
        for host in offers:
            monkeypatch.setattr(peers, "ancestors", lambda *_, host=host: [host])
            peer._offers = offers
            assert shared.fetch(NAME, len(DATA), lambda: DATA) == DATA
            (shared.folder / NAME).unlink()
        assert time.monotonic() - started < 3 * (0.5 + 0.2 + len(DATA) / peers.MIN_BYTES_PER_S) + 5
        assert peer._rests_until[""] > time.monotonic(), "three in a row failed"
        assert shared.fetch(NAME, len(DATA), lambda: DATA) == DATA
    figures = shared.figures()
    assert (figures[f"weights_peer_misses_{reason}"], figures["weights_bytes_s3"]) == (3.0, 4.0 * len(DATA))
    assert figures["weights_bytes_peer"] == 0.0


def test_a_peer_is_sent_what_is_here_or_will_be_soon_if_it_belongs_to_the_run(
    join: Join, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no more of them at a time than a host has uploads; what is wanted no more is refused at once."""
    (shared, holder), (_, asker) = join(), join()
    know_each_other(holder, asker)
    monkeypatch.setattr(peers, "ancestors", lambda _, __, own: [] if own == holder.host else [holder.host])
    own = asker._offers[holder.host]

    def ask(version: int = 1) -> tuple[bool, str, float]:
        started = time.monotonic()
        request = peers.SegmentRequest(sha256=NAME, version=version)
        data, miss = asker._thread.start(asker._ask(asker._offers[holder.host], request, len(DATA))).result(30.0)
        assert data in (None, DATA)
        return data is not None, miss, time.monotonic() - started

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        time.sleep(0.3)  # the peer waits
        shared.fetch(NAME, len(DATA), lambda: DATA, 1)
        assert asking.result()[0]
    shared.trim()
    (shared.folder / NAME).unlink()
    found, miss, seconds = ask()
    assert (found, miss) == (False, "absent")
    assert seconds < peers.WAIT_S, "its version has been fetched there: nobody waits for it"
    for name in ("../reader-x", "reader-x"):  # a request names nothing but a hash
        body = peers.SegmentRequest.model_construct(sha256=name, version=0).model_dump_json().encode()
        signed = peers.signature.headers([own.secret], message_id="m", timestamp=int(time.time()), body=body)
        assert (
            asker._thread.start(asker._http.send("POST", f"{own.url}/segments", body, signed)).result(9).status == 400
        )
    shared.fetch(NAME, len(DATA), lambda: DATA, 1)
    monkeypatch.setattr(holder, "_num_uploads", UPLOADS)
    monkeypatch.setattr(peers, "WAIT_S", 0.5)
    assert ask()[1] == "busy"
    assert shared.figures()["weights_bytes_s3"] == 2.0 * len(DATA)
    monkeypatch.setattr(holder, "_num_uploads", 0)
    asker._offers[holder.host] = own.model_copy(update={"secret": "whsec_" + "A" * 43 + "="})
    assert ask()[:2] == (False, "refused")
    _, other = join("another-run")
    assert not other._offers


def test_a_peer_with_tls_has_the_certificate_of_its_offer(
    join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which names another host and is of an authority that nobody trusts; without it nothing is sent."""
    write_certificates(tmp_path / "tls", services=("api",))
    monkeypatch.setenv(tls.CERTIFICATE, str(tmp_path / "tls" / "api.pem"))
    monkeypatch.setenv(tls.KEY, str(tmp_path / "tls" / "api.key"))
    monkeypatch.setattr(Peers, "_own_address", lambda _: "0.0.0.0")
    (shared, holder), (_, asker) = join(), join()
    know_each_other(holder, asker)
    shared.fetch(NAME, len(DATA), lambda: DATA, 1)
    offer, request = asker._offers[holder.host], peers.SegmentRequest(sha256=NAME, version=1)
    other = offer.model_copy(update={"fingerprint": hashlib.sha256(b"").hexdigest()})
    found = [asker._thread.start(asker._ask(one, request, len(DATA))).result(30.0) for one in (offer, other)]
    assert (offer.url[:16], found) == ("https://0.0.0.0:", [(DATA, ""), (None, "unreachable")])


def test_a_host_that_starts_again_takes_the_place_of_its_offer(join: Join) -> None:
    (shared, holder), (_, asker) = join(), join()
    know_each_other(holder, asker)
    before = asker._offers[holder.host]
    holder.close()
    again = Peers(holder._bus, shared, holder._run_id, 0)
    try:
        assert again.host == holder.host
        wait_for(lambda: asker._offers.get(holder.host, before) != before, "the new offer", 20.0)
    finally:
        again.close()


@pytest.mark.parametrize("num_hosts", [1, 3, 100])
def test_the_first_hosts_read_the_object_store_and_each_other_one_a_nearer_one(num_hosts: int) -> None:
    """Of each segment others are the first; none uploads to more than it may, and the farthest is a logarithm away."""
    hosts = [f"{number:016}" for number in range(num_hosts)]
    first: Counter[str] = Counter()
    for segment in range(30):
        found = {host: ancestors(f"{segment:064}", hosts, host) for host in hosts}
        roots = [host for host, nearer in found.items() if not nearer]
        first.update(roots)
        assert len(roots) == min(ROOTS, num_hosts)
        assert max(Counter(nearer[0] for nearer in found.values() if nearer).values(), default=0) <= FAN_OUT
        assert max(map(len, found.values())) <= num_hosts.bit_length()
    assert num_hosts < 100 or first.most_common(1)[0][1] <= 5
    assert ancestors("0" * 64, [], "alone") == []


@pytest.mark.slow
def test_a_worker_with_the_setting_offers_what_it_has_and_ends_in_order(
    start_worker: Callable[..., Child], bus: Bus, run_streams: str
) -> None:
    """Without a place for what it would send, the setting is refused."""
    leases = bus.key_value(streams.lease_bucket(run_streams).bucket).wait()
    refused, worker = (
        start_worker("w0", "worker.peer_port=0", "worker.share_downloads=false"),
        start_worker("w1", "worker.peer_port=0"),
    )
    wait_for(lambda: not refused.alive, "the refusal")
    assert "worker.peer_port needs worker.share_downloads" in refused.log_tail(40)
    wait_for(lambda: leases.entries(streams.peer_key("")).wait(), "the offer")
    worker.ask_to_stop()
    assert worker.wait(60.0) == 0
    assert "Traceback" not in worker.log_tail(40)
