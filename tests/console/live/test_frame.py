"""The panel, and the plain lines where there is no terminal."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from tests.console.record import recorded_run as recorded

from penstock.console.live.frame import render
from penstock.console.live.panel import PlainLines
from penstock.console.live.run_snapshot import Snapshot
from penstock.console.live.run_view import RunView
from penstock.console.report.diagnoses import RunMetrics, diagnose
from penstock.console.report.learning import HeldOut
from penstock.console.terminal import clock, console, curve


@pytest.fixture
def snapshot() -> Snapshot:
    return recorded.whole_run().snapshot(recorded.START + 31)


def lines_at(snapshot: Snapshot, width: int = 100, height: int | None = None) -> list[str]:
    terminal = Console(record=True, width=width, height=height, force_terminal=True, file=io.StringIO())
    terminal.print(render(snapshot, width, height))
    return terminal.export_text().rstrip("\n").split("\n")


def drawn(snapshot: Snapshot) -> str:
    return "\n".join(lines_at(snapshot))


def plain_lines(*snapshots: Snapshot, every: int = 10, last: Snapshot | None = None) -> list[str]:
    lines: list[str] = []
    plain = PlainLines(lines.append, every=every)
    for snapshot in snapshots:
        plain.show(snapshot)
    if last is not None:
        plain.show(last, last=True)
    return lines


def test_a_frame_shows_everything(snapshot: Snapshot):
    """Progress, reward, accuracy, speed, staleness, queues, waiting, workers, drops and incidents are shown."""
    text = drawn(snapshot)
    for expected in (
        "step 60/60", "100%", "0.90 (+0.41)", "0.55 → 0.95", "v60, 61 published", "2.2k generated, 2.0k trained",
        "mean 0.63, max 2", "3+4 to generate, 0+0 to score, 1+6 to train", "rollout 10%, reward 95%, trainer 20%",
        "generation is the bottleneck", "3 stale", "2880 trained, 25% without signal", "1 behind", "53%",
        "KL 0.0021, ESS 98%, clipped 1.2%, rejected 0.2%", "0.0002 mean, 0.004 max", "rollout-1 (start 2)", "v22 (-38)",
        "0:14 killed rollout-1 on purpose", "0:18 rollout-1 is lost: no heartbeat for 4 s",
    ):  # fmt: skip
        assert expected in text


def services(snapshot: Snapshot, **changes: Any) -> dict[str, Any]:
    return {"services": tuple(replace(line, **changes) for line in snapshot.services)}


CHANGES: dict[str, tuple[Callable[[Snapshot], dict[str, Any]], tuple[str, ...]]] = {
    "NATS is unreachable": (lambda _: {"disconnected_s": 7.0}, ("NATS unreachable for 7 s",)),
    "workers without heartbeat": (lambda s: services(s, alive=False, silent_s=65), ("lost, no heartbeat for 1:05",)),
    "markup in a state": (lambda s: services(s, state="[bold]x[/nonsense]"), ("[bold]x[/nonsense]",)),
    "a run that has ended": (lambda s: {"finished": True, **services(s, alive=False)}, ("finished", "stopped")),
    "a reward without a rule": (
        lambda _: {"held_out": HeldOut("reward", ((0, 3.5), (60, 5.25)))}, ("3.50 → 5.25 reward",),
    ),
    "another learning rate than the one set": (
        lambda s: {"learning": {
            **s.learning, "loss": 0.123, "lr": 5.2e-5, "lr_set": 5e-4, "entropy": 0.61, "truncated_share": 0.07,
        }},
        ("loss 0.123, lr 5.2e-05 (set 0.0005), 7% cut", "entropy 0.61"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_frame_shows_what_is_unusual(snapshot: Snapshot, change: str):
    changes, texts = CHANGES[change]
    text = drawn(replace(snapshot, **changes(snapshot)))
    assert all(expected in text for expected in texts)
    assert ("lost," in text) == ("heartbeat" in change)


def test_a_frame_of_a_run_without_events():
    """Before the first message the panel names what it waits for."""
    text = drawn(RunView("fresh", total_steps=10).snapshot(recorded.START))
    assert "step 0/10" in text
    assert "waiting for the services" in text


def failing(snapshot: Snapshot) -> Snapshot:
    """The same run with rewards of 0, and completions that are cut."""
    figures = {"reward_mean": 0.0, "reward_std": 0.0, "truncated_share": 0.6}
    return replace(snapshot, diagnoses=diagnose(RunMetrics([figures] * 30)))


SIZES = [(80, 24), (100, 30), (200, 50)]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_frame_fits_the_terminal(snapshot: Snapshot, width: int, height: int):
    """Nothing is cut at the right or below; curve, services, bottleneck and incidents are there at every size."""
    lines = lines_at(snapshot, width, height)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert len(lines) < height
    assert lines[0].endswith("╮")
    assert "…" not in text
    for expected in (
        "step 60/60", "0.90 (+0.41)", "0.55 → 0.95", "rollout-0", "rollout-1 (start 2)", "reward", "trainer",
        "generation is the bottleneck", "0:20 rollout-1 is back", "1+6 to train"
    ):  # fmt: skip
        assert expected in text


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_newest_part_of_the_curve_is_drawn(snapshot: Snapshot, width: int, height: int):
    """The last column of the curve is inside the border: rewards that jump at the end are seen to jump."""
    jump = lines_at(replace(snapshot, rewards=(0.0,) * 300 + (1.0,) * 30), width, height)
    top = next(line for line in jump if "1.00 ┤" in line)
    low = next(line for line in jump if "0.00 ┤" in line)
    drawn = [c for c in low.partition("┤")[2] if "⠀" <= c <= "⣿"]
    assert top.partition("┤")[2].strip(" │⠀")[0] != "s"
    assert drawn[0] != "⠀"
    assert drawn[-1] == "⠀"


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_run_that_does_not_learn_says_so_in_the_panel(snapshot: Snapshot, width: int, height: int):
    """The gravest problem is shown at every size, with services beside it."""
    text = " ".join(" ".join(line.strip("│ ") for line in lines_at(failing(snapshot), width, height)).split())
    assert "! The reward was 0.00 for every completion in all 30 steps: nothing is learned." in text
    assert "trainer" in text
    assert height < 50 or "! 60% of the completions of the last 20 steps were cut" in text


@pytest.mark.parametrize(("width", "height"), [(80, 24), (20, 5), (300, 100)])
def test_many_services_and_long_names_fit(snapshot: Snapshot, width: int, height: int):
    """A hundred workers are summed up, those that are lost first; a tiny terminal ends nothing."""
    one = snapshot.services[0]
    fleet = [replace(one, service_id=f"rollout-{n}", alive=n != 70, silent_s=9.0) for n in range(100)]
    lines = lines_at(replace(failing(snapshot), services=tuple(fleet)), width, height)
    assert max(map(len, lines)) <= width
    if width == 80:
        text = "\n".join(lines)
        assert len(lines) < height
        assert "rollout-70" in text
        assert "and 96 more: 96 working" in text


def test_a_worker_that_was_stopped_on_purpose_is_not_red(snapshot: Snapshot):
    stopped = tuple(replace(line, alive=False, has_exited=line.role == "rollout") for line in snapshot.services[:1])
    terminal = Console(width=100, force_terminal=True, color_system="standard")
    with terminal.capture() as captured:
        terminal.print(render(replace(snapshot, services=stopped, incidents=())))
    assert "stopped" in captured.get()
    assert "\x1b[31m" not in captured.get()


def test_plain_lines_print_each_event_once(snapshot: Snapshot):
    """Steps at the interval; evaluations, problems and incidents once, however often a snapshot is shown."""
    shown = [replace(snapshot, step=step, eta_s=None) for step in (1, 2, 9, 10, 10, 25, 60)]
    lines = plain_lines(*shown, last=snapshot)
    steps = [line.split()[2] for line in lines if " step " in line and "accuracy" not in line]
    assert steps == ["1/60", "10/60", "25/60", "60/60"]
    assert sum("held-out accuracy 0.950 after step 60" in line for line in lines) == 1
    assert sum("killed rollout-1 on purpose" in line for line in lines) == 1
    problems = [line for line in plain_lines(*[failing(snapshot)] * 3) if "problem:" in line]
    assert (len(problems), "penstock reward test" in problems[0]) == (2, True)
    (measured,) = plain_lines(replace(snapshot, held_out=HeldOut("reward", ((60, 5.25),))))[-2:-1]
    assert measured.endswith("held-out mean reward 5.250 after step 60")


def test_the_last_line_shows_the_last_step(snapshot: Snapshot):
    """Also if the run ends between two lines; a line has what a log of an attached trainer is read for."""
    shown = [replace(snapshot, step=step) for step in (1, 60)]
    last = replace(snapshot, step=63, learning={"kl_behaviour": 0.0123, "loss": -0.5, "lr": 1e-6})
    line = plain_lines(*shown, every=50, last=last)[-1]
    assert line.startswith("0:31 step 63/60  reward 0.90  KL 0.0123  loss -0.5  lr 1e-06  staleness")


def test_a_curve_rises_from_the_lower_left_to_the_upper_right():
    """A straight line touches both corners, with one dot in every column."""
    lines = curve([0.0, 1.0], width=10, height=3, low=0.0, high=1.0)
    assert [len(line) for line in lines] == [10, 10, 10]
    assert lines[-1][0] != "⠀"
    assert lines[0][-1] != "⠀"
    assert lines[0][0] == lines[-1][-1] == "⠀"


@pytest.mark.parametrize("values", [[], [0.5], [0.1] * 1000, [float(i) for i in range(7)]])
def test_a_curve_has_its_size_for_any_values(values: list[float]):
    """None, one, equal, too many or values beyond the axis: the drawing keeps its size."""
    lines = curve(values, width=5, height=2, low=0.0, high=1.0)
    assert [len(line) for line in lines] == [5, 5]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.9, "0:59"), (61, "1:01"), (3661, "1:01:01"), (-1, "0:00")]
)
def test_durations_are_formatted(seconds: float, text: str):
    """Minutes and seconds, and hours from one hour."""
    assert clock(seconds) == text


def test_no_cell_is_cut_in_a_pipe(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A table is cut to a terminal: an id of 300 characters stays whole, whatever COLUMNS is."""
    monkeypatch.setenv("COLUMNS", "80")
    table = Table("group", "prompt")
    table.add_row("e0.p17.a0" * 30, "x" * 200)
    console().print(table)
    assert "e0.p17.a0" * 30 in capsys.readouterr().out
