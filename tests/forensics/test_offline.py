"""A stored run is scored again, by another reward and by other weights, and trained on without an engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.forensics.conftest import RUN, StoredRun
from tests.reward_service.processes import EndpointServer, Service
from tests.trainer.learner.forks import Command
from tests.trainer.trained_run import metrics

from penstock.deploy.bootstrap import bootstrap, delete_run
from penstock.protocol.config.run_file import load
from penstock.protocol.errors import ConfigError
from penstock.protocol.record.checkpoint_state import committed
from penstock.protocol.record.stored_record import (
    RescoredPiece,
    StoredRecord,
    find_input,
    pieces_of_input,
    users_of_input,
)
from penstock.protocol.transport.bus import Bus
from penstock.trainer.groups.dispatch import RunGroups
from penstock.trainer.groups.group_source import StoredGroups
from penstock.trainer.settings import TrainerSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OFFLINE, AGAIN = "offline", "scored-again"
TRAINING = ("trainer.steps=4", "algorithm.max_trained_count=1", "trainer.checkpoint_every=2")


class PositionReward:
    """A reward that is a completion's position in its group, for any text; it gives group ``refused`` no score."""

    refused_id = ""

    def __call__(self, body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        def scores(group: dict[str, Any]) -> list[dict[str, Any]]:
            if group["group_id"] == self.refused_id:
                return [{"score": None, "error": "no such answer"} for _ in group["completions"]]
            numbers = range(len(group["completions"]))
            return [{"score": float(n), "parts": {"first": float(n == 0), "last": float(n == 3)}} for n in numbers]

        results = [{"group_id": group["group_id"], "scores": scores(group)} for group in body["groups"]]
        return 200, {"content-type": "application/json"}, json.dumps({"results": results}).encode()


@pytest.fixture(scope="module")
def positions() -> PositionReward:
    return PositionReward()


@pytest.fixture(scope="module")
def service(run: StoredRun, positions: PositionReward, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Bus.connect(run.nats, name="test") as bus:
        bootstrap(bus, run.blobs, "rescoring")
        endpoint = EndpointServer(positions)
        started = Service("rescoring", run.nats, run.s3, tmp_path_factory.mktemp("rescoring")).ready()
        assert started.register("positions", endpoint.url, version="7").is_success
        yield started
        started.kill()
        endpoint.close()
        delete_run(bus, "rescoring")


@pytest.fixture(scope="module")
def scored_again(run: StoredRun, service: Service) -> str:
    """The stored run is scored by that reward, into the input AGAIN; returns the command's output."""
    return run.console("rescore", "--reward", "positions", "--url", service.url, "--into", AGAIN)


def stored(run: StoredRun, name: str) -> list[RescoredPiece]:
    return list(pieces_of_input(find_input(name, run.blobs)[0], run.blobs))


def test_a_run_is_scored_again_by_another_reward(run: StoredRun, scored_again: str) -> None:
    """Every trained group is in it once, in order, with the new rewards and parts; packs are copied byte for byte."""
    totals = run.record.chapters[-1].account.totals["train"]
    num_others = totals.issued - totals.used
    assert num_others > 0
    assert f"not included: {num_others} groups that no step of run {RUN} trained on (" in scored_again
    found = find_input(AGAIN, run.blobs)[0]
    assert (found.source, found.reward, found.temperature, found.left_out) == (RUN, "positions", 1.0, {})
    assert found.source_record == run.record.end
    groups = [group for piece in stored(run, AGAIN) for group in piece.groups]
    trained = [group for step in run.record.steps for group in step.groups if group.use == 1]
    assert [group.group_id for group in groups] == [group.group_id for group in trained]
    assert {group.scored.rewards for group in groups} == {(0.0, 1.0, 2.0, 3.0)}
    assert {group.scored.scorer for group in groups} == {"positions@7"}
    assert groups[0].scored.parts == {"first": (1.0, 0.0, 0.0, 0.0), "last": (0.0, 0.0, 0.0, 1.0)}
    assert [group.scored.generated for group in groups] == [group.scored.generated for group in trained]
    sources = {pack.sha256 for step in run.record.steps for pack in step.packs}
    assert {pack.sha256 for piece in stored(run, AGAIN) for pack in piece.packs} == sources
    assert "which are not overwritten" in run.console("rescore", "--weights", "reward=2", "--into", AGAIN, expected=1)


def test_a_group_without_a_score_is_an_error(run: StoredRun, service: Service, positions: PositionReward) -> None:
    """The error names it with the reason and nothing is written; with --leave-out-failed it is listed in the input."""
    group_id = run.record.steps[1].groups[0].group_id
    positions.refused_id = group_id
    try:
        options = ("--reward", "positions", "--url", service.url, "--into", "with-gap")
        said = run.console("rescore", *options, expected=1)
        assert f"group {group_id}: " in said
        assert "no such answer" in said
        assert "nothing was written" in said
        assert not list(run.blobs.list("runs/with-gap/"))
        run.console("rescore", *options, "--leave-out-failed")
    finally:
        positions.refused_id = ""
    found = find_input("with-gap", run.blobs)[0]
    assert list(found.left_out) == [group_id]
    assert group_id not in {group.group_id for piece in stored(run, "with-gap") for group in piece.groups}


def test_a_missing_part_is_an_error(run: StoredRun) -> None:
    """Weights name parts; for a group without one the error lists those it has."""
    said = run.console("rescore", "--weights", "first=1,reward=1", expected=1)
    assert "it has no part first; it has reward" in said


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.steps=99", "need 396 groups, and scored-again has "),
        ("rollout.temperature=0.5", "was sampled at 1.0"),
        ("algorithm.max_trained_count=2", "uses every group once"),
    ],
)
@pytest.mark.usefixtures("scored_again")
def test_settings_that_do_not_fit_the_input_are_refused(run: StoredRun, override: str, says: str) -> None:
    """More groups than there are, another temperature, a second use: refused at the start, with the setting."""
    given = [f"data.from_run={AGAIN}", *TRAINING, override]
    settings = load(TrainerSettings, files=[run.run_file], overrides=given).settings
    with pytest.raises(ConfigError, match=says):
        StoredGroups(settings, run.blobs, RunGroups())


@pytest.mark.usefixtures("scored_again")
def test_a_run_trains_on_it_without_an_engine(run: StoredRun) -> None:
    """Killed and resumed, it uses each group once and every token is stale; its replay gives the same weights.

    Its record has the parts, so that its groups can be scored again by other weights.
    """
    record = run.record
    with Bus.connect(run.nats, name="test") as bus:
        bootstrap(bus, run.blobs, OFFLINE)
        arguments = ("train", str(run.run_file), f"run.id={OFFLINE}", f"data.from_run={AGAIN}", *TRAINING)
        Command(run.folder, *arguments, "trainer.kill_at=stepped:4").wait(-9)
        Command(run.folder, *arguments).wait()
        assert "the accounting balances" in run.console("audit", run=OFFLINE)
        assert users_of_input("scored-again", run.blobs) == [OFFLINE]
        delete_run(bus, OFFLINE)
    home = run.folder / "runs" / OFFLINE
    own = StoredRecord.read(OFFLINE, committed(home / "checkpoints")[-1][1].record, run.blobs.get)
    wanted = [group.group_id for step in record.steps for group in step.groups if group.use == 1][:16]
    assert [group.group_id for step in own.steps for group in step.groups] == wanted
    assert {len(step.groups) for step in own.steps} == {4}
    rows = metrics(run.folder, OFFLINE)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert {row["reward_mean"] for row in rows} == {1.5}
    assert all("0" not in row["staleness_tokens"] for row in rows)
    assert (home / "model" / "model.safetensors").exists()
    said = Command(run.folder, "replay", OFFLINE, str(run.run_file), "--json").wait()
    assert json.loads(said)["same"][-1] == own.last_version
    run.console("rescore", "--weights", "first=1,last=0.5,reward=2", "--into", "weighed", run=OFFLINE)
    groups = [group for piece in stored(run, "weighed") for group in piece.groups]
    assert [group.group_id for group in groups] == wanted
    assert {group.scored.rewards for group in groups} == {(1.0, 2.0, 4.0, 6.5)}
    assert {group.scored.scorer for group in groups} == {"positions@7 weighed first=1,last=0.5,reward=2"}
