"""Check what `penstock eval` was asked for, and plan it: model, data, prompts, sampling, and the folder of the result.

For maj@k the answer of a completion is found by the reward that scored it, or by ``--answer``. The built-in rewards that
compare an answer define one; for them the answer that votes is the one that is scored. For any other reward maj@k is not
defined, unless ``--answer`` says where the answer is.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import cast, get_args

from penstock.console import evaluation_results
from penstock.console.cli.options import EvalOptions
from penstock.console.evaluation_results import Answers, DataFile, Extract, Outcome
from penstock.deploy.bootstrap import connection_arguments, without_servers
from penstock.deploy.evaluation import target
from penstock.deploy.evaluation.same_answer import MathAnswer
from penstock.deploy.evaluation.samples import PlannedPrompt
from penstock.deploy.evaluation.target import Target
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.run_file import load, split_arguments, toml_text
from penstock.protocol.errors import ConfigError
from penstock.protocol.files import replace
from penstock.protocol.groups import Sampling
from penstock.protocol.record import run_folder
from penstock.reward_service.rewards import choice, gsm8k, math_answer
from penstock.reward_service.rewards.parsing import final_answer, latex, notation
from penstock.reward_service.rewards.parsing.final_answer import Where
from penstock.trainer.data.dataset import PromptSet
from penstock.trainer.data.inputs import data_files
from penstock.trainer.data_settings import DATA_EVAL
from penstock.trainer.groups.task_packs import evaluation_sampling
from penstock.trainer.learner.model_folder_check import refuse_vision
from penstock.trainer.settings import TrainerSettings

LAST_NUMBER = "last_number"
PLACES = (*get_args(Where), LAST_NUMBER)
WORK = "work"  # the run id of the services, and their folder
_SERVERS = ("PENSTOCK_NATS__", "PENSTOCK_S3__", "PENSTOCK_RUN__")  # of the run; the evaluation has separate ones


def _spoken(find: Callable[[str], Hashable | None]) -> Extract:
    return lambda text: find(final_answer.spoken(text))


def _mathematical(find: Callable[[str], str | None]) -> Extract:
    def extract(text: str) -> Hashable | None:
        answer = find(final_answer.spoken(text))
        return None if answer is None else MathAnswer(notation.rewrite(answer))

    return extract


def _chosen_letter(text: str) -> Hashable | None:
    letters = choice.Parameters().letters
    answer = choice.find(text, "auto", letters)
    return None if answer is None else choice.letter_of(answer, {}, letters)


BY_REWARD: Mapping[str, tuple[str, Extract]] = MappingProxyType(
    {
        "gsm8k": ("the number after the last ####", _spoken(gsm8k.last_answer)),
        "gsm8k_flexible": ("the last number", _spoken(gsm8k.last_number)),
        "math": ("the last \\boxed{}, grouped as `math` compares", _mathematical(latex.last_boxed)),
        "math_flexible": (
            "boxed, in tags, after ####, after a phrase, or the last number, grouped as `math` compares",
            _mathematical(math_answer.anywhere),
        ),
        "answer_line": ("the last line 'Answer: ...' or box, grouped as `math` compares", _mathematical(math_answer.on_last_line)),
        "multiple_choice": ("the letter chosen", _spoken(_chosen_letter)),
        "exact_match": ("the whole completion without surrounding white space", _spoken(str.strip)),
    }
)  # fmt: skip


def answer_rule(place: str | None, reward_of: Callable[[Outcome], str], rewards: set[str]) -> Answers:
    """Return how answers are found.

    Args:
        place: ``--answer``; None: by reward.
        reward_of: The reward that scored a prompt.
        rewards: All of them.

    Raises:
        ConfigError: ``place`` is unknown.
    """
    if place is not None:
        extract = _at(place)
        return Answers(f"answer at {place} (--answer)", lambda _: extract)
    unknown = sorted(rewards - BY_REWARD.keys())
    if unknown or not rewards:
        text = (
            f"not defined: the reward {', '.join(unknown) or '(none)'} does not say what the answer of a completion is; "
            f"name its place with --answer ({', '.join(PLACES)})"
        )
        return Answers(text, None)
    rules = {name: BY_REWARD[name] for name in sorted(rewards)}
    return Answers(
        "; ".join(f"{name}: {rule}" for name, (rule, _) in rules.items()),
        lambda outcome: BY_REWARD[reward_of(outcome)][1],
    )


def check_answer_place(place: str | None) -> None:
    if place is not None and place not in PLACES:
        raise ConfigError(f"--answer {place}: expected one of {', '.join(PLACES)}")


def _at(place: str) -> Extract:
    check_answer_place(place)
    if place == LAST_NUMBER:
        return _spoken(gsm8k.last_number)
    where = cast(Where, place)
    return _mathematical(lambda text: final_answer.find(text, where))


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
        return dict(Counter(prompt.source for prompt in self.planned))


def prepare(name: str, rest: Sequence[str], options: EvalOptions, cleaned: contextlib.ExitStack) -> Evaluation:
    check_answer_place(options.answer)
    if options.samples < 1:
        raise ConfigError(f"-k {options.samples}: expected 1 sample of each prompt or more")
    if options.num_prompts is not None and options.num_prompts < 1:
        raise ConfigError(f"--num-prompts {options.num_prompts}: expected 1 or more")
    evaluated = target.find(name, rest, os.environ)
    reward = options.reward or (options.serve[0].stem if len(options.serve) == 1 else None)
    home = evaluated.home.absolute()
    run_folder.refuse_links(home / evaluation_results.FOLDER)
    scratch = home / evaluation_results.FOLDER / f".starting-{os.getpid()}"
    scratch.mkdir(parents=True, exist_ok=True)
    cleaned.callback(shutil.rmtree, scratch, ignore_errors=True)
    model = target.export(evaluated, scratch / "model", connection_arguments(rest))
    files = [str(path.absolute()) for path in data_files(options.data, "--data", "eval")]
    if missing := [file for file in files if not Path(file).is_file()]:
        raise ConfigError(f"--data: there is no file {', '.join(missing)}; check the path")
    recorded = scratch / "recorded.toml"
    settings_files = split_arguments(rest)[0]
    text = target.recorded_settings(evaluated, with_reward=reward is None, files=settings_files)
    recorded.write_text(text, encoding="utf-8")
    run_arguments = without_servers(rest)
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
    arguments = [str(recorded), *run_arguments, *ours]
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
    evaluation_id = _evaluation_id(evaluated, data, sampling, options.samples, len(planned), settings)
    folder = home / evaluation_results.FOLDER / evaluation_id
    folder.mkdir(parents=True, exist_ok=True)
    cleaned.enter_context(alone(folder))
    kept = folder / "settings.toml"  # the services read it
    replace(recorded, kept)
    if evaluated.folder is None:
        shutil.rmtree(folder / "model", ignore_errors=True)
        replace(model, folder / "model")
        cleaned.callback(shutil.rmtree, folder / "model", ignore_errors=True)
        ours[0] = f"model.path={folder / 'model'}"
        model = folder / "model"
    settings = settings.model_copy(update={"model": settings.model.model_copy(update={"path": model})})
    longest = f"rollout.max_new_tokens={_longest(settings)}"  # nothing else is sampled: the default may not fit the model's context
    arguments = [str(kept), *run_arguments, *ours, f"run.dir={folder}", longest]
    return Evaluation(
        evaluated, folder, settings, tuple(arguments), planned, sets, data, tokenizer, options.samples, sampling
    )


def _longest(settings: TrainerSettings) -> int:
    return settings.eval.max_new_tokens or settings.rollout.max_new_tokens


def _opened(file: Path, settings: TrainerSettings, tokenizer: ChatTokenizer) -> PromptSet:
    all_rows = settings.data_of(DATA_EVAL).model_copy(update={"max_samples": None})
    prompts = PromptSet(
        [file], data=all_rows, reward=settings.reward, tokenizer=tokenizer, max_new_tokens=_longest(settings)
    )
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
    evaluated: Target, data: Sequence[DataFile], sampling: Sampling, k: int, num_prompts: int, settings: TrainerSettings
) -> str:
    """Return the name of the evaluation's folder: the same for the same weights, prompts, sampling and reward."""
    about = {
        "weights": evaluated.identity,
        "data": [(file.sha256, file.source) for file in data],
        "num_prompts": num_prompts,
        "k": k,
        "sampling": sampling.model_dump(mode="json"),
        "environment": settings.eval.environment or settings.rollout.environment,
        "reward": settings.reward.model_dump(mode="json"),
        "prompt": settings.data_of(DATA_EVAL).model_dump(mode="json", exclude=set(target.OWN_DATA)),
    }
    digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:12]
    return f"{'model' if evaluated.version is None else f'v{evaluated.version}'}-{digest}"


def own_environ() -> Mapping[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_SERVERS)}


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
