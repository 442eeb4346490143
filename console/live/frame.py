"""Draw one frame of the terminal panel: a snapshot in, a rich renderable out."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.console.braille import curve
from penstock.console.durations import clock
from penstock.console.live.run_snapshot import ServiceLine, Snapshot
from penstock.console.printable import printable
from penstock.console.report import learning

_CURVE_WIDTH = 46
_CURVE_HEIGHT = 7
_BAR_WIDTH = 14
_NUM_INCIDENTS = 4
_STAGES = {"tasks": "to generate", "generated": "to score", "scored": "to train"}


def render(snapshot: Snapshot) -> RenderableType:
    """Draw the panel."""
    parts: list[RenderableType] = [_progress(snapshot), Text(), _curve(snapshot), Text(), _figures(snapshot)]
    if snapshot.services:
        parts += [Text(), _services(snapshot)]
    if snapshot.incidents:
        parts += [Text(), _incidents(snapshot)]
    if snapshot.disconnected_s > 0:
        parts.append(Text(f"NATS unreachable for {snapshot.disconnected_s:.0f} s; reconnecting", style="bold red"))
    return Panel(
        Group(*parts),
        title=f"[bold]penstock[/] · {snapshot.run_id}",
        subtitle=Text(printable(snapshot.state)),
        border_style="green" if snapshot.finished else "cyan",
        padding=(0, 1),
        width=96,
    )


def rate(per_s: float) -> str:
    """Return tokens per second in about four characters."""
    return f"{per_s / 1000:.1f}k" if per_s >= 1000 else f"{per_s:.0f}"


def share(value: float | None) -> str:
    """Return a share as a whole percentage."""
    return "–" if value is None else f"{100 * value:.0f}%"


def figure(value: float | None, signed: bool = False) -> str:
    """Return a reward or an accuracy with two decimals."""
    return "–" if value is None else f"{value:{'+' if signed else ''}.2f}"


def _progress(s: Snapshot) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    steps = f"step {s.step}/{s.total_steps}" if s.total_steps else f"step {s.step}"
    eta = f"eta {clock(s.eta_s)}" if s.eta_s is not None and not s.finished else ""
    cells: list[RenderableType] = [Text(steps, style="bold")]
    if s.total_steps:
        cells += [ProgressBar(total=s.total_steps, completed=s.step, width=48), share(s.step / s.total_steps)]
    row.add_row(*cells, clock(s.elapsed_s), eta)
    return row


def _curve(s: Snapshot) -> RenderableType:
    low, high = min((*s.rewards, 0.0)), max((*s.rewards, 1.0))
    lines = curve(s.rewards, width=_CURVE_WIDTH, height=_CURVE_HEIGHT, low=low, high=high)
    left = Table.grid(padding=(0, 1))
    for number, line in enumerate(lines):
        label = high - (high - low) * number / (_CURVE_HEIGHT - 1)
        left.add_row(Text(f"{label:5.2f} ┤" if number % 3 == 0 else "      │", style="dim"), Text(line, style="green"))
    left.add_row("", Text("reward of the training groups, by step", style="dim"))
    both = Table.grid(padding=(0, 2))
    both.add_row(left, _staleness(s))
    return both


def _staleness(s: Snapshot) -> RenderableType:
    box = Table.grid(padding=(0, 1))
    box.add_row(Text("staleness", style="dim"), Text("of trained tokens", style="dim"), "")
    whole = sum(s.staleness_tokens.values())
    for versions, tokens in list(s.staleness_tokens.items())[: _CURVE_HEIGHT - 2]:
        part = tokens / whole if whole else 0.0
        box.add_row(
            Text(f"{versions} behind", justify="right"),
            Text("█" * max(round(part * _BAR_WIDTH), 1), style="green" if versions == 0 else "yellow"),
            share(part),
        )
    if s.staleness_mean is not None:
        box.add_row("", Text(f"mean {s.staleness_mean:.2f}, max {s.staleness_max}", style="dim"), "")
    return box


def _figures(s: Snapshot) -> RenderableType:
    gain = s.reward_now - s.reward_first if s.reward_now is not None and s.reward_first is not None else None
    groups = f"{s.groups_trained} trained"
    if s.no_signal_share:
        groups += f", {share(s.no_signal_share)} without signal"
    off_policy, engine = learning.panel_lines(s.learning)
    pairs = (
        ("reward", Text.assemble((figure(s.reward_now), "bold"), f" ({figure(gain, signed=True)})")),
        ("held-out", Text.assemble(f"{figure(s.accuracy_before)} → ", (figure(s.accuracy_now), "bold"))),
        ("tokens/s", Text(f"{rate(s.generated_per_s)} generated, {rate(s.trained_per_s)} trained")),
        ("weights", Text(f"v{s.newest_version}, {s.versions_published} published")),
        ("groups", Text(groups)),
        ("dropped", Text(printable(", ".join(f"{n} {reason}" for reason, n in s.dropped.items())) or "none")),
    )
    narrow = Table.grid(padding=(0, 2))
    for left, right in zip(pairs[::2], pairs[1::2], strict=True):
        narrow.add_row(Text(left[0], style="dim"), left[1], Text(right[0], style="dim"), right[1])
    queues = ", ".join(
        f"{s.queues.waiting[stage]}+{s.queues.held.get(stage, 0)} {words}"
        for stage, words in _STAGES.items()
        if stage in s.queues.waiting
    )
    idle = ", ".join(f"{role} {share(value)}" for role, value in s.idle_share.items())
    wide = Table.grid(padding=(0, 2))
    wide.add_row(Text("queues  ", style="dim"), Text(queues or "–"))
    if parts := learning.reward_parts(s.learning):
        wide.add_row(Text("reward of", style="dim"), Text(printable(parts)))
    wide.add_row(Text("off-policy", style="dim"), Text(off_policy))
    wide.add_row(Text("engine gap", style="dim"), Text(engine))
    wide.add_row(Text("waiting", style="dim"), Text(f"{idle or '–'}   {s.waiting_for}", no_wrap=True))
    return Group(narrow, wide)


def _services(s: Snapshot) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in ("service", "version", "tok/s", "waiting", "state"):
        table.add_column(name, no_wrap=True)
    for line in s.services:
        table.add_row(*_service(line, s.newest_version))
    return table


def _service(line: ServiceLine, newest_version: int) -> tuple[Text, ...]:
    behind = "" if line.version is None or line.role != "rollout" else f" ({line.version - newest_version:+d})"
    version = "" if line.version is None else f"v{line.version}{behind if line.version != newest_version else ''}"
    starts = f" (start {line.num_starts})" if line.num_starts > 1 else ""
    style = "" if line.alive else "red"
    state = line.state if line.alive else f"lost, no heartbeat for {clock(line.silent_s)}"
    speed = rate(line.tokens_per_s) if line.role == "rollout" else ""
    cells = (line.name + starts, version, speed, share(line.idle_share), state)
    return tuple(Text(printable(cell), style=style, overflow="ellipsis") for cell in cells)


def _incidents(s: Snapshot) -> RenderableType:
    styles = {"lost": "red", "back": "green", "dead_letter": "red", "note": "yellow"}
    table = Table.grid(padding=(0, 1))
    for incident in s.incidents[-_NUM_INCIDENTS:]:
        when = clock(incident.at - s.started_at)
        table.add_row(Text(when, style="dim"), Text(printable(incident.text), style=styles[incident.kind]))
    return table
