"""Errors before anything starts, each with the fix."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from tests.trainer.producer import ScriptedProducer
from tests.trainer.publishing.test_publish import snapshot

from penstock.deploy.quickstart_task import write_data, write_model
from penstock.protocol import rewards_offered, streams
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.config.reward_settings import RewardSettings
from penstock.protocol.errors import BlobStoreRefused, ConfigError, MissingStream
from penstock.protocol.facts import encode
from penstock.protocol.rewards_offered import RewardsOffered
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.assemble import train
from penstock.trainer.connections import Connections
from penstock.trainer.data.dataset import PromptSet
from penstock.trainer.errors import UnknownReward
from penstock.trainer.preflight import check_resume, check_rewards, check_shared, check_success, connect
from penstock.trainer.publishing.publish import Publisher
from penstock.trainer.ranks import Ranks
from penstock.trainer.settings import DataSettings, TrainerSettings


@pytest.fixture
def settings(tmp_path: Path, nats_settings: NatsSettings, s3_settings: S3Settings, run_id: str) -> TrainerSettings:
    """Settings of a run on the real servers, with the quickstart's model and data."""
    write_model(tmp_path / "model", seed=0)
    write_data(tmp_path, seed=0, num_sft=1, num_train=20, num_eval=1)
    return TrainerSettings.model_validate(
        {
            "run": {"id": run_id, "dir": tmp_path / "runs"},
            "nats": nats_settings,
            "s3": s3_settings,
            "model": {"path": tmp_path / "model"},
            "data": {"train": [tmp_path / "train.jsonl"]},
        }
    )


def changed(settings: TrainerSettings, section: str, **values: object) -> TrainerSettings:
    part = getattr(settings, section).model_copy(update=values)
    return settings.model_copy(update={section: part})


def test_wrong_storage_credentials_are_named(settings: TrainerSettings) -> None:
    """A refused secret is an error about s3.access_key, not a timeout."""
    with pytest.raises(BlobStoreRefused, match=r"refused access key penstock.*s3\.secret_key"):
        connect(changed(settings, "s3", secret_key="wrong"))


def test_a_run_that_was_not_bootstrapped_is_refused_with_the_command(
    settings: TrainerSettings, bus: Bus, blobs: Blobs
) -> None:
    with pytest.raises(MissingStream, match=r"penstock bootstrap run\.toml"):
        check_resume(Connections(settings.run.id, bus, blobs), resume=True, has_checkpoint=False)


def test_starting_a_published_run_over_is_refused(
    settings: TrainerSettings, bus: Bus, blobs: Blobs, run_streams: str
) -> None:
    connections = Connections(run_streams, bus, blobs)
    assert check_resume(connections, resume=False, has_checkpoint=False) is None
    publisher = Publisher(connections, model_folder=settings.model.path)
    publisher.submit(snapshot(5))
    publisher.wait_until_published(PolicyVersion(5), 180.0)
    publisher.close()
    with pytest.raises(ConfigError, match=r"published version 5.*trainer\.resume = false.*--delete"):
        check_resume(connections, resume=False, has_checkpoint=False)
    head = check_resume(connections, resume=True, has_checkpoint=False)
    assert head is not None
    assert head.version == 5


def prompts(settings: TrainerSettings, reward: RewardSettings) -> PromptSet:
    tokenizer = ChatTokenizer.read(settings.model.path)
    return PromptSet(settings.data.train_files, data=DataSettings(), reward=reward, tokenizer=tokenizer)


def test_an_unknown_reward_is_refused_with_those_on_offer(
    settings: TrainerSettings, bus: Bus, blobs: Blobs, run_streams: str,
    nats_settings: NatsSettings, s3_settings: S3Settings,
) -> None:  # fmt: skip
    """A reward that no running service offers is an error that lists the offers; a known one passes."""
    connections = Connections(run_streams, bus, blobs)
    wanted = prompts(settings, RewardSettings(name="vibes"))
    with pytest.raises(UnknownReward, match=r"no reward service of this run is alive.*penstock reward service"):
        check_rewards(connections, [wanted], deadline_s=0.0)
    stop = threading.Event()
    stop.set()  # Ctrl-C while it waits
    with pytest.raises(UnknownReward, match=r"\(waited 0 s\)"):
        check_rewards(connections, [wanted], deadline_s=60.0, stop=stop)
    with ScriptedProducer(nats_settings, s3_settings, run_streams):
        with pytest.raises(UnknownReward, match=r"offers vibes; offered: auto, exact_match"):
            check_rewards(connections, [wanted], deadline_s=0.0)
        known = prompts(settings, RewardSettings(name="exact_match"))
        by_source = prompts(settings, RewardSettings())
        check_rewards(connections, [known, by_source], deadline_s=5.0)
        elsewhere = prompts(settings, RewardSettings(by_source={"sort_digits": "vibes"}))
        with pytest.raises(UnknownReward, match="vibes"):
            check_rewards(connections, [elsewhere], deadline_s=0.0)


def test_a_reward_made_of_parts_must_be_made_of_the_same_parts_everywhere(
    settings: TrainerSettings, bus: Bus, blobs: Blobs, run_streams: str,
    nats_settings: NatsSettings, s3_settings: S3Settings,
) -> None:  # fmt: skip
    """A part that no service offers is named with the nearest names; a service with other weights is refused.

    A built-in reward that has to be given parameters is offered by no service under its own name.
    """
    connections = Connections(run_streams, bus, blobs)
    short = {"reward": "overlong", "parameters": {"longest": 64, "buffer": 8}}
    parts = {"correct": {"reward": "exact_match"}, "form": {"reward": "auto", "weight": 0.2}, "short": short}
    ours = RewardSettings.model_validate({"name": "mine", "define": {"mine": {"parts": parts}}})
    wanted = prompts(settings, ours)
    bucket = bus.key_value(streams.registry_bucket().bucket).wait()

    def offer(names: tuple[str, ...], digest: str) -> None:
        fact = RewardsOffered(
            run_id=run_streams, replica="r1", at=time.time(), names=names, by_source={"sort_digits": "exact_match"},
            definitions={"mine": digest},
        )  # fmt: skip
        bucket.put(rewards_offered.key("r1"), encode(fact)).wait()

    def check() -> None:
        check_rewards(connections, [wanted], define=ours.define, deadline_s=0.0)

    try:
        offer(("auto", "exact_watch"), "0" * 16)
        with pytest.raises(UnknownReward, match=r"offers exact_match, mine \(did you mean exact_watch\?\)"):
            check()
        offer(("auto", "exact_match", "mine"), "0" * 16)
        with pytest.raises(UnknownReward, match=r"reward\.define\.mine in this run file differs from that of r1"):
            check()
        offer(("auto", "exact_match", "mine"), ours.define["mine"].digest)
        check()
    finally:
        bucket.delete(rewards_offered.key("r1")).wait()


def test_the_number_of_processes_must_fit(settings: TrainerSettings) -> None:
    """Two ranks in the run file and one process is an error with the command that starts two."""
    single = Ranks.__new__(Ranks)
    single.rank, single.num_ranks = 0, 1
    with pytest.raises(ConfigError, match=r"num_ranks = 2, but 1 process.*penstock train"):
        train(changed(settings, "trainer", num_ranks=2), b"{}", single, threading.Event())


def test_a_rule_of_success_for_an_unknown_reward_is_refused():
    """A misspelt name in reward.success would silently leave the run without accuracy; an offered one may be unused."""
    offer = RewardsOffered(run_id="t", replica="r", at=0.0, names=("gsm8k", "length"))
    asked = {"gsm8k", "openai/gsm8k"}
    check_success(["gsm8k", "length", "openai/gsm8k"], asked, [offer])
    with pytest.raises(ConfigError, match=r"reward\.success\.gms8k.*did you mean gsm8k\?"):
        check_success(["gms8k"], asked, [offer])


class Threads:
    """Two ranks as threads, with the three calls that the check makes."""

    num_ranks = 2

    def __init__(self, rank: int, meet: Barrier, said: dict[str, Any]) -> None:
        self.rank, self.is_leader = rank, rank == 0
        self._meet, self._said = meet, said

    def broadcast(self, order: Any) -> Any:
        if self.is_leader:
            self._said["order"] = order
        self._meet.wait(60.0)
        return self._said["order"]

    def sum(self, values: list[float]) -> list[float]:
        self._said[str(self.rank)] = values[0]
        self._meet.wait(60.0)
        return [self._said["0"] + self._said["1"]]


@pytest.mark.parametrize("second", ["shared", "own"])
def test_every_rank_must_see_the_folder_of_rank_0(tmp_path: Path, second: str) -> None:
    meet, said = Barrier(2), dict[str, Any]()
    folders = [tmp_path / "shared", tmp_path / second]
    with ThreadPoolExecutor(2) as pool:
        checks: list[Any] = [
            pool.submit(check_shared, folder, Threads(rank, meet, said), deadline_s=0.2)  # type: ignore[arg-type]
            for rank, folder in enumerate(folders)
        ]
        for check in checks:
            if second == "shared":
                check.result()
            else:
                with pytest.raises(
                    ConfigError, match="is seen by 1 of 2 ranks; every rank writes its part of a checkpoint"
                ):
                    check.result()
    assert list((tmp_path / "shared").iterdir()) == []
