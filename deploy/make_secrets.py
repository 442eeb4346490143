"""Make the secrets of a compose deployment: one password per NATS role, one S3 secret key per role, tokens of the reward service.

    python -m penstock.deploy.make_secrets [FOLDER]        # default: deploy/secrets
    python -m penstock.deploy.make_secrets FOLDER --nats-servers nats-0.nats,nats-1.nats,nats-2.nats

`reward_tokens` is the reward service's file: hashes of the tokens of an administrator, of endpoints that register, and of
Prometheus, which reads. In the folder ``tls`` are an authority, a certificate of each server, and the pair of keys that signs weights and lets workers
verify them; a certificate that ends within a month, or lacks the name of a server, is renewed.

Existing files are kept, so the command can be repeated. Only the owner may enter the folder; the
files are readable, because a container reads its mounted secret under another user id.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from penstock.deploy import certificates
from penstock.protocol.command_line import Help, program
from penstock.protocol.process_end import error_text
from penstock.reward_service.endpoints.endpoint import hashed

NATS_USERS = ("admin", "trainer", "rollout", "reward", "environment", "viewer")
S3_USERS = ("trainer", "rollout", "reward", "viewer")
REWARD_TOKENS = {  # file of a token: name and role of its holder
    "reward_token": ("operator", "admin"),
    "reward_register_token": ("endpoints", "register"),
    "reward_read_token": ("prometheus", "read"),
}
OTHERS = ("s3_secret_key", *(f"s3_{user}" for user in S3_USERS), *REWARD_TOKENS, "grafana_password")
# The certificate of the metrics of trainer and workers: Prometheus expects this name (tls_config.server_name) of every container.
METRICS = "metrics"
METRICS_HOSTS = ("trainer-cpu", "trainer-gpu", "rollout-cpu", "rollout-gpu", "trainer", "rollout")
SERVERS = ("nats", "s3", "reward", "reward-model", METRICS, "prometheus", "grafana")
_BYTES = 24
_FOLDER = Path(__file__).with_name("secrets")
_MODE = 0o644  # a container reads it under another user id, whatever the umask was; other users cannot enter the folder
_ROUTE_PORT = 6222


def make_secrets(folder: Path, nats_servers: Sequence[str] = ()) -> list[Path]:
    """Create the missing files; returns those that were written. ``nats_servers`` are the hosts of a cluster, HOST or HOST:PORT.

    Raises DeployError for certificates that do not fit together.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    written = [folder / name for name in (*(f"nats_{user}" for user in NATS_USERS), *OTHERS)]
    written = [path for path in written if not path.exists()]
    for path in written:
        _write(path, secrets.token_hex(_BYTES))
    made = {
        "nats_passwords.conf": [f'{user.upper()}_PASSWORD: "{_value(folder / f"nats_{user}")}"' for user in NATS_USERS],
        "reward_tokens": [
            f"{name} {role} {hashed(_value(folder / file))}" for file, (name, role) in REWARD_TOKENS.items()
        ],
    }
    for name, lines in made.items():
        path, text = folder / name, "".join(f"{line}\n" for line in lines)
        if not path.exists() or path.read_text() != text:
            _write(path, text)
            written.append(path)
    for name in (*(f"nats_{user}" for user in NATS_USERS), *OTHERS, *made):
        (folder / name).chmod(_MODE)  # also those of an earlier call
    if nats_servers:
        written += _write_routes(folder, nats_servers)
    return [*written, *_make_certificates(folder / "tls", nats_servers)]


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(_MODE)


def _value(file: Path) -> str:
    return file.read_text().strip()


def _write_routes(folder: Path, servers: Sequence[str]) -> list[Path]:
    """Write how the servers of a cluster reach each other: a password cannot be a variable within a URL."""
    password, routes = folder / "nats_route", folder / "nats_routes.conf"
    written = [] if password.exists() else [password]
    if written:
        _write(password, secrets.token_hex(_BYTES))
    known = password.read_text().strip()
    urls = [
        f"nats-route://route:{known}@{server if ':' in server else f'{server}:{_ROUTE_PORT}'}" for server in servers
    ]
    text = f'ROUTE_PASSWORD: "{known}"\nROUTES: {json.dumps(urls)}\n'
    if not routes.exists() or routes.read_text() != text:
        _write(routes, text)
        written.append(routes)
    return written


def _make_certificates(folder: Path, nats_servers: Sequence[str]) -> list[Path]:
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*")}
    hosts = {METRICS: METRICS_HOSTS, "nats": [server.partition(":")[0] for server in nats_servers]}
    for service in SERVERS:
        path, wanted = folder / f"{service}.pem", hosts.get(service, ())
        if not path.exists() or not set(wanted) <= set(certificates.hosts_of(path)):
            names = [(service, host) for host in wanted]
            certificates.write_certificates(folder, services=(service,), names=names, renew=True)
        certificates.kept(folder, service)
        (folder / f"{service}.key").chmod(_MODE)
    private, _ = certificates.signing_key(folder)
    private.chmod(_MODE)
    return [path for path in sorted(folder.glob("*")) if path.stat().st_mtime_ns != before.get(path)]


def write(
    folder: Annotated[Path, Help("Where to write them.")] = _FOLDER,
    *,
    nats_servers: Annotated[
        str,
        Help(
            "Hosts of a cluster of NATS servers, with commas between them: also writes nats_routes.conf, which nats.conf includes as routes.conf."
        ),
    ] = "",
) -> int:
    """Make the secrets of a deployment and print the files that were written; existing files are kept.

    A password for each NATS role (nats_ROLE, and nats_passwords.conf, which nats.conf includes as passwords.conf), the S3
    secret key of the store's user and of each role (s3_ROLE), tokens of the reward service for an administrator, for
    endpoints and for Prometheus with their hashes (reward_tokens), Grafana's password, and in tls/ the certificates of all
    servers and the key that signs weights.
    """
    try:
        for path in make_secrets(folder, [host for host in nats_servers.split(",") if host]):
            print(path)
    except OSError as err:
        print(error_text(f"make_secrets: {err}"), file=sys.stderr)
        return 1
    return 0


main = program("make_secrets", write)


if __name__ == "__main__":
    sys.exit(main())
