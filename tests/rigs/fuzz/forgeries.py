"""Attacks that forge adapters, refusals, message ids and events; each starts from what the run has sent."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.rigs.fuzz import mutate_facts, values

from penstock.protocol import streams, subjects
from penstock.protocol.facts import RunEvent, WeightsRefused
from penstock.protocol.weights import bucket_codec
from penstock.protocol.weights.adapter_format import ADAPTER_CONFIG, AdapterConfig, adapter_digest, published_name
from penstock.protocol.weights.layout import TensorSpec, bucket_digests, build_layout, shard_header

if TYPE_CHECKING:
    from tests.rigs.fuzz.attacks import Attack, Attacker

Document = dict[str, Any]


def _attack(rng: random.Random, name: str, role: str, subject: str, data: bytes) -> Attack:
    from tests.rigs.fuzz.attacks import Attack

    headers = {"Nats-Msg-Id": f"fuzz-{rng.getrandbits(60):x}"}
    return Attack(0, "", name, role, subject, data, headers)


# ── adapters ──────────────────────────────────────────────────────────────────────────────────────────────


def adapters(attacker: Attacker, rng: random.Random) -> Attack | None:
    """Announce an adapter of a real version, whose hashes are all those of what is stored, and that lies in one thing."""
    found = attacker.manifest(rng)
    if found is None:
        return None
    tree, data = found
    fields, real = tree[1], json.loads(data)
    layout = attacker.fetch(real["layout"])
    if layout is None:
        return None
    tensors = [tensor for bucket in json.loads(layout)["buckets"] for tensor in bucket["tensors"]]
    base, reference = real, fields["manifest"]
    if real["kind"] == "adapter":
        base, reference = {**real, **real["anchor"]}, real["anchor"]["manifest"]
        tensors = _adapted({tensor["name"]: tensor["shape"] for tensor in tensors})
    weights = [tensor for tensor in tensors if len(tensor["shape"]) == 2]
    name, stored, document = _forged_adapter(rng, attacker.run_id, base, reference, rng.choice(weights))
    if real["kind"] == "adapter":
        document["version"] = real["version"] + rng.choice((0, 0, 1, 2))
    manifest = json.dumps(document, default=repr).encode("utf-8", "replace")
    fields["version"] = document["version"] if isinstance(document["version"], int) else fields["version"] + 1
    sha256 = hashlib.sha256(manifest).hexdigest()
    key = f"runs/{attacker.run_id}/weights/v{fields['version']:08d}/fuzz/{sha256[:20]}.json"
    fields["manifest"] = {"key": key, "size_bytes": len(manifest), "sha256": sha256}
    made = _attack(rng, name, "trainer", subjects.weights_published(attacker.run_id), mutate_facts.pack(tree))
    made.stored = [*stored, (key, manifest)]
    return made


def _adapted(shapes: dict[str, list[int]]) -> list[Document]:
    found = list[Document]()
    for name, shape in shapes.items():
        if name.endswith(".lora_B.weight"):
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
            width = shapes[name.replace(".lora_B.", ".lora_A.")][1]
            found.append({"name": f"{layer}.weight", "shape": [shape[0], width]})
    return found


def _forged_adapter(
    rng: random.Random, run_id: str, base: Document, reference: Document, weight: Document
) -> tuple[str, list[tuple[str, bytes]], Document]:
    rank = rng.choice((1, 2, 8))
    layer = weight["name"].removesuffix(".weight")
    specs = [
        TensorSpec(published_name(f"{layer}.lora_A.weight"), "float32", (rank, weight["shape"][1])),
        TensorSpec(published_name(f"{layer}.lora_B.weight"), "float32", (weight["shape"][0], rank)),
    ]
    bucket = build_layout(specs).buckets[0]
    raw = np.random.default_rng(rng.getrandbits(32)).standard_normal(bucket.num_words, np.float32)
    config: Document = json.loads(
        AdapterConfig(r=rank, lora_alpha=8.0, target_modules=(layer.rpartition(".")[2],)).to_json()
    )
    layout: Document = {"buckets": [bucket.model_dump(mode="json")], "tied": {}}
    header = shard_header(bucket)
    name = rng.choice(("values", "layout", "config", "header", "base", "size", "manifest"))
    if name == "values":
        raw[rng.randrange(len(raw))] = rng.choice((math.nan, math.inf, -math.inf))
    elif name == "layout":
        _change(rng, layout["buckets"][0])
    elif name == "config":
        _change(
            rng, config, ("use_rslora", "rank_pattern", "modules_to_save", "base_model_name_or_path", "auto_mapping")
        )
    elif name == "header":
        header = rng.choice(
            (b"", (2**63).to_bytes(8, "little"), header[: len(header) // 2], rng.randbytes(len(header)))
        )
    elif name == "size":
        layout["buckets"][0]["tensors"][0]["shape"][1] = 2 ** rng.choice((31, 40, 52))
    objects = {
        "layout": json.dumps(layout, default=repr).encode("utf-8", "replace"),
        "factors": header + raw.tobytes(),
        "config": json.dumps(config, default=repr).encode("utf-8", "replace"),
    }
    refs = {what: _ref(run_id, what, data) for what, data in objects.items()}
    stored = [(str(refs[what]["key"]), data) for what, data in objects.items()]
    anchor = {
        "version": base["version"],
        "manifest": reference,
        "state_root": base["state_root"],
        "num_bytes": 1,
    }
    if name == "base":
        _change(rng, anchor)
    size, sha256 = refs["factors"]["size_bytes"], refs["factors"]["sha256"]
    digests = bucket_digests(bucket, raw.view(np.uint8).data)
    document = {
        "schema_tag": "weights_manifest.v2", "kind": "adapter", "run_id": run_id, "version": base["version"] + rng.choice((0, 1, 1, 2)),
        "step": base["step"], "epoch": base["epoch"], "anchor": anchor, "layout": refs["layout"], "objects": [refs["factors"]],
        "buckets": [{
            "codec": "safetensors", "stored": {"object": 0, "offset": 0, "size_bytes": size, "sha256": sha256},
            "num_words": len(raw), "num_changed": len(raw), "new_xxh3": bucket_codec.bucket_xxh3(raw.view(np.uint8)),
        }],
        "state_root": adapter_digest(str(anchor["state_root"]), refs["config"]["sha256"], digests),
        "model_files": [{"name": ADAPTER_CONFIG, "blob": refs["config"]}],
    }  # fmt: skip
    if name == "manifest":
        _change(rng, document)
    return name, stored, document


def _ref(run_id: str, what: str, data: bytes) -> Document:
    sha256 = hashlib.sha256(data).hexdigest()
    return {"key": f"runs/{run_id}/weights/fuzz/{what}.{sha256[:20]}", "size_bytes": len(data), "sha256": sha256}


def _change(rng: random.Random, document: Document, more: tuple[str, ...] = ()) -> None:
    if more and rng.random() < 0.5:
        document[rng.choice(more)] = rng.choice((True, {"x": 1}, ["x"], "evil/model", values.leaf(rng)))
        return
    container, key = rng.choice(mutate_facts.places(["", document]))
    container[key] = rng.choice(
        (values.integer(rng), values.text(rng), None, [], {}, values.same_type(rng, container[key]))
    )


# ── refusals ──────────────────────────────────────────────────────────────────────────────────────────────


def refusals(attacker: Attacker, rng: random.Random) -> Attack | None:
    """Refuse a real, an old or an invented version, in the name of a real or an invented worker."""
    found = attacker.real(rng, "weights.published")
    if found is None:
        return None
    fields = mutate_facts.unpack(found[1])[1]
    manifest, version = fields["manifest"], fields["version"]
    if rng.random() < 0.3:
        manifest = {**manifest, "sha256": f"{rng.getrandbits(256):064x}"}
        version = rng.choice((0, version, version + 1, 2**53))
    refusal = {
        "run_id": attacker.run_id, "worker_id": rng.choice(("worker-0", "worker-1", f"fuzz-{rng.getrandbits(32):x}")), "version": version,
        "manifest": manifest, "serving": rng.choice((None, 0, version)), "reason": rng.choice(("gone", "x" * 20_000, "\x1b[2J\n\0")),
    }  # fmt: skip
    data = mutate_facts.pack([WeightsRefused.schema_tag, refusal])
    return _attack(rng, "refusal", "rollout", subjects.weights_refused(attacker.run_id), data)


# ── message ids ───────────────────────────────────────────────────────────────────────────────────────────


def taken_ids(attacker: Attacker, rng: random.Random) -> Attack | None:
    """Publish under the id that the next message of a service would have if ids followed from what is known."""
    run_id = attacker.run_id
    task, published = attacker.real(rng, "tasks"), attacker.real(rng, "weights.published")
    generated = attacker.real(rng, "generated")
    if task is None or published is None or generated is None:
        return None
    pack_id = mutate_facts.unpack(task[1])[1]["pack_id"]
    announced = mutate_facts.unpack(published[1])[1]
    number = attacker.number_near(rng)
    guess: Callable[[str], str] = rng.choice(
        (lambda i: i, lambda i: f"{i}:", lambda i: f"{i}:{rng.getrandbits(128):032x}")
    )
    data = rng.choice((b"", generated[1], rng.randbytes(20)))
    role, subject, msg_id = rng.choice(
        (
            ("rollout", subjects.generated(run_id, "train"), guess(f"g:{pack_id}")),
            ("rollout", subjects.generated(run_id, "train"), guess(f"g:{_next(pack_id, rng)}")),
            ("rollout", subjects.dead(run_id, "tasks"), guess(f"{run_id}-{rng.choice(('tasks', 'generated', 'scored'))}:{number}")),
            ("rollout", subjects.dead(run_id, "tasks"), guess(f"dead:{number}")),
            ("reward", subjects.dead(run_id, "generated"), guess(f"{run_id}-scored:{number}")),
            ("reward", subjects.scored(run_id, "train"), guess(f"s:{number}:{pack_id}")),
            ("rollout", subjects.weights_refused(run_id), f"w:{announced['version'] + 1}:{announced['manifest']['sha256'][:16]}"),
            ("rollout", subjects.events(run_id, "log"), f"trainer:{rng.getrandbits(32):08x}:{number}"),
        )
    )  # fmt: skip
    made = _attack(
        rng, f"id of {subject.split('.')[2]} {msg_id.split(':')[0].removeprefix(run_id)}", role, subject, data
    )
    made.headers["Nats-Msg-Id"] = msg_id
    return made


def _next(pack_id: str, rng: random.Random) -> str:
    digits = "".join(c if c.isdigit() else " " for c in pack_id).split()
    number = rng.choice(digits) if digits else "0"
    return pack_id.replace(number, str(int(number) + rng.randrange(1, 9)), 1)


# ── marks ─────────────────────────────────────────────────────────────────────────────────────────────────


def marks(attacker: Attacker, rng: random.Random) -> Attack | None:
    """Write what a worker or a reward service would after its reader was killed, or what is no such record."""
    role, stage = rng.choice((("rollout", "tasks"), ("reward", "generated")))
    data = rng.choice(
        (
            b'{"killed": 1, "started": true}', b'{"killed": Infinity, "started": false}', b'{"killed": -9, "started": true}', b"", b"[]",
            b'{"killed": {}, "started": []}', b"[" * 5000, rng.randbytes(20), json.dumps(values.leaf(rng), default=str).encode("utf-8", "replace"),
        )
    )  # fmt: skip
    key = streams.kill_mark_key(stage, attacker.number_near(rng))
    return _attack(rng, stage, role, f"$KV.{streams.scoring_bucket(attacker.run_id).bucket}.{key}", data)


# ── events ────────────────────────────────────────────────────────────────────────────────────────────────


def events(attacker: Attacker, rng: random.Random) -> Attack | None:
    """Report a step, an evaluation or the end of the run in the name of the trainer, as a worker or a reward service."""
    found = attacker.real(rng, "events")
    if found is None:
        return None
    fields = mutate_facts.unpack(found[1])[1]
    role = rng.choice(("rollout", "reward"))
    allowed = subjects.EVENTS_OF_WORKERS if role == "rollout" else subjects.EVENTS_OF_REWARD_SERVICES
    kind = rng.choice((*allowed, "step", "eval", "state", "weights", "evaluation_lost"))
    fields |= {"kind": kind, "source": rng.choice(("trainer", "worker-0", "x" * 190))}
    for name in rng.sample(sorted(fields["data"]), min(len(fields["data"]), rng.randrange(4))):
        fields["data"][name] = rng.choice((math.inf, math.nan, -1, 2**60, "0" * 64, None, [], {"x": []}, True))
    if kind == "step":
        fields["data"] |= {"step": attacker.number_near(rng)}
    if kind == "state" and rng.random() < 0.5:
        fields["data"] |= {"text": "finished", "finished": True, "total_steps": 1}
    data = mutate_facts.pack([RunEvent.schema_tag, fields])
    return _attack(rng, f"{kind} as {role}", role, subjects.events(attacker.run_id, rng.choice(allowed)), data)
