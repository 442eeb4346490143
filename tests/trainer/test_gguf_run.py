"""The short form of `penstock recipe`: a GGUF file, written here, is warmed up and trained for a few steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.gguf_file import write_gguf
from tests.trainer.learner.forks import Command
from tests.trainer.producer import ScriptedProducer, write_run_file

from penstock.protocol.config.connection import NatsSettings, S3Settings

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
def test_a_gguf_file_is_warmed_up_and_trained(
    tmp_path: Path, run_streams: str, nats_settings: NatsSettings, s3_settings: S3Settings
) -> None:
    """Both commands take the file itself, convert it once, and write ordinary model folders with its chat template."""
    write_gguf(tmp_path / "tiny.gguf")
    pairs = [(a, b) for a in range(10) for b in range(4)]
    chats = [[{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": str(a + b)}] for a, b in pairs]
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": chat[:1], "ground_truth": chat[1]["content"]}) + "\n" for chat in chats)
    )
    run_file = write_run_file(
        tmp_path / "run.toml", nats=nats_settings, s3=s3_settings,
        sections={
            "run": {"id": run_streams, "dir": str(tmp_path / "runs")},
            "model": {"path": str(tmp_path / "tiny.gguf")},
            "data": {"train": [str(tmp_path / "train.jsonl")], "max_prompt_tokens": 64},
            "reward": {"name": "exact_match"},
            "rollout": {"group_size": 4, "groups_per_step": 4, "max_new_tokens": 8},
            "trainer": {"steps": 2, "lr": 1e-3, "micro_batch_tokens": 512, "max_mismatch": "None"},
            "sft": {"data": str(tmp_path / "sft.jsonl"), "steps": 2, "batch_size": 8},
        },
    )  # fmt: skip
    warmed_up = Path(Command(tmp_path, "sft", str(run_file)).wait().strip())
    (converted,) = tmp_path.glob("tiny-*")
    stamp = (converted / "model.safetensors").stat().st_mtime_ns
    with ScriptedProducer(nats_settings, s3_settings, run_streams):
        Command(tmp_path, "train", str(run_file)).wait()
    assert (converted / "model.safetensors").stat().st_mtime_ns == stamp
    run = tmp_path / "runs" / run_streams
    recorded = json.loads((run / "config.json").read_text())
    assert recorded["settings"]["model"]["path"] == str(converted)
    for folder in (warmed_up, run / "model"):
        assert (folder / "chat_template.jinja").read_text() == (converted / "chat_template.jinja").read_text()
    assert json.loads((run / "trainer.json").read_text())["steps"] == 2
