"""Print the policy of an S3 user for each role: what it may read, write, delete and list.

    python -P -m penstock.deploy.s3_policies ROLE                         # for any run
    python -P -m penstock.deploy.s3_policies ROLE --run my-run --bucket penstock

The rights are data in `protocol/rights.py`. `penstock bootstrap --s3-users` gives MinIO and its forks these policies
and users; another store takes the printed JSON, which is the policy language of AWS.
Without ``--run`` a policy holds for any run, as `deploy/nats.conf` does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from penstock.protocol.command_line import Help, program
from penstock.protocol.rights import ANY_RUN, ObjectRights, Role, object_rights
from penstock.protocol.subjects import check_run_id

_READ = ("s3:GetObject",)
_WRITE = ("s3:PutObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts")  # large objects are put in parts
_DELETE = ("s3:DeleteObject",)
_LIST = ("s3:ListBucket",)
Policy = dict[str, Any]


def policies(bucket: str, run_ids: Sequence[str] = ()) -> dict[Role, Policy]:
    """Return the policy of each role, for the given runs or (none given) for any; raises ConfigError for what is no run id."""
    by_role: dict[Role, list[ObjectRights]] = {}
    for run_id in [check_run_id(run_id) for run_id in run_ids] or [ANY_RUN]:
        for object_right in object_rights(run_id):
            by_role.setdefault(object_right.role, []).append(object_right)
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


if __name__ == "__main__":
    sys.exit(main())
