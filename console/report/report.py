"""Write the report of a run: report.md, report.json and curve.png."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from penstock.console import terminal
from penstock.console.report import curves, diagnoses, learning
from penstock.console.report.curves import Curves
from penstock.console.report.learning import HeldOut
from penstock.console.report.run_summary import RunSummary, attention_text
from penstock.console.terminal import clock
from penstock.protocol.files import json_value, read_regular
from penstock.protocol.secret_values import scrub

_WIDTH, _HEIGHT = 60, 8
_JSON = "report.json"
_NO_PLOT = "(For a plot: `pip install 'penstock[report]'`, then run again.)"


def write(folder: Path, summary: RunSummary, *, next_steps: Sequence[str] = ()) -> Path:
    """Write the report into a run folder and return the path of report.md.

    ``next_steps`` are commands to print at the end. The plot needs matplotlib (the extra ``report``);
    without it report.md explains how to install it and has only the text curve.
    """
    points = curves.read(folder)
    folder.mkdir(parents=True, exist_ok=True)
    has_plot = importlib.util.find_spec("matplotlib") is not None
    if has_plot:
        from penstock.console.report import plots  # noqa: PLC0415 - half a second, and an extra

        plots.draw_run(folder / "curve.png", summary, points)
    document = {**summary.model_dump(), "curves": asdict(points)}
    (folder / _JSON).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    path = folder / "report.md"
    path.write_text(markdown(summary, points, next_steps=next_steps, has_plot=has_plot), encoding="utf-8")
    return path


def stored_summary(folder: Path) -> RunSummary | None:
    """Return the summary in a run folder's report; None without a report that can be read."""
    try:
        document = json_value(read_regular(folder / _JSON))
        return RunSummary.model_validate({name: value for name, value in document.items() if name != "curves"})
    except (OSError, ValueError, AttributeError, RecursionError):
        return None


def markdown(summary: RunSummary, points: Curves, *, next_steps: Sequence[str], has_plot: bool) -> str:
    sections = [
        _headline(summary, points.held_out),
        _bullets("What keeps it from learning", list(_problems(summary))),
        _reward_curve(points, has_plot=has_plot),
        _table("Summary", ("metric", "value"), _totals(summary)),
        _staleness(summary),
        _table(
            "Learning, data and policy, over the steps",
            ("metric", "mean", "smallest", "largest", "first tenth", "last tenth"),
            list(learning.rows(summary.learning)),
        ),
        _table("Groups", ("groups", "number"), _groups(summary)),
        _bullets("Why groups were dropped or generated twice", list(_explanations(summary))),
        _table("Rewards of the trained groups", ("reward", "groups", "steps"), _scorers(summary)),
        _table("Waiting", ("role", "waiting", "slots used", "CPU s"), _roles(summary)),
        _table("Weights by worker", ("worker", "applied", "newest", "pause", "fetch", "starts"), _workers(summary)),
        _bullets("Incidents", [terminal.markdown(scrub(text)) for text in summary.incidents]),
        _next(next_steps),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _headline(s: RunSummary, held_out: HeldOut) -> str:
    title = f"# Run {s.run_id}"
    before, after = s.accuracy_before, s.accuracy_after
    name = "Accuracy"
    if after is None:
        before, after, name = s.eval_reward_before, s.eval_reward_after, "Held-out mean reward"
    elif before is None:
        before = held_out.before
    if before is None or after is None:
        return f"{title}\n\n{s.steps} steps in {clock(s.wall_s)} ({s.wall_s:.1f} s)."
    prompts = f"on the same {s.eval_prompts} held-out prompts" if s.eval_prompts else "on the same held-out prompts"
    return (
        f"{title}\n\n**{name} {before:.3f} → {after:.3f}** {prompts}, "
        f"after {s.steps} steps in {clock(s.wall_s)} ({s.wall_s:.1f} s).{_success(s)}"
    )


def _success(s: RunSummary) -> str:
    if s.accuracy_after is not None:
        return f" A completion is correct from {terminal.markdown(s.success)} on." if s.success else ""
    if s.success:
        return f" What counts as correct is {terminal.markdown(s.success)}."
    return " There is no accuracy: nothing says from which reward on a completion is correct (`reward.success`)."


def _reward_curve(points: Curves, *, has_plot: bool) -> str:
    if not points.rewards:
        return ""
    values = [value for _, value in points.rewards]
    low, high = min(*values, 0.0), max(*values, 1.0)
    lines = terminal.curve(values, width=_WIDTH, height=_HEIGHT, low=low, high=high)
    labels = [f"{high:5.2f} ┤"] + ["      │"] * (_HEIGHT - 2) + [f"{low:5.2f} ┤"]
    drawn = "\n".join(label + text for label, text in zip(labels, lines, strict=True))
    plot = f"![reward, {points.held_out.name}, staleness](curve.png)" if has_plot else _NO_PLOT
    return f"## Reward by step\n\n{plot}\n\n```\n{drawn}\n```"


def _totals(s: RunSummary) -> Iterator[tuple[str, ...]]:
    if s.reward_first is not None and s.reward_last is not None:
        yield "training reward, first and last tenth", f"{s.reward_first:.3f} → {s.reward_last:.3f}"
    yield "tokens generated", f"{s.tokens_generated:,}"
    yield "tokens trained", f"{s.tokens_trained:,}"
    if s.wall_s > 0:
        yield "tokens trained per second", f"{s.tokens_trained / s.wall_s:,.0f}"
    yield "versions published", str(s.versions_published)
    if s.attention:
        yield "attention of the trainer", attention_text(s.attention)
    if s.weights.raw_bytes:
        share = s.weights.sent_bytes / s.weights.raw_bytes
        yield (
            "weights sent",
            f"{s.weights.sent_bytes:,} bytes, {share:.1%} of the {s.weights.raw_bytes:,} of full snapshots",
        )
    if s.weights.pause_p50_s is not None:
        p50, p99 = s.weights.pause_p50_s * 1000, (s.weights.pause_p99_s or 0.0) * 1000
        yield "pause for a version", f"p50 {p50:.0f} ms, p99 {p99:.0f} ms"
    for what, number in s.unreadable.items():
        yield f"skipped, not readable: {what}", str(number)
    yield "wall time", f"{s.wall_s:.1f} s"
    yield "CPU time of all services", f"{s.cpu_s:.1f} s"


def _staleness(s: RunSummary) -> str:
    whole = sum(s.staleness_tokens.values())
    if not whole:
        return ""
    rows = [(versions, f"{n:,}", _percent(n / whole)) for versions, n in s.staleness_tokens.items()]
    table = _table("Staleness of the trained tokens", ("versions behind", "tokens", "share"), rows)
    overlap = (
        f"Generation and training overlapped: {_percent(s.overlap.trained_stale_share)} of the trained tokens were sampled by an "
        f"older version than the one in training, and for at least {s.overlap.both_working_s:.1f} s"
    )
    share = s.overlap.both_working_share
    overlap += f" ({_percent(share)} of the training)" if share is not None else ""
    return f"{table}\n\nMean {s.staleness_mean or 0.0:.2f}, max {s.staleness_max or 0}. {overlap} a worker and the trainer worked at the same time."


def _groups(s: RunSummary) -> Iterator[tuple[str, ...]]:
    yield "issued", str(s.groups.issued)
    yield "generated (including repeats after a restart)", str(s.groups.generated)
    yield "scored", str(s.groups.scored)
    yield "trained", str(s.groups.trained)
    yield "in flight at the end", str(s.groups.in_flight)
    for reason, number in s.groups.dropped.items():
        yield f"dropped: {reason}", str(number)
    if not s.groups.dropped:
        yield "dropped", "0"
    for reason, number in s.skipped.items():
        yield f"trajectories filtered out: {reason}", str(number)
    for reason, number in s.groups.dead_lettered.items():
        yield f"dead letters: {reason}", str(number)


def _problems(s: RunSummary) -> Iterator[str]:
    for diagnosis in s.diagnoses:
        what, cause, cure = map(terminal.markdown, (diagnosis.what, diagnosis.cause, diagnosis.cure))
        yield f"**{what}** {cause} {cure}"


def _explanations(s: RunSummary) -> Iterator[str]:
    for reason in s.groups.dropped:
        yield f"{terminal.markdown(reason)}: {diagnoses.MEANINGS.get(reason, diagnoses.OF_A_FILTER)}."
    twice = s.groups.generated - s.groups.issued
    if twice > 0:
        failed = f" Engines failed {s.packs_given_back} messages." if s.packs_given_back else ""
        yield f"{twice} groups were generated {diagnoses.REPEATS}.{failed}"


def _scorers(s: RunSummary) -> Iterator[tuple[str, ...]]:
    for scorer, share in s.scored_by.items():
        yield scorer, str(share.groups), f"{share.first_step} to {share.last_step}"


def _roles(s: RunSummary) -> Iterator[tuple[str, ...]]:
    for role in dict.fromkeys((*s.idle_share, *s.cpu_s_per_role)):
        slots = _percent(s.slots_used) if role == "rollout" else ""
        yield role, _percent(s.idle_share.get(role)), slots, f"{s.cpu_s_per_role.get(role, 0.0):.1f}"


def _workers(s: RunSummary) -> Iterator[tuple[str, ...]]:
    for name, w in s.workers.items():
        pause, fetch = f"{1000 * w.mean_pause_s:.0f} ms", f"{1000 * w.mean_fetch_s:.0f} ms"
        yield name, str(w.versions_applied), f"v{w.newest_version}", pause, fetch, str(w.num_lives)


def _table(title: str, head: Sequence[str], rows: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(map(terminal.markdown, row))} |" for row in rows]
    if not lines:
        return ""
    rule = "|" + "|".join([" :-- "] + [" --: "] * (len(head) - 1)) + "|"
    return "\n".join([f"## {title}\n", f"| {' | '.join(head)} |", rule, *lines])


def _bullets(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"## {title}\n", *(f"- {line}" for line in lines)]) if lines else ""


def _next(commands: Sequence[str]) -> str:
    return "\n".join(["## Next\n", "```", *commands, "```"]) if commands else ""


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f}%"
