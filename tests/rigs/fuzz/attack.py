"""One attack, and what it is drawn from: the corpus of a run, and the shapes that attacks of several classes share."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.rigs.fuzz import mutate_facts, values
from tests.rigs.fuzz.capture import Corpus

from penstock.protocol import subjects
from penstock.protocol.errors import WireError
from penstock.protocol.facts import WeightsApplied, decode, encode
from penstock.protocol.transport.blobs import Blobs

ROLES = ("rollout", "reward", "trainer", "viewer")
Document = dict[str, Any]


class NothingToAttack(Exception):
    """The run has sent nothing yet that this attack could start from, or the draw is one that is not sent."""


@dataclass(slots=True)
class Attack:
    """One message as a login sends it; ``stored`` are objects that are put into S3 before."""

    name: str
    role: str
    subject: str
    data: bytes
    headers: dict[str, str] = field(default_factory=dict)
    stored: list[tuple[str, bytes]] = field(default_factory=list)
    number: int = 0
    kind: str = ""
    outcome: str = "unanswered"
    stream: str = ""
    sequence: int = 0


class Attacker:
    """Draws one attack after another from a seed, the corpus and the run's present state."""

    def __init__(self, corpus: Corpus, blobs: Blobs, makers: Mapping[str, tuple[float, Maker]], seed: int) -> None:
        """Attack a run that is under way; ``makers`` are the classes with their weights."""
        self._corpus, self._blobs, self._seed = corpus, blobs, seed
        self.run_id = corpus.run_id
        self._makers = [(kind, make) for kind, (_, make) in makers.items()]
        self._weights = [weight for weight, _ in makers.values()]
        self._votes = "votes" in makers

    def draw(self, number: int) -> Attack | None:
        """Return attack ``number``; None if the run has sent nothing yet that it could start from."""
        rng = random.Random(f"{self._seed}:{number}")
        kind, make = rng.choices(self._makers, self._weights)[0]
        try:
            made = make(self, rng)
        except NothingToAttack:
            return None
        made.number, made.kind = number, kind
        if not self._votes and made.subject == subjects.weights_applied(self.run_id) and kind != "replay":
            made.data = _without_vote(made.data)
        made.headers.setdefault("X-Fuzz", str(number))
        return made

    # What the makers share; each raises NothingToAttack.

    def real(self, rng: random.Random, *kinds: str) -> tuple[str, bytes]:
        """Return the subject and the bytes of a real message of the first of these kinds that the run has sent."""
        for kind in kinds:
            if (message := self._corpus.draw(rng, kind)) is not None:
                return message
        raise NothingToAttack

    def real_fields(self, rng: random.Random, kind: str) -> tuple[str, Any]:
        """Return the subject of a real message, and the message as tag and fields."""
        subject, data = self.real(rng, kind)
        return subject, mutate_facts.unpack(data)

    def rows(self, rng: random.Random) -> tuple[Document, bytes]:
        """Return a real announcement of a pack, as fields, and the pack's bytes."""
        fields = self.real_fields(rng, "generated")[1][1]
        return fields, self.fetch(fields["pack"])

    def manifest(self, rng: random.Random) -> tuple[Any, bytes]:
        """Return a real announcement of weights, unpacked, and the manifest that it names."""
        tree = self.real_fields(rng, "weights.published")[1]
        return tree, self.fetch(tree[1]["manifest"])

    def number_near(self, rng: random.Random) -> int:
        """Return a number like those of the next messages of a stream, or of the next step."""
        return rng.choice((self._corpus.newest_step, self._corpus.num_seen // 8)) + rng.randrange(-3, 40)

    def fetch(self, ref: Document) -> bytes:
        if (data := self._corpus.fetch(ref, self._blobs)) is None:
            raise NothingToAttack
        return data


Maker = Callable[[Attacker, random.Random], Attack]


def _without_vote(data: bytes) -> bytes:
    """Return a valid `WeightsApplied` of a layout that no engine has, so that nothing is compared with it."""
    try:
        fact = decode(data, WeightsApplied)
    except WireError:
        return data
    return encode(fact.model_copy(update={"layout": "fuzz"}))


def sent(rng: random.Random, name: str, role: str, subject: str, data: bytes, *, id_share: float = 0.7) -> Attack:
    """Return an attack that has a message id of its own in a share of the cases."""
    headers = {"Nats-Msg-Id": f"fuzz-{rng.getrandbits(60):x}"} if rng.random() < id_share else {}
    return Attack(name, role, subject, data, headers)


def reference(folder: str, data: bytes, ending: str = "") -> Document:
    """Return the reference of an object of attackers, whose key has its hash."""
    sha256 = hashlib.sha256(data).hexdigest()
    return {"key": f"{folder}/fuzz-{sha256[:20]}{ending}", "size_bytes": len(data), "sha256": sha256}


def announced_weights(attacker: Attacker, rng: random.Random, name: str, tree: Any, manifest: bytes) -> Attack:
    fields = tree[1]
    fields["manifest"] = reference(f"runs/{attacker.run_id}/weights/v{fields['version']:08d}/fuzz", manifest, ".json")
    made = sent(rng, name, "trainer", subjects.weights_published(attacker.run_id), mutate_facts.pack(tree))
    made.stored = [(fields["manifest"]["key"], manifest)]
    return made


def change(rng: random.Random, document: Document) -> None:
    """Replace one value of a document, at any depth, by a hostile one."""
    container, key = rng.choice(mutate_facts.places(["", document]))
    container[key] = rng.choice(
        (values.integer(rng), values.text(rng), None, [], {}, values.same_type(rng, container[key]))
    )


def as_json(document: Any) -> bytes:
    return json.dumps(document, default=repr).encode("utf-8", "replace")
