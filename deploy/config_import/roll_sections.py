"""The sections of ROLL's files with names of their own: workers of rewards, shares of domains, environments; pure.

``custom_envs`` and the tags of env managers become ``[environment.define.TAG]``, tags of workers ``reward.by_source``.

Read from ROLL 0.3 (roll/pipeline/agentic/agentic_config.py, its environments, examples/config/traj_envs.yaml).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from penstock.deploy.config_import.foreign_tree import Found, unassigned
from penstock.deploy.config_import.rule_forms import (
    READ,
    TABLES,
    Outcome,
    Rule,
    Values,
    decide,
    ignore,
    ignored,
    is_on,
    translated,
)

_OF_A_WORKER = re.compile(r"rewards\.([^.]+)\.(.+)")  # of ROLL
# What its workers score as here, and what examples/config/traj_envs.yaml defines, which files name and do not hold.
_TABLES = TABLES["roll"]
_ROLL_REWARDS: Mapping[str, str] = _TABLES["rewards"]
_IFEVAL: dict[str, Any] = _TABLES["ifeval"]  # ifeval_rule_reward_worker.py
_DIFFERENCES: Mapping[str, str] = _TABLES["differences"]  # of those that score in another way here
_OF_A_RULE = (
    "model_args.", "data_args.", "strategy_args.", "world_size", "infer_batch_size", "device_mapping", "use_local", "reward_type",
)  # fmt: skip
_SHARES = "actor_train.data_args.domain_interleave_probs."
_DEFINITION = re.compile(r"custom_envs\.([^.]+)\.(.+)")
_OF_GEM = re.compile(r"(game|math|qa|code|rg|eval):")  # names that gem.make() knows
_TRAINED = ("sft_train", "student_train", "student")  # what ROLL calls the trainer elsewhere
_ZERO = re.compile(r"deepspeed_zero([0-3])(_cpuoffload)?")  # tables of examples/config/
_CONFIG = "env_config."
_MANAGERS = ("train_env_manager", "val_env_manager")
_PUBLISHED: Mapping[str, Mapping[str, Any]] = _TABLES["published"]
_OF_ALL: Mapping[str, Any] = _TABLES["of_all"]
_VARIABLES = {"max_steps": "max_actions_per_traj"}  # of the file, by which it changes those definitions
# Options of a game: ROLL's name, ours, and what ROLL does where it is not given.
_OPTIONS: Mapping[str, list[tuple[str, str, Any]]] = _TABLES["options"]
_SHARED_OPTIONS: list[tuple[str, str, Any]] = _TABLES["shared_options"]
_LIMITS: Mapping[str, str] = _TABLES["limits"]
_OWN_WORDS = (
    "the game is the same, and words its turns itself instead of by agent_template; a lake's start and goal are "
    "opposite corners, in ROLL any two fields: keep it, or write an environment (docs/environments.md)"
)
_WITHOUT_EFFECT = ("use_thread_lock", "max_env_step_concurrent", "env_config.max_steps", "env_config.search_depth")


def reward(key: str) -> Rule | None:
    """Return the rule for a key of one of ROLL's reward workers; None for any other key.

    Workers without an equal here are one decision, on the first of them: who scores the rows with their tags.
    """
    if (matched := _OF_A_WORKER.fullmatch(key)) is None:
        return None
    worker, rest = matched[1], matched[2]

    def rule(value: Any, values: Values) -> Outcome:
        kinds = {
            other[1]: str(kind).rpartition(".")[2]
            for name, kind in values.items()
            if (other := _OF_A_WORKER.fullmatch(name)) and other[2] == "worker_cls"
        }
        others = [
            name
            for name, kind in kinds.items()
            if (kind in _DIFFERENCES or kind not in _ROLL_REWARDS)
            and not is_on(values.get(f"rewards.{name}.use_local"))
        ]
        name = _ROLL_REWARDS.get(kinds.get(worker, ""))
        if worker in others and (worker, rest) == (others[0], "worker_cls"):
            whys = (_DIFFERENCES.get(kinds[one], f"{kinds[one]}: no reward here") for one in others)
            tags = (values.get(f"rewards.{one}.tag_included") for one in others)
            listed = "; ".join(f"{why}, for {tag}" for why, tag in zip(whys, tags, strict=True))
            return decide(f"set reward.by_source or reward.name (docs/rewards.md): {listed}")
        if worker in others and (name is None or rest != "tag_included"):
            return translated({}, f"part of the decision on rewards.{others[0]}.worker_cls")
        if rest == "worker_cls":
            has_tags = bool(values.get(f"rewards.{worker}.tag_included"))
            return (
                ignored(f"{READ} rewards.{worker}.tag_included")
                if has_tags
                else translated({"reward.name": name} | (_IFEVAL if name == "roll_ifeval" else {}))
            )
        tags = [value] if isinstance(value, str) else value
        if rest == "tag_included" and name is not None and all(re.fullmatch(r"[\w-]+", tag) for tag in tags):
            settings = {"data.map.data_source": "tag", **{f"reward.by_source.{tag}": name for tag in tags}}
            settings |= {"reward_service.code_score": "all"} if name == "code" else {}
            settings |= _IFEVAL if name == "roll_ifeval" else {}
            return translated(settings, "the column tag chooses the reward")
        if rest.startswith(_OF_A_RULE) and name is not None:
            return ignored("a reward by rule has no model")
        return decide("a part of a reward: reward.define, or a judge behind an endpoint (docs/rewards.md)")

    return rule


def domains(key: str) -> Rule | None:
    """Return the rule for a share of ROLL's batches that a domain has; None for any other key."""
    if not key.startswith(_SHARES):
        return None

    def rule(value: Any, values: Values) -> Outcome:
        shares = {name.removeprefix(_SHARES): share for name, share in values.items() if name.startswith(_SHARES)}
        if len(shares) == 1:
            return ignored("the only domain: every row is of it")
        if key != (earlier := next(name for name in values if name.startswith(_SHARES))):
            return translated({}, f"{READ} {earlier}")
        tags = {domain: ",".join(_listed(values.get(f"rewards.{domain}.tag_included"))) for domain in shares}
        prompts = values.get("rollout_batch_size")
        if not isinstance(prompts, int) or not all(tags.values()):
            return decide("set data.weights: each data_source's share of the prompts")
        of_batch = {tags[domain]: int(share * prompts) for domain, share in shares.items()}
        of_batch[tags[[*shares][-1]]] += prompts - sum(of_batch.values())  # the last one's, as in ROLL
        if min(of_batch.values()) < 1 or len(of_batch) < len(shares):
            return decide(f"set data.weights: of {prompts} prompts a domain has none, or its tags are those of another")
        text = f"the prompts of a batch of {prompts}; rows with other tags, which ROLL leaves out, are refused"
        return translated({"data.map.data_source": "tag", "data.weights": of_batch}, text)

    return rule


def add_published(found: Found) -> None:
    """Put ROLL's own tables in the place of ``${custom_env.TAG}`` and ``${deepspeed_zero2}`` that a file does not hold.

    Arguments of generation that only the env manager has are those of the policy's workers, as in ROLL.
    """
    values: dict[str, Any] = {}
    trained = next(
        (f"{role}." for role in _TRAINED if any(key.startswith(f"{role}.") for key in found.values)), "actor_train."
    )
    of_manager, of_workers = "train_env_manager.generating_args.", "actor_infer.generating_args."
    if not any(key.startswith(of_workers) for key in found.values):
        found.values = {key.replace(of_manager, of_workers): value for key, value in found.values.items()}
    for written, value in found.values.items():
        key = written.replace(trained, "actor_train.", 1) if written.startswith(trained) else written
        key = key.replace("student_infer.", "actor_infer.", 1) if key.startswith("student_infer.") else key
        tag = key.removeprefix("custom_envs.")
        if tag in _PUBLISHED and unassigned(value) == [f"custom_env.{tag}"]:
            limits = {name: found.values.get(_VARIABLES.get(name, name), default) for name, default in _OF_ALL.items()}
            values |= {f"{key}.{name}": part for name, part in {**_PUBLISHED[tag], **limits}.items()}
        elif matched := _ZERO.fullmatch("".join(unassigned(value))):
            values[f"{key}.zero_optimization.stage"] = int(matched[1])
            if matched[2]:
                values[f"{key}.zero_optimization.offload_optimizer.device"] = "cpu"
        else:
            values[key] = value
    if "kd_objective" in values:
        values.setdefault("adv_estimator", "distillation")
    found.values = values


def rule_of(key: str) -> Rule | None:
    """Return the rule for a key of one of these sections; None for any other key."""
    if rule := reward(key) or domains(key):
        return rule
    if key.startswith("custom_env."):
        return ignore("custom_envs takes what it names of it")
    if key in ("max_tokens_per_step", "max_actions_per_traj"):
        return _variable
    if matched := _DEFINITION.fullmatch(key):
        return _part_of_definition(matched[1], matched[2])
    return _OF_ONE.get(key)


def _variable(value: Any, values: Values) -> Outcome:
    if any(key.startswith("custom_envs.") for key in values):
        return ignored(f"{READ} custom_envs")
    return decide("set environment.max_turns and environment.max_answer_tokens")


def _part_of_definition(tag: str, part: str) -> Rule:
    def rule(value: Any, values: Values) -> Outcome:
        if tag not in [name for manager in _MANAGERS for name in _listed(values.get(f"{manager}.tags"))]:
            return ignored("no env manager has this tag")
        kind = str(values.get(f"custom_envs.{tag}.env_type"))
        if part == "env_type":
            return _definition(tag, kind, values)
        if part in _WITHOUT_EFFECT:
            return ignored("threads, or a limit that max_steps beside it is, too")
        if part == "env_manager_cls" and str(value).endswith(".TrajEnvManager"):
            return ignored("an episode is one dialogue here, too")
        is_known = kind in _OPTIONS or _OF_GEM.match(kind) is not None
        if part == "agent_template" and is_known:
            return decide(_OWN_WORDS)
        if part in _LIMITS or (_OF_GEM.match(kind) and part.startswith(_CONFIG)):
            return ignored(f"{READ} custom_envs.{tag}.env_type")
        known = {*_LIMITS, *(f"env_config.{theirs}" for theirs, _, _ in (*_OPTIONS.get(kind, ()), *_SHARED_OPTIONS))}
        if part in known and kind in _OPTIONS:
            return ignored(f"{READ} custom_envs.{tag}.env_type")
        return decide(
            f"no option of [environment.define.{tag}]: an environment of yours (docs/environments.md) may have it"
        )

    return rule


def _definition(tag: str, kind: str, values: Values) -> Outcome:
    given = {
        key.removeprefix(f"custom_envs.{tag}."): value
        for key, value in values.items()
        if key.startswith(f"custom_envs.{tag}.")
    }
    definition = f"environment.define.{tag}"
    limits = {
        f"{definition}.{ours}": given[theirs] for theirs, ours in _LIMITS.items() if given.get(theirs) is not None
    }
    if _OF_GEM.match(kind):
        made = {
            f"{definition}.options.make.{key.removeprefix(_CONFIG)}": value
            for key, value in given.items()
            if key.startswith(_CONFIG)
        }
        return translated(
            {f"{definition}.type": "gem", f"{definition}.options.id": kind, **made, **limits}, "pip install gem-llm"
        )
    if kind not in _OPTIONS:
        return decide(f"set [environment.define.{tag}]: {kind} is no environment here (docs/environments_of_others.md)")
    options: dict[str, Any] = {}
    for theirs, ours, default in (*_OPTIONS[kind], *_SHARED_OPTIONS):
        value = given.get(f"env_config.{theirs}", default)
        options[ours] = round(1 - value, 12) if theirs == "p" else value
    if isinstance(options["size"], list):
        rows, columns = options["size"]
        if rows != columns:
            return decide(f"set [environment.define.{tag}]: a room of {rows} x {columns}, and rooms are square here")
        options["size"] = rows
    pattern = options["action_pattern"]
    if re.compile(pattern).groups != 1:
        return decide(f"set environment.define.{tag}.options.action_pattern with one group, the action: {pattern}")
    settings = {f"{definition}.type": kind} | {f"{definition}.options.{name}": value for name, value in options.items()}
    return translated(settings | limits)


def _train_tags(value: Any, values: Values) -> Outcome:
    tags = _listed(value)
    chosen = {"reward.name": "environment"}
    if len(tags) == 1:
        return translated({"rollout.environment": tags[0], **chosen})
    weights = values.get("train_env_manager.num_groups_partition") or [1] * len(tags)
    if len(weights) != len(tags):
        return decide(f"set environment.define.TAG.weight: {len(tags)} tags and {len(weights)} numbers of groups")
    shares = {f"environment.define.{tag}.weight": weight for tag, weight in zip(tags, weights, strict=True)}
    return translated({"rollout.environment": "mixture", **shares, **chosen}, "by the numbers of groups")


def _eval_tags(value: Any, values: Values) -> Outcome:
    tags = _listed(value)
    if tags == _listed(values.get("train_env_manager.tags")):
        environment = tags[0] if len(tags) == 1 else "mixture"
        return translated({"eval.environment": environment})
    if len(tags) == 1:
        return translated({"eval.environment": tags[0]})
    return decide(f"set eval.source.TAG.environment and eval.source.TAG.data for each of {', '.join(tags)}")


def _listed(value: Any) -> list[str]:
    return [str(tag) for tag in value] if isinstance(value, list) else [] if value is None else [str(value)]


_OF_ONE: Mapping[str, Rule] = {"train_env_manager.tags": _train_tags, "val_env_manager.tags": _eval_tags}
