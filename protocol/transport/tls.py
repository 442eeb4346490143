"""TLS: which authorities clients trust, what a failed handshake means, and the certificates of our HTTP servers.

A ``ca_file`` of a setting names the certificates of the only authorities that are trusted; without one, those of the
system are. Our HTTP servers and clients read three variables:

PENSTOCK_TLS_CERTIFICATE_FILE    of this machine's or container's HTTP servers, with its key in
PENSTOCK_TLS_KEY_FILE
PENSTOCK_TLS_CA_FILE             authorities that clients trust too: ca.pem of `penstock certs`

They are no settings of a run: they differ from machine to machine, and all processes of one use the same. A server that
listens on the loopback alone has no TLS: what could read its packets could read its memory.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import socket
import ssl
from pathlib import Path
from typing import Any, NamedTuple

from penstock.protocol.errors import ConfigError

# What OpenSSL says of a server that does not speak TLS at all.
_PEM_BEGIN, _PEM_END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_PLAIN = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")
CERTIFICATE, KEY, AUTHORITY = (f"PENSTOCK_TLS_{name}_FILE" for name in ("CERTIFICATE", "KEY", "CA"))


def client_context(ca_file: Path | None, key: str) -> ssl.SSLContext:
    """Return a client's context that verifies certificate and name; raises ConfigError that names ``key``."""
    try:
        return ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    except ssl.SSLError:
        raise ConfigError(f"{key} = {ca_file}: no PEM certificates in it; name the ca.pem of penstock certs") from None
    except OSError as err:
        raise ConfigError(f"{key} = {ca_file}: not readable ({err.strerror})") from None


def handshake_problem(err: BaseException, url: str, key: str) -> str:
    """Return what is wrong when ``err`` is, or was caused by, a refused handshake, with a fix; else "".

    ``key`` is the setting that names the CA, such as ``nats.ca_file``.
    """
    cause = _ssl_error(err)
    if isinstance(cause, ssl.SSLCertVerificationError):
        reason = cause.verify_message or str(cause)
        if cause.verify_code == 10:
            fix = "renew the server's certificate: penstock certs FOLDER --renew, and restart the server"
        elif cause.verify_code in (62, 64):
            fix = "connect by a name of the certificate, or make one with this name: penstock certs FOLDER --name"
        else:
            fix = f"set {key} to the ca.pem that signed the server's certificate"
        return f"{url}: the server's certificate is refused: {reason}; {fix}"
    if cause is not None and (cause.reason or "") in _PLAIN:
        return f"{url}: the server does not speak TLS; correct the URL's scheme, or start the server with a certificate"
    return ""


def _ssl_error(err: BaseException | None) -> ssl.SSLError | None:
    """Return the SSLError among an exception, its ``reason`` (of urllib3), its arguments and its causes."""
    seen: set[int] = set()
    waiting: list[object] = [err]
    while waiting:
        candidate = waiting.pop()
        if not isinstance(candidate, BaseException) or id(candidate) in seen:
            continue
        seen.add(id(candidate))
        # aiohttp's error for a certificate is one by its class, and has the original among its arguments.
        is_hollow = isinstance(candidate, ssl.SSLCertVerificationError) and not hasattr(candidate, "verify_message")
        if isinstance(candidate, ssl.SSLError) and not is_hollow:
            return candidate
        waiting += [candidate.__cause__, candidate.__context__, getattr(candidate, "reason", None), *candidate.args]
    return None


def listen(host: str, port: int, *, key: str, backlog: int = 256) -> socket.socket:
    """Return a bound socket that listens, for `asyncio`; at most ``backlog`` connections wait to be accepted.

    Raises ConfigError naming the setting ``key`` when the address cannot be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # asyncio turns Nagle's algorithm off only where the protocol is named. With it on, the body of an answer waits
        # about 40 ms for the acknowledgement of its headers.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(backlog)
        except OSError:
            bound.close()
            raise
    except (OSError, UnicodeError) as err:  # the second one for a host that no name can be
        reason = (err.strerror if isinstance(err, OSError) else "") or err
        raise ConfigError(f"cannot listen on {host} port {port} ({reason}); set {key} to a free port, or 0") from None
    return bound


class ServerFiles(NamedTuple):
    certificate: str
    key: str

    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as err:
            reason = err.reason if isinstance(err, ssl.SSLError) else err.strerror
            raise ConfigError(
                f"{CERTIFICATE} = {self.certificate} and {KEY} = {self.key}: no certificate with its key ({reason}); "
                "make them with: penstock certs FOLDER --service NAME"
            ) from None
        return context


def server_files(host: str) -> ServerFiles | None:
    """Return the files of a server that listens on ``host``; None on the loopback, or when no certificate is named.

    Raises ConfigError for a certificate without key, and for files that cannot be used.
    """
    certificate, key = os.environ.get(CERTIFICATE, ""), os.environ.get(KEY, "")
    if is_loopback(host) or not (certificate or key):
        return None
    if not (certificate and key):
        there, missing = (CERTIFICATE, KEY) if certificate else (KEY, CERTIFICATE)
        raise ConfigError(f"{there} is set and {missing} is not: a server with TLS needs both")
    files = ServerFiles(certificate, key)
    files.context()
    return files


def server_options(host: str) -> dict[str, Any]:
    """Return uvicorn's options for a server that listens on ``host``; empty without TLS. Raises as `server_files`."""
    files = server_files(host)
    return {} if files is None else {"ssl_certfile": files.certificate, "ssl_keyfile": files.key}


def fingerprint(host: str) -> str:
    """Return the SHA-256 of a server's certificate on ``host``, in hex; "" without TLS. Raises as `server_files`."""
    if (files := server_files(host)) is None:
        return ""
    first = Path(files.certificate).read_text().partition(_PEM_END)[0]
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(_PEM_BEGIN + first.partition(_PEM_BEGIN)[2] + _PEM_END)).hexdigest()


def scheme(host: str) -> str:
    return "http" if server_files(host) is None else "https"


def trust_own_authority(context: ssl.SSLContext) -> ssl.SSLContext:
    """Let a client's context trust a named authority, too; raises ConfigError for a file without certificates."""
    if file := os.environ.get(AUTHORITY, ""):
        try:
            context.load_verify_locations(Path(file))
        except (OSError, ssl.SSLError) as err:
            reason = err.strerror if not isinstance(err, ssl.SSLError) else "no certificates in PEM form in it"
            raise ConfigError(f"{AUTHORITY} = {file}: {reason}; name the ca.pem of penstock certs") from None
    return context


def aiohttp_trust() -> ssl.SSLContext | bool:
    """Return what aiohttp verifies servers with; True: the system's authorities. Raises as `trust_own_authority`."""
    return trust_own_authority(ssl.create_default_context()) if os.environ.get(AUTHORITY) else True


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches an address; a name is the address that `listen` binds for it."""
    try:
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4][0]
        return ipaddress.ip_address(address).is_loopback
    except (OSError, ValueError):  # no address, or nothing that a name can be: it cannot be listened on
        return False
