"""When the certificates end that a process uses: its own server's, and those of the authorities that it trusts.

They are read once, at the start: a process goes on with what it has read then, also after the file was renewed.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.transport import http_tls

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18  # tags of DER


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
        text = Path(file).read_text(encoding="utf-8", errors="replace") if file else ""
        return [not_after(ssl.PEM_cert_to_DER_cert(pem)) for pem in _PEM.findall(text)]
    except (OSError, ValueError, IndexError):
        return []


def not_after(der: bytes) -> float:
    """Return the end of a certificate's validity, seconds since the epoch; raises ValueError or IndexError for anything else.

    RFC 5280, section 4.1: Certificate, in it tbsCertificate, in it [version], serialNumber, signature, issuer, validity.
    """
    _, certificate, _ = _element(der, _SEQUENCE)
    _, rest, _ = _element(certificate, _SEQUENCE)
    if rest[0] == _VERSION:
        _, _, rest = _element(rest)
    for _ in range(3):
        _, _, rest = _element(rest)
    _, validity, _ = _element(rest, _SEQUENCE)
    _, _, after_start = _element(validity)
    tag, end, _ = _element(after_start)
    text = end.decode("ascii")
    if tag == _UTC_TIME:  # two digits of the year: of 50 and above those of the last century
        text = ("19" if text[:2] >= "50" else "20") + text
    elif tag != _GENERALIZED_TIME:
        raise ValueError(f"tag {tag:#x} where the end of the validity is expected")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _element(data: bytes, expected: int | None = None) -> tuple[int, bytes, bytes]:
    """Return the tag and the content of the first element of DER, and what follows it."""
    tag, size, start = data[0], data[1], 2
    if size & 0x80:
        start += size & 0x7F
        size = int.from_bytes(data[2:start], "big")
    if (expected is not None and tag != expected) or start + size > len(data):
        raise ValueError(f"tag {tag:#x} and {size} bytes where a certificate's part is expected")
    return tag, data[start : start + size], data[start + size :]
