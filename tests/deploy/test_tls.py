"""TLS of NATS and S3 with the authority of ``penstock certs``, on real servers."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from tests import servers

from penstock.console.cli.main import run
from penstock.deploy import certificates
from penstock.deploy.local import LocalStack
from penstock.deploy.processes.child import DeployError
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.errors import BlobError, BlobStoreRefused, BusRefused, BusUnreachable, ConfigError
from penstock.protocol.transport import tls
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.weights.signature import SigningKey, TrustedKeys


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    servers.require("nats-server")
    servers.require("rclone")
    with LocalStack(tmp_path_factory.mktemp("tls") / "data", tls=True) as started:
        yield started


@pytest.fixture(scope="module")
def other_ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    certificates.write_certificates(folder)
    return folder / "ca.pem"


def test_services_get_encrypted_connections(stack: LocalStack) -> None:
    """The clients of S3 and NATS connect with the settings that ``penstock up --tls`` prints."""
    assert {"PENSTOCK_NATS__CA_FILE", "PENSTOCK_S3__CA_FILE"} <= stack.environment().keys()
    written = (stack.data / "environment").read_text()
    files = {name: written.partition(f"{name}=")[2].partition("\n")[0] for name in (tls.CERTIFICATE, tls.KEY)}
    tls.ServerFiles(files[tls.CERTIFICATE], files[tls.KEY]).context()
    assert f"export {tls.AUTHORITY}={stack.nats.ca_file}\n" in written
    key_file = Path(stack.environment()["PENSTOCK_TRAINER__SIGNING_KEY_FILE"])
    trusted = TrustedKeys.from_file(Path(stack.environment()["PENSTOCK_WORKER__TRUSTED_KEYS_FILE"]), "x")
    trusted.verify(SigningKey.from_file(key_file, "x").sign(b"{}"), "a manifest")
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert stack.nats.url.startswith("tls://")
    with Bus.connect(stack.nats, name="test") as bus:
        assert bus is not None
    blobs = Blobs(stack.s3)
    assert blobs.get(blobs.put("a/b", b"data")) == b"data"
    file = stack.data / "file"
    file.write_bytes(b"data")
    assert blobs.get(blobs.put_file("a/file", file)) == b"data"


def test_an_unknown_authority_is_refused_at_once(stack: LocalStack, other_ca: Path) -> None:
    """A client that trusts another authority, or only the system's, is told which setting to correct."""
    for ca_file in (other_ca, None):
        with pytest.raises(BusRefused, match=r"certificate is refused.*nats\.ca_file"):
            _connect(stack.nats.model_copy(update={"ca_file": ca_file}))
        s3 = stack.s3.model_copy(update={"ca_file": ca_file})
        with pytest.raises(BlobStoreRefused, match=r"certificate is refused.*s3\.ca_file"):
            Blobs(s3).check("x")


def test_a_wrong_name_is_refused(stack: LocalStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BusRefused, match=r"certificate is refused.*penstock certs FOLDER --name"):
        _connect(stack.nats.model_copy(update={"url": stack.nats.url.replace("127.0.0.1", "127.1")}))
    monkeypatch.setattr(certificates, "_LOOPBACK", ("other.example.com",))
    certificates.write_certificates(tmp_path, services=("s3",))
    elsewhere = certificates.certificate(tmp_path, "s3")
    server = servers.S3Server(tmp_path / "store", log=tmp_path / "log", certificate=elsewhere)
    server.start()
    try:
        with pytest.raises(BlobStoreRefused, match=r"certificate is refused.*penstock certs FOLDER --name"):
            Blobs(server.settings).check("x")
    finally:
        server.stop()


def test_an_expired_certificate_is_refused_and_renewed(tmp_path: Path) -> None:
    """Clients say how to renew an expired certificate; no server starts with one; after the renewal clients connect."""
    certificates.write_certificates(tmp_path, services=("nats",), days=-1 / 1440)  # ended a minute ago
    expired = certificates.Certificate(tmp_path / "nats.pem", tmp_path / "nats.key", tmp_path / "ca.pem")
    with pytest.raises(DeployError, match=r"expired.*--renew"):
        certificates.certificate(tmp_path, "nats")
    server = servers.NatsServer(tmp_path / "store", log=tmp_path / "log", certificate=expired)
    server.start()
    try:
        with pytest.raises(BusRefused, match=r"expired.*--renew"):
            _connect(server.settings)
        assert certificates.kept(tmp_path, "nats") == expired
        server.restart()
        _connect(server.settings)
    finally:
        server.stop()


def test_plain_and_encrypted_do_not_mix(
    stack: LocalStack, nats_settings: NatsSettings, s3_settings: S3Settings, other_ca: Path
) -> None:
    """A plain client at a TLS server, and the reverse, are errors that say so; no password is sent in plain text."""
    plain = {"url": stack.nats.url.replace("tls://", "nats://"), "ca_file": None}
    with pytest.raises((BusRefused, BusUnreachable), match="tls://"):
        _connect(stack.nats.model_copy(update=plain))
    encrypted = {"url": nats_settings.url.replace("nats://", "tls://"), "ca_file": other_ca}
    with pytest.raises(BusRefused, match="does not speak TLS"):
        _connect(nats_settings.model_copy(update=encrypted))
    plain = {"endpoint": stack.s3.endpoint.replace("https://", "http://"), "ca_file": None}
    with pytest.raises(BlobError, match="https://"):
        Blobs(stack.s3.model_copy(update=plain)).check("x")
    encrypted = {"endpoint": s3_settings.endpoint.replace("http://", "https://"), "ca_file": other_ca}
    with pytest.raises(BlobStoreRefused, match="does not speak TLS"):
        Blobs(s3_settings.model_copy(update=encrypted)).check("x")


def test_certificates_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second call is refused and changes nothing; ``--renew`` keeps the authority and the names."""
    folder = tmp_path / "tls"
    assert run(["certs", str(folder), "--name", "nats=nats.example.com", "--name", "s3=10.0.0.5"]) == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    pairs = ("ca", "nats", "s3", "signing")
    assert set(before) == {f"{name}.{kind}" for name in pairs for kind in ("pem", "key")}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.key")} == {0o600}
    assert run(["certs", str(folder)]) == 1
    assert "--renew" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert run(["certs", str(folder), "--renew", "--days", "30"]) == 0
    assert all((folder / name).read_bytes() == before[name] for name in ("ca.pem", "signing.key", "signing.pem"))
    renewed = x509.load_pem_x509_certificate((folder / "nats.pem").read_bytes())
    names = renewed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "nats.example.com" in names.get_values_for_type(x509.DNSName)
    assert 29 <= (renewed.not_valid_after_utc - datetime.now(UTC)).days <= 30


@pytest.mark.parametrize("name", ["nats=two words", "nats=http://x", "redis=host", "nats="])
def test_a_wrong_name_writes_nothing(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is no host name, or of no service, is refused before a file is written."""
    assert run(["certs", str(tmp_path / "tls"), "--name", name]) == 1
    assert name.partition("=")[0] in capsys.readouterr().err
    assert not (tmp_path / "tls").exists()


def test_settings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    """A CA without TLS, addresses of both kinds, and a file without certificates are refused."""
    with pytest.raises(ValueError, match="tls://"):
        NatsSettings(url="nats://a:1", ca_file=tmp_path)
    with pytest.raises(ValueError, match="unencrypted"):
        NatsSettings(url="tls://a:1,nats://b:1")
    with pytest.raises(ValueError, match="https://"):
        S3Settings(endpoint="http://a:1", ca_file=tmp_path)
    empty = tmp_path / "empty.pem"
    empty.touch()
    for file in (empty, tmp_path / "missing.pem"):
        with pytest.raises(ConfigError, match=r"s3\.ca_file"):
            Blobs(S3Settings(endpoint="https://a:1", ca_file=file))


def _connect(settings: NatsSettings) -> None:
    with Bus.connect(settings, name="test", deadline_s=1.0):
        pass
