"""Signed manifests: what a trusted key has signed is loaded, and nothing else."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from penstock.deploy import certificates
from penstock.protocol.errors import ConfigError, MalformedFact, SignatureRefused
from penstock.protocol.weights.manifest import VersionManifest
from penstock.protocol.weights.signature import SigningKey, TrustedKeys

LINE = b'{"version":7}'


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[SigningKey, TrustedKeys, SigningKey]:
    """A trainer's key, the worker's trust in it, and a stranger's key."""
    private, public = certificates.signing_key(tmp_path_factory.mktemp("own"))
    stranger, _ = certificates.signing_key(tmp_path_factory.mktemp("other"))
    trusted = TrustedKeys.from_file(public, "worker.trusted_keys_file")
    return (
        SigningKey.from_file(private, "trainer.signing_key_file"),
        trusted,
        SigningKey.from_file(stranger, "trainer.signing_key_file"),
    )


def _other_key(signed: bytes, own: bytes) -> bytes:
    """A stranger's signature under the trainer's key id."""
    return re.sub(rb"ed25519 \w{16}", b"ed25519 " + own.split()[1], signed)


def test_what_a_trusted_key_has_signed_is_accepted(keys) -> None:
    own, trusted, _ = keys
    signed = own.sign(LINE)
    trusted.verify(signed, "weights/7/manifest.json")
    assert signed.split(b"\n")[0] == LINE


@pytest.mark.parametrize(
    ("forge", "message"),
    [
        (lambda own, other: LINE, "it has no signature"),
        (lambda own, other: LINE + b"\n", "it has no signature"),
        (lambda own, other: other.sign(LINE), "signed by key"),
        (lambda own, other: b"ed25519".join([LINE + b"\n", _other_key(other.sign(LINE), own.sign(LINE).split(b"\n")[1]).split(b"ed25519")[1]]), "is not of this manifest"),
        (lambda own, other: own.sign(LINE).replace(b'"version":7', b'"version":8'), "is not of this manifest"),
        (lambda own, other: own.sign(LINE).replace(b'"version":7', b'"version": 7'), "is not of this manifest"),
        (lambda own, other: own.sign(LINE) + b"\n", "malformed"),
        (lambda own, other: own.sign(LINE).replace(b"ed25519", b"none"), "malformed"),
        (lambda own, other: own.sign(LINE).replace(b"==", b""), "malformed"),
        (lambda own, other: own.sign(LINE)[:-90] + base64.b64encode(bytes(64)), "is not of this manifest|malformed"),
        (lambda own, other: own.sign(LINE) + b"\n" + own.sign(LINE).split(b"\n")[1], "malformed"),
    ],
)  # fmt: skip
def test_what_no_trusted_key_has_signed_is_refused(keys, forge, message: str) -> None:
    """Unsigned, signed by another, changed after it was signed, or signed by another under the trainer's name."""
    own, trusted, stranger = keys
    with pytest.raises(SignatureRefused, match=message) as refused:
        trusted.verify(forge(own, stranger), "weights/7/manifest.json")
    assert "weights/7/manifest.json" in str(refused.value)


def test_a_signature_for_another_purpose_is_none_of_a_manifest(keys, tmp_path: Path) -> None:
    private, public = certificates.signing_key(tmp_path)
    raw = serialization.load_pem_private_key(private.read_bytes(), None)
    assert isinstance(raw, ed25519.Ed25519PrivateKey)
    signed = SigningKey.from_file(private, "x").sign(LINE)
    without_purpose = signed[: signed.rindex(b" ") + 1] + base64.b64encode(raw.sign(LINE))
    with pytest.raises(SignatureRefused, match="is not of this manifest"):
        TrustedKeys.from_file(public, "x").verify(without_purpose, "m")


def test_keys_are_changed_while_both_are_trusted(tmp_path: Path) -> None:
    old, new = (certificates.signing_key(tmp_path / name) for name in ("old", "new"))
    both = tmp_path / "both.pem"
    both.write_bytes(old[1].read_bytes() + b"# the new one\n" + new[1].read_bytes())
    trusted = TrustedKeys.from_file(both, "worker.trusted_keys_file")
    for private, _ in (old, new):
        trusted.verify(SigningKey.from_file(private, "x").sign(LINE), "m")


@pytest.mark.parametrize(
    "kind", ["missing", "empty", "text", "certificate", "rsa", "ec", "mixed", "password", "public as private"]
)
def test_a_file_that_is_no_key_is_refused_with_its_setting(kind: str, tmp_path: Path) -> None:
    private, public = certificates.signing_key(tmp_path / "own")
    certificates.write_certificates(tmp_path / "own")
    path = tmp_path / "key"
    encoding, none = serialization.Encoding.PEM, serialization.NoEncryption()
    private_form, public_form = serialization.PrivateFormat.PKCS8, serialization.PublicFormat.SubjectPublicKeyInfo
    of_another_kind = {
        "rsa": lambda: rsa.generate_private_key(65537, 2048),
        "ec": lambda: ec.generate_private_key(ec.SECP256R1()),
    }
    if kind in of_another_kind:
        key = of_another_kind[kind]()
        path.write_bytes(
            key.private_bytes(encoding, private_form, none) + key.public_key().public_bytes(encoding, public_form)
        )
    elif kind == "mixed":
        other = ec.generate_private_key(ec.SECP256R1())
        path.write_bytes(public.read_bytes() + other.public_key().public_bytes(encoding, public_form))
    elif kind == "password":
        path.write_bytes(
            ed25519.Ed25519PrivateKey.generate().private_bytes(
                encoding, private_form, serialization.BestAvailableEncryption(b"x")
            )
        )
    elif kind == "certificate":
        path = tmp_path / "own" / "nats.pem"
    elif kind == "public as private":
        path = public
    elif kind != "missing":
        path.write_text({"empty": "", "text": "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"}[kind])
    with pytest.raises(ConfigError, match=rf"trainer\.signing_key_file = {re.escape(str(path))}"):
        SigningKey.from_file(path, "trainer.signing_key_file")
    trusted = private if kind == "public as private" else path
    with pytest.raises(ConfigError, match=rf"worker\.trusted_keys_file = {re.escape(str(trusted))}"):
        TrustedKeys.from_file(trusted, "worker.trusted_keys_file")


def test_a_second_line_that_is_no_signature_is_malformed() -> None:
    """A reader without trusted keys reads signed manifests too, and nothing but a signature after the line."""
    with pytest.raises(MalformedFact, match="second line is not a signature"):
        VersionManifest.from_json(LINE + b"\nanything")
    with pytest.raises(MalformedFact, match="second line is not a signature"):
        VersionManifest.from_json(LINE + b"\n")


def test_half_a_key_is_not_completed(tmp_path: Path) -> None:
    """A new private key would be of another public key than the workers trust."""
    private, public = certificates.signing_key(tmp_path)
    before = public.read_bytes()
    private.unlink()
    with pytest.raises(certificates.DeployError, match=r"signing\.key is missing"):
        certificates.signing_key(tmp_path)
    assert public.read_bytes() == before
    with pytest.raises(certificates.DeployError, match="no name of a service"):
        certificates.write_certificates(tmp_path, services=("signing",))
