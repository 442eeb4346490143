"""A message whose reader was killed twice, by SIGKILL of real processes: quarantined by name, and the next one is served."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from penstock.protocol import streams
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.facts import DeadLetter, TaskIssued
from penstock.protocol.streams import StreamLimits
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from tests import forked
from tests.groups import make_group, make_task
from tests.reward_service.conftest import Wire
from tests.reward_service.processes import Behaviour, EndpointServer, good
from tests.rollout_service.engines.faulty_engine import FaultyEngine
from tests.rollout_service.trainer_side import TrainerSide, attached
from tests.servers import secret_file, wait_for
from tests.trainer.groups.killed_trainer import Run
from tests.trainer.producer import ScriptedProducer, recite

SHORT = StreamLimits(ack_wait_s=1.0)


def reached(nats: NatsSettings, s3: S3Settings) -> list[str]:
    return [
        *(f"nats.url={nats.url}", f"nats.user={nats.user}", f"nats.password_file={secret_file(nats.secret())}"),
        *(f"s3.endpoint={s3.endpoint}", f"s3.access_key={s3.access_key}", f"s3.bucket={s3.bucket}"),
        f"s3.secret_key_file={secret_file(s3.secret())}",
    ]


@contextmanager
def processes(command: list[str], log: Path) -> Iterator[Callable[..., forked.Popen]]:
    """Give what starts a command with more words; all are killed at the end."""
    with ExitStack() as stack, log.open("ab") as output:

        def start(*words: str) -> forked.Popen:
            process = forked.Popen([*command, *words], cwd=forked.ROOT, stdout=output, stderr=output)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def quarantined(letters: list[DeadLetter]) -> list[tuple[str, str, tuple[str, ...]]]:
    wait_for(lambda: letters, "the dead letter")
    return [(letter.reason, letter.stage, letter.group_ids) for letter in letters]


def test_tasks_of_two_killed_workers(
    bus: Bus, blobs: Blobs, run_streams: str, nats_settings: NatsSettings, s3_settings: S3Settings, tmp_path: Path
) -> None:
    """Two workers are killed while the engine works on a pack; the third one does not take it, and generates the next."""
    bus.ensure_consumer(streams.tasks_consumer(run_streams, "train", SHORT)).wait()
    trainer_side = TrainerSide(bus, blobs, run_streams, tmp_path)
    trainer_side.publish(0)
    given = [f"run.id={run_streams}", f"run.dir={tmp_path}", *reached(nats_settings, s3_settings)]
    worker = [sys.executable, "-P", "-m", "penstock.rollout_service"]
    with FaultyEngine() as engine, processes(worker, tmp_path / "workers.log") as start:
        engine.flow.clear()
        trainer_side.issue("pack-0", [make_task("e0.p0.a0"), make_task("e0.p1.a0")])
        for number in range(2):
            process = start(*given, f"worker.id=w{number}", *attached(engine))
            engine.wait_for_requests(number + 1)
            process.kill()
            engine.flow.set()
            wait_for(lambda: engine.num_running == 0, "the engine to be idle")
            if number == 0:
                engine.flow.clear()
        start(*given, "worker.id=w2", *attached(engine))
        assert quarantined(trainer_side.dead) == [("ReaderKilled", "tasks", ("e0.p0.a0", "e0.p1.a0"))]
        trainer_side.issue("pack-1", [make_task("e0.p2.a0")])
        assert [delivery.fact.pack_id for delivery in trainer_side.collect(1)] == ["pack-1"]


def test_a_pack_of_two_killed_reward_services(
    bus: Bus, blobs: Blobs, run_streams: str, nats_settings: NatsSettings, s3_settings: S3Settings, tmp_path: Path
) -> None:
    """Two services are killed while an endpoint scores a pack; the third one does not take it, and scores the next."""
    bus.ensure_consumer(streams.generated_consumer(run_streams, SHORT)).wait()
    wire, asked, answer = Wire(bus, blobs, run_streams), threading.Semaphore(0), threading.Event()

    def slow(request: dict) -> tuple[int, dict[str, str], bytes]:
        asked.release()
        answer.wait(60)
        return good(0.5)(request)

    port = tmp_path / "port"
    given = [f"run.id={run_streams}", "reward_service.port=0", f"reward_service.port_file={port}",
             *reached(nats_settings, s3_settings)]  # fmt: skip
    service = [sys.executable, "-P", "-m", "penstock.reward_service"]
    with endpoint(slow) as at, processes(service, tmp_path / "services.log") as start:
        name = f"slow-{run_streams}"
        for number in range(2):
            process = start(*given, f"reward_service.id=r{number}-{run_streams}")
            if number == 0:
                wait_for(port.exists, "the port of the service")
                url = f"http://127.0.0.1:{port.read_text().strip()}"
                body = {"name": name, "url": at.url}
                httpx.post(f"{url}/v1/endpoints", json=body, timeout=60).raise_for_status()
                wire.announce([make_group("e0.p0.a0", size=2, reward_name=name)])
            assert asked.acquire(timeout=60)
            process.kill()
        start(*given, f"reward_service.id=r2-{run_streams}")
        assert quarantined(wire.dead) == [("ReaderKilled", "generated", ("e0.p0.a0",))]
        wire.announce([make_group("e0.p1.a0", size=2)], pack_id="p1")
        assert set(wire.wait_scored("e0.p1.a0")) == {"e0.p1.a0"}
        answer.set()


@contextmanager
def endpoint(behaviour: Behaviour) -> Iterator[EndpointServer]:
    server = EndpointServer(behaviour)
    try:
        yield server
    finally:
        server.close()


def test_a_scored_pack_of_two_killed_trainers(
    bus: Bus, blobs: Blobs, run_streams: str, nats_settings: NatsSettings, s3_settings: S3Settings, tmp_path: Path
) -> None:
    run = Run.write(tmp_path, run_streams, nats_settings, s3_settings)
    producer = ScriptedProducer(nats_settings, s3_settings, run_streams)
    letters: list[DeadLetter] = []
    try:
        trainer = forked.call("tests.trainer.groups.killed_trainer")
        with processes(trainer, tmp_path / "trainers.log") as start:
            first = start(str(run.file), "killed")
            inbox = bus.inbox(streams.tasks_consumer(run_streams, "train"), TaskIssued).wait()
            packs: list[TaskIssued] = []

            def answer(num: int) -> None:
                del packs[:]

                def arrived() -> bool:
                    for delivery in inbox.fetch(num - len(packs), 0.2).wait():
                        packs.append(delivery.fact)
                        delivery.ack().wait()
                    return len(packs) == num

                wait_for(arrived, "tasks")
                for message in packs:
                    rows = [recite(task, PolicyVersion(0)) for task in message.tasks]
                    producer.announce(producer.store(message, rows, PolicyVersion(0)))

            answer(2)
            asked = list(packs)
            first.wait(180)
            while max(run.deaths.values()) < 2:  # a redelivered pack may come after the other one
                start(str(run.file), "killed").wait(180)
            fatal = max(run.deaths, key=lambda key: run.deaths[key])
            (poison,) = [message for message in asked if message.pack_id in fatal]
            poisonous = {task.group_id for task in poison.tasks}
            bus.tail(f"{run_streams}-dead", f"{run_streams}.dead.>", DeadLetter, letters.append, from_start=True).wait()
            start(str(run.file), "not killed")
            answer(1)
            wait_for(run.trained.exists, "a batch")
        trained = json.loads(run.trained.read_text())
        assert len(trained) == 4
        assert poisonous.isdisjoint(trained)
        assert {task.group_id for task in packs[0].tasks} <= set(trained)
    finally:
        producer.close()
