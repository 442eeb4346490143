"""The result of a run under attack: what became of the attacks, by class, and what does not hold."""

from __future__ import annotations

import base64
import contextlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.rigs.fuzz.attack import Attack
from tests.rigs.fuzz.judge import Trained
from tests.rigs.fuzz.sender import Sender

from penstock.protocol.errors import PenstockError
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus

COLUMNS = ("refused", "error", "duplicate", "unanswered", "kept", "waiting", "dead-lettered", "taken")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that must not happen; ``attacks`` is the file that repeats it with ``--send``."""

    what: str
    attacks: str
    suspects: list[str]
    log: str


@dataclass(slots=True)
class Outcome:
    seed: int
    kinds: list[str]
    sent: int = 0
    skipped: int = 0
    started_s: float = 0.0
    attack_s: float = 0.0
    wall_s: float = 0.0
    steps_under_attack: int = 0
    steps_after: int = 0
    kills: dict[str, int] = field(default_factory=dict)
    alive: dict[str, bool] = field(default_factory=dict)
    table: dict[str, dict[str, int]] = field(default_factory=dict)  # class -> column -> attacks
    by_name: dict[str, dict[str, int]] = field(default_factory=dict)  # class: name -> answer of the server -> attacks
    letters: dict[str, int] = field(default_factory=dict)  # dead letters of attacks, by stage and reason
    accepted: dict[str, int] = field(default_factory=dict)  # what the server had to refuse
    problems: dict[str, int] = field(default_factory=dict)  # of this command itself
    findings: list[Finding] = field(default_factory=list)
    audit: dict[str, Any] = field(default_factory=dict)
    trained: Trained | None = None
    replay: dict[str, Any] = field(default_factory=dict)

    def count(self, counts: Mapping[tuple[str, str, str], int]) -> None:
        table: dict[str, Counter[str]] = defaultdict(Counter)
        names: dict[str, Counter[str]] = defaultdict(Counter)
        for (kind, name, answer), number in dict(counts).items():
            table[kind][answer.split()[0] if answer.startswith(("refused", "error")) else answer] += number
            names[f"{kind}: {name}"][answer] += number
        self.table = {kind: dict(row) for kind, row in sorted(table.items())}
        self.by_name = {name: dict(row) for name, row in sorted(names.items())}

    def count_readers(self, run_id: str, bus: Bus, sender: Sender) -> None:
        """Split what the server stored by what became of it: in a queue, dead-lettered, taken, or kept for readers of logs."""
        queues = {f"{run_id}-{stage}" for stage in ("tasks", "generated", "scored")}
        waiting = {(stream, message.sequence) for stream in queues for message in bus.read_stream(stream).wait()}
        self.letters = dict(sender.letters)
        for place, sent in sender.by_sequence.items():
            row = self.table.setdefault(sent.kind, {})
            if place[0] not in queues:
                fate = "kept"
            elif place in waiting:
                fate = "waiting"
            else:
                fate = "dead-lettered" if place in sender.dead else "taken"
            row[fate] = row.get(fate, 0) + 1

    def failures(self) -> list[str]:
        found = [finding.what for finding in self.findings]
        found += [
            f"the server accepted what it must refuse: {name} ({number} times)"
            for name, number in self.accepted.items()
        ]
        if self.trained is not None:
            found += [f"foreign: {fault} ({number} groups)" for fault, number in self.trained.by_fault.items()]
        if self.audit and not self.audit["closes"]:
            breaches = Counter(breach["kind"] for breach in self.audit["breaches"])
            found.append(f"the audit does not close: {dict(breaches)}")
        if self.replay and not self.replay["holds"]:
            found.append(f"the replay differs: {self.replay.get('difference')}")
        if not self.audit:
            found.append("there is no audit")
        return found


def show(outcome: Outcome) -> str:
    columns = [name for name in COLUMNS if any(name in row for row in outcome.table.values())]
    rows = [f"| class | sent | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for kind, row in outcome.table.items():
        sent = sum(n for name, n in row.items() if name not in {"kept", "waiting", "dead-lettered", "taken"})
        rows.append(f"| {kind} | {sent} | {' | '.join(str(row.get(name, 0)) for name in columns)} |")
    trained, rate = outcome.trained, outcome.sent / max(1.0, outcome.attack_s)
    rows += [
        "",
        f"seed {outcome.seed}: {outcome.sent} attacks in {outcome.attack_s:.0f} s ({rate:.0f} a second), "
        f"{sum(outcome.kills.values())} kills, {outcome.steps_under_attack} steps under attack, {outcome.steps_after} after it; "
        f"{outcome.wall_s:.0f} s in all",
    ]
    if outcome.letters:
        rows.append(
            "dead letters: "
            + ", ".join(f"{n} {reason}" for reason, n in sorted(outcome.letters.items(), key=lambda p: -p[1]))
        )
    if trained is not None:
        rows.append(
            f"trained: {trained.groups} groups, {trained.tokens} tokens of {trained.versions} versions recomputed, worst "
            f"log-probability off by {trained.worst:.2g} nats; packs of attackers among them: {dict(trained.forged_objects) or 'none'}"
            + f"; {trained.not_captured} judged by the data, as their tasks were sent while NATS restarted"
            * bool(trained.not_captured)
        )
        if trained.not_defended:
            faults = ", ".join(f"{fault} ({number} groups)" for fault, number in trained.not_defended.items())
            rows.append(f"  in forged packs, as docs/security.md declares: {faults}")
        rows += [f"  {text}" for text in trained.foreign]
    if outcome.audit:
        line = outcome.audit["splits"][0]
        rows.append(
            f"audit: {line['issued']} groups issued, {line['used']} trained, dropped {line['dropped']}, dead {line['dead']}, "
            f"in flight {line['in_flight']}; {'closes' if outcome.audit['closes'] else 'does not close'}"
        )
    if outcome.replay:
        rows.append(
            f"replay: {len(outcome.replay.get('same', []))} versions the same; {'holds' if outcome.replay['holds'] else 'differs'}"
        )
    if outcome.problems:
        rows.append(f"not sent, by cause: {outcome.problems}")
    for finding in outcome.findings:
        rows += [f"finding: {finding.what}", f"  repeat: python -m tests.rigs.fuzz.run --send {finding.attacks}"]
        rows += [f"  suspect {name}" for name in finding.suspects[-5:]]
    rows.append("; ".join(["FAILS", *outcome.failures()]) if outcome.failures() else "holds")
    return "\n".join(rows)


class Recorded:
    """Draws recorded attacks, in their order, once; `Attacker` is what it stands in for."""

    def __init__(self, attacks: Sequence[Attack]) -> None:
        self._left = list(attacks)[::-1]

    def draw(self, number: int) -> Attack | None:
        if not self._left:
            return None
        attack = self._left.pop()
        attack.number = number
        attack.headers["X-Fuzz"] = str(number)
        return attack


def as_line(attack: Attack, blobs: Blobs) -> dict[str, Any]:
    """Return an attack as JSON: what is needed to send it again, its objects included."""
    stored = []
    for key, data in attack.stored:
        with contextlib.suppress(PenstockError):
            stored.append([key, base64.b64encode(data or blobs.get_unverified(key)).decode()])
    return {
        "number": attack.number, "kind": attack.kind, "name": attack.name, "role": attack.role, "subject": attack.subject,
        "headers": attack.headers, "outcome": attack.outcome, "data": base64.b64encode(attack.data).decode(),
        "stored": stored,
    }  # fmt: skip


def from_line(line: str) -> Attack:
    found = json.loads(line)
    stored = [(key, base64.b64decode(data)) for key, data in found["stored"]]
    return Attack(
        found["name"], found["role"], found["subject"], base64.b64decode(found["data"]), found["headers"], stored,
        found["number"], found["kind"],
    )  # fmt: skip
