"""The body of ``POST /v1/runs``: a run file, settings, or the platform guide's job fields, as one text in TOML.

Pure.

docs/runs_api.md has the table of what each field becomes. For `sft`, `dpo` and `rm` data, learning rate, batch size and
epochs are keys of the section of that name; `rollout_n`, `kl_coef` and `context_length` are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from penstock.console.web.launchers import launcher as launchers
from penstock.console.web.problems import Problem
from penstock.protocol.config.run_file import toml_key, toml_text
from penstock.protocol.errors import ConfigError
from penstock.protocol.subjects import check_run_id, similar_run_id

_PATH = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f\x7f]+$")]
Command = Literal["train", "sft", "dpo", "rm"]
_FINE_TUNING: dict[str, Command] = {"sft": "sft", "dpo": "dpo", "rm": "rm"}
_DIRECT = {
    "model_path": ("model", "path"),
    "train_data_path": ("data", "train"),
    "eval_data_path": ("data", "eval"),
    "learning_rate": ("trainer", "lr"),
    "batch_size": ("rollout", "groups_per_step"),
    "rollout_n": ("rollout", "group_size"),
    "kl_coef": ("algorithm", "kl_coefficient"),
    "num_epochs": ("trainer", "epochs"),
}
_OF_SECTION = {
    "train_data_path": "data",
    "eval_data_path": "eval_data",
    "learning_rate": "lr",
    "batch_size": "batch_size",
    "num_epochs": "epochs",
}  # of [sft], [dpo] and [rm]
_WITH_ROLLOUTS = {
    **dict.fromkeys(("workers", "serve", "rollout_n"), "it trains on given answers"),
    "kl_coef": "dpo.beta is the weight of its reference",
    "context_length": "rows have at most trainer.micro_batch_tokens tokens, pairs half of it",
}
_COMPUTED = ("name", "algorithm", "context_length", "model_size", "num_gpus")


class RunRequest(BaseModel):
    """A run to create: ``run_file``, or ``settings`` and the guide's job fields, which settings overrule."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "example": {
                "run": "math",
                "settings": {"model": {"path": "Qwen3-0.6B"}, "data": {"train": "gsm8k.jsonl"}},
                "start": True,
            }
        },
    )

    run: str | None = Field(None, max_length=48, description="Its name; default run.id of the settings, or `name`.")
    run_file: str | None = Field(None, max_length=512 * 1024, description="A run file: TOML, as for penstock train.")
    settings: dict[str, Any] | None = Field(None, description="The sections of a run file as an object.")
    start: bool = Field(False, description="Start it too, as POST /v1/runs/{run}/start.")
    command: Command | None = Field(
        None,
        description="What trains: train (rollouts and rewards), or sft, dpo or rm (given answers, without services). "
        "Default: the job field algorithm where it names one of them, else train.",
    )
    launcher: Annotated[str, AfterValidator(launchers.named)] = Field(
        "local", description="Where it runs.", json_schema_extra={"enum": [*launchers.LAUNCHERS.names()]}
    )
    launcher_options: dict[str, Any] = Field({}, description="Options of the launcher.")
    workers: int | None = Field(
        None,
        ge=0,
        le=256,
        description="Rollout workers on the trainer's machine; 0: the trainer alone, with NATS, S3 and the other "
        "services elsewhere. Default: 2, with engines on GPUs one for all of them.",
    )
    serve: tuple[_PATH, ...] = Field((), max_length=16, description="Reward files to serve, as penstock train --serve.")
    description: str = Field("", max_length=10_000)
    name: str | None = Field(None, min_length=1, max_length=200, description="Job field: becomes the run's name.")
    model_path: _PATH | None = Field(None, description="Job field: model.path.")
    model_size: str | None = Field(None, max_length=100, description="Job field: kept as text.")
    algorithm: str | None = Field(
        None, max_length=100, description="Job field: algorithm.name, or sft, dpo or rm: the command."
    )
    train_data_path: _PATH | None = Field(None, description="Job field: data.train.")
    eval_data_path: _PATH | None = Field(None, description="Job field: data.eval.")
    num_gpus: int | None = Field(None, ge=0, le=100_000, description="Job field: GPUs that the launcher asks for.")
    learning_rate: float | None = Field(None, gt=0, le=1, description="Job field: trainer.lr.")
    batch_size: int | None = Field(None, ge=1, le=10**9, description="Job field: rollout.groups_per_step.")
    num_epochs: float | None = Field(None, gt=0, le=10**6, description="Job field: passes over the data.")
    context_length: int | None = Field(None, ge=2, le=10**9, description="Job field: prompt and completion together.")
    rollout_n: int | None = Field(None, ge=1, le=10**6, description="Job field: rollout.group_size.")
    kl_coef: float | None = Field(None, ge=0, le=10**6, description="Job field: algorithm.kl_coefficient.")

    @property
    def command_name(self) -> Command:
        """The command that trains. Raises Problem when ``command`` and ``algorithm`` name different ones."""
        named = (self.algorithm or "").strip().lower()
        by_algorithm = _FINE_TUNING.get(named)
        if self.command is not None and self.algorithm is not None and self.command != (by_algorithm or "train"):
            raise Problem(
                422,
                f"command = {self.command} comes with algorithm = {self.algorithm}",
                expected="one of them, or both of the same training",
                got=f"command = {self.command}, algorithm = {self.algorithm}",
                fix="leave one out",
            )
        return self.command or by_algorithm or "train"


def run_file_text(request: RunRequest) -> str:
    fields = [name for name in (*_DIRECT, *_COMPUTED[1:3]) if getattr(request, name) is not None]
    if request.run_file is not None:
        if conflicts := [*fields, *(["settings"] if request.settings is not None else [])]:
            raise Problem(
                422,
                f"run_file comes with {', '.join(conflicts)}",
                expected="run_file alone, or settings with job fields",
                got=f"run_file and {', '.join(conflicts)}",
                fix="write these settings into run_file",
            )
        return request.run_file
    if request.settings is None and not fields:
        raise Problem(
            422,
            "the request has no settings",
            expected="run_file, settings, or job fields such as model_path and train_data_path",
            fix="send one of them",
        )
    sections: dict[str, Any] = {}
    command = request.command_name
    for name, (section, key) in _keys(command).items():
        if (value := getattr(request, name)) is not None:
            sections.setdefault(section, {})[key] = value
    if command == "train" and request.algorithm is not None:
        sections.setdefault("algorithm", {})["name"] = request.algorithm.strip().lower()
    _merge(sections, request.settings or {})
    _length(sections, "trainer" if command == "train" else command)
    if command == "train":
        _lengths(request, sections)
    return as_toml(sections)


def _keys(command: Command) -> dict[str, tuple[str, str]]:
    if command == "train":
        return _DIRECT
    section_keys = {name: (command, key) for name, key in _OF_SECTION.items()}
    return {"model_path": _DIRECT["model_path"], **section_keys}


def refuse_rollouts(request: RunRequest, command: Command) -> None:
    """Refuse what only a run with rollouts has. Raises Problem."""
    for name, reason in _WITH_ROLLOUTS.items():
        if name in request.model_fields_set and getattr(request, name) is not None:
            raise Problem(
                422,
                f"{name} comes with {command}",
                expected=f"fields of {command}, which has no rollouts",
                got=f"{name} = {getattr(request, name)}",
                fix=f"leave {name} out: {reason}",
            )


def run_name(request: RunRequest, settings: Mapping[str, Any]) -> str:
    section = settings.get("run")
    of_settings = section.get("id") if isinstance(section, dict) else None
    if request.run is not None or isinstance(of_settings, str):
        return check_run_id(request.run if request.run is not None else str(of_settings))
    if request.name is not None:
        return check_run_id(similar_run_id(request.name) or request.name)
    raise ConfigError("the run has no name: set run, run.id in the settings, or the job field name")


def as_toml(sections: Mapping[str, Any]) -> str:
    lines: list[str] = []
    tables: list[str] = []
    for section, values in sections.items():
        if isinstance(values, dict):
            tables += [
                f"[{toml_key((section,))}]",
                *(f"{toml_key((key,))} = {toml_text(value)}" for key, value in values.items()),
                "",
            ]
        else:
            lines.append(f"{toml_key((section,))} = {toml_text(values)}")
    return "\n".join([*lines, *tables]) + "\n"


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _length(sections: dict[str, Any], section: str) -> None:
    table = sections.get(section)
    if isinstance(table, dict) and {"steps", "epochs"} <= table.keys():
        raise Problem(
            422,
            "the request has steps and epochs",
            expected=f"the length of the run once: {section}.steps, or {section}.epochs or the job field num_epochs",
            got=f"{section}.steps = {table['steps']}, {section}.epochs = {table['epochs']}",
            fix="leave one out",
        )


def _lengths(request: RunRequest, sections: dict[str, Any]) -> None:
    data = sections.setdefault("data", {})
    if request.context_length is None or not isinstance(data, dict) or "max_prompt_tokens" in data:
        return
    rollout = sections.get("rollout")
    completion = rollout.get("max_new_tokens") if isinstance(rollout, dict) else None
    if completion is None:
        completion = request.context_length * 2 // 3  # as the guide: 1,024 of 1,536
        sections.setdefault("rollout", {})["max_new_tokens"] = completion
    if not isinstance(completion, int) or not 0 < completion < request.context_length:
        raise Problem(
            422,
            "context_length leaves nothing for the prompt",
            expected=f"rollout.max_new_tokens below context_length = {request.context_length}",
            got=str(completion),
            fix="lower rollout.max_new_tokens, or raise context_length",
        )
    data["max_prompt_tokens"] = request.context_length - completion
