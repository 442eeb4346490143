"""Make the secrets of a compose deployment: one password per NATS role, one S3 secret key per role, the reward token.

    python -m penstock.deploy.make_secrets [FOLDER]        # default: deploy/secrets
    python -m penstock.deploy.make_secrets FOLDER --nats-servers nats-0.nats,nats-1.nats,nats-2.nats

In its folder ``tls`` are an authority, a certificate of each server, and the pair of keys that signs weights and lets workers
verify them; a certificate that ends within a month, or lacks the name of a server, is renewed.

Existing files are kept, so the command can be repeated. Only the owner may enter the folder; the
files are readable, because a container reads its mounted secret under another user id.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.deploy import certificates
from penstock.deploy.processes.child import DeployError

NATS_USERS = ("admin", "trainer", "rollout", "reward", "environment", "viewer")
S3_USERS = ("trainer", "rollout", "reward", "viewer")
OTHERS = ("s3_secret_key", *(f"s3_{user}" for user in S3_USERS), "reward_token")
METRICS = (
    "metrics"  # of trainer and workers, whatever the container's name: Prometheus takes it for tls_config.server_name
)
METRICS_HOSTS = ("trainer-cpu", "trainer-gpu", "rollout-cpu", "rollout-gpu", "trainer", "rollout")
SERVERS = ("nats", "s3", "reward", "reward-model", METRICS)
_BYTES = 24
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
        path.write_text(secrets.token_hex(_BYTES))
    passwords = folder / "nats_passwords.conf"
    lines = [f'{user.upper()}_PASSWORD: "{(folder / f"nats_{user}").read_text().strip()}"\n' for user in NATS_USERS]
    if not passwords.exists() or passwords.read_text() != "".join(lines):
        passwords.write_text("".join(lines))
        written.append(passwords)
    if nats_servers:
        written += _write_routes(folder, nats_servers)
    return [*written, *_make_certificates(folder / "tls", nats_servers)]


def _write_routes(folder: Path, servers: Sequence[str]) -> list[Path]:
    """Write how the servers of a cluster reach each other: a password cannot be a variable within a URL."""
    password, routes = folder / "nats_route", folder / "nats_routes.conf"
    written = [] if password.exists() else [password]
    if written:
        password.write_text(secrets.token_hex(_BYTES))
    known = password.read_text().strip()
    urls = [f"nats-route://route:{known}@{one if ':' in one else f'{one}:{_ROUTE_PORT}'}" for one in servers]
    text = f'ROUTE_PASSWORD: "{known}"\nROUTES: {json.dumps(urls)}\n'
    if not routes.exists() or routes.read_text() != text:
        routes.write_text(text)
        written.append(routes)
    return written


def _make_certificates(folder: Path, nats_servers: Sequence[str]) -> list[Path]:
    """Create the missing files of TLS and of signatures, and renew what ends soon; returns those that were written."""
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*")}
    hosts = {METRICS: METRICS_HOSTS, "nats": [server.partition(":")[0] for server in nats_servers]}
    for service in SERVERS:
        path, wanted = folder / f"{service}.pem", hosts.get(service, ())
        if not path.exists() or not set(wanted) <= set(certificates.hosts_of(path)):
            names = [(service, host) for host in wanted]
            certificates.write_certificates(folder, services=(service,), names=names, renew=True)
        certificates.kept(folder, service)
        (folder / f"{service}.key").chmod(0o644)  # a container reads it under another user id
    private, _ = certificates.signing_key(folder)
    private.chmod(0o644)
    return [path for path in sorted(folder.glob("*")) if path.stat().st_mtime_ns != before.get(path)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the secrets and print the files that were written."""
    parser = argparse.ArgumentParser(
        prog="python -P -m penstock.deploy.make_secrets",
        description="Make the secrets of a deployment: a password for each NATS role (nats_ROLE, and nats_passwords.conf, which nats.conf "
        "includes as passwords.conf), the S3 secret key of the store's own user and of each role (s3_ROLE), the reward token, and in tls/ the certificates of all servers and the key that signs weights. Existing files are kept.",
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path(__file__).with_name("secrets"), help="where to write them"
    )
    parser.add_argument(
        "--nats-servers",
        default="",
        metavar="HOST,...",
        help="hosts of a cluster of NATS servers: also writes nats_routes.conf, which nats.conf includes as routes.conf",
    )
    options = parser.parse_args(arguments)
    try:
        for path in make_secrets(options.folder, [host for host in options.nats_servers.split(",") if host]):
            print(path)
    except (DeployError, OSError) as err:
        print(f"make_secrets: {err}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
