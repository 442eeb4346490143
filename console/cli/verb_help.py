"""The settings that the help of a verb lists; their descriptions come from `console/tools/explain_settings.py`, only the choice is made here."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

from penstock.console.tools import explain_settings
from penstock.protocol.command_line import App

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
    for verb, one in verbs_of(app):
        if one.default_command is not None:
            one.help = flowing(inspect.getdoc(one.default_command) or "")
        is_asked = tokens is None or verb.split() == list(tokens[: verb.count(" ") + 1])
        if is_asked and verb in SETTINGS:
            known = explain_settings.load_reference().settings
            table = explain_settings.table([known[key] for key in SETTINGS[verb]], indent="  ", short=True)
            one.help_epilogue = "\n".join([_SETTINGS_TITLE, *table])


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
