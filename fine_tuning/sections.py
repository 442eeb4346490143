"""Finds the settings that a command with a separate section does not read, so that none is ignored in silence; pure.

`penstock sft`, `penstock dpo` and `penstock rm` read their section, and listed parts of the others. On their command line the general
names of some settings, such as ``learning_rate`` or ``trainer.steps``, mean those of their section.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.protocol.config.run_file import SECTIONS, Loaded, values_of
from penstock.protocol.config.sources import OVERRIDE, from_overrides
from penstock.protocol.errors import ConfigError
from penstock.trainer.settings import TrainerSettings

READ = frozenset({
    "run.id", "run.dir", "run.seed",
    "model.path", "model.dtype", "model.gradient_checkpointing", "model.activation_offload",
    "model.lora.path", "model.lora.rank", "model.lora.alpha", "model.lora.use_rslora", "model.lora.targets", "model.lora.seed",
    "data.train", "data.format", "data.map", "data.system_prompt", "data.overlong", "data.max_samples", "data.shuffle",
    "data.text_prompts", "data.template_arguments", "data.use_tools", "data.roles", "data.control_tokens", "data.ignore",
    "trainer.num_ranks", "trainer.sequence_parallel", "trainer.tensor_parallel", "trainer.micro_batch_tokens", "trainer.zero_stage", "trainer.offload",
    "trainer.gradient_dtype", "trainer.weight_decay",
    "trainer.min_lr_ratio", "trainer.max_grad_norm", "trainer.checkpoint_every_s", "trainer.keep_checkpoints",
    "trainer.resume", "trainer.verify_export",
})  # fmt: skip
"""Keys that every such command reads besides its section; also those below them."""

TRACKERS = ("tracker", "tracking")  # sections that the processes of trackers read
_SAME_NAMES = ("lr", "steps", "epochs", "betas", "warmup_steps", "schedule", "checkpoint_every")  # in [trainer]
# A shared run file has them whatever is started with it.
_NOT_LISTED = ("nats.", "s3.", "retention.", "sft.", "dpo.", "rm.")
_INSTEAD = {
    "data.eval": "rows for the validation loss are {section}.eval_data; remove it",
    "data.max_prompt_tokens": "prompt and answer together have at most trainer.micro_batch_tokens tokens",
    "data.from_run": "use {section}.data",
    "data.map": "it names the columns of data.train, and the rows are {section}.data: use {section}.map",
    "model.lora.publish": "the result is a model folder and, beside it, the adapter's; remove it",
}


@dataclass(frozen=True, slots=True, eq=False)
class OwnSection:
    section: str  # the command's name too
    also_read: frozenset[str]
    instead: Mapping[str, str]  # what to do with keys that it does not read

    @property
    def read(self) -> frozenset[str]:
        section_model: Any = TrainerSettings.model_fields[self.section].annotation
        return READ | self.also_read | {f"{self.section}.{name}" for name in section_model.model_fields}

    @property
    def keys(self) -> dict[str, str]:
        names = {f"trainer.{name}": name for name in _SAME_NAMES} | {"rollout.groups_per_step": "batch_size"}
        return {key: f"{self.section}.{name}" for key, name in names.items()}

    def chosen_settings(
        self, loaded: Loaded[TrainerSettings], overrides: Sequence[str]
    ) -> tuple[TrainerSettings, list[str]]:
        """Return the settings with those of the command line in place, and the keys of a shared run file that are not read.

        Raises ConfigError for a setting that the command does not read, on the command line or in a run file without its
        section.
        """
        problems = [*self._of_other_services(overrides), *self._given_twice(loaded)]
        is_shared = any(
            key.startswith(f"{self.section}.") and not origin.startswith((OVERRIDE, "default"))
            for key, origin in loaded.origins.items()
        )
        unread: list[str] = []
        has_map = loaded.settings.data_of(self.section).map_key != "data.map"
        read = self.read - {"data.map"} if has_map else self.read
        for key, origin in _changed(loaded):
            is_read = any(key == name or key.startswith(f"{name}.") for name in read)
            if is_read or (key in self.keys and _is_override(origin)):
                continue
            if not _is_override(origin) and (is_shared or key.startswith(_NOT_LISTED)):
                unread += [] if key.startswith(_NOT_LISTED) else [key]
            else:
                problems.append(f"{origin}: {key} is not read by `penstock {self.section}`; {self._advice(key)}")
        if problems:
            raise ConfigError("\n".join(problems))
        return self._with_meant(loaded), unread

    def _of_other_services(self, overrides: Sequence[str]) -> list[str]:
        assignments = from_overrides(overrides, [])
        return [
            f"{OVERRIDE}: {'.'.join(assignment.path)} is not read by `penstock {self.section}`, which starts no service; remove it"
            for assignment in assignments
            if (section := assignment.path[0].replace("-", "_")) in SECTIONS
            and section not in (*TrainerSettings.model_fields, *TRACKERS)
        ]

    def _given_twice(self, loaded: Loaded[TrainerSettings]) -> list[str]:
        pairs = [
            (key, section_key)
            for key, section_key in self.keys.items()
            if all(_is_override(loaded.origins[k]) for k in (key, section_key))
        ]
        problems = [
            f"{OVERRIDE}: {key} and {section_key} are both given, and mean the same for `penstock {self.section}`; leave one out"
            for key, section_key in pairs
        ]
        steps, epochs = self._origin_of("steps", loaded), self._origin_of("epochs", loaded)
        if "default" not in (steps, epochs) and _is_override(steps) == _is_override(epochs):
            problems.append(f"{epochs}: {self.section}.steps and {self.section}.epochs are both given; leave one out")
        return problems

    def _origin_of(self, name: str, loaded: Loaded[TrainerSettings]) -> str:
        general = loaded.origins[f"trainer.{name}"]
        return general if _is_override(general) else loaded.origins[f"{self.section}.{name}"]

    def _with_meant(self, loaded: Loaded[TrainerSettings]) -> TrainerSettings:
        settings = loaded.settings
        values: dict[str, Any] = {
            section_key.partition(".")[2]: _value(settings, key)
            for key, section_key in self.keys.items()
            if _is_override(loaded.origins[key])
        }
        if _is_override(self._origin_of("steps", loaded)):  # above epochs in a run file
            values["epochs"] = None
        chosen = getattr(settings, self.section).model_copy(update=values)
        if chosen.epochs is None and chosen.warmup_steps > chosen.steps:
            raise ConfigError(
                f"{self.section}.warmup_steps is more than {self.section}.steps; lower it, so that the peak is reached"
            )
        return settings.model_copy(update={self.section: chosen})

    def _advice(self, key: str) -> str:
        instead = {**{key: f"use {section_key}" for key, section_key in self.keys.items()}, **_INSTEAD, **self.instead}
        advice = next((text for name, text in instead.items() if key == name or key.startswith(f"{name}.")), None)
        where = f"[{self.section}] if `penstock train` shares it"
        advice = advice.format(section=self.section) if advice else None
        return advice or f"remove it, or give the run file a section {where}"


def check_ranks(loaded: Loaded[TrainerSettings], command: str, started: int) -> None:
    wanted = loaded.settings.trainer.num_ranks
    if loaded.origins["trainer.num_ranks"] != "default" and wanted != started:
        raise ConfigError(
            f"trainer.num_ranks = {wanted}, but {started} process(es) were started; start it with torchrun --nproc-per-node "
            f"{wanted} -m penstock.fine_tuning {command} ..., or set trainer.num_ranks={started} on the command line"
        )


def _changed(loaded: Loaded[TrainerSettings]) -> list[tuple[str, str]]:
    standard = TrainerSettings.model_validate({"model": {"path": loaded.settings.model.path}})
    defaults = {".".join(path): value for path, value in values_of(standard)}
    return [
        (key, origin)
        for path, value in values_of(loaded.settings)
        if (key := ".".join(path)) not in defaults or value != defaults[key]
        if (origin := loaded.origins[key]) != "default" and not origin.startswith("preset ")
    ]


def _value(settings: TrainerSettings, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(settings, section), name)


def _is_override(origin: str) -> bool:
    return origin == OVERRIDE or origin.startswith(f"{OVERRIDE} ")


_OUTPUT_HEAD = frozenset({"model.head_dtype", "trainer.max_logits"})  # a reward model has none
SFT = OwnSection(
    section="sft",
    also_read=_OUTPUT_HEAD | {"model.lora.dropout"},
    instead={"data.answer_is_ground_truth": "answers are what is imitated; remove it"},
)
DPO = OwnSection(
    section="dpo",
    also_read=_OUTPUT_HEAD,
    instead={
        "data.answer_is_ground_truth": "a preference has no ground truth; remove it",
        "model.lora.dropout": "preferences are trained without dropout, so that policy and reference differ by their weights alone; remove it",
        "algorithm": "the losses of preferences are in [dpo]; remove it",
    },
)
RM = OwnSection(
    section="rm",
    also_read=frozenset({"model.lora.dropout"}),
    instead={
        "data.answer_is_ground_truth": "a preference has no ground truth; remove it",
        "reward": "a reward model is what is trained; remove it",
    },
)
