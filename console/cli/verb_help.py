"""What the help of a verb lists besides its text: flags of the process that it starts, and settings it is used with.

Both come from the files of `console/tools/reference.py`; only the choice of settings is made here.
"""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Iterator, Sequence

from cyclopts import App

from penstock.console.tools import explain_settings, reference
from penstock.console.tools.reference import CommandFlag

_SERVERS = (
    "nats.url",
    "nats.user",
    "nats.password_file",
    "s3.endpoint",
    "s3.bucket",
    "s3.access_key",
    "s3.secret_key_file",
)
_RUN = ("run.id", "run.dir")
_FIND = ("run.dir", *_SERVERS)

# The settings that each verb is most used with; it takes those of every section it reads.
SETTINGS: dict[str, tuple[str, ...]] = {
    "train": (
        *(*_RUN, "run.seed", "model.path", "model.dtype", "model.lora.rank", "data.train", "data.eval", "reward.name"),
        *("data.max_prompt_tokens", "algorithm.name", "rollout.group_size", "rollout.groups_per_step"),
        *("rollout.max_new_tokens", "rollout.max_staleness", "rollout.temperature", "trainer.steps", "trainer.lr"),
        *("trainer.warmup_steps", "trainer.num_ranks", "trainer.micro_batch_tokens", "trainer.checkpoint_every_s"),
        *("eval.every", "eval.num_prompts", "worker.engine", "worker.device", "nats.url", "s3.endpoint"),
    ),
    "plan": (
        *("rollout.group_size", "rollout.groups_per_step", "rollout.groups_per_message", "rollout.max_staleness"),
        *("rollout.max_new_tokens", "worker.packs_in_flight", "worker.update_mode", "trainer.oldest_patience"),
        *("model.path", "model.dtype", "model.gradient_checkpointing", "model.lora.rank", "data.max_prompt_tokens"),
        *("trainer.num_ranks", "trainer.zero_stage", "trainer.micro_batch_tokens", "trainer.publish_dtype"),
    ),
    "sft": (
        *(
            *_RUN,
            "model.path",
            "model.dtype",
            "model.lora.rank",
            "data.train",
            "sft.data",
            "sft.eval_data",
            "sft.steps",
        ),
        *("sft.epochs", "sft.batch_size", "sft.lr", "sft.warmup_steps", "sft.schedule", "sft.mask", "sft.eval_every"),
        *("sft.early_stop", "sft.keep_best", "sft.output", "trainer.num_ranks", "trainer.micro_batch_tokens"),
    ),
    "dpo": (
        *(
            *_RUN,
            "model.path",
            "model.dtype",
            "model.lora.rank",
            "dpo.data",
            "dpo.eval_data",
            "dpo.steps",
            "dpo.epochs",
        ),
        *("dpo.batch_size", "dpo.lr", "dpo.loss", "dpo.beta", "dpo.label_smoothing", "dpo.reference", "dpo.eval_every"),
        *("dpo.early_stop", "dpo.keep_best", "dpo.output", "trainer.num_ranks", "trainer.micro_batch_tokens"),
    ),
    "rm": (
        *(*_RUN, "model.path", "model.dtype", "data.train", "rm.data", "rm.eval_data", "rm.steps", "rm.epochs"),
        *("rm.batch_size", "rm.lr", "rm.use_margin", "rm.center", "rm.eval_every", "rm.early_stop", "rm.keep_best"),
        *("rm.output", "trainer.num_ranks", "trainer.micro_batch_tokens"),
    ),
    "rollout": (
        *(*_RUN, *_SERVERS, "worker.id", "worker.engine", "worker.engine_url", "worker.device", "worker.dtype"),
        *("worker.max_running", "worker.packs_in_flight", "worker.update_mode", "worker.roles", "worker.environments"),
        *("sglang.tp_size", "sglang.python"),
    ),
    "reward service": (
        *(*_RUN, *_SERVERS, "reward.name", "reward.by_source", "reward_service.host", "reward_service.port"),
        *("reward_service.token_file", "reward_service.concurrency", "reward_service.code_sandbox"),
    ),
    "bootstrap": ("run.id", *_SERVERS, "retention.events_h", "retention.dead_letters_h"),
    "config show": ("run.id", "model.path", "data.train", "algorithm.name", "trainer.steps", "worker.engine"),
    "doctor": _SERVERS,
    "watch": _FIND,
    "chat": _FIND,
    "runs": _FIND,
    "runs list": _FIND,
    "runs show": ("run.dir",),
    "runs rm": _FIND,
    "runs backup": _FIND,
    "runs restore": (*_SERVERS, "retention.events_h", "retention.dead_letters_h"),
    "weights": _FIND,
    "weights export": _FIND,
    "replay": _FIND,
    "rescore": _FIND,
    "track": (*_FIND, "tracker", "tracking.project", "tracking.name", "tracking.folder", "tracking.samples"),
    "log": _FIND,
    "lineage": _FIND,
    "audit": _FIND,
    "profile": ("run.dir",),
    "reward errors": _FIND,
    "dead-letters": _FIND,
    "dead-letters list": _FIND,
    "dead-letters show": _FIND,
    "dead-letters resend": _FIND,
}

# Arguments that the command itself reads before it starts the process.
_NODES = (
    CommandFlag(("--nodes",), "N", "train on N nodes; the same command starts on each", (), False),
    CommandFlag(("--node-rank",), "K", "this node's number, from 0", (), False),
    CommandFlag(
        ("--rdzv",), "HOST:PORT", "where the nodes meet: an address of node 0, which the others reach", (), False
    ),
)
_OWN_FLAGS = {
    "train": (
        CommandFlag(("--local",), "", "start NATS, S3, the reward service and the workers here too", (), False),
        *_NODES,
    ),
    **dict.fromkeys(("sft", "dpo", "rm"), _NODES),
    "config show": (
        CommandFlag(("--json",), "", "print one JSON object instead of TOML", (), False),
        CommandFlag(
            ("--command",),
            "NAME",
            "what this command trains with; what it does not read is refused",
            ("train", "sft", "dpo", "rm"),
            False,
        ),
    ),
}
_TAKES_A_RUN_FILE = ("train", "sft", "dpo", "rm", "rollout", "reward service", "bootstrap", "config show")
_STARTS_A_PROCESS = (*_TAKES_A_RUN_FILE, "certs", "plan", "quickstart", "recipe", "up", "data check", "config import", "env serve", "env register", "env drain", "env resume", "env test", "env list", "reward serve",
                     "reward serve-judge",
                     "reward serve-grader", "reward serve-model")  # fmt: skip


def flags_of(verb: str) -> tuple[CommandFlag, ...]:
    """Return the flags of a verb that starts another process, those of `train --local` included."""
    verbs = reference.load().verbs
    found = [*_OWN_FLAGS.get(verb, ()), *(verbs[verb].flags if verb in verbs else ())]
    if verb == "train":
        known = {one.names for one in found}
        found += [one for one in verbs["train --local"].flags if one.names not in known]
    return tuple(found)


def attach(app: App) -> None:
    """Add usage, flags and settings to the help of every verb, and let its text fill the terminal's width."""
    for verb, one in verbs_of(app):
        if one.default_command is not None:
            one.help = flowing(inspect.getdoc(one.default_command) or "")
        if verb in _STARTS_A_PROCESS:
            one.usage = f"Usage: {_usage(verb)}"
        if verb in _STARTS_A_PROCESS or verb in SETTINGS:
            one.help_epilogue = "\n".join(_epilogue(verb))


def verbs_of(app: App, verb: str = "") -> Iterator[tuple[str, App]]:
    """Yield every verb with its application; the command itself is the verb ''."""
    yield verb, app
    for name in app:
        if not name.startswith("-"):
            yield from verbs_of(app[name], f"{verb} {name}".strip())


def flowing(docstring: str) -> str:
    """Return a verb's docstring without its parameters, each paragraph on one line; examples keep their lines."""
    text = docstring.partition("\n\nParameters\n---")[0]
    paragraphs = [
        paragraph if paragraph.startswith("Example:") else " ".join(paragraph.split("\n"))
        for paragraph in text.split("\n\n")
    ]
    return "\n\n".join(paragraphs)


def _usage(verb: str) -> str:
    flags = flags_of(verb)
    words = ["penstock", verb]
    words += [f"{flag.value} ..." if flag.repeatable else flag.value for flag in flags if not flag.names]
    words += ["[RUN.TOML ...]"] if verb in _TAKES_A_RUN_FILE else []
    words += ["[FLAGS]"] if any(flag.names for flag in flags) else []
    words += ["[SECTION.KEY=VALUE ...]"] if verb in SETTINGS else []
    return " ".join(words)


def _epilogue(verb: str) -> Iterator[str]:
    known = reference.load()
    if flags := [flag for flag in flags_of(verb) if flag.names]:
        yield "Flags:"
        yield from _flag_lines(flags, only_local=_local_only() if verb == "train" else ())
    if verb in SETTINGS:
        if flags:
            yield ""
        yield "Settings it is most used with, as SECTION.KEY=VALUE or in the run file (all: penstock settings):"
        yield from explain_settings.table([known.settings[key] for key in SETTINGS[verb]], indent="  ", short=True)
    if verb in known.verbs and (epilog := known.verbs[verb].epilog):
        yield ""
        yield epilog


def _local_only() -> tuple[str, ...]:
    verbs = reference.load().verbs
    both = {flag.names for flag in verbs["train"].flags}
    return tuple(name for flag in verbs["train --local"].flags if flag.names not in both for name in flag.names)


def _flag_lines(flags: Sequence[CommandFlag], *, only_local: Sequence[str]) -> Iterator[str]:
    written = [f"{', '.join(flag.names)} {flag.value}".rstrip() for flag in flags]
    width = max(map(len, written))
    columns = shutil.get_terminal_size((100, 24)).columns
    for flag, name in zip(flags, written, strict=True):
        note = "with --local: " if set(flag.names) & set(only_local) else ""
        if width + 30 > columns:
            yield f"  {name}"
            yield from textwrap.wrap(note + flag.help, columns - 1, initial_indent=" " * 8, subsequent_indent=" " * 8)
        else:
            indent = f"  {name:<{width}}  "
            yield from textwrap.wrap(
                note + flag.help, columns - 1, initial_indent=indent, subsequent_indent=" " * len(indent)
            )
