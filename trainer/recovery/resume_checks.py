"""What is checked before a run is resumed: model, ranks, what is left to do, steps to make again; imports no torch.

The settings of earlier sessions are read from the run's record.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from penstock.protocol.config.run_file import refuse_masks
from penstock.protocol.errors import ConfigError
from penstock.protocol.heartbeats import cpu_seconds
from penstock.protocol.record.checkpoint_state import PARTIAL
from penstock.protocol.secret_values import MASK, hide
from penstock.trainer.algorithm.algorithm_settings import RECORDED
from penstock.trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from penstock.trainer.evaluation.evaluation_schedule import EvaluationLog
    from penstock.trainer.training import Training

_CONNECTIONS = ("nats", "s3")  # addresses of servers may change between a run and its replay
# A step's weights do not depend on these: when the run waits, saves, publishes, signs, stops, or kills itself in tests.
_WITHOUT_EFFECT = frozenset(
    f"trainer.{key}"
    for key in (
        "kill_at", "lease_s", "rank_deadline_s", "resume", "checkpoint_every", "checkpoint_every_s", "keep_checkpoints",
        "store_checkpoints", "local_checkpoints", "signing_key_file", "keep_versions", "collect_deadline_s",
        "keep_best", "verify_export", "milestone_every", "keep_milestones", "max_mismatch", "mismatch_patience",
        "check_texts", "store_logprobs", "min_entropy", "peak_flops",
    )
)  # fmt: skip
# What runs did whose record lacks these keys of [algorithm].
_BEFORE_THE_KEY = {"empty_batch": "ignore_filters", "opsm_level": "token", "gspo_token_limit": False}
_SECTIONS = ("model", "rollout", "algorithm", "critic", "trainer")  # read by a step
_READ_WITH_PAIRS = ("dpo", "data")  # where a step trains on pairs beside its groups
_ALSO_READ = ("data.from_run", "run.seed")  # the seed decides which groups are in which mini-batch

Flat = dict[str, Any]

_SHAPE = (
    "architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings",
)  # fmt: skip
SUMMARY_FILE = "trainer.json"


def read_settings(document: bytes, *, where: str) -> tuple[TrainerSettings, Flat]:
    """Return the settings of a `config_document`, and the same by dotted key; raises ConfigError naming ``where``."""
    try:
        stored = json.loads(document)
        values = stored["settings"]
        refuse_masks(stored, (*_SECTIONS, *_READ_WITH_PAIRS), where)
        lora = values["model"].get("lora", {})
        if lora.get("rank") and "seed" not in lora:  # of a release whose adapters began with 0
            lora = {**lora, "seed": 0}
        algorithm = {**_BEFORE_THE_KEY, **values.get("algorithm", {})}
        read = {**values, "model": {**values["model"], "lora": lora}, "algorithm": algorithm}
        settings = TrainerSettings.model_validate(
            {k: v for k, v in read.items() if k not in _CONNECTIONS}, context=RECORDED
        )
    except ValidationError as err:
        first = err.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{where}: these settings are not valid in this build: {key or 'settings'}: {first['msg']}; "
            "replay with the version of penstock that made the run"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise ConfigError(
            f"{where} does not hold the settings of a run ({type(err).__name__}: {err}); restore the file"
        ) from None
    return settings, flat(values)


def flat(values: Mapping[str, Any], prefix: str = "") -> Flat:
    """Return nested settings by dotted key, without the addresses of servers."""
    flattened: Flat = {}
    for key, value in values.items():
        if not prefix and key in _CONNECTIONS:
            continue
        if isinstance(value, Mapping) and value:
            flattened |= flat(value, f"{prefix}{key}.")
        else:
            flattened[f"{prefix}{key}"] = value
    return flattened


def differences(recorded: Flat, other: Flat, *, ignoring: Iterable[str] = ()) -> list[str]:
    return [
        f"{key} = {_shown(key, other)}, recorded {_shown(key, recorded)}"
        for key in _differing(recorded, other, ignoring)
    ]


def _differing(recorded: Flat, other: Flat, ignoring: Iterable[str] = ()) -> list[str]:
    keys = sorted((recorded.keys() | other.keys()) - set(ignoring))
    return [key for key in keys if _value(recorded, key) != _value(other, key)]


def _value(settings: Flat, key: str) -> Any:
    """Return a setting; an empty table is none, since one with entries has a key for each."""
    value = settings.get(key)
    return None if value == {} else value


def changed_settings(recorded: Path, config: bytes) -> list[str]:
    stored, document = _read(recorded), json.loads(config)
    if not isinstance(stored.get("settings"), dict):
        return []  # the run's record has them
    before, now, digests = flat(stored["settings"]), flat(document["settings"]), stored.get("digests", {})
    epochs = now.get("trainer.epochs")
    counted = ["trainer.steps"] if epochs is not None and epochs == before.get("trainer.epochs") else []
    hidden = [key for key, digest in document.get("digests", {}).items() if digest != digests.get(key, digest)]
    return [
        *(f"{key} = {_shown(key, now)}, was {_shown(key, before)}" for key in _differing(before, now, counted)),
        *(f"{key} = {MASK}, was another value" for key in hidden),
    ]


def _shown(key: str, settings: Flat) -> str:
    return json.dumps(hide(key.split("."), settings.get(key)))


def what_steps_read(settings: Flat) -> Flat:
    """Return the settings that a step's weights depend on: sessions that agree in them are replayed as one."""
    sections = _SECTIONS + (_READ_WITH_PAIRS if settings.get("algorithm.dpo_coefficient") else ())
    return {
        key: value
        for key, value in settings.items()
        if (key.split(".")[0] in sections and key not in _WITHOUT_EFFECT) or key in _ALSO_READ
    }


def check_same_model(run_folder: Path, model_path: Path) -> None:
    """Raise ConfigError if a run with a checkpoint is resumed with a model of another shape.

    The model of the earlier sessions is the one in the run's ``config.json``. Where it cannot be read any more nothing
    is checked here: the checkpoint is refused when it is loaded.
    """
    if not any((run_folder / "checkpoints").glob("step*")):
        return
    recorded = _read(run_folder / "config.json").get("settings")
    model = recorded.get("model") if isinstance(recorded, dict) else None
    earlier = model.get("path") if isinstance(model, dict) else None
    if not isinstance(earlier, str) or Path(earlier) == model_path:
        return
    before, now = _read(Path(earlier) / "config.json"), _read(model_path / "config.json")
    if not before or not now:
        return
    other = [key for key in _SHAPE if before.get(key) != now.get(key)]
    if other:
        raise ConfigError(
            f"run {run_folder.name} has checkpoints of the model {earlier} ({other[0]} = {before.get(other[0])}), and "
            f"model.path = {model_path} has {other[0]} = {now.get(other[0])}: set model.path back to resume the run, "
            "or start another one from this model with another run.id"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def check_same_ranks(run_folder: Path, num_ranks: int) -> None:
    """Raise ConfigError if DeepSpeed wrote the newest checkpoint of a run on another number of ranks.

    Every rank wrote its random state into it. A checkpoint without any is refused when it is loaded.
    """
    folders = sorted(
        folder for folder in (run_folder / "checkpoints").glob("step*") if not folder.name.endswith(PARTIAL)
    )
    if not folders or any(folders[-1].rglob("rank*.safetensors")):
        return
    written_by = len({file.name for file in folders[-1].rglob("random_state_*.bin")})
    if written_by and written_by != num_ranks:
        raise ConfigError(
            f"{folders[-1]} was written by {written_by} rank(s), and trainer.num_ranks = {num_ranks}: an earlier "
            f"release stored the optimizer in one part for each. Resume with trainer.num_ranks={written_by} until its "
            "next checkpoint, or start another run from its weights: "
            f"`penstock weights {run_folder.name}` lists them, `penstock weights export {run_folder.name} --version V "
            f"--to FOLDER` writes them, then `penstock train` with model.path=FOLDER and another run.id"
        )


def write_summary(training: Training, results: EvaluationLog, *, is_complete: bool, wall_s: float) -> None:
    busy_s, idle_s = training.activity.totals()
    totals = training.issuer.totals()
    document: dict[str, Any] = {
        "run_id": training.settings.run.id,
        "finished": training.is_done,
        "early_stop": training.early_stop.document(),
        "complete": is_complete,
        "steps": training.num_steps_done,
        "version": training.version,
        "groups": training.issuer.groups(),
        "dropped_tokens": totals["dropped_tokens"],
        "staleness_tokens": totals["staleness_tokens"],
        "tokens_trained": totals["tokens_trained"],
        "versions_published": training.publisher.num_published,
        "versions_skipped": training.publisher.num_skipped,
        "anchors_written": training.publisher.versions.models.full_snapshots.num_written,
        "evaluations": [asdict(result) for result in results.results],
        "idle_share": idle_s / max(busy_s + idle_s, 1e-9),
        "wall_s": wall_s,
        "cpu_s": cpu_seconds(),
    }
    (training.settings.run.folder / SUMMARY_FILE).write_text(json.dumps(document, indent=1) + "\n")


def finished_notice(settings: TrainerSettings) -> str | None:
    """Return what to tell someone who starts a finished run again; None if the run has something to do.

    A run is finished when its trainer made all ``trainer.steps``, exported the model, evaluated it and exited.
    """
    completed = _complete_run(settings.run.folder / SUMMARY_FILE, settings.run.id)
    if completed is None or not settings.trainer.resume:
        return None
    done, early = completed
    folder = settings.run.folder
    steps = settings.trainer.steps if settings.trainer.epochs is None else _counted_steps(settings)
    if steps is None:
        return None
    if early and done < steps and settings.eval.early_stop:
        return (
            f"run {settings.run.id} is finished after {done} of {steps} steps, it {early}. Its model is in "
            f"{folder / 'model'}, the best version: penstock weights export {settings.run.id} --best --to FOLDER. "
            "Nothing was started or changed. To train further, set eval.early_stop=0 or a larger number; to train "
            "anew, choose another run.id"
        )
    if done < steps:
        return None
    longer = f"trainer.steps above {done}" if settings.trainer.epochs is None else "trainer.epochs"
    return (
        f"run {settings.run.id} is finished: {done} of {steps} steps, model in {folder / 'model'}, report in "
        f"{folder / 'report.md'}. Nothing was started or changed. To train further, raise {longer}; "
        f"to train anew, choose another run.id (run.id={settings.run.id}-2)"
    )


def _counted_steps(settings: TrainerSettings) -> int | None:
    """Return the steps that the last session counted for the same epochs; None if it trained for another length."""
    try:
        recorded: Any = json.loads((settings.run.folder / "config.json").read_bytes())["settings"]
        before, rollout = recorded["trainer"], recorded["rollout"]
        is_same = before["epochs"] == settings.trainer.epochs
        is_same = is_same and rollout["groups_per_step"] == settings.rollout.groups_per_step
        return int(before["steps"]) if is_same else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _complete_run(path: Path, run_id: str) -> tuple[int, str] | None:
    document = _read(path)  # empty: no session has ended yet
    if document.get("run_id") != run_id or document.get("complete") is not True:
        return None
    steps, early = document.get("steps"), document.get("early_stop")
    text = early.get("text") if isinstance(early, dict) else ""
    return (steps, str(text or "")) if isinstance(steps, int) else None


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The steps that an earlier session made after the checkpoint that the run resumes from."""

    steps: int = 0
    groups: int = 0
    seconds: float = 0.0


def read_rolled_back(lines: bytes) -> RolledBack:
    steps = groups = 0
    seconds = 0.0
    for line in lines.splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # the trainer was killed while it wrote this line
            continue
        if isinstance(row, dict) and row.get("kind") == "step":
            steps += 1
            scored_by = row.get("scored_by")
            groups += sum(int(_number(count)) for count in scored_by.values()) if isinstance(scored_by, dict) else 0
            seconds += _number(row.get("wait_s")) + _number(row.get("step_s"))
    return RolledBack(steps, groups, seconds)


def makes_same_steps(recorded: Path, config: bytes) -> bool:
    """Return True if the settings that a step's weights depend on are those of the session before."""
    before = _read(recorded).get("settings")
    return isinstance(before, dict) and what_steps_read(flat(before)) == what_steps_read(
        flat(json.loads(config)["settings"])
    )


def describe_rolled_back(rolled_back: RolledBack, *, resumed_step: int | None, num_again: int = 0) -> str:
    if resumed_step is None and not rolled_back.steps:
        return ""
    start = (
        f"resumed at step {resumed_step}"
        if resumed_step is not None
        else "no checkpoint was made yet: training starts again at step 0"
    )
    if not rolled_back.steps:
        return f"{start}; no step was lost"
    again = f"; {num_again} steps are made again of the groups they had" if num_again else ""
    return (
        f"{start}: rolled back {rolled_back.steps} steps, {rolled_back.groups} groups ({rolled_back.seconds:.0f} s of "
        f"training) since the last checkpoint; trainer.checkpoint_every_s limits this{again}"
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
