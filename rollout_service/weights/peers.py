"""Pass verified bytes of versions between hosts, so that what leaves the object store does not grow with the number of hosts.

A host offers the segments of its shared memory (`shared_segments.py`) under a key of the run's bucket of leases: an address, and a secret with which
requests are signed. Who may read that key is who may read the run's weights. Nobody says which segments a host has: all hosts order themselves alike
for each segment, by a hash of both. The first `ROOTS` read the object store, each other one asks the host that is `FAN_OUT` times nearer to the
first, so the copies double in each turn, and each segment goes another way. A host that will have a segment soon lets the asking one wait.

Nothing here is needed: what a peer sends is used once its hash is that of the manifest, and each doubt, each of which has a deadline and is counted
by its reason, ends in the object store. A peer that failed rests for `REST_S`, and all of them after `MOST_FAILURES` in a row.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import socket
import time
from base64 import b64encode
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from concurrent.futures import CancelledError
from typing import Annotated, BinaryIO
from urllib.parse import urlsplit

import structlog
from pydantic import Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.protocol import streams
from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.groups import Count, Sha256, Wire
from penstock.protocol.transport import tls
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.loop_thread import LoopThread
from penstock.protocol.weights.shared_segments import SharedSegments
from penstock.serving import signature, web_server
from penstock.serving.http_connections import AnswerRefused, HttpConnections
from penstock.serving.request_checks import Guard, Rules, check_signature

ROOTS, FAN_OUT = 2, 2  # hosts that read a segment from the object store, and that ask one host for it
TRIES = 2  # peers that are asked for a segment
UPLOADS = 2 * FAN_OUT  # of a worker at a time; others wait
WAIT_S = 5.0  # for a segment that the peer does not have yet
MIN_BYTES_PER_S = 16e6  # of a peer; slower ones are left
REST_S = 60.0
MOST_FAILURES = 8
_GRACE_S, _POLL_S, _END_S = 2.0, 0.02, 5.0  # the first: of a transfer, whatever its size
_CHUNK_BYTES = 1 << 20
_PATH = "/segments"
_PER_LIST = 100  # offers are listed at every renewal up to so many of them, then less often
log = structlog.get_logger("rollout.peers")


def in_order(sha256: str, hosts: Collection[str]) -> list[str]:
    """Return the hosts in the order in which they get a segment. Pure."""
    return sorted(hosts, key=lambda host: hashlib.sha256(f"{sha256} {host}".encode()).digest())


def ancestors(sha256: str, hosts: Collection[str], own: str) -> list[str]:
    """Return the hosts that get a segment before this one, the one to ask first; none: it reads the object store. Pure."""
    order = in_order(sha256, {*hosts, own})
    place, found = order.index(own), []
    while place >= ROOTS:
        place = (place - ROOTS) // FAN_OUT
        found.append(order[place])
    return found


def transfer_s(num_bytes: int) -> float:
    """Return the seconds within which a peer must have sent so many bytes."""
    return _GRACE_S + num_bytes / MIN_BYTES_PER_S


class PeerOffer(Wire):
    """What a host writes into the bucket of leases, at the key that is its name."""

    url: Annotated[str, Field(pattern=r"^https?://[^/?#@\s]+$", max_length=300)]
    secret: Annotated[str, Field(pattern=r"^whsec_[A-Za-z0-9+/]{43}=$")]
    fingerprint: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = (
        ""  # of the certificate; it may name another host
    )


class SegmentRequest(Wire):
    sha256: Sha256
    version: Count  # whose manifest names the segment


def app_of(segment: Callable[[Request], Awaitable[Response]], address: str) -> Guard:
    return Guard(Starlette(routes=[Route(_PATH, segment, methods=["POST"])]), Rules((address,)), max_bytes=_CHUNK_BYTES)


class Peers:
    """The server and client of one worker, in a thread and event loop of their own. Nothing that it meets raises in `fetch`."""

    def __init__(self, bus: Bus, shared: SharedSegments, run_id: str, port: int) -> None:
        """Start; ``port`` 0: any free one. It listens where this host reaches NATS from: on the loopback if NATS is there."""
        self.host = shared.host_id()
        self._bus, self._shared, self._run_id, self._port = bus, shared, run_id, port
        self._secret = signature.PREFIX + b64encode(secrets.token_bytes(32)).decode()
        self._offers: dict[str, PeerOffer] = {}
        self._rests_until = defaultdict[str, float](float)  # by the clock of the loop; "": of all
        self._num_failures = self._num_uploads = 0
        self._http = HttpConnections(keep_s=REST_S)
        self._thread = LoopThread("peers")
        self._ended = asyncio.Event()
        self._serving = self._thread.start(self._serve())
        shared.from_peers = self.fetch

    def close(self) -> None:
        self._shared.from_peers = None
        with contextlib.suppress(TimeoutError, RuntimeError):  # the second: it is closed already
            self._thread.loop.call_soon_threadsafe(self._ended.set)
            self._serving.result(_END_S)
        self._thread.stop()

    def fetch(self, sha256: str, size_bytes: int, version: int) -> bytes | None:
        """Return the bytes of this hash from a peer; None: read the object store. Called from any other thread."""
        asking = self._thread.start(self._fetch(sha256, size_bytes, version))
        try:
            return asking.result(TRIES * (WAIT_S + transfer_s(size_bytes)) + _GRACE_S)
        except (TimeoutError, CancelledError):  # the thread is stuck, or was stopped
            asking.cancel()
            self._shared.peer_missed("slow")
            return None

    async def _fetch(self, sha256: str, size_bytes: int, version: int) -> bytes | None:
        now = time.monotonic()
        if self._rests_until[""] > now:
            return None
        asked = [host for host in ancestors(sha256, self._offers, self.host) if self._rests_until[host] <= now]
        for host in [host for host in asked if host in self._offers][:TRIES]:
            request = SegmentRequest(sha256=sha256, version=version)
            data, miss = await self._ask(self._offers[host], request, size_bytes)
            if data is not None:
                self._num_failures = 0
                return data
            misses = self._shared.peer_missed(miss)
            if miss != "busy":
                self._rests_until[host] = time.monotonic() + REST_S
            self._num_failures += 1
            if self._num_failures >= MOST_FAILURES:
                self._num_failures, self._rests_until[""] = 0, time.monotonic() + REST_S
                log.warning("peers are not asked for a while: too many failed", rest_s=REST_S, misses=misses)
                break
        return None

    async def _ask(self, offer: PeerOffer, request: SegmentRequest, size_bytes: int) -> tuple[bytes | None, str]:
        """Return the verified bytes; or None, and why."""
        body = request.model_dump_json().encode()
        headers = signature.headers([offer.secret], message_id=secrets.token_hex(16), body=body)
        try:
            async with asyncio.timeout(WAIT_S + transfer_s(size_bytes)):
                answer = await self._http.send("POST", offer.url + _PATH, body, headers, size_bytes, offer.fingerprint)
        except TimeoutError:
            return None, "slow"
        except AnswerRefused:
            return None, "altered"
        except (PenstockError, OSError, ValueError):
            return None, "unreachable"
        if answer.status != 200:
            return None, {404: "absent", 503: "busy"}.get(answer.status, "refused")
        if len(answer.body) != size_bytes or await asyncio.to_thread(_sha256, answer.body) != request.sha256:
            return None, "altered"
        return answer.body, ""

    async def _serve(self) -> None:
        """Listen, offer it and read the others' offers, until the thread is stopped."""
        address, offer = self._own_address(), None
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._http.close)
            number = 0
            while not self._ended.is_set():
                try:
                    if offer is None:
                        bound = stack.enter_context(tls.listen(address, self._port, key="worker.peer_port"))
                        options = tls.server_options(address)
                        app = app_of(self._segment, address)
                        await stack.enter_async_context(web_server.serving_long(app, bound, **options))
                        host = f"[{address}]" if ":" in address else address
                        url = f"{tls.scheme(address)}://{host}:{bound.getsockname()[1]}"
                        offer = PeerOffer(url=url, secret=self._secret, fingerprint=tls.fingerprint(address))
                except ConfigError as err:  # another worker of this host may serve the same folder
                    if not number:
                        log.info("this worker reads from peers and serves none yet", reason=str(err))
                try:
                    await self._renew(offer, address, lists=number % (1 + len(self._offers) // _PER_LIST) == 0)
                except PenstockError as err:
                    log.debug("peers are not renewed", error=str(err))
                number += 1
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(streams.LEASE_RENEWAL_S):
                        await self._ended.wait()

    def _own_address(self) -> str:
        """Return the address of this host from which it reaches NATS; the loopback's if that is there, or is not known."""
        nats = urlsplit(self._bus.url.split(",")[0])
        with contextlib.suppress(OSError):
            family, _, _, _, address = socket.getaddrinfo(nats.hostname, nats.port or 4222, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing
                return probe.getsockname()[0]
        return "127.0.0.1"

    async def _renew(self, own: PeerOffer | None, address: str, *, lists: bool) -> None:
        store = await self._bus.key_value(streams.lease_bucket(self._run_id).bucket)
        if own is not None:
            await store.put(streams.peer_key(self.host), own.model_dump_json().encode())
        if lists:
            found: dict[str, PeerOffer] = {}
            for entry in await store.entries(streams.peer_key("")):
                with contextlib.suppress(ValidationError):  # of another release, or nothing that a worker writes
                    offer = PeerOffer.model_validate_json(entry.value)
                    is_local = tls.is_loopback(urlsplit(offer.url).hostname or "")
                    if is_local == tls.is_loopback(address):  # the loopback of another host is not reached
                        found[entry.key.removeprefix(streams.peer_key(""))] = offer
            self._offers = found

    async def _segment(self, request: Request) -> Response:
        await check_signature([self._secret], request)
        try:
            asked = SegmentRequest.model_validate_json(await request.body())
        except ValidationError:
            raise HTTPException(400, "the body is not a request for a segment") from None
        ends = time.monotonic() + WAIT_S
        while True:
            is_full = self._num_uploads >= UPLOADS
            if not is_full and (file := self._shared.open(asked.sha256)) is not None:
                return _Upload(file, self)
            if time.monotonic() >= ends or (not is_full and asked.version <= self._shared.fetched_up_to):
                why = (503, "uploads are in use") if is_full else (404, "the segment is not here")
                raise HTTPException(*why)
            await asyncio.sleep(_POLL_S)


class _Upload(StreamingResponse):
    """A segment on its way, for as long as a peer may take for it."""

    def __init__(self, file: BinaryIO, peers: Peers) -> None:
        self._file, self._peers, self._size = file, peers, os.fstat(file.fileno()).st_size
        super().__init__(
            self._chunks(), headers={"content-length": str(self._size)}, media_type="application/octet-stream"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._peers._num_uploads += 1
        try:
            async with asyncio.timeout(transfer_s(self._size)):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            log.info("a peer reads too slowly; its connection is closed")
        finally:
            self._peers._num_uploads -= 1
            self._file.close()

    async def _chunks(self) -> AsyncIterator[bytes]:
        while chunk := self._file.read(_CHUNK_BYTES):
            yield chunk


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
