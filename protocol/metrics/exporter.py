"""The ``/metrics`` page of one service: common samples of its heartbeat, its certificates and disks, and samples specific to the service."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from cryptography import x509

import penstock
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.facts import Heartbeat
from penstock.protocol.metrics import gpu
from penstock.protocol.metrics.table import LabelValues, Samples, Service
from penstock.protocol.transport import store_errors, tls

Collect = Callable[[Samples], None]
NO_FOLDERS: Mapping[str, Path] = MappingProxyType({})
NO_CERTIFICATES: Mapping[str, float] = MappingProxyType({})


def certificate_ends(nats: NatsSettings, s3: S3Settings, environ: Mapping[str, str] = os.environ) -> dict[str, float]:
    """Return when the certificates of each named file end, seconds since the epoch, by the setting or variable that names it.

    Of a server's file the certificate that ends first counts, of authorities the one that ends last: with the others gone the
    servers that it signed are still trusted. A file without certificates is left out; whatever uses it names the problem.
    """
    authorities = {"nats.ca_file": nats.ca_file, "s3.ca_file": s3.ca_file, tls.AUTHORITY: environ.get(tls.AUTHORITY)}
    server_ends = ends_of(environ.get(tls.CERTIFICATE))
    end_times = {tls.CERTIFICATE: min(server_ends)} if server_ends else {}
    return end_times | {name: max(ends) for name, file in authorities.items() if (ends := ends_of(file))}


def ends_of(file: str | Path | None) -> list[float]:
    try:
        certificates = x509.load_pem_x509_certificates(Path(file).read_bytes()) if file else []
    except (OSError, ValueError, x509.InvalidVersion):
        return []
    return [certificate.not_valid_after_utc.timestamp() for certificate in certificates]


class Exporter:
    def __init__(
        self,
        service: Service,
        *,
        run_id: str,
        service_id: str,
        heartbeat: Callable[[], Heartbeat | None],
        collect: Collect,
        spans: Callable[[], Mapping[str, int]] = dict,
        folders: Mapping[str, Path] = NO_FOLDERS,
        certificates: Mapping[str, float] = NO_CERTIFICATES,
    ) -> None:
        """All functions must return at once: the newest heartbeat, the samples specific to the service, spans of traces by outcome.

        ``folders`` are those whose disk may fill, by the setting that names them. They are read in the thread that answers
        the scrape: a network disk that hangs delays only the page, and Prometheus reports the service as not reached.
        ``certificates`` are the ends of those that it uses, by what names their file (`certificate_ends`).
        """
        self._service: Service = service
        self._who = {"role": service, "worker": service_id}
        self._run_id = run_id
        self._heartbeat = heartbeat
        self._collect = collect
        self._spans = spans
        self._folders = folders
        self._certificates = certificates
        self._values = LabelValues()

    def samples(self) -> Samples:
        samples = Samples(self._service, self._values)
        samples.add("penstock_service_info", 1.0, run=self._run_id, version=penstock.__version__, **self._who)
        if (beat := self._heartbeat()) is not None:
            samples.add("penstock_heartbeat_timestamp_seconds", beat.at, **self._who)
            samples.add("penstock_busy_seconds_total", beat.busy_s, **self._who)
            samples.add("penstock_idle_seconds_total", beat.idle_s, **self._who)
            samples.add("penstock_cpu_seconds_total", beat.cpu_s, **self._who)
            if beat.version is not None:
                samples.add("penstock_weights_version", float(beat.version), **self._who)
            gpu.add_samples(beat.figures, samples, **self._who)
        for outcome, number in self._spans().items():
            samples.add("penstock_trace_spans_total", number, outcome=outcome)
        for (store, reason), number in store_errors.counts().items():
            samples.add("penstock_store_errors_total", number, store=store, reason=reason)
        for file, ends in self._certificates.items():
            samples.add("penstock_certificate_expiry_timestamp_seconds", ends, file=file, **self._who)
        for setting, folder in self._folders.items():
            with contextlib.suppress(OSError):  # not created yet
                samples.add("penstock_disk_free_ratio", free_ratio(folder), folder=setting, **self._who)
        self._collect(samples)
        return samples

    def page(self, accept: str) -> tuple[bytes, str]:
        return self.written(self.samples(), accept)

    @staticmethod
    def written(samples: Samples, accept: str) -> tuple[bytes, str]:
        from penstock.protocol.metrics import exposition  # noqa: PLC0415  most runs are never scraped

        return exposition.page(samples, accept)


def free_ratio(folder: Path) -> float:
    """Return the share of a folder's disk that this process may still write, 0 to 1; raises OSError without the folder."""
    disk = os.statvfs(folder)
    return disk.f_bavail / disk.f_blocks if disk.f_blocks else 1.0
