"""Every attempt of `attack_table.py` fails, and tests/deploy/attacks.md lists them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from minio import Minio
from minio.error import S3Error
from tests.deploy.attack_table import LISTENS, OBJECTS, ROLES, RUN, Attempt, attempts, table
from tests.deploy.nats_roles import NatsRoles
from tests.policed_s3 import PolicedS3
from tests.servers import require

from penstock.deploy.processes.servers import S3Server
from penstock.deploy.s3_policies import access_key, create_users
from penstock.protocol.config.connection import S3Settings
from penstock.protocol.errors import BlobStoreRefused
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.s3_client import S3Admin

ROOT = Path(__file__).parents[2]
BUCKET = "attacked"


class Servers:
    """NATS with the shipped configuration, and an object store with the generated users."""

    def __init__(self, folder: Path, s3: S3Server) -> None:
        self.nats = NatsRoles(folder, (ROOT / "deploy" / "nats.conf").read_text())
        secret = (self.nats.secrets / "s3_secret_key").read_text()
        self.s3 = PolicedS3(s3.settings, ("penstock", secret)).__enter__()
        self.root = S3Settings(endpoint=self.s3.url, access_key="penstock", secret_key=secret, bucket=BUCKET)
        Blobs(self.root).ensure_bucket()
        create_users(self.root, self.nats.secrets, (RUN,))
        for key, *_ in OBJECTS.values():
            Blobs(self.root).put(key, b"untouched")

    def settings(self, role: str) -> S3Settings:
        secret = (self.nats.secrets / f"s3_{role}").read_text()
        return self.root.model_copy(update={"access_key": f"penstock-{role}", "secret_key": secret})

    def close(self) -> None:
        self.nats.close()
        self.s3.__exit__(None, None, None)


@pytest.fixture(scope="module")
def servers(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    require("nats-server")
    started = Servers(tmp_path_factory.mktemp("attacked"), s3_server)
    yield started
    started.close()


def _s3_attempt(client: Minio, settings: S3Settings, one: Attempt) -> str:
    key = one.target
    try:
        if one.action == "get":
            client.get_object(BUCKET, key).close()
        elif one.action == "put":
            client._put_object(BUCKET, key, b"forged", {})
        elif one.action == "delete":
            client.remove_object(BUCKET, key)
        elif one.action == "list":
            list(client.list_objects(BUCKET, prefix=key or None))
        elif one.action == "make":
            client.make_bucket("own-bucket")
        elif one.action == "policy":
            client.get_bucket_policy(BUCKET)
        elif one.action == "user":
            S3Admin(settings).put_user("own-user", "own-secret-key", policy="penstock-trainer")
    except S3Error as err:
        return str(err.code)
    except BlobStoreRefused as err:  # of the admin interface
        return "AccessDenied" if "(status 403, AccessDenied)" in str(err) else str(err)
    return "succeeded"


@pytest.mark.parametrize("role", ROLES)
def test_no_attempt_succeeds(servers: Servers, role: str) -> None:
    """With the role's login on NATS and its user of the object store; what was attacked is there unchanged."""
    made = attempts(role)
    assert len(made) >= 60
    assert len({(one.channel, one.target, one.action) for one in made}) == len(made), "each attempt is another one"
    published = {one.target for one in made if one.channel == "publish"}
    assert servers.nats.refused(role, publish=sorted(published)) == published
    heard = {one.target for one in made if one.channel == "subscribe"}
    assert set(LISTENS.values()) <= heard
    assert servers.nats.refused(role, subscribe=sorted(heard)) == heard
    on_s3 = [one for one in made if one.channel == "s3"]
    if not on_s3:  # it has no user there
        return
    settings = servers.settings(role)
    client = Minio(
        settings.endpoint.partition("//")[2], access_key=access_key(role), secret_key=settings.secret(), secure=False, region="us-east-1"
    )  # fmt: skip
    assert {f"{one.what}: {_s3_attempt(client, settings, one)}" for one in on_s3} == {
        f"{one.what}: AccessDenied" for one in on_s3
    }
    root = Blobs(servers.root)
    assert {root.get_unverified(key) for key, *_ in OBJECTS.values()} == {b"untouched"}


def test_the_page_lists_every_attempt() -> None:
    """tests/deploy/attacks.md is what `python -m tests.deploy.attack_table` prints."""
    assert (ROOT / "tests" / "deploy" / "attacks.md").read_text() == table()
