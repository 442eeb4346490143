"""Attempts with the stolen credentials of each role, as data: `test_attack_table.py` makes every one of them.

    python -m tests.deploy.attack_table > tests/deploy/attacks.md

Written by hand from what each role is for, not from `protocol/rights.py`: a right that is given by mistake makes an attempt
succeed. What a role sends as content (packs, manifests, messages) is refused by readers: those rows are of `guards.toml`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tests.deploy.attack_content import CONTENT
from tests.mutation.guards import read_table

from penstock.deploy.make_secrets import S3_USERS
from penstock.protocol import blob_keys, streams, subjects
from penstock.protocol.versions import PolicyVersion

RUN, OTHER = "mine", "other"
ROLES = ("rollout", "reward", "environment", "trainer", "viewer")
SHA = "0" * 64
V1 = PolicyVersion(1)
Channel = Literal["publish", "subscribe", "s3"]

# One object of each kind, and who may get, put and delete it.
OBJECTS: dict[str, tuple[str, str, str, str]] = {
    "a pack of groups": (blob_keys.group_pack(RUN, V1, "p", "a"), "reward trainer viewer", "rollout", "trainer"),
    "an ended episode": (blob_keys.finished_episode(blob_keys.finished_episodes_prefix(RUN, "g", 0), "sampled", 0, SHA), "rollout viewer", "rollout", "rollout trainer"),
    "a task list": (blob_keys.task_list(RUN, "p"), "rollout viewer", "trainer", "trainer"),
    "a shard of the weights": (blob_keys.weights_shard(RUN, V1, "a", "m.safetensors"), "rollout trainer viewer", "trainer", "trainer"),
    "a patch": (blob_keys.weights_pack(RUN, V1, "a", 0), "rollout trainer viewer", "trainer", "trainer"),
    "a manifest": (blob_keys.weights_manifest(RUN, V1, "a"), "rollout trainer viewer", "trainer", "trainer"),
    "a layout": (blob_keys.weights_layout(RUN, SHA), "rollout trainer viewer", "trainer", ""),
    "a file of the model": (blob_keys.model_file(RUN, SHA, "config.json"), "rollout trainer viewer", "trainer", ""),
    "a chapter of the record": (blob_keys.lineage_chapter(RUN, 1, 1, "a"), "trainer viewer", "trainer", ""),
    "the recorded settings": (blob_keys.lineage_config(RUN, SHA), "trainer viewer", "trainer", ""),
    "a file of a checkpoint": (blob_keys.checkpoint_file(RUN, 1, SHA), "trainer viewer", "trainer", "trainer"),
    "a checkpoint's state": (blob_keys.checkpoint_state(RUN, 1, SHA), "trainer viewer", "trainer", "trainer"),
    "the log-probabilities of a step": (blob_keys.step_logprobs(RUN, 1, 1, SHA), "viewer", "trainer", "trainer"),
    "a rescored input": (blob_keys.rescored_input(RUN, SHA), "trainer viewer", "", ""),
    "a pack of another run": (blob_keys.group_pack(OTHER, V1, "p", "a"), "", "", ""),
    "a manifest of another run": (blob_keys.weights_manifest(OTHER, V1, "a"), "", "", ""),
}  # fmt: skip
LISTINGS: dict[str, tuple[str | None, str]] = {
    "the whole bucket": ("", ""),
    "the objects of another run": (blob_keys.run_prefix(OTHER), ""),
    "all objects of the run": (blob_keys.run_prefix(RUN), "viewer"),
    "the packs": (blob_keys.groups_prefix(RUN), "trainer viewer"),
    "the ended episodes": (blob_keys.all_finished_episodes_prefix(RUN), "rollout trainer viewer"),
    "the checkpoints": (blob_keys.checkpoints_prefix(RUN), "trainer viewer"),
}
_EVENTS = {"step": "trainer", "alarm": "trainer rollout", "reward_error": "trainer reward"}
# Subjects that only the named roles publish.
SUBJECTS: dict[str, tuple[str, str]] = {
    "issue a task": (subjects.tasks(RUN, "train"), "trainer"),
    "issue a task of an evaluation": (subjects.tasks(RUN, "eval"), "trainer"),
    "hand in a generated group": (subjects.generated(RUN, "train"), "rollout"),
    "hand in a scored group": (subjects.scored(RUN, "train"), "reward"),
    "announce weights": (subjects.weights_published(RUN), "trainer"),
    "report weights as applied": (subjects.weights_applied(RUN), "rollout"),
    "refuse weights": (subjects.weights_refused(RUN), "rollout"),
    **{f"write the event {kind}": (subjects.events(RUN, kind), who) for kind, who in _EVENTS.items()},
    "bury a task": (subjects.dead(RUN, "tasks"), "rollout"),
    "bury a generated group": (subjects.dead(RUN, "generated"), "reward"),
    "bury a scored group": (subjects.dead(RUN, "scored"), "trainer"),
    "move the head": (f"$KV.{streams.state_bucket(RUN).bucket}.{streams.HEAD_KEY}", "trainer"),
    "take the trainer's lease": (f"$KV.{streams.state_bucket(RUN).bucket}.{streams.LEASE_KEY}", "trainer"),
    "move the pointer to the checkpoint": (f"$KV.{streams.state_bucket(RUN).bucket}.{streams.CHECKPOINT_KEY}", "trainer"),
    "raise the floor of old versions": (f"$KV.{streams.state_bucket(RUN).bucket}.{streams.FLOOR_KEY}", "trainer"),
    "take the lease of garbage collection": (f"$KV.{streams.lease_bucket(RUN).bucket}.{streams.GARBAGE_LEASE}", "trainer"),
    "beat as a worker": (f"$KV.{streams.live_bucket(RUN).bucket}.{streams.heartbeat_key('rollout', 'w')}", "rollout"),
    "beat as a reward service": (f"$KV.{streams.live_bucket(RUN).bucket}.{streams.heartbeat_key('reward', 'r')}", "reward"),
    "beat as the trainer": (f"$KV.{streams.live_bucket(RUN).bucket}.{streams.heartbeat_key('trainer', 't')}", "trainer"),
    "register a reward endpoint": (f"$KV.{streams.registry_bucket().bucket}.x", "reward"),
    "replace the secret of an endpoint": (f"$KV.{streams.secrets_bucket().bucket}.x", "reward"),
    "register an environment server": (f"$KV.{streams.environments_bucket().bucket}.environment.x", "environment"),
    "take a task": (f"$JS.API.CONSUMER.MSG.NEXT.{RUN}-tasks.{streams.tasks_consumer(RUN, 'train').durable}", "rollout"),
    "take a generated group": (f"$JS.API.CONSUMER.MSG.NEXT.{RUN}-generated.{streams.generated_consumer(RUN).durable}", "reward"),
    "take a scored group": (f"$JS.API.CONSUMER.MSG.NEXT.{RUN}-scored.{streams.scored_consumer(RUN, 'train').durable}", "trainer"),
    "acknowledge a task": (f"$JS.ACK.{RUN}-tasks.{streams.tasks_consumer(RUN, 'train').durable}.1.1.1.1.0", "rollout"),
    "acknowledge a generated group": (f"$JS.ACK.{RUN}-generated.{streams.generated_consumer(RUN).durable}.1.1.1.1.0", "reward"),
    "acknowledge a scored group": (f"$JS.ACK.{RUN}-scored.{streams.scored_consumer(RUN, 'train').durable}.1.1.1.1.0", "trainer"),
    "read an endpoint's secret": (f"$JS.API.DIRECT.GET.KV_{streams.secrets_bucket().bucket}.$KV.{streams.secrets_bucket().bucket}.x", "reward"),
}  # fmt: skip
_STAGES = ("tasks", "generated", "scored", "weights", "events", "dead")
# What only admin may ask of the server.
ADMIN: dict[str, str] = {
    **{f"delete the stream of {stage}": f"$JS.API.STREAM.DELETE.{RUN}-{stage}" for stage in _STAGES},
    **{f"purge the stream of {stage}": f"$JS.API.STREAM.PURGE.{RUN}-{stage}" for stage in _STAGES},
    **{f"delete a message of {stage}": f"$JS.API.STREAM.MSG.DELETE.{RUN}-{stage}" for stage in _STAGES},
    **{f"change the stream of {stage}": f"$JS.API.STREAM.UPDATE.{RUN}-{stage}" for stage in _STAGES},
    **{f"create a consumer of {stage}": f"$JS.API.CONSUMER.CREATE.{RUN}-{stage}" for stage in _STAGES},
    **{
        f"create a lasting consumer of {stage}": f"$JS.API.CONSUMER.DURABLE.CREATE.{RUN}-{stage}.x" for stage in _STAGES
    },
    "delete the consumer of tasks": f"$JS.API.CONSUMER.DELETE.{RUN}-tasks.{streams.tasks_consumer(RUN, 'train').durable}",
    "pause the consumer of scored groups": f"$JS.API.CONSUMER.PAUSE.{RUN}-scored.{streams.scored_consumer(RUN, 'train').durable}",
    "create a stream": "$JS.API.STREAM.CREATE.x",
    "copy a stream out": f"$JS.API.STREAM.SNAPSHOT.{RUN}-scored",
    "put a stream in": f"$JS.API.STREAM.RESTORE.{RUN}-scored",
    "delete the bucket of the head": f"$JS.API.STREAM.DELETE.KV_{streams.state_bucket(RUN).bucket}",
    "purge the secrets of endpoints": f"$JS.API.STREAM.PURGE.KV_{streams.secrets_bucket().bucket}",
    "ask the server about its connections": "$SYS.REQ.SERVER.PING.CONNZ",
    "ask the server about the account": "$SYS.REQ.ACCOUNT.PENSTOCK.JSZ",
}
LISTENS: dict[str, str] = {
    "listen to everything": ">",
    "listen to every message of the run": f"penstock.{RUN}.>",
    "listen to requests of JetStream": "$JS.API.>",
    "listen to the server's events": "$SYS.>",
    "listen to acknowledgements": "$JS.ACK.>",
    "listen to the answers of all roles": "_INBOX_*.>",
}


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt with a role's credentials. ``target`` is a subject, or an action and a key or prefix."""

    role: str
    what: str
    channel: Channel
    target: str
    action: str = ""


def attempts(role: str) -> list[Attempt]:
    return [*_on_nats(role), *(_on_s3(role) if role in S3_USERS else ())]


def _on_nats(role: str) -> Iterator[Attempt]:
    for what, (subject, owners) in SUBJECTS.items():
        if role not in owners.split():
            yield Attempt(role, what, "publish", subject)
    for what, subject in ADMIN.items():
        yield Attempt(role, what, "publish", subject)
    for what, subject in LISTENS.items():
        yield Attempt(role, what, "subscribe", subject)
    for other in ROLES:
        if other != role:
            yield Attempt(role, f"listen to the answers of {other}", "subscribe", f"_INBOX_{other}.>")
            yield Attempt(role, f"forge an answer to {other}", "publish", f"_INBOX_{other}.x")


def _on_s3(role: str) -> Iterator[Attempt]:
    for what, (key, *allowed) in OBJECTS.items():
        for verb, action, owners in zip(("read", "replace", "delete"), ("get", "put", "delete"), allowed, strict=True):
            if role not in owners.split():
                yield Attempt(role, f"{verb} {what}", "s3", key, action)
    for what, (prefix, owners) in LISTINGS.items():
        if role not in owners.split():
            yield Attempt(role, f"list {what}", "s3", prefix or "", "list")
    for what, action in (
        ("create a bucket", "make"),
        ("read the bucket's policy", "policy"),
        ("create a user", "user"),
    ):
        yield Attempt(role, what, "s3", "", action)


def table() -> str:
    """Return the page: a table for each role, numbered through."""
    lines = [_HEAD.rstrip(), ""]
    number = 0
    guards = {one.check: one for one in read_table()}
    for role in ROLES:
        made = attempts(role)
        sent = [guards[check] for check in CONTENT[role]]
        lines += [
            f"## `{role}`: {len(made)} requests, {len(sent)} kinds of content",
            "",
            "| | attempt | where | result | test |",
            "|---|---|---|---|---|",
        ]
        for one in made:
            number += 1
            where = f"`{one.target}`" if one.channel != "s3" else f"S3 {one.action} `{one.target}`".replace(" ``", "")
            result = {"publish": "permissions violation", "subscribe": "permissions violation", "s3": "`AccessDenied`"}[
                one.channel
            ]
            lines.append(f"| {number} | {one.what} | {where} | {result} | `tests/deploy/test_attack_table.py` |")
        for guard in sent:
            number += 1
            test = guard.tests[0].replace("::", "` ")
            lines.append(
                f"| {number} | send content against the check “{guard.check}” | `{guard.file}` | refused | `{test} |"
            )
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


_HEAD = """
# Attempts with stolen credentials

What was tried with the credentials of each role, on a nats-server with `deploy/nats.conf` and an object store with the generated
policies, and how it ended. Every row is tried by its test, with the real client protocols; `python -m tests.deploy.attack_table >
tests/deploy/attacks.md` writes this page, and a test compares them. What these credentials *can* do is in [docs/security.md](../../docs/security.md#what-a-stolen-credential-can-do).
The object store of the tests is a proxy that verifies signatures and evaluates the policies, before a real S3 server without any: no
store that has policies could be installed there.
"""

if __name__ == "__main__":
    sys.stdout.write(table())
