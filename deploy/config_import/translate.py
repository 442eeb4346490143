"""A file's keys → settings and the report: rules first, then the tables of its system, then those of the others; pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from penstock.deploy.config_import import roll_sections, rule_forms, rules, system_rules
from penstock.deploy.config_import.foreign_tree import UNASSIGNED, Found, readable, unassigned
from penstock.deploy.config_import.rule_forms import TABLES, Line, Outcome, Rule, Translation, decide, first, is_on
from penstock.deploy.config_import.source_defaults import at_default
from penstock.fine_tuning.sections import DPO, RM, SFT, OwnSection
from penstock.protocol.config.foreign_config import (
    ALIASES,
    NEUTRAL,
    SYSTEMS,
    Alias,
    ForeignSystem,
    prefix_advice,
    prefix_of,
)

_OF_RESULTS = ("run.dir", "run.id", "tracking.")
_PATHS = ("model.path", "data.train", "data.eval", "critic.path", "run.dir", "algorithm.reference_path")
_WORDS: Mapping[str, list[str]] = TABLES["words"]
_SECRET = re.compile(r"(^|[_.])(password|secret|(?<!stop_)token|api_key|use_wandb)$")
_IN_URL = re.compile(r"(?<=:)//[^/@\s]+@")
_ON_THERE = ("do_sample", "enable_sampling", "gamma")  # off is the choice that changes something
# Defaults that rules compute with.
_IMPLIED: Mapping[str, Mapping[str, Any]] = TABLES["implied"]
_ESTIMATORS = ("algorithm.adv_estimator", "adv_estimator", "advantage_estimator")
_CRITIC = re.compile(
    r"critic[._]|(reward_pretrain|num_critic_only_steps|freezing_actor_steps|lambd|value_clip|algorithm\.lam)$"
)
# Words of a command, the training that they start, and what they say of it.
_COMMANDS: tuple[tuple[OwnSection, str, Mapping[str, Any]], ...] = (
    (SFT, r"sft_trainer|--loss-type sft_loss|trl sft|train_sft|(^|[/ ])sft(_\w+)?\.py", {}),
    (RM, r"train_rm|trl reward|reward_modeling\.py", {}),
    (DPO, r"dpo_trainer|trl dpo|train_dpo|(^|[/ ])(dpo|mpo)(_vlm)?\.py", {}),
    (DPO, r"trl kto|(^|[/ ])kto\.py", {"dpo.loss": "kto"}),
)
# Of LLaMA-Factory, of a platform's jobs, and of AgentRL.
_STAGES = {"sft": SFT, "dpo": DPO, "kto": DPO, "rm": RM, "CrossEntropy": SFT}
_OTHER_TRAINERS = re.compile(
    r"(?:^|[/ ])(bco|cpo|orpo|tpo|xpo|gkd|gold|prm|sdft|sdpo|ssd|rloo(?:_vlm)?|ppo(?:_tldr)?|nash_md|online_dpo(?:_vlm)?|distillation)\.py|trl (rloo)"
)
_LIMITS = ("max_length", "max_seq_length", "max_len", "cutoff_len", "sequence_length")  # of a row of given answers
_OF_GIVEN = ("sft_loss", "slime.rollout.sft_rollout.generate_rollout")  # values of slime that say so
# Keys of a file without a command that only these trainings have, of ROLL and of a platform on verl.
_OF_PREFERENCES, _OF_ANSWERS = {"chosen_key", "algorithm.beta"}, {"response_key", "kd_objective", "data.response_key"}
_OF_BATCH = ("per_device_train_batch_size", "train_batch_size")
_EPOCHS = ("max_epochs", "num_train_epochs", "total_epochs")  # over the data, not over a batch
_OF_PAIRS: Mapping[str, str] = TABLES["of_pairs"]  # the last part of a key of TRL, verl or OpenRLHF: the key of [dpo]


def detect(foreign_config: Found) -> str:
    text = " ".join(foreign_config.commands)
    for system, words in _WORDS.items():
        if any(word in text for word in words):
            return system
    if "finetuning_type" in foreign_config.values:
        return "llamafactory"
    scores = {name: _score(name, foreign_config.values) for name in SYSTEMS if name != "shared"}
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] else ""


def _score(name: str, keys: Collection[str]) -> int:
    tables = {other: {*system.taken, *system.renamed, *system.absent} for other, system in SYSTEMS.items()}
    others: set[str] = set().union(*(table for other, table in tables.items() if other != name))
    foreign_system = SYSTEMS[name]
    return sum(key in tables[name] - others or prefix_advice(key, foreign_system.prefixes) is not None for key in keys)


def own_section(foreign_config: Found) -> OwnSection | None:
    """Return the command whose settings are in a separate section: given answers or preferences; None for others."""
    return _command(foreign_config)[0]


def _command(foreign_config: Found) -> tuple[OwnSection | None, Mapping[str, Any]]:
    text, values = " ".join(foreign_config.commands), foreign_config.values
    for command, words, said in _COMMANDS:
        if re.search(words, text):
            return command, said
    stage = str(first(values, "stage", "algorithm", "loss_calculater", default=""))
    if stage in _STAGES:
        return _STAGES[stage], {"dpo.loss": "kto"} if stage == "kto" else {}
    if not text and _OF_PREFERENCES & values.keys():
        return DPO, {"dpo.loss": "ipo"} if is_on(values.get("ipo")) else {}
    return (SFT if not text and _OF_ANSWERS & values.keys() else None), {}


def translate(foreign_config: Found, system: str, known: Collection[str]) -> Translation:
    done = Translation(system)
    command, said = _command(foreign_config)
    if system == "roll":
        roll_sections.add_published(foreign_config)
    written = _in_known_spelling(foreign_config, system)
    foreign_config.values |= _said_by_the_program(foreign_config, "" if command else system)
    is_whole = any(key.startswith("actor_rollout_ref.") for key in foreign_config.values) and command is None
    has_others = "algorithm" in foreign_config.values or (system == "verl" and not is_whole)  # a platform's job
    for key, value in _IMPLIED.get("" if has_others else system, {}).items():
        if command is None or key != "rollout_batch_size":
            foreign_config.values.setdefault(key, value)
    untouched = at_default(system, foreign_config.values)
    asked: dict[str, str] = {}  # a decision's text: the key that has it
    general: set[str] = set()  # set by a key of several settings, which one of a single setting overrules
    for key, value in foreign_config.values.items():
        outcome = _read(key, value, foreign_config, system, known, command)
        if key in untouched and not outcome.settings:
            continue
        outcome = _asked_once(_with_unassigned(outcome, value), key, asked, written)
        settings = outcome.settings
        is_general = len(settings) > 1 and outcome.kind == "taken"
        for ours, setting_value in settings.items():
            if is_general and ours in done.settings and ours not in general:
                continue
            done.settings[ours] = setting_value
            (general.add if is_general else general.discard)(ours)
        shown = _masked(key, readable(value))
        done.lines.append(Line(outcome.kind, written.get(key, key), shown, _said(settings, outcome.text)))
    if left_out := len(untouched) - sum(line.key in untouched for line in done.lines):
        text = f"{system}'s defaults, and without a counterpart that differs: as if they were not in the file"
        done.lines.append(Line("ignored", f"{left_out} other keys", "", text))
    if command is not None:
        _move(done, command, known)
        done.settings |= said
    else:
        _make_room(done)
    return done


def _said_by_the_program(found: Found, system: str) -> dict[str, Any]:
    """Return what the name of the program, or a key of its trainer alone, says that is started, as keys."""
    commands = " ".join(found.commands)
    if system == "trl" and (trainer := _OTHER_TRAINERS.search(commands)):
        return {"GRPOTrainer": trainer[1] or trainer[2]}
    if system == "trl" and {"normalize_advantages", "reward_clip_range"} & found.values.keys():
        return {"GRPOTrainer": "rloo"}
    return {"train_async.py": True} if system == "slime" and "train_async.py" in commands else {}


def _with_unassigned(outcome: Outcome, value: Any) -> Outcome:
    """Return the decision on a value that holds variables of elsewhere; paths are kept with them."""
    names = unassigned(value)
    is_moot = outcome.kind == "ignored" and not outcome.text.startswith((rule_forms.OFF, rule_forms.READ))
    if not names or is_moot or (outcome.kind == "decide" and not outcome.settings):
        return outcome
    kept = {ours: setting for ours, setting in outcome.settings.items() if not ours.startswith(_OF_RESULTS)}
    if len(kept) < len(outcome.settings) and not any(map(unassigned, kept.values())):
        text = f"where results are, and what they are called: {', '.join(names)} is not assigned in the file"
        return Outcome("translated" if kept else "ignored", kept, text)
    paths = {ours: readable(setting_value) for ours, setting_value in outcome.settings.items() if ours in _PATHS}
    return Outcome("decide", paths, f"{', '.join(names)}: not assigned in the file")


def _asked_once(outcome: Outcome, key: str, asked: dict[str, str], written: Mapping[str, str]) -> Outcome:
    """Return the outcome of a key, or that its decision is the one of an earlier key."""
    if outcome.kind != "decide" or (earlier := asked.setdefault(outcome.text, key)) == key:
        return outcome
    return Outcome("translated", outcome.settings, f"part of the decision on {written.get(earlier, earlier)}")


def _in_known_spelling(found: Found, system: str) -> dict[str, str]:
    """Give keys in a system's newer spelling the names that its tables have; return how each was written."""
    spelled = SYSTEMS[system].spelled
    written = {spelled[key]: key for key in found.values if key in spelled}
    found.values = {spelled.get(key, key): value for key, value in found.values.items()}
    return written


def _move(done: Translation, command: OwnSection, known: Collection[str]) -> None:
    """Move the settings of a command to its section."""
    keys = dict(command.keys)
    if not done.settings.get("data.eval") and (every := done.settings.pop("eval.every", None)):
        text = f"the file names no held-out rows: set {command.section}.eval_data, and {command.section}.eval_every = {every}"
        done.lines.append(Line("decide", f"{command.section}.eval_data", "", text))
    if f"{command.section}.eval_data" in known:
        keys |= {"data.eval": f"{command.section}.eval_data", "eval.every": f"{command.section}.eval_every"}
    done.settings = {keys.get(key, key): value for key, value in done.settings.items() if key != "algorithm.name"}
    theirs = re.compile("|".join(map(re.escape, keys)))
    done.lines = [replace(line, text=theirs.sub(lambda key: keys[key[0]], line.text)) for line in done.lines]


def _read(
    key: str, value: Any, foreign_config: Found, system: str, known: Collection[str], command: OwnSection | None
) -> Outcome:
    is_choice = value == "none" and _takes_none(key)
    if "@" in key or value is None or (str(value).lower() in ("null", "none", "???") and not is_choice):
        return Outcome("ignored", {}, "not set")
    outcome = (
        (None if command is None else _of_given_answers(key, value, foreign_config.values, system, command))
        or _of_pairs(key, value, command)
        or _outcome(key, value, foreign_config.values, system, known)
    )
    if outcome.kind != "unknown":
        return outcome
    if key in foreign_config.variables or key.startswith(
        tuple(one for one in foreign_config.variables if one[-1] == ".")
    ):
        return Outcome("ignored", {}, "a variable of the file: what refers to it has its value")
    if "GRPOTrainer" in foreign_config.values:
        return Outcome("translated", {}, "part of the decision on GRPOTrainer")
    return (
        Outcome("ignored", {}, "of a file in its defaults, and nothing takes it")
        if key in foreign_config.inherited
        else outcome
    )


def _outcome(key: str, value: Any, values: Mapping[str, Any], system: str, known: Collection[str]) -> Outcome:
    is_reward = system == "openrlhf" and key == "reward_pretrain"  # elsewhere the critic's weights
    if _CRITIC.match(key) and not is_reward and not _has_critic(system, values):
        return Outcome("ignored", {}, "no critic is trained: only GAE has one")
    if rule := _rule_for(system, key):
        try:
            return rule(value, values)
        except (TypeError, ValueError, ZeroDivisionError):
            return Outcome("decide", {}, "a value of another type than that system documents")
    return (
        _taken(key, value, SYSTEMS[system].taken)
        or _answered(key, value, SYSTEMS[system])
        or _taken(key, value, ALIASES)
        or (Outcome("taken", {key: value}) if key in known else None)
        or next((outcome for other in SYSTEMS.values() if (outcome := _answered(key, value, other))), None)
        or Outcome("unknown", {}, "no key of any system that is known here")
    )


def _has_critic(system: str, values: Mapping[str, Any]) -> bool:
    default = "gae" if system in ("verl", "roll", "openrlhf") else str(values.get("algorithm", "grpo")).lower()
    estimator = next((str(values[key]).lower() for key in _ESTIMATORS if key in values), default)
    return estimator in ("gae", "ppo") or UNASSIGNED in estimator


def _takes_none(key: str) -> bool:
    """Return True for a key of which the text ``none`` is a choice, as of TRL's ``scale_rewards``."""
    form = SYSTEMS["shared"].rules.get(key)
    return isinstance(form, list) and form[0] == "chosen" and "none" in form[2]


def _rule_for(system: str, key: str) -> Rule | None:
    if key.startswith(rules.REWARD_ARGUMENTS):
        return rule_forms.reward_argument(key.removeprefix(rules.REWARD_ARGUMENTS))
    if system == "roll" and (rule := roll_sections.rule_of(key)):
        return rule
    form = SYSTEMS[system].rules.get(key) or SYSTEMS["shared"].rules.get(key)
    if form is None or isinstance(form, str):
        return None if form is None else getattr(system_rules if hasattr(system_rules, form) else rules, form)
    name, *arguments = form
    return getattr(rule_forms, name)(*arguments)


def _taken(key: str, value: Any, taken: Mapping[str, Alias]) -> Outcome | None:
    return Outcome("taken", dict.fromkeys(taken[key].keys, taken[key].value(value))) if key in taken else None


def _answered(key: str, value: Any, system: ForeignSystem) -> Outcome | None:
    """Return the answer for a key without a setting: ignored if it changes nothing in its system either, else a decision."""
    if key in system.renamed:
        is_off = key in system.harmless or (key.endswith("parallel_size") and value in (1, 0))
        use = f"use {system.renamed[key]}"
        return Outcome("ignored", {}, use) if is_off else decide(f"nothing of it is in the run file: {use}")
    prefix = "" if key in system.absent else prefix_of(key, system.prefixes)
    why = system.absent.get(key) or system.prefixes.get(prefix)
    if not why:
        return None
    if (prefix or key) in system.harmless or key in system.harmless:
        return Outcome("ignored", {}, why)
    return Outcome("ignored", {}, rule_forms.OFF) if _is_neutral(key, value) else Outcome("decide", {}, why)


def _is_neutral(key: str, value: Any) -> bool:
    last = key.rpartition(".")[2]
    if last.endswith("parallel_size"):
        return value in (1, 0)
    is_off = value in (False, 0, "", [], {}) or str(value).lower() == "false"
    return value in NEUTRAL.get(last, ()) or (is_off and last not in _ON_THERE)


def _said(settings: Mapping[str, Any], text: str) -> str:
    written = ", ".join(f"{key} = {value}" for key, value in settings.items())
    return f"{written} ({text})" if written and text else written or text


def _of_given_answers(
    key: str, value: Any, values: Mapping[str, Any], system: str, command: OwnSection
) -> Outcome | None:
    """Return what a key means for training on given answers; None where it means what it means elsewhere."""
    last = key.rpartition(".")[2]
    if last in _EPOCHS:
        outcome = rules.epochs(value, values)
        return Outcome("taken", {f"{command.section}.epochs": value}) if outcome.settings else outcome
    if last == "loss_type" and system == "trl" and command is SFT:
        losses = {"nll": "nll", "chunked_nll": "nll", "dft": "dft"}
        return rule_forms.chosen("sft.loss", losses, "set sft.loss: nll or dft")(value, values)
    if value in _OF_GIVEN:
        return rule_forms.ignored(f"what `penstock {command.section}` does")
    if system == "slime" and last == "input_key":
        return Outcome(
            "translated", {} if value == "messages" else {"data.map.messages": value}, "its answers are trained"
        )
    if last in _LIMITS:
        return _limit_of_rows(value, values, system, command)
    if last not in _OF_BATCH or not isinstance(value, int):
        return None
    rows, text = value, "rows of an optimizer step"
    if system == "roll":
        rows = system_rules.samples_of_an_update(values)
    elif last == _OF_BATCH[0]:
        accumulated = first(values, "gradient_accumulation_steps", default=1)
        processes = rules.number_of_processes(values)
        rows = value * accumulated * processes if isinstance(accumulated, int) and isinstance(processes, int) else None
        text = f"{value} rows x {accumulated} accumulated x {processes} processes"
    if rows is None:
        return decide(f"set {command.section}.batch_size: rows of an optimizer step, over all ranks")
    return Outcome("translated", {f"{command.section}.batch_size": rows}, text)


def _limit_of_rows(value: Any, values: Mapping[str, Any], system: str, command: OwnSection) -> Outcome:
    """Return what becomes of rows above a limit: ROLL leaves out pairs with a longer answer, rows of others are refused or cut."""
    is_roll = system == "roll" and "kd_objective" not in values
    if is_roll and command is DPO:
        text = f"pairs with an answer above {value} tokens are left out there; here those above {2 * value} in both answers together"
        return Outcome("decide", {"trainer.micro_batch_tokens": 2 * value}, text)
    if is_roll or (system == "verl" and first(values, "data.truncation", default="error") == "error"):
        larger = {"trainer.micro_batch_tokens": value} if value > rule_forms.MICRO_BATCH else {}
        return Outcome("translated", {"data.overlong": "error", **larger}, "longer rows are an error there, too")
    return decide(
        f"rows longer than {value} tokens are cut there; here rows beyond trainer.micro_batch_tokens are left out, others kept whole"
    )


def _of_pairs(key: str, value: Any, command: OwnSection | None) -> Outcome | None:
    name = _OF_PAIRS.get(key.rpartition(".")[2])
    if command is not DPO or name is None:
        return None
    if key.rpartition(".")[2] == "precompute_ref_log_probs":
        value = "precomputed" if str(value).lower() == "true" else "live"
    return Outcome("taken", {f"dpo.{name}": value})


def _masked(key: str, value: Any) -> Any:
    """Return a value without passwords and keys, which a report must not repeat."""
    if _SECRET.search(key):
        return "********"
    return _IN_URL.sub("//********@", value) if isinstance(value, str) else value


def _make_room(done: Translation) -> None:
    """Raise the limits that follow from lengths and staleness, where the file's are lower."""
    numbers = {key: value for key, value in done.settings.items() if type(value) is int}
    longest = numbers.get("data.max_prompt_tokens", 1024) + numbers.get("rollout.max_new_tokens", 256)
    versions = numbers.get("rollout.max_staleness", 4) + 2
    for key, what, least, default in (
        ("trainer.micro_batch_tokens", "longest trajectory", longest, rule_forms.MICRO_BATCH),
        ("trainer.keep_versions", "staleness, for workers that lag behind", versions, 8),
    ):
        if least > numbers.get(key, default):
            done.settings[key] = least
            done.lines.append(Line("translated", what, "", f"{key} = {least}"))
