"""``penstock eval``: evaluate a model on prompts, with every service on this machine, and store the result with its run.

NATS, an S3 server, the reward service and the workers run over a folder of their own until the evaluation is over; queues
and servers of the run are not touched. Each prompt that is over is written at once: the same command, given again after
a stop or a kill, samples only the prompts that are missing or failed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.console.evaluation import result_table, stored_results
from penstock.console.evaluation.results import Correctness, DataFile, EvaluationResult, Outcome, summarise
from penstock.console.tables import console
from penstock.deploy.evaluation import answers, target
from penstock.deploy.evaluation.publish_folder import publish_folder
from penstock.deploy.evaluation.samples import HowToSample, PlannedPrompt, Sampler
from penstock.deploy.evaluation.target import Target
from penstock.deploy.local import stop_on_signals
from penstock.deploy.local_run import LocalRun
from penstock.protocol import logs
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.reward_settings import SuccessThreshold
from penstock.protocol.config.run_file import load, split_arguments, toml_text
from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.facts import RewardRequest, Sampling
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.trainer.connections import Connections
from penstock.trainer.data.dataset import PromptSet
from penstock.trainer.data.inputs import data_files
from penstock.trainer.evaluation.success import SuccessRule, SuccessRules
from penstock.trainer.groups.completion_texts import CompletionTexts
from penstock.trainer.groups.pack_reader import PackReader
from penstock.trainer.groups.task_packs import evaluation_sampling
from penstock.trainer.preflight import check_rewards
from penstock.trainer.settings import TrainerSettings

_STOPPED = 130
_INCOMPLETE = 3
_WORK = "work"  # the run id of the services, and their folder
_PROGRESS_S = 2.0
_SERVERS = ("PENSTOCK_NATS__", "PENSTOCK_S3__", "PENSTOCK_RUN__")  # of the run; the evaluation has its own


class Stopped(Exception):
    """A signal asked for the end."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation as it was asked for."""

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
        """The environment of its tasks."""
        return self.settings.eval.environment or self.settings.rollout.environment

    @property
    def prompts_by_source(self) -> dict[str, int]:
        """How many prompts each source has, in the files' order."""
        return dict(Counter(one.source for one in self.planned))


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate; returns 0, 3 if prompts failed or are missing, 1 for an error explained on stderr, 130 after a signal."""
    options, rest = _parser().parse_known_args(arguments)
    logs.configure("evaluation", level="warning")
    stop = stop_on_signals()
    try:
        with contextlib.ExitStack() as cleaned:
            evaluation = _prepare(options, rest, cleaned)
            result, problem = _evaluate(evaluation, options, stop)
    except Stopped:
        print("penstock eval: stopped; the same command continues with the missing prompts", file=sys.stderr)
        return _STOPPED
    except PenstockError as err:
        print(f"penstock eval: {err}", file=sys.stderr)
        return 1
    _show(result, evaluation.folder, as_json=options.json)
    if problem:
        print(f"penstock eval: {problem}", file=sys.stderr)
    return 0 if result.is_complete else _INCOMPLETE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock eval", allow_abbrev=False)
    parser.add_argument("target")
    parser.add_argument("--data", type=Path, action="append", required=True)
    parser.add_argument("-k", "--samples", type=int, default=1)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--num-prompts", type=int)
    parser.add_argument("--reward")
    parser.add_argument("--serve", type=Path, action="append", default=[])
    parser.add_argument("--answer")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    return parser


def _prepare(options: argparse.Namespace, rest: Sequence[str], cleaned: contextlib.ExitStack) -> Evaluation:
    """Find model and data and check everything that can be checked before a process starts; raises PenstockError."""
    answers.check_place(options.answer)
    if options.samples < 1:
        raise ConfigError(f"-k {options.samples}: expected 1 sample of each prompt or more")
    if options.num_prompts is not None and options.num_prompts < 1:
        raise ConfigError(f"--num-prompts {options.num_prompts}: expected 1 or more")
    found = target.find(options.target, rest, os.environ)
    reward = options.reward or (options.serve[0].stem if len(options.serve) == 1 else None)
    home = found.home.absolute()
    scratch = home / stored_results.FOLDER / f".starting-{os.getpid()}"
    scratch.mkdir(parents=True, exist_ok=True)
    cleaned.callback(shutil.rmtree, scratch, ignore_errors=True)
    model = target.export(found, scratch / "model", connection_arguments(rest))
    files = [str(path.absolute()) for path in data_files(options.data, "--data", "eval")]
    if missing := [file for file in files if not Path(file).is_file()]:
        raise ConfigError(f"--data: there is no file {', '.join(missing)}; check the path")
    recorded = scratch / "recorded.toml"
    recorded.write_text(target.recorded_settings(found, with_reward=reward is None), encoding="utf-8")
    given = without_servers(rest)
    ours = [
        f"model.path={model.absolute()}",
        f"run.id={_WORK}",
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
        environ=_environ(),
    ).settings
    tokenizer = ChatTokenizer.read(
        model, arguments=settings.data.template_arguments, needs_template=settings.data.text_prompts == "chat"
    )
    sets = tuple(_opened(Path(file), settings, tokenizer) for file in files)
    planned, data = _plan(sets, [Path(file) for file in files], options.num_prompts)
    sampling = _sampling(options, settings, tokenizer)
    name = _evaluation_id(found, data, sampling, options.samples, len(planned), settings)
    folder = home / stored_results.FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    cleaned.enter_context(_alone(folder))
    kept = folder / "settings.toml"  # the services read it
    recorded.replace(kept)
    if found.folder is None:
        shutil.rmtree(folder / "model", ignore_errors=True)
        model.rename(folder / "model")
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


def _sampling(options: argparse.Namespace, settings: TrainerSettings, tokenizer: ChatTokenizer) -> Sampling:
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


def _evaluate(
    evaluation: Evaluation, options: argparse.Namespace, stop: threading.Event
) -> tuple[EvaluationResult, str]:
    """Sample what is missing and store the result; returns it, and why prompts are missing."""
    folder = evaluation.folder
    done = {number: one for number, one in stored_results.read_outcomes(folder).items() if one.failed is None}
    stored_results.rewrite_outcomes(folder, done.values())
    missing = [one for one in evaluation.planned if one.number not in done]
    if done:
        print(f"penstock eval: {len(done)} of {len(evaluation.planned)} prompts were evaluated before", file=sys.stderr)
    earlier = stored_results.read_result(folder)
    root, problem, rules = earlier.state_root if earlier else "", "", _read_rules(folder)
    at, wall_s = (earlier.finished_at, earlier.wall_s) if earlier else (None, None)
    if missing or rules is None:
        started = time.monotonic()
        rules, root, problem = _sample(evaluation, missing, options, stop)
        at, wall_s = time.time(), time.monotonic() - started
    outcomes = list(stored_results.read_outcomes(folder).values())
    result = _result(evaluation, outcomes, rules, options.answer, root)
    result = result.model_copy(update={"finished_at": at, "wall_s": wall_s})
    stored_results.write_result(folder, result)
    return result, problem


def _sample(
    evaluation: Evaluation, missing: Sequence[PlannedPrompt], options: argparse.Namespace, stop: threading.Event
) -> tuple[SuccessRules, str, str]:
    """Start the services, sample the missing prompts, and stop them; returns rules, state root, and why prompts are missing."""
    folder = evaluation.folder
    shutil.rmtree(folder / _WORK / "store", ignore_errors=True)  # of a session that was killed
    with LocalRun(
        evaluation.arguments,
        num_workers=options.workers,
        reward_files=options.serve,
        environ=_environ(),
        own_servers=True,
    ) as run:
        run.check()
        print(f"penstock eval: logs in {folder / _WORK / 'logs'}", file=sys.stderr)
        run.start_services()

        def check() -> None:
            if stop.is_set():
                raise Stopped
            run.check_processes()

        with Bus.connect(run.nats, name="evaluation") as bus:
            connections = Connections(run.run_id, bus, Blobs(run.s3))
            root = publish_folder(connections, evaluation.settings.model.path)
            given = evaluation.settings.reward.success
            define = evaluation.settings.reward.define
            offers = check_rewards(connections, evaluation.sets, define=define, success=given, clock=time.time)
            rules = SuccessRules.make(given, offers)
            _write_rules(folder, rules)
            how = HowToSample(
                evaluation.num_samples,
                evaluation.sampling,
                evaluation.environment,
                evaluation.settings.trainer.collect_deadline_s,
            )
            reader = PackReader(
                connections.blobs.get,
                texts=CompletionTexts.of(evaluation.settings.trainer.check_texts, evaluation.tokenizer.decode_many),
            )
            store = _Store(folder, len(evaluation.planned) - len(missing), len(evaluation.planned))
            problem = Sampler(connections, missing, how, reader, store.add).run(check) if missing else ""
    shutil.rmtree(folder / _WORK / "store", ignore_errors=True)
    shutil.rmtree(folder / _WORK / "cache", ignore_errors=True)
    return rules, root, problem


class _Store:
    """Appends outcomes to the evaluation's file and prints the progress."""

    def __init__(self, folder: Path, num_done: int, num_all: int) -> None:
        self._folder = folder
        self._num_done, self._num_all = num_done, num_all
        self._printed_at = time.monotonic()

    def add(self, outcomes: Sequence[Outcome]) -> None:
        stored_results.append_outcomes(self._folder, outcomes)
        self._num_done += len(outcomes)
        if time.monotonic() - self._printed_at > _PROGRESS_S:
            self._printed_at = time.monotonic()
            print(f"penstock eval: {self._num_done} of {self._num_all} prompts", file=sys.stderr)


def _result(
    evaluation: Evaluation, outcomes: Sequence[Outcome], rules: SuccessRules, place: str | None, root: str
) -> EvaluationResult:
    complete = [one for one in outcomes if one.failed is None]
    correct = correctness(complete, rules)
    found = answers.answers(place, lambda one: _rewarded_by(one, rules), {_rewarded_by(one, rules) for one in complete})
    if correct.of is None:
        found = answers.Answers("not defined: nothing says when a completion is correct (reward.success)", None)
    sources = summarise(
        outcomes, evaluation.prompts_by_source, k=evaluation.num_samples, correct=correct, answers=found
    )
    aim = evaluation.target
    return EvaluationResult(
        evaluation_id=evaluation.folder.name,
        model=aim.name if aim.folder is None else str(aim.folder.absolute()),
        run=aim.run,
        version=aim.version,
        state_root=root,
        data=evaluation.data,
        k=evaluation.num_samples,
        sampling={k: v for k, v in evaluation.sampling.model_dump().items() if k != "stop_token_ids"},
        rewards=tuple(sorted({one.scorer for one in complete})),
        success=correct.rule,
        answer=found.rule,
        sources=sources,
    )


def correctness(complete: Sequence[Outcome], rules: SuccessRules) -> Correctness:
    """Return which samples are correct; none where a prompt's reward has no such rule, or lacks a part of it."""
    of: dict[int, tuple[bool, ...]] = {}
    texts: dict[str, None] = {}
    for one in complete:
        rule = rules.rule(RewardRequest(name=one.reward, data_source=one.data_source))
        if rule is None:
            text = f"not defined: nothing says when the reward {one.reward} of {one.source} is; set reward.success.{one.reward}"
            return Correctness(text, None)
        if lacking := _lacking(rule, one):
            return Correctness(f"not defined: the reward {rule.reward} has no part {lacking}", None)
        texts[rule.text] = None
        of[one.prompt] = rule.correct(one.rewards, one.parts)
    return Correctness(", ".join(texts), of)


def _lacking(rule: SuccessRule, one: Outcome) -> str:
    parts = rule.threshold if isinstance(rule.threshold, dict) else {}
    return next((part for part in parts if part not in one.parts), "")


def _rewarded_by(one: Outcome, rules: SuccessRules) -> str:
    """Return the reward that scored a prompt: of the name ``auto`` the one of its data source."""
    rule = rules.rule(RewardRequest(name=one.reward, data_source=one.data_source))
    return rule.reward if rule is not None else one.reward


def _write_rules(folder: Path, rules: SuccessRules) -> None:
    document = {"thresholds": dict(rules.thresholds), "by_source": dict(rules.by_source)}
    (folder / stored_results.RULES).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _read_rules(folder: Path) -> SuccessRules | None:
    try:
        document = json.loads((folder / stored_results.RULES).read_bytes())
        thresholds: dict[str, SuccessThreshold] = dict(document["thresholds"])
        return SuccessRules(thresholds, dict(document["by_source"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _show(result: EvaluationResult, folder: Path, *, as_json: bool) -> None:
    if importlib.util.find_spec("matplotlib") is not None and result.overall.complete:
        from penstock.console.evaluation import result_plot  # noqa: PLC0415  half a second, and optional

        result_plot.draw(folder / stored_results.PLOT, result)
    if as_json:
        print(result.model_dump_json())
        return
    console().print(result_table.table(result))
    for note in result_table.notes(result):
        print(note)
    print(f"stored: {folder / stored_results.RESULT}")


def _environ() -> Mapping[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_SERVERS)}


def connection_arguments(rest: Sequence[str]) -> list[str]:
    """Return the arguments that say where the run's servers and folders are: run files and overrides of nats, s3 and run."""
    files, overrides = _split(rest)
    return [*map(str, files), *(one for one in overrides if one.lstrip("-").startswith(("nats.", "s3.", "run.")))]


def without_servers(rest: Sequence[str]) -> list[str]:
    """Return the arguments for the evaluation's own services, which must not connect to the servers of the run."""
    files, overrides = _split(rest)
    own = [one for one in overrides if not one.lstrip("-").startswith(("nats.", "s3.", "run."))]
    return [*(str(file.absolute()) for file in files), *own]


def _split(rest: Sequence[str]) -> tuple[Sequence[Path], list[str]]:
    """Return run files and overrides, each override as one word."""
    files, overrides = split_arguments(rest)
    words = iter(overrides)
    return files, [f"{one}={next(words, '')}" if one.startswith("--") and "=" not in one else one for one in words]


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock of an evaluation's folder; raises ConfigError while another process evaluates the same."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder}: this evaluation runs in another process; wait for it, or stop it") from None
        except OSError:
            pass  # a file system without locks
        yield


if __name__ == "__main__":
    sys.exit(main())
