"""A replay of a damaged run ends with an error that names the damaged object, never with a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.console.command import server_arguments
from tests.forensics.audit.made_run import DAMAGES, NUM_STEPS, MadeRun, damaged, damaged_copy, stored_run

from penstock.deploy.processes.servers import NatsServer, S3Server
from penstock.forensics.replay.replay_command import main
from penstock.forensics.replay.replay_findings import figure_differences
from penstock.forensics.replay.replay_run import _num_threads
from penstock.protocol.errors import RecordBroken
from penstock.protocol.record.lineage import RecordedSession
from penstock.protocol.record.stored_record import StoredRecord
from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.credit import AlgorithmState
from penstock.trainer.errors import CheckpointError

RUN = "damaged-replay"


@pytest.fixture(scope="module")
def run(nats_server: NatsServer, s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MadeRun]:
    with stored_run(RUN, nats_server, s3_server, tmp_path_factory.mktemp("runs") / RUN) as run:
        yield run


def refusal(
    run: MadeRun, nats: NatsServer, s3: S3Server, capsys: pytest.CaptureFixture[str], runs: Path | None = None
) -> str:
    """Replay it, which must fail; return the error."""
    where = server_arguments(nats.settings, s3.settings)
    assert main([run.run_id, *where, f"run.dir={runs or run.folder.parent}"]) in {1, 2}
    return capsys.readouterr().err


@pytest.mark.parametrize("name", ["chapter 1", f"chapter {NUM_STEPS}", "settings"])
def test_damage_of_an_object_is_named(
    run: MadeRun, name: str, nats_server: NatsServer, s3_server: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    key = run.objects[name]
    for damage in damaged(run, key):
        assert key in refusal(run, nats_server, s3_server, capsys), damage


def test_damage_of_the_checkpoint_is_named(
    run: MadeRun, nats_server: NatsServer, s3_server: S3Server, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for damage in (*DAMAGES, "folder"):
        path = damaged_copy(run, str(run.state_file.relative_to(run.folder)), damage, tmp_path / damage / RUN)
        assert str(path) in refusal(run, nats_server, s3_server, capsys, tmp_path / damage), damage


def test_a_group_without_a_pack_is_no_record(run: MadeRun) -> None:
    """A rewritten step that names the number of no pack is refused before a step is replayed."""
    chapters = run.chapters
    step = chapters[1].steps[0]
    groups = (step.groups[0], step.groups[1].model_copy(update={"pack": 1}))
    broken = chapters[1].model_copy(update={"steps": (step.model_copy(update={"groups": groups}),)})
    record = replace(StoredRecord.read(RUN, run.state.record, run.blobs.get), chapters=(chapters[0], broken))
    with pytest.raises(RecordBroken, match=f"chapter 2: step 2 names no pack for group {groups[1].group_id}"):
        record._check()


@pytest.mark.parametrize("threads", ["", "x", "0", "-1", "1e9", "99999999999", "²"])
def test_a_number_of_threads_that_is_none_is_named(run: MadeRun, threads: str) -> None:
    session: RecordedSession = run.chapters[0].lives[0]
    with pytest.raises(RecordBroken, match="session of epoch 1 records"):
        _num_threads(session.model_copy(update={"environment": {"threads": threads}}))


@pytest.mark.parametrize("line", ["[]", "null", "[" * 100_000, "{", '{"kind": "step", "step": []}'])
def test_metrics_that_cannot_be_read_explain_nothing(line: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "step", "step": 1, "loss": 1.0}\n' + line)
    assert len(figure_differences(path, 1, {"loss": 2.0})) in {0, 1}


@pytest.mark.parametrize("document", [{}, {"scaling": 1}, {"scaling": {"x": 1}}, {"scaling": {}, "norm": None}])
def test_a_state_of_the_algorithm_that_cannot_be_read_is_named(document: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=r"algorithm state: .*state\.json was changed, restore it"):
        AlgorithmState.resumed(AlgorithmSettings(), {"schema_tag": "algorithm_state.v1", **document})
