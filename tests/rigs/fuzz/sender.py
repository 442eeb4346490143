"""Sends attacks with the login of each role, in batches, and notes what the server answered.

| outcome    | the server                                                                       |
|------------|----------------------------------------------------------------------------------|
| stored     | stored the message; what its reader did with it is found at the end              |
| duplicate  | knew its id                                                                      |
| refused    | refused the subject to the login                                                 |
| error      | answered with an error: no such stream, a wrong header, a full stream            |
| unanswered | did not answer: no reader, or it was killed                                      |
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from tests.deploy.nats_roles import NatsRoles
from tests.rigs.fuzz.attack import ROLES, Attack, Attacker
from tests.rigs.fuzz.attacks import MUST_BE_REFUSED
from tests.rigs.fuzz.capture import Corpus

from penstock.deploy.nats_config import nats_config
from penstock.deploy.processes.servers import S3Server
from penstock.deploy.processes.supervise import ProcessEvent, RestartRule, Supervisor
from penstock.protocol import streams, subjects
from penstock.protocol.facts import DeadLetter, decode
from penstock.protocol.transport.blobs import Blobs

# Processes are killed so often on purpose that the default rule would stop restarting them.
RULE = RestartRule(max_crashes=20)


class Servers:
    """nats-server and S3 server, restarted when they are killed. Use as a context manager."""

    def __init__(self, folder: Path, run_id: str, on_event: Callable[[ProcessEvent], None]) -> None:
        """Prepare; nothing runs before the block is entered."""
        self.nats = NatsRoles(folder, nats_config((run_id,)), log=folder / "logs" / "nats-server.log")
        self.s3 = S3Server(folder / "objects", log=folder / "logs" / "s3-server.log")
        self.supervisor = Supervisor(rule=RULE, on_event=on_event)

    def __enter__(self) -> Servers:
        for server in (self.nats, self.s3):
            server.start()
            self.supervisor.watch(server.child, server.relaunch)
        Blobs(self.s3.settings).ensure_bucket()
        return self

    def __exit__(self, *_: object) -> None:
        self.supervisor.close()
        self.nats.stop()
        self.s3.stop()


_BATCH = 64
_PIPELINES = 4  # batches under way at a time
_ANSWER_S = 3.0
_JOURNAL = 6000  # attacks remembered for findings
_VIOLATION = re.compile(r'permissions violation for publish to "(.*)"', re.IGNORECASE)


class Sent(NamedTuple):
    number: int
    kind: str
    name: str
    role: str


class Sender:
    """Attacks from a thread of its own until it is stopped; use as a context manager."""

    def __init__(
        self,
        attacker: Attacker,
        corpus: Corpus,
        nats_server: NatsRoles,
        blobs: Blobs,
        *,
        rate: float,
        most_waiting: int,
    ) -> None:
        self._attacker, self._corpus, self._nats, self._blobs = attacker, corpus, nats_server, blobs
        self._rate, self._most_waiting = rate, most_waiting
        self.counts: Counter[tuple[str, str, str]] = Counter()  # class, name, outcome
        self.by_sequence: dict[tuple[str, int], Sent] = {}
        self.forged: dict[str, Sent] = {}  # sha256 of a stored object -> the attack that stored it
        self.dead: set[tuple[str, int]] = set()  # (stream, sequence) of messages that a service dead-lettered
        self.letters: Counter[str] = Counter()  # by stage and reason, those of real messages too
        self.accepted: list[Attack] = []  # of classes that the server must refuse
        self.journal: deque[Attack] = deque(maxlen=_JOURNAL)
        self.num_sent = 0
        self.num_skipped = 0
        self.problems: Counter[str] = Counter()
        self.attacks_on = threading.Event()
        self._ending = threading.Event()
        self._waiting: Counter[str] = Counter()
        self._clients: dict[str, Client] = {}
        self._numbers = itertools.count(1)
        self._open: dict[str, dict[str, Attack]] = {role: {} for role in ROLES}
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="sender", daemon=True)

    def __enter__(self) -> Sender:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(30.0)

    async def _run(self) -> None:
        admin = await self._connect("admin", lambda _: None)
        for prefix in (f"{subjects.PREFIX}.{self._corpus.run_id}.>", "$KV.>"):
            await admin.subscribe(prefix, cb=self._capture)
        for role in ROLES:
            self._clients[role] = await self._connect(role, self._refused_to(role))
            await self._clients[role].subscribe(f"_INBOX_{role}.fuzz.>", cb=self._answered_to(role))
        watching = asyncio.create_task(self._watch_queues(admin))
        await asyncio.gather(*(self._send(admin) for _ in range(_PIPELINES)))
        watching.cancel()
        for client in (admin, *self._clients.values()):
            with contextlib.suppress(Exception):
                await client.close()

    async def _send(self, admin: Client) -> None:
        while not self._ending.is_set():
            if not self.attacks_on.is_set() or not admin.is_connected:
                await asyncio.sleep(0.05)
                continue
            started = time.monotonic()
            try:
                await self._send_batch()
            except (nats.errors.Error, OSError) as err:  # nats-server was killed
                self.problems[type(err).__name__] += 1
                await asyncio.sleep(0.2)
            await asyncio.sleep(max(0.0, _PIPELINES * _BATCH / self._rate - (time.monotonic() - started)))

    async def _connect(self, role: str, on_refusal: Callable[[str], None]) -> Client:
        async def on_error(err: Exception) -> None:
            if (found := _VIOLATION.search(str(err))) is not None:
                on_refusal(found[1])

        login = self._nats.login(role)
        return await nats.connect(
            login.url, user=role, password=login.secret(), name=f"fuzz-{role}", error_cb=on_error, inbox_prefix=f"_INBOX_{role}",
            max_reconnect_attempts=-1, reconnect_time_wait=0.2, pending_size=64 * 2**20,
        )  # fmt: skip

    async def _capture(self, msg: Msg) -> None:
        headers = msg.headers or {}
        if "X-Fuzz" not in headers and msg.data:
            try:
                if msg.subject.startswith(f"{subjects.PREFIX}.{self._corpus.run_id}.dead."):
                    self._note_letter(msg.data, headers.get("Nats-Msg-Id", ""))
                self._corpus.add(msg.subject, msg.data)
            except (ValueError, KeyError, TypeError, IndexError) as err:
                self.problems[f"capture: {type(err).__name__}"] += 1

    def _note_letter(self, data: bytes, msg_id: str) -> None:
        """Note whose message was dead-lettered: the letter's own id names its number in its stream."""
        letter = decode(data, DeadLetter)
        self.letters[f"{letter.stage} {letter.reason}"] += 1
        parts = msg_id.split(":")
        if len(parts) > 1 and parts[1].isdigit():
            self.dead.add((f"{self._corpus.run_id}-{letter.stage}", int(parts[1])))

    async def _watch_queues(self, admin: Client) -> None:
        """Count what waits in each queue, so that the run can go on beside the attacks."""
        js = admin.jetstream(timeout=_ANSWER_S)
        while True:
            for spec in streams.consumers(self._corpus.run_id):
                with contextlib.suppress(nats.errors.Error, nats.js.errors.Error, asyncio.TimeoutError):
                    info = await js.consumer_info(spec.stream, spec.durable)
                    self._waiting[spec.filter_subject] = (info.num_pending or 0) + (info.num_ack_pending or 0)
            await asyncio.sleep(0.25)

    def _is_too_full(self, attack: Attack) -> bool:
        wanted = attack.subject.split(".")
        for subject, waiting in self._waiting.items():
            pattern = subject.split(".")
            if len(pattern) == len(wanted) and all(p in ("*", w) for p, w in zip(pattern, wanted, strict=True)):
                return waiting > self._most_waiting
        return False

    async def _send_batch(self) -> None:
        batch = await asyncio.to_thread(self._draw_batch)
        stored = [(key, data, attack) for attack in batch for key, data in attack.stored]
        if stored:
            await asyncio.gather(*(asyncio.to_thread(self._store, *each) for each in stored))
        for attack in batch:
            self._open[attack.role][str(attack.number)] = attack
            headers = {key: value for key, value in attack.headers.items() if value.isascii()} or None
            try:
                await self._clients[attack.role].publish(
                    attack.subject, attack.data, reply=f"_INBOX_{attack.role}.fuzz.{attack.number}", headers=headers
                )
            except (nats.errors.BadSubjectError, nats.errors.MaxPayloadError, ValueError):
                self._close(attack.role, str(attack.number), "refused by the client")
        self.num_sent += len(batch)
        for client in self._clients.values():
            await client.flush(timeout=round(_ANSWER_S))  # after it every refusal has arrived
        deadline = time.monotonic() + _ANSWER_S
        names = {(attack.role, str(attack.number)) for attack in batch}
        while time.monotonic() < deadline and any(name in self._open[role] for role, name in names):
            await asyncio.sleep(0.01)
            if time.monotonic() > deadline - _ANSWER_S + 0.5 and not any(
                self._open[r].get(n) and self._open[r][n].kind not in {"acks", "subjects"} for r, n in names
            ):
                break
        for role, name in names:
            if name in self._open[role]:
                self._close(role, name, "unanswered")

    def _draw_batch(self) -> list[Attack]:
        batch: list[Attack] = []
        for number in itertools.islice(self._numbers, 2 * _BATCH):
            try:
                attack = self._attacker.draw(number)
            except Exception as err:  # noqa: BLE001  a mutation that does not fit its message is not sent
                self.problems[f"draw: {type(err).__name__}: {err}"[:90]] += 1
                continue
            if attack is None or self._is_too_full(attack):
                self.num_skipped += 1
            else:
                batch.append(attack)
        return batch

    def _store(self, key: str, data: bytes, attack: Attack) -> None:
        try:
            ref = self._blobs.put(key, data)
        except Exception as err:  # noqa: BLE001  the S3 server is among the victims
            self.problems[f"store: {type(err).__name__}"] += 1
        else:
            self.forged[ref.sha256] = Sent(attack.number, attack.kind, attack.name, attack.role)

    def _refused_to(self, role: str) -> Callable[[str], None]:
        def refused(subject: str) -> None:
            for name, attack in self._open[role].items():
                if attack.subject.lower() == subject.lower():
                    self._close(role, name, "refused")
                    return

        return refused

    def _answered_to(self, role: str) -> Callable[[Msg], Awaitable[None]]:
        async def answered(msg: Msg) -> None:
            name = msg.subject.rpartition(".")[2]
            attack = self._open[role].get(name)
            if attack is None:
                return
            if (msg.headers or {}).get("Status") == "503":
                self._close(role, name, "no reader")
                return
            try:
                answer = json.loads(msg.data or b"{}")
            except ValueError:
                answer = {}
            if "error" in answer:
                self._close(role, name, f"error {answer['error'].get('err_code')}")
            elif "seq" in answer:
                attack.stream, attack.sequence = answer["stream"], answer["seq"]
                if not answer.get("duplicate"):
                    self.by_sequence[attack.stream, attack.sequence] = Sent(
                        attack.number, attack.kind, attack.name, attack.role
                    )
                self._close(role, name, "duplicate" if answer.get("duplicate") else "stored")
            else:
                self._close(role, name, "answered")

        return answered

    def _close(self, role: str, name: str, outcome: str) -> None:
        attack = self._open[role].pop(name)
        attack.outcome = outcome
        self.counts[attack.kind, attack.name, outcome] += 1
        self.journal.append(attack)
        if attack.kind in MUST_BE_REFUSED and not outcome.startswith(("refused", "unanswered")):
            self.accepted.append(attack)
        attack.stored = [(key, b"") for key, _ in attack.stored]  # the bytes are in S3
