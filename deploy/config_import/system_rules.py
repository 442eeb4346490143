"""The rules of keys that one system alone has, or reads in its own way; pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.deploy.config_import.rule_forms import (
    ACTOR,
    DIVIDED,
    MICRO_BATCH,
    OFF,
    READ,
    TABLES,
    Outcome,
    Values,
    batch_rule,
    decide,
    first,
    ignored,
    is_on,
    set_to,
    translated,
)
from penstock.deploy.config_import.rules import estimator, use_vllm

_RANGE = re.compile(r"(?:list\()?range\((\d+),(\d+)\)\)?")
_ACTOR = "actor_train.training_args"
_DIVISIONS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_WHOLE_DISTRIBUTION: Mapping[str, tuple[float, ...]] = {"top_p": (1,), "top_k": (-1, 0), "min_p": (0,)}
_ANSWER_FORMATS: Mapping[str, str] = TABLES["answer_formats"]  # of SGLang's and vLLM's parsers; "": none
_OF_SEQUENCES = ("gspo", "sapo", "geo_mean")  # losses of verl, core_algos.py lines 1313, 1396 and 1707
_TRL_REWARDS: Mapping[str, str] = {"think_format_reward": "think_format"}
_CODE = re.compile(r"[A-Za-z0-9_./-]+\.py:[A-Za-z_]\w*")


def loss_mode(value: Any, values: Values) -> Outcome:
    names = {"vanilla": "ppo_clip", "geo_mean": "gmpo", "gpg": "reinforce"}
    loss = names.get(str(value), str(value))
    settings = {"algorithm.loss": loss} if loss != "gspo" else {"algorithm.dual_clip": None}  # it is in algorithm.name
    if loss == "cispo":
        low, high = (first(values, f"{ACTOR}.clip_ratio_{end}", default=0.2) for end in ("low", "high"))
        settings["algorithm.weight_cap"] = round(1 + high, 12)
        if low < 1:
            return Outcome("decide", settings, f"weights are at least {1 - low:g} there; here they have no lower bound")
    of_sequences = {"algorithm.aggregation": "seq-mean-token-mean"} if value in _OF_SEQUENCES else {}
    return translated(settings | of_sequences)


def clip_ratio(value: Any, values: Values) -> Outcome:
    """Return the range of verl's ratio; its cispo bounds weights by it."""
    if values.get(f"{ACTOR}.policy_loss.loss_mode") == "cispo":
        return ignored(f"{READ} policy_loss.loss_mode")
    low, high = (
        first(values, f"{ACTOR}.clip_ratio_{end}", f"{ACTOR}.clip_ratio", default=0.2) for end in ("low", "high")
    )
    return set_to(algorithm__clip_low=low, algorithm__clip_high=high)


def roll_estimator(value: Any, values: Values) -> Outcome:
    """Return the algorithm of ROLL, whose loss is PPO's clipped one with every estimator."""
    if is_on(values.get("use_topr_loss")):
        return ignored(f"{READ} use_topr_loss")
    if str(value) == "reinforce":
        text = "ROLL clips the ratio with every estimator; its reinforce takes rewards as they are"
        return set_to(text, algorithm__name="grpo", algorithm__advantage="reinforce")
    if str(value) == "distillation":
        return decide(
            "ROLL trains a row's answer by the teacher's probabilities, too; here the answers alone are trained, or a "
            'teacher judges what the policy samples: algorithm.name = "on_policy_distillation" (docs/distillation.md)'
        )
    if str(value) not in ("gae", "grpo", "gigpo", "step_reinforce"):
        return decide(f"set algorithm.name and algorithm.advantage: {value} has no rule")
    return estimator(value, values)


def roll_batch(value: Any, values: Values) -> Outcome:
    """Return the prompts of a batch and its optimizer steps; an agentic pipeline counts episodes."""
    keys = ("num_return_sequences_in_group", "actor_infer.generating_args.num_return_sequences")
    is_agentic = _is_agentic(values)
    per_prompt = first(values, *(("train_env_manager.group_size",) if is_agentic else keys), default=1)
    groups = max(1, value // per_prompt) if is_agentic else value
    if (update := samples_of_an_update(values)) is None:
        of_ranks = "(per_device_train_batch_size x accumulation x data parallel ranks)"
        asked = f"set algorithm.minibatches: the samples of a batch / {of_ranks}"
        return Outcome("decide", {"rollout.groups_per_step": groups}, asked)
    steps = min(groups, max(1, groups * per_prompt // update))
    minibatches = {"algorithm.minibatches": steps} if steps > 1 else {}
    text = f"{value} {'episodes' if is_agentic else 'prompts'} in optimizer steps of {update} samples"
    return translated({"rollout.groups_per_step": groups, **minibatches}, text)


def roll_norm(value: Any, values: Values) -> Outcome:
    """Return over which set ROLL centres rewards, and over which it scales them; here it is one set."""
    sets = [first(values, f"reward_normalization.norm_{part}_type", f"norm_{part}_type") for part in ("mean", "std")]
    if not _is_agentic(values) and values.get("adv_estimator") == "grpo":
        return ignored("ROLL's grpo normalises over the group in any case")
    if len(named := {one for one in sets if one is not None}) != 1 or "running" in named:
        return decide(f"set algorithm.reward_norm: the mean is over {sets[0]} and the deviation over {sets[1]} there")
    shift, scale = (one is not None for one in sets)
    return set_to(algorithm__reward_norm=named.pop(), algorithm__reward_shift=shift, algorithm__reward_scale=scale)


def roll_sequence_length(value: Any, values: Values) -> Outcome:
    """Return the most tokens of an episode of ROLL; its RLVR pipeline has limits of prompts and answers instead."""
    if not _is_agentic(values):
        return ignored("prompt_length and response_length are limits; nothing is padded here")
    larger = {"trainer.micro_batch_tokens": value} if value > MICRO_BATCH else {}
    return translated({"data.overlong": "error", **larger}, "of a whole episode: no start has a limit of its own")


def _is_agentic(values: Values) -> bool:
    return any(key.startswith(("train_env_manager.", "custom_envs.")) for key in values)


def roll_devices(value: Any, values: Values) -> Outcome:
    """Return how many GPUs a role has, if engines and trainer have others."""
    trainer, engines = (_gpus(values.get(f"{role}.device_mapping")) for role in ("actor_train", "actor_infer"))
    if not trainer or not engines or set(trainer) & set(engines):
        return translated({}, DIVIDED)
    of_trainer = _gpus(value) == trainer
    return set_to(placement__trainer=len(trainer)) if of_trainer else set_to(placement__engines=len(engines))


def _gpus(mapping: Any) -> list[Any]:
    matched = _RANGE.fullmatch(str(mapping).replace(" ", ""))
    return mapping if isinstance(mapping, list) else list(range(int(matched[1]), int(matched[2]))) if matched else []


def samples_of_an_update(values: Values) -> int | None:
    size = len(_gpus(values.get("actor_train.device_mapping")))
    parallel = [values.get(f"actor_train.strategy_args.strategy_config.{key}") or 1 for key in _DIVISIONS]
    ranks = size // (parallel[0] * parallel[1] * parallel[2])
    per_device = first(values, f"{_ACTOR}.per_device_train_batch_size", default=8)
    return per_device * first(values, f"{_ACTOR}.gradient_accumulation_steps", default=1) * ranks or None


def roll_template(value: Any, values: Values) -> Outcome:
    """Ignore a template of the model's family: ROLL's texts are those of the folder's chat template then."""
    family, model = (
        re.sub(r"[^a-z0-9]", "", str(text).lower())
        for text in (value, first(values, "pretrain", "model_name_or_path", default=""))
    )
    if family == "native" or (family and family in model):
        return ignored("the chat template of the model's folder")
    written = f"prompts are written by the chat template of the model's folder, not by {value}"
    return decide(f"{written}: data.chat_template names another")


def difficulty_mask(value: Any, values: Values) -> Outcome:
    if not is_on(value):
        return ignored(OFF)
    bounds = [
        first(values, f"difficulty_{end}_threshold", default=default) for end, default in (("low", 0.0), ("high", 1.0))
    ]
    text = (
        "other prompts take the place of the groups outside, where ROLL trains a smaller batch: keep it or leave it out"
    )
    return Outcome("decide", {"algorithm.group_mean_range": bounds}, text)


def roll_sequence_parallel(value: Any, values: Values) -> Outcome:
    ranks = len(_gpus(values.get("actor_train.device_mapping")))
    if value == 1:
        return ignored(OFF)
    if not ranks or ranks % value:
        return decide(f"set trainer.sequence_parallel = {value} and trainer.num_ranks, a multiple of it")
    return set_to(trainer__sequence_parallel=value, trainer__num_ranks=ranks)


def agentrl_clip(value: Any, values: Values) -> Outcome:
    low, more = first(values, "epsilon", default=0.2), first(values, "epsilon_higher", default=0.1)
    is_band = str(values.get("loss_calculater")).lower() == "minirl" and not is_on(values.get("strict_in_bound"))
    widths = first(values, "importance_weight_cap_ratio", default=4.0) if is_band else 1  # MINIRL's only bounds there
    low, high = round(widths * low, 12), round(widths * (low + more), 12)
    return set_to("epsilon_higher is added to epsilon", algorithm__clip_low=low, algorithm__clip_high=high)


def agentrl_scaling(value: Any, values: Values) -> Outcome:
    """Return the clip of gradients that does what AgentRL's factor on advantages does: AdamW divides it out."""
    norm = first(values, "max_grad_norm", default=1.0)
    return set_to(
        "AdamW divides the factor out, but for the clip of gradients", trainer__max_grad_norm=round(norm / value, 12)
    )


def agentrl_tensor_parallel(value: Any, values: Values) -> Outcome:
    ranks = first(values, "num_processes", "nproc_per_node")
    if value == 1 or not isinstance(ranks, int):
        return ignored(OFF if value == 1 else f"{READ} per_device_train_batch_size")
    return set_to(trainer__tensor_parallel=value, trainer__num_ranks=ranks)


def agentrl_sampling(value: Any, values: Values) -> Outcome:
    """Return the sampling of AgentRL, a JSON text."""
    given = json.loads(value) if isinstance(value, str) else dict(value)
    temperature = given.pop("temperature", 1.0)
    if any(number not in _WHOLE_DISTRIBUTION.get(key, ()) for key, number in given.items()):
        return decide(f"set rollout.temperature = {temperature}: the rest makes the recorded log-probabilities inexact")
    return set_to(rollout__temperature=temperature)


def agentrl_environment(value: Any, values: Values) -> Outcome:
    """Return the one decision on AgentRL's dialogue with tools, whose servers are in other files."""
    parser = str(values.get("tool_call_parser", ""))
    named = _ANSWER_FORMATS.get(parser)
    calls = f'answer_format = "{named}"' if named else f"its answer_format for {parser or 'calls'}"
    calls += ", which is one of your own (docs/agents.md)" * (named == "")
    repeats = values.get("repetition_early_stop_times", -1)
    limit = f', repeat_limit = {repeats} with type = "tools"' if isinstance(repeats, int) and repeats > 0 else ""
    return decide(
        'set rollout.environment and [environment.define.NAME] with type = "mcp", options.servers, max_turns = '
        f"{value}, {calls}{limit}; the judge is an endpoint that reward.name names (docs/tools.md, docs/rewards.md)"
    )


def dynamic_filtering(value: Any, values: Values) -> Outcome:
    bounds = first(values, "dynamic_filtering_reward_range", default=[0, 1])
    if not is_on(value) or not isinstance(bounds, list) or len(bounds) != 2:
        return ignored(OFF)
    return set_to(
        "groups of other mean rewards are replaced", algorithm__group_mean_range=[float(bound) for bound in bounds]
    )


def openrlhf_correction(value: Any, values: Values) -> Outcome:
    """Return OpenRLHF's weights of the trainer over the engine: at both ends bounded (tis), or 0 outside (icepop)."""
    bound = {"tis": "clip", "icepop": "mask"}.get(str(values.get("vllm_is_correction_type", "tis")))
    band = first(values, "vllm_is_truncated_threshold", default=[0.5, 5.0])
    if not is_on(value):
        return ignored(OFF)
    if bound is None or not isinstance(band, list) or len(band) != 2:
        return decide("set algorithm.importance and algorithm.rejection (docs/algorithms.md)")
    return _importance("token", bound, *band)


def _importance(level: str, bound: str, low: float, high: float) -> Outcome:
    """Return the weights of the trainer over the engine, which are then those of the loss's ratio, too."""
    settings = {"importance": level, "importance_bound": bound, "importance_low": low, "importance_high": high}
    return translated({f"algorithm.{key}": value for key, value in {**settings, "ratio_anchor": "proximal"}.items()})


def openrlhf_reward(value: Any, values: Values) -> Outcome:
    """Return the reward of OpenRLHF: a file with its function ``reward_func``, or the URL of a server."""
    code = f"{value}:reward_func"
    if str(value).endswith(".py") and _CODE.fullmatch(code):
        return set_to("the path is relative to the folder where the reward service is started", reward__name=code)
    return decide("use reward.name, with the URL registered as an endpoint (docs/rewards.md, dialect openrlhf)")


def slime_reference(value: Any, values: Values) -> Outcome:
    """Return the decision on slime's reference, a checkpoint of Megatron, unless it is the model by its name, or no KL reads it."""
    if not any(values.get(key) for key in ("kl_loss_coef", "kl_coef")):
        return ignored("no KL reads it")
    reference, model = (Path(str(path)).name for path in (value, values.get("hf_checkpoint")))
    if reference.startswith(model):
        return ignored("the model as the run starts, in Megatron's format: here, too, the reference is that model")
    return decide(
        f"the reference is the model as the run starts, not {value}, as no checkpoint of Megatron is read: set algorithm.reference_path"
    )


def slime_reward(value: Any, values: Values) -> Outcome:
    """Return the decision on a reward by rule of slime: those here compare answers in another way."""
    near = {"math": "math", "deepscaler": "math", "dapo": "answer_line", "f1": "qa_f1", "gpqa": "multiple_choice"}
    named = near.get(str(value).removeprefix("boxed_"))
    if named is None:
        return decide(f"set reward.name: {value} is no reward here (docs/rewards.md)")
    own = "slime's own function as FILE.py:FUNCTION"
    return decide(f'set reward.name = "{named}", the nearest of docs/graders.md to {value}, or {own}')


def optim_args(value: Any, values: Values) -> Outcome:
    """Return the optimizer's options of transformers, such as ``beta1=0.9,beta2=0.98``."""
    pairs = dict(part.strip().split("=", 1) for part in str(value).split(",") if "=" in part)
    if not pairs or set(pairs) - {"beta1", "beta2"}:
        return decide("set trainer.betas and trainer.weight_decay; AdamW has no other option here")
    return set_to(trainer__betas=[float(pairs.get("beta1", 0.9)), float(pairs.get("beta2", 0.999))])


def scheduler_kwargs(value: Any, values: Values) -> Outcome:
    """Return the end of transformers' cosine_with_min_lr."""
    given = json.loads(value) if isinstance(value, str) else dict(value)
    peak, end = first(values, "learning_rate"), given.get("min_lr")
    share = given.get("min_lr_rate", None if None in (peak, end) else end / peak)
    if share is None or given.keys() - {"min_lr", "min_lr_rate"}:
        return decide("the schedule has another form there: set trainer.schedule and trainer.min_lr_ratio")
    return set_to(trainer__min_lr_ratio=round(share, 12))


def reward_functions(value: Any, values: Values) -> Outcome:
    """Return the reward of TRL's functions, built in or named FILE.py:FUNCTION, added up with their weights."""
    listed = value if isinstance(value, list) else [value]
    names = [_TRL_REWARDS.get(str(name), str(name)) for name in listed]
    if unknown := [name for name in names if name not in _TRL_REWARDS.values() and not _CODE.fullmatch(name)]:
        return decide(f"set reward.name, and reward.define for several: no FILE.py:FUNCTION: {', '.join(unknown)}")
    if len(names) == 1 and "reward_weights" not in values:
        return set_to(reward__name=names[0])
    settings: dict[str, Any] = {"reward.name": "trl"}
    for place, weight in enumerate(first(values, "reward_weights", default=[1.0] * len(names))):
        part = f"reward.define.trl.parts.part{place}"
        settings |= {f"{part}.reward": names[place], f"{part}.weight": float(weight)}
    return translated(settings, "the weighted sum of the functions")


def verl_batch(value: Any, values: Values) -> Outcome:
    """Return the prompts of verl's batch; fully_async, where train_batch_size is 0, waits for so many mini-batches."""
    if value != 0:
        return batch_rule("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size", 256)(value, values)
    steps = first(values, "async_training.require_batches", default=1)
    return set_to(f"{steps} mini-batches", rollout__groups_per_step=_waits_for(values), algorithm__minibatches=steps)


def _waits_for(values: Values) -> int:
    return first(values, f"{ACTOR}.ppo_mini_batch_size", default=256) * first(
        values, "async_training.require_batches", default=1
    )


def verl_weights(value: Any, values: Values) -> Outcome:
    """Return verl's weights of the trainer over the engine, which its clipped loss in bypass mode does not have."""
    key = "algorithm.rollout_correction"
    if is_on(values.get(f"{key}.bypass_mode")) and values.get(f"{key}.loss_type", "ppo_clip") == "ppo_clip":
        return ignored("only measured: the ratio that bypass mode clips is over the engine's probabilities")
    return _importance(str(value), "truncate", 0.0, first(values, f"{key}.rollout_is_threshold", default=2.0))


def verl_rejection(value: Any, values: Values) -> Outcome:
    """Return which tokens or answers verl rejects, by a level and its bounds ``LOW_HIGH``, or ``HIGH``."""
    levels = [level.strip() for level in str(value).split(",")]
    bounds = str(values.get("algorithm.rollout_correction.rollout_rs_threshold", "")).split(",")[0]
    low, _, high = bounds.strip().rpartition("_")
    settings = {"algorithm.rejection": levels[0], "algorithm.rejection_high": float(high)}
    settings |= {"algorithm.rejection_low": float(low)} if low else {}
    if len(levels) == 1:
        return translated(settings)
    return Outcome("decide", settings, f"what {' or '.join(levels[1:])} rejects there, too, is trained here")


def verl_rollout_steps(value: Any, values: Values) -> Outcome:
    return set_to(f"{value} prompts in batches of {_waits_for(values)}", trainer__steps=value // _waits_for(values))


def verl_test_freq(value: Any, values: Values) -> Outcome:
    every = first(values, "async_training.trigger_parameter_sync_step", default=4)
    return set_to(f"engines get weights every {every} steps", eval__every=value * every) if value > 0 else ignored(OFF)


def verl_staleness(value: Any, values: Values) -> Outcome:
    """Return the versions that verl's fully_async may be ahead: it counts samples, between weights every few steps."""
    every = first(values, "async_training.trigger_parameter_sync_step", default=4)
    if not isinstance(value, (int, float)) or not isinstance(every, int):
        return decide("use rollout.max_staleness (in versions)")
    steps = max(0, math.ceil(every * (1 + value)) - 1)
    ages = f"samples are at most {steps} versions old, and most are newer"
    text = f"engines get weights every {every} steps there, and after each here: {ages}"
    return Outcome("decide", {"rollout.max_staleness": steps}, text)


def openrlhf_estimator(value: Any, values: Values) -> Outcome:
    """Return the algorithm of OpenRLHF, whose reinforce is REINFORCE++: clipped, and scaled over the whole batch."""
    return estimator("reinforce_pp" if str(value) == "reinforce" else value, values)


def trl_vllm(value: Any, values: Values) -> Outcome:
    """Return TRL's engine, and its weights of the trainer over vLLM, if the file has more than their defaults."""
    outcome = use_vllm(value, values)
    is_named = any(key.startswith("vllm_importance_sampling") for key in values)
    if not is_named or not is_on(value) or not is_on(values.get("vllm_importance_sampling_correction", True)):
        return outcome
    level, bound = str(first(values, "vllm_importance_sampling_mode", default="sequence_mask")).rsplit("_", 1)
    low = first(values, "vllm_importance_sampling_clip_min", default=0.0)
    high = first(values, "vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap", default=3.0)
    weights = _importance(level, "mask" if bound == "mask" else "clip", low, high)
    return translated({**outcome.settings, **weights.settings})
