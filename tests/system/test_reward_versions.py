"""An endpoint is replaced by a new version in the middle of a real run; the record shows which version scored what."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.deploy import quickstart_task
from penstock.protocol.facts import decode
from penstock.protocol.record.lineage import LineageChapter
from tests.reward_service.processes import Answer, Behaviour, EndpointServer
from tests.servers import require, wait_for
from tests.small_run import train_local, write_run_file

STEPS = 8


def by_length(scale: float) -> Behaviour:
    """Scores that differ within a group, so that there is something to learn."""

    def behave(request: dict[str, Any]) -> Answer:
        results = [
            {"group_id": g["group_id"], "scores": [{"score": scale * (len(c) % 5)} for c in g["completions"]]}
            for g in request["groups"]
        ]
        return 200, {}, json.dumps({"results": results}).encode()

    return behave


@pytest.fixture
def versions() -> Iterator[list[EndpointServer]]:
    servers = [EndpointServer(by_length(0.1)), EndpointServer(by_length(0.2))]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
def run_file(tmp_path: Path, run_id: str) -> Path:
    """A run on sums, scored by an endpoint; every step is checkpointed, so that every step is in the record."""
    require("nats-server")
    require("rclone")
    quickstart_task.write_model(tmp_path / "model", seed=0)
    rows = [{"prompt": f"{n} + {n}", "ground_truth": str(2 * n), "data_source": "sums"} for n in range(40)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_run_file(
        tmp_path,
        run_id,
        data={"train": str(tmp_path / "train.jsonl"), "max_prompt_tokens": 64},
        rollout={"groups_per_step": 4, "group_size": 2, "max_new_tokens": 12},
        reward={"name": "mine"},
        trainer={"steps": STEPS, "checkpoint_every": 1},
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_record_of_a_run_shows_which_version_scored_which_group(
    run_file: Path, tmp_path: Path, run_id: str, versions: list[EndpointServer]
):
    """Replaced during the run: every step is trained, each group by one version, which report and record name."""
    folder = tmp_path / "runs" / run_id
    port_file = folder / "reward.port"

    def register(number: int) -> bool:
        body = {"name": "mine", "url": versions[number].url, "version": str(number + 1), "replace": True}
        try:
            url = f"http://127.0.0.1:{port_file.read_text().strip()}/v1/endpoints"
            return httpx.post(url, json=body, timeout=60).is_success
        except (OSError, httpx.HTTPError):
            return False

    def steps() -> list[dict[str, Any]]:
        lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
        return [row for row in map(json.loads, lines) if row["kind"] == "step"]

    def replace_it() -> None:
        wait_for(lambda: register(0), "the reward service to take the first version")
        wait_for(lambda: len(steps()) >= 2, "two steps")
        assert register(1)

    with ThreadPoolExecutor(1) as beside:
        replaced = beside.submit(replace_it)
        assert train_local(run_file)["steps"] == STEPS
        replaced.result()

    scored_by = [row["scored_by"] for row in steps()]
    assert [sum(one.values()) for one in scored_by] == [4] * STEPS
    assert set(scored_by[0]) == {"mine@1"}
    assert set(scored_by[-1]) == {"mine@2"}
    report = json.loads((folder / "report.json").read_text())
    assert {name: share["groups"] for name, share in report["scored_by"].items()} == {
        name: sum(one.get(name, 0) for one in scored_by) for name in ("mine@1", "mine@2")
    }
    assert "| mine@2 |" in (folder / "report.md").read_text()

    chapters = [
        decode(path.read_bytes(), LineageChapter) for path in (folder / "store").rglob("lineage/chapter*.msgpack")
    ]
    recorded = {group.group_id: group.scored for chapter in chapters for step in chapter.steps for group in step.groups}
    assert len(recorded) == 4 * STEPS
    for group_id, scored in recorded.items():
        server = versions[int(scored.scorer.removeprefix("mine@")) - 1]
        assert group_id in {group["group_id"] for request in server.requests for group in request["groups"]}
