"""`penstock config import FILE`: turn a configuration of another system into a run file, with a report.

Settings that a service refuses are left out and reported, except those that decide what is trained: with these the run file is
refused until a person has decided.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.console.terminal import one_line
from penstock.deploy.config_import.foreign_file import read_shell
from penstock.deploy.config_import.foreign_tree import Found, marked, read_json, read_yaml
from penstock.deploy.config_import.rule_forms import Kind, Line, Translation
from penstock.deploy.config_import.source_defaults import SilentDefault, differing, silent_defaults
from penstock.deploy.config_import.translate import detect, own_section, translate
from penstock.deploy.config_show import as_document, load_all
from penstock.protocol.config.foreign_config import SYSTEMS
from penstock.protocol.config.run_file import SECTIONS, toml_text
from penstock.protocol.config.sources import MAX_FILE_BYTES, leaves
from penstock.protocol.errors import ConfigError
from penstock.protocol.process_end import error_text

PLACEHOLDER = "FOLDER-OF-THE-MODEL"
_DECIDE, _ERROR = 1, 2  # exit codes
# What decides what is trained: never left out.
_DECIDING = (
    "algorithm.name", "algorithm.loss", "algorithm.advantage", "algorithm.minibatches", "rollout.group_size", "rollout.groups_per_step", "rollout.max_new_tokens",
    "rollout.environment", "environment.", "reward.", "data.train", "data.max_prompt_tokens", "model.path", "model.dtype",
)  # fmt: skip
_OF_A_KL = tuple(
    f"algorithm.{key}"
    for key in ("kl_form", "reward_kl_form", "kl_target", "kl_horizon", "kl_unbiased", "reference_path")
)
_NAMES = [name for name in SYSTEMS if name != "shared"]
_TITLES: dict[Kind, str] = {
    "decide": "needs a decision",
    "unknown": "unknown",
    "silent": "not in the file: what its system does then, written into the run file",
    "translated": "translated",
    "taken": "taken",
    "ignored": "ignored",
}


def known_keys() -> set[str]:
    return {key for service in load_all([], [f"model.path={PLACEHOLDER}"], {}) for key in service.origins}


def run_file_text(settings: Mapping[str, Any], remarks: Mapping[str, str] = MappingProxyType({})) -> str:
    lists = [f"{key} = {toml_text(value)}" for key, value in settings.items() if "." not in key]
    blocks = ["\n".join(lists)] if lists else []  # before the first table, or they would belong to it
    for section in SECTIONS:
        rows = [
            f"{_name(key)} = {toml_text(settings[key])}" + (f"  # {remarks[key]}" if key in remarks else "")
            for key in sorted(_of(section, settings))
        ]
        if rows:
            blocks.append("\n".join([f"[{section}]", *rows]))
    return "\n\n".join(blocks) + "\n"


def decisions(done: Translation) -> str:
    open_lines = [line for line in done.lines if line.is_open]
    if not open_lines:
        return ""
    rows = [f"# - {one_line(f'{line.key}={line.value}'[:120])}: {one_line(line.text)}\n" for line in open_lines]
    return "".join(["# Needs a decision before the first run:\n", *rows, "\n"])


def complete(done: Translation, named: Mapping[str, Any], section: str = "") -> None:
    """Add what the system does where its file is silent, leave out what is refused, and open a decision for what is missing."""
    system = f"{done.system}.{section}" if section else done.system
    for default in silent_defaults().get(system, ()):  # what is refused depends on these
        is_open = default.key not in named and not any(key in named for key in default.also)
        for ours in ("algorithm.name", "eval.temperature") if is_open else ():
            if (
                ours in default.settings
                and ours not in done.settings
                and (ours != "eval.temperature" or "data.eval" in done.settings)
            ):
                value = default.settings[ours]
                _take(
                    done,
                    default,
                    {ours: done.settings.get("rollout.temperature", 1.0) if value == "$rollout.temperature" else value},
                    {},
                )
    refused = leave_out_refused(done)
    effective = _effective(done.settings)
    steps = effective["algorithm.minibatches"] * effective["algorithm.epochs"]
    if (
        effective["algorithm.advantage"] == "gae"
        and steps > 1
        and "critic.updates" not in done.settings
        and not section
    ):
        text = (
            f"the critic there takes {steps} steps, each on a part of the batch; here critic.updates on the whole batch"
        )
        done.settings["critic.updates"] = steps
        done.lines.append(Line("decide", "critic.updates", steps, text))
    for default, others in differing(system, named, done.settings | refused, effective):
        _take(done, default, others, effective)
    done.settings |= refused | leave_out_refused(done)
    if not section:
        name_what_is_missing(done)
    elif not done.settings.get("data.train") and not any(
        "data.train" in line.text for line in done.lines if line.is_open
    ):
        done.lines.append(Line("decide", "data.train", "", "the file names no rows to train on: set data.train"))


def _take(done: Translation, default: SilentDefault, settings: Mapping[str, Any], effective: Mapping[str, Any]) -> None:
    if default.ask:
        done.lines.append(Line("decide", default.key, default.value, f"{done.system}'s default: {default.ask}"))
    texts = []
    for ours, value in settings.items():
        done.settings[ours] = value
        done.remarks[ours] = f"{done.system}'s default"
        here = f"; without it {toml_text(effective[ours])}" if ours in effective else ""
        texts.append(f"{ours} = {toml_text(value)}{here}")
    if texts:
        done.lines.append(Line("silent", default.key, toml_text(default.value).strip('"'), "; ".join(texts)))


def name_what_is_missing(done: Translation) -> None:
    """Open a decision for each part without which a run file trains nothing: an algorithm, data, a reward."""
    settings = done.settings
    is_agentic = any(line.key.startswith(("train_env_manager.", "custom_envs.")) for line in done.lines)
    if is_agentic and "rollout.environment" not in settings:  # ROLL's: it gives the starts and the reward
        text = "set rollout.environment, [environment.define.NAME] (frozen_lake, sokoban are built in) and data.train, a row for each start"
        _ask_for_data(done, "environment", text)
        return
    asked = " ".join(line.text for line in done.lines if line.is_open)
    if "algorithm.name" not in settings and "set algorithm.name" not in asked:
        done.lines.append(Line("decide", "algorithm.name", "", "no algorithm is named: the run would be async_grpo"))
    if not settings.get("data.train") and "data.train" not in asked:
        rows = ", a row for each start of an episode, and data.eval" if "rollout.environment" in settings else ""
        text = f"the file names no data, and no run starts without: set data.train{rows}"
        _ask_for_data(done, "data.train", text)
    if "reward.name" in asked or any(key.startswith(("reward.", "rollout.environment")) for key in settings):
        return
    if done.system == "verl":
        text = "each row's data_source names its reward, as in verl (docs/rewards.md)"
        done.lines.append(Line("translated", "reward by data_source", "", text))
    else:
        text = "the file names no reward: set reward.name; without it each row needs a data_source that names one"
        done.lines.append(Line("decide", "reward.name", "", text))


def _ask_for_data(done: Translation, key: str, text: str) -> None:
    """Open a decision for data, and take that for held-out rows into it."""
    for place, line in enumerate(done.lines):
        if (line.kind, line.key) == ("decide", "eval.every") and "data.eval names no file" in line.text:
            done.lines[place] = replace(line, kind="translated", text=f"part of the decision on {key}")
            text += f"; for evaluations data.eval, with eval.every = {line.value}"
    done.lines.append(Line("decide", key, "", text))


def _of(section: str, settings: Mapping[str, Any]) -> list[str]:
    return [key for key in settings if key.startswith(f"{section}.")]


def _name(key: str) -> str:
    return key.partition(".")[2]


def _effective(settings: Mapping[str, Any]) -> dict[str, Any]:
    with _written(settings) as file:
        document = as_document(load_all([file], [], {}))
    return {".".join(path): value for path, value in leaves(document["settings"])}


@contextlib.contextmanager
def _written(settings: Mapping[str, Any]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.toml"
        file.write_text(run_file_text(settings), encoding="utf-8")
        yield file


def leave_out_refused(done: Translation) -> dict[str, Any]:
    """Remove the settings that services refuse, the subject of each refusal first; report each, and return those that the run file keeps.

    They decide what is trained: with them the run starts only after a person has decided.
    """
    kept: dict[str, Any] = {}
    if "model.path" not in done.settings:
        done.settings["model.path"] = PLACEHOLDER
        done.lines.append(Line("decide", "model.path", "", "the file names no model: set model.path"))
    while problem := _refused(done.settings):
        named = re.findall(
            rf"\b(?:{'|'.join(map(re.escape, sorted(done.settings, key=len, reverse=True)))})\b", problem
        )
        subject = next((key for key in named if not key.startswith(_DECIDING)), None)
        if not named:
            raise ConfigError(f"the translated settings are refused, and by none that can be left out: {problem}")
        if subject is None:
            text = f"refused, no run starts with it: {problem}"
            kept[named[0]] = done.settings.pop(named[0])
            done.settings.setdefault("model.path", PLACEHOLDER)
            done.lines.append(Line("decide", named[0], kept[named[0]], text))
            continue
        _leave_out(done, subject, problem)
    return kept


def _leave_out(done: Translation, subject: str, problem: str) -> None:
    value = done.settings.pop(subject)
    does_nothing = " does nothing " in problem
    if done.remarks.pop(subject, None) and does_nothing:  # a default of that system, which has no effect here
        done.lines = [
            line for line in done.lines if not (line.kind == "silent" and line.text.startswith(f"{subject} ="))
        ]
        return
    kind: Kind = "ignored" if does_nothing and _has_no_effect_there(done, subject, value) else "decide"
    done.lines.append(Line(kind, subject, value, f"left out, because it is refused: {problem}"))


def _has_no_effect_there(done: Translation, subject: str, value: Any) -> bool:
    """Return True for a setting that, beside the others, does nothing in the other system either."""
    if subject == "critic.gamma":  # ROLL and OpenRLHF discount the tokens of a completion without a critic too
        return value == 1 or (done.system == "verl" and "reinforce" not in done.settings["algorithm.name"])
    if subject in _OF_A_KL:
        in_reward = "algorithm.reward_kl_coefficient" in done.settings and subject != "algorithm.kl_form"
        return not in_reward and "algorithm.kl_coefficient" not in done.settings
    return subject.startswith(("critic.", "model.lora.", "eval.top_", "algorithm.reference_device"))


def _refused(settings: Mapping[str, Any]) -> str:
    with _written(settings) as file:
        try:
            load_all([file], [], {})
        except ConfigError as err:
            problem = re.sub(rf"{re.escape(str(file))}(:\d+)?:? ?", "", str(err).splitlines()[0])
            return re.sub(r"( \[[a-z_.]+: \])+$", "", problem)
    return ""


def _text(file: Path) -> str:
    try:
        with file.open("rb") as opened:  # a pipe too, as of a shell's <(…)
            data = opened.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"{file}: more than {MAX_FILE_BYTES} bytes, the limit; shorten it")
        return data.decode().replace("\r\n", "\n").replace("\r", "\n")
    except OSError as err:
        raise ConfigError(f"{file}: not readable ({err.strerror})") from None
    except UnicodeDecodeError as err:
        raise ConfigError(f"{file}: not UTF-8 text (at byte {err.start})") from None


def read_foreign_file(file: Path) -> Found:
    """Read a file by the end of its name: .yaml, .yml, .json, else a shell script; raises ConfigError.

    Files that a YAML names in ``defaults``, and those that a script sources, are read with it, if they are below the folder above its own.
    """

    def beside(name: str) -> str | None:
        other = (file.parent / name).resolve()
        is_near = other.is_relative_to(file.resolve().parent.parent)
        return _text(other) if is_near and other.is_file() else None

    text = _text(file)
    suffix = file.suffix.lower()
    if suffix in (".yaml", ".yml"):
        return read_yaml(str(file), text, beside)
    if suffix == ".json":
        return read_json(str(file), text)
    if suffix in (".py", ".toml", ".ipynb"):
        raise ConfigError(f"{file}: not a YAML, JSON or shell file; write its keys into one of these")
    found = read_shell(str(file), text, beside)
    if "num_processes" not in found.values and any("accelerate launch" in command for command in found.commands):
        name = str(found.values.get("config_file", ""))
        options = next((text for folder in ("", "../") if name and (text := beside(folder + name))), "")
        count = re.search(r"^num_processes: *(\d+)", options, re.MULTILINE)  # without one, a process for each GPU
        found.values["num_processes"] = int(count[1]) if count else marked("accelerate's num_processes")
    return found


def import_config(file: Path, system: str | None, to: Path, *, as_json: bool) -> int:
    """Write the run file and print the report; returns 1 when a key needs a decision, 2 when nothing was written."""
    try:
        foreign_config = read_foreign_file(file)
        system = system or detect(foreign_config)
        if not system:
            shared = SYSTEMS["shared"]
            several = {*shared.taken, *shared.renamed, *shared.rules} & foreign_config.values.keys()
            names = ", ".join(_NAMES)
            found = (
                f"keys that several of {names} have ({', '.join(sorted(several))})"
                if several
                else f"no key of {names} found"
            )
            raise ConfigError(f"{file}: {found} in {len(foreign_config.values)} keys; name the system with --from")
        done = translate(foreign_config, system, known_keys())
        command = own_section(foreign_config)
        complete(done, foreign_config.values, command.section if command is not None else "")
        if to.exists():
            raise ConfigError(f"{to} exists; name another file with --to")
        header = f"# Imported from {one_line(file.name)} ({system}) by `penstock config import`.\n\n"
        to.write_text(header + decisions(done) + run_file_text(done.settings, done.remarks), encoding="utf-8")
    except (ConfigError, OSError) as err:
        sys.stderr.write(error_text(f"{err}\n"))
        return _ERROR
    if as_json:
        sys.stdout.write(json.dumps(report_document(done)) + "\n")
    else:
        verb = command.section if command is not None else "train"
        here = "" if command is not None else " --local"
        sys.stdout.write(f"{file}: a configuration of {system}\n\n{report_text(done)}\n")
        sys.stdout.write(f"wrote {to}; see it: penstock config show {to}; then: penstock {verb} {to}{here}\n")
    return _DECIDE if done.needs_decision else 0


def report_text(done: Translation) -> str:
    blocks = []
    for kind, title in _TITLES.items():
        lines = [line for line in done.lines if line.kind == kind]
        if lines:
            rows = [one_line(f"  {_key_and_value(line.key, line.value)}  →  {line.text}") for line in lines]
            blocks.append("\n".join([f"{title} ({len(lines)})", *rows]))
    return "\n\n".join(blocks) + "\n" if blocks else "no key was found\n"


def report_document(done: Translation) -> dict[str, Any]:
    return {
        "system": done.system,
        "settings": done.settings,
        "needs_decision": done.needs_decision,
        "keys": [{"kind": line.kind, "key": line.key, "value": line.value, "text": line.text} for line in done.lines],
    }


def _key_and_value(key: str, value: Any) -> str:
    if value in ("", None):
        return key
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return f"{key}={text if len(text) <= 60 else text[:57] + '...'}"


if __name__ == "__main__":
    from penstock.console.cli.main import run_verb

    run_verb("config", "import")
