"""A certificate authority in a folder, and a certificate for each service: ``penstock certs FOLDER``.

FOLDER/ca.pem         the authority's certificate: every client gets it
FOLDER/ca.key         its private key: keep it away from all services
FOLDER/NAME.pem       the certificate of service NAME, for the host names NAME, localhost and the loopback addresses
FOLDER/NAME.key       its private key, readable for its owner only
FOLDER/signing.key    the private key with which the trainer signs weights: trainer.signing_key_file
FOLDER/signing.pem    its public key, by which workers know the trainer's weights: worker.trusted_keys_file
"""

from __future__ import annotations

import ipaddress
import re
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from penstock.deploy.processes.child import DeployError
from penstock.deploy.processes.servers import Certificate
from penstock.protocol.command_line import UsageError
from penstock.protocol.files import atomic_write
from penstock.protocol.process_end import error_text

SERVICES = ("nats", "s3")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_CA = "ca"
_SIGNING = "signing"
_CA_DAYS = 3650
_CLOCKS_APART = timedelta(minutes=5)  # a client whose clock is behind must not see a certificate of the future
_RENEW_BEFORE = timedelta(days=30)
_SERVICE = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*")


def certificate(folder: Path, service: str) -> Certificate:
    """Return the paths of a service's certificate; raises DeployError when it is missing or not valid now."""
    paths = Certificate(folder / f"{service}.pem", folder / f"{service}.key", folder / f"{_CA}.pem")
    leaf, authority = _read(paths.file), _read(paths.ca_file)
    if leaf.not_valid_after_utc <= datetime.now(UTC):
        raise DeployError(
            f"{paths.file} expired at {leaf.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; "
            f"renew it with: penstock certs {folder} --renew"
        )
    try:
        leaf.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        raise DeployError(
            f"{paths.file} is not signed by {paths.ca_file}; renew it with: penstock certs {folder} --renew"
        ) from None
    return paths


def kept(folder: Path, service: str) -> Certificate:
    """Return a service's certificate, made when there is none and renewed when it ends within a month."""
    path = folder / f"{service}.pem"
    if not path.exists() or _read(path).not_valid_after_utc < datetime.now(UTC) + _RENEW_BEFORE:
        write_certificates(folder, services=(service,), renew=True)
    return certificate(folder, service)


def write_certificates(
    folder: Path,
    *,
    services: Sequence[str] = SERVICES,
    names: Iterable[tuple[str, str]] = (),
    days: float = 365.0,
    renew: bool = False,
) -> list[Path]:
    """Write an authority unless there is one, and a certificate for each service; returns the certificates written.

    ``names`` are more (service, host name or IP address) pairs. A file that exists is refused, before anything is
    written, unless ``renew``: certificates and keys of services are then replaced, under the same authority, and keep
    the names they had.
    """
    more = _checked(services, names)
    if not renew and (taken := [path for path in (folder / f"{name}.pem" for name in services) if path.exists()]):
        raise DeployError(f"{taken[0]} exists; replace the certificates with --renew, or choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    key, authority = _authority(folder)
    written = []
    for service in services:
        path = folder / f"{service}.pem"
        hosts = [service, *_LOOPBACK, *(hosts_of(path) if path.exists() else ()), *more[service]]
        service_key = ec.generate_private_key(ec.SECP256R1())
        issued = _issued(service, service_key.public_key(), list(dict.fromkeys(hosts)), days, key, authority)
        atomic_write(path.with_suffix(".key"), _private(service_key), sync=True, mode=0o600)
        atomic_write(path, issued.public_bytes(serialization.Encoding.PEM), sync=True, mode=0o644)
        written.append(path)
    return written


def signing_key(folder: Path) -> tuple[Path, Path]:
    """Return the files of the private and the public key that sign weights, made when there are none.

    Raises DeployError when one of them is missing: a new key would be of another public key than workers trust.
    """
    private, public = folder / f"{_SIGNING}.key", folder / f"{_SIGNING}.pem"
    if private.exists() != public.exists():
        there, gone = (private, public) if private.exists() else (public, private)
        raise DeployError(f"{gone} is missing; put it back, or remove {there} too for a new key")
    if not private.exists():
        folder.mkdir(parents=True, exist_ok=True)
        key = ed25519.Ed25519PrivateKey.generate()
        atomic_write(private, _private(key), sync=True, mode=0o600)
        encoding, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        atomic_write(public, key.public_key().public_bytes(encoding, form), sync=True, mode=0o644)
    return private, public


def is_host(text: str) -> bool:
    return _address(text) is not None or _HOST.fullmatch(text) is not None


def _checked(services: Sequence[str], names: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    for service in services:
        if not _SERVICE.fullmatch(service) or service in (_CA, _SIGNING):
            raise DeployError(f"{service!r} is no name of a service: a-z, 0-9 and '-', not {_CA!r} or {_SIGNING!r}")
    more: dict[str, list[str]] = {service: [] for service in services}
    for service, host in names:
        if service not in more:
            raise DeployError(f"--name {service}={host}: the services are {', '.join(services)}")
        if not is_host(host):
            raise DeployError(f"--name {service}={host}: neither a host name nor an IP address")
        more[service].append(host)
    return more


def _authority(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    file, key_file = folder / f"{_CA}.pem", folder / f"{_CA}.key"
    if file.exists() or key_file.exists():
        if not key_file.exists():
            raise DeployError(f"{key_file} is missing, which signs certificates; put it back, or choose another folder")
        key = serialization.load_pem_private_key(key_file.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise DeployError(f"{key_file} is no key of penstock certs; choose another folder")
        return key, _read(file)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Penstock CA")])
    issued = (
        _builder(name, name, key.public_key(), _CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    atomic_write(key_file, _private(key), sync=True, mode=0o600)
    atomic_write(file, issued.public_bytes(serialization.Encoding.PEM), sync=True, mode=0o644)
    return key, issued


def _issued(
    service: str,
    public: ec.EllipticCurvePublicKey,
    hosts: Sequence[str],
    days: float,
    key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
) -> x509.Certificate:
    addresses = {host: _address(host) for host in hosts}
    names = [x509.DNSName(h) if (a := addresses[h]) is None else x509.IPAddress(a) for h in hosts]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, service)])
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH]
    if service == "nats":  # the servers of a cluster are each other's clients, and verify both ways
        purposes.append(ExtendedKeyUsageOID.CLIENT_AUTH)
    return (
        _builder(subject, authority.subject, public, days)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_APART)
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def hosts_of(path: Path) -> list[str]:
    names = _read(path).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def _read(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as err:
        raise DeployError(
            f"{path}: not readable ({err.strerror}); make it with: penstock certs {path.parent}"
        ) from None
    except ValueError:
        raise DeployError(f"{path} is no certificate in PEM form; choose another folder") from None


def _private(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def print_certificates(folder: Path, services: Sequence[str], names: Sequence[str], *, days: float, renew: bool) -> int:
    """Write certificates and list their paths and last days; returns the exit code.

    ``names`` are SERVICE=HOST. Raises UsageError.
    """
    if not 0 < days <= _CA_DAYS:
        raise UsageError(f"--days: between 0 and {_CA_DAYS}")
    if wrong := [name for name in names if "=" not in name]:
        raise UsageError(f"--name {wrong[0]}: expected SERVICE=HOST")
    pairs = [(service, host) for service, _, host in (pair.partition("=") for pair in names)]
    try:
        written = write_certificates(folder, services=services, names=pairs, days=days, renew=renew)
        private, public = signing_key(folder)
    except (DeployError, OSError) as err:
        print(error_text(f"penstock certs: {err}"), file=sys.stderr)
        return 1
    for path in written:
        print(f"{path}: {', '.join(hosts_of(path))}; until {_read(path).not_valid_after_utc:%Y-%m-%d}")
    print(f"{private}: signs weights; its public key is {public}")
    print(
        f"clients trust {folder / 'ca.pem'}: nats.ca_file and s3.ca_file; the trainer signs with {private}: "
        f"trainer.signing_key_file; workers trust {public}: worker.trusted_keys_file",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    from penstock.console.cli.main import run_verb

    run_verb("certs")
