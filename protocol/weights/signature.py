"""Ed25519 signatures of manifests (RFC 8032): a worker with trusted keys loads no version that none of them has signed.

A manifest is one line of JSON, and names the sha256 of every object of its version. A signed one has a second line:

    {"schema_tag":"weights_manifest.v2", ...}
    ed25519 0f3a9c5b7d21e486 <the signature of the first line, base64>

The 16 hexadecimal digits begin the sha256 of the public key. The trainer has the private key, workers the public one:
who can write to the object store or publish as the trainer, but has no private key, cannot make an engine load weights.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from penstock.protocol.errors import ConfigError, SignatureRefused
from penstock.protocol.weights.manifest import SIGNATURE_LINE

_PURPOSE = b"penstock weights manifest\n"  # so that a signature made for another purpose is none of a manifest
_PUBLIC_KEY = re.compile(rb"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", re.DOTALL)
_MAX_KEY_FILE_BYTES = 64 * 1024


class SigningKey:
    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self._key_id = _key_id(private.public_key())

    @classmethod
    def from_file(cls, path: Path, setting: str) -> SigningKey:
        try:
            key = serialization.load_pem_private_key(_read_key_file(path, setting), None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError(
                f"{setting} = {path}: no Ed25519 private key, PEM without a password; name penstock certs' signing.key"
            )
        return cls(key)

    @property
    def trusted(self) -> TrustedKeys:
        return TrustedKeys([self._private.public_key()])

    def sign(self, line: bytes) -> bytes:
        signature = base64.b64encode(self._private.sign(_PURPOSE + line))
        return b"%b\ned25519 %b %b" % (line, self._key_id, signature)


class TrustedKeys:
    """The public keys whose signatures a worker accepts."""

    def __init__(self, keys: Iterable[Ed25519PublicKey]) -> None:
        self._keys = {_key_id(key): key for key in keys}

    @classmethod
    def from_file(cls, path: Path, setting: str) -> TrustedKeys:
        try:
            blocks = _PUBLIC_KEY.findall(_read_key_file(path, setting))
            keys = [serialization.load_pem_public_key(block) for block in blocks]
        except (ValueError, UnsupportedAlgorithm):
            keys = []
        trusted = [key for key in keys if isinstance(key, Ed25519PublicKey)]
        if not trusted or len(trusted) < len(keys):
            raise ConfigError(
                f"{setting} = {path}: needs Ed25519 public keys in PEM form alone; name penstock certs' signing.pem"
            )
        return cls(trusted)

    def verify(self, data: bytes, name: str) -> None:
        line, _, signed = data.partition(b"\n")
        match = SIGNATURE_LINE.fullmatch(signed)
        if match is None:
            what = "its signature is malformed" if signed else "it has no signature"
            raise SignatureRefused(f"{name}: {what}; set trainer.signing_key_file, or leave worker.trusted_keys_file")
        key = self._keys.get(match[1])
        if key is None:
            trusted = ", ".join(sorted(key_id.decode() for key_id in self._keys))
            raise SignatureRefused(
                f"{name}: signed by key {match[1].decode()}, trusted are {trusted}; add its public key to "
                "worker.trusted_keys_file if it is the trainer's"
            )
        try:
            key.verify(base64.b64decode(match[2], validate=True), _PURPOSE + line)
        except (InvalidSignature, binascii.Error):
            raise SignatureRefused(
                f"{name}: the signature of key {match[1].decode()} is not of this manifest"
            ) from None


def _key_id(key: Ed25519PublicKey) -> bytes:
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16].encode()


def _read_key_file(path: Path, setting: str) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_KEY_FILE_BYTES)
    except OSError as err:
        raise ConfigError(f"{setting} = {path}: not readable ({err.strerror})") from None
