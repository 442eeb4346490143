"""When the certificates end that a process uses: its own server's, and those of the authorities that it trusts.

They are read once, at the start: a process goes on with what it has read then, also after the file was renewed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from cryptography import x509

from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.transport import http_tls


def certificate_ends(nats: NatsSettings, s3: S3Settings, environ: Mapping[str, str] = os.environ) -> dict[str, float]:
    """Return when the certificates of each named file end, seconds since the epoch, by the setting or variable that names it.

    Of a server's file the certificate that ends first counts, of authorities the one that ends last: with the others gone the
    servers that it signed are still trusted. A file without certificates is left out; whatever uses it names the problem.
    """
    authorities = {
        "nats.ca_file": nats.ca_file,
        "s3.ca_file": s3.ca_file,
        http_tls.AUTHORITY: environ.get(http_tls.AUTHORITY),
    }
    own = ends_of(environ.get(http_tls.CERTIFICATE))
    found = {http_tls.CERTIFICATE: min(own)} if own else {}
    return found | {name: max(ends) for name, file in authorities.items() if (ends := ends_of(file))}


def ends_of(file: str | Path | None) -> list[float]:
    """Return when each certificate of a PEM file ends; none for no file, and for one that cannot be read."""
    try:
        found = x509.load_pem_x509_certificates(Path(file).read_bytes()) if file else []
    except (OSError, ValueError, x509.InvalidVersion):
        return []
    return [one.not_valid_after_utc.timestamp() for one in found]
