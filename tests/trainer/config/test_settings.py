"""The trainer's settings: documented, importable without torch, and contradictions are refused with the fix."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_origin

import pytest
from pydantic import BaseModel

from penstock.protocol.config.foreign_config import RENAMED
from penstock.protocol.config.run_file import SECTIONS, format_config, load
from penstock.protocol.errors import ConfigError
from penstock.trainer import optimizer_settings
from penstock.trainer.algorithm.algorithm_settings import RECORDED, AlgorithmSettings
from penstock.trainer.algorithm.chosen_parts import PRESETS
from penstock.trainer.attention_choice import Attention
from penstock.trainer.settings import TrainerSettings

PAIRS = ("algorithm.dpo_coefficient=1.0", "data.train=rows.jsonl")
LAKE = "environment.define.lake.type=frozen_lake"
AIME = "data.eval=e eval.source.aime.data=a eval.source.aime.samples=8 eval.source.aime.temperature=1"
TEACHER, REMOTE = "teacher.url=http://127.0.0.1:30001", "algorithm.reference_device=remote"


TAUGHT = {"on_policy_distillation": (TEACHER,), "gkd": (TEACHER, "teacher.top_k=8")}  # presets that need a teacher


def preset(name: str) -> list[str]:
    return ["model.path=m", f"algorithm.name={name}", *TAUGHT.get(name, ())]


def settings(*overrides: str) -> TrainerSettings:
    return load(TrainerSettings, overrides=["model.path=model", *overrides]).settings


def test_the_model_folder_is_the_only_required_setting():
    """Every other setting has a default; without the model's path the error names the section to set it in."""
    assert settings().model.path == Path("model")
    with pytest.raises(ConfigError, match=r"model.path is required: set `path` under \[model\]"):
        load(TrainerSettings)


@pytest.mark.parametrize("section", sorted(TrainerSettings.model_fields))
def test_every_setting_is_described(section: str):
    assert section in SECTIONS
    model = TrainerSettings.model_fields[section].annotation
    assert isinstance(model, type)
    assert issubclass(model, BaseModel)
    assert model.__doc__
    undescribed = [name for name, field in model.model_fields.items() if not field.description]
    assert not undescribed


def test_foreign_names_lead_to_settings_that_exist():
    for name, target in RENAMED.items():
        for dotted in target.split(" (")[0].split(" and "):
            section, _, key = dotted.partition(".")
            if section in TrainerSettings.model_fields and not key.startswith("map."):
                model = TrainerSettings.model_fields[section].annotation
                assert isinstance(model, type)
                assert issubclass(model, BaseModel)
                table, _, inner = key.partition(".")
                assert table in model.model_fields, f"{name} -> {target}"
                nested = model.model_fields[table].annotation
                if get_origin(nested) is dict:  # a table of tables: NAME.KEY
                    nested, inner = get_args(nested)[1], inner.partition(".")[2].partition(",")[0]
                assert not inner or inner in nested.model_fields, f"{name} -> {target}"  # type: ignore[union-attr]


# overrides -> a piece of the error; {NAME} stands for the overrides of that name
CONTRADICTIONS = """
trainer.micro_batch_tokens=100 -> raise it to at least 1280
{PAIRS} data.from_run=other -> is not read with data.from_run; leave one out
{PAIRS} rollout.temperature=0.7 -> compares log-probabilities at temperature 1; set rollout.temperature = 1
{PAIRS} algorithm.epochs=2 -> belong to one optimizer step, and a batch would have several; set algorithm.epochs = 1
{PAIRS} algorithm.minibatches=2 ->
    belong to one optimizer step, and a batch would have several; set algorithm.minibatches = 1
{PAIRS} algorithm.name=ppo -> it gives no values to them; choose an algorithm without a critic
{PAIRS} algorithm.m2po_budget=0.04 -> pairs were sampled by none; leave one out
{PAIRS} algorithm.name=gkd {TEACHER} teacher.top_k=4 -> and pairs have none; set algorithm.distill_form
{PAIRS} dpo.reference_path=other -> a run has one reference; set algorithm.reference_path instead
{PAIRS} dpo.reference=precomputed -> a resumed run could not compute it again; leave it out
{PAIRS} algorithm.kl_coefficient=0.1 {REMOTE} {TEACHER} -> not about pairs; set algorithm.reference_device
{PAIRS} dpo.loss=orpo algorithm.reference_path=other ->
    there is no KL, and dpo.loss = orpo has no reference; leave them out
rollout.redundant_wait=0.5 -> does nothing without rollout.redundant_completions
rollout.redundant_completions=4089 -> at most 4096 completions of a prompt are started; lower one of them
rollout.redundant_completions=-1 -> rollout.redundant_completions
rollout.redundant_completions=2 rollout.environment=maze ->
    is possible in single_turn only, not in the episodes of rollout.environment = 'maze'
rollout.redundant_completions=2 data.from_run=other ->
    does nothing with data.from_run: stored groups are trained as they are
rollout.groups_per_message=64 -> a message never spans steps: lower it, or set it to 0
rollout.groups_per_step=1 rollout.group_size=1 trainer.num_ranks=2 ->
    lower trainer.num_ranks, so that every rank has one
rollout.group_size=1 ->
    rollout.group_size = 1 with algorithm.advantage = grpo, which compares the completions of a prompt
rollout.group_size=1 algorithm.name=rloo -> every advantage would be 0 and nothing would be learned
rollout.group_size=1 algorithm.name=reinforce_pp algorithm.dynamic_sampling=true ->
    rollout.group_size = 1 with algorithm.dynamic_sampling = true
rollout.group_size=1 algorithm.name=reinforce_pp algorithm.reward_norm=group ->
    rollout.group_size = 1 with algorithm.reward_norm = group
rollout.max_staleness=8 -> raise it to at least 10
rollout.max_staleness=0 algorithm.max_trained_count=2 -> rollout.max_staleness = 0 never allows
algorithm.retrained_interval=2 -> retrained_interval = 2 does nothing
data.from_run=other trainer.epochs=1 -> set trainer.steps
trainer.local_checkpoints=false -> local_checkpoints = false needs trainer.store_checkpoints = true
{LAKE} rollout.environment=mixture -> none has; set environment.define.NAME.weight
{LAKE} environment.define.lake.weight=2 ->
    environment.define.lake.weight does nothing without rollout.environment
{LAKE} 'environment.define.lake.data_sources=["gsm8k"]' -> environment.define.lake.data_sources does nothing
{LAKE} environment.define.lake.weight=0 -> greater than or equal to 1
{LAKE} environment.define.lake.weight=2 'environment.define.lake.data_sources=["x"]' ->
    a weight or data_sources, not both
{LAKE} 'environment.define.lake.data_sources=["x"]' environment.define.g.type=lookup
    'environment.define.g.data_sources=["x"]' -> 'x' is among those of lake too
environment.define.mixture.type=lookup -> the name stands for all that have a weight
eval.source.eval.data=x -> is not eval, which is data.eval
'eval.source.a b.data=x' -> a name has 1 to 40 of
eval.source.a.data=[] -> eval.source.a.data names no file
eval.source.a.data=x eval.source.a.samples=4 -> 4 greedy completions would all be the same
{AIME} eval.best_by=gsm -> there is no source gsm; there are eval, aime
{AIME} eval.best_by=aime.speed -> expected aime.accuracy, aime.reward or aime.pass@K
{AIME} eval.best_by=aime.pass@16 -> up to the samples of the source, which has 8
{AIME} eval.best_by=aime.pass@3 -> K = 1, 2, 4
{AIME} eval.best_by=eval.pass@1 -> which has 1
eval.every=5 -> set data.eval, or eval.every = 0
eval.samples=4 -> set eval.temperature above 0 or eval.samples = 1
eval.top_k=20 -> eval.top_k does nothing while eval.temperature = 0
trainer.warmup_steps=200 -> trainer.warmup_steps = 200 is more than trainer.steps = 100
sft.warmup_steps=200 -> sft.warmup_steps is more than sft.steps
data.map.promt=x -> data.map: promt is no column that is read
sft.map.promt=x -> sft.map: promt is no column that is read
'reward.name=my reward' -> should match pattern
rollout.temperature=0 -> expected greater than 0
algorithm.dual_clip=1 -> expected greater than 1
model.lora.alpha=8 -> does nothing while model.lora.rank is 0
model.lora.publish=merged -> does nothing while model.lora.rank is 0
algorithm.kl_coefficient=0.1 algorithm.reference_device=cpu -> expected 'same', 'parked' or 'remote'
model.lora.rank=8 algorithm.kl_coefficient=0.1 algorithm.reference_device=parked ->
    the reference is the policy with its adapters switched off
trainer.sequence_parallel=2 -> trainer.num_ranks = 1 is not a multiple of trainer.sequence_parallel = 2
trainer.num_ranks=6 trainer.tensor_parallel=2 trainer.sequence_parallel=2 ->
    is not a multiple of trainer.sequence_parallel = 2 x trainer.tensor_parallel = 2
trainer.num_ranks=2 trainer.tensor_parallel=2 algorithm.name=ppo ->
    a critic whose weights ranks share was never compared
trainer.num_ranks=2 trainer.tensor_parallel=2 model.lora.rank=8 -> does not divide layers that have adapters
trainer.num_ranks=6 trainer.sequence_parallel=4 -> it counts all processes: set it to a multiple
rollout.groups_per_step=1 rollout.group_size=2 trainer.num_ranks=12 trainer.sequence_parallel=4 ->
    a step has 2 trajectories
algorithm.name=opd -> algorithm.distill_coefficient needs a teacher; set teacher.url
{TEACHER} -> teacher.url does nothing without algorithm.distill_coefficient
teacher.attempts=2 -> teacher.attempts does nothing while teacher.url is empty
teacher.url=10.0.0.1:30000 -> expected an address such as http://127.0.0.1:30000
teacher.url=http://me:secret@host -> without a password
algorithm.name=opd {TEACHER} teacher.top_k=8 -> teacher.top_k = 8 does nothing
algorithm.name=gkd {TEACHER} -> set teacher.top_k, such as 16
algorithm.name=opd {TEACHER} rollout.temperature=0.7 -> set rollout.temperature = 1
algorithm.distill_clip=2 -> algorithm.distill_clip does nothing while algorithm.distill_coefficient is off
algorithm.name=gkd {TEACHER} teacher.top_k=8 algorithm.distill_clip=2 -> bounds an advantage
algorithm.advantage=zero -> learns nothing from rewards
algorithm.name=opd {TEACHER} algorithm.dynamic_sampling=true -> would leave out every group
algorithm.name=opd {TEACHER} algorithm.drop_zero_advantage=true -> would leave out every group
algorithm.kl_coefficient=0.1 algorithm.reference_device=remote -> reference_device = remote needs a teacher
algorithm.kl_coefficient=0.1 {REMOTE} algorithm.kl_form=full {TEACHER} -> needs whole distributions
algorithm.kl_coefficient=0.1 {REMOTE} algorithm.reference_path=r {TEACHER} -> leave one out
trainer.zero_stage=4 -> expected 0, 1, 2 or 3, got 4
trainer.zero_stage=0 model.dtype=bfloat16 -> set trainer.zero_stage = 1
trainer.gradient_dtype=as-trained -> does nothing with model.dtype = float32
trainer.zero_stage=0 trainer.offload=optimizer -> needs trainer.zero_stage >= 1, got 0
trainer.zero_stage=2 trainer.offload=parameters -> needs trainer.zero_stage >= 3, got 2
trainer.reduce_bucket_size=1000000 -> leave it out, or set trainer.zero_stage = 2
trainer.zero_stage=2 trainer.max_live_parameters=0 -> leave it out, or set trainer.zero_stage = 3
trainer.zero_stage=3 trainer.num_ranks=4 trainer.hpz_partition_size=3 -> does not divide trainer.num_ranks = 4
trainer.zero_stage=3 trainer.num_ranks=2 trainer.hpz_partition_size=2 trainer.offload=parameters ->
    trainer.offload to none or optimizer
trainer.zero_stage=3 trainer.offload=nvme -> expected 'none', 'optimizer' or 'parameters', got "nvme"
model.activation_offload=true -> model.gradient_checkpointing is false
critic.lr=1e-3 -> needs no critic; set algorithm.name = "ppo"
algorithm.name=ppo critic.value_clip=0.2 -> raise critic.updates
algorithm.name=ppo critic.head_start_steps=100 -> leaves none of trainer.steps
algorithm.name=ppo algorithm.drop_zero_advantage=true -> every token has its own
algorithm.name=CrossEntropy -> supervised fine-tuning is `penstock sft`
algorithm.name=gppo2 -> unknown algorithm 'gppo2'; did you mean ce_gppo? known are a3po, async_grpo,
algorithm.name=grop -> unknown algorithm 'grop'; did you mean grpo?
algorithm.name=xyz -> unknown algorithm 'xyz'; known are
algorithm.loss=gpso -> unknown loss 'gpso'; did you mean 'gspo'?
algorithm.advantage=grop -> unknown advantage estimator 'grop'; did you mean 'grpo'?
algorithm.name=cispo algorithm.clip_low=0.1 -> clip_low does nothing with algorithm.loss = cispo
algorithm.name=rloo algorithm.normalise_by_std=false -> does nothing with algorithm.advantage = rloo
algorithm.rejection_high=3.0 -> does nothing while algorithm.rejection is off
algorithm.kl_form=k2 -> does nothing while algorithm.kl_coefficient is off
algorithm.name=gspo algorithm.m2po_budget=0.04 algorithm.m2po_form=clip -> sets the clip of ppo_clip
algorithm.whiten_rewards=true -> whiten_rewards does nothing with algorithm.advantage = grpo
algorithm.kl_coefficient=0.1 algorithm.kl_form=full algorithm.kl_unbiased=true ->
    weighs an estimate by its token's ratio
algorithm.m2po_form=clip -> does nothing while algorithm.m2po_budget is off
algorithm.importance=token -> would weigh the ratio of ppo_clip twice
"""


@pytest.mark.parametrize("line", re.split(r"\n(?=\S)", CONTRADICTIONS.strip()))
def test_errors_about_contradictions_contain_the_fix(line: str):
    overrides, _, reply = " ".join(line.split()).partition(" -> ")
    named = overrides.format(PAIRS=" ".join(PAIRS), TEACHER=TEACHER, REMOTE=REMOTE, LAKE=LAKE, AIME=AIME)
    with pytest.raises(ConfigError) as caught:
        settings(*shlex.split(named))
    assert reply in str(caught.value)


def test_files_are_one_or_a_list():
    """data.train takes one file or several; an empty list is refused where files are needed."""
    assert settings("data.train=a.jsonl").data.train_files == (Path("a.jsonl"),)
    assert settings('data.train=["a", "b"]').data.train_files == (Path("a"), Path("b"))
    assert settings().data.eval_files == ()
    with pytest.raises(ConfigError, match=r"data.train names no file"):
        _ = settings().data.train_files


def test_settings_load_and_are_shown_without_torch():
    """Every loss, estimator, filter and correction is found, and each preset loads, in a process that has no torch."""
    code = """
import sys
sys.modules |= dict.fromkeys(("torch", "deepspeed", "transformers"))  # importing one of them raises ImportError
from penstock.protocol.config.run_file import format_config, load
from penstock.trainer.algorithm.chosen_parts import ALL
from penstock.trainer.settings import TrainerSettings
assert all(registry.built_in for registry in ALL)
for name in sys.argv[1:]:
    format_config(load(TrainerSettings, overrides=name.split()))
"""
    presets = [" ".join(preset(name)) for name in PRESETS]
    subprocess.run([sys.executable, "-c", code, *presets], check=True, timeout=300)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_loads_shows_itself_and_reads_back(name: str):
    """A value from a preset is marked with its origin, and the shown configuration loads to the same settings."""
    loaded = load(TrainerSettings, overrides=preset(name))
    for part, value in PRESETS[name].items():
        assert getattr(loaded.settings.algorithm, part) == value
        assert loaded.origins[f"algorithm.{part}"] == f"preset {name}"
    shown = [
        line.split("  #")[0].strip()
        for line in format_config(loaded).splitlines()
        if line.startswith(("algorithm.", "teacher."))
    ]
    again = load(TrainerSettings, overrides=["model.path=m", *(line.replace(" = ", "=", 1) for line in shown)])
    assert again.settings.algorithm == loaded.settings.algorithm


def test_every_part_of_a_preset_can_be_overridden():
    """An explicit setting overrides the preset, in whichever order the two are given."""
    loaded = load(TrainerSettings, overrides=["model.path=model", "algorithm.clip_high=0.05", "algorithm.name=gspo"])
    assert loaded.settings.algorithm.clip_high == 0.05
    assert loaded.settings.algorithm.clip_low == 3e-4
    assert loaded.origins["algorithm.clip_high"] == "override"
    cleared = settings("algorithm.name=dapo", "algorithm.dual_clip=none")
    assert cleared.algorithm.dual_clip is None


def test_published_names_have_no_protections_against_stale_samples_and_the_default_has():
    """`grpo` is GRPO; only the default adds what Penstock adds, and each protection can be added to any preset."""
    for name in PRESETS:
        section = settings(*preset(name)).algorithm
        added = (section.dual_clip, section.stale_negative_weight, section.ess_level)
        assert added == (
            (1.2, 0.5, "token") if name == "async_grpo" else (None, 1.0, "sequence" if name == "vcpo" else "off")
        )
    assert settings().algorithm == settings("algorithm.name=async_grpo").algorithm
    protections = ("algorithm.dual_clip=1.2", "algorithm.stale_negative_weight=0.5", "algorithm.ess_level=token")
    given = settings("algorithm.name=grpo", *protections).algorithm
    assert given.model_copy(update={"name": "async_grpo"}) == settings().algorithm


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("GRPO", "grpo"),  # AgentRL
        ("gae", "ppo"),  # verl, ROLL
        ("MINIRL", "minirl"),
        ("CISPO", "cispo"),
        ("reinforce_plus_plus_baseline", "reinforce_pp_baseline"),  # verl
        ("grpo_passk", "pass_at_k"),
        ("geo_mean", "gmpo"),
        ("remax", "remax"),
        ("m2po-released", "m2po_released"),
        ("OPSM", "opsm"),
        ("RAFT", "raft"),
        ("CE-GPPO", "ce_gppo"),
        ("Reinforce++", "reinforce_pp"),
        ("GSPO-token", "gspo_token"),
        ("topr", "topr"),  # ROLL
        ("Dr.GRPO", "dr_grpo"),
        ("tpro", "topr"),  # an old guide to ROLL
    ],
)
def test_other_projects_names_of_algorithms_are_understood(theirs: str, ours: str):
    assert settings(f"algorithm.name={theirs}").algorithm.name == ours


def test_the_reference_of_an_earlier_record_is_parked() -> None:
    """Records of runs before `parked` say "cpu", which computed the same numbers where a CPU trained."""
    recorded = AlgorithmSettings.model_validate({"reference_device": "cpu", "kl_coefficient": 0.1}, context=RECORDED)
    assert recorded.reference_device == "parked"


def test_the_dtype_follows_the_gpus_that_the_trainer_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bfloat16 where a device file of a GPU is there and not hidden; what a file says is kept."""
    for name in optimizer_settings._HIDES_GPUS:
        monkeypatch.delenv(name, raising=False)
    device = tmp_path / "nvidia0"
    monkeypatch.setattr(optimizer_settings, "_GPU_FILES", (str(device),))
    assert settings().model.dtype == "float32"
    device.touch()
    assert settings().model.dtype == "bfloat16"
    assert settings("model.dtype=float32").model.dtype == "float32"
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert settings().model.dtype == "float32"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert settings().model.dtype == "bfloat16"


def test_an_attention_that_there_is_not_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.attention.*flash-3"):
        settings("trainer.attention=flash2")
    assert [settings(f"trainer.attention={name}").trainer.attention for name in get_args(Attention)] == list(
        get_args(Attention)
    )
