"""An audit of a damaged or rewritten run ends with a report that names what is wrong."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console
from tests.forensics.audit import made_run
from tests.forensics.audit.made_run import DAMAGES, DROPPED, EVALUATED, LISTED, NUM_STEPS, MadeRun, damaged, trained

from penstock.deploy.processes.servers import NatsServer, S3Server
from penstock.forensics.audit.audit import show
from penstock.forensics.audit.audit_checks import AuditResult
from penstock.forensics.audit.record_checks import ReportedSteps, check_steps, from_events
from penstock.protocol import blob_keys, streams
from penstock.protocol.groups import BlobRef
from penstock.protocol.record.lineage import MAX_LISTED, LineageChapter, RecordedStep
from penstock.protocol.transport.bus import Bus

RUN = "damaged"
Chapters = list[LineageChapter]


@pytest.fixture(scope="module")
def run(nats_server: NatsServer, s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MadeRun]:
    with made_run.stored_run(RUN, nats_server, s3_server, tmp_path_factory.mktemp("damaged")) as run:
        yield run


def text_of(result: AuditResult) -> str:
    """All that the command prints, in either form."""
    console = Console(file=io.StringIO(), width=1000)
    show(result, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue() + json.dumps(result.to_document())


def found(result: AuditResult) -> set[tuple[str, str]]:
    return {(breach.kind, breach.group_id) for breach in result.breaches}


def test_the_run_is_whole(run: MadeRun) -> None:
    """Undamaged, its accounting balances, every step is compared with two reports, and every pack is verified."""
    result = run.audit()
    assert result.closes, result.breaches
    assert result.notes == ()
    train, held_out = result.splits
    assert (train.issued, train.used, train.dropped, train.in_flight) == (11, 8, {"stale": 1}, {"tasks": 2})
    assert held_out.used == 1


@pytest.mark.parametrize(
    "name",
    [
        *("chapter 1", "chapter 2", f"chapter {NUM_STEPS}", "settings", "task list"),
        *("pack of step1", f"pack of step{NUM_STEPS}", "pack of dropped", "pack of evaluated"),
    ],
)
def test_damage_of_an_object_is_named(run: MadeRun, name: str) -> None:
    """Every object that an audit reads: the report names its key, and its groups for a pack; exit status 1.

    Only the packs of dropped and evaluated groups may be missing: retention deletes them, and a note says so.
    """
    key = run.objects[name]
    groups = {
        "pack of dropped": DROPPED,
        "pack of evaluated": EVALUATED,
        "pack of step1": trained(1)[1],
        "task list": LISTED,
    }
    for damage in damaged(run, key):
        result = run.audit()
        text = text_of(result)
        if damage == "delete" and name in {"pack of dropped", "pack of evaluated"}:
            assert result.closes, result.breaches
            assert "1 packs of evaluated or dropped groups are not stored any more" in text
            continue
        assert not result.closes, damage
        assert key in text, damage
        assert groups.get(name, "") in text, damage
        if name.startswith("pack"):
            assert {kind for kind, _ in found(result)} == {"pack missing" if damage == "delete" else "pack altered"}


@pytest.mark.parametrize("damage", [*DAMAGES, "folder"])
@pytest.mark.parametrize("name", ["state.json", "metrics.jsonl"])
def test_damage_of_a_file_is_named(run: MadeRun, name: str, damage: str, tmp_path: Path) -> None:
    """Each file of the run's folder that an audit reads; a metrics file that is shorter or missing is a note."""
    file = name if name == "metrics.jsonl" else str(run.state_file.relative_to(run.folder))
    path = made_run.damaged_copy(run, file, damage, tmp_path / "run")
    result = run.audit(folder=tmp_path / "run")
    assert str(path) in text_of(result)
    assert result.closes == (name == "metrics.jsonl")


@pytest.mark.parametrize("value", [b"", b"\xff", b"\x91" * 1000, None, "chapter", "key"])
def test_damage_of_the_checkpoint_key_is_named(run: MadeRun, value: bytes | str | None) -> None:
    bucket = run.bus.key_value(streams.state_bucket(RUN).bucket).wait()
    data = made_run.pointer(run, {})
    if value == "chapter":
        value = made_run.pointer(run, {"chapter": NUM_STEPS - 2})
    elif value == "key":
        value = made_run.pointer(run, {"step": 7})
    assert not isinstance(value, str)
    if value is None:
        bucket.delete(streams.CHECKPOINT_KEY).wait()
    else:
        bucket.put(streams.CHECKPOINT_KEY, value).wait()
    try:
        result = run.audit()
    finally:
        bucket.put(streams.CHECKPOINT_KEY, data).wait()
    assert not result.closes
    assert "checkpoint" in next(iter(found(result)))[0]


@pytest.mark.parametrize("stage", ["tasks", "generated", "scored", "dead", "events"])
def test_a_missing_stream_is_named(run: MadeRun, bus: Bus, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue or dead letters without their stream are a violation, missing events are a note."""
    read = bus.read_stream
    missing = f"{RUN}-{stage}"
    monkeypatch.setattr(run.bus, "read_stream", lambda name, *more: read(name + "x" * (name == missing), *more))
    result = run.audit()
    assert f"no stream {missing}x that can be read" in text_of(result)
    assert result.closes == (stage == "events")


def swap_rewards(chapters: Chapters) -> Chapters:
    return with_step(chapters, 2, lambda step: with_rewards(step, 1, (1.0, 0.0)))


def with_step(chapters: Chapters, number: int, edit: Callable[[RecordedStep], RecordedStep]) -> Chapters:
    chapter = chapters[number - 1]
    changed = chapter.model_copy(update={"steps": tuple(edit(step) for step in chapter.steps)})
    return [*chapters[: number - 1], changed, *chapters[number:]]


def with_rewards(step: RecordedStep, place: int, rewards: tuple[float, ...]) -> RecordedStep:
    groups = list(step.groups)
    scored = groups[place].scored.model_copy(update={"rewards": rewards})
    groups[place] = groups[place].model_copy(update={"scored": scored})
    return step.model_copy(update={"groups": tuple(groups)})


def with_a_second_use(step: RecordedStep) -> RecordedStep:
    first, *others = step.groups
    return step.model_copy(update={"groups": (first.model_copy(update={"use": 2}), *others)})


def with_content_of(step: RecordedStep, other: RecordedStep) -> RecordedStep:
    return step.model_copy(update={"packs": other.packs, "groups": other.groups})


def swap_steps(chapters: Chapters) -> Chapters:
    second, third = chapters[1].steps[0], chapters[2].steps[0]
    swapped = with_step(chapters, 2, lambda step: with_content_of(step, third))
    return with_step(swapped, 3, lambda step: with_content_of(step, second))


def end_earlier(chapters: Chapters) -> Chapters:
    return chapters[:-1]


def remove_second(chapters: Chapters) -> Chapters:
    third, fourth = chapters[2].steps[0], chapters[3].steps[0]
    moved = with_step(chapters, 2, lambda step: with_content_of(step, third))
    return with_step(moved, 3, lambda step: with_content_of(step, fourth))[:-1]


def add_step(chapters: Chapters) -> Chapters:
    last = chapters[-1]
    number = last.step + 1
    step = last.steps[0].model_copy(update={"step": number, "trained_version": number - 1, "made_version": number})
    more = {"number": number, "step": number, "version": number, "steps": (step,), "issued": {}}
    return [*chapters, last.model_copy(update=more)]


EDITS: dict[str, tuple[Callable[[Chapters], Chapters], str, str, str]] = {
    "a flipped reward": (swap_rewards, "differs from its report", trained(2)[1], "step 2, {source}, place 2"),
    "another order of the groups": (
        lambda c: with_step(c, 2, lambda s: s.model_copy(update={"groups": s.groups[::-1]})),
        "differs from its report", trained(2)[0], "step 2, {source}, place 2: it was trained at place 1",
    ),
    "a removed group": (
        lambda c: with_step(c, 2, lambda s: s.model_copy(update={"groups": s.groups[:1]})),
        "differs from its report", "", "step 2, {source}: 2 groups were trained, 1 are recorded; not recorded: place 2",
    ),
    "another number of the use": (
        lambda c: with_step(c, 2, with_a_second_use),
        "differs from its report", trained(2)[0], "step 2, {source}, place 1",
    ),
    "another version": (
        lambda c: with_step(c, 2, lambda s: s.model_copy(update={"trained_version": 0})),
        "differs from its report", "", "step 2, {source}: another epoch, version",
    ),
    "two swapped steps": (swap_steps, "differs from its report", trained(3)[0], "step 2, {source}, place 1"),
    "a removed step": (remove_second, "differs from its report", trained(3)[0], "step 2, {source}, place 1"),
}  # fmt: skip


@contextmanager
def forged(run: MadeRun, edit: Callable[[Chapters], Chapters]) -> Iterator[None]:
    """Have the record, state.json and the checkpoint key in NATS rewritten, each consistent, and then as they were."""
    state, named = run.state_file.read_bytes(), made_run.pointer(run, {})
    bucket = run.bus.key_value(streams.state_bucket(RUN).bucket).wait()
    last = edit(run.chapters)[-1]
    with kept_chapters(run):
        end = {"step": last.step, "version": last.version, "chapter": last.number, "record": run.rewrite(edit)}
        altered = made_run.replaced(run, end)
        run.state_file.write_bytes(altered)
        pointer = made_run.pointer(run, {**end, "state_sha256": hashlib.sha256(altered).hexdigest()})
        bucket.put(streams.CHECKPOINT_KEY, pointer).wait()
        try:
            yield
        finally:
            run.state_file.write_bytes(state)
            bucket.put(streams.CHECKPOINT_KEY, named).wait()


@contextmanager
def kept_chapters(run: MadeRun) -> Iterator[None]:
    """Restore the chapters of the record at the end of the block."""
    keys = [key for name, key in run.objects.items() if name.startswith("chapter")]
    objects = {key: run.blobs.get_unverified(key) for key in keys}
    try:
        yield
    finally:
        for key, data in objects.items():
            run.blobs.put(key, data)


@pytest.mark.parametrize("name", EDITS)
def test_a_rewritten_record_differs_from_the_reports_of_its_steps(run: MadeRun, name: str, tmp_path: Path) -> None:
    """With every hash forged, up to the key in NATS, the event and the line of metrics name step and group."""
    edit, kind, group_id, detail = EDITS[name]
    with forged(run, edit):
        result, elsewhere = run.audit(), run.audit(folder=tmp_path)
    for audit, sources in ((result, ("its event", "metrics.jsonl")), (elsewhere, ("its event",))):
        details = [b.detail for b in audit.breaches if (b.kind, b.group_id) == (kind, group_id)]
        for source in sources:
            assert any(detail.format(source=source) in one for one in details), (source, audit.breaches)
    assert not {kind for kind, _ in found(result)} & {"record altered", "checkpoint altered"}


def test_a_flipped_reward_or_another_order_is_seen_by_the_reports_alone(run: MadeRun) -> None:
    """No other check sees them once the hashes are forged: the accounting by itself balances."""
    for name in ("a flipped reward", "another order of the groups"):
        with forged(run, EDITS[name][0]):
            assert {kind for kind, _ in found(run.audit())} == {"differs from its report"}


def test_another_valid_pack_of_the_same_group_differs(run: MadeRun) -> None:
    """The digest contains the pack's sha256: tokens that were not trained are found."""
    other = run.pack("other", trained(2), 1, seed=99)
    with forged(run, lambda c: with_step(c, 2, lambda s: s.model_copy(update={"packs": (other[0].pack,)}))):
        result = run.audit()
        run.blobs.delete([run.objects.pop("pack of other")])
    assert found(result) == {("differs from its report", group_id) for group_id in trained(2)}


def test_a_removed_and_an_added_last_step_differ_from_the_metrics(run: MadeRun) -> None:
    for edit, kind, step in ((end_earlier, "reported but not recorded", 4), (add_step, "recorded but not reported", 5)):
        with forged(run, edit):
            breaches = run.audit().breaches
        assert any(b.kind == kind and f"step {step} " in b.detail for b in breaches), breaches


def test_a_record_that_only_the_object_store_was_forged_in(run: MadeRun, tmp_path: Path) -> None:
    """Without rights in NATS the end has another sha256; the altered chapters are read on, and the group is named."""
    with kept_chapters(run):
        run.rewrite(swap_rewards)
        results = [run.audit(), run.audit(folder=tmp_path)]
    for result in results:
        assert {("record altered", ""), ("differs from its report", trained(2)[1])} == found(result)
        assert run.objects["chapter 4"] in text_of(result)


def test_a_forged_chapter_names_what_it_must_not(run: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parent that comes later ends the reading, as does an object that grew; a chapter of another run is named."""
    key = run.objects["chapter 1"]
    first = run.chapters[0]
    cases = {
        "chapter 4 is chapter 4, and chapter 1 names it as its parent": {"parent": run.state.record},
        f"{key} is a chapter of run other": {"run_id": "other"},
    }
    for expected, update in cases.items():
        with kept_chapters(run):
            run.blobs.put(key, made_run.encode_unbounded(first.model_copy(update=update)))
            result = run.audit()
        assert expected.replace("chapter 4 is", f"{run.objects['chapter 4']} is") in text_of(result)
    with kept_chapters(run), monkeypatch.context() as patch:
        run.blobs.put(key, run.blobs.get_unverified(key) + bytes(2**21))
        patch.setattr(run.blobs, "get_unverified", pytest.fail)
        assert key in text_of(run.audit())


@pytest.mark.parametrize("key", ["x", "runs/../groups/x", "runs/a/b/groups/x", "runs/\x00/groups/x", "/" * 300])
def test_a_recorded_pack_of_any_key_is_reported(run: MadeRun, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that no pack has are missing objects, and not asked for; a number beyond the list of packs is unclear."""
    listed, list_objects = set[str](), run.blobs.list
    monkeypatch.setattr(run.blobs, "list", lambda prefix: (listed.add(prefix), list_objects(prefix))[1])
    hostile = BlobRef(key=key, size_bytes=1, sha256="0" * 64)
    with forged(run, lambda c: with_step(c, 2, lambda s: s.model_copy(update={"packs": (hostile,)}))):
        assert ("pack missing", trained(2)[0]) in found(run.audit())
    assert listed <= {blob_keys.groups_prefix(RUN), blob_keys.groups_prefix("x")}  # ids that a run can have
    with forged(run, lambda c: [c[0], c[1].model_copy(update={"closed_packs": (hostile,)}), *c[2:]]):
        assert {("pack unclear", EVALUATED)} == found(run.audit())


def test_a_forged_checkpoint_one_ahead_of_nats(run: MadeRun) -> None:
    """The folder may be one ahead of NATS, as after a crash between the two, only if it continues what NATS names."""
    nothing = {"steps": (), "issued": {}, "number": NUM_STEPS + 1}
    state = run.state_file.read_bytes()
    for forged, chapters in ((False, run.chapters), (True, swap_rewards(run.chapters))):
        ahead = [*chapters, chapters[-1].model_copy(update=nothing)]
        parent = run.state.record
        keys = []
        if forged:
            parent = None
            for chapter in chapters:
                keys.append(f"{run.objects['chapter 1']}.f{chapter.number}")
                data = made_run.encode_unbounded(chapter.model_copy(update={"parent": parent}))
                parent = run.blobs.put(keys[-1], data)
        keys.append(f"{run.objects['chapter 1']}.ahead")
        end = run.blobs.put(keys[-1], made_run.encode_unbounded(ahead[-1].model_copy(update={"parent": parent})))
        run.state_file.write_bytes(made_run.replaced(run, {"chapter": NUM_STEPS + 1, "record": end}))
        try:
            result = run.audit()
        finally:
            run.state_file.write_bytes(state)
            run.blobs.delete(keys)
        assert result.closes != forged, result.breaches
        assert (("checkpoint ahead of NATS", "") in found(result)) == forged


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rewards_that_are_no_numbers_are_no_record(run: MadeRun, value: float) -> None:
    """A chapter with such a reward does not decode; its key and field are named."""
    with forged(run, lambda c: c):
        run.rewrite(lambda c: with_step(c, 4, lambda s: with_rewards(s, 0, (value, 0.0))))
        result = run.audit()
    text = text_of(result)
    assert not result.closes
    assert run.objects["chapter 4"] in text
    assert "rewards" in text


def test_a_forged_event_hides_nothing(run: MadeRun) -> None:
    """Every role may publish events: one that agrees with a forged record does not undo the trainer's own."""
    forged = [step for chapter in swap_rewards(run.chapters) for step in chapter.steps][1]
    digests = [made_run.group_digest(group.scored, forged.packs[group.pack], 1) for group in forged.groups]
    agrees = made_run.step_digest(1, 2, 1, 2, digests)
    (reported,) = from_events(RUN, run.bus).digests[2]
    both = ReportedSteps("its event", {2: [agrees, reported]})
    assert [breach.group_id for breach in check_steps([forged], [both])[0]] == [trained(2)[1]]
    assert check_steps([forged], [ReportedSteps("its event", {2: [agrees]})])[0] == []


def test_a_step_of_an_older_build_is_noted(run: MadeRun) -> None:
    """A report without a digest is no witness and no violation; a large step reports only the sha256 of all groups."""
    steps = [step for chapter in run.chapters for step in chapter.steps]
    older = ReportedSteps("metrics.jsonl", steps=frozenset(range(1, NUM_STEPS + 1)), is_exact=True)
    breaches, notes = check_steps(steps, [older])
    assert breaches == []
    assert notes[0].startswith("4 of 4 steps have no digest in an event or metrics.jsonl")
    large = made_run.step_digest(1, 1, 0, 1, ["0" * 64] * (MAX_LISTED + 1))
    assert large.listed() == []
    assert [breach.group_id for breach in check_steps(steps[:1], [ReportedSteps("m", {1: [large]})])[0]] == [""]
