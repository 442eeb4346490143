"""Write a model card in Markdown from the run's folder, and read the scores of its versions by name.

The licence is the user's to name: a comment stands in its place. A score ``SOURCE.METRIC`` is of an evaluation during the run
(``eval`` is data.eval), ``eval:SOURCE.METRIC`` of `penstock eval`, the newest one of the version. Metrics are accuracy, reward,
pass@K, and of `penstock eval` maj@K.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.console.evaluation import result_table, results
from penstock.console.evaluation.results import Estimate, EvaluationResult
from penstock.console.report import curves
from penstock.console.report.event_fields import number
from penstock.protocol.errors import ConfigError
from penstock.protocol.files import read_regular

OFFLINE = "eval:"
_MOST_POINTS = 12
_NOT_SHOWN = ("nats.", "s3.", "run.dir", "retention.")
_CHUNK = 1 << 20
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Score:
    value: float
    conditions: str = ""  # how it was measured: scores of other conditions cannot be compared
    low: float | None = None
    high: float | None = None


Scores = dict[int, dict[str, Score]]  # by version and name


def of_run(rows: Iterable[Mapping[str, Any]], results: Iterable[EvaluationResult]) -> Scores:
    """Return the scores of all versions, from the rows of ``metrics.jsonl`` and the results of `penstock eval`, oldest first."""
    found: Scores = {}
    for row in rows:
        version = row.get("version")
        if row.get("kind") == "eval" and isinstance(version, int):
            found.setdefault(version, {}).update(_during(row))
    for result in results:
        if result.version is not None:
            found.setdefault(result.version, {}).update(_offline_scores(result))
    return found


def _during(row: Mapping[str, Any]) -> Iterator[tuple[str, Score]]:
    source = str(row.get("split") or "eval")
    conditions = f"{row.get('num_prompts')} prompts, {row.get('num_samples')} samples, {row.get('success', '')}"
    values = {"accuracy": row.get("accuracy"), "reward": row.get("reward_mean")}
    pass_at = row.get("pass_at")
    values |= {f"pass@{k}": value for k, value in pass_at.items()} if isinstance(pass_at, dict) else {}
    for name, value in values.items():
        if (value := number(value)) is not None:
            yield f"{source}.{name}", Score(value, conditions)


def _offline_scores(result: EvaluationResult) -> Iterator[tuple[str, Score]]:
    data = " ".join(sorted(one.sha256[:12] for one in result.data))
    sampling = " ".join(f"{key}={value}" for key, value in sorted(result.sampling.items()))
    for source in result.sources:
        conditions = f"data {data}, {source.prompts} prompts, {result.k} samples, {sampling}, {result.success}"
        estimates: dict[str, Estimate | None] = {"accuracy": source.accuracy, "reward": source.reward}
        estimates |= {f"pass@{k}": one for k, one in source.pass_at.items()}
        estimates[f"maj@{result.k}"] = source.maj
        incomplete = "" if source.complete == source.prompts else f", {source.complete} complete"
        for name, one in estimates.items():
            if one is not None:
                yield f"{OFFLINE}{source.source}.{name}", Score(one.value, conditions + incomplete, one.low, one.high)


def names(scores: Scores) -> list[str]:
    return sorted({name for own in scores.values() for name in own})


def select(scores: Scores, stored: Sequence[int], by: str, least: float | None = None) -> tuple[int, Score]:
    """Return the stored version with the highest score, of equal ones the newest.

    Raises ConfigError when no stored version has the score, when scores were measured under different conditions, or when
    the highest is below ``least``.
    """
    scored = {version: scores[version][by] for version in stored if by in scores.get(version, {})}
    if not scored:
        known = ", ".join(names({version: scores.get(version, {}) for version in stored})) or "none"
        raise ConfigError(f"no stored version has the score {by}; scores of stored versions: {known}")
    conditions = {one.conditions: version for version, one in scored.items()}
    if len(conditions) > 1:
        (one, first), (other, second) = sorted(conditions.items(), key=lambda item: item[1])[:2]
        raise ConfigError(
            f"{by} was measured under different conditions and cannot be compared: version {first} with {one}; version {second} with "
            f"{other}; evaluate both alike with penstock eval"
        )
    version = max(scored, key=lambda one: (scored[one].value, one))
    if least is not None and scored[version].value < least:
        raise ConfigError(
            f"no stored version reaches {by} = {least:g}; the best is version {version} with {scored[version].value:.4g}"
        )
    return version, scored[version]


def write(run_folder: Path, version: int | None, state_root: str, scores: Scores) -> str:
    """Return the card of a version, None for the final model. Raises ConfigError when the run has no settings."""
    document = _config(run_folder)
    settings, origins = document["settings"], document.get("origins") or {}
    stored = [one for one in results.results_of(run_folder) if version is None or one.version == version]
    sections = [
        _front_matter(settings),
        _title(run_folder.name, version, state_root, settings),
        "## Evaluation\n\n" + ("\n".join(_evaluation(version, scores, stored)) or "No evaluation is stored."),
        "## Training\n\n" + "\n".join(_training(run_folder)),
        "## Settings\n\nWhat was set; everything else has its default.\n\n```toml\n"
        + "\n".join(_given(settings, origins))
        + "\n```",
        "## Data\n\n" + "\n".join(_data(settings, stored)),
        "## Licence\n\n<!-- Name the licence of this model here and in the field license above; that of the base model and of the data apply. -->",
    ]
    return "\n\n".join(sections) + "\n"


def _config(run_folder: Path) -> dict[str, Any]:
    path = run_folder / "config.json"
    try:
        document = json.loads(read_regular(path))
        if isinstance(document["settings"], dict):
            return document
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ConfigError(
        f"{path} has no settings of a run that can be read: a card needs the folder of the run; set run.dir"
    )


def _front_matter(settings: Mapping[str, Any]) -> str:
    path = str((settings.get("model") or {}).get("path", ""))
    is_id = _HUB_ID.fullmatch(path) is not None
    base = (
        f"base_model: {json.dumps(path)}" if is_id else f"# base_model: to be filled in; trained from {_public(path)}"
    )
    # Comments where the user is to write: the hub refuses a card whose license is there and is none that it knows.
    return (
        "---\n# license: to be filled in\nlibrary_name: transformers\npipeline_tag: text-generation\n"
        f"{base}\ntags:\n- penstock\n- reinforcement-learning\n---"
    )


def _title(run: str, version: int | None, state_root: str, settings: Mapping[str, Any]) -> str:
    name = f"# {run}, " + ("final model" if version is None else f"version {version}")
    algorithm = (settings.get("algorithm") or {}).get("name", "unknown")
    digest = f" Digest of the weights: `{state_root}`." if state_root else ""
    return f"{name}\n\nTrained with [Penstock](https://pypi.org/project/penstock/) {__version__}, algorithm `{algorithm}`.{digest}"


def _evaluation(version: int | None, scores: Scores, results: Sequence[EvaluationResult]) -> Iterator[str]:
    chosen = max(scores, default=None) if version is None else version
    during = (
        {name: one for name, one in scores.get(chosen, {}).items() if not name.startswith(OFFLINE)}
        if chosen is not None
        else {}
    )
    if during:
        yield f"During the run, of version {chosen}:\n\n| metric | value | measured on |\n|---|---|---|"
        for name, one in sorted(during.items()):
            yield f"| {_cell(name)} | {one.value:.4g} | {_cell(one.conditions)} |"
        yield ""
    for result in results:
        yield from _offline(result)


def _offline(result: EvaluationResult) -> Iterator[str]:
    yield f"`penstock eval` of {_cell(_public(result.model))}, {result.k} samples of each prompt, 95 % intervals over prompts:\n"
    yield "| source | prompts | reward | correct | " + f"pass@{result.k} | maj@{result.k} |\n|---|---|---|---|---|---|"
    for source in result.sources:
        cells = [result_table.text(source.reward, as_share=False), result_table.text(source.accuracy)]
        cells += [result_table.text(source.pass_at.get(result.k)), result_table.text(source.maj)]
        yield f"| {_cell(source.source)} | {source.complete} of {source.prompts} | {' | '.join(cells)} |"
    yield f"\nCorrect: {_cell(result.success)}. Majority: {_cell(result.answer)}.\n"


def _training(run_folder: Path) -> Iterator[str]:
    found = curves.read(run_folder)
    held_out = found.held_out
    yield f"{found.last_step or 0} steps.\n"
    for name, points in (("training reward", found.rewards), (held_out.name, held_out.points)):
        if points:
            thinned = _thinned(points)
            yield f"| step | {' | '.join(str(step) for step, _ in thinned)} |"
            yield "|---" * (len(thinned) + 1) + "|"
            yield f"| {name} | {' | '.join(f'{value:.3g}' for _, value in thinned)} |\n"


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    if len(points) <= _MOST_POINTS:
        return list(points)
    numbers = sorted({round(i * (len(points) - 1) / (_MOST_POINTS - 1)) for i in range(_MOST_POINTS)})
    return [points[number] for number in numbers]


def _given(settings: Mapping[str, Any], origins: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from _given(value, origins, f"{key}.")
        elif origins.get(key, "default") != "default" and not key.startswith(_NOT_SHOWN):
            yield f"{key} = {json.dumps(_public(value), ensure_ascii=False)}"


def _public(value: Any) -> Any:
    if isinstance(value, list):
        return [_public(one) for one in value]
    return " ".join(Path(value).name.split()) if isinstance(value, str) and Path(value).is_absolute() else value


def _data(settings: Mapping[str, Any], results: Sequence[EvaluationResult]) -> Iterator[str]:
    yield "| use | file | sha256 |\n|---|---|---|"
    section = settings.get("data") or {}
    for use, value in (("training", section.get("train")), ("held out", section.get("eval"))):
        for file in value if isinstance(value, list) else [value] if value else []:
            yield f"| {use} | {_cell(Path(str(file)).name)} | {_digest(Path(str(file)))} |"
    for name in sorted({(Path(one.path).name, one.sha256) for result in results for one in result.data}):
        yield f"| evaluation | {_cell(name[0])} | `{name[1]}` |"


def _digest(path: Path) -> str:
    """Return the sha256 of a file as it is now; the run may have read another content."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError:
        return "not on this machine"
    return f"`{digest.hexdigest()}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
