"""``penstock eval``: evaluate a model on prompts, with every service on this machine, and store the result with its run.

NATS, an S3 server, the reward service and the workers run over a separate folder until the evaluation is over; queues
and servers of the run are not touched. Each prompt that is over is written at once: the same command, run again after
a stop or a kill, samples only the prompts that are missing or failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from penstock.console import evaluation_results
from penstock.console.cli.options import EvalOptions
from penstock.console.evaluation_results import Answers, Correctness, EvaluationResult, Outcome, summarise
from penstock.console.terminal import console
from penstock.console.tracking import trackers
from penstock.console.tracking.sources import note_evaluation
from penstock.deploy.evaluation.prepare import WORK, Evaluation, answer_rule, own_environ, prepare
from penstock.deploy.evaluation.same_answer import SameAnswer
from penstock.deploy.evaluation.samples import HowToSample, PlannedPrompt, Sampler
from penstock.deploy.evaluation.target import publish_folder
from penstock.deploy.local import stop_on_signals
from penstock.deploy.local_run import LocalRun
from penstock.protocol import logs
from penstock.protocol.config.reward_settings import SuccessThreshold
from penstock.protocol.errors import PenstockError
from penstock.protocol.groups import RewardRequest
from penstock.protocol.process_end import error_text
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.trainer.connections import Connections
from penstock.trainer.evaluation.eval_result import SuccessRule, SuccessRules
from penstock.trainer.groups.pack_reader import CompletionTexts, PackReader
from penstock.trainer.preflight import check_rewards

_STOPPED = 130
_INCOMPLETE = 3
_PROGRESS_S = 2.0


class Stopped(Exception):
    """A signal asked for the end."""


def evaluate(target: str, arguments: Sequence[str], options: EvalOptions) -> int:
    """Evaluate; returns 0, 3 if prompts failed or are missing, 1 for an error explained on stderr, 130 after a signal."""
    logs.configure("evaluation", level="warning")
    stop = stop_on_signals()
    try:
        trackers.check(trackers.load_settings(None, arguments, os.environ))
        with contextlib.ExitStack() as cleaned:
            evaluation = prepare(target, arguments, options, cleaned)
            result, problem = _evaluate(evaluation, options, stop)
            if result.is_complete:
                note_evaluation(evaluation.folder, result)
                trackers.write_evaluations(evaluation.target.home.absolute(), arguments, os.environ)
    except Stopped:
        print("penstock eval: stopped; the same command continues with the missing prompts", file=sys.stderr)
        return _STOPPED
    except PenstockError as err:
        print(error_text(f"penstock eval: {err}"), file=sys.stderr)
        return 1
    _show(result, evaluation.folder, as_json=options.json)
    if problem:
        print(error_text(f"penstock eval: {problem}"), file=sys.stderr)
    return 0 if result.is_complete else _INCOMPLETE


def _evaluate(evaluation: Evaluation, options: EvalOptions, stop: threading.Event) -> tuple[EvaluationResult, str]:
    folder = evaluation.folder
    done = {
        number: outcome
        for number, outcome in evaluation_results.read_outcomes(folder).items()
        if outcome.failed is None
    }
    evaluation_results.rewrite_outcomes(folder, done.values())
    missing = [prompt for prompt in evaluation.planned if prompt.number not in done]
    if done:
        print(f"penstock eval: {len(done)} of {len(evaluation.planned)} prompts were evaluated before", file=sys.stderr)
    earlier = evaluation_results.read_result(folder)
    root, problem, rules = earlier.state_root if earlier else "", "", _read_rules(folder)
    at, wall_s = (earlier.finished_at, earlier.wall_s) if earlier else (None, None)
    if missing or rules is None:
        started = time.monotonic()
        rules, root, problem = _sample(evaluation, missing, options, stop)
        at, wall_s = time.time(), time.monotonic() - started
    outcomes = list(evaluation_results.read_outcomes(folder).values())
    result = _result(evaluation, outcomes, rules, options.answer, root)
    result = result.model_copy(update={"finished_at": at, "wall_s": wall_s})
    evaluation_results.write_result(folder, result)
    return result, problem


def _sample(
    evaluation: Evaluation, missing: Sequence[PlannedPrompt], options: EvalOptions, stop: threading.Event
) -> tuple[SuccessRules, str, str]:
    folder = evaluation.folder
    shutil.rmtree(folder / WORK / "store", ignore_errors=True)  # of a session that was killed
    with LocalRun(
        evaluation.arguments,
        num_workers=options.workers,
        reward_files=options.serve,
        environ=own_environ(),
        evaluates=True,
    ) as run:
        run.check()
        print(f"penstock eval: logs in {folder / WORK / 'logs'}", file=sys.stderr)
        run.start_services()

        def check() -> None:
            if stop.is_set():
                raise Stopped
            run.check_processes()

        with Bus.connect(run.nats, name="evaluation") as bus:
            connections = Connections(run.run_id, bus, Blobs(run.s3))
            root = publish_folder(
                connections, evaluation.settings.model.path, evaluation.settings.trainer.signing_key()
            )
            success = evaluation.settings.reward.success
            define = evaluation.settings.reward.define
            offers = check_rewards(connections, evaluation.sets, define=define, success=success)
            rules = SuccessRules.make(success, offers)
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
    shutil.rmtree(folder / WORK / "store", ignore_errors=True)
    shutil.rmtree(folder / WORK / "cache", ignore_errors=True)
    return rules, root, problem


class _Store:
    def __init__(self, folder: Path, num_done: int, num_all: int) -> None:
        self._folder = folder
        self._num_done, self._num_all = num_done, num_all
        self._printed_at = time.monotonic()

    def add(self, outcomes: Sequence[Outcome]) -> None:
        evaluation_results.append_outcomes(self._folder, outcomes)
        self._num_done += len(outcomes)
        if time.monotonic() - self._printed_at > _PROGRESS_S:
            self._printed_at = time.monotonic()
            print(f"penstock eval: {self._num_done} of {self._num_all} prompts", file=sys.stderr)


def _result(
    evaluation: Evaluation, outcomes: Sequence[Outcome], rules: SuccessRules, place: str | None, root: str
) -> EvaluationResult:
    complete = [outcome for outcome in outcomes if outcome.failed is None]
    correct = correctness(complete, rules)
    answers = answer_rule(place, lambda one: _rewarded_by(one, rules), {_rewarded_by(one, rules) for one in complete})
    if correct.of is None:
        answers = Answers("not defined: nothing says when a completion is correct (reward.success)", None)
    with contextlib.closing(SameAnswer()) as same:
        answers = dataclasses.replace(answers, equal=same)
        sources = summarise(
            outcomes, evaluation.prompts_by_source, k=evaluation.num_samples, correct=correct, answers=answers
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
        rewards=tuple(sorted({outcome.scorer for outcome in complete})),
        success=correct.rule,
        answer=answers.rule,
        sources=sources,
    )


def correctness(complete: Sequence[Outcome], rules: SuccessRules) -> Correctness:
    """Return which samples are correct; none where a prompt's reward has no such rule, or lacks a part of it."""
    of: dict[int, tuple[bool, ...]] = {}
    texts: dict[str, None] = {}
    for outcome in complete:
        rule = rules.rule(RewardRequest(name=outcome.reward, data_source=outcome.data_source))
        if rule is None:
            text = f"not defined: nothing says when the reward {outcome.reward} of {outcome.source} is; set reward.success.{outcome.reward}"
            return Correctness(text, None)
        if lacking := _lacking(rule, outcome):
            return Correctness(f"not defined: the reward {rule.reward} has no part {lacking}", None)
        texts[rule.text] = None
        of[outcome.prompt] = rule.correct(outcome.rewards, outcome.parts)
    return Correctness(", ".join(texts), of)


def _lacking(rule: SuccessRule, outcome: Outcome) -> str:
    parts = rule.threshold if isinstance(rule.threshold, dict) else {}
    return next((part for part in parts if part not in outcome.parts), "")


def _rewarded_by(outcome: Outcome, rules: SuccessRules) -> str:
    rule = rules.rule(RewardRequest(name=outcome.reward, data_source=outcome.data_source))
    return rule.reward if rule is not None else outcome.reward


def _write_rules(folder: Path, rules: SuccessRules) -> None:
    document = {"thresholds": dict(rules.thresholds), "by_source": dict(rules.by_source)}
    (folder / evaluation_results.RULES).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _read_rules(folder: Path) -> SuccessRules | None:
    try:
        document = json.loads((folder / evaluation_results.RULES).read_bytes())
        thresholds: dict[str, SuccessThreshold] = dict(document["thresholds"])
        return SuccessRules(thresholds, dict(document["by_source"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _show(result: EvaluationResult, folder: Path, *, as_json: bool) -> None:
    if importlib.util.find_spec("matplotlib") is not None and result.overall.complete:
        from penstock.console.report import plots  # noqa: PLC0415  half a second, and optional

        plots.draw_result(folder / evaluation_results.PLOT, result)
    if as_json:
        print(result.model_dump_json())
        return
    console().print(evaluation_results.result_table(result))
    for note in evaluation_results.result_notes(result):
        print(note)
    print(f"stored: {folder / evaluation_results.RESULT}")
