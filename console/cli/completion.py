"""Scripts that complete the command in bash, zsh and fish: verbs, flags, settings and their values, files and runs.

A script is a template in `shells/` filled with everything it completes, so that the tab key starts no Python: with the verbs
themselves and the settings of `console/tools/explain_settings.py`; print it anew after an update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.console.cli import verb_help
from penstock.console.tools import explain_settings
from penstock.protocol.command_line import App, arguments_of
from penstock.protocol.config.setting_description import ANY_NAME
from penstock.protocol.errors import ConfigError

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True, slots=True)
class Words:
    """Everything that is completed."""

    verbs: Mapping[str, Sequence[str]]  # the next words after each verb; "" are the first ones
    flags: Mapping[str, Sequence[str]]  # by verb
    keys: Sequence[str]  # of settings
    values: Mapping[str, Sequence[str]]  # by key
    sections: Sequence[str]
    take_a_run: Sequence[str]  # verbs whose first argument is the name of a run


def script(shell: str, app: App) -> str:
    """Return the script for a shell; raises ConfigError for one that is not supported."""
    if shell not in SHELLS:
        raise ConfigError(f"no completion for {shell}; choose one of {', '.join(SHELLS)}")
    words = words_of(app)
    return _fish(words) if shell == "fish" else _template(f"penstock.{shell}").replace("@FUNCTIONS@", _functions(words))


def words_of(app: App) -> Words:
    """Return the words of a command."""
    known = explain_settings.load_reference()
    verbs: dict[str, list[str]] = {}
    flags: dict[str, list[str]] = {}
    take_a_run: list[str] = []
    for verb, one in verb_help.verbs_of(app):
        verbs[verb] = sorted(name for name in one if not name.startswith("-"))
        arguments = arguments_of(one)
        names = {name for argument in arguments if argument.show for name in argument.names if name.startswith("--")}
        flags[verb] = sorted({"--help", *names})
        if arguments and arguments[0].field_info.name == "run" and arguments[0].index == 0:
            take_a_run.append(verb)
    keys = [key for key in known.settings if f".{ANY_NAME}." not in key]
    values = {key: one.values for key, one in known.settings.items() if one.values}
    return Words(verbs, flags, keys, values, list(known.sections), take_a_run)


def _cases(table: Mapping[str, Sequence[str]], indent: str) -> str:
    return "".join(f"{indent}'{name}') echo '{' '.join(words)}' ;;\n" for name, words in table.items() if words)


def _functions(words: Words) -> str:
    """Return the functions that bash and zsh share."""
    texts = {
        "VERBS": _cases(words.verbs, "    "),
        "FLAGS": _cases(words.flags, "    "),
        "VALUES": _cases(words.values, "    "),
        "TAKE_A_RUN": "|".join(f"'{verb}'" for verb in words.take_a_run),
        "KEYS": " ".join(words.keys),
        "SECTIONS": " ".join(words.sections),
    }
    functions = _template("functions.sh")
    for name, text in texts.items():
        functions = functions.replace(f"@{name}@", text)
    return functions


def _template(name: str) -> str:
    return (Path(__file__).parent / "shells" / name).read_text(encoding="utf-8")


def _fish(words: Words) -> str:
    cases = "".join(
        f"    case '{verb}'; string split ' ' '{' '.join(next_)}'\n" for verb, next_ in words.verbs.items() if next_
    )
    lines = [_template("penstock.fish").replace("@CASES@", cases) + "complete -c penstock -e"]
    for verb, flags in words.flags.items():
        lines += [f"complete -c penstock -n '__penstock_is \"{verb}\"' -l '{flag[2:]}'" for flag in flags]
    lines.append("complete -c penstock -n '__penstock_has_verbs' -f -a '(__penstock_next (__penstock_verb))'")
    for verb in words.take_a_run:
        lines.append(f"complete -c penstock -n '__penstock_is \"{verb}\"' -f -a '(__penstock_runs)'")
    lines.append(f"complete -c penstock -n '__penstock_is settings' -f -a '{' '.join([*words.sections, *words.keys])}'")
    for key in words.keys:
        settings = [f"{key}={value}" for value in words.values.get(key, ())] or [f"{key}="]
        lines.append(f"complete -c penstock -n __penstock_types_a_key -a '{' '.join(settings)}'")
    return "\n".join(lines) + "\n"
