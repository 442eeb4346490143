"""Find what is certain to fail, before a process is started."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from penstock.console.connections import RUN_FILE
from penstock.console.tools import checks
from penstock.deploy.data_check.rows import as_reward_input
from penstock.protocol.chat_tokenizer import model_context_tokens
from penstock.protocol.errors import ConfigError
from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.registry import definitions
from penstock.reward_service.registry.built_in import AUTO, BY_SOURCE, REWARDS
from penstock.reward_service.rewards import ifeval
from penstock.rollout_service.embedded_engine.model.model_config import read_model_config
from penstock.rollout_service.settings import RolloutSettings
from penstock.trainer.data.inputs import resolve_inputs
from penstock.trainer.data.read_rows import prompt_row, read_row
from penstock.trainer.data.row_checks import Problems
from penstock.trainer.data.row_files import open_rows
from penstock.trainer.errors import MalformedData
from penstock.trainer.learner.gguf_model import check_gguf, is_gguf
from penstock.trainer.learner.model_folder_check import (
    check_adapters,
    check_folder,
    check_layout,
    check_routers,
    check_vision,
)
from penstock.trainer.recovery.resume_checks import check_same_model, check_same_ranks
from penstock.trainer.settings import TrainerSettings


def check_inputs(trainer: TrainerSettings) -> None:
    """Check that rewards, model and data are right, and that a resumed run keeps its model and ranks.

    Raises ConfigError, also for rewards that are defined wrongly, and UnsupportedModel for a model folder whose files are not
    usable.
    """
    trainer = resolve_inputs(trainer)
    if not trainer.model.path.exists():
        raise ConfigError(
            f"model.path = {trainer.model.path}: there is no such folder; set it to a Hugging Face model folder or a GGUF file"
        )
    if is_gguf(trainer.model.path):
        check_gguf(trainer.model.path)
    elif (trainer.model.path / "config.json").is_file():
        check_folder(trainer.model.path)
        check_layout(trainer.model.path, trainer.trainer.layout)
        check_routers(trainer.model.path, router_replay=trainer.trainer.router_replay)
        check_vision(trainer)
        check_adapters(trainer, "train")
    if trainer.data.from_run is None:
        definitions.check_settings(trainer.reward)
        sources = [(f"eval.source.{name}.data", source.files) for name, source in trainer.eval.source.items()]
        named_files = [("data.train", trainer.data.train_files), ("data.eval", trainer.data.eval_files), *sources]
        for key, files in named_files:
            if missing := [str(file) for file in files if not file.exists()]:
                raise ConfigError(f"{key}: there is no file {', '.join(missing)}; check the path")
        _check_instructions(trainer)
        folder, longest = trainer.model.path, trainer.rollout.max_new_tokens
        context = model_context_tokens(folder) if (folder / "config.json").is_file() else None
        if context is not None and longest >= context:
            raise ConfigError(
                f"rollout.max_new_tokens = {longest} leaves no room for a prompt in the context of {context} tokens of model.path = "
                f"{folder} (in its config.json); set rollout.max_new_tokens to less than {context}"
            )
    check_same_model(trainer.run.folder, trainer.model.path)
    check_same_ranks(trainer.run.folder, trainer.trainer.num_ranks)


def _check_instructions(trainer: TrainerSettings) -> None:
    """Raise ConfigError for training rows that `ifeval` scores, with instructions that it cannot check."""
    data, problems = trainer.data, Problems()
    sources = [source for source in BY_SOURCE if BY_SOURCE[source] == ifeval.NAME]
    if not {AUTO, ifeval.NAME, *sources} & {trainer.reward.name or AUTO, *trainer.reward.by_source.values()}:
        return  # without reading the files
    column = data.map.get("data_source", "data_source")
    for file in data.train_files:
        with contextlib.suppress(MalformedData):  # which the trainer lists
            rows = open_rows(file)
            for number in range(len(rows)):
                source = str(rows.row(number).get(column, ""))
                name = trainer.reward.by_source.get(source, trainer.reward.name) or AUTO
                if source not in sources if name == AUTO else name not in (ifeval.NAME, *sources):
                    continue
                row = as_reward_input(rows.place(number), prompt_row(read_row(rows, number, data), data))
                try:
                    ifeval.judge(ifeval.Parameters(), (), row["ground_truth"], row["extra_info"])
                except BadGroundTruth as err:
                    problems.add(rows.place(number), str(err))
    if problems.count:
        raise ConfigError("\n".join(problems.lines()))


def check_engine(trainer: TrainerSettings, rollout: RolloutSettings) -> None:
    if trainer.rollout.redundant_completions and not rollout.worker.kind.may_abandon:
        raise ConfigError(
            f"rollout.redundant_completions = {trainer.rollout.redundant_completions} with worker.engine = "
            f"{rollout.worker.engine!r}, which cannot end a single completion and count what was sampled of it; leave it out, or use "
            "embedded, sglang or sglang-url"
        )
    if trainer.trainer.router_replay and not rollout.worker.kind.returns_experts:
        raise ConfigError(
            f"trainer.router_replay = true with worker.engine = {rollout.worker.engine!r}, which does not say which experts computed a "
            "token; set it to false, or use embedded, sglang or sglang-url"
        )
    flag = "--enable-return-routed-experts"
    if trainer.trainer.router_replay and rollout.worker.engine == "sglang" and flag not in rollout.sglang.extra_args:
        raise ConfigError(
            f"trainer.router_replay = true: the SGLang servers would not say which experts computed a token; add {flag} to sglang.extra_args"
        )
    if rollout.worker.engine == "embedded" and (trainer.model.path / "config.json").is_file():
        read_model_config(trainer.model.path)


def check_engine_is_installed(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    for finding in checks.engine(arguments, environ):
        if finding.level == "fail":
            raise ConfigError(f"{finding.detail}; {finding.fix}")


def check_metrics_ports(rollout: RolloutSettings, num_workers: int) -> None:
    metrics = rollout.metrics
    if metrics.rollout_port and num_workers > 1:
        raise ConfigError(
            f"metrics.rollout_port = {metrics.rollout_port} with {num_workers} workers on this machine: each needs a port of "
            "its own; set it to 0 for any free one (the log and the heartbeats name it), or start one worker"
        )
    if metrics.rollout_port and metrics.rollout_port == metrics.trainer_port:
        raise ConfigError(
            f"metrics.trainer_port and metrics.rollout_port are both {metrics.rollout_port}; set one of them to another port"
        )


def missing_rewards(trainer: TrainerSettings, served: Sequence[Path]) -> list[str]:
    """Return a line for each reward of the run file that no service here will offer: one may still register it.

    Raises ConfigError for a name near a known one, unless a client wrote the run file, which registers functions of any name.
    """
    reward = trainer.reward
    served_names = {re.sub(r"[^A-Za-z0-9_.-]", "_", file.stem) for file in served}
    known = {*REWARDS.names(), *BY_SOURCE, AUTO, *reward.define, *served_names}
    wanted = {name for name in (reward.name, *reward.by_source.values()) if name is not None and ":" not in name}
    offered = (
        f"--serve offers {', '.join(sorted(served_names))}"
        if served_names
        else "--serve FILE.py serves one of your own"
    )
    for name in sorted(wanted - known):
        near = get_close_matches(name, known, n=1, cutoff=0.8)
        if near and not (trainer.run.folder / RUN_FILE).exists():
            raise ConfigError(
                f"no reward is named {name}; did you mean {near[0]}? {offered}; all of them: penstock settings reward.name"
            )
    return [
        f'reward {name!r} is not built in and not served here: {offered}, and reward.name = "FILE.py:FUNCTION" needs no '
        "service; the run waits a minute for its registration"
        for name in sorted(wanted - known)
    ]


def check_reward_files(files: Sequence[Path]) -> None:
    if missing := [str(file) for file in files if not file.is_file()]:
        raise ConfigError(f"--serve {', '.join(missing)}: there is no such file")
    for file in files:
        try:
            compile(file.read_bytes(), file, "exec", dont_inherit=True)
        except SyntaxError as err:
            raise ConfigError(f"--serve {file}:{err.lineno or 1}: {err.msg}; correct the file") from None
        except (OSError, ValueError) as err:  # a null byte
            raise ConfigError(f"--serve {file} cannot be read ({err}); correct the file") from None
