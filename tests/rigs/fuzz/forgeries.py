"""Attacks that forge weights, adapters, refusals, message ids, marks and events; each starts from what the run has sent."""

from __future__ import annotations

import json
import math
import random

import numpy as np
from tests.rigs.fuzz import mutate_facts, values
from tests.rigs.fuzz.attack import Attack, Attacker, Document, announced_weights, as_json, change, reference, sent

from penstock.protocol import streams, subjects
from penstock.protocol.facts import RunEvent, WeightsRefused
from penstock.protocol.weights import bucket_codec
from penstock.protocol.weights.adapter_format import ADAPTER_CONFIG, AdapterConfig, adapter_digest, published_name
from penstock.protocol.weights.layout import TensorSpec, bucket_digests, build_layout, shard_header


def manifests(attacker: Attacker, rng: random.Random) -> Attack:
    """Announce a damaged manifest: of the newest version again, or of the one after it."""
    tree, data = attacker.manifest(rng)
    document = json.loads(data)
    name = rng.choice(("bytes", "fields", "objects", "cut"))
    if name == "bytes":
        data = mutate_facts.bytes_of(rng, data, data)[1]
    elif name == "fields":
        change(rng, document)
        data = as_json(document)
    elif name == "objects" and document["objects"]:
        document["objects"][0]["sha256"] = "0" * 64
        data = as_json(document)
    else:
        data = data[: rng.randrange(len(data))]
    return announced_weights(attacker, rng, name, tree, data)


def later_weights(attacker: Attacker, rng: random.Random) -> Attack:
    """Announce real weights under the number of a later version."""
    tree, data = attacker.manifest(rng)
    document = json.loads(data)
    tree[1]["version"] = document["version"] = document["version"] + rng.choice((1, 2, 1000))
    return announced_weights(attacker, rng, "later version", tree, as_json(document))


def adapters(attacker: Attacker, rng: random.Random) -> Attack:
    """Announce an adapter of a real version, whose hashes are all those of what is stored, and that lies in one thing."""
    tree, data = attacker.manifest(rng)
    fields, real = tree[1], json.loads(data)
    layout = json.loads(attacker.fetch(real["layout"]))
    tensors = [tensor for bucket in layout["buckets"] for tensor in bucket["tensors"]]
    base, of_base = real, fields["manifest"]
    if real["kind"] == "adapter":
        base, of_base = {**real, **real["anchor"]}, real["anchor"]["manifest"]
        tensors = _adapted({tensor["name"]: tensor["shape"] for tensor in tensors})
    weights = [tensor for tensor in tensors if len(tensor["shape"]) == 2]
    name, stored, document = _forged_adapter(rng, attacker.run_id, base, of_base, rng.choice(weights))
    if real["kind"] == "adapter":
        document["version"] = real["version"] + rng.choice((0, 0, 1, 2))
    fields["version"] = document["version"] if isinstance(document["version"], int) else fields["version"] + 1
    made = announced_weights(attacker, rng, name, tree, as_json(document))
    made.stored += stored
    return made


def _adapted(shapes: dict[str, list[int]]) -> list[Document]:
    """Return the weights that an adapter is of, from the shapes of its factors."""
    return [
        {
            "name": f"{name.removeprefix('base_model.model.').removesuffix('.lora_B.weight')}.weight",
            "shape": [shape[0], shapes[name.replace(".lora_B.", ".lora_A.")][1]],
        }
        for name, shape in shapes.items()
        if name.endswith(".lora_B.weight")
    ]


def _forged_adapter(
    rng: random.Random, run_id: str, base: Document, of_base: Document, weight: Document
) -> tuple[str, list[tuple[str, bytes]], Document]:
    rank = rng.choice((1, 2, 8))
    layer = weight["name"].removesuffix(".weight")
    specs = [
        TensorSpec(published_name(f"{layer}.lora_A.weight"), "float32", (rank, weight["shape"][1])),
        TensorSpec(published_name(f"{layer}.lora_B.weight"), "float32", (weight["shape"][0], rank)),
    ]
    bucket = build_layout(specs).buckets[0]
    raw = np.random.default_rng(rng.getrandbits(32)).standard_normal(bucket.num_words, np.float32)
    target = layer.rpartition(".")[2]
    config: Document = json.loads(AdapterConfig(r=rank, lora_alpha=8.0, target_modules=(target,)).to_json())
    layout: Document = {"buckets": [bucket.model_dump(mode="json")], "tied": {}}
    header = shard_header(bucket)
    name = rng.choice(("values", "layout", "config", "header", "base", "size", "manifest"))
    if name == "values":
        raw[rng.randrange(len(raw))] = rng.choice((math.nan, math.inf, -math.inf))
    elif name == "layout":
        change(rng, layout["buckets"][0])
    elif name == "config" and rng.random() < 0.5:
        key = rng.choice(("use_rslora", "rank_pattern", "modules_to_save", "base_model_name_or_path", "auto_mapping"))
        config[key] = rng.choice((True, {"x": 1}, ["x"], "evil/model", values.leaf(rng)))
    elif name == "config":
        change(rng, config)
    elif name == "header":
        half = header[: len(header) // 2]
        header = rng.choice((b"", (2**63).to_bytes(8, "little"), half, rng.randbytes(len(header))))
    elif name == "size":
        layout["buckets"][0]["tensors"][0]["shape"][1] = 2 ** rng.choice((31, 40, 52))
    objects = {"layout": as_json(layout), "factors": header + raw.tobytes(), "config": as_json(config)}
    refs = {what: reference(f"runs/{run_id}/weights/{what}", data) for what, data in objects.items()}
    stored = [(str(refs[what]["key"]), data) for what, data in objects.items()]
    anchor = {"version": base["version"], "manifest": of_base, "state_root": base["state_root"], "num_bytes": 1}
    if name == "base":
        change(rng, anchor)
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
        change(rng, document)
    return name, stored, document


def refusals(attacker: Attacker, rng: random.Random) -> Attack:
    """Refuse a real, an old or an invented version, in the name of a real or an invented worker."""
    _, (_, fields) = attacker.real_fields(rng, "weights.published")
    manifest, version = fields["manifest"], fields["version"]
    if rng.random() < 0.3:
        manifest = {**manifest, "sha256": f"{rng.getrandbits(256):064x}"}
        version = rng.choice((0, version, version + 1, 2**53))
    refusal = {
        "run_id": attacker.run_id, "worker_id": rng.choice(("worker-0", "worker-1", f"fuzz-{rng.getrandbits(32):x}")), "version": version,
        "manifest": manifest, "serving": rng.choice((None, 0, version)), "reason": rng.choice(("gone", "x" * 20_000, "\x1b[2J\n\0")),
    }  # fmt: skip
    data = mutate_facts.pack([WeightsRefused.schema_tag, refusal])
    return sent(rng, "refusal", "rollout", subjects.weights_refused(attacker.run_id), data, id_share=1.0)


def taken_ids(attacker: Attacker, rng: random.Random) -> Attack:
    """Publish under the id that the next message of a service would have if ids followed from what is known."""
    run_id = attacker.run_id
    pack_id = attacker.real_fields(rng, "tasks")[1][1]["pack_id"]
    announced = attacker.real_fields(rng, "weights.published")[1][1]
    number = attacker.number_near(rng)
    more = rng.choice(("", ":", f":{rng.getrandbits(128):032x}"))
    data = rng.choice((b"", attacker.real(rng, "generated")[1], rng.randbytes(20)))
    role, subject, msg_id = rng.choice(
        (
            ("rollout", subjects.generated(run_id, "train"), f"g:{pack_id}" + more),
            ("rollout", subjects.generated(run_id, "train"), f"g:{_next(pack_id, rng)}" + more),
            ("rollout", subjects.dead(run_id, "tasks"), f"{run_id}-{rng.choice(('tasks', 'generated', 'scored'))}:{number}" + more),
            ("rollout", subjects.dead(run_id, "tasks"), f"dead:{number}" + more),
            ("reward", subjects.dead(run_id, "generated"), f"{run_id}-scored:{number}" + more),
            ("reward", subjects.scored(run_id, "train"), f"s:{number}:{pack_id}" + more),
            ("rollout", subjects.weights_refused(run_id), f"w:{announced['version'] + 1}:{announced['manifest']['sha256'][:16]}"),
            ("rollout", subjects.events(run_id, "log"), f"trainer:{rng.getrandbits(32):08x}:{number}"),
        )
    )  # fmt: skip
    what = f"id of {subject.split('.')[2]} {msg_id.split(':')[0].removeprefix(run_id)}"
    made = sent(rng, what, role, subject, data, id_share=1.0)
    made.headers["Nats-Msg-Id"] = msg_id
    return made


def _next(pack_id: str, rng: random.Random) -> str:
    digits = "".join(c if c.isdigit() else " " for c in pack_id).split()
    number = rng.choice(digits) if digits else "0"
    return pack_id.replace(number, str(int(number) + rng.randrange(1, 9)), 1)


def marks(attacker: Attacker, rng: random.Random) -> Attack:
    """Write what a worker or a reward service would after its reader was killed, or what is no such record."""
    role, stage = rng.choice((("rollout", "tasks"), ("reward", "generated")))
    data = rng.choice(
        (
            b'{"killed": 1, "started": true}', b'{"killed": Infinity, "started": false}', b'{"killed": -9, "started": true}', b"", b"[]",
            b'{"killed": {}, "started": []}', b"[" * 5000, rng.randbytes(20), as_json(values.leaf(rng)),
        )
    )  # fmt: skip
    key = streams.kill_mark_key(stage, attacker.number_near(rng))
    return sent(rng, stage, role, f"$KV.{streams.scoring_bucket(attacker.run_id).bucket}.{key}", data, id_share=1.0)


def events(attacker: Attacker, rng: random.Random) -> Attack:
    """Report a step, an evaluation or the end of the run in the name of the trainer, as a worker or a reward service."""
    _, (_, fields) = attacker.real_fields(rng, "events")
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
    return sent(
        rng, f"{kind} as {role}", role, subjects.events(attacker.run_id, rng.choice(allowed)), data, id_share=1.0
    )
