"""S3 users by role: the generated policies as data, and every role's own user on a server that enforces them."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.console.command import server_arguments
from tests.policed_s3 import PolicedS3, allowed

from penstock.console.cli.main import run
from penstock.deploy import s3_policies
from penstock.deploy.make_secrets import make_secrets
from penstock.deploy.rights import Role
from penstock.deploy.s3_policies import access_key, create_users, policies
from penstock.protocol import blob_keys
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.errors import BlobDenied, BlobStoreRefused, ConfigError
from penstock.protocol.groups import BlobRef
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.s3_client import S3Admin
from penstock.protocol.versions import PolicyVersion

RUN, OTHER = "mine", "other"
ROLES: tuple[Role, ...] = ("rollout", "reward", "trainer", "viewer")
SHA = "0" * 64
V1 = PolicyVersion(1)
# One key of each kind of object, by what it is.
KEYS = {
    "pack": blob_keys.group_pack(RUN, V1, "p", "a"),
    "ended episode": blob_keys.finished_episode(blob_keys.finished_episodes_prefix(RUN, "g", 0), "sampled", 0, SHA),
    "image": blob_keys.image(RUN, SHA),
    "tasks": blob_keys.task_list(RUN, "p"),
    "shard": blob_keys.weights_shard(RUN, V1, "a", "model.safetensors"),
    "patch": blob_keys.weights_pack(RUN, V1, "a", 0),
    "manifest": blob_keys.weights_manifest(RUN, V1, "a"),
    "layout": blob_keys.weights_layout(RUN, SHA),
    "model file": blob_keys.model_file(RUN, SHA, "config.json"),
    "chapter": blob_keys.lineage_chapter(RUN, 1, 1, "a"),
    "settings": blob_keys.lineage_config(RUN, SHA),
    "checkpoint": blob_keys.checkpoint_file(RUN, 1, SHA),
    "checkpoint state": blob_keys.checkpoint_state(RUN, 1, SHA),
    "checkpoint metrics": blob_keys.checkpoint_metrics(RUN, 1, SHA, SHA),
    "log-probabilities": blob_keys.step_logprobs(RUN, 1, 1, SHA),
    "input": blob_keys.rescored_input(RUN, SHA),
    "input piece": blob_keys.rescored_piece(RUN, 1, SHA),
    "input user": blob_keys.input_users_prefix(RUN) + RUN,
}
WEIGHTS = {"shard", "patch", "manifest", "layout", "model file"}
RECORD = {"chapter", "settings", "checkpoint", "checkpoint state", "checkpoint metrics", "input user"}
MAY: dict[Role, dict[str, set[str]]] = {
    "rollout": {
        "s3:GetObject": {"tasks", *WEIGHTS, "ended episode", "image"},
        "s3:PutObject": {"pack", "ended episode", "image"}, "s3:DeleteObject": {"ended episode"},
    },
    "reward": {"s3:GetObject": {"pack"}, "s3:PutObject": set(), "s3:DeleteObject": set()},
    "trainer": {
        "s3:GetObject": {"pack", *WEIGHTS, *RECORD, "input", "input piece", "image"},
        "s3:PutObject": {"tasks", *WEIGHTS, *RECORD, "log-probabilities", "image"},
        "s3:DeleteObject": {
            "pack", "ended episode", "tasks", "shard", "patch", "manifest", "log-probabilities", "checkpoint",
            "checkpoint state", "checkpoint metrics",
        },
    },
    "viewer": {"s3:GetObject": set(KEYS), "s3:PutObject": set(), "s3:DeleteObject": set()},
}  # fmt: skip


@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_do_what_it_needs_and_nothing_else(role: Role) -> None:
    """Every kind of object times get, put and delete; the same in another run is refused, and so are other actions."""
    policy = policies("b", [RUN])[role]
    for action, kinds in MAY[role].items():
        found = {kind for kind, key in KEYS.items() if allowed(policy, (action, f"arn:aws:s3:::b/{key}", None))}
        assert found == kinds, action
        elsewhere = {key.replace(f"runs/{RUN}/", f"runs/{OTHER}/", 1) for key in KEYS.values()}
        elsewhere |= {key.replace(f"runs/{RUN}/", f"runs/{RUN}er/", 1) for key in KEYS.values()}
        assert not any(allowed(policy, (action, f"arn:aws:s3:::b/{key}", None)) for key in elsewhere)
        assert not any(allowed(policy, (action, f"arn:aws:s3:::c/{key}", None)) for key in KEYS.values())
    for action in (
        "s3:PutObjecttagging",
        "s3:GetBucketPolicy",
        "s3:CreateBucket",
        "s3:DeleteBucket",
        "admin:CreateUser",
    ):
        assert not any(allowed(policy, (action, f"arn:aws:s3:::b{key}", None)) for key in ("", f"/{KEYS['pack']}"))


@pytest.mark.parametrize(
    ("prefix", "roles"),
    [
        (blob_keys.access_check_prefix(RUN), set(ROLES)),
        (blob_keys.groups_prefix(RUN), {"trainer", "viewer"}),
        (blob_keys.all_finished_episodes_prefix(RUN), {"rollout", "trainer", "viewer"}),
        (blob_keys.weights_prefix(RUN, V1), {"trainer", "viewer"}),
        (blob_keys.checkpoints_prefix(RUN), {"trainer", "viewer"}),
        (blob_keys.run_prefix(RUN), {"viewer"}),
        (blob_keys.run_prefix(OTHER), set()),
        ("runs/", set()),
        ("", set()),
        (None, set()),
    ],
)
def test_a_role_lists_below_its_prefixes(prefix: str | None, roles: set[str]) -> None:
    found = {
        role for role, one in policies("b", [RUN]).items() if allowed(one, ("s3:ListBucket", "arn:aws:s3:::b", prefix))
    }
    assert found == roles


def test_a_policy_holds_for_the_runs_that_are_named_or_for_any(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints it; what is no run id, such as a pattern, is refused."""
    key = f"arn:aws:s3:::penstock/{KEYS['pack']}"
    for arguments, expected in (
        (["rollout"], True),
        (["rollout", "--run", RUN, "--run", "x"], True),
        (["rollout", "--run", "x"], False),
    ):
        assert s3_policies.main(arguments) == 0
        assert allowed(json.loads(capsys.readouterr().out), ("s3:PutObject", key, None)) is expected
    assert s3_policies.main(["rollout", "--run", "*"]) == 1
    assert "run id '*'" in capsys.readouterr().err
    assert s3_policies.main(["environment"]) == 2  # a role of NATS alone
    assert 'Invalid value "environment" for ROLE' in capsys.readouterr().err


def test_the_table_has_an_object_in_every_folder_of_a_run() -> None:
    """A new kind of object is given to the roles that need it, and refused to the others, before it is used."""
    found = [
        make(RUN) for name, make in vars(blob_keys).items()
        if name.endswith("_prefix") and list(inspect.signature(make).parameters) == ["run_id"]
    ]  # fmt: skip
    assert len(found) > 10
    empty = [prefix for prefix in found if not any(key.startswith(prefix) for key in KEYS.values())]
    assert empty == [blob_keys.access_check_prefix(RUN)], "nothing is ever stored there"


# ── on a server ───────────────────────────────────────────────────────────────────────────────────


@dataclass
class Store:
    """A server with users, and a client of each role."""

    server: PolicedS3
    secrets: Path
    root: S3Settings

    def settings(self, role: Role) -> S3Settings:
        key = {"access_key": access_key(role), "secret_key": (self.secrets / f"s3_{role}").read_text()}
        return self.root.model_copy(update=key)

    def blobs(self, role: Role) -> Blobs:
        return Blobs(self.settings(role), deadline_s=0.3, run_id=RUN)


@pytest.fixture(scope="module")
def store(s3_server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """The users as the bootstrap makes them, with one object of each kind."""
    secrets = tmp_path_factory.mktemp("s3-users") / "secrets"
    make_secrets(secrets)
    secret = (secrets / "s3_secret_key").read_text()
    with PolicedS3(s3_server.settings, ("penstock", secret)) as server:
        root = S3Settings(endpoint=server.url, access_key="penstock", secret_key=secret)
        Blobs(root).ensure_bucket()
        assert create_users(root, secrets, (RUN,)) == [access_key(role) for role in ROLES]
        for key in KEYS.values():
            Blobs(root).put(key, b"data")
        yield Store(server, secrets, root)


@pytest.mark.parametrize("role", ROLES)
def test_each_role_reads_and_writes_what_it_needs(store: Store, role: Role) -> None:
    """Each role's own user, by the S3 protocol: what its policy does not allow is refused, and says so."""
    blobs = store.blobs(role)
    blobs.check(RUN)
    sha256 = Blobs(store.root).put("runs/scratch", b"data").sha256
    done, problems = {action: set[str]() for action in MAY[role]}, set[str]()
    for kind, key in KEYS.items():
        ref = BlobRef(key=key, size_bytes=4, sha256=sha256)
        for action, attempt, refusal in (  # what may not be read counts as missing
            ("s3:GetObject", lambda ref=ref: blobs.get(ref), BlobDenied),
            ("s3:PutObject", lambda key=key: blobs.put(key, b"data"), BlobStoreRefused),
            ("s3:DeleteObject", lambda key=key: blobs.delete([key]), BlobStoreRefused),
        ):
            try:
                attempt()
                done[action].add(kind)
            except refusal as err:
                problems.add(re.sub(r".*(refused access key \S+ \w+): .*", r"\1", str(err)))
        Blobs(store.root).put(key, b"data")
    assert done == MAY[role]
    assert problems == {f"refused access key {access_key(role)}: AccessDenied"}
    with pytest.raises(BlobStoreRefused, match="AccessDenied"):
        list(blobs.list(blob_keys.run_prefix(OTHER)))
    with pytest.raises(BlobStoreRefused, match=r"403, AccessDenied"):
        S3Admin(store.settings(role)).put_user("own-user", "own-secret-key", policy="penstock-trainer")


def test_a_user_is_updated_and_a_wrong_secret_refused(store: Store, tmp_path: Path) -> None:
    """The bootstrap may be repeated; a secret that was replaced takes effect, and the old one ends."""
    before = store.blobs("reward")
    before.check(RUN)
    (store.secrets / "s3_reward").write_text("replaced-secret")
    create_users(store.root, store.secrets, (RUN,))
    store.blobs("reward").check(RUN)
    with pytest.raises(BlobStoreRefused, match="SignatureDoesNotMatch"):
        before.check(RUN, deadline_s=0.3)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("s3_trainer", None, "is not readable.*make_secrets"),
        ("s3_trainer", "short", "has 5 characters"),
        ("s3_trainer", "the same secret", "two roles have one secret key"),
        ("s3_secret_key", "the same secret", "two roles have one secret key"),
    ],
)
def test_secrets_that_separate_nothing_are_refused(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    make_secrets(tmp_path)
    (tmp_path / "s3_viewer").write_text("the same secret")
    if text is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(text)
    root = S3Settings(endpoint="http://127.0.0.1:1", access_key="penstock", secret_key_file=tmp_path / "s3_secret_key")
    with pytest.raises(ConfigError, match=message):
        create_users(root, tmp_path)


def test_a_store_without_users_is_named(
    s3_settings: S3Settings, nats_settings: NatsSettings, store: Store, run_id: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """`penstock bootstrap --s3-users` creates the streams, and says of another store how to make its users."""
    make_secrets(tmp_path / "s")
    given = server_arguments(nats_settings, s3_settings)
    assert run(["bootstrap", "--run", run_id, "--s3-users", str(tmp_path / "s"), *given]) == 1
    assert "leave --s3-users out" in capsys.readouterr().err
    with pytest.raises(
        BlobStoreRefused, match=r"status 403, AccessDenied\); s3\.access_key must be the store's own user"
    ):
        create_users(store.settings("trainer"), tmp_path / "s")
