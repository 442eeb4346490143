"""The weights on which a saved batch is trained again, and the folders that name one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.groups.stored_groups import invent_group
from tests.trainer.recovery.test_checkpoint import state
from tests.weights_source import WeightsSource
from transformers import AutoModelForCausalLM

from penstock.console.connections import NamedRun
from penstock.console.record import stored_run
from penstock.deploy.certificates import signing_key
from penstock.deploy.quickstart_task import write_model
from penstock.forensics.replay.replay_batch import BatchReplay, fetch_published
from penstock.forensics.replay.replay_run import Wanted
from penstock.protocol.config.connection import RunSettings
from penstock.protocol.errors import ConfigError
from penstock.protocol.groups import BlobRef, ScoredGroup
from penstock.protocol.record.stopped_batch import StoppedBatch, find_batch, read_batch
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.weights.signature import SigningKey, TrustedKeys
from penstock.trainer.errors import TrainingDiverged
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.recovery import checkpoint
from penstock.trainer.recovery.run_record_writer import save_batch


def saved(home: Path, run_id: str, *, step: int, version: int, config: bytes = b"{}") -> Path:
    group = invent_group("e0.p1.a0", seed=1)
    scored = ScoredGroup(generated=group.summary(0), rewards=(1.0, 0.0, 1.0, 0.5), scorer="mine")
    ready = ReadyGroup(scored, BlobRef(key="k", size_bytes=1, sha256="0" * 64), group)
    error = TrainingDiverged("it is nan")
    return save_batch(home, [ready], error, config=config, run_id=run_id, step=step, version=version)


def test_a_batch_is_replayed_on_weights_that_a_trusted_key_has_signed(
    bus: Bus, blobs: Blobs, run_streams: str, tmp_path: Path
) -> None:
    """A published version of a stranger's key is refused, with the reason; without keys nothing is verified."""
    write_model(tmp_path / "model", seed=0)
    private, public = signing_key(tmp_path / "own")
    source = WeightsSource(bus, blobs, run_streams, tmp_path / "model", signing_key=SigningKey.from_file(private, "x"))
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    source.publish(0, tensors)
    batch: StoppedBatch = read_batch(saved(tmp_path / "home", run_streams, step=1, version=0))[0]
    stranger = TrustedKeys.from_file(signing_key(tmp_path / "other")[1], "x")
    with pytest.raises(ConfigError, match=r"cannot give that version \(.*signed by key .*trusted are"):
        fetch_published(batch, tmp_path / "no", store=blobs, trusted_keys=stranger)
    assert not (tmp_path / "no").exists()
    for name, keys in (("own-key", TrustedKeys.from_file(public, "x")), ("no-key", None)):
        fetch_published(batch, tmp_path / name, store=blobs, trusted_keys=keys)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_batch_is_never_replayed_on_weights_of_another_run(
    bus: Bus, blobs: Blobs, run_streams: str, tmp_path: Path
) -> None:
    """Neither published ones nor those of a checkpoint; and a batch is one of the run that was named."""
    write_model(tmp_path / "model", seed=0)
    WeightsSource(bus, blobs, run_streams, tmp_path / "model").publish(
        0, load_file(tmp_path / "model" / "model.safetensors")
    )
    home = tmp_path / run_streams
    config = {"settings": {"run": {"id": run_streams}, "model": {"path": str(tmp_path / "model")}, "algorithm": {}}}
    folder = saved(home, run_streams, step=3, version=3, config=json.dumps(config).encode())
    ranks: Any = None
    run = RunSettings(id=run_streams, dir=tmp_path)
    with pytest.raises(ConfigError, match=f"a batch of run {run_streams}, not of run mine: .*run.dir"):
        BatchReplay(run.model_copy(update={"id": "mine"}), folder, ranks, Wanted())
    replay = BatchReplay(run, folder, ranks, Wanted())
    checkpoint.commit(home / "checkpoints", state(2, "other"), lambda _: None, keep=1)
    with pytest.raises(ConfigError, match=f"step00000002 is a checkpoint of run other, not of run {run_streams}"):
        replay._find_weights(blobs, tmp_path / "scratch")

    [key] = [stat.key for stat in blobs.list(f"runs/{run_streams}/weights/") if stat.key.endswith("/manifest.json")]
    blobs.put(key, json.dumps(json.loads(blobs.get_unverified(key)) | {"run_id": "other"}).encode())
    batch = read_batch(saved(home, run_streams, step=1, version=0))[0]
    with pytest.raises(ConfigError, match=rf"cannot give that version \({key} is of run other\)"):
        fetch_published(batch, tmp_path / "fetched", store=blobs)


def test_a_replay_has_as_many_ranks_as_the_run_had_at_the_batch(tmp_path: Path) -> None:
    """A later session may have another number: it is that of the settings which were saved with the batch."""
    saved(tmp_path / "mine", "mine", step=12, version=11, config=b'{"settings": {"trainer": {"num_ranks": 2}}}')
    (tmp_path / "mine" / "config.json").write_text('{"settings": {"trainer": {"num_ranks": 1}}}')
    given = (NamedRun("mine", [f"run.dir={tmp_path}"], {}), ["--batch", "12"])
    assert "--nproc-per-node=2" in stored_run.replay(*given, batch="12")
    assert "torch.distributed.run" not in stored_run.replay(*given)
    with pytest.raises(ConfigError, match="no saved batch '13'"):
        stored_run.replay(*given, batch="13")


def test_a_batch_is_named_by_its_step_or_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "mine", "mine", step=12, version=11)
    monkeypatch.chdir(tmp_path)
    relative = Path("mine", "stopped", "step00000012")
    assert find_batch(tmp_path / "mine", "12") == folder
    assert find_batch(tmp_path / "mine", str(relative)) == folder
    assert find_batch(Path("mine"), f"{folder}/") == folder
    for other in ("11", "stopped/step00000012", "x"):
        with pytest.raises(ConfigError, match=r"no saved batch .*; give a step or a folder of 12"):
            find_batch(tmp_path / "mine", other)
