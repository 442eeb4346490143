"""A run that crashed, resumed and was changed is replayed from its record; later alterations are reported."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tests.forensics.conftest import RUN, StoredRun
from tests.weights_source import read_version
from transformers import AutoModelForCausalLM

from penstock.deploy.certificates import signing_key
from penstock.deploy.quickstart_task import write_model
from penstock.forensics.replay.replay_findings import differing_updates, signed_versions
from penstock.protocol import blob_keys
from penstock.protocol.groups import BlobRef
from penstock.protocol.packs import group_pack, step_logprobs
from penstock.protocol.record.lineage import RecordedStep
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.signature import TrustedKeys

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_every_version_is_identical(run: StoredRun) -> None:
    """A replay reproduces the digests of three sessions, through a crash, a resume and a change of settings."""
    record = run.record
    assert [life.step for life in record.sessions] == [0, 3, 7]
    verdict = run.replay("--trusted-keys", str(run.folder / "keys" / "signing.pem"))
    assert verdict["difference"] is None
    assert verdict["findings"] == []
    assert verdict["surroundings"] == []
    assert [line.split(": ", 1)[1] for line in verdict["drift"]] == ["trainer.steps = 7, recorded 9"]
    assert verdict["num_steps"] == 9
    assert verdict["num_signed"] >= 1  # the others were removed by trainer.keep_versions
    assert verdict["same"][-1] == record.last_version
    assert len(set(verdict["same"])) == len(verdict["same"])
    assert set(verdict["same"]) == {s.made_version for s in record.steps} | {life.version for life in record.sessions}


def test_stored_versions_are_those_that_a_trusted_key_has_signed(run: StoredRun, tmp_path: Path) -> None:
    """Every version that is still stored counts; a stranger's key, another root and an unsigned copy are findings."""
    step = run.record.steps[-1]
    own = TrustedKeys.from_file(run.folder / "keys" / "signing.pem", "x")
    newest = {step.made_version: step.weights_digest}
    assert signed_versions(RUN, {**newest, 9999: "0" * 64}, run.blobs, own) == (1, [])
    stranger = TrustedKeys.from_file(signing_key(tmp_path)[1], "x")
    num_signed, (finding,) = signed_versions(RUN, newest, run.blobs, stranger)
    assert num_signed == 0
    assert f"version {step.made_version}: no stored manifest is trusted" in finding
    assert "signed by key" in finding
    num_signed, (finding,) = signed_versions(RUN, {step.made_version: "0" * 64}, run.blobs, own)
    assert num_signed == 0
    assert "replayed 0000000000000000" in finding


def test_the_record_agrees_with_the_report_of_every_step(run: StoredRun) -> None:
    """Through a crash, second uses and changed settings, an audit finds each step's digest in its event and metrics."""
    audit = json.loads(run.console("audit", "--json"))
    assert audit["breaches"] == []
    assert audit["notes"] == []
    assert any(group.use > 1 for step in run.record.steps for group in step.groups)
    dropped = [drop for chapter in run.record.chapters for drop in chapter.dropped if drop.reason == "no_signal"]
    assert dropped
    assert all(drop.pack is not None for drop in dropped)


def test_the_optimizer_steps_of_a_batch_are_recorded(run: StoredRun) -> None:
    """Two passes by two mini-batches of whole groups; the batch that a kill interrupted was trained again from the start."""
    *before, eighth, ninth = run.record.steps
    assert {step.updates for step in before} == {()}
    assert eighth.updates != ninth.updates
    lines = [json.loads(line) for line in (run.home / "metrics.jsonl").read_text().splitlines()]
    reports = {line["step"]: line for line in lines if line["kind"] == "step"}
    for step in (eighth, ninth):
        first, second = step.updates[:2], step.updates[2:]
        assert sorted(place for places in first for place in places) == [0, 1, 2, 3]
        assert sorted(first) == sorted(second)
        report = reports[step.step]
        assert report["updates"] == 4
        assert len(report["clip_fraction_by_pass"]) == 2
        assert 0.0 < report["kl_proximal_by_pass"][0] < report["kl_proximal_by_pass"][1]
        assert report["tokens_trained"] == sum(group.num_tokens for group in step.groups)
    assert "updates" not in reports[7]
    shown = run.console("lineage", "--version", str(ninth.made_version))
    assert "4 optimizer steps, on 2, 2, 2, 2 groups" in shown


def test_other_outlier_steps_than_recorded_are_reported(run: StoredRun) -> None:
    """A replay that leaves out others says so; numbers of optimizer steps that were not made are no record."""
    step = run.record.steps[-1]
    last = step.model_copy(update={"left_out": (1, 3)})
    assert differing_updates(last, last.updates, (1, 3)) == []
    (finding,) = differing_updates(last, last.updates)
    assert finding == "step 9: the replay left out the optimizer steps [], recorded [1, 3]; restore the record"
    for numbers in ((4,), (1, 0), (1, 1)):
        with pytest.raises(ValidationError, match="were left out, expected ascending numbers below 4"):
            RecordedStep.model_validate({**dict(step), "left_out": numbers})


def test_the_stored_log_probabilities_are_those_of_the_weights_before_the_step(run: StoredRun) -> None:
    """One object for every recorded step; its values are those of a forward pass of the published weights.

    The first session was killed, perhaps with writes under way.
    """
    listed = {one.key.rpartition("/")[0] + "/": one for one in run.blobs.list(blob_keys.logprobs_prefix(RUN))}
    assert [step.step for step in run.record.steps if step.epoch > run.record.steps[0].epoch] == [4, 5, 6, 7, 8, 9]
    for step in run.record.steps[3:]:
        stat = listed[blob_keys.step_logprobs_prefix(RUN, step.step, step.epoch)]
        sha256 = stat.key.rpartition("/")[2].removesuffix(".safetensors")
        data = run.blobs.get(BlobRef(key=stat.key, size_bytes=stat.size_bytes, sha256=sha256))
        found = step_logprobs.decode(data, run_id=RUN, step=step.step)
        assert (found.header.trained_version, found.header.made_version) == (step.trained_version, step.made_version)
        assert sorted(one.group_id for one in found.header.groups) == sorted(group.group_id for group in step.groups)
        assert len(found.logprobs) == sum(group.num_tokens for group in step.groups)
        if step.step != 7:  # the last one with a single optimizer step; its weights are still published
            continue
        model = AutoModelForCausalLM.from_pretrained(run.folder / "model").eval()
        prefix = blob_keys.weights_prefix(RUN, PolicyVersion(step.trained_version))
        (manifest,) = [one for one in run.blobs.list(prefix) if one.key.endswith("/manifest.json")]
        digest = hashlib.sha256(run.blobs.get_unverified(manifest.key)).hexdigest()
        reference = BlobRef(key=manifest.key, size_bytes=manifest.size_bytes, sha256=digest)
        model.load_state_dict(read_version(run.blobs, RUN, step.trained_version, reference), strict=False)
        for group in step.groups:
            pack = step.packs[group.pack]
            (whole,) = group_pack.decode(run.blobs.get(pack), [group.scored.generated.row_group])
            rows = found.group(group.group_id, pack.sha256)
            assert rows is not None
            for number, row in rows.items():
                ids = torch.tensor(whole.trajectories[number].token_ids, dtype=torch.int64)
                where = np.flatnonzero(whole.trajectories[number].loss_mask)
                with torch.no_grad():
                    scores = model(ids[None]).logits[0].float().log_softmax(-1)[where - 1, ids[where]]
                assert row.logprobs.tolist() == pytest.approx(scores.tolist(), abs=1e-5)


def test_optimizer_steps_on_other_groups_are_reported(run: StoredRun) -> None:
    """A replay names the first one that differs from the record; one on a group that the step does not have is no record."""
    step = run.record.steps[-1]
    first, *others = step.updates
    changed = step.model_copy(update={"updates": (first,)})
    assert differing_updates(step, step.updates) == []
    assert differing_updates(changed, step.updates) == [
        f"step 9, optimizer step 2: replayed groups {list(others[0])}, recorded none; restore the record"
    ]
    for places in ((0, 4), (1, 0), (1, 1), ()):
        with pytest.raises(ValidationError, match=r"updates|an optimizer step on the groups"):
            RecordedStep.model_validate({**dict(step), "updates": (places,)})


def test_a_version_is_traced_back_to_the_first(run: StoredRun) -> None:
    """`lineage` shows its groups with prompts, rewards and scorers, and every version before it."""
    record = run.record
    link_json = json.loads(run.console("lineage", "--json"))
    versions = {step.made_version for step in record.steps} | {life.version for life in record.sessions}
    assert [link["version"] for link in link_json["chain"]] == sorted(versions, reverse=True)
    assert [link["step"] for link in link_json["chain"] if link["step"]] == [9, 8, 7, 6, 5, 4, 3, 2, 1]
    assert [group["group_id"] for group in link_json["groups"]] == [g.group_id for g in record.steps[-1].groups]
    assert link_json["scorers"] == {"producer": 36}
    assert link_json["environment"]["threads"] == "1"
    for group, recorded in zip(link_json["groups"], record.steps[-1].groups, strict=True):
        assert group["rewards"] == list(recorded.scored.rewards)
        assert "sort " in group["prompt_text"]
        assert len(group["completions"]) == 4
    shown = run.console("lineage", "--version", str(record.steps[4].made_version))
    assert f"step 5 on version {record.steps[4].trained_version}" in shown
    assert "the initial model" in shown
    assert "no version 99" in run.console("lineage", "--version", "99", expected=1)


def test_a_group_is_traced_from_its_issue(run: StoredRun) -> None:
    """`lineage` shows each step that used a group, or why it was dropped; an unknown id is an error."""
    record = run.record
    group = record.steps[2].groups[0].group_id
    link_json = json.loads(run.console("lineage", "--group", group, "--json"))
    assert [use["step"] for use in link_json["uses"]] == [use.step.step for use in record.uses_of(group)]
    assert link_json["dropped"] is None
    dropped = [drop for chapter in record.chapters for drop in chapter.dropped if drop.reason == "no_signal"]
    assert dropped
    assert json.loads(run.console("lineage", "--group", dropped[0].group_id, "--json"))["dropped"] == "no_signal"
    assert "no group e9.p9.a9" in run.console("lineage", "--group", "e9.p9.a9", expected=1)


def test_a_part_is_replayed_from_a_stored_checkpoint(run: StoredRun) -> None:
    record = run.record
    last = record.last_version
    verdict = run.replay("--from", str(last - 1), "--to", str(last))
    assert verdict["began_from"] == "the checkpoint step00000007"
    assert verdict["same"] == [s.made_version for s in record.steps if s.step >= 7] + [
        life.version for life in record.sessions if life.step == 7 and life.version != record.steps[6].made_version
    ]
    assert "no version 99 in its record" in run.refusal("--to", "99", expected=1)


@contextmanager
def altered(run: StoredRun, blob: BlobRef, edit: Callable[[bytes], bytes]) -> Iterator[None]:
    """Have a stored object replaced by what `edit` makes of it, or deleted where that is empty, and then as it was."""
    data = run.blobs.get(blob)
    if other := edit(data):
        run.blobs.put(blob.key, other)
    else:
        run.blobs.delete([blob.key])
    try:
        yield
    finally:
        run.blobs.put(blob.key, data)


def test_an_altered_pack_is_reported(run: StoredRun) -> None:
    """One flipped bit of a stored group ends the replay at the step that used it, after the versions before it."""
    step = run.record.steps[4]
    pack = step.packs[0]
    with altered(run, pack, lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:]):
        verdict = run.replay(expected=1)
    assert len(verdict["findings"]) == 1
    assert "step " in verdict["findings"][0]
    assert pack.key in verdict["findings"][0]
    assert verdict["same"][-1] < step.made_version


def test_a_missing_pack_is_reported_before_training(run: StoredRun) -> None:
    pack = run.record.steps[-1].packs[0]
    with altered(run, pack, lambda _: b""):
        verdict = run.replay(expected=1)
    assert [pack.key in line and "needs its groups e0.p" in line for line in verdict["findings"]] == [True]
    assert verdict["num_steps"] == 0


def test_an_altered_record_is_reported(run: StoredRun) -> None:
    """A chapter that was rewritten does not have the hash that the next chapter names."""
    second = run.record.chapters[1].parent
    assert second is not None
    with altered(run, second, lambda data: data.replace(b"replayed", b"rewriten")):
        assert second.key in run.refusal(expected=1)


def test_changed_settings_are_reported(run: StoredRun) -> None:
    """The replay uses the settings of the record, and reports the key in which config.json differs."""
    path = run.home / "config.json"
    kept = path.read_text()
    path.write_text(kept.replace('"lr": 0.001', '"lr": 0.002', 1))
    try:
        verdict = run.replay("--to", "2", expected=1)
    finally:
        path.write_text(kept)
    assert verdict["difference"] is None
    assert len(verdict["findings"]) == 1
    assert "= 0.002, recorded 0.001" in verdict["findings"][0]


def test_recorded_settings_cannot_be_overridden(run: StoredRun) -> None:
    assert "trainer.lr cannot be set" in run.refusal("trainer.lr=1", expected=2)


def test_another_model_differs_in_the_first_version(run: StoredRun) -> None:
    write_model(run.folder / "other", seed=1)
    try:
        verdict = run.replay("--model", str(run.folder / "other"), expected=1)
    finally:
        shutil.rmtree(run.folder / "other")
    assert verdict["difference"]["version"] == 0
    assert verdict["difference"]["step"] is None
    assert verdict["same"] == []
