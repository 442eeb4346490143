"""The attacks: what each role's login publishes, by class; a class can be switched off by its name.

A class says in `DEFENDED` that the run must withstand it. What no check can tell from the truth, because the login
is allowed to say it, is in `NOT_DEFENDED`: off unless `--with` names it, to measure what a stolen login can do.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.rigs.fuzz import forgeries, mutate_facts, mutate_packs, values
from tests.rigs.fuzz.capture import Corpus

from penstock.protocol import streams, subjects
from penstock.protocol.errors import WireError
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
    decode,
    encode,
)
from penstock.protocol.transport.blobs import Blobs

ROLES = ("rollout", "reward", "trainer", "viewer")
DEFENDED = {
    "bytes": "messages of damaged or random bytes",
    "fields": "fields of another type, size or depth; added, removed, renamed",
    "model": "messages drawn from the pydantic models",
    "lies": "messages that the schema accepts and that are not true",
    "replay": "real messages again, late, out of order, with and without their ids",
    "foreign": "messages of and to another run",
    "subjects": "unknown last tokens of a stream's subjects",
    "headers": "headers that JetStream obeys (rollup, TTL, expected sequence) and hostile ones",
    "pack-schema": "packs of another Arrow schema",
    "pack-values": "packs of values that no engine reports or that no task asks for",
    "pack-bytes": "packs of damaged bytes",
    "never-issued": "packs of real prompts under attempts and epochs that were not issued",
    "pack-bombs": "small packs that decode to much",
    "dead-letters": "dead letters of real, outstanding groups",
    "task-lists": "objects of task lists, damaged or drawn from the model",
    "manifests": "manifests, patches and layouts, damaged, under real announcements",
    "heartbeats": "heartbeats, damaged and invented",
    "leases": "permits to swap and leases for clearing up",
    "progress": "records of partly scored packs",
    "marks": "records of readers that were killed with a message",
    "registry": "the registry of reward endpoints",
    "weights": "well-formed manifests of versions that the trainer has not made",
    "votes": "checksums of engines, in the name of many workers",
    "adapters": "adapters with forged factors, layouts, configurations and bases, under real and later announcements",
    "refusals": "refusals of versions, in the name of real and invented workers",
    "taken-ids": "messages under the ids that other messages will have",
    "events": "events of kinds and figures that another role reports, under every subject that the login may use",
    "wrong-role": "what another role may publish; the server must refuse it",
    "js-api": "requests that change streams and consumers; the server must refuse them",
}
NOT_DEFENDED = {
    "plausible": "packs that only the model can tell from real ones",
    "rewards": "other rewards for real packs",
    "acks": "acknowledgements of messages that other processes hold",
    "state": "head, lease, floor and checkpoint of the run",
}
MUST_BE_REFUSED = {"wrong-role", "js-api"}


@dataclass(slots=True)
class Attack:
    """One message as a login sends it; ``stored`` are objects that are put into S3 before."""

    number: int
    kind: str
    name: str
    role: str
    subject: str
    data: bytes
    headers: dict[str, str] = field(default_factory=dict)
    stored: list[tuple[str, bytes]] = field(default_factory=list)
    outcome: str = "unanswered"
    stream: str = ""
    sequence: int = 0

    @property
    def stage(self) -> str:
        parts = self.subject.split(".")
        return parts[2] if parts[0] == subjects.PREFIX and len(parts) > 2 else parts[0]


class Attacker:
    """Draws one attack after another from a seed, the corpus and the run's present state."""

    def __init__(self, corpus: Corpus, blobs: Blobs, kinds: set[str], seed: int) -> None:
        """Attack a run that is under way with the given classes."""
        self._corpus, self._blobs, self._seed = corpus, blobs, seed
        self.run_id = corpus.run_id
        self._votes = "votes" in kinds
        self._makers = [(kind, weight, make) for kind, weight, make in _MAKERS if kind in kinds]
        self._weights = [weight for _, weight, _ in self._makers]

    def draw(self, number: int) -> Attack | None:
        """Return attack ``number``; None if the run has sent nothing yet that it could start from."""
        rng = random.Random(f"{self._seed}:{number}")
        kind, _, make = rng.choices(self._makers, self._weights)[0]
        made = make(self, rng)
        if made is not None:
            made.number, made.kind = number, kind
            if not self._votes and made.subject == subjects.weights_applied(self.run_id) and kind != "replay":
                made.data = _without_vote(made.data)
            made.headers.setdefault("X-Fuzz", str(number))
        return made

    # ── what the makers share ─────────────────────────────────────────────────────────────────

    def real(self, rng: random.Random, kind: str) -> tuple[str, bytes] | None:
        return self._corpus.draw(rng, kind)

    def rows(self, rng: random.Random) -> tuple[dict[str, Any], bytes] | None:
        """Return a real announcement of a pack, as fields, and the pack's bytes."""
        found = self._corpus.draw(rng, "generated")
        if found is None:
            return None
        fields = mutate_facts.unpack(found[1])[1]
        data = self._corpus.fetch(fields["pack"], self._blobs)
        return None if data is None else (fields, data)

    def manifest(self, rng: random.Random) -> tuple[Any, bytes] | None:
        """Return a real announcement of weights, unpacked, and the manifest that it names."""
        found = self._corpus.draw(rng, "weights.published")
        if found is None:
            return None
        tree = mutate_facts.unpack(found[1])
        data = self.fetch(tree[1]["manifest"])
        return None if data is None else (tree, data)

    def number_near(self, rng: random.Random) -> int:
        """Return a number like those of the next messages of a stream, or of the next step."""
        return rng.choice((self._corpus.newest_step, self._corpus.num_seen // 8)) + rng.randrange(-3, 40)

    def fetch(self, ref: dict[str, Any]) -> bytes | None:
        return self._corpus.fetch(ref, self._blobs)


def _without_vote(data: bytes) -> bytes:
    """Return a valid `WeightsApplied` of a layout that no engine has, so that nothing is compared with it."""
    try:
        fact = decode(data, WeightsApplied)
    except WireError:
        return data
    return encode(fact.model_copy(update={"layout": "fuzz"}))


Maker = Callable[[Attacker, random.Random], Attack | None]
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


def _attack(rng: random.Random, name: str, role: str, subject: str, data: bytes) -> Attack:
    headers = {"Nats-Msg-Id": f"fuzz-{rng.getrandbits(60):x}"} if rng.random() < 0.7 else {}
    return Attack(0, "", name, role, subject, data, headers)


def _of_real(change: Callable[[random.Random, bytes, bytes], tuple[str, bytes]], *, lies: bool = False) -> Maker:
    def make(attacker: Attacker, rng: random.Random) -> Attack | None:
        role, stage, _ = _fact(rng)
        if rng.random() > _LOUD.get(stage, 1.0) or (lies and stage == "dead"):
            return None
        found, other = attacker.real(rng, stage), attacker.real(rng, stage)
        if found is None or other is None:
            return None
        name, data = change(rng, found[1], other[1])
        return _attack(rng, f"{stage} {name}", role, _subject(attacker, role, stage, rng), data)

    return make


def _bytes(rng: random.Random, data: bytes, other: bytes) -> tuple[str, bytes]:
    return mutate_facts.bytes_of(rng, data, other)


def _fields(rng: random.Random, data: bytes, _: bytes) -> tuple[str, bytes]:
    return mutate_facts.fields_of(rng, data)


def _model(attacker: Attacker, rng: random.Random) -> Attack | None:
    role, stage, model = _fact(rng)
    data = mutate_facts.generated_fact(rng, model)
    if rng.random() < 0.7:
        tree = mutate_facts.unpack(data)
        if "run_id" in tree[1]:
            tree[1]["run_id"] = attacker.run_id
        data = mutate_facts.pack(tree)
    return _attack(rng, stage, role, _subject(attacker, role, stage, rng), data)


def _replay(attacker: Attacker, rng: random.Random) -> Attack | None:
    role, stage, _ = _fact(rng)
    found = attacker.real(rng, stage)
    if found is None or stage == "dead" or rng.random() > _LOUD.get(stage, 1.0):
        return None
    return _attack(rng, stage, role, found[0], found[1])


def _foreign(attacker: Attacker, rng: random.Random) -> Attack | None:
    role, stage, _ = _fact(rng)
    found = attacker.real(rng, stage)
    if found is None:
        return None
    if rng.random() < 0.3:
        return _attack(rng, f"{stage} to another run", role, found[0].replace(attacker.run_id, "other-run"), found[1])
    tree = mutate_facts.unpack(found[1])
    tree[1]["run_id"] = rng.choice(("other-run", attacker.run_id.upper(), attacker.run_id + "0", ""))
    return _attack(rng, f"{stage} of another run", role, found[0], mutate_facts.pack(tree))


def _odd_subjects(attacker: Attacker, rng: random.Random) -> Attack | None:
    role, stage, _ = _fact(rng)
    found = attacker.real(rng, stage)
    if found is None or stage == "dead":
        return None
    subject = (
        found[0].rpartition(".")[0] + "." + rng.choice(("other", "TRAIN", "*", ">", "train.x", "0", "x" * 200, "é"))
    )
    return _attack(rng, f"{stage} to {subject.rpartition('.')[2][:8]}", role, subject, found[1])


_HEADERS = (
    {"Nats-Rollup": "all"}, {"Nats-Rollup": "sub"}, {"Nats-Expected-Last-Sequence": "0"}, {"Nats-TTL": "1s"},
    {"Nats-Expected-Stream": "other"}, {"traceparent": "x" * 3000}, {"traceparent": "00-\xff-\xff-00"}, {"KV-Operation": "PURGE"},
    {"Status": "404"}, {"Status": "100", "Description": "Idle Heartbeat"}, {"Nats-Msg-Id": "m" * 4000}, {"Nats-Marker-Reason": "MaxAge"},
)  # fmt: skip


def _headers(attacker: Attacker, rng: random.Random) -> Attack | None:
    headers = dict(rng.choice(_HEADERS))
    role, stage, _ = _fact(rng)
    if rng.random() < 0.3 and role != "viewer":
        key = streams.heartbeat_key(role, f"fuzz-{rng.randrange(4)}")
        made = _attack(rng, f"heartbeat {next(iter(headers))}", role, f"$KV.{attacker.run_id}-live.{key}", b"")
    else:
        found = attacker.real(rng, stage)
        if found is None or stage == "dead":
            return None
        empty = "Status" in headers and rng.random() < 0.8  # looks like a status message of the server
        made = _attack(rng, f"{stage} {next(iter(headers))}", role, found[0], b"" if empty else found[1])
    made.headers |= headers
    return made


# ── packs ─────────────────────────────────────────────────────────────────────────────────────────────────


def _announced(
    attacker: Attacker, rng: random.Random, name: str, fields: dict[str, Any], data: bytes, groups: Any
) -> Attack:
    sha256 = hashlib.sha256(data).hexdigest()
    key = f"{fields['pack']['key'].rpartition('/')[0]}/fuzz-{sha256[:20]}.parquet"
    if groups is None:
        fields["pack"] = {"key": key, "size_bytes": len(data), "sha256": sha256}
    else:
        fields = mutate_packs.described(fields, groups, key, data, sha256)
    fields["pack_id"] = f"fuzz-{sha256[:16]}"
    subject = subjects.generated(attacker.run_id, "train")
    made = _attack(rng, name, "rollout", subject, mutate_facts.pack([GroupGenerated.schema_tag, fields]))
    made.stored = [(key, data)]
    return made


def _pack_schema(attacker: Attacker, rng: random.Random) -> Attack | None:
    if (found := attacker.rows(rng)) is None:
        return None
    name, data = mutate_packs.schema_of(rng, mutate_packs.read(found[1]))
    return _announced(attacker, rng, name, found[0], data, None)


def _pack_values(attacker: Attacker, rng: random.Random) -> Attack | None:
    found, other = attacker.rows(rng), attacker.rows(rng)
    if found is None or other is None:
        return None
    name, groups = mutate_packs.values_of(rng, mutate_packs.read(found[1]), mutate_packs.read(other[1]))
    return _announced(attacker, rng, name, found[0], mutate_packs.write_rows(groups), groups)


def _plausible(attacker: Attacker, rng: random.Random) -> Attack | None:
    if (found := attacker.rows(rng)) is None:
        return None
    name, groups = mutate_packs.plausible_of(rng, mutate_packs.read(found[1]))
    return _announced(attacker, rng, name, found[0], mutate_packs.write_rows(groups), groups)


def _never_issued(attacker: Attacker, rng: random.Random) -> Attack | None:
    if (found := attacker.rows(rng)) is None or not found[0]["groups"][0]["group_id"].startswith("e"):
        return None
    try:
        name, groups = mutate_packs.never_issued_of(rng, mutate_packs.read(found[1]))
    except ValueError:  # a pack of an evaluation
        return None
    return _announced(attacker, rng, name, found[0], mutate_packs.write_rows(groups), groups)


def _pack_bytes(attacker: Attacker, rng: random.Random) -> Attack | None:
    found, other = attacker.rows(rng), attacker.rows(rng)
    if found is None or other is None:
        return None
    name, data = mutate_packs.bytes_of(rng, found[1], other[1])
    return _announced(attacker, rng, name, found[0], data, None)


def _pack_bombs(attacker: Attacker, rng: random.Random) -> Attack | None:
    if (found := attacker.rows(rng)) is None:
        return None
    name, data = mutate_packs.bombs(rng, mutate_packs.read(found[1]))
    return _announced(attacker, rng, name, found[0], data, None)


def _task_lists(attacker: Attacker, rng: random.Random) -> Attack | None:
    found = attacker.real(rng, "tasks")
    if found is None:
        return None
    tasks = mutate_facts.unpack(found[1])[1]["tasks"]
    whole = mutate_facts.pack(["task_list.v1", {"tasks": tasks}])
    name, data = (
        mutate_facts.fields_of(rng, whole) if rng.random() < 0.6 else mutate_facts.bytes_of(rng, whole, found[1])
    )
    sha256 = hashlib.sha256(data).hexdigest()
    key = f"runs/{attacker.run_id}/tasks/fuzz-{sha256[:20]}.msgpack"
    ref = {"key": key, "size_bytes": len(data), "sha256": sha256}
    fields = {"run_id": attacker.run_id, "pack_id": f"fuzz-{sha256[:16]}", "tasks": [], "tasks_blob": ref}
    made = _attack(
        rng, name, "trainer", subjects.tasks(attacker.run_id, "train"), mutate_facts.pack(["task_issued.v1", fields])
    )
    made.stored = [(key, data)]
    return made


def _manifests(attacker: Attacker, rng: random.Random) -> Attack | None:
    """Announce a damaged manifest: of the newest version again, or of the one after it."""
    found = attacker.manifest(rng)
    if found is None:
        return None
    tree, data = found
    document = json.loads(data)
    name = rng.choice(("bytes", "fields", "objects", "cut"))
    if name == "bytes":
        data = bytes(mutate_facts.bytes_of(rng, data, data)[1])
    elif name == "fields":
        data = _as_json(_changed_document(rng, document))
    elif name == "objects" and document["objects"]:
        document["objects"][0]["sha256"] = "0" * 64
        data = _as_json(document)
    else:
        data = data[: rng.randrange(len(data))]
    return _announced_weights(attacker, rng, name, tree, data)


def _announced_weights(attacker: Attacker, rng: random.Random, name: str, tree: Any, data: bytes) -> Attack:
    sha256, fields = hashlib.sha256(data).hexdigest(), tree[1]
    key = f"runs/{attacker.run_id}/weights/v{fields['version']:08d}/fuzz/{sha256[:20]}.json"
    fields["manifest"] = {"key": key, "size_bytes": len(data), "sha256": sha256}
    made = _attack(rng, name, "trainer", subjects.weights_published(attacker.run_id), mutate_facts.pack(tree))
    made.stored = [(key, data)]
    return made


def _weights(attacker: Attacker, rng: random.Random) -> Attack | None:
    """Announce real weights under the number of a later version."""
    found = attacker.manifest(rng)
    if found is None:
        return None
    tree, data = found
    document = json.loads(data)
    tree[1]["version"] = document["version"] = document["version"] + rng.choice((1, 2, 1000))
    return _announced_weights(attacker, rng, "later version", tree, _as_json(document))


def _changed_document(rng: random.Random, document: dict[str, Any]) -> dict[str, Any]:
    container, key = rng.choice(mutate_facts.places(["", document]))
    container[key] = rng.choice(
        (values.integer(rng), values.text(rng), None, [], {}, values.same_type(rng, container[key]))
    )
    return document


def _as_json(document: Any) -> bytes:
    return json.dumps(document).encode("utf-8", "replace")


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────


def _heartbeats(attacker: Attacker, rng: random.Random) -> Attack | None:
    role = rng.choice(("rollout", "reward", "trainer"))
    found = attacker.real(rng, f"kv.live.{role}")
    if found is None:
        return None
    change = rng.randrange(4)
    if change == 0:
        name, data = mutate_facts.bytes_of(rng, found[1], found[1])
    elif change == 1:
        name, data = mutate_facts.fields_of(rng, found[1])
    elif change == 2:
        name, data = "model", mutate_facts.generated_fact(rng, Heartbeat)
    else:
        name, data = mutate_facts.lies_of(rng, found[1], found[1])
    key = found[0] if rng.random() < 0.5 else f"$KV.{attacker.run_id}-live.{role}.fuzz-{rng.randrange(50)}"
    return _attack(rng, name, role, key, data)


def _leases(attacker: Attacker, rng: random.Random) -> Attack | None:
    role, key = rng.choice(
        (
            ("rollout", streams.swap_permit_key(rng.randrange(3))),
            ("trainer", streams.GARBAGE_LEASE),
            ("trainer", streams.EXPIRY_LEASE),
        )
    )
    data = rng.choice((b"", b"worker-0", b"worker-1", rng.randbytes(20), mutate_facts.pack(values.leaf(rng))))
    return _attack(rng, key, role, f"$KV.{attacker.run_id}-leases.{key}", data)


def _progress(attacker: Attacker, rng: random.Random) -> Attack | None:
    number = rng.choice((rng.randrange(1, 3000), 2**63))
    document = {"settled": [], "excused": {}, "refused_since": {}}
    for name in document:
        if rng.random() < 0.5:
            document[name] = rng.choice(
                ([1], ["e0.p0.a0"], {"e0.p0.a0": 10**9}, {"a": "b"}, {"a": [1]}, None, 7, "x", {"e0.p1.a0": -5})
            )
    data = rng.choice(
        (b"", rng.randbytes(30), _as_json(document), _as_json(values.nested(900)), _as_json([]), b'{"settled":NaN}')
    )
    return _attack(
        rng,
        "record",
        "reward",
        f"$KV.{streams.scoring_bucket(attacker.run_id).bucket}.{streams.pack_progress_key(number)}",
        data,
    )


def _registry(attacker: Attacker, rng: random.Random) -> Attack | None:
    bucket = streams.registry_bucket().bucket
    found = attacker.real(rng, "kv.rewards.endpoints") or attacker.real(rng, "kv.rewards.directory")
    if found is None or rng.random() < 0.5:
        key = rng.choice(("lease.x", "lease.00", "fuzz", "offers.reward-9"))
        return _attack(
            rng, "key", "reward", f"$KV.{bucket}.{key}", rng.choice((b"", rng.randbytes(40), b"{}", b"[]", b"null"))
        )
    try:
        document = json.loads(found[1])
    except ValueError:
        return None
    data = rng.choice((rng.randbytes(40), b"{}", b"[1]", _as_json(_changed_document(rng, {"d": document})["d"])))
    return _attack(rng, "directory", "reward", found[0], data)


# ── what the server must refuse ───────────────────────────────────────────────────────────────────────────


def _wrong_role(attacker: Attacker, rng: random.Random) -> Attack | None:
    writer, stage, _ = _fact(rng)
    role = rng.choice([role for role in ROLES if role != writer])
    found = attacker.real(rng, stage)
    if found is None:
        return None
    subject = found[0]
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
    return _attack(rng, f"{role} publishes {stage}", role, subject, found[1])


def _js_api(attacker: Attacker, rng: random.Random) -> Attack | None:
    run_id, role = attacker.run_id, rng.choice(ROLES)
    stream = rng.choice((*streams.stream_names(run_id), *(f"KV_{b.bucket}" for b in streams.buckets(run_id))))
    spec = rng.choice(streams.consumers(run_id))
    config = {"durable_name": spec.durable, "name": spec.durable, "filter_subject": spec.filter_subject, "ack_policy": "explicit",
              "ack_wait": 10**6, "max_ack_pending": 1}  # fmt: skip
    body = json.dumps({"stream_name": spec.stream, "config": config})
    other = json.dumps(
        {"stream_name": stream, "config": {"durable_name": "fuzz", "name": "fuzz", "ack_policy": "explicit"}}
    )
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
    return Attack(0, "", f"{role} {'.'.join(verb.split('.')[:2])}", role, f"$JS.API.{verb}", data.encode())


# ── what is not defended ──────────────────────────────────────────────────────────────────────────────────


def _rewards(attacker: Attacker, rng: random.Random) -> Attack | None:
    found = attacker.real(rng, "scored")
    if found is None:
        return None
    tree = mutate_facts.unpack(found[1])
    for group in tree[1]["groups"]:
        group["rewards"] = [rng.choice((0.0, 1.0, 1e300)) for _ in group["rewards"]]
    return _attack(rng, "rewards", "reward", found[0], mutate_facts.pack(tree))


def _dead_letters(attacker: Attacker, rng: random.Random) -> Attack | None:
    found = attacker.real(rng, rng.choice(("generated", "tasks")))
    if found is None:
        return None
    fields = mutate_facts.unpack(found[1])[1]
    ids = [group["group_id"] for group in fields.get("groups") or fields.get("tasks") or ()]
    letter = DeadLetter(
        run_id=attacker.run_id,
        stage="tasks",
        subject=found[0],
        reason="fuzz",
        detail="",
        group_ids=tuple(ids),
        num_delivered=1,
    )
    data = mutate_facts.pack([DeadLetter.schema_tag, letter.model_dump(mode="python")])
    return _attack(rng, "real ids", "rollout", subjects.dead(attacker.run_id, "tasks"), data)


def _acks(attacker: Attacker, rng: random.Random) -> Attack | None:
    role, spec = rng.choice(
        (
            ("rollout", streams.tasks_consumer(attacker.run_id, "train")),
            ("reward", streams.generated_consumer(attacker.run_id)),
        )
    )
    number = rng.randrange(1, 3000)
    reply = f"$JS.ACK.{spec.stream}.{spec.durable}.1.{number}.{number}.1700000000000000000.0"
    return Attack(0, "", f"{spec.durable}", role, reply, rng.choice((b"+ACK", b"+TERM", b"-NAK", b"+WPI")))


def _votes(attacker: Attacker, rng: random.Random) -> Attack | None:
    found = attacker.real(rng, "weights.applied")
    if found is None:
        return None
    tree = mutate_facts.unpack(found[1])
    tree[1] |= {
        "worker_id": f"fuzz-{rng.randrange(9)}",
        "version": tree[1]["version"] + rng.randrange(9),
        "checksum": "0" * 64,
    }
    return _attack(rng, "vote", "rollout", found[0], mutate_facts.pack(tree))


def _state(attacker: Attacker, rng: random.Random) -> Attack | None:
    key = rng.choice((streams.HEAD_KEY, streams.LEASE_KEY, streams.FLOOR_KEY, streams.CHECKPOINT_KEY))
    found = attacker.real(rng, f"kv.state.{key}")
    if found is None:
        return None
    change = rng.choice((_bytes, _fields, mutate_facts.lies_of))
    name, data = change(rng, found[1], found[1])
    return _attack(rng, f"{key} {name}", "trainer", found[0], data)


_MAKERS: tuple[tuple[str, float, Maker], ...] = (
    ("adapters", 2, forgeries.adapters),
    ("marks", 3, forgeries.marks),
    ("refusals", 4, forgeries.refusals),
    ("taken-ids", 5, forgeries.taken_ids),
    ("events", 4, forgeries.events),
    ("bytes", 14, _of_real(_bytes)),
    ("fields", 22, _of_real(_fields)),
    ("model", 8, _model),
    ("lies", 16, _of_real(mutate_facts.lies_of, lies=True)),
    ("replay", 8, _replay),
    ("foreign", 5, _foreign),
    ("subjects", 1, _odd_subjects),
    ("headers", 3, _headers),
    ("pack-schema", 4, _pack_schema),
    ("pack-values", 6, _pack_values),
    ("pack-bytes", 3, _pack_bytes),
    ("never-issued", 3, _never_issued),
    ("pack-bombs", 0.15, _pack_bombs),
    ("task-lists", 1, _task_lists),
    ("manifests", 1.5, _manifests),
    ("heartbeats", 14, _heartbeats),
    ("leases", 3, _leases),
    ("progress", 3, _progress),
    ("registry", 1, _registry),
    ("wrong-role", 8, _wrong_role),
    ("js-api", 4, _js_api),
    ("plausible", 3, _plausible),
    ("rewards", 3, _rewards),
    ("dead-letters", 3, _dead_letters),
    ("acks", 3, _acks),
    ("state", 1, _state),
    ("votes", 1, _votes),
    ("weights", 1, _weights),
)
