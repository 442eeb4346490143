"""Create an S3 user for each role with the least rights it needs, on MinIO or a fork of it: ``penstock bootstrap --s3-users``.

The access key of a role is ``penstock-ROLE``; its secret key is in the file ``s3_ROLE`` of a folder, which
`python -P -m penstock.deploy.make_secrets` writes.
"""

from __future__ import annotations

from pathlib import Path

from penstock.deploy.s3_policies import policies
from penstock.protocol.config.connection import S3Settings
from penstock.protocol.errors import ConfigError
from penstock.protocol.rights import Role
from penstock.protocol.transport.s3_client import S3Admin

_SHORTEST = 8  # characters of a secret key that MinIO takes


def access_key(role: Role) -> str:
    return f"penstock-{role}"


def create_users(settings: S3Settings, secrets: Path, run_ids: tuple[str, ...] = ()) -> list[str]:
    """Create or update each role's policy and user, for the given runs or any; returns their access keys. Idempotent.

    Raises ConfigError for a missing or short secret before anything is changed, BlobStoreRefused or BlobStoreUnreachable
    when the store has no such interface, refuses, or does not answer.
    """
    found = policies(settings.bucket, run_ids)
    keys = {role: _secret(secrets / f"s3_{role}") for role in found}
    if len({*keys.values(), settings.secret()}) <= len(keys):
        raise ConfigError(f"{secrets}: two roles have one secret key, or that of the store's own user; make new ones")
    admin = S3Admin(settings)
    for role, policy in found.items():
        admin.put_policy(access_key(role), policy)
        admin.put_user(access_key(role), keys[role], policy=access_key(role))
    return [access_key(role) for role in found]


def _secret(path: Path) -> str:
    try:
        secret = path.read_text().strip()
    except OSError as err:
        raise ConfigError(
            f"--s3-users: {path} is not readable ({err.strerror}); make it with: python -P -m penstock.deploy.make_secrets"
        ) from None
    if len(secret) < _SHORTEST:
        raise ConfigError(f"--s3-users: {path} has {len(secret)} characters, a secret key needs {_SHORTEST} or more")
    return secret
