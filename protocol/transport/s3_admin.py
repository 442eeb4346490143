"""Users and policies of MinIO and its forks, through their admin interface (deploy/s3_users.py only).

AWS and other stores have other interfaces: they answer with an error, which says to create the users there by hand.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import urllib3
from minio.credentials import StaticProvider
from minio.error import MinioAdminException
from minio.minioadmin import MinioAdmin

from penstock.protocol.config.connection import S3Settings
from penstock.protocol.errors import BlobStoreRefused, BlobStoreUnreachable
from penstock.protocol.transport.tls import client_context, handshake_problem

_RETRY_S = 0.2
_CODE = re.compile(r"Code\W{1,4}(\w{3,80})")  # of an answer in XML or JSON


class S3Admin:
    """The admin interface of one store, with the store's own user. Every call may be repeated."""

    def __init__(self, settings: S3Settings, *, deadline_s: float = 30.0) -> None:
        """Prepare a client; nothing is sent before the first call."""
        url = urlsplit(settings.endpoint)
        self._settings, self._deadline_s = settings, deadline_s
        is_encrypted = url.scheme == "https"
        self._client = MinioAdmin(
            endpoint=url.netloc,
            credentials=StaticProvider(settings.access_key, settings.secret()),
            region=settings.region,
            secure=is_encrypted,
            http_client=urllib3.PoolManager(
                timeout=urllib3.Timeout(connect=5, read=deadline_s),
                retries=False,
                ssl_context=client_context(settings.ca_file, "s3.ca_file") if is_encrypted else None,
            ),
        )

    def put_policy(self, name: str, policy: Mapping[str, Any]) -> None:
        """Create a policy, or replace it."""
        self._call(f"policy {name}", lambda: self._client.policy_add(name, policy=dict(policy)))

    def put_user(self, access_key: str, secret_key: str, *, policy: str) -> None:
        """Create a user, or give it another secret key; ``policy`` is its only one."""
        self._call(f"user {access_key}", lambda: self._client.user_add(access_key, secret_key))
        self._call(f"policy of user {access_key}", lambda: self._client.policy_set(policy, user=access_key))

    def _call(self, what: str, request: Callable[[], object]) -> None:
        endpoint, deadline = self._settings.endpoint, time.monotonic() + self._deadline_s
        while True:
            try:
                request()
            except MinioAdminException as err:
                code = _CODE.search(err._body)
                problem = f"status {err._code}{f', {code[1]}' if code else ''}"
                if int(err._code) < 500:
                    raise BlobStoreRefused(
                        f"{what}: {endpoint} refused it ({problem}); s3.access_key must be the store's own user, and the "
                        "store MinIO or a fork. For another store leave --s3-users out, and create the users there with "
                        "the policies that `python -P -m penstock.deploy.s3_policies ROLE` prints"
                    ) from None
            except (urllib3.exceptions.HTTPError, OSError) as err:
                if refused := handshake_problem(err, endpoint, "s3.ca_file"):
                    raise BlobStoreRefused(f"{what}: {refused}") from None
                problem = f"{type(err).__name__}: {err}"
            else:
                return
            if time.monotonic() + _RETRY_S > deadline:
                raise BlobStoreUnreachable(
                    f"{what}: {endpoint} gave no valid answer within {self._deadline_s:.0f} s ({problem})"
                )
            time.sleep(_RETRY_S)
