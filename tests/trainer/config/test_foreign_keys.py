"""The tables of other projects' keys, walked key by key through the settings of all services."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.console.tracking.trackers import TrackSettings
from penstock.deploy.config_show import SERVICES
from penstock.protocol.config.foreign_config import ABSENT, ALIASES, REFUSED, RENAMED, SYSTEMS, Alias, advice
from penstock.protocol.config.run_file import config_document, load
from penstock.protocol.config.sources import split_arguments
from penstock.protocol.errors import ConfigError
from penstock.rollout_service.settings import RolloutSettings
from penstock.trainer.settings import TrainerSettings

GUIDE_KEYS = [
    line.split("\t") for line in (Path(__file__).parents[2] / "data" / "guide_keys.tsv").read_text().splitlines()
]
NUM_KEYS = {"AgentRL": 42, "HelloAgents": 18, "verl-guide": 22, "ROLL": 124, "platform": 77}
ROOM = ["trainer.micro_batch_tokens=100000", "trainer.steps=10000"]

# A value for each setting that an alias sets, and what else must be set for it to have an effect.
PPO, LORA, KL, EVAL = "algorithm.name=ppo", "model.lora.rank=4", "algorithm.kl_coefficient=0.1", "data.eval=e"
REWARD_KL = "algorithm.reward_kl_coefficient=0.1"
VALUES: dict[str, tuple[str, ...]] = {
    "algorithm.advantage_clip": ("2.0",), "algorithm.age_band_cap": ("4.0",),
    "algorithm.age_band_decay": ("0.5", "algorithm.age_band_cap=4.0"), "algorithm.aggregation": ("token-mean",),
    "algorithm.asym_clip": ("true", "algorithm.reward_norm=group"),
    "algorithm.episode_weight": ("2.0", "algorithm.name=gigpo"),
    "algorithm.step_weight": ("2.0", "algorithm.name=gigpo"),
    "algorithm.clip_cov_high": ("6.0", "algorithm.loss=clip_cov"),
    "algorithm.clip_cov_low": ("2.0", "algorithm.loss=clip_cov"),
    "algorithm.clip_cov_share": ("0.1", "algorithm.loss=clip_cov"), "algorithm.clip_high": ("0.3",),
    "algorithm.clip_low": ("0.3",), "algorithm.epochs": ("3",), "algorithm.minibatches": ("4",),
    "algorithm.difficulty_weight": ("true",), "algorithm.drop_zero_advantage": ("true",),
    "algorithm.dual_clip": ("3.0",), "algorithm.dynamic_sampling": ("true",),
    "algorithm.entropy_coefficient": ("0.01",),
    "algorithm.importance": ("token", "algorithm.ratio_anchor=proximal"), "algorithm.importance_high": ("2.0",),
    "algorithm.kl_cov_penalty": ("2.0", "algorithm.loss=kl_cov"),
    "algorithm.kl_cov_share": ("0.1", "algorithm.loss=kl_cov"), "algorithm.kl_form": ("k2", KL),
    "algorithm.kl_horizon": ("100", KL, "algorithm.kl_target=0.1"), "algorithm.kl_target": ("0.1", KL),
    "algorithm.kl_unbiased": ("true", KL), "algorithm.length_weight": ("true",), "algorithm.mask_truncated": ("true",),
    "algorithm.max_trained_count": ("2",), "algorithm.minimal_advantage": ("0.1",), "algorithm.name": ("rloo",),
    "algorithm.normalise_by_std": ("false",), "algorithm.opsm_delta": ("0.5",),
    "algorithm.overlong_factor": ("2.0", "algorithm.overlong_buffer=0.2"),
    "algorithm.reference_device": ("parked", KL), "algorithm.reference_path": ("r", KL),
    "algorithm.rejection": ("token_k1",),
    "algorithm.retrained_interval": ("2", "algorithm.max_trained_count=2"), "algorithm.reward_clip": ("5.0",),
    "algorithm.reward_kl_form": ("k2", REWARD_KL), "algorithm.reward_norm": ("group",),
    "algorithm.sft_coefficient": ("0.1",),
    "algorithm.skip_non_positive_advantage": ("true",), "algorithm.tau_negative": ("2.0", "algorithm.name=sapo"),
    "algorithm.tau_positive": ("2.0", "algorithm.name=sapo"), "algorithm.token_tis_cap": ("2.0",),
    "algorithm.veto": ("0.001",),
    "algorithm.whiten_advantages": ("true",), "algorithm.whiten_rewards": ("true", PPO),
    "critic.gamma": ("0.9", PPO), "critic.head_start_steps": ("5", PPO), "critic.lam": ("0.9", PPO),
    "critic.lr": ("0.001", PPO),
    "critic.max_grad_norm": ("2.0", PPO), "critic.path": ("c", PPO),
    "critic.value_clip": ("0.2", PPO, "critic.updates=2"),
    "critic.warmup_steps": ("3", PPO), "data.eval": ("e",), "data.map.data_source": ("x",),
    "data.map.ground_truth": ("x",),
    "data.map.messages": ("x",), "data.map.prompt": ("x",), "data.map.response": ("x",),
    "data.max_prompt_tokens": ("512",),
    "data.max_samples": ("5",), "data.shuffle": ("false",), "data.system_prompt": ("x",), "data.train": ("t",),
    "eval.at_start": ("false",), "eval.every": ("7", EVAL), "eval.max_new_tokens": ("9",),
    "eval.samples": ("2", "eval.temperature=1.0"),
    "eval.temperature": ("0.5",), "eval.top_p": ("0.9", "eval.temperature=1.0"),
    "eval.top_k": ("20", "eval.temperature=1.0"), "model.dtype": ("bfloat16",),
    "model.gradient_checkpointing": ("true",),
    "model.activation_offload": ("true", "model.gradient_checkpointing=true"), "trainer.offload": ("optimizer",),
    "trainer.gradient_dtype": ("as-trained", "model.dtype=bfloat16"),
    "model.lora.use_rslora": ("true", LORA), "model.lora.alpha": ("16.0", LORA), "model.lora.dropout": ("0.1", LORA),
    "model.lora.rank": ("8",), "model.lora.targets": ('["q_proj"]', LORA),
    "model.path": ("m",), "rollout.group_size": ("6",), "rollout.groups_per_step": ("64",),
    "rollout.max_new_tokens": ("77",),
    "rollout.max_staleness": ("3",), "rollout.stop": ('["</a>"]',), "rollout.temperature": ("0.7",),
    "run.id": ("my-run",), "run.seed": ("7",),
    "sglang.attention_backend": ("fa3",), "sglang.context_length": ("4096",), "sglang.ep_size": ("2",),
    "sglang.max_running_requests": ("64",), "sglang.mem_fraction_static": ("0.7",), "sglang.tp_size": ("2",),
    "trainer.betas": ("[0.8, 0.9]",), "trainer.checkpoint_every": ("20",), "trainer.keep_checkpoints": ("3",),
    "trainer.lr": ("0.5",),
    "trainer.max_grad_norm": ("2.0",), "trainer.min_lr_ratio": ("0.2",), "trainer.schedule": ("cosine",),
    "trainer.steps": ("55",), "trainer.epochs": ("2.5",),
    "trainer.sequence_parallel": ("2", "trainer.num_ranks=2"), "trainer.tensor_parallel": ("2", "trainer.num_ranks=2"),
    "trainer.warmup_steps": ("4",), "trainer.weight_decay": ("0.1",), "trainer.zero_stage": ("3",),
    "tracker": ("[]",), "tracking.entity": ("x",), "tracking.folder": ("x",), "tracking.group": ("x",),
    "tracking.name": ("x",), "tracking.project": ("x",), "tracking.tags": ('["x"]',),
}  # fmt: skip


# key = value, what it needs -> the setting it sets: where the values are others, or one of several keys has them
TAKEN = """
lr_scheduler_type=constant_with_warmup -> trainer.schedule=constant
reward_norm=running -> algorithm.reward_norm=running
reward_norm=none -> algorithm.reward_norm=none
loss_agg_mode=seq-mean-token-sum -> algorithm.aggregation=seq-mean-token-sum
loss_agg_mode=seq-mean-token-mean -> algorithm.aggregation=seq-mean-token-mean
kl_penalty=abs algorithm.reward_kl_coefficient=0.1 -> algorithm.reward_kl_form=abs
kl_penalty=mse algorithm.reward_kl_coefficient=0.1 -> algorithm.reward_kl_form=k2
kl_penalty=full algorithm.reward_kl_coefficient=0.1 -> algorithm.reward_kl_form=full
"""

# key: a piece of the answer
ANSWERED = """
bitsandbytes: model.lora.rank
epsilon_high: algorithm.clip_high
scale_rewards: algorithm.normalise_by_std
loss_type: algorithm.aggregation
tracker_kwargs: [tracking]
trainer.test_freq=5: data.eval
trainer.experiment_name=GSM8K_exp.1: such as gsm8k-exp-1
beta=0.04: algorithm.kl_coefficient
rollout.n=8: rollout.group_size
model.name=m: model.path
"""


def refusal(overrides: list[str]) -> list[str]:
    """Return the lines of the error about some overrides."""
    with pytest.raises(ConfigError) as caught:
        load(TrainerSettings, overrides=overrides)
    return str(caught.value).splitlines()


def test_every_taken_key_sets_its_settings_in_some_service(tmp_path: Path) -> None:
    assert len(ALIASES) > 230
    adapter = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    for key, alias in ALIASES.items():
        written, *needs = {**VALUES, "model.lora.path": (str(tmp_path),)}[alias.keys[0]]
        if alias.keys[0].startswith("sglang."):
            needs.append("worker.engine=sglang")
        if alias.keys[0] in ("critic.lr", "critic.warmup_steps", "trainer.warmup_steps", "trainer.steps"):
            room = ROOM[:1]
        else:
            room = [one for one in ROOM if not one.startswith(alias.keys[0] + "=")]
        path = [] if alias.keys == ("model.path",) else ["model.path=p"]
        reader = next(service for service in SERVICES if alias.keys[0].partition(".")[0] in service.model_fields)
        document = config_document(load(reader, overrides=[*path, *room, *needs, f"{key}={written}"], environ={}))
        for ours in alias.keys:
            assert document["origins"][ours] == f"override as {key}"
            assert str(value_of(document["settings"], ours)).lower().replace("'", '"') == written.lower()


def test_every_other_key_is_answered_and_none_is_unknown() -> None:
    told = {**RENAMED, **ABSENT}
    assert len(told) > 750
    lines = refusal(["model.path=m", *(f"{key}=1" for key in told)])
    assert len(lines) == len(told)
    for key, line in zip(told, lines, strict=True):
        answer = f"use {RENAMED[key]}" if key in RENAMED else ABSENT[key]
        section = f"override: {key} is a section, not a value; {answer}"
        assert line in (f"override: {key} is a key of another project; {answer}", section)


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_beginning_answers_for_the_keys_below_it(system: str) -> None:
    """Whole subtrees, such as Megatron's options, have one answer; the longest beginning decides."""
    for beginning, answer in SYSTEMS[system].prefixes.items():
        assert advice(f"{beginning}some_option") == answer
        [line] = refusal(["model.path=m", f"{beginning}some_option=1"])
        assert line == f"override: {beginning}some_option is a key of another project; {answer}"


def test_systems_differ_in_one_key_only() -> None:
    """One name has one answer, whichever system it is of; for the other `config import` reads its system's table."""
    answers: dict[str, set[str]] = {}
    for tables in SYSTEMS.values():
        for table in (tables.taken, tables.renamed, tables.absent):
            for key, answer in table.items():
                answers.setdefault(key, set()).add(str(answer.keys if isinstance(answer, Alias) else answer))
    assert {key for key, found in answers.items() if len(found) > 1} == {"train_batch_size"}


@pytest.mark.parametrize("guide", NUM_KEYS)
def test_every_key_of_the_guides_has_its_answer(guide: str) -> None:
    keys = [line[1:] for line in GUIDE_KEYS if line[0] == guide]
    assert len(keys) == NUM_KEYS[guide]
    for given, kind, answer in keys:
        overrides = [*ROOM[:1], *given.split(" ")] if kind == "taken" else [*ROOM[:1], given]
        sets_path = "model.path = " in answer or given.startswith("model.path=")
        overrides += [] if sets_path else ["model.path=m"]
        if kind == "answered":
            [line] = refusal(overrides)
            assert answer in line, given
            assert not re.search("unknown key|did you mean", line), given
            continue
        ours, _, value = answer.partition(" = ")
        service = TrackSettings if ours.startswith("track") else TrainerSettings
        loaded = load(service, overrides=overrides)
        assert str(value_of(loaded.settings, ours)) == value, given
        written = given.partition("=")[0].lower()  # variables of a script are in capitals
        origin = "override" if written == ours else f"override as {written}"
        assert loaded.origins[ours.partition(".0.")[0]] == origin, given


def value_of(settings: Any, key: str) -> Any:
    for part in key.split("."):
        if isinstance(settings, list):
            settings = settings[int(part)]
        else:
            settings = settings[part] if isinstance(settings, dict) else getattr(settings, part)
    return settings


@pytest.mark.parametrize("line", TAKEN.strip().splitlines())
def test_a_key_with_the_same_meaning_is_accepted_with_its_origin(line: str) -> None:
    """The setting has its value, and `penstock config show` names the key that was written."""
    given, _, expected = line.partition(" -> ")
    ours, _, value = expected.partition("=")
    written = given.partition("=")[0]
    loaded = load(TrainerSettings, overrides=["model.path=m", *ROOM[:1], *given.split()])
    assert str(value_of(loaded.settings, ours)) == value
    if value != "none":
        assert loaded.origins[ours] == f"override as {written}"


@pytest.mark.parametrize("line", ANSWERED.strip().splitlines())
def test_a_key_with_another_meaning_is_refused_with_the_right_one(line: str) -> None:
    """No key is accepted and ignored, and none is refused as an unknown key."""
    key, _, piece = line.partition(": ")
    answer = "\n".join(refusal(["model.path=m", key if "=" in key else f"{key}=1"]))
    assert piece in answer
    assert "did you mean" not in answer


def test_hydras_forms_of_an_override_are_read() -> None:
    """+key and ++key set, ~key and key=null clear."""
    given = [
        "model.path=m",
        "+trainer.lr=0.5",
        "++data.max_samples=5",
        "trainer.steps=7",
        "~trainer.steps",
        "seed=3",
        "~seed",
    ]
    settings = load(TrainerSettings, overrides=[*given, "stop=</a>", "data.train_files=null"]).settings
    assert (settings.trainer.lr, settings.data.max_samples, settings.trainer.steps) == (0.5, 5, 100)
    assert (settings.run.seed, settings.rollout.stop, settings.data.train) == (0, ("</a>",), [])
    files, overrides = split_arguments(["run.toml", "~trainer.lr", "~/run.toml", "+a.b=c"])
    assert ([str(file) for file in files], overrides) == (["run.toml", "~/run.toml"], ["~trainer.lr", "+a.b=c"])


@pytest.mark.parametrize("order", [1, -1])
def test_one_side_of_the_clip_overrules_both(order: int) -> None:
    """Scripts of verl set clip_ratio and clip_ratio_high; the narrower key holds, in either order."""
    actor = "actor_rollout_ref.actor"
    given = [f"{actor}.clip_ratio=0.1", f"{actor}.clip_ratio_high=0.28"][::order]
    chosen = load(TrainerSettings, overrides=["model.path=m", *given]).settings.algorithm.model_dump()
    assert (chosen["clip_low"], chosen["clip_high"]) == (0.1, 0.28)


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("ppo_mini_batch_size=64", "as actor_rollout_ref.actor.ppo_mini_batch_size: use algorithm.minibatches"),
        ("trainer.loss_mode=gspo", "as actor_rollout_ref.actor.policy_loss.loss_mode: use algorithm.loss"),
        ("val_before_train=true", "did you mean eval.at_start?"),
        ("--actor-learning-rate=1.0 lr=2.0", "trainer.lr is given twice, as actor_learning_rate and as lr"),
    ],
)
def test_a_key_without_its_sections_is_recognised(written: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(hint)):
        load(TrainerSettings, overrides=["model.path=m", *written.split()])


def test_verls_never_is_an_evaluation_at_both_ends() -> None:
    """`trainer.test_freq = -1` evaluates at no step in between."""
    given = ["model.path=m", "data.eval=e.jsonl", "trainer.test_freq=-1"]
    assert load(TrainerSettings, overrides=given).settings.eval.every == 0


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("trainer.save_steps=5", "did you mean trainer.checkpoint_every?"),
        ("trainer.learning_rate=1e-4", "did you mean trainer.lr?"),
        ("rollout.num_generations=8", "did you mean rollout.group_size?"),
        ("rollout.colour=red", "known here: rollout.group_size, rollout.groups_per_step"),
        ("rollout.temprature=1.0", "did you mean rollout.temperature?"),
    ],
)
def test_a_foreign_key_in_a_section_is_answered_as_without_one(written: str, hint: str) -> None:
    """What another project writes elsewhere, or without a section, is not taken for a misspelt key that looks alike."""
    with pytest.raises(ConfigError, match=re.escape(hint)):
        load(TrainerSettings, overrides=["model.path=m", written])


def test_a_setting_that_is_given_under_two_names_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer.lr is given twice, as trainer.lr and as learning_rate"):
        load(TrainerSettings, overrides=["model.path=m", "trainer.lr=1e-3", "learning_rate=1e-4"])


def test_a_value_that_does_not_exist_here_is_refused_under_both_names() -> None:
    """The error names the key of Penstock, its possible values, and the key that was written."""
    with pytest.raises(ConfigError, match=r"override as loss_agg_mode: algorithm.aggregation: expected .*token-mean"):
        load(TrainerSettings, overrides=["model.path=m", "loss_agg_mode=mean"])


def test_every_key_that_an_error_recommends_exists() -> None:
    sections = {**RolloutSettings.model_fields, **TrainerSettings.model_fields}
    assert not set(ALIASES) & {*RENAMED, *ABSENT, *REFUSED}
    told = [*ABSENT.values(), *RENAMED.values(), *(" ".join(alias.keys) for alias in ALIASES.values())]
    named = re.findall(
        rf"\b({'|'.join(sections)})((?:\.[a-z_]+)+)", " ".join(told).replace("metrics.jsonl", "the file")
    )
    assert len(named) > 150
    for section, rest in named:
        model = sections[section].annotation
        first, *deeper = rest.strip(".").split(".")
        assert first in model.model_fields, f"{section}{rest}"  # type: ignore[union-attr]
        if deeper and first != "map":
            assert deeper[0] in model.model_fields[first].annotation.model_fields  # type: ignore[union-attr]
