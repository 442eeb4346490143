"""Measure what one stolen login can fill, hold or take from others on NATS: `python -m tests.rigs.proofs.stolen_logins`.

A nats-server with the generated rights of one run and its streams, as bootstrap makes them. Each line is one attack with one
login, for at most ``--seconds``: the rate, the bytes, and what the server does at the bound.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js.client import JetStreamContext
from tests.deploy.nats_roles import NatsRoles

from penstock.deploy.bootstrap import bootstrap
from penstock.deploy.nats_config import nats_config
from penstock.deploy.processes.servers import S3Server
from penstock.protocol import logs, streams, subjects
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus

RUN = "stolen"
_PIPELINE = 128


class Attack:
    """One login against a run whose streams hold one message of each other role."""

    def __init__(self, server: NatsRoles, seconds: float) -> None:
        self._server, self._seconds = server, seconds

    async def connect(self, role: str) -> Client:
        async def ignore(_: Exception) -> None: ...

        login = self._server.login(role)
        return await nats.connect(
            login.url,
            user=role,
            password=login.secret(),
            inbox_prefix=f"_INBOX_{role}",
            error_cb=ignore,
            allow_reconnect=False,
        )

    async def flood(self, role: str, subject: str, size: int, *, victim: str = "", keys: bool = False) -> str:
        """Publish messages of a size until the server refuses them, or until the ``victim``'s message is gone."""
        admin, thief = await self.connect("admin"), await self.connect(role)
        js, stream = admin.jetstream(timeout=10.0), ""
        if victim:
            stream = (await js.publish(victim, b"the victim's")).stream
        mine, data, sent, started, error = thief.jetstream(timeout=10.0), b"x" * size, 0, time.monotonic(), ""
        ended = ""
        while not error and not ended and time.monotonic() - started < self._seconds:
            batch = [mine.publish(f"{subject}{sent + i}" if keys else subject, data) for i in range(_PIPELINE)]
            for result in await asyncio.gather(*batch, return_exceptions=True):
                if isinstance(result, BaseException):
                    error = error or f"{type(result).__name__} {getattr(result, 'description', '') or result}".strip()
                else:
                    sent += 1
            if stream and not await _has(js, stream, victim):
                ended = "the victim's message is gone"
        wall = time.monotonic() - started
        await asyncio.gather(admin.close(), thief.close())
        outcome = error or ended or "no end"
        return f"{sent:7d} messages, {sent * size / 1e6:6.0f} MB in {wall:5.1f} s ({sent / wall:6.0f}/s): {outcome}"

    async def hold(self) -> str:
        """Fetch all tasks and say again and again that they are in progress."""
        admin, thief = await self.connect("admin"), await self.connect("rollout")
        for number in range(50):
            await admin.jetstream().publish(subjects.tasks(RUN, "train"), b"%d" % number)
        spec = streams.tasks_consumer(RUN, "train")
        taken = await (await thief.jetstream().pull_subscribe_bind(spec.durable, spec.stream)).fetch(50, timeout=5)
        started = time.monotonic()
        while time.monotonic() - started < 2 * spec.ack_wait_s:
            for message in taken:
                await message.in_progress()
            await asyncio.sleep(1.0)
        info = await admin.jetstream().consumer_info(spec.stream, spec.durable)
        await asyncio.gather(admin.close(), thief.close())
        return (
            f"{info.num_ack_pending} of 50 held after {2 * spec.ack_wait_s:.0f} s, {info.num_redelivered} redelivered"
        )

    async def connections(self, role: str, most: int) -> str:
        opened: list[Client] = []
        started = time.monotonic()
        with contextlib.suppress(Exception):
            while len(opened) < most and time.monotonic() - started < self._seconds:
                opened.append(await self.connect(role))
        wall, left = time.monotonic() - started, "none"
        with contextlib.suppress(Exception):
            await (await self.connect(role)).close()
            left = "more"
        await asyncio.gather(*(client.close() for client in opened))
        return f"{len(opened)} connections in {wall:.1f} s; {left} left for others of the role"

    async def read(self) -> str:
        """Read a stream over and over, and measure the server's CPU."""
        thief, stream = await self.connect("viewer"), f"{RUN}-events"
        received = 0
        admin = await self.connect("admin")
        for _ in range(500):
            await admin.jetstream().publish(subjects.events(RUN, "step"), b"x" * 20_000)
        await admin.close()

        wanted, arrived = 0, asyncio.Event()

        async def count(message: Any) -> None:
            nonlocal received
            received += len(message.data)
            if received >= wanted:
                arrived.set()

        await thief.subscribe("_INBOX_viewer.read", cb=count)
        started, cpu = time.monotonic(), _cpu_s(self._server.child.pid)
        request = json.dumps({"seq": 1, "next_by_subj": ">", "batch": 256, "max_bytes": 8 * 2**20}).encode()
        while time.monotonic() - started < self._seconds:
            await thief.publish(f"$JS.API.DIRECT.GET.{stream}", request, reply="_INBOX_viewer.read")
            wanted = received + 5_000_000  # 256 messages of 20 kB
            arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await arrived.wait()
        wall = time.monotonic() - started
        used = _cpu_s(self._server.child.pid) - cpu
        await thief.close()
        return f"{received / 1e6 / wall:.0f} MB/s read, nats-server uses {used / wall:.2f} cores"


async def _has(js: JetStreamContext, stream: str, subject: str) -> bool:
    try:
        return (await js.get_last_msg(stream, subject)).data == b"the victim's"
    except nats.js.errors.NotFoundError:
        return False


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.rigs.proofs.stolen_logins", description=__doc__)
    parser.add_argument("words", nargs="*", help="only the attacks whose name has one of these words")
    parser.add_argument("--seconds", type=float, default=60.0, help="most seconds for one attack")
    options = parser.parse_args()
    logs.configure("stolen", level="error")
    dead = 250_000
    attacks = {
        "rollout: events, out with the trainer's": lambda a: a.flood("rollout", subjects.events(RUN, "log"), 60_000, victim=subjects.events(RUN, "step")),
        "rollout: weights, out with announcements": lambda a: a.flood("rollout", subjects.weights_refused(RUN), 60_000, victim=subjects.weights_published(RUN)),
        "rollout: dead letters, out with others": lambda a: a.flood("rollout", subjects.dead(RUN, "tasks"), dead, victim=subjects.dead(RUN, "generated")),
        "rollout: generated groups, small": lambda a: a.flood("rollout", subjects.generated(RUN, "train"), 100),
        "rollout: generated groups, large": lambda a: a.flood("rollout", subjects.generated(RUN, "train"), 60_000),
        "rollout: heartbeats": lambda a: a.flood("rollout", f"$KV.{RUN}-live.rollout.x", 60_000, keys=True),
        "rollout: marks of killed readers": lambda a: a.flood("rollout", f"$KV.{RUN}-scoring.started.tasks.", 60_000, keys=True),
        "rollout: holds tasks": lambda a: a.hold(),
        "rollout: connections": lambda a: a.connections("rollout", 10_001),
        "reward: scored groups": lambda a: a.flood("reward", subjects.scored(RUN, "train"), 60_000),
        "reward: progress of packs": lambda a: a.flood("reward", f"$KV.{RUN}-scoring.reward.", 60_000, keys=True),
        "reward: registry of all runs": lambda a: a.flood("reward", "$KV.penstock-rewards.x", 60_000, keys=True),
        "reward: secrets of all runs": lambda a: a.flood("reward", "$KV.penstock-secrets.endpoint.x", 60_000, keys=True),
        "trainer: tasks": lambda a: a.flood("trainer", subjects.tasks(RUN, "train"), 60_000),
        "viewer: reads": lambda a: a.read(),
        "viewer: connections": lambda a: a.connections("viewer", 501),
    }  # fmt: skip
    for name, attack in attacks.items():
        if options.words and not any(word in name for word in options.words):
            continue
        with tempfile.TemporaryDirectory(prefix="stolen-") as scratch:
            folder = Path(scratch)
            server, s3 = (
                NatsRoles(folder, nats_config((RUN,))),
                S3Server(folder / "s3", log=folder / "s3.log"),
            )
            with contextlib.ExitStack() as stack:
                for one in (server, s3):
                    one.start()
                    stack.callback(one.stop)
                blobs = Blobs(s3.settings)
                blobs.ensure_bucket()
                with Bus.connect(server.login("admin"), name="stolen") as bus:
                    bootstrap(bus, blobs, RUN)
                print(f"{name:42} {asyncio.run(attack(Attack(server, options.seconds)))}", flush=True)


if __name__ == "__main__":
    main()
