"""The attacks: what each role's login publishes, by class; a class can be switched off by its name.

The run must withstand every class but those that `NOT_DEFENDED` names: what no check can tell from the truth, because the login
is allowed to say it. They are off unless `--with` names them, to measure what a stolen login can do.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from tests.rigs.fuzz import forgeries, mutate_facts, mutate_packs, values
from tests.rigs.fuzz.attack import (
    ROLES,
    Attack,
    Attacker,
    Document,
    Maker,
    NothingToAttack,
    as_json,
    change,
    reference,
    sent,
)

from penstock.protocol import streams, subjects
from penstock.protocol.facts import (
    DeadLetter,
    Fact,
    GroupGenerated,
    GroupScored,
    Heartbeat,
    RunEvent,
    TaskIssued,
    WeightsApplied,
    WeightsPublished,
    WeightsRefused,
)

# role -> stage -> the fact it publishes there
_FACTS: dict[str, dict[str, type[Fact]]] = {
    "rollout": {"generated": GroupGenerated, "weights.applied": WeightsApplied, "weights.refused": WeightsRefused, "events": RunEvent, "dead": DeadLetter},
    "reward": {"scored": GroupScored, "events": RunEvent, "dead": DeadLetter},
    "trainer": {"tasks": TaskIssued, "weights.published": WeightsPublished, "events": RunEvent, "dead": DeadLetter},
}  # fmt: skip
_EVENTS = {
    "rollout": subjects.EVENTS_OF_WORKERS,
    "reward": subjects.EVENTS_OF_REWARD_SERVICES,
    "trainer": ("step", "eval", "weights", "log", "state", "drop", "alarm", "dead"),
}
_DEAD_STAGE = {"rollout": "tasks", "reward": "generated", "trainer": "scored"}
_LOUD = {"tasks": 0.35}  # each valid one costs an engine a generation


def _fact(rng: random.Random) -> tuple[str, str, type[Fact]]:
    role = rng.choice(("rollout", "rollout", "reward", "reward", "trainer"))
    stage = rng.choice(list(_FACTS[role]))
    return role, stage, _FACTS[role][stage]


def _real_fact(attacker: Attacker, rng: random.Random, *, dead: bool = True) -> tuple[str, str, str, bytes]:
    """Return role, stage, subject and bytes of a real message; ``dead``: it may be a dead letter."""
    role, stage, _ = _fact(rng)
    subject, data = attacker.real(rng, stage)
    if stage == "dead" and not dead:
        raise NothingToAttack
    return role, stage, subject, data


def _subject(attacker: Attacker, role: str, stage: str, rng: random.Random) -> str:
    run_id = attacker.run_id
    if stage == "dead":
        return subjects.dead(run_id, _DEAD_STAGE[role])
    if stage == "events":
        return subjects.events(run_id, rng.choice(_EVENTS[role]))
    if stage.startswith("weights."):
        return f"{subjects.PREFIX}.{run_id}.{stage}"
    splits = ("train",) if stage == "tasks" else ("train", "train", "train", "eval")
    return f"{subjects.PREFIX}.{run_id}.{stage}.{rng.choice(splits)}"


# ── messages ──────────────────────────────────────────────────────────────────────────────────────────────


def _of_real(mutate: Callable[[random.Random, bytes, bytes], tuple[str, bytes]], *, dead: bool = True) -> Maker:
    def make(attacker: Attacker, rng: random.Random) -> Attack:
        role, stage, _, data = _real_fact(attacker, rng, dead=dead)
        if rng.random() > _LOUD.get(stage, 1.0):
            raise NothingToAttack
        name, data = mutate(rng, data, attacker.real(rng, stage)[1])
        return sent(rng, f"{stage} {name}", role, _subject(attacker, role, stage, rng), data)

    return make


def _fields(rng: random.Random, data: bytes, _: bytes) -> tuple[str, bytes]:
    return mutate_facts.fields_of(rng, data)


def _model(attacker: Attacker, rng: random.Random) -> Attack:
    role, stage, model = _fact(rng)
    data = mutate_facts.generated_fact(rng, model)
    if rng.random() < 0.7:
        tree = mutate_facts.unpack(data)
        if "run_id" in tree[1]:
            tree[1]["run_id"] = attacker.run_id
        data = mutate_facts.pack(tree)
    return sent(rng, stage, role, _subject(attacker, role, stage, rng), data)


def _replay(attacker: Attacker, rng: random.Random) -> Attack:
    role, stage, subject, data = _real_fact(attacker, rng, dead=False)
    if rng.random() > _LOUD.get(stage, 1.0):
        raise NothingToAttack
    return sent(rng, stage, role, subject, data)


def _foreign(attacker: Attacker, rng: random.Random) -> Attack:
    role, stage, subject, data = _real_fact(attacker, rng)
    if rng.random() < 0.3:
        return sent(rng, f"{stage} to another run", role, subject.replace(attacker.run_id, "other-run"), data)
    tree = mutate_facts.unpack(data)
    tree[1]["run_id"] = rng.choice(("other-run", attacker.run_id.upper(), attacker.run_id + "0", ""))
    return sent(rng, f"{stage} of another run", role, subject, mutate_facts.pack(tree))


def _odd_subjects(attacker: Attacker, rng: random.Random) -> Attack:
    role, stage, subject, data = _real_fact(attacker, rng, dead=False)
    last = rng.choice(("other", "TRAIN", "*", ">", "train.x", "0", "x" * 200, "é"))
    return sent(rng, f"{stage} to {last[:8]}", role, f"{subject.rpartition('.')[0]}.{last}", data)


_HEADERS = (
    {"Nats-Rollup": "all"}, {"Nats-Rollup": "sub"}, {"Nats-Expected-Last-Sequence": "0"}, {"Nats-TTL": "1s"},
    {"Nats-Expected-Stream": "other"}, {"traceparent": "x" * 3000}, {"traceparent": "00-\xff-\xff-00"}, {"KV-Operation": "PURGE"},
    {"Status": "404"}, {"Status": "100", "Description": "Idle Heartbeat"}, {"Nats-Msg-Id": "m" * 4000}, {"Nats-Marker-Reason": "MaxAge"},
)  # fmt: skip


def _headers(attacker: Attacker, rng: random.Random) -> Attack:
    headers = dict(rng.choice(_HEADERS))
    if rng.random() < 0.3:
        role = _fact(rng)[0]
        key = streams.heartbeat_key(role, f"fuzz-{rng.randrange(4)}")
        made = sent(rng, f"heartbeat {next(iter(headers))}", role, f"$KV.{attacker.run_id}-live.{key}", b"")
    else:
        role, stage, subject, data = _real_fact(attacker, rng, dead=False)
        empty = "Status" in headers and rng.random() < 0.8  # looks like a status message of the server
        made = sent(rng, f"{stage} {next(iter(headers))}", role, subject, b"" if empty else data)
    made.headers |= headers
    return made


# ── packs and other objects ───────────────────────────────────────────────────────────────────────────────


def _announced(
    attacker: Attacker, rng: random.Random, name: str, fields: Document, data: bytes, groups: Any = None
) -> Attack:
    ref = reference(fields["pack"]["key"].rpartition("/")[0], data, ".parquet")
    if groups is not None:
        fields = mutate_packs.described(fields, groups)
    fields |= {"pack": ref, "pack_id": f"fuzz-{ref['sha256'][:16]}"}
    subject = subjects.generated(attacker.run_id, "train")
    made = sent(rng, name, "rollout", subject, mutate_facts.pack([GroupGenerated.schema_tag, fields]))
    made.stored = [(ref["key"], data)]
    return made


def _changed_bytes(mutate: Callable[[random.Random, bytes, bytes], tuple[str, bytes]]) -> Maker:
    """Return attacks by packs whose bytes are changed under the announcement of a real one."""

    def make(attacker: Attacker, rng: random.Random) -> Attack:
        fields, data = attacker.rows(rng)
        name, data = mutate(rng, data, attacker.rows(rng)[1])
        return _announced(attacker, rng, name, fields, data)

    return make


def _changed_rows(mutate: Callable[[random.Random, mutate_packs.Groups, mutate_packs.Groups], str]) -> Maker:
    """Return attacks by packs whose rows are changed in place, under an announcement that agrees with them."""

    def make(attacker: Attacker, rng: random.Random) -> Attack:
        fields, data = attacker.rows(rng)
        groups, spare = mutate_packs.read(data), mutate_packs.read(attacker.rows(rng)[1])
        name = mutate(rng, groups, spare)
        return _announced(attacker, rng, name, fields, mutate_packs.write_rows(groups), groups)

    return make


def _never_issued(rng: random.Random, groups: mutate_packs.Groups, _: mutate_packs.Groups) -> str:
    if not groups[0][0]["group_id"].startswith("e") or groups[0][0]["split"] == "eval":
        raise NothingToAttack
    return mutate_packs.never_issued_of(rng, groups)


def _task_lists(attacker: Attacker, rng: random.Random) -> Attack:
    _, message = attacker.real(rng, "tasks")
    whole = mutate_facts.pack(["task_list.v1", {"tasks": mutate_facts.unpack(message)[1]["tasks"]}])
    damage = rng.random() >= 0.6
    name, data = mutate_facts.bytes_of(rng, whole, message) if damage else mutate_facts.fields_of(rng, whole)
    ref = reference(f"runs/{attacker.run_id}/tasks", data, ".msgpack")
    fields = {"run_id": attacker.run_id, "pack_id": f"fuzz-{ref['sha256'][:16]}", "tasks": [], "tasks_blob": ref}
    subject = subjects.tasks(attacker.run_id, "train")
    made = sent(rng, name, "trainer", subject, mutate_facts.pack([TaskIssued.schema_tag, fields]))
    made.stored = [(ref["key"], data)]
    return made


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────


def _heartbeats(attacker: Attacker, rng: random.Random) -> Attack:
    role = rng.choice(("rollout", "reward", "trainer"))
    real_key, real = attacker.real(rng, f"kv.live.{role}")
    name, data = rng.choice(
        (
            lambda: mutate_facts.bytes_of(rng, real, real),
            lambda: mutate_facts.fields_of(rng, real),
            lambda: ("model", mutate_facts.generated_fact(rng, Heartbeat)),
            lambda: mutate_facts.lies_of(rng, real, real),
        )
    )()
    key = real_key if rng.random() < 0.5 else f"$KV.{attacker.run_id}-live.{role}.fuzz-{rng.randrange(50)}"
    return sent(rng, name, role, key, data)


def _leases(attacker: Attacker, rng: random.Random) -> Attack:
    permit = ("rollout", streams.swap_permit_key(rng.randrange(3)))
    role, key = rng.choice((permit, ("trainer", streams.GARBAGE_LEASE), ("trainer", streams.EXPIRY_LEASE)))
    data = rng.choice((b"", b"worker-0", b"worker-1", rng.randbytes(20), mutate_facts.pack(values.leaf(rng))))
    return sent(rng, key, role, f"$KV.{attacker.run_id}-leases.{key}", data)


def _progress(attacker: Attacker, rng: random.Random) -> Attack:
    key = streams.pack_progress_key(rng.choice((rng.randrange(1, 3000), 2**63)))
    hostile = ([1], ["e0.p0.a0"], {"e0.p0.a0": 10**9}, {"a": "b"}, {"a": [1]}, None, 7, "x", {"e0.p1.a0": -5})
    document = {"settled": [], "excused": {}, "refused_since": {}}
    for name in document:
        if rng.random() < 0.5:
            document[name] = rng.choice(hostile)
    data = rng.choice(
        (b"", rng.randbytes(30), as_json(document), as_json(values.nested(900)), as_json([]), b'{"settled":NaN}')
    )
    return sent(rng, "record", "reward", f"$KV.{streams.scoring_bucket(attacker.run_id).bucket}.{key}", data)


def _registry(attacker: Attacker, rng: random.Random) -> Attack:
    try:
        subject, real = attacker.real(rng, "kv.rewards.endpoints", "kv.rewards.directory")
    except NothingToAttack:
        subject, real = "", b""
    if not subject or rng.random() < 0.5:
        key = rng.choice(("lease.x", "lease.00", "fuzz", "offers.reward-9"))
        data = rng.choice((b"", rng.randbytes(40), b"{}", b"[]", b"null"))
        return sent(rng, "key", "reward", f"$KV.{streams.registry_bucket().bucket}.{key}", data)
    try:
        document = {"d": json.loads(real)}
    except ValueError:
        raise NothingToAttack from None
    change(rng, document)
    return sent(
        rng, "directory", "reward", subject, rng.choice((rng.randbytes(40), b"{}", b"[1]", as_json(document["d"])))
    )


# ── what the server must refuse ───────────────────────────────────────────────────────────────────────────


def _wrong_role(attacker: Attacker, rng: random.Random) -> Attack:
    writer, stage, subject, data = _real_fact(attacker, rng)
    role = rng.choice([role for role in ROLES if role != writer])
    if stage == "events":
        role = rng.choice(("rollout", "reward", "viewer"))
        others = sorted({*_EVENTS["trainer"], *_EVENTS["reward"], "any"} - set(_EVENTS.get(role, ())))
        subject = subjects.events(attacker.run_id, rng.choice(others))
    elif rng.random() < 0.3:
        other = rng.choice([name for name in ("rollout", "reward", "trainer") if name != role])
        subject = f"$KV.{attacker.run_id}-live.{streams.heartbeat_key(other, 'fuzz')}"
    elif stage == "dead":
        subject = subjects.dead(attacker.run_id, _DEAD_STAGE[writer])
    elif rng.random() < 0.3 and role != "trainer":
        subject = f"$KV.{attacker.run_id}-state.{rng.choice(('head', 'lease', 'floor', 'checkpoint'))}"
    return sent(rng, f"{role} publishes {stage}", role, subject, data)


def _js_api(attacker: Attacker, rng: random.Random) -> Attack:
    run_id, role = attacker.run_id, rng.choice(ROLES)
    stream = rng.choice((*streams.stream_names(run_id), *(f"KV_{b.bucket}" for b in streams.buckets(run_id))))
    spec = rng.choice(streams.consumers(run_id))
    config = {"durable_name": spec.durable, "name": spec.durable, "filter_subject": spec.filter_subject, "ack_policy": "explicit",
              "ack_wait": 10**6, "max_ack_pending": 1}  # fmt: skip
    body = json.dumps({"stream_name": spec.stream, "config": config})
    new = {"durable_name": "fuzz", "name": "fuzz", "ack_policy": "explicit"}
    other = json.dumps({"stream_name": stream, "config": new})
    verb, data = rng.choice(
        (
            (f"STREAM.DELETE.{stream}", ""), (f"STREAM.PURGE.{stream}", ""), (f"STREAM.CREATE.fuzz-{rng.randrange(9)}", '{"name":"fuzz"}'),
            (f"STREAM.UPDATE.{stream}", json.dumps({"name": stream, "max_msgs": 1})), (f"STREAM.MSG.DELETE.{stream}", '{"seq":1}'),
            (f"STREAM.SNAPSHOT.{stream}", '{"deliver_subject":"x"}'), (f"CONSUMER.DELETE.{spec.stream}.{spec.durable}", ""),
            (f"CONSUMER.PAUSE.{spec.stream}.{spec.durable}", '{"pause_until":"2099-01-01T00:00:00Z"}'),
            (f"CONSUMER.CREATE.{spec.stream}.{spec.durable}.{spec.filter_subject}", body), (f"CONSUMER.CREATE.{spec.stream}.{spec.durable}", body),
            (f"CONSUMER.DURABLE.CREATE.{spec.stream}.{spec.durable}", body), (f"CONSUMER.DURABLE.CREATE.{stream}.fuzz", other),
            (f"CONSUMER.CREATE.{stream}.fuzz", other), (f"CONSUMER.CREATE.{stream}.fuzz.>", other), (f"CONSUMER.CREATE.{stream}", other),
        )
    )  # fmt: skip
    return Attack(f"{role} {'.'.join(verb.split('.')[:2])}", role, f"$JS.API.{verb}", data.encode())


# ── what is not defended, but for dead letters and votes ──────────────────────────────────────────────────


def _rewards(attacker: Attacker, rng: random.Random) -> Attack:
    subject, tree = attacker.real_fields(rng, "scored")
    for group in tree[1]["groups"]:
        group["rewards"] = [rng.choice((0.0, 1.0, 1e300)) for _ in group["rewards"]]
    return sent(rng, "rewards", "reward", subject, mutate_facts.pack(tree))


def _dead_letters(attacker: Attacker, rng: random.Random) -> Attack:
    subject, (_, fields) = attacker.real_fields(rng, rng.choice(("generated", "tasks")))
    letter = {
        "run_id": attacker.run_id, "stage": "tasks", "subject": subject, "reason": "fuzz", "detail": "", "num_delivered": 1,
        "group_ids": tuple(group["group_id"] for group in fields.get("groups") or fields.get("tasks") or ()),
    }  # fmt: skip
    data = mutate_facts.pack([DeadLetter.schema_tag, DeadLetter(**letter).model_dump(mode="python")])
    return sent(rng, "real ids", "rollout", subjects.dead(attacker.run_id, "tasks"), data)


def _acks(attacker: Attacker, rng: random.Random) -> Attack:
    of_worker = ("rollout", streams.tasks_consumer(attacker.run_id, "train"))
    role, spec = rng.choice((of_worker, ("reward", streams.generated_consumer(attacker.run_id))))
    number = rng.randrange(1, 3000)
    reply = f"$JS.ACK.{spec.stream}.{spec.durable}.1.{number}.{number}.1700000000000000000.0"
    return Attack(spec.durable, role, reply, rng.choice((b"+ACK", b"+TERM", b"-NAK", b"+WPI")))


def _votes(attacker: Attacker, rng: random.Random) -> Attack:
    subject, tree = attacker.real_fields(rng, "weights.applied")
    version = tree[1]["version"] + rng.randrange(9)
    tree[1] |= {"worker_id": f"fuzz-{rng.randrange(9)}", "version": version, "checksum": "0" * 64}
    return sent(rng, "vote", "rollout", subject, mutate_facts.pack(tree))


def _state(attacker: Attacker, rng: random.Random) -> Attack:
    key = rng.choice((streams.HEAD_KEY, streams.LEASE_KEY, streams.FLOOR_KEY, streams.CHECKPOINT_KEY))
    subject, real = attacker.real(rng, f"kv.state.{key}")
    name, data = rng.choice((mutate_facts.bytes_of, _fields, mutate_facts.lies_of))(rng, real, real)
    return sent(rng, f"{key} {name}", "trainer", subject, data)


# name: how often it is drawn, its attacks, and what it sends
CLASSES: dict[str, tuple[float, Maker, str]] = {
    "bytes": (14, _of_real(mutate_facts.bytes_of), "messages of damaged or random bytes"),
    "fields": (22, _of_real(_fields), "fields of another type, size or depth; added, removed, renamed"),
    "model": (8, _model, "messages drawn from the pydantic models"),
    "lies": (16, _of_real(mutate_facts.lies_of, dead=False), "messages that the schema accepts and that are not true"),
    "replay": (8, _replay, "real messages again, late, out of order, with and without their ids"),
    "foreign": (5, _foreign, "messages of and to another run"),
    "subjects": (1, _odd_subjects, "unknown last tokens of a stream's subjects"),
    "headers": (3, _headers, "headers that JetStream obeys (rollup, TTL, expected sequence) and hostile ones"),
    "pack-schema": (4, _changed_bytes(mutate_packs.schema_of), "packs of another Arrow schema"),
    "pack-values": (6, _changed_rows(mutate_packs.values_of), "packs of values that no engine reports or that no task asks for"),
    "pack-bytes": (3, _changed_bytes(mutate_packs.bytes_of), "packs of damaged bytes"),
    "never-issued": (3, _changed_rows(_never_issued), "packs of real prompts under attempts and epochs that were not issued"),
    "pack-bombs": (0.15, _changed_bytes(mutate_packs.bombs), "small packs that decode to much"),
    "dead-letters": (3, _dead_letters, "dead letters of real, outstanding groups"),
    "task-lists": (1, _task_lists, "objects of task lists, damaged or drawn from the model"),
    "manifests": (1.5, forgeries.manifests, "manifests, patches and layouts, damaged, under real announcements"),
    "heartbeats": (14, _heartbeats, "heartbeats, damaged and invented"),
    "leases": (3, _leases, "permits to swap and leases for clearing up"),
    "progress": (3, _progress, "records of partly scored packs"),
    "marks": (3, forgeries.marks, "records of readers that were killed with a message"),
    "registry": (1, _registry, "the registry of reward endpoints"),
    "weights": (1, forgeries.later_weights, "well-formed manifests of versions that the trainer has not made"),
    "votes": (1, _votes, "checksums of engines, in the name of many workers"),
    "adapters": (2, forgeries.adapters, "adapters with forged factors, layouts, configurations and bases, under real and later announcements"),
    "refusals": (4, forgeries.refusals, "refusals of versions, in the name of real and invented workers"),
    "taken-ids": (5, forgeries.taken_ids, "messages under the ids that other messages will have"),
    "events": (4, forgeries.events, "events of kinds and figures that another role reports, under every subject that the login may use"),
    "wrong-role": (8, _wrong_role, "what another role may publish; the server must refuse it"),
    "js-api": (4, _js_api, "requests that change streams and consumers; the server must refuse them"),
    "plausible": (3, _changed_rows(mutate_packs.plausible_of), "packs that only the model can tell from real ones"),
    "rewards": (3, _rewards, "other rewards for real packs"),
    "acks": (3, _acks, "acknowledgements of messages that other processes hold"),
    "state": (1, _state, "head, lease, floor and checkpoint of the run"),
}  # fmt: skip
NOT_DEFENDED = {"plausible", "rewards", "acks", "state"}
MUST_BE_REFUSED = {"wrong-role", "js-api"}


def makers(kinds: set[str]) -> dict[str, tuple[float, Maker]]:
    return {kind: (weight, make) for kind, (weight, make, _) in CLASSES.items() if kind in kinds}
