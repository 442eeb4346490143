"""Secrets of a run, planted as words that nothing else contains, and then looked for in everything that the run leaves."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.console.connections import ConsoleSettings
from penstock.deploy.bootstrap import bootstrap
from penstock.deploy.processes.child import Child
from penstock.deploy.processes.servers import NatsServer, S3Server
from penstock.protocol.config.run_file import config_document, format_config, load
from penstock.protocol.errors import ConfigError
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from tests.groups import make_task
from tests.reward_service.conftest import Wire
from tests.reward_service.processes import EndpointServer, Service, good, raw
from tests.rollout_service.engines.faulty_engine import FaultyEngine
from tests.rollout_service.trainer_side import TrainerSide, attached

RUN = "canaries"


def key(word: str) -> str:
    return "whsec_" + base64.b64encode(word.ljust(32, "0").encode()).decode()


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("PENSTOCK_TEST_SECRETS"), reason="starts all services: make test-more NAME=secrets"
)
def test_no_secret_is_in_what_a_run_leaves(tmp_path: Path) -> None:
    """Passwords, tokens and signing keys are in no log, message, record, object, answer, metric or command line.

    They are where they belong: endpoint secrets in their bucket, and the server's password in its own configuration.
    """
    words = {name: f"canary{name}0123456789abcdef" for name in ("nats", "token", "reader", "apikey", "engine")}
    signing = key("canarysigning")
    nats_server = NatsServer(tmp_path / "nats", log=tmp_path / "nats.log", password=words["nats"], max_store_gb=1000)
    s3_server = S3Server(tmp_path / "s3", log=tmp_path / "s3.log")
    for server in (nats_server, s3_server):
        server.start()
    words |= {"s3": s3_server.settings.secret(), "signing": signing, "signingkey": signing.removeprefix("whsec_")}
    given, refusing = EndpointServer(good(0.5)), EndpointServer(raw("no", 500))
    tokens = tmp_path / "secrets" / "tokens"
    tokens.parent.mkdir()
    tokens.write_text(f"boss admin {words['token']}\nviewer read {words['reader']}\n")
    (tmp_path / "secrets" / "engine").write_text(words["engine"])
    seen: list[tuple[str, bytes]] = []
    try:
        with (
            Bus.connect(nats_server.settings, name="test") as bus,
            FaultyEngine() as engine,
            contextlib.ExitStack() as ends,
        ):
            blobs = Blobs(s3_server.settings)
            blobs.ensure_bucket()
            bootstrap(bus, blobs, RUN)
            end, wire = TrainerSide(bus, blobs, RUN, tmp_path), Wire(bus, blobs, RUN)
            end.publish(0)
            nats_at, s3_at = nats_server.settings, s3_server.settings
            command = [
                sys.executable, "-m", "penstock.rollout_service", f"run.id={RUN}", f"run.dir={tmp_path}", "worker.id=w0",
                f"nats.url={nats_at.url}", f"nats.user={nats_at.user}", f"s3.endpoint={s3_at.endpoint}", *attached(engine),
                f"s3.access_key={s3_at.access_key}", f"worker.engine_api_key_file={tmp_path}/secrets/engine",
            ]  # fmt: skip
            secret = {"PENSTOCK_NATS__PASSWORD": nats_at.secret(), "PENSTOCK_S3__SECRET_KEY": s3_at.secret()}
            worker = Child("worker", command, log=tmp_path / "w0.log", environ={**os.environ, **secret})
            worker.start()
            ends.callback(worker.kill)
            options = [f"reward_service.tokens_file={tokens}", "reward_service.id=r0", "reward_service.log_level=debug",
                       "reward_service.endpoint_attempts=2"]  # fmt: skip
            service = Service(RUN, nats_server.settings, s3_server.settings, tmp_path, options)
            ends.callback(service.kill)
            service.ready()
            more: dict[str, Any] = {"secrets": [signing], "api_key": words["apikey"], "retries": 0}
            for name, server in (("mine", given), ("broken", refusing)):
                seen.append(("registration", service.register(name, server.url, token=words["token"], **more).content))
            for body in (
                {"secrets": [words["apikey"]], "name": "x", "url": given.url},
                {**more, "name": "x", "url": 3},
            ):
                seen.append(("refusal", service.post("/v1/endpoints", body, token=words["token"]).content))
            seen.append(("unauthorised", service.post("/v1/endpoints", {}, token=words["token"][:-1]).content))
            for number, reward in enumerate(("mine", "broken", "gsm8k")):
                task = make_task(f"e0.p{number}.a0", group_size=2)
                task = task.model_copy(update={"reward": task.reward.model_copy(update={"name": reward})})
                end.issue(f"pack{number}", [task])
            wire.wait_scored("e0.p0.a0", deadline_s=90)
            wire.wait_dead("e0.p1.a0", deadline_s=90)
            for name in ("mine", "broken"):
                seen.append((name, service.post(f"/v1/endpoints/{name}/test", {}, token=words["token"]).content))
            for path in ("/v1/endpoints", "/v1/rewards", "/metrics", "/healthz", "/openapi.json"):
                headers = {"authorization": f"Bearer {words['reader']}"}
                seen.append((path, httpx.get(service.url + path, headers=headers, timeout=60).content))
            seen += processes(worker.pid, service.pid)
            seen += messages(bus)
            seen += [(stat.key, blobs.get_unverified(stat.key)) for stat in blobs.list(f"runs/{RUN}/")]
        assert given.headers[0]["authorization"] == f"Bearer {words['apikey']}", "they were used"
        assert given.headers[0]["webhook-signature"]
    finally:
        for server in (given, refusing):
            server.close()
        s3_server.stop()
        nats_server.stop()
    logs = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_relative_to(tmp_path / "secrets")]
    seen += [(str(path), path.read_bytes()) for path in logs if "KV_penstock-secrets" not in path.parts]
    assert len([name for name, _ in seen if name.endswith(".log")]) >= 3
    found = {(name, where) for where, data in seen for name, word in words.items() if word.encode() in data}
    allowed = {("nats", str(tmp_path / "nats" / "nats.conf"))}
    allowed |= {(name, where) for name, where in found if where.startswith("KV_penstock-secrets ")}
    assert found == allowed
    assert {name for name, where in found if where.startswith("KV_")} == {"apikey", "signing", "signingkey"}
    assert (tmp_path / "nats" / "nats.conf").stat().st_mode & 0o077 == 0


def processes(*pids: int) -> Iterator[tuple[str, bytes]]:
    """Yield the command lines of processes and their children, and the environments of the children."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            parents[int(status.parent.name)] = int(re.findall(r"PPid:\s+(\d+)", status.read_text())[0])
    ours = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    for pid in ours:
        with contextlib.suppress(OSError):
            yield f"command line of {pid}", Path(f"/proc/{pid}/cmdline").read_bytes()
            if pid not in pids:
                yield f"environment of {pid}", Path(f"/proc/{pid}/environ").read_bytes()


def messages(bus: Bus) -> Iterator[tuple[str, bytes]]:
    """Yield every message of every stream and bucket, by stream and subject."""
    for name in bus.stream_names().wait():
        for message in bus.read_stream(name).wait():
            yield f"{name} {message.subject}", message.data


@pytest.mark.parametrize(
    "override",
    ["nats.url=nats://me:hunter2@127.0.0.1:4222", "nats.url=me:hunter2@127.0.0.1", "nats.url=nats://127.0.0.1,nats://hunter2@b",
     "s3.endpoint=http://me:hunter2@127.0.0.1:9000", "s3.endpoint=ftp://me:hunter2@x", "nats.passwort=hunter2",
     "nats.password=[hunter2", "s3.secret_key={hunter2", "nats.password=hunter2", "--s3.secret-key=hunter2"],
)  # fmt: skip
def test_a_password_in_the_wrong_place_is_refused_and_not_repeated(override: str) -> None:
    """A URL with credentials would be shown in logs and stored with the run, and an override in `ps`; no error repeats them."""
    with pytest.raises(ConfigError) as err:
        load(ConsoleSettings, overrides=[override], environ={})
    assert "hunter2" not in str(err.value)
    section, _, key = override.removeprefix("--").partition("=")[0].replace("-", "_").partition(".")
    for text in ("[hunter2", "hunter2") if key in {"password", "secret_key"} else ():
        loaded = load(ConsoleSettings, environ={f"PENSTOCK_{section}__{key}".upper(): text})
        for shown in (format_config(loaded), str(config_document(loaded)), repr(loaded), str(loaded.settings)):
            assert "hunter2" not in shown
    assert os.environ.get("PENSTOCK_NATS__PASSWORD") is None
