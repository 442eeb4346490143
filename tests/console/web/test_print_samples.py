"""`penstock samples` reads a run whose servers are stopped from the files of its store, as the page and `penstock lineage` do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.console.web.conftest import Shown
from tests.console.web.shown_run import DROPPED, EPISODES, EVALUATED, GROUP_SIZE

from penstock.console.cli.main import run as penstock
from penstock.console.cli.print_samples import as_roles
from penstock.console.connections import NamedRun
from penstock.console.record.stored_run import StoreFiles
from penstock.console.web.reading.recorded_groups import TrajectoryQuery
from penstock.console.web.reading.run_reading import RunReading
from penstock.protocol import blob_keys
from penstock.protocol.config.connection import S3Settings
from penstock.protocol.errors import BlobCorrupt, BlobMissing
from penstock.protocol.record.checkpoint_state import STATE_FILE, CheckpointState, folder_name
from penstock.protocol.record.lineage import AccountState


@pytest.fixture(scope="module")
def ended(shown: Shown, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The shown run as a local one that has ended: its objects as files, its newest checkpoint, no server."""
    run, runs = shown.plain, tmp_path_factory.mktemp("ended")
    for stat in run.blobs.list(blob_keys.run_prefix(run.run_id)):
        path = runs / run.run_id / "store" / "objects" / "penstock" / stat.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(run.blobs.get_unverified(stat.key))
    assert run.end is not None
    state = CheckpointState(
        run_id=run.run_id, epoch=1, step=30, version=30, weights_digest="0" * 64, weights_dtype="float32", ledger=(), dispatch={},
        totals={}, account=AccountState(), metrics_bytes=0, record=run.end, chapter=3,
    )  # fmt: skip
    checkpoint = runs / run.run_id / "checkpoints" / folder_name(30)
    checkpoint.mkdir(parents=True)
    (checkpoint / STATE_FILE).write_text(state.model_dump_json())
    return run.run_id, runs


@pytest.mark.parametrize(
    ("options", "groups", "rewards"),
    [
        ("--step 7", {"e0.p21.a0", "e0.p22.a0", "e0.p23.a0"}, {0.0, 1.0}),
        ("--prompt 22 --reward-max 0.5", {"e0.p22.a0"}, {0.0}),
        ("--version 6 --limit 3 --reward-min 1", {"e0.p21.a0", "e0.p22.a0"}, {1.0}),
        ("--step 1 --search LOOK", {EPISODES}, {0.0, 1.0}),
        ("--dropped stale --split train", {DROPPED}, {None}),
        ("--split eval", {EVALUATED}, {None}),
        ("--dropped no_signal", set(), set()),
    ],
)
def test_samples_are_filtered(
    options: str, groups: set[str], rewards: set[float], ended: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code = penstock(["samples", ended[0], *options.split(), "--json", f"run.dir={ended[1]}"])
    rows = json.loads(capsys.readouterr().out)
    assert ({row["group_id"] for row in rows}, code) == (groups, 0 if groups else 1)
    assert {row["reward"] for row in rows} == rewards


def test_a_group_is_printed_with_its_dialogue_and_a_dropped_one_with_the_reason(
    ended: tuple[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for group, texts in {
        EPISODES: ("user: look up 37", "assistant: 82", "reward 1.000  correct"),
        DROPPED: ("dropped (stale: older than rollout.max_staleness", f"#{GROUP_SIZE - 1}  no recorded reward"),
    }.items():
        assert penstock(["samples", ended[0], "--group", group, f"run.dir={ended[1]}"]) == 0
        shown = capsys.readouterr().out
        assert [text for text in texts if text not in shown] == []
    assert penstock(["samples", ended[0], f"run.dir={ended[1]}"]) == 0
    assert penstock(["lineage", ended[0], "--version", "7", f"run.dir={ended[1]}"]) == 0


def test_the_page_lists_an_ended_run_and_an_altered_file_is_named(ended: tuple[str, Path], shown: Shown) -> None:
    run_id, runs = ended
    reading = RunReading(NamedRun(run_id, [f"run.dir={runs}"], {}))
    with reading.groups() as groups:
        assert len(groups.page(TrajectoryQuery(limit=5))["items"]) >= 5
    files = StoreFiles(runs / run_id / "store", S3Settings())
    reference = next(iter(shown.plain.blobs.list(blob_keys.run_prefix(run_id))))
    assert next(files.list(blob_keys.run_prefix(run_id))).key == reference.key
    assert shown.plain.end is not None
    path = runs / run_id / "store" / "objects" / "penstock" / shown.plain.end.key
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(BlobCorrupt, match="does not match its message"):
        files.get(shown.plain.end)
    secret = runs / run_id / "store" / "secret"
    secret.write_bytes(data)
    path.unlink()
    path.symlink_to(secret)
    for key in (shown.plain.end.key, "../../secret"):
        with pytest.raises(BlobMissing):
            files.get(shown.plain.end.model_copy(update={"key": key}))


def test_marks_of_chat_templates_are_shown_as_roles() -> None:
    chatml = "<|im_start|>user\nsort 21<|im_end|>\n<|im_start|>assistant\n"
    assert as_roles(chatml) == "user: sort 21\nassistant:"
