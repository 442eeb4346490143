"""Messages, files and answers that cannot be read: every reader skips them, counts them, and shows the rest."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats
import pytest
from markdown_it import MarkdownIt

from penstock.console import connections
from penstock.console.cli.main import run
from penstock.console.connections import NamedRun
from penstock.console.live.frame import render
from penstock.console.live.panel import PlainLines
from penstock.console.live.run_view import RunView
from penstock.console.live.watcher import Watcher
from penstock.console.report import curves, report
from penstock.console.terminal import indented, markdown, one_line
from penstock.console.tools.dead_letters import DeadLetters, RunProgress, UnknownLetter, print_list
from penstock.console.tools.removal import running_services
from penstock.console.tools.reward_errors import print_errors
from penstock.console.tools.runs import describe, list_broker
from penstock.deploy.processes.servers import NatsServer
from penstock.forensics.audit.audit import audit_run
from penstock.forensics.audit.audit_checks import LETTERS, AuditInputs, check_record
from penstock.forensics.audit.audit_inputs import gather
from penstock.protocol import seals, streams, subjects
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.errors import ConfigError, MalformedFact
from penstock.protocol.facts import Heartbeat, RunEvent, decode, encode, encode_unbounded
from penstock.protocol.process_end import printable
from penstock.protocol.streams import StreamSpec
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from tests.console.command import server_arguments
from tests.console.record import recorded_run as recorded
from tests.forensics.audit.test_audit_checks import chapters

INF, NAN = float("inf"), float("nan")
VALUES: list[Any] = [
    INF, -INF, NAN, 1e300, -1, 2**63, "x", "", None, True, [], {}, [[]], {"a": {}}, {"x": INF}, b"\xff"
]  # fmt: skip
FIELDS = {
    "step": ["step", "version", "staleness_tokens", "tokens_trained", "groups", "skipped", "scored_by", "reward_mean",
             "loss", "mismatch", "ratio_percentiles", "rejected_by", "reward_parts", "grad_norm", "zero_signal_groups"],
    "eval": ["step", "version", "num_prompts", "accuracy", "split", "name"],
    "state": ["text", "state", "total_steps", "finished"],
    "weights": ["version", "kind", "raw_bytes", "sent_bytes", "density", "publish_s"],
    "reward_error": ["reason", "detail", "group_ids"],
    "log": ["text"],
    "alarm": ["text"]
}  # fmt: skip


def publish_bytes(settings: NatsSettings, messages: list[tuple[str, bytes]]) -> None:
    async def run() -> None:
        client = await nats.connect(settings.url, user=settings.user, password=settings.secret())
        for subject, data in messages:
            await client.jetstream().publish(subject, data)
        await client.close()

    asyncio.run(run())


@pytest.mark.parametrize(("kind", "field"), [(kind, field) for kind, fields in FIELDS.items() for field in fields])
def test_no_value_of_an_event_stops_the_view(kind: str, field: str) -> None:
    """With any value in any field an event is shown, or skipped and counted; what is drawn and summed stays finite."""
    for value in VALUES:
        view = RunView("r")
        view.fold_event(recorded.evaluation(0, 0.5, recorded.START))
        view.fold_event(recorded.step(1, recorded.START + 1))
        before = view.summary()
        data = {**recorded.step(2, 0.0).data, "kind": "patch", field: value}
        view.fold_event(RunEvent(run_id="r", source="trainer", kind=kind, at=recorded.START + 2, data=data))
        snapshot, summary = view.snapshot(recorded.START + 3), view.summary()
        render(snapshot)
        PlainLines(lambda _: None, every=1).show(snapshot, last=True)
        report.markdown(summary, curves.Curves(), next_steps=(), has_plot=False)
        json.loads(summary.to_line(), parse_constant=pytest.fail)
        assert sum(summary.unreadable.values()) in {0, 1}
        if summary.unreadable and kind != "weights":
            assert summary.tokens_trained == before.tokens_trained
            assert f"{kind} event skipped" in snapshot.incidents[-1].text


def test_a_step_of_infinity_is_counted_and_the_next_one_shown() -> None:
    """An event whose step is infinite is counted under its kind with the field; the incident is written once."""
    view = RunView("r")
    for value in (INF, NAN, "seven", 1.5, {}, -1):
        view.fold_event(recorded.event("step", recorded.START, step=value))
    view.fold_event(recorded.step(1, recorded.START + 1, loss=NAN, grad_norm=INF))
    assert list(view.steps) == [1]
    assert view.steps[1].fields.loss is None
    assert "grad_norm" not in view.steps[1].learning
    assert view.summary().unreadable == {"step event": 6}
    (incident,) = view.incidents
    assert incident.text.startswith(
        "step event skipped, it cannot be read: step: Input should be a finite number, from"
    )
    shown = report.markdown(view.summary(), curves.Curves(), next_steps=(), has_plot=False)
    assert "| skipped, not readable: step event | 6 |" in shown


@pytest.mark.parametrize("at", [INF, -INF, NAN, 1e300, -1e300])
def test_times_and_durations_that_are_none_do_not_decode(at: float) -> None:
    """A heartbeat or event whose time is not finite, or beyond any calendar, is malformed, as is such a duration."""
    event = RunEvent.model_construct(run_id="r", source="s", kind="step", at=at, data={})
    with pytest.raises(MalformedFact, match="at:"):
        decode(encode_unbounded(event), RunEvent)
    for more in ({"at": at}, {"busy_s": abs(at)}, {"cpu_s": abs(at)}, {"idle_s": abs(at)}):
        beat = recorded.fleet(1)[0].model_copy(update=more)
        with pytest.raises(MalformedFact):
            decode(encode_unbounded(beat), Heartbeat)


def test_a_watcher_a_listing_and_an_audit_skip_and_count(
    bus: Bus,
    blobs: Blobs,
    run_streams: str,
    nats_settings: NatsSettings,
    s3_settings: S3Settings,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One letter, event, heartbeat, task and key that cannot be read stop no command; each command names the number."""
    run, letter = run_streams, recorded.dead_letter("e0.p1.a0").model_copy(update={"run_id": run_streams})
    hostile = letter.model_copy(update={"reason": "[/red]\x1b]0;owned\x07", "detail": "[bold", "group_ids": ("[/]",)})
    infinite = RunEvent(run_id=run, source="trainer", kind="step", at=1.0, data={"step": INF})
    waiting = RunEvent(run_id=run, source="reward", kind="reward_error", at=1.0, data={"reason": 7, "group_ids": 3})
    publish_bytes(nats_settings, [
        (subjects.dead(run, "generated"), b"\xc1"),
        (subjects.dead(run, "generated"), encode(letter)),
        (subjects.dead(run, "generated"), encode(infinite)),
        (subjects.dead(run, "generated"), encode(hostile)),
        (subjects.events(run, "step"), b"\x92"),
        (subjects.events(run, "step"), encode(infinite)),
        (subjects.events(run, "reward_error"), encode(waiting)),
        (subjects.tasks(run, "train"), b"no task"),
        (subjects.weights_published(run), b"")
    ])  # fmt: skip
    bus.key_value(streams.live_bucket(run).bucket).wait().put("rollout.w0", b"no heartbeat").wait()
    recorded.Services(bus, run).beat(*recorded.fleet(1)[1:3])
    state = bus.key_value(streams.state_bucket(run).bucket).wait()
    state.put(f"{streams.RESENT_KEY}.2", b"[1]").wait()

    view = RunView(run)
    watcher = Watcher(bus, view)
    started = time.monotonic()
    watcher.catch_up(deadline_s=120.0)
    assert time.monotonic() - started < 100.0, "messages that do not decode are not waited for"
    assert view.summary().unreadable == {
        "dead letter": 2, "run event": 1, "step event": 1, "reward_error event": 1, "weights published": 1,
        "heartbeat": 1,
    }  # fmt: skip
    assert view.summary().groups.dead_lettered == {"endpoint_failed": 1, hostile.reason: 1}
    assert {line.service_id for line in view.snapshot(time.time()).services} == {"rollout-1", "reward"}

    given = server_arguments(nats_settings, s3_settings)
    with DeadLetters(NamedRun(run, given, {})) as dead:
        assert [found.number for found in dead.all()] == [2, 4]
        assert set(dead.unreadable) == {1, 3}
        with pytest.raises(
            UnknownLetter, match=r"letter 3 of run .* cannot be read by this build: expected dead_letter"
        ):
            dead.find(3)

    found = gather(run, bus, blobs, tmp_path / "checkpoints", reads_packs=False)
    assert {kind: len(which) for kind, which in found.unreadable.items()} == {LETTERS: 2, "messages of tasks": 1}
    assert check_record(found).closes
    assert any("2 dead letters cannot be read and are left out: number 1 (" in n for n in check_record(found).notes)
    assert running_services(run, bus) == ["reward", "rollout-1", "rollout.w0 (unreadable)"]

    state.put(streams.CHECKPOINT_KEY, b"\xff").wait()
    state.put(streams.HEAD_KEY, b"\xff").wait()
    broken = check_record(gather(run, bus, blobs, tmp_path / "checkpoints", reads_packs=False))
    assert [breach.kind for breach in broken.breaches] == ["checkpoint unreadable"]
    with DeadLetters(NamedRun(run, given, {})) as dead:
        assert dead.progress() == RunProgress()
        assert len(dead.problems) == 2

    capsys.readouterr()
    commands: list[Callable[[], int]] = [
        lambda: print_list(NamedRun(run, given, {}), as_json=False),
        lambda: audit_run(run, given, {}, fast=True, as_json=False),
        lambda: print_errors(NamedRun(run, given, {}), as_json=False),
    ]
    for command in commands:
        command()
        out, err = capsys.readouterr()
        assert "\x1b]" not in out
        assert "cannot be read" in out + err


def test_a_letter_that_may_be_missing_is_no_violation() -> None:
    """While a letter cannot be read, a group dropped as dead without one is not reported; the note says why."""
    complete = check_record(AuditInputs("r", chapters()))
    assert "dropped as dead, without a dead letter" in {breach.kind for breach in complete.breaches}
    unclear = check_record(AuditInputs("r", chapters(), unreadable={LETTERS: ["number 7 (x)"] * 5}))
    assert "dropped as dead, without a dead letter" not in {breach.kind for breach in unclear.breaches}
    assert (
        "5 dead letters cannot be read and are left out: number 7 (x); number 7 (x); number 7 (x); …" in unclear.notes
    )


METRICS = [
    b"\xff\xfe\n", b"[" * 100_000 + b"\n", b'{"step": Infinity, "reward_mean": 1}\n', b"[]\n", b"null\n", b"\0\n",
    b'{"kind": "step", "step": 3, "reward_mean": NaN}\n', b'{"kind": "step", "step": 3, "reward_mean": 1e999}\n',
    b'{"kind": "step", "step": "3", "reward_mean": "x"}\n', b'{"kind": "eval", "step": 3, "accuracy": {}}\n',
    b'{"kind": "step", "step": 3, "reward_mean": 1' + b"0" * 5000 + b"}\n", b'{"kind": "step"',
    b'{"kind": "step", "step": 3, "reward_mean": 1, "reward_parts": [1]}\n',
    b'{"kind": "step", "step": 3, "reward_mean": 1, "reward_parts": {"a": "x", "b": Infinity}}\n'
]  # fmt: skip


@pytest.mark.parametrize("line", METRICS, ids=range(len(METRICS)))
def test_a_line_of_metrics_that_cannot_be_read_is_skipped(line: bytes, tmp_path: Path) -> None:
    """Reports and listings of a run whose metrics have such a line show the others, in finite numbers."""
    recorded.write_metrics(tmp_path)
    whole = curves.read(tmp_path)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(line)
    found = curves.read(tmp_path)
    assert found.accuracies == whole.accuracies
    assert {step: value for step, value in found.rewards if step != 3}.items() <= dict(whole.rewards).items()
    listed = describe(tmp_path)
    json.dumps([listed.step, listed.accuracy, listed.reward], allow_nan=False)
    assert isinstance(listed.step, int)
    assert curves.num_unreadable(tmp_path) == (not line.startswith(b'{"') or b"0000" in line)


def test_files_in_place_of_others_stop_no_listing(tmp_path: Path) -> None:
    """A folder in place of the metrics counts as one unreadable line, and a torn environment file is named."""
    (tmp_path / "metrics.jsonl").mkdir()
    assert list(curves.rows(tmp_path)) == []
    assert curves.num_unreadable(tmp_path) == 1
    for content in (b"export PENSTOCK_NATS__PASSWORD='hunter2\n", b"\xff"):
        seals.write(tmp_path / "environment", content)
        with pytest.raises(ConfigError, match="environment cannot be read") as failed:
            connections.store_environment(tmp_path)
        assert "hunter2" not in str(failed.value)


def test_a_foreign_stream_does_not_hide_the_runs(bus: Bus, run_streams: str, nats_server: NatsServer) -> None:
    """A stream that is named like a run's events, without its buckets, is listed as incomplete beside the runs."""
    name = f"{run_streams}x-events"
    bus.ensure_stream(
        StreamSpec(name=name, subjects=(f"foreign.{run_streams}",), retention="limits", max_msgs=9, max_bytes=1000)
    ).wait()
    try:
        lines = {line.run: line.state for line in list_broker(bus)}
    finally:
        bus.delete_stream(name).wait()
    assert lines[f"{run_streams}x"] == "incomplete"
    assert lines[run_streams] == "idle"


MARKS = (  # of direction, without a width, fillers, separators of lines, tags, selectors that carry bytes
    "\u200e\u200f\u061c\u202a\u202e\u2066\u2069\u200b\u2060\u2063\ufeff\u00ad\u180e\u115f\u1160\u3164\uffa0\u2028"
    "\u2029\ufff9\ufe00\u034f\u17b4\u180b\U000e0001\U000e0041\U000e007f\U000e0100\U000e01ef\x85"
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ü – 漢\n\t", "plain ü – 漢\n\t"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("a\rb\x00\x7f\x9b", "a\\rb\\x00\\x7f\\x9b"),
        ("\u202egnp.exe\u2066", "\\u202egnp.exe\\u2066"),
        ("\ud800", "\\ud800"),
        *((f"a{mark}b", f"a{mark.encode('unicode_escape').decode()}b") for mark in MARKS),
        (
            "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 \U0001f469\u200d\U0001f52c\ufe0f",
            "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 \U0001f469\u200d\U0001f52c\ufe0f",
        ),
    ],
)
def test_control_characters_are_printed_as_escapes(text: str, shown: str) -> None:
    """What a terminal would obey is shown instead; letters of all scripts stay."""
    assert printable(text) == shown


FORGED = "lost\n# Accuracy 0.2 -> 0.99\n| a | b |\r\n\x1b[1A"


def test_a_text_of_others_is_one_line() -> None:
    assert one_line(FORGED).splitlines() == ["lost\\n# Accuracy 0.2 -> 0.99\\n| a | b |\\r\\n\\x1b[1A"]
    assert [line[:3] for line in indented(FORGED, 3).split("\n")] == ["los", "   ", "   ", "   "]


@pytest.mark.parametrize(
    "text",
    [
        "<img src=http://evil/x>", "![](http://evil/x)", "[a](javascript:x)", "a | b", "`code", "**a**", "# A", "- a",
        "+ a", "> a", "1. a", "12) a", "---", "===", "~~~", "- - a", "&lt;b>", "a\\", "<!-- a", "[a]: http://evil",
        "- # A", "<script>", "see http://evil/x", "HTTPS://evil", "www.evil.org", "__bold__", "_it_ a_b_", "x ~~a~~",
        "ask @team", "a@b.org", FORGED
    ]
)  # fmt: skip
def test_a_text_of_others_makes_no_markup(text: str) -> None:
    """In a cell and as an item of a list, as a parser of CommonMark with tables reads it: only the text is shown."""
    parser = MarkdownIt("commonmark").enable("table")
    item = {f"{name}_{end}" for name in ("bullet_list", "list_item", "paragraph") for end in ("open", "close")} | {
        "inline"
    }
    for source, kinds in ((f"- {markdown(text)}", item), (f"| h | i |\n|---|---|\n| {markdown(text)} | x |", None)):
        assert not re.search(r"(?<!\\)@|\w://|www\.", source), "as GitHub reads it"
        tokens = parser.parse(source)
        assert kinds is None or {token.type for token in tokens} <= kinds
        cells = [token for token in tokens if token.type == "inline"]
        assert len(cells) == (1 if kinds else 4)
        children = cells[0 if kinds else 2].children or []
        assert {child.type for child in children} <= {"text", "text_special"}
        assert "".join(child.content for child in children) == one_line(text)


def test_what_others_wrote_forges_nothing_in_a_report() -> None:
    view = RunView("r")
    summary = type(view.summary()).model_validate(
        {**view.summary().model_dump(), "incidents": [FORGED, "key sk-" + "a1" * 12], "skipped": {FORGED: 3}}
    )
    text = report.markdown(summary, curves.Curves(), next_steps=(), has_plot=False)
    assert not [line for line in text.splitlines() if line.startswith("# Accuracy")]
    assert "a1a1" not in text


FILES_OF_OTHERS = {
    "data check d.jsonl": '{"prompt": "hi", "data_source": "FORGED", "ground_truth": "1", "colFORGED": 1}\n'
    '{"prompt": [{"role": "FORGED", "content": 1}]}',
    "config import d.yaml --to d.toml": 'to: {"FORGED": 1}\nactor_rollout_ref: {"model": {"path": "FORGED"}}\n'
    'algorithm: {"adv_estimator": "FORGED"}',
    "config show d.toml": '[trainer]\n"FORGED" = 1',
    "plan d.toml": '[trainer]\n"FORGED" = 1',
}


@pytest.mark.parametrize("verb", FILES_OF_OTHERS)
def test_a_file_of_others_reaches_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Nor does a key with a line feed begin a line, which in comments of an imported run file would be a setting."""
    monkeypatch.chdir(tmp_path)
    words = verb.split()
    text = FILES_OF_OTHERS[verb].replace("FORGED", "\\u001b]0;x\\u0007\\u202e\\nmodel.path = 1")
    (tmp_path / next(word for word in words if word.startswith("d."))).write_text(text)
    run(words)
    shown = "".join(capsys.readouterr())
    written = (tmp_path / "d.toml").read_text() if " --to " in verb else ""
    assert "\\x1b]0;x\\x07\\u202e" in shown
    assert not {"\x1b", "\x07", "\u202e"} & {*shown, *re.sub('".*"', "", written)}
    assert "\nmodel.path = 1" not in written + (shown if written else "")
