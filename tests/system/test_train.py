"""`penstock train --local` on a model folder and a verl-format Parquet, and going on from its checkpoint."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.deploy import quickstart_task
from tests import otlp_receiver
from tests.otlp_receiver import Receiver, attributes
from tests.servers import require
from tests.small_run import train_local, write_run_file


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver | None]:
    """A collector to which all services send their traces; None without the extra."""
    if importlib.util.find_spec("opentelemetry.sdk") is None:
        yield None
    else:
        yield from otlp_receiver.running(monkeypatch)


@pytest.fixture
def run_file(tmp_path: Path, run_id: str) -> Path:
    """A run on sums in verl's format, scored by the math reward."""
    require("nats-server")
    require("rclone")
    quickstart_task.write_model(tmp_path / "model", seed=0)
    for name, rows in (("train", range(40)), ("test", range(40, 44))):
        pq.write_table(pa.Table.from_pylist([_verl_row(n, name) for n in rows]), tmp_path / f"{name}.parquet")
    return write_run_file(
        tmp_path,
        run_id,
        data={
            "train": str(tmp_path / "train.parquet"),
            "eval": str(tmp_path / "test.parquet"),
            "max_prompt_tokens": 64,
        },
        rollout={"groups_per_step": 4, "group_size": 2, "max_new_tokens": 12},
        reward={"name": "math"},
        trainer={"steps": 3, "checkpoint_every": 2},
    )


def _verl_row(number: int, split: str) -> dict:
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"what is {number} + {number}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
        "extra_info": {"split": split, "index": number},
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_verl_parquet_is_trained_to_the_end_and_resumed(
    run_file: Path, tmp_path: Path, run_id: str, collector: Receiver | None
):
    """Three steps with the math reward, then three more from the checkpoint: each step happens once, in order.

    The last three are ReMax's: worker, reward service and trainer carry a greedy baseline in every group. With the extra
    `traces`, each trained group has one trace through all three services.
    """
    assert train_local(run_file)["steps"] == 3
    assert train_local(run_file, "trainer.steps=6", "algorithm.name=remax")["steps"] == 6
    folder = tmp_path / "runs" / run_id
    log = (folder / "logs" / "trainer.log").read_text()
    assert log.count("async_grpo: grpo advantages, ppo_clip") == 1
    assert log.count("remax: remax advantages, ppo_clip") == 1
    assert 'algorithm.name = \\"remax\\", was \\"async_grpo\\"' in log
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
    steps = [event for event in events if event["kind"] == "step"]
    assert [event.get("baseline_mean") for event in steps] == [None] * 3 + [0.0] * 3
    assert {event["num_prompts"] for event in events if event["kind"] == "eval"} == {4}
    totals = json.loads((folder / "trainer.json").read_text())
    assert totals["groups"]["trained"] == 6 * 4
    assert (folder / "model" / "model.safetensors").exists()
    assert "6 steps" in (folder / "report.md").read_text()
    if collector is not None:
        _check_traces(collector, num_steps=6, num_trained=6 * 4, run_id=run_id)


def _check_traces(collector: Receiver, *, num_steps: int, num_trained: int, run_id: str) -> None:
    """Each trained group: issued, generated, announced, scored, admitted and trained in one trace, linked from its step."""
    services: dict[str, dict[str, str]] = {}  # trace -> span -> service
    for span, service in zip(collector.spans, collector.services, strict=True):
        services.setdefault(span.trace_id.hex(), {})[span.name] = service
    trained = {span.trace_id.hex() for span in collector.named("train")}
    assert len(trained) == num_trained
    for trace in trained:
        assert services[trace] == {
            "issue": "penstock-trainer", "generate": "penstock-rollout", "announce": "penstock-rollout",
            "score": "penstock-reward", "admitted": "penstock-trainer", "train": "penstock-trainer",
        }  # fmt: skip
    first = {span.trace_id: span.span_id for span in collector.named("issue")}
    ids = {span.trace_id: attributes(span)["group_id"] for span in collector.named("issue")}
    for span in collector.spans:
        if span.trace_id in first and span.name != "issue":
            assert span.parent_span_id == first[span.trace_id]
            assert attributes(span)["group_id"] == ids[span.trace_id]
    steps = {attributes(span)["step"]: span for span in collector.named("train step")}
    assert sorted(steps) == list(range(1, num_steps + 1))
    assert {link.trace_id.hex() for span in steps.values() for link in span.links} == trained
    assert collector.named("evaluated"), "held-out groups have traces too"
    sent = b"".join(collector.bodies)
    assert run_id.encode() in sent
    for secret in (b"what is", b"ground_truth", b"password", b"Bearer"):
        assert secret not in sent, "no prompt and no secret"
