"""Write a commented run file from a few answers and the first rows of a data file (`penstock init`); never overwrite one."""

from __future__ import annotations

import difflib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.console import launch
from penstock.console.tools import explain_settings
from penstock.protocol.config.setting_description import MADE_AT_START, REQUIRED
from penstock.protocol.errors import ConfigError
from penstock.protocol.subjects import check_run_id

_NUM_ROWS = 500
_DEADLINE_S = 60.0
SCHEMA_NAME = "run.schema.json"
BY_DATA_SOURCE = "none"
_MAX_PROMPT, _MAX_NEW = 1024, 256  # tokens
Ask = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class DataSample:
    num_rows: int = 0
    formats: tuple[str, ...] = ()
    mapping: Mapping[str, str] = field(default_factory=dict)  # data.map: the file's columns by what they are read as
    num_prompts: int = 0  # rows with a prompt to answer
    num_truths: int = 0  # of them with a ground truth
    longest_prompt: int | None = None  # tokens; None: not known
    context_tokens: int | None = None  # of the model; None: not known
    problem: str = ""  # the first one


def read_sample(data: str, model: str | None) -> DataSample | None:
    """Return what the first rows say; None for a path that does not exist, such as an id on the hub.

    Columns with other names are mapped where their names say what they hold. The trainer's code reads the rows, in a child process.
    """
    if not Path(data).exists():
        return None
    options = [data, "--first", str(_NUM_ROWS), "--no-tests", "--json"]
    if model and Path(model).exists():
        options += ["--model", model]
    sample = _checked_rows(options, {})
    if suggested := sample.mapping:
        mapped = _checked_rows([*options, *(f"--map={column}={name}" for column, name in suggested.items())], suggested)
        if mapped.num_prompts and not mapped.problem:
            return mapped
    return replace(sample, mapping={})


def _checked_rows(options: Sequence[str], mapping: Mapping[str, str]) -> DataSample:
    command = launch.module("penstock", "data", "check", *options)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        return DataSample(problem=f"its first {_NUM_ROWS} rows were not read within {_DEADLINE_S:.0f} s")
    try:
        reports = [json.loads(line) for line in done.stdout.splitlines()]
    except ValueError:
        reports = []
    if not reports:
        return DataSample(problem=done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}")
    sources = [source for report in reports for source in report["data_sources"].values()]
    lengths = [
        file_report["prompt_length"]["max"]
        for file_report in reports
        if file_report["prompt_length"] and file_report["length_unit"] == "tokens"
    ]
    return DataSample(
        num_rows=sum(file_report["rows"] for file_report in reports),
        formats=tuple(dict.fromkeys(name for file_report in reports for name in file_report["formats"])),
        mapping=mapping
        or next((file_report["suggested_map"] for file_report in reports if file_report["suggested_map"]), {}),
        num_prompts=sum(file_report["can_train"]["grpo"] for file_report in reports),
        num_truths=sum(source["with_ground_truth"] for source in sources),
        longest_prompt=max(lengths, default=None),
        context_tokens=next(
            (file_report["context_tokens"] for file_report in reports if file_report["context_tokens"]), None
        ),
        problem=next((line for file_report in reports for line in file_report["first_bad_rows"]), ""),
    )


@dataclass(frozen=True, slots=True)
class Answers:
    """What a run file is made of; None: not answered."""

    model: str | None = None
    data: str | None = None
    eval: str | None = None
    reward: str | None = None  # built in, an endpoint, FILE.py, FILE.py:FUNCTION, or BY_DATA_SOURCE
    gpus: int | None = None
    steps: int | None = None
    run_id: str | None = None
    algorithm: str | None = None

    @property
    def served_file(self) -> str:
        """The reward file that a separate process serves; empty for none."""
        return self.reward if self.reward is not None and self.reward.endswith(".py") else ""

    @property
    def reward_name(self) -> str:
        return Path(self.served_file).stem if self.served_file else str(self.reward)

    @property
    def num_ranks(self) -> int:
        """Processes that train: half of the GPUs, since the others generate."""
        return max(1, int(self.gpus or 0) // 2)


def init(file: Path, answers: Answers, *, schema: bool, ask: Ask | None) -> int:
    """Write the run file, and the schema that editors read beside it; print the next commands.

    Args:
        file: The run file; it must not exist.
        answers: What is known already.
        schema: Whether the schema is written too, where there is none.
        ask: Asks for what is missing; None: what has no default must be among the answers.

    Raises:
        ConfigError: The file exists, cannot be written, or an answer is missing or wrong.
    """
    if file.exists():
        raise ConfigError(f"{file} exists and is not overwritten; name another file: penstock init other.toml")
    answers = check_answers(complete(answers, file, ask))
    sample = read_sample(str(answers.data), answers.model)
    texts = {file: "".join(f"{line}\n" for line in run_file(answers, file, sample or DataSample(), schema=schema))}
    if schema and not file.with_name(SCHEMA_NAME).exists():
        texts[file.with_name(SCHEMA_NAME)] = json.dumps(explain_settings.run_file_schema(), ensure_ascii=False) + "\n"
    try:
        for path, text in texts.items():
            with path.open("x", encoding="utf-8") as out:
                out.write(text)
    except OSError as err:
        raise ConfigError(f"{err.filename} cannot be written ({err.strerror}); choose another folder") from None
    print(f"wrote {' and '.join(map(str, texts))}")
    for note in [*notes(answers), *(sample_notes(sample) if sample else ())]:
        print(f"note: {note}", file=sys.stderr)
    print(f"next: {_check(file)}")
    if answers.served_file or ":" in answers.reward_name or answers.reward in _builtin_rewards():
        serve = ["--serve", answers.served_file] if answers.served_file else []
        print(f"next: {_line('penstock', 'reward', 'test', answers.reward_name, *serve, '--run-file', str(file))}")
    print(f"then: {_train(answers, file)}")
    return 0


def complete(answers: Answers, file: Path, ask: Ask | None) -> Answers:
    builtin = ", ".join(_builtin_rewards())
    questions: dict[str, tuple[str, str | None]] = {
        "model": ("Model folder (Hugging Face: config.json, safetensors, tokenizer)", None),
        "data": ("Training data (JSONL, JSON, CSV or Parquet file)", None),
        "eval": ("Held-out data to evaluate on, if any", ""),
        "reward": (f"Reward: your FILE.py, {BY_DATA_SOURCE} (each row's data_source chooses), or built in: {builtin}", None),
        "gpus": ("GPUs of this machine to use; 0 trains on the CPU", "0"),
        "steps": ("Optimizer steps", "100"),
        "run_id": ("Name of the run", re.sub(r"[^a-z0-9-]+", "-", file.stem.lower()).strip("-") or "run"),
        "algorithm": ("Algorithm", "async_grpo"),
    }  # fmt: skip
    missing = [name for name, (_, default) in questions.items() if getattr(answers, name) is None and default is None]
    if ask is None and missing:
        flags = " ".join(f"--{name} {name.upper()}" for name in missing)
        raise ConfigError(f"{', '.join(missing)} not given: add {flags}, or run it on a terminal, where it asks")
    for name, (question, default) in questions.items():
        if getattr(answers, name) is not None:
            continue
        text = default or ""
        if ask is not None:
            while not (text := ask(f"{question}{f' [{default}]' if default else ''}: ").strip() or (default or "")):
                if default is not None:
                    break
        answers = replace(answers, **{name: _number(name, text) if name in ("gpus", "steps") else text})
    return answers


def _builtin_rewards() -> Sequence[str]:
    return explain_settings.load_reference().settings["reward.name"].values


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}: expected a whole number, got {text!r}") from None


def check_answers(answers: Answers) -> Answers:
    check_run_id(str(answers.run_id))
    presets = explain_settings.load_reference().settings["algorithm.name"].values
    if answers.algorithm not in presets:
        near = difflib.get_close_matches(str(answers.algorithm), presets, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(presets)}"
        raise ConfigError(f"no algorithm is named {answers.algorithm}; {hint}")
    if int(answers.gpus or 0) < 0 or int(answers.steps or 0) < 1:
        raise ConfigError("--gpus must be at least 0 and --steps at least 1")
    name = answers.reward_name
    if not re.fullmatch(r"[A-Za-z0-9_.:#-]{1,200}", name):
        raise ConfigError(
            f"the reward {name!r} is no name that a run file can hold (letters, digits, '_', '.', ':', '#', '-'); "
            "run this in the folder of the file, or give FILE.py to serve it as an endpoint"
        )
    return answers


def run_file(answers: Answers, file: Path, sample: DataSample, *, schema: bool) -> Iterator[str]:
    """Yield the lines of the run file; columns and lengths are those of the data's first rows."""
    if schema:
        yield f"#:schema ./{SCHEMA_NAME}"
    yield f"# Train:    {_train(answers, file)}"
    if int(answers.gpus or 0) > 1:
        ranks, gpus = answers.num_ranks, int(answers.gpus or 0)
        trained, generated = ",".join(map(str, range(ranks))), ",".join(map(str, range(ranks, gpus)))
        yield f"#           after `penstock up` in another terminal, with its settings loaded; {ranks} of {gpus} GPUs train:"
        yield f"#           CUDA_VISIBLE_DEVICES={generated} {_line('penstock', 'rollout', str(file))}"
        yield f"#           CUDA_VISIBLE_DEVICES={trained} is that of the trainer; `penstock reward service {file}` needs none"
    yield f"# Check:    {_check(file)}"
    yield f"# Show:     {_line('penstock', 'config', 'show', str(file))}"
    yield "# Explain:  penstock settings SECTION.KEY"
    section = ""
    for key, value in _values(answers, sample):
        if key.rpartition(".")[0] != section:
            section = key.rpartition(".")[0]
            yield ""
            yield f"[{section}]"
        yield from _entry(key, value)


def _values(answers: Answers, sample: DataSample) -> Iterator[tuple[str, object]]:
    """Yield keys and values; None: the default, written as a comment."""
    gpus = int(answers.gpus or 0)
    steps = int(answers.steps or 1)
    yield from (("run.id", answers.run_id), ("run.seed", None))
    yield from (("model.path", answers.model), ("model.dtype", "bfloat16" if gpus else "float32"))
    yield from (("data.train", answers.data), ("data.eval", answers.eval or None))
    if sample.mapping:
        yield ("data.map", dict(sample.mapping))
    max_prompt, max_new = lengths(sample)
    yield ("data.max_prompt_tokens", max_prompt)
    yield ("data.system_prompt", None)
    yield ("reward.name", None if answers.reward == BY_DATA_SOURCE else answers.reward_name)
    yield ("algorithm.name", answers.algorithm)
    yield from (("rollout.group_size", 8), ("rollout.groups_per_step", 32), ("rollout.max_new_tokens", max_new))
    yield from (("rollout.max_staleness", None), ("rollout.temperature", None))
    yield from (("trainer.steps", steps), ("trainer.lr", 1e-6), ("trainer.warmup_steps", None))
    yield ("trainer.num_ranks", answers.num_ranks if gpus > 1 else None)
    yield ("trainer.checkpoint_every_s", None)
    yield from (("eval.every", max(1, steps // 10) if answers.eval else None), ("eval.num_prompts", None))
    if gpus > 1:
        yield from (("worker.engine", "sglang"), ("sglang.python", None), ("sglang.engines", gpus - answers.num_ranks))
    else:
        yield ("worker.device", "cuda" if gpus else "cpu")
        yield ("worker.dtype", "bfloat16" if gpus else "float32")
    if gpus == 1:
        yield ("placement.shared", "turns")


def _entry(key: str, value: object) -> Iterator[str]:
    setting = explain_settings.load_reference().settings[key]
    yield from explain_settings.wrapped(explain_settings.first_part(setting), "# ", width=100)
    name = key.rpartition(".")[2]
    if value is None:
        example = setting.default if setting.default not in (REQUIRED, MADE_AT_START, '"none"', "[]") else '"..."'
        yield f"# {name} = {example}"
    elif isinstance(value, dict):
        yield f"{name} = {{ {', '.join(f'{key} = {json.dumps(text)}' for key, text in value.items())} }}"
    else:
        yield f"{name} = {json.dumps(value, ensure_ascii=False)}"


def lengths(sample: DataSample) -> tuple[int, int]:
    """Return the limits of prompt and completion in tokens: the usual ones, or what prompts need and the model's context has."""
    longest, context = sample.longest_prompt or 0, sample.context_tokens
    max_prompt = max(_MAX_PROMPT, -(-longest // 64) * 64)
    if context is None or max_prompt + _MAX_NEW <= context:
        return max_prompt, _MAX_NEW
    max_prompt = min(max_prompt, max(longest, context // 2))
    return max_prompt, max(1, min(_MAX_NEW, context - max_prompt))


def sample_notes(sample: DataSample) -> Iterator[str]:
    if sample.num_prompts:
        read_as = "".join(f", {column} from {name}" for column, name in sample.mapping.items())
        longest = "" if sample.longest_prompt is None else f", longest prompt {sample.longest_prompt} tokens"
        context = "" if sample.context_tokens is None else f" of the model's {sample.context_tokens}"
        truths = "" if sample.num_truths else ", no ground truth"
        yield f"data: {sample.num_rows} rows read, format {', '.join(sample.formats)}{read_as}{truths}{longest}{context}"
    if sample.problem:
        yield f"data: {sample.problem}"


def notes(answers: Answers) -> Iterator[str]:
    for what, path in (("model", answers.model), ("data", answers.data), ("held-out data", answers.eval)):
        if path and not Path(path).exists():
            yield f"{what}: there is no {path} yet"
    if answers.served_file and not Path(answers.served_file).exists():
        yield f"reward: there is no {answers.served_file} yet"
    if int(answers.gpus or 0) > 1:
        yield "the engines are SGLang servers: set sglang.python to the Python that has it (docs/sglang.md)"


def _check(file: Path) -> str:
    return _line("penstock", "data", "check", "--run", str(file))


def _train(answers: Answers, file: Path) -> str:
    words = ["penstock", "train", str(file)]
    if int(answers.gpus or 0) > 1:
        return _line(*words)
    serve = ["--serve", answers.served_file] if answers.served_file else []
    workers = ["--workers", "1"] if answers.gpus else []
    return _line(*words, "--local", *workers, *serve)


def _line(*words: str) -> str:
    return shlex.join(words)
