"""When certificates end: read from their files, and shown for each that a process uses."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from penstock.deploy.certificates import write_certificates
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.metrics.exporter import Exporter, certificate_ends, ends_of


def pem(end: datetime, *, name: str = "penstock") -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    who = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = x509.CertificateBuilder().subject_name(who).issuer_name(who).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(datetime(1960, 1, 1, tzinfo=UTC))
    return builder.not_valid_after(end).sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize(
    "end", ["1999-12-31T23:59:59", "2026-11-26T05:00:00", "2049-12-31T23:59:59", "2061-01-02T03:04:05"]
)
def test_the_end_is_that_of_the_certificate(tmp_path: Path, end: str) -> None:
    """Of both of X.509's forms of a time: two digits of the year until 2049, four from then on; and of long names."""
    expected = datetime.fromisoformat(end).replace(tzinfo=UTC)
    (tmp_path / "one.pem").write_bytes(b"text before\n" + pem(expected, name="n" * 64))
    assert ends_of(tmp_path / "one.pem") == [expected.timestamp()]


def test_of_a_server_the_first_counts_and_of_authorities_the_last(tmp_path: Path) -> None:
    soon, later = (datetime(2026, 12, day, tzinfo=UTC) for day in (1, 20))
    both = tmp_path / "both.pem"
    both.write_bytes(pem(soon) + pem(later))
    nats = NatsSettings(url="tls://n:4222", ca_file=both)
    environ = {"PENSTOCK_TLS_CERTIFICATE_FILE": str(both), "PENSTOCK_TLS_CA_FILE": str(tmp_path / "missing.pem")}
    found = certificate_ends(nats, S3Settings(), environ)
    assert found == {"nats.ca_file": later.timestamp(), "PENSTOCK_TLS_CERTIFICATE_FILE": soon.timestamp()}


def test_files_without_a_certificate_are_left_out(tmp_path: Path) -> None:
    """What uses them names the problem; the page of metrics is served."""
    pem_of_nothing = b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"
    whole = pem(datetime(2027, 1, 1, tzinfo=UTC)).splitlines()
    cut = b"\n".join([*whole[:2], whole[-1]])
    for number, text in enumerate((b"", b"no certificate", pem_of_nothing, cut, b"\xff\xfe")):
        (tmp_path / f"{number}.pem").write_bytes(text)
        assert ends_of(tmp_path / f"{number}.pem") == []
    assert ends_of(None) == []


def test_a_service_shows_those_that_it_uses(tmp_path: Path) -> None:
    """As `penstock certs` makes them, by the setting or the variable that names the file."""
    started = datetime.now(UTC)
    write_certificates(tmp_path, services=("reward",), days=10)
    authority = tmp_path / "ca.pem"
    ends = certificate_ends(
        NatsSettings(url="tls://n:4222", ca_file=authority),
        S3Settings(endpoint="https://s:9000", ca_file=authority),
        {"PENSTOCK_TLS_CERTIFICATE_FILE": str(tmp_path / "reward.pem"), "PENSTOCK_TLS_CA_FILE": str(authority)},
    )
    exporter = Exporter(
        "reward", run_id="r", service_id="r0", heartbeat=lambda: None, collect=lambda _: None, certificates=ends
    )
    shown = exporter.samples().series["penstock_certificate_expiry_timestamp_seconds"]
    files = {"nats.ca_file", "s3.ca_file", "PENSTOCK_TLS_CERTIFICATE_FILE", "PENSTOCK_TLS_CA_FILE"}
    assert set(shown) == {("reward", "r0", file) for file in files}
    own = datetime.fromtimestamp(shown["reward", "r0", "PENSTOCK_TLS_CERTIFICATE_FILE"], UTC)
    assert abs(own - started - timedelta(days=10)) < timedelta(minutes=10)
    assert shown["reward", "r0", "nats.ca_file"] > own.timestamp()
