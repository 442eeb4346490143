"""Creates what a run needs on NATS and S3, idempotently: streams, consumers, buckets.

    python -m deploy.bootstrap --run ID [run.toml] [nats.url=... s3.endpoint=...]
    python -m deploy.bootstrap --run ID --delete [--yes]

Services only bind to what this has created; they need no right to create anything.
"""

from __future__ import annotations

from protocol import streams
from protocol.streams import StreamLimits
from protocol.subjects import check_run_id
from protocol.transport.blobs import Blobs
from protocol.transport.bus import Bus


def bootstrap(bus: Bus, blobs: Blobs, run_id: str, limits: StreamLimits | None = None) -> None:
    """Create (or update to the given limits) everything one run needs; safe to repeat.

    Raises BusError or BlobError when a server is away or refuses.
    """
    check_run_id(run_id)
    made = [bus.ensure_stream(spec) for spec in streams.streams(run_id, limits)]
    made += [bus.ensure_bucket(spec) for spec in streams.buckets(run_id)]
    blobs.ensure_bucket()
    for pending in made:
        pending.wait()
    for pending in [bus.ensure_consumer(spec) for spec in streams.consumers(run_id, limits)]:
        pending.wait()


def delete_run(bus: Bus, run_id: str) -> int:
    """Delete a run's streams and its own buckets with all they hold; returns how many were there.

    Objects in S3 stay, and so does the registry of reward endpoints, which all runs share.
    """
    check_run_id(run_id)
    own = (streams.state_bucket(run_id), streams.live_bucket(run_id))
    names = (*streams.stream_names(run_id), *(f"KV_{spec.bucket}" for spec in own))
    return sum([pending.wait() for pending in [bus.delete_stream(name) for name in names]])
