"""The S3 policy of each role, printed or attached to a separate user: what it may read, write, delete and list.

    python -P -m penstock.deploy.s3_policies ROLE                         # for any run
    python -P -m penstock.deploy.s3_policies ROLE --run my-run --bucket penstock

The rights are data in `deploy/rights.py`. `penstock bootstrap --s3-users` gives MinIO and its forks these policies
and users; another store takes the printed JSON, which is the policy language of AWS.
Without ``--run`` a policy holds for any run, as `deploy/nats.conf` does. The access key of a role is ``penstock-ROLE``; its
secret key is in the file ``s3_ROLE`` of a folder, which `python -P -m penstock.deploy.make_secrets` writes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from penstock.deploy.rights import ANY_RUN, ObjectRights, Role, object_rights
from penstock.protocol.command_line import Help, program
from penstock.protocol.config.connection import S3Settings
from penstock.protocol.errors import ConfigError
from penstock.protocol.subjects import check_run_id

_READ = ("s3:GetObject",)
_WRITE = ("s3:PutObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts")  # large objects are put in parts
_DELETE = ("s3:DeleteObject",)
_LIST = ("s3:ListBucket",)
Policy = dict[str, Any]
_SHORTEST = 8  # characters of a secret key that MinIO takes


def policies(bucket: str, run_ids: Sequence[str] = ()) -> dict[Role, Policy]:
    """Return the policy of each role, for ``run_ids`` or (if empty) for any run; raises ConfigError for what is no run id."""
    by_role: dict[Role, list[ObjectRights]] = {}
    for run_id in [check_run_id(run_id) for run_id in run_ids] or [ANY_RUN]:
        for rights in object_rights(run_id):
            by_role.setdefault(rights.role, []).append(rights)
    return {role: _policy(bucket, rights) for role, rights in by_role.items()}


def _policy(bucket: str, of_runs: Sequence[ObjectRights]) -> Policy:
    arn = f"arn:aws:s3:::{bucket}"
    statements: list[Policy] = []
    for actions, prefixes in (
        (_READ, [prefix for of_run in of_runs for prefix in of_run.reads]),
        (_WRITE, [prefix for of_run in of_runs for prefix in of_run.writes]),
        (_DELETE, [prefix for of_run in of_runs for prefix in of_run.deletes]),
    ):
        if prefixes:
            resources = [f"{arn}/{prefix}*" for prefix in prefixes]
            statements.append({"Effect": "Allow", "Action": list(actions), "Resource": resources})
    if listed := [f"{prefix}*" for of_run in of_runs for prefix in of_run.lists]:
        condition = {"StringLike": {"s3:prefix": listed}}
        statements.append({"Effect": "Allow", "Action": list(_LIST), "Resource": [arn], "Condition": condition})
    return {"Version": "2012-10-17", "Statement": statements}


def print_policy(
    role: Annotated[Literal["rollout", "reward", "trainer", "viewer"], Help("Whose policy.")],
    *,
    run: Annotated[tuple[str, ...], Help("Id of a run that it is for; repeatable.")] = (),
    bucket: Annotated[str, Help("The bucket.")] = "penstock",
) -> int:
    print(json.dumps(policies(bucket, run)[role], indent=2))
    return 0


main = program("s3_policies", print_policy)


def access_key(role: Role) -> str:
    return f"penstock-{role}"


def create_users(settings: S3Settings, secrets: Path, run_ids: tuple[str, ...] = ()) -> list[str]:
    """Create or update each role's policy and user, for ``run_ids`` or (if empty) for any run; returns their access keys. Idempotent.

    Raises ConfigError for a missing or short secret before anything is changed, BlobStoreRefused or BlobStoreUnreachable
    when the store has no such interface, refuses, or does not answer.
    """
    from penstock.protocol.transport.s3_client import S3Admin  # noqa: PLC0415  printing needs no client

    by_role = policies(settings.bucket, run_ids)
    keys = {role: _secret(secrets / f"s3_{role}") for role in by_role}
    if len({*keys.values(), settings.secret()}) <= len(keys):
        raise ConfigError(f"{secrets}: two roles have one secret key, or that of the store's own user; make new ones")
    admin = S3Admin(settings)
    for role, policy in by_role.items():
        admin.put_policy(access_key(role), policy)
        admin.put_user(access_key(role), keys[role], policy=access_key(role))
    return [access_key(role) for role in by_role]


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


if __name__ == "__main__":
    sys.exit(main())
