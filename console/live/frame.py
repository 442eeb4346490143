"""Draw one frame of the terminal panel: a snapshot in, a rich renderable out that fits the terminal.

Progress, reward, problems and services are always shown. A low terminal gets a lower curve and fewer details, a narrow one a
narrower curve and no histogram of staleness.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.console.live.run_snapshot import ServiceLine, Snapshot
from penstock.console.report import learning
from penstock.console.report.run_summary import attention_text
from penstock.console.terminal import clock, curve, one_line

_FRAME_LINES = 4  # border, progress, and one line free so that the terminal does not scroll
_LEAST_CURVE, _CURVE, _MOST_CURVE = 4, 8, 10  # with its caption
_LEAST_SERVICES = 6  # with the head
_MAX_WIDTH = 110
_WIDE = 88  # columns inside the border from which on the histogram stands beside the curve
_STALENESS_WIDTH = 38
_BAR_WIDTH = 14
_MAX_INCIDENTS = 4
_STAGES = {"tasks": "to generate", "generated": "to score", "scored": "to train"}


@dataclass(frozen=True, slots=True)
class Layout:
    """Lines of each part."""

    curve: int
    details: int
    services: int  # with the head
    problems: int
    incidents: int
    has_gaps: bool


def fit(height: int, wanted: Layout, others: int, *, is_disconnected: bool) -> Layout:
    """Return the layout for a terminal of ``height`` lines: first what each part needs at least, then the rest in order.

    ``others`` are lines that are always shown.
    """
    left = max(height - _FRAME_LINES - others - is_disconnected, 0)

    def take(most: int, had: int = 0) -> int:
        nonlocal left
        more = min(max(most - had, 0), left)
        left -= more
        return had + more

    services = take(min(wanted.services, _LEAST_SERVICES))
    problems = take(min(wanted.problems, 2))
    curve = take(_LEAST_CURVE) if left >= _LEAST_CURVE else 0
    incidents = take(min(wanted.incidents, 1))
    details = take(min(wanted.details, 3))
    incidents = take(min(wanted.incidents, 2), incidents)
    problems = take(min(wanted.problems, 6), problems)
    details = take(wanted.details, details)
    services = take(min(wanted.services, max(height // 3, _LEAST_SERVICES)), services)
    incidents = take(wanted.incidents, incidents)
    sections = sum(map(bool, (curve, problems, services, incidents, is_disconnected))) + 1
    has_gaps = left >= sections
    left -= sections if has_gaps else 0
    if curve:
        curve = take(_MOST_CURVE, curve)
    problems = take(wanted.problems, problems)
    services = take(wanted.services, services)
    return Layout(curve, details, services, problems, incidents, has_gaps)


def render(snapshot: Snapshot, width: int = 96, height: int | None = None) -> RenderableType:
    width = max(min(width, _MAX_WIDTH), 20)
    inside = width - 4
    figures, details = _figures(snapshot), _details(snapshot, is_wide=inside >= _WIDE)
    problems = [
        line
        for diagnosis in snapshot.diagnoses
        for line in _problem(diagnosis.what, diagnosis.cause, diagnosis.cure, inside)
    ]
    services = len(snapshot.services) + bool(snapshot.services)
    incidents = min(len(snapshot.incidents), _MAX_INCIDENTS)
    layout = Layout(_CURVE, len(details), services, len(problems), incidents, has_gaps=True)
    if height is not None:
        layout = fit(height, layout, len(figures), is_disconnected=snapshot.disconnected_s > 0)
    parts = [
        [_progress(snapshot, inside)],
        [_curve(snapshot, inside, layout.curve)] if layout.curve else [],
        [*figures, *details[: layout.details]],
        problems[: layout.problems],
        [_services(snapshot, layout.services)] if snapshot.services and layout.services else [],
        _incidents(snapshot, layout.incidents),
    ]
    if snapshot.disconnected_s > 0:
        parts.append([Text(f"NATS unreachable for {snapshot.disconnected_s:.0f} s; reconnecting", style="bold red")])
    return Panel(
        Group(*_joined(parts, layout)),
        title=f"[bold]penstock[/] · {snapshot.run_id}",
        subtitle=Text(" · ".join(filter(None, (one_line(snapshot.state), snapshot.waiting_for)))),
        border_style="green" if snapshot.finished else "cyan",
        padding=(0, 1),
        width=width,
    )


def _joined(parts: Sequence[Sequence[RenderableType]], layout: Layout) -> list[RenderableType]:
    joined: list[RenderableType] = []
    for part in parts:
        if part and joined and layout.has_gaps:
            joined.append(Text())
        joined += part
    return joined


def rate(per_s: float) -> str:
    """Return tokens per second in about four characters."""
    return f"{per_s / 1000:.1f}k" if per_s >= 1000 else f"{per_s:.0f}"


def share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f}%"


def figure(value: float | None, signed: bool = False) -> str:
    return "–" if value is None else f"{value:{'+' if signed else ''}.2f}"


def _progress(s: Snapshot, inside: int) -> RenderableType:
    steps = f"step {s.step}/{s.total_steps}" if s.total_steps else f"step {s.step}"
    eta = f"eta {clock(s.eta_s)}" if s.eta_s is not None and not s.finished else ""
    texts = [steps, clock(s.elapsed_s), *([eta] if eta else [])]
    cells: list[RenderableType] = [Text(steps, style="bold")]
    if s.total_steps:
        part = share(s.step / s.total_steps)
        bar = inside - sum(len(text) + 1 for text in (*texts, part)) - 1
        cells += [ProgressBar(total=s.total_steps, completed=s.step, width=max(bar, 1)), part]
    row = Table.grid(padding=(0, 1))
    row.add_row(*cells, *texts[1:])
    return row


def _curve(s: Snapshot, inside: int, height: int) -> RenderableType:
    is_wide = inside >= _WIDE
    width = inside - 9 - (_STALENESS_WIDTH if is_wide else 0)
    low, high = min((*s.rewards, 0.0)), max((*s.rewards, 1.0))
    rows = max(height - 1, 1)  # the last line is the caption
    left = Table.grid(padding=(0, 1))
    for number, line in enumerate(curve(s.rewards, width=max(width, 1), height=rows, low=low, high=high)):
        label = high - (high - low) * number / max(rows - 1, 1)
        has_label = number % 3 == 0 or number == rows - 1
        left.add_row(Text(f"{label:5.2f} ┤" if has_label else "      │", style="dim"), Text(line, style="green"))
    left.add_row("", Text("mean reward of the training groups, by step", style="dim", no_wrap=True))
    if not is_wide:
        return left
    both = Table.grid(padding=(0, 2))
    both.add_row(left, _staleness(s, rows))
    return both


def _staleness(s: Snapshot, rows: int) -> RenderableType:
    box = Table.grid(padding=(0, 1))
    box.add_row(Text("staleness", style="dim"), Text("of trained tokens", style="dim"), "")
    whole = sum(s.staleness_tokens.values())
    for versions, tokens in list(s.staleness_tokens.items())[: max(rows - 1, 1)]:
        part = tokens / whole if whole else 0.0
        box.add_row(
            Text(f"{versions} behind", justify="right"),
            Text("█" * max(round(part * _BAR_WIDTH), 1), style="green" if versions == 0 else "yellow"),
            share(part),
        )
    if s.staleness_mean is not None:
        box.add_row("", Text(f"mean {s.staleness_mean:.2f}, max {s.staleness_max}", style="dim"), "")
    return box


def _figures(s: Snapshot) -> list[RenderableType]:
    gain = s.reward_now - s.reward_first if s.reward_now is not None and s.reward_first is not None else None
    groups = f"{s.groups_trained} trained"
    if s.no_signal_share:
        groups += f", {share(s.no_signal_share)} without signal"
    reward = Text.assemble((figure(s.reward_now), "bold"), f" ({figure(gain, signed=True)})")
    before, now = figure(s.held_out.before), figure(s.held_out.now)
    held_out = Text.assemble(f"{before} → ", (now, "bold"), " reward" if s.held_out.measure == "reward" else "")
    pairs = [
        ("reward", reward),
        ("held-out", held_out),
        ("tokens/s", Text(f"{rate(s.generated_per_s)} generated, {rate(s.trained_per_s)} trained")),
        ("weights", Text(f"v{s.newest_version}, {s.versions_published} published")),
        ("groups", Text(groups)),
        ("dropped", Text(one_line(", ".join(f"{n} {reason}" for reason, n in s.dropped.items())) or "none")),
    ]
    left = max(len(value) for _, value in pairs[::2])
    return [
        _line(Text.assemble((f"{a:<11}", "dim"), one, " " * (left - len(one) + 2), (f"{b:<11}", "dim"), other))
        for (a, one), (b, other) in zip(pairs[::2], pairs[1::2], strict=True)
    ]


def _details(s: Snapshot, *, is_wide: bool) -> list[RenderableType]:
    off_policy, engine = learning.panel_lines(s.learning)
    queues = ", ".join(
        f"{s.queues.waiting[stage]}+{s.queues.held.get(stage, 0)} {words}"
        for stage, words in _STAGES.items()
        if stage in s.queues.waiting
    )
    idle = ", ".join(f"{role} {share(value)}" for role, value in s.idle_share.items())
    used = "" if s.slots_used is None else f"; {share(s.slots_used)} of the engines' slots used"
    rows = [
        ("waiting", f"{idle}{used}" if idle else "–"),
        ("queues", queues or "–"),
        ("learning", learning.panel_learning(s.learning)),
        (
            "staleness",
            "" if is_wide or s.staleness_mean is None else f"mean {s.staleness_mean:.2f}, max {s.staleness_max}",
        ),
        ("off-policy", off_policy),
        ("reward of", learning.reward_parts(s.learning)),
        ("engine gap", engine),
        ("attention", attention_text(s.attention)),
        ("placement", s.placement),
    ]
    return [_line(Text.assemble((f"{name:<11}", "dim"), one_line(text))) for name, text in rows if text]


def _line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _problem(what: str, cause: str, cure: str, inside: int) -> list[RenderableType]:
    lines = [Text(line, style="bold yellow") for line in textwrap.wrap(f"! {one_line(what)}", inside)]
    rest = textwrap.wrap(f"{one_line(cause)} {one_line(cure)}", max(inside - 2, 1))
    return [*lines, *(Text(f"  {line}", style="yellow") for line in rest)]


def _services(s: Snapshot, rows: int) -> RenderableType:
    """Return the table of services in at most ``rows`` lines with its head; services that are lost come first then."""
    shown = list(s.services)
    if len(shown) + 1 > rows:
        shown = sorted(shown, key=lambda line: line.alive or line.has_exited)[: max(rows - 2, 0)]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in ("service", "version", "tok/s", "waiting", "state"):
        table.add_column(name, no_wrap=True)
    for line in shown:
        table.add_row(*_service(line, s))
    others = [line for line in s.services if line not in shown]
    if not others:
        return table
    counts = Counter("working" if line.alive else "stopped" if line.has_exited else "lost" for line in others)
    text = f"and {len(others)} more: {', '.join(f'{n} {what}' for what, n in counts.items())}"
    return Group(table, Text(text, style="red" if counts["lost"] else "dim"))


def _service(line: ServiceLine, s: Snapshot) -> tuple[Text, ...]:
    behind = s.versions_behind(line) if line.role == "rollout" else 0
    version = "" if line.version is None else f"v{line.version}{f' (-{behind})' if behind else ''}"
    starts = f" (start {line.num_starts})" if line.num_starts > 1 else ""
    state, style = _state(line, s)
    speed = rate(line.tokens_per_s) if line.role == "rollout" else ""
    cells = (line.name + starts, version, speed, share(line.idle_share), state)
    return tuple(Text(one_line(cell), style=style, overflow="ellipsis") for cell in cells)


def _state(line: ServiceLine, s: Snapshot) -> tuple[str, str]:
    """Return the state of a service in words, and its style: red only for one that should be there."""
    if line.alive:
        return line.state, ""
    if s.finished:
        return "finished" if line.role == "trainer" else "stopped", "dim"
    if line.has_exited:
        return "stopped", "dim"
    return f"lost, no heartbeat for {clock(line.silent_s)}", "red"


def _incidents(s: Snapshot, rows: int) -> list[RenderableType]:
    styles = {"lost": "red", "back": "green", "dead_letter": "red", "note": "yellow"}
    return [
        _line(
            Text.assemble(
                (f"{clock(s.elapsed_at(incident.at))} ", "dim"), (one_line(incident.text), styles[incident.kind])
            )
        )
        for incident in s.incidents[len(s.incidents) - min(rows, _MAX_INCIDENTS, len(s.incidents)) :]
    ]
