"""Whom a client trusts when it speaks TLS, and what a failed handshake says to do.

A ``ca_file`` names the certificates of the only authorities that are trusted; without one, those of the system are.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from penstock.protocol.errors import ConfigError

# What OpenSSL says of a server that does not speak TLS at all.
_PLAIN = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")


def client_context(ca_file: Path | None, key: str) -> ssl.SSLContext:
    """Return the context of a client that verifies certificate and name; raises ConfigError that names setting ``key``."""
    try:
        return ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    except ssl.SSLError:
        raise ConfigError(
            f"{key} = {ca_file}: no certificates in PEM form in it; name the ca.pem of penstock certs"
        ) from None
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
        one = waiting.pop()
        if not isinstance(one, BaseException) or id(one) in seen:
            continue
        seen.add(id(one))
        # aiohttp's error for a certificate is one by its class, and has the original among its arguments.
        is_hollow = isinstance(one, ssl.SSLCertVerificationError) and not hasattr(one, "verify_message")
        if isinstance(one, ssl.SSLError) and not is_hollow:
            return one
        waiting += [one.__cause__, one.__context__, getattr(one, "reason", None), *one.args]
    return None
