"""Tasks of reasoning-gym as data files and as a reward: the adapter of that package (``pip install 'penstock[reasoning-gym]'``).

A task is ``NAME`` or ``NAME:OPTION=VALUE,...``, as in ``chain_sum:max_terms=2,max_digits=2``; the options are those of the
task's configuration. Problems are made once and written to files, so that a run's record names them by content and a
replay needs no generator. The ground truth of a row is a JSON text with the task, its options and the problem; `score`
gives it back to the task's ``score_answer``.

reasoning-gym makes problem i from ``seed + i``: two seeds a few apart give nearly the same problems. `write_data` therefore
takes ranges of seeds that do not overlap, and also keeps every question on one side only.
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock.deploy.quickstart_task import Row, chat_row, prompt_row, write_files
from penstock.protocol.errors import ConfigError

REWARD = "penstock.deploy.reasoning_gym_tasks:score"
"""The reward's name in a run file: code that the reward service runs in separate processes."""

DATA_SOURCE = "reasoning_gym"
SYSTEM_PROMPT = "Give only the answer."

_SEEDS = 1_000_000  # problems that a side may look at; the ranges of seeds of the sides are this far apart
_LOOKS = 8  # problems that are looked at for each one wanted: the others repeat a question
_TAG = "answer"
# Their `score_answer` evaluates the answer or parts of the row as Python or SymPy code, which no reward process may do.
EVALUATES_ANSWERS = frozenset(
    {
        "binary_matrix",
        "bitwise_arithmetic",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "number_sorting",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    options: Mapping[str, Any]

    def dataset(self, *, seed: int, size: int) -> Any:
        return _dataset(self.name, json.dumps({**self.options, "seed": seed, "size": size}, sort_keys=True))


@dataclass(frozen=True, slots=True)
class Written:
    num_train: int
    num_eval: int
    num_warm_up: int
    longest_question: int  # in characters
    longest_answer: int
    question: str  # of a held-out problem


def parse_task(text: str) -> Task:
    name, _, option_text = text.partition(":")
    _check_name(name)
    options: dict[str, Any] = {}
    for option in filter(None, option_text.split(",")):
        key, separator, value = option.partition("=")
        if not separator or key in {"seed", "size"}:
            raise ConfigError(
                f"task {text}: expected OPTION=VALUE, got {option!r}; seed and number have flags of their own"
            )
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    task = Task(name, options)
    task.dataset(seed=0, size=1)
    return task


def write_data(
    folder: Path, stages: Sequence[Sequence[Task]], *, seed: int, num_train: int, num_eval: int, num_warm_up: int
) -> Written:
    """Write ``train.jsonl``, ``eval.jsonl`` and ``sft.jsonl`` with different questions; return what they hold.

    The training's rows are those of one stage after another, an equal number of each; the tasks of a stage take turns. The other files
    mix the tasks of all stages. The held-out problems are the same for every seed. Where a task has fewer questions, training gets fewer.

    Raises:
        ConfigError: A task has too few questions, or its answer to a problem does not score 1.
    """
    taken: set[str] = set()
    everywhere = list(itertools.chain(*stages))
    held_out = _mixed(everywhere, 0, num_eval, taken)
    warm_up = _mixed(everywhere, 1, num_warm_up, taken)
    shares = _shares(num_train, len(stages))
    staged = [_mixed(stage, 2 + seed, share, taken) for stage, share in zip(stages, shares, strict=True)]
    train = list(itertools.chain(*staged))
    if len(held_out) < num_eval or len(train) < num_eval:
        names = ", ".join(dict.fromkeys(task.name for task in everywhere))
        raise ConfigError(
            f"the task {names} with these options has too few different questions: {len(held_out)} held out (wanted {num_eval}), "
            f"{len(train)} to train on; choose options with more of them"
        )
    is_alone = len(everywhere) == 1
    write_files(
        folder,
        sft=(chat_row(entry["question"], entry["answer"]) for _, entry in warm_up),
        train=(_prompt(*problem, is_alone=is_alone) for problem in train),
        held_out=(_prompt(*problem, is_alone=is_alone) for problem in held_out),
    )
    entries = [entry for _, entry in (*held_out, *warm_up, *train)]
    return Written(
        len(train),
        len(held_out),
        len(warm_up),
        max(len(entry["question"]) for entry in entries),
        max(len(entry["answer"]) for entry in entries),
        entries[0]["question"],
    )


def _mixed(tasks: Sequence[Task], side: int, wanted: int, taken: set[str]) -> list[tuple[Task, dict[str, Any]]]:
    """Return problems of one range of seeds: an equal number of each task, which take turns."""
    shares = zip(tasks, _shares(wanted, len(tasks)), strict=True)
    of_each = [[(task, entry) for entry in _problems(task, side, share, taken)] for task, share in shares]
    return [problem for turn in itertools.zip_longest(*of_each) for problem in turn if problem is not None]


def _shares(total: int, parts: int) -> list[int]:
    return [total // parts + (number < total % parts) for number in range(parts)]


def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, float]:
    """Return the task's score of an answer, 0 to 1, and 1 in the part ``right`` for a full one.

    The answer is the text in the last ``<answer>`` tags, or the whole completion without white space around it. Raises
    ValueError for a ground truth that `write_data` did not write; what ``score_answer`` raises is the error of the score.
    """
    try:
        truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth  # the service parses JSON
        name, options, entry = truth["task"], truth["options"], truth["entry"]
    except (TypeError, ValueError, KeyError):
        raise ValueError(
            f"the ground truth is no problem of reasoning-gym with task, options and entry: {str(ground_truth)[:80]!r}"
        ) from None
    dataset = _dataset(_check_name(name), json.dumps({**options, "seed": 0, "size": 1}, sort_keys=True))
    value = float(dataset.score_answer(_answer(solution_str), entry))
    return {"score": value, "right": float(value >= 1.0)}


def _answer(completion: str) -> str:
    _, opened, rest = completion.rpartition(f"<{_TAG}>")
    return (rest.partition(f"</{_TAG}>")[0] if opened else completion).strip()


def _problems(task: Task, side: int, wanted: int, taken: set[str]) -> list[dict[str, Any]]:
    """Return problems of one range of seeds whose questions are not in ``taken``, and add them to it."""
    source = task.dataset(seed=side * _SEEDS, size=min(_SEEDS, _LOOKS * wanted))
    problems: list[dict[str, Any]] = []
    for number in range(len(source)):
        if len(problems) == wanted:
            break
        entry = source[number]
        if entry["question"] not in taken:
            taken.add(entry["question"])
            problems.append(_checked(task, entry))
    return problems


def _checked(task: Task, entry: dict[str, Any]) -> dict[str, Any]:
    """Return a problem as its JSON text gives it back; raises ConfigError unless the problem's answer scores 1 then."""
    try:
        stored = json.loads(json.dumps(entry))
        value = score(DATA_SOURCE, entry["answer"], _truth(task, stored))["score"]
    except (TypeError, ValueError, AttributeError, KeyError, IndexError) as err:
        raise ConfigError(
            f"the task {task.name} cannot be stored in a file: {type(err).__name__}: {err}; choose another"
        ) from None
    if value < 1.0:
        raise ConfigError(
            f"the task {task.name} scores its own answer {str(entry['answer'])[:80]!r} as {value:g} once the problem was read from "
            "a file; choose another task"
        )
    return stored


def _truth(task: Task, entry: Mapping[str, Any]) -> str:
    return json.dumps({"task": task.name, "options": dict(task.options), "entry": entry})


def _prompt(task: Task, entry: Mapping[str, Any], *, is_alone: bool) -> Row:
    return prompt_row(entry["question"], DATA_SOURCE if is_alone else task.name, _truth(task, entry))


def _check_name(name: str) -> str:
    if name in EVALUATES_ANSWERS:
        raise ConfigError(
            f"the task {name} evaluates answers as code when it scores them, which is refused; choose another"
        )
    known: Sequence[str] = sorted(_factory().DATASETS)
    if name not in known:
        near = [other for other in known if name and (name in other or other in name)]
        raise ConfigError(
            f"reasoning-gym has no task {name!r}; {'near: ' + ', '.join(near) if near else 'there are ' + ', '.join(known)}"
        )
    return name


@lru_cache(64)
def _dataset(name: str, options: str) -> Any:
    create: Callable[..., Any] = _factory().create_dataset
    try:
        return create(name, **json.loads(options))
    except (TypeError, ValueError, AssertionError) as err:
        raise ConfigError(f"task {name} with {options}: {err}; correct the options") from None


def _factory() -> Any:
    try:
        importlib.import_module("reasoning_gym")
    except ImportError as err:
        raise ConfigError(
            f"the package reasoning-gym cannot be imported ({err}): pip install 'penstock[reasoning-gym]'"
        ) from None
    return importlib.import_module("reasoning_gym.factory")
