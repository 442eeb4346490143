"""List the versions of a run with tags, scores and lineage, tag them, select one, and average the newest.

`penstock model list`, `tag`, `select`, and `merge RUN --average-last N`. A tag, in ``tags.json`` of the run's folder, names a version and
the digest of its weights. A version that the run deletes keeps its tag and loses its objects, unless its model was written to
``models/TAG`` in the run's folder when it was tagged.

A score ``SOURCE.METRIC`` is of an evaluation during the run (``eval`` is data.eval), ``eval:SOURCE.METRIC`` of `penstock eval`,
the newest one of the version. Metrics are accuracy, reward, pass@K, and of `penstock eval` maj@K.
"""

from __future__ import annotations

import contextlib
import json as json_text
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.console import evaluation_results
from penstock.console.connections import NamedRun
from penstock.console.evaluation_results import Estimate, EvaluationResult
from penstock.console.registry.model_merge import Recipe, merge_folders
from penstock.console.report import curves
from penstock.console.report.event_fields import number
from penstock.console.terminal import print_table
from penstock.console.tools import weights
from penstock.console.tools.weights import export, stored_versions
from penstock.protocol.errors import ConfigError
from penstock.protocol.files import atomic_write, read_document

FILE = "tags.json"
MODELS = "models"
RESERVED = ("best", "head")  # the run itself gives these
_NAME = re.compile(r"(?=.*[A-Za-z_])[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
Row = dict[str, Any]
OFFLINE = "eval:"
_MOST_SCORES = 6  # columns of the table; --json has all


@dataclass(frozen=True, slots=True)
class Score:
    value: float
    conditions: str = ""  # how it was measured: scores of other conditions cannot be compared
    low: float | None = None
    high: float | None = None


Scores = dict[int, dict[str, Score]]  # by version and name


def scores_of_run(rows: Iterable[Mapping[str, Any]], results: Iterable[EvaluationResult]) -> Scores:
    """Return the scores of all versions, from the rows of ``metrics.jsonl`` and the results of `penstock eval`, oldest first."""
    scores: Scores = {}
    for row in rows:
        version = row.get("version")
        if row.get("kind") == "eval" and isinstance(version, int):
            scores.setdefault(version, {}).update(_during(row))
    for result in results:
        if result.version is not None:
            scores.setdefault(result.version, {}).update(_offline_scores(result))
    return scores


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
    data = " ".join(sorted(entry.sha256[:12] for entry in result.data))
    sampling = " ".join(f"{key}={value}" for key, value in sorted(result.sampling.items()))
    for source in result.sources:
        conditions = f"data {data}, {source.prompts} prompts, {result.k} samples, {sampling}, {result.success}"
        estimates: dict[str, Estimate | None] = {"accuracy": source.accuracy, "reward": source.reward}
        estimates |= {f"pass@{k}": entry for k, entry in source.pass_at.items()}
        estimates[f"maj@{result.k}"] = source.maj
        incomplete = "" if source.complete == source.prompts else f", {source.complete} complete"
        for name, entry in estimates.items():
            if entry is not None:
                yield (
                    f"{OFFLINE}{source.source}.{name}",
                    Score(entry.value, conditions + incomplete, entry.low, entry.high),
                )


def stored_scores(run_folder: Path) -> Scores:
    """Return the scores of all versions that a run's folder has."""
    return scores_of_run(curves.rows(run_folder), evaluation_results.results_of(run_folder))


def score_names(scores: Scores) -> list[str]:
    return sorted({name for named in scores.values() for name in named})


def best_version(scores: Scores, stored: Sequence[int], by: str, least: float | None = None) -> tuple[int, Score]:
    """Return the stored version with the highest score, of equal ones the newest.

    Raises ConfigError when no stored version has the score, when scores were measured under different conditions, or when
    the highest is below ``least``.
    """
    scored = {version: scores[version][by] for version in stored if by in scores.get(version, {})}
    if not scored:
        known = ", ".join(score_names({version: scores.get(version, {}) for version in stored})) or "none"
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


class Tag(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Annotated[int, Field(ge=0)]
    state_root: str = ""
    at: float = 0.0  # seconds since 1970
    note: str = ""


class _Tags(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_tag: Literal["model_tags.v1"] = "model_tags.v1"
    tags: dict[str, Tag] = {}


def read_tags(run_folder: Path) -> dict[str, Tag]:
    path = run_folder / FILE
    try:
        return _Tags.model_validate_json(read_document(path)).tags
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as err:
        raise ConfigError(
            f"{path} cannot be read ({str(err).splitlines()[0]}); restore it, or remove it to lose its tags"
        ) from None


def check_tag_name(name: str) -> str:
    """Return a tag's name; raises ConfigError for one that could be mistaken for a version or a path."""
    if name in RESERVED or not _NAME.fullmatch(name):
        raise ConfigError(
            f"tag {name!r}: expected 1 to 64 of A-Z, a-z, 0-9, '_', '.', '-' with a letter among them, and not {' or '.join(RESERVED)}, "
            "which the run gives itself"
        )
    return name


def store_tag(run_folder: Path, name: str, tag: Tag, *, move: bool = False) -> Tag | None:
    """Store a tag and return the one that it replaces; raises ConfigError if there is one and ``move`` is not set."""
    known = read_tags(run_folder)
    before = known.get(check_tag_name(name))
    if before is not None and before.version != tag.version and not move:
        raise ConfigError(
            f"tag {name} of run {run_folder.name} names version {before.version}; to move it to version {tag.version}, add --move"
        )
    _write_tags(run_folder, {**known, name: tag})
    return before


def delete_tag(run_folder: Path, name: str) -> Tag:
    known = read_tags(run_folder)
    if name not in known:
        raise ConfigError(f"run {run_folder.name} has no tag {name}; it has {', '.join(sorted(known)) or 'none'}")
    _write_tags(run_folder, {key: value for key, value in known.items() if key != name})
    return known[name]


def _write_tags(run_folder: Path, tags: dict[str, Tag]) -> None:
    atomic_write(run_folder / FILE, _Tags(tags=tags).model_dump_json(indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class Registry:
    run: str
    folder: Path
    rows: list[Row]  # stored versions, oldest first, as `penstock weights --json` has them
    scores: Scores
    tags: dict[str, Tag]

    @classmethod
    def read(cls, run: NamedRun) -> Registry:
        folder = run.folder
        rows = stored_versions(run)
        return cls(run.id, folder, rows, stored_scores(folder), read_tags(folder))

    @property
    def stored(self) -> list[int]:
        return [row["version"] for row in self.rows]

    def version(self, name: str) -> int:
        """Return the version of a number, a tag, ``best`` or ``head``; raises ConfigError."""
        if name.isdecimal():
            return int(name)
        if name in self.tags:
            return self.tags[name].version
        for row in self.rows:
            if (name == "head" and row["head"]) or (name == "best" and _is_best(row)):
                return row["version"]
        raise ConfigError(
            f"run {self.run} has no version or tag {name}; tags: {', '.join(sorted(self.tags)) or 'none'}; see: penstock model list {self.run}"
        )

    def row(self, version: int) -> Row | None:
        return next((row for row in self.rows if row["version"] == version), None)

    def listed(self) -> list[Row]:
        known = sorted({*self.stored, *self.scores, *(tag.version for tag in self.tags.values())})
        return [self._listed(version) for version in known]

    def _listed(self, version: int) -> Row:
        row = self.row(version) or {}
        user_tags = [name for name, tag in sorted(self.tags.items()) if tag.version == version]
        automatic_tags = [name for name, is_so in (("best", row and _is_best(row)), ("head", row.get("head"))) if is_so]
        return {
            "version": version,
            "step": row.get("step"),
            "parent": row.get("parent"),
            "stored": bool(row),
            "models": [str(path) for name in user_tags if (path := self.folder / MODELS / name).is_dir()],
            "state_root": row.get("state_root", ""),
            "tags": [*automatic_tags, *user_tags],
            "kept": row.get("kept", weights.NOT_KEPT),
            "scores": {name: asdict(score) for name, score in sorted(self.scores.get(version, {}).items())},
        }


def _is_best(row: Row) -> bool:
    best = row["kept"]["best"]
    return best is not None and best["rank"] == 1


def print_list(run: NamedRun, *, as_json: bool) -> int:
    registry = Registry.read(run)
    rows = registry.listed()
    if as_json:
        print(json_text.dumps(rows))
        return 0
    columns = score_names(registry.scores)
    shown = columns[:_MOST_SCORES]
    numbers, texts = ("version", "step", "parent", *shown), ("weights", "tags", "kept")
    print_table((*numbers, *texts), (_cells(row, shown) for row in rows), right=numbers, wide=texts)
    if hidden := columns[_MOST_SCORES:]:
        print(f"not shown: {', '.join(hidden)} (--json has them)")
    if columns:
        print(f"next: penstock model select {run} --by {columns[0]}")
    return 0


def set_tag(run: NamedRun, version: str, name: str, *, keep: bool = False, move: bool = False, note: str = "") -> int:
    """Tag a stored version, with ``keep`` also write its model to the run's folder; return the exit code. Raises PenstockError."""
    check_tag_name(name)
    registry = Registry.read(run)
    number = registry.version(version)
    row = registry.row(number)
    if row is None:
        raise ConfigError(f"run {run} has no version {number} in the object store; see: penstock model list {run}")
    before = registry.tags.get(name)
    folder = registry.folder / MODELS / name
    if folder.exists() and before is not None and before.version != number:
        raise ConfigError(
            f"{folder} holds version {before.version}; remove it before the tag is moved, or choose another name"
        )
    store_tag(
        registry.folder, name, Tag(version=number, state_root=row["state_root"], at=time.time(), note=note), move=move
    )
    if keep and not folder.exists():
        with contextlib.redirect_stdout(sys.stderr):
            export(run, number, folder)
    moved = f", moved from version {before.version}" if before is not None and before.version != number else ""
    kept = f"; its model is in {folder}" if folder.exists() else ""
    print(f"run {run}: tag {name} names version {number}{moved}{kept}")
    return 0


def remove_tag(run: NamedRun, name: str) -> int:
    """Remove a tag; what was written to ``models`` stays. Return the exit code. Raises ConfigError."""
    tag = delete_tag(run.folder, name)
    kept = run.folder / MODELS / name
    print(f"run {run}: tag {name} of version {tag.version} removed{f'; {kept} stays' if kept.exists() else ''}")
    return 0


def print_selected(
    run: NamedRun, by: str, *, least: float | None = None, tag: str | None = None, as_json: bool = False
) -> int:
    registry = Registry.read(run)
    version, score = best_version(registry.scores, registry.stored, by, least)
    row = registry.row(version)
    assert row is not None
    if tag is not None:
        store_tag(
            registry.folder,
            tag,
            Tag(version=version, state_root=row["state_root"], at=time.time(), note=f"{by} {score.value:.6g}"),
            move=True,
        )
    if as_json:
        print(json_text.dumps({"run": run.id, "version": version, "by": by, "tag": tag, **asdict(score)}))
        return 0
    interval = "" if score.low is None or score.high is None else f" [{score.low:.4g}, {score.high:.4g}]"
    print(f"version {version} of run {run}: {by} = {score.value:.4g}{interval}{f', tagged {tag}' if tag else ''}")
    print(f"next: penstock weights export {run} --version {version} --to FOLDER", file=sys.stderr)
    return 0


def _cells(row: Row, columns: Sequence[str]) -> tuple[object, ...]:
    numbers = ["–" if row[name] is None else row[name] for name in ("version", "step", "parent")]
    numbers += [f"{row['scores'][name]['value']:.3f}" if name in row["scores"] else "–" for name in columns]
    where = "stored" if row["stored"] else ", ".join(row["models"]) or "gone"
    return *numbers, where, ", ".join(row["tags"]), weights.why(row["kept"])


def newest(versions: Sequence[int], count: int, run: str) -> list[int]:
    """Return the newest versions, oldest first; raises ConfigError when there are fewer or fewer than two are asked for."""
    if count < 2:
        raise ConfigError(f"--average-last {count}: a mean needs at least 2 versions")
    if len(versions) < count:
        raise ConfigError(
            f"--average-last {count}: run {run} has {len(versions)} stored versions ({', '.join(map(str, versions)) or 'none'}); ask for "
            "fewer, or keep more (trainer.keep_versions)"
        )
    return sorted(versions)[-count:]


def average_last(run: NamedRun, count: int, to: Path) -> list[int]:
    """Write the mean of a run's newest versions as a model folder; return the versions. Raises PenstockError.

    The exported versions need as much disk space as so many models, beside ``to``, until it is written.
    """
    if to.exists():
        raise ConfigError(f"{to} exists; name another folder, or remove it")
    chosen = newest([row["version"] for row in stored_versions(run)], count, run.id)
    to.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{to.name}-", dir=to.parent))
    try:
        folders = [scratch / f"{run}@{version}" for version in chosen]
        with contextlib.redirect_stdout(sys.stderr):
            for version, folder in zip(chosen, folders, strict=True):
                export(run, version, folder)
        merge_folders(folders, None, to, Recipe("linear", (1.0,) * count))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return chosen
