"""Check what `penstock eval` was asked for, and plan it: model, data, prompts, sampling, and the folder of the result."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.console.cli.options import EvalOptions
from penstock.console.evaluation import results
from penstock.console.evaluation.results import DataFile
from penstock.deploy.evaluation import answers, target
from penstock.deploy.evaluation.samples import PlannedPrompt
from penstock.deploy.evaluation.target import Target
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.run_file import load, split_arguments, toml_text
from penstock.protocol.errors import ConfigError
from penstock.protocol.facts import Sampling
from penstock.protocol.files import replace
from penstock.trainer.data.dataset import PromptSet
from penstock.trainer.data.inputs import data_files
from penstock.trainer.groups.task_packs import evaluation_sampling
from penstock.trainer.learner.model_folder_check import refuse_vision
from penstock.trainer.settings import TrainerSettings

WORK = "work"  # the run id of the services, and their folder
_SERVERS = ("PENSTOCK_NATS__", "PENSTOCK_S3__", "PENSTOCK_RUN__")  # of the run; the evaluation has its own


@dataclass(frozen=True, slots=True)
class Evaluation:
    target: Target
    folder: Path
    settings: TrainerSettings
    arguments: tuple[str, ...]  # of every service
    planned: tuple[PlannedPrompt, ...]
    sets: tuple[PromptSet, ...]
    data: tuple[DataFile, ...]
    tokenizer: ChatTokenizer
    num_samples: int
    sampling: Sampling

    @property
    def environment(self) -> str:
        return self.settings.eval.environment or self.settings.rollout.environment

    @property
    def prompts_by_source(self) -> dict[str, int]:
        return dict(Counter(one.source for one in self.planned))


def prepare(name: str, rest: Sequence[str], options: EvalOptions, cleaned: contextlib.ExitStack) -> Evaluation:
    """Find model and data and check everything that can be checked before a process starts; raises PenstockError."""
    answers.check_place(options.answer)
    if options.samples < 1:
        raise ConfigError(f"-k {options.samples}: expected 1 sample of each prompt or more")
    if options.num_prompts is not None and options.num_prompts < 1:
        raise ConfigError(f"--num-prompts {options.num_prompts}: expected 1 or more")
    found = target.find(name, rest, os.environ)
    reward = options.reward or (options.serve[0].stem if len(options.serve) == 1 else None)
    home = found.home.absolute()
    scratch = home / results.FOLDER / f".starting-{os.getpid()}"
    scratch.mkdir(parents=True, exist_ok=True)
    cleaned.callback(shutil.rmtree, scratch, ignore_errors=True)
    model = target.export(found, scratch / "model", connection_arguments(rest))
    files = [str(path.absolute()) for path in data_files(options.data, "--data", "eval")]
    if missing := [file for file in files if not Path(file).is_file()]:
        raise ConfigError(f"--data: there is no file {', '.join(missing)}; check the path")
    recorded = scratch / "recorded.toml"
    names_format = any(word.startswith("data.format=") for word in rest)
    recorded.write_text(
        target.recorded_settings(found, with_reward=reward is None, with_format=not names_format), encoding="utf-8"
    )
    given = without_servers(rest)
    ours = [
        f"model.path={model.absolute()}",
        f"run.id={WORK}",
        f"data.train={toml_text(files)}",
        f"data.eval={toml_text(files)}",
        "eval.samples=1",
        "trainer.micro_batch_tokens=1000000000",
        *([f"reward.name={reward}"] if reward else []),
        *([f"eval.max_new_tokens={options.max_tokens}"] if options.max_tokens is not None else []),
    ]
    arguments = [str(recorded), *given, *ours]
    settings = load(
        TrainerSettings,
        files=split_arguments(arguments)[0],
        overrides=split_arguments(arguments)[1],
        environ=own_environ(),
    ).settings
    refuse_vision(settings.model_copy(update={"model": settings.model.model_copy(update={"path": model})}), "eval")
    tokenizer = ChatTokenizer.read(
        model, arguments=settings.data.template_arguments, needs_template=settings.data.text_prompts == "chat"
    )
    sets = tuple(_opened(Path(file), settings, tokenizer) for file in files)
    planned, data = _plan(sets, [Path(file) for file in files], options.num_prompts)
    sampling = _sampling(options, settings, tokenizer)
    evaluation_id = _evaluation_id(found, data, sampling, options.samples, len(planned), settings)
    folder = home / results.FOLDER / evaluation_id
    folder.mkdir(parents=True, exist_ok=True)
    cleaned.enter_context(alone(folder))
    kept = folder / "settings.toml"  # the services read it
    replace(recorded, kept)
    if found.folder is None:
        shutil.rmtree(folder / "model", ignore_errors=True)
        replace(model, folder / "model")
        cleaned.callback(shutil.rmtree, folder / "model", ignore_errors=True)
        ours[0] = f"model.path={folder / 'model'}"
        model = folder / "model"
    settings = settings.model_copy(update={"model": settings.model.model_copy(update={"path": model})})
    arguments = [str(kept), *given, *ours, f"run.dir={folder}"]
    return Evaluation(
        found, folder, settings, tuple(arguments), planned, sets, data, tokenizer, options.samples, sampling
    )


def _opened(file: Path, settings: TrainerSettings, tokenizer: ChatTokenizer) -> PromptSet:
    all_rows = settings.data.model_copy(update={"max_samples": None})
    longest = settings.eval.max_new_tokens or settings.rollout.max_new_tokens
    prompts = PromptSet.open([file], data=all_rows, reward=settings.reward, tokenizer=tokenizer, max_new_tokens=longest)
    for reason, count in prompts.dropped.items():
        print(f"penstock eval: {file}: {count} prompts left out: {reason}", file=sys.stderr)
    return prompts


def _plan(
    sets: Sequence[PromptSet], files: Sequence[Path], limit: int | None
) -> tuple[tuple[PlannedPrompt, ...], tuple[DataFile, ...]]:
    """Return the prompts with their sources: the data_source of the row, or the file's name.

    A data_source that occurs in several files gets the file's name before it, so that files are never mixed.
    """
    taken = [
        [(file, prompts[index]) for index in range(min(len(prompts), limit or len(prompts)))]
        for file, prompts in zip(files, sets, strict=True)
    ]
    owners: dict[str, set[Path]] = {}
    for rows in taken:
        for file, prompt in rows:
            owners.setdefault(prompt.reward.data_source, set()).add(file)

    def source(file: Path, data_source: str) -> str:
        if not data_source:
            return file.stem
        return data_source if len(owners[data_source]) == 1 else f"{file.stem}:{data_source}"

    planned = [
        PlannedPrompt(number, source(file, prompt.reward.data_source), prompt)
        for number, (file, prompt) in enumerate(row for rows in taken for row in rows)
    ]
    data = tuple(
        DataFile(path=str(file), sha256=prompts.fingerprint, source=file.stem)
        for file, prompts in zip(files, sets, strict=True)
    )
    return tuple(planned), data


def _sampling(options: EvalOptions, settings: TrainerSettings, tokenizer: ChatTokenizer) -> Sampling:
    temperature = options.temperature
    if temperature is None:
        several = settings.eval.temperature or settings.rollout.temperature
        temperature = settings.eval.temperature if options.samples == 1 else several
    if temperature == 0.0 and options.samples > 1:
        raise ConfigError(
            f"--temperature 0 with -k {options.samples}: greedy samples would all be the same; set --temperature above 0 or -k 1"
        )
    if not 0.0 <= temperature <= 100.0:
        raise ConfigError(f"--temperature {temperature}: expected 0 to 100")
    chosen = settings.eval.model_copy(update={"temperature": temperature})
    return evaluation_sampling(chosen, settings.rollout, tokenizer.eos_ids)


def _evaluation_id(
    found: Target, data: Sequence[DataFile], sampling: Sampling, k: int, num_prompts: int, settings: TrainerSettings
) -> str:
    """Return the name of the evaluation's folder: the same for the same weights, prompts, sampling and reward."""
    about = {
        "weights": found.identity,
        "data": [(one.sha256, one.source) for one in data],
        "num_prompts": num_prompts,
        "k": k,
        "sampling": sampling.model_dump(mode="json"),
        "environment": settings.eval.environment or settings.rollout.environment,
        "reward": settings.reward.model_dump(mode="json"),
        "prompt": settings.data.model_dump(mode="json", exclude=set(target.OWN_DATA)),
    }
    digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:12]
    return f"{'model' if found.version is None else f'v{found.version}'}-{digest}"


def own_environ() -> Mapping[str, str]:
    """Return the environment without the servers of the run."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_SERVERS)}


def connection_arguments(rest: Sequence[str]) -> list[str]:
    """Return the arguments that say where the run's servers and folders are: run files and overrides of nats, s3 and run."""
    files, overrides = _split(rest)
    return [
        *map(str, files),
        *(override for override in overrides if override.lstrip("-").startswith(("nats.", "s3.", "run."))),
    ]


def without_servers(rest: Sequence[str]) -> list[str]:
    """Return the arguments for the evaluation's own services, which must not connect to the servers of the run."""
    files, overrides = _split(rest)
    own = [override for override in overrides if not override.lstrip("-").startswith(("nats.", "s3.", "run."))]
    return [*(str(file.absolute()) for file in files), *own]


def _split(rest: Sequence[str]) -> tuple[Sequence[Path], list[str]]:
    files, overrides = split_arguments(rest)
    words = iter(overrides)
    return files, [f"{word}={next(words, '')}" if word.startswith("--") and "=" not in word else word for word in words]


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the lock of an evaluation's folder; raises ConfigError while another process evaluates the same."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder}: this evaluation runs in another process; wait for it, or stop it") from None
        except OSError:
            pass  # a file system without locks
        yield
