"""The settings that the help of a verb lists; their descriptions come from `console/tools/explain_settings.py`, only the choice is made here.

Scripts that complete the command in bash, zsh and fish: verbs, flags, settings and their values, files and runs.

A script is a template in `shells/` filled with everything it completes, so that the tab key starts no Python: with the verbs
themselves and the settings of `console/tools/explain_settings.py`; print it anew after an update.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.console.tools import explain_settings
from penstock.protocol.command_line import App, arguments_of
from penstock.protocol.config.setting_description import ANY_NAME
from penstock.protocol.errors import ConfigError

_SETTINGS_TITLE = "Settings it is most used with, as SECTION.KEY=VALUE or in the run file (all: penstock settings):"
_RUN = "run.id run.dir"
_SERVERS = "nats.url nats.user nats.password_file s3.endpoint s3.bucket s3.access_key s3.secret_key_file"
_FIND = f"run.dir {_SERVERS}"

# The settings that each verb is most used with; it takes those of every section it reads.
_SETTINGS: dict[str, str] = {
    "train": f"{_RUN} run.seed model.path model.dtype model.lora.rank data.train data.eval reward.name "
    "data.max_prompt_tokens algorithm.name rollout.group_size rollout.groups_per_step rollout.max_new_tokens "
    "rollout.max_staleness rollout.temperature trainer.steps trainer.lr trainer.warmup_steps trainer.num_ranks "
    "trainer.micro_batch_tokens trainer.checkpoint_every_s eval.every eval.num_prompts worker.engine worker.device nats.url "
    "s3.endpoint",
    "plan": "rollout.group_size rollout.groups_per_step rollout.groups_per_message rollout.max_staleness "
    "rollout.max_new_tokens worker.packs_in_flight worker.update_mode trainer.oldest_patience model.path model.dtype "
    "model.gradient_checkpointing model.lora.rank data.max_prompt_tokens trainer.num_ranks trainer.zero_stage "
    "trainer.micro_batch_tokens trainer.publish_dtype",
    "sft": f"{_RUN} model.path model.dtype model.lora.rank data.train sft.data sft.eval_data sft.steps sft.epochs "
    "sft.batch_size sft.lr sft.warmup_steps sft.schedule sft.mask sft.eval_every sft.early_stop sft.keep_best sft.output "
    "trainer.num_ranks trainer.micro_batch_tokens",
    "dpo": f"{_RUN} model.path model.dtype model.lora.rank dpo.data dpo.eval_data dpo.steps dpo.epochs dpo.batch_size dpo.lr "
    "dpo.loss dpo.beta dpo.label_smoothing dpo.reference dpo.eval_every dpo.early_stop dpo.keep_best dpo.output "
    "trainer.num_ranks trainer.micro_batch_tokens",
    "rm": f"{_RUN} model.path model.dtype data.train rm.data rm.eval_data rm.steps rm.epochs rm.batch_size rm.lr "
    "rm.use_margin rm.center rm.eval_every rm.early_stop rm.keep_best rm.output trainer.num_ranks "
    "trainer.micro_batch_tokens",
    "rollout": f"{_RUN} {_SERVERS} worker.id worker.engine worker.engine_url worker.device worker.dtype worker.max_running "
    "worker.packs_in_flight worker.update_mode worker.roles worker.environments sglang.tp_size sglang.python",
    "reward service": f"{_RUN} {_SERVERS} reward.name reward.by_source reward_service.host reward_service.port "
    "reward_service.token_file reward_service.concurrency reward_service.code_sandbox",
    "bootstrap": f"run.id {_SERVERS} retention.events_h retention.dead_letters_h",
    "config show": "run.id model.path data.train algorithm.name trainer.steps worker.engine",
    "doctor": _SERVERS,
    "runs show": "run.dir",
    "runs restore": f"{_SERVERS} retention.events_h retention.dead_letters_h",
    "track": f"{_FIND} tracker tracking.project tracking.name tracking.folder tracking.samples",
    "profile": "run.dir",
}
_FINDING = (
    *("watch", "chat", "runs", "runs list", "runs rm", "runs backup", "weights", "weights export", "replay", "rescore"),
    *("log", "lineage", "audit", "reward errors", "dead-letters"),
    *("dead-letters list", "dead-letters show", "dead-letters resend"),
)
SETTINGS = {verb: tuple(keys.split()) for verb, keys in (_SETTINGS | dict.fromkeys(_FINDING, _FIND)).items()}


def attach(app: App, tokens: Sequence[str] | None = None) -> None:
    """Add settings to the help of every verb, or of the one that ``tokens`` name, and let texts fill the terminal's width."""
    for verb, command in verbs_of(app):
        if command.default_command is not None:
            command.help = flowing(inspect.getdoc(command.default_command) or "")
        is_asked = tokens is None or verb.split() == list(tokens[: verb.count(" ") + 1])
        if is_asked and verb in SETTINGS:
            known = explain_settings.load_reference().settings
            table = explain_settings.table([known[key] for key in SETTINGS[verb]], indent="  ", short=True)
            command.help_epilogue = "\n".join([_SETTINGS_TITLE, *table])


def verbs_of(app: App, verb: str = "") -> Iterator[tuple[str, App]]:
    """Yield every verb with its application; the command itself is the verb ''."""
    yield verb, app
    for name in app:
        if not name.startswith("-"):
            yield from verbs_of(app[name], f"{verb} {name}".strip())


def flowing(docstring: str) -> str:
    """Return a verb's docstring without its parameters, each paragraph on one line; examples and what is indented keep their lines."""
    text = docstring.partition("\n\nParameters\n---")[0]
    paragraphs = [
        paragraph if paragraph.startswith(("Example:", " ")) else " ".join(paragraph.split("\n"))
        for paragraph in text.split("\n\n")
    ]
    return "\n\n".join(paragraphs)


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
    for verb, entry in verbs_of(app):
        verbs[verb] = sorted(name for name in entry if not name.startswith("-"))
        arguments = arguments_of(entry)
        names = {name for argument in arguments if argument.show for name in argument.names if name.startswith("--")}
        flags[verb] = sorted({"--help", *names})
        if arguments and arguments[0].field_info.name == "run" and arguments[0].index == 0:
            take_a_run.append(verb)
    keys = [key for key in known.settings if f".{ANY_NAME}." not in key]
    values = {key: entry.values for key, entry in known.settings.items() if entry.values}
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
