"""The rules of single keys of other systems; pure. `rule_forms` has those that many keys share."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from penstock.deploy.config_import.rule_forms import (
    ACTOR,
    DIVIDED,
    OFF,
    READ,
    READS_IMAGES,
    Outcome,
    Values,
    decide,
    engine,
    first,
    ignored,
    is_given,
    is_on,
    set_to,
    steps_or_share,
    translated,
)
from penstock.protocol.config.foreign_config import ABSENT, ESTIMATOR
from penstock.trainer.algorithm.chosen_parts import canonical

REWARD_ARGUMENTS = "custom_reward_function.reward_kwargs."  # of verl
_SHARES_OF_ROWS = ("tp_size", "pp_size", "cp_size")  # of AgentRL: so many ranks have the same rows
_REWARD_CODE = r"[A-Za-z0-9_./-]+\.py:[A-Za-z_][A-Za-z0-9_]*"
# ROLL's sets over which rewards are normalised; the later names are those of its agentic pipeline.
_GROUPINGS = {"state": "group", "traj_group_id": "group", "inductive": "source", "tags": "source", "batch": "batch"}
_TURN_NORMS = {
    "gigpo": ("algorithm.episode_baseline", "algorithm.normalise_by_std"),
    "step_reinforce": ("algorithm.turn_baseline", "algorithm.turn_scale"),
}


def accelerate_file(value: Any, values: Values) -> Outcome:
    """Return the sharding that a file of accelerate's options says by its name."""
    stage = "3" if "fsdp" in str(value) else "".join(re.findall(r"z(?:ero)?_?([0-3])", str(value))[:1])
    if stage:
        return set_to(trainer__zero_stage=int(stage))
    if re.search(r"(single|multi)_gpu", str(value)):
        return ignored("one process for each GPU")
    return decide(ABSENT["tp_size"])  # how the model is divided over the GPUs


def engine_name(value: Any, values: Values) -> Outcome:
    return set_to(worker__engine=engine(value))


def use_vllm(value: Any, values: Values) -> Outcome:
    starts = is_on(value) and values.get("vllm_mode") != "server"
    return set_to(worker__engine="vllm") if starts else ignored(OFF)


def processes(value: Any, values: Values) -> Outcome:
    if "num_generations" in values:
        return ignored(f"{READ} per_device_train_batch_size")
    return gpus(value, values)


def eval_prompt_data(value: Any, values: Values) -> Outcome:
    return set_to(data__eval=value[1::2] if isinstance(value, list) and len(value) > 1 else value)


def run_name(value: Any, values: Values) -> Outcome:
    """Return the name as a run may be called: a-z, 0-9 and '-'."""
    name = re.sub(r"[^a-z0-9]+", "-", str(value).rstrip("/").rpartition("/")[2].lower()).strip("-")[:48].strip("-")
    return set_to("names of runs are a-z, 0-9 and '-'", run__id=name) if name else decide("set run.id")


def estimator(value: Any, values: Values) -> Outcome:
    theirs = str(value).lower()
    name = ESTIMATOR.value(theirs)
    mode = str(first(values, f"{ACTOR}.policy_loss.loss_mode", "importance_sampling_level", default=""))
    if name == "grpo" and mode in ("gspo", "sequence"):
        name = "gspo"
    try:
        canonical(name)
    except ValueError as err:
        why = str(err).partition(";")[0]
        return decide(f"set algorithm.name, or algorithm.advantage and algorithm.loss (docs/algorithms.md): {why}")
    return set_to(algorithm__name=name)


def epochs(value: Any, values: Values) -> Outcome:
    steps = first(values, "trainer.total_training_steps", "max_steps", "num_rollout")
    if isinstance(steps, int) and steps > 0:
        return ignored(f"the file sets {steps} steps")
    return set_to(trainer__epochs=value) if value > 0 else ignored(OFF)


def completions_per_step(value: Any, values: Values) -> Outcome:
    per_prompt = first(values, "n_samples_per_prompt", default=1)
    prompts = values.get("rollout_batch_size")
    if prompts is not None:
        return ignored(f"{READ} rollout_batch_size")
    return set_to(
        f"{value} completions, {per_prompt} of each prompt", rollout__groups_per_step=max(1, value // per_prompt)
    )


def number_of_processes(values: Values) -> Any:
    """Return how many processes train on rows of their own; a text, where the file does not say it."""
    started = first(values, "num_processes", "nproc_per_node", "num_gpus", default=1)
    shared = math.prod(first(values, key, default=1) for key in _SHARES_OF_ROWS)
    return max(1, started // shared) if isinstance(started, int) and isinstance(shared, int) else started


def trl_batch(value: Any, values: Values) -> Outcome:
    accumulated = first(values, "gradient_accumulation_steps", default=1)
    processes = number_of_processes(values)
    n = first(values, "num_generations", default=8)
    shared = math.prod(first(values, key, default=1) for key in _SHARES_OF_ROWS)
    if not all(isinstance(number, int) and number > 0 for number in (value, accumulated, processes, n)):
        ranks = f"trainer.num_ranks, trainer.tensor_parallel = {shared} and " if shared > 1 else ""
        return decide(
            f"set {ranks}rollout.groups_per_step: {value} x {accumulated} x processes / {shared} / {n} of each prompt"
        )
    generated = values.get("generation_batch_size")
    together = (
        generated // (value * processes) if generated else first(values, "steps_per_generation", default=accumulated)
    )
    updates = max(1, together // accumulated)  # optimizer steps on what was generated together
    completions = value * accumulated * processes * updates
    groups = max(1, completions // n)
    text = f"{value} completions x {accumulated} accumulated x {processes} processes / {n} of each prompt"
    settings = {"rollout.groups_per_step": groups}
    if completions % n:
        return Outcome(
            "decide", settings, f"{text}: no whole number of prompts, and a batch here has groups of all {n}"
        )
    if updates > 1:
        settings["algorithm.minibatches"] = min(updates, groups)
        text += f", {updates} such optimizer steps on what was generated together"
    return translated(settings, text)


def eval_steps(value: Any, values: Values) -> Outcome:
    """Return when to evaluate; transformers does only where a strategy says so."""
    if str(first(values, "eval_strategy", "evaluation_strategy", default="no")).lower() in ("no", "false"):
        return ignored("eval_strategy is no")
    return steps_or_share("eval.every")(value, values)


def finetuning_type(value: Any, values: Values) -> Outcome:
    """Return LLaMA-Factory's kind of training, with its defaults: adapters of rank 8, of twice that as alpha."""
    if value == "full":
        return ignored("all weights are trained")
    if value != "lora":
        return decide(f"all weights, or adapters (model.lora.rank), are trained: not {value}")
    rank = first(values, "lora_rank", default=8)
    return set_to(model__lora__rank=rank, model__lora__alpha=first(values, "lora_alpha", default=2 * rank))


def betas(value: Any, values: Values) -> Outcome:
    low, high = ([key, f"actor_train.training_args.{key}"] for key in ("adam_beta1", "adam_beta2"))  # of TRL, of ROLL
    return set_to(trainer__betas=[first(values, *low, default=0.9), first(values, *high, default=0.999)])


def clip_low(value: Any, values: Values) -> Outcome:
    high = values.get("epsilon_high")
    return set_to(algorithm__clip_low=value, algorithm__clip_high=value if high is None else high)


def reward_code(path: Any, values: Values) -> Outcome:
    if not path:
        return ignored(OFF)
    function = str(values.get("custom_reward_function.name") or "compute_score")
    code, name = f"{path}:{function}", re.sub(r"[^A-Za-z0-9]+", "_", Path(str(path)).stem).strip("_")
    if not re.fullmatch(_REWARD_CODE, code) or not name:
        return decide(
            f"copy {path} to a path of letters, digits, '.', '-' and '_', and set reward.name = \"PATH.py:{function}\""
        )
    where = "the path is relative to the folder where the reward service is started"
    arguments = {
        key.removeprefix(REWARD_ARGUMENTS): value
        for key, value in values.items()
        if key.startswith(REWARD_ARGUMENTS) and is_given(value)
    }
    if not arguments:
        return translated({"reward.name": code}, where)
    part = f"reward.define.my_{name}.parts.{name}"  # my_: no built-in reward is called like that
    named = {f"{part}.parameters.{key}": value for key, value in arguments.items()}
    return translated({"reward.name": f"my_{name}", f"{part}.reward": code, **named}, where)


def gpus(value: Any, values: Values) -> Outcome:
    if value == 1:
        return set_to(trainer__num_ranks=1)
    if "model.partial_pretrain" in values:  # supervised: no GPU generates
        return set_to(trainer__num_ranks=value)
    machines = first(values, "trainer.nnodes", "actor_num_nodes", "num_nodes", default=1)
    if machines != 1:
        settings = {"trainer.num_ranks": value * machines} if isinstance(machines, int) else {}
        start = "start `penstock train ... --nodes N --node-rank K --rdzv HOST:PORT` and workers on each"
        return Outcome("decide", settings, f"{value} on each of {machines} machines: {start}")
    if first(values, f"{ACTOR}.ulysses_sequence_parallel_size", default=1) != 1:
        return set_to(trainer__num_ranks=value)
    return translated({}, DIVIDED)


def overlong(value: Any, values: Values) -> Outcome:
    longest = first(values, "data.max_response_length", "rollout.response_length", "generate_max_len", default=0)
    if not isinstance(longest, (int, float)) or longest <= 0:
        return decide("set algorithm.overlong_buffer: this length as a fraction of rollout.max_new_tokens")
    return set_to(f"{value} of {longest} tokens", algorithm__overlong_buffer=round(value / longest, 6))


def overlong_buffer(value: Any, values: Values) -> Outcome:
    """Return verl's punishment of completions that come close to the length, of its reward manager dapo."""
    config = "reward_model.reward_kwargs.overlong_buffer_cfg"
    longest = first(values, "reward_model.reward_kwargs.max_resp_len", "data.max_response_length", default=512)
    if not is_on(values.get(f"{config}.enable")):
        return ignored(OFF)
    if longest != values.get("data.max_response_length", 512):
        return decide(f"set algorithm.overlong_buffer: completions are punished from {longest} - {value} tokens on")
    factor = float(first(values, f"{config}.penalty_factor", default=0.0))
    share = round(value / longest, 6)
    return set_to(f"{value} of {longest} tokens", algorithm__overlong_buffer=share, algorithm__overlong_factor=factor)


def vision_tower(value: Any, values: Values) -> Outcome:
    """Return whether the encoder of images is frozen; a model without one has none to train."""
    model = str(first(values, "actor_rollout_ref.model.path", "model_name_or_path", "pretrain", default=""))
    trains = not is_on(value) and READS_IMAGES.search(model) is not None
    return set_to(model__train_vision_tower=True) if trains else ignored("the encoder of images is frozen here, too")


def frozen_modules(value: Any, values: Values) -> Outcome:
    names = value if isinstance(value, list) else str(value).split(",")
    if all(str(name).strip().startswith(("vision", "visual")) for name in names):
        return ignored("the encoder of images is frozen here, too: model.train_vision_tower is off")
    return decide(f"every other part of a model is trained: {value} cannot be frozen")


def dual_clip_rule(value: Any, values: Values) -> Outcome:
    clip = first(values, "pg_clip", default=0.2)
    return set_to(f"1 + 2 x {clip}", algorithm__dual_clip=round(1 + 2 * clip, 6)) if is_on(value) else ignored(OFF)


def tracker(value: Any, values: Values) -> Outcome:
    """Turn on the trackers whose switches (``use_wandb``) are on; OpenRLHF's has the account's key as its value."""
    off = (None, False, "", "False", "false")
    named = [name for name in ("wandb", "tensorboard", "mlflow") if values.get(f"use_{name}") not in off]
    folder = str(values.get("use_tensorboard", ""))  # OpenRLHF's
    settings = {"tracker": named} | ({"tracking.folder": folder} if "/" in folder else {})
    return translated(settings) if named else ignored(OFF)


def method_rule(value: Any, values: Values) -> Outcome:
    grouping = first(values, "reward_normalization.grouping", "grouping", default="state")
    norm = _GROUPINGS.get(str(grouping))
    estimator = str(first(values, "adv_estimator", default=""))
    if estimator in _TURN_NORMS and norm is not None and value in ("mean_std", "mean"):
        baseline, scale = _TURN_NORMS[estimator]
        return translated({baseline: norm, scale: value == "mean_std"})
    if estimator in _TURN_NORMS:
        return decide(f"set {' and '.join(_TURN_NORMS[estimator])}")
    if value == "identity":
        return set_to(algorithm__reward_norm="none")
    if norm is None or value not in ("mean_std", "asym_clip", "mean"):
        return decide("set algorithm.reward_norm, algorithm.reward_scale and algorithm.asym_clip")
    settings: dict[str, Any] = {"algorithm.reward_norm": norm}
    if value == "asym_clip":
        settings["algorithm.asym_clip"] = True
    if value == "mean":
        settings["algorithm.reward_scale"] = False
    return translated(settings)


def min_lr(value: Any, values: Values) -> Outcome:
    peak = first(values, "lr")
    if not isinstance(peak, (int, float)) or not peak or not isinstance(value, (int, float)):
        return decide("set trainer.min_lr_ratio: this rate as a share of trainer.lr")
    return set_to(trainer__min_lr_ratio=min(1.0, round(value / peak, 12)))


def low_high(value: Any, values: Values) -> Outcome:
    if isinstance(value, list) and len(value) == 2:
        return set_to(algorithm__clip_low=value[0], algorithm__clip_high=value[1])
    return decide("set algorithm.clip_low and algorithm.clip_high")


def fixed_gpus(value: Any, values: Values) -> Outcome:
    nodes = first(values, "actor_num_nodes", default=1)
    if is_on(values.get("colocate_all_models")) or is_on(values.get("colocate")):
        return gpus(value, values)
    return set_to(f"{value} on each of {nodes} nodes", trainer__num_ranks=value * nodes)


def engines(value: Any, values: Values) -> Outcome:
    per = first(values, "rollout_num_gpus_per_engine", default=1)
    return set_to(f"{value} GPUs, {per} for each server", worker__engine="sglang", sglang__engines=max(1, value // per))
