"""``penstock recipe``: whole trainings that learn on two cores, each as files and the commands that use them.

A recipe writes data, a run file and, where it starts from nothing, a tiny model; then it runs the commands that it prints, each of
which can be typed by itself. docs/recipes.md shows what each one learns, by step, with its cost. A new recipe is one entry of `RECIPES`.
"""

from __future__ import annotations

import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.console import launch
from penstock.console.cli.options import RecipeOptions
from penstock.deploy import quickstart, reasoning_gym_tasks
from penstock.deploy.processes.child import Child, DeployError, exit_status
from penstock.deploy.quickstart_task import (
    LAKE,
    SORT,
    TEACHER_SHAPE,
    TOOLS,
    QuickstartTask,
    Row,
    chat_row,
    prompt_row,
    write_files,
    write_model,
    write_rows,
)
from penstock.deploy.smollm2 import fast_dtype, fetch_model
from penstock.protocol import parent_death
from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.process_end import error_text
from penstock.protocol.subjects import check_run_id

SUMS_SYSTEM_PROMPT = "Answer with a number."  # short: a template without a system message adds a longer default one
SUMS_MAX_NEW_TOKENS = 6  # three digits and the end of turn, and room for a wrong answer
_EVAL_SEED = 0
LR = 1e-5
SFT_LR = 5e-5
SFT_STEPS = 16
SFT_BATCH = 32
HELD_OUT = 256
GROUPS_PER_STEP = 32
MICRO_BATCH_TOKENS = 8192
TEMPLATE_TOKENS = 48  # of a chat with a short system prompt
SPARE_TOKENS = 3  # the end of turn, and room for a wrong answer
DPO_BATCH = 32
TEACHER_STEPS = 300
_TEACHER_DEADLINE_S = 120.0
_RUN_FILE = Path(__file__).with_name("recipe.toml.in")  # of str.format
_EASY_TO_HARD = (  # of reasoning-gym: what a third of the training asks, after the third before it
    ("chain_sum:max_terms=2,min_digits=1,max_digits=2", "letter_counting:min_words=1,max_words=1"),
    ("chain_sum:max_terms=2,min_digits=2,max_digits=2", "letter_counting:min_words=2,max_words=2"),
    ("chain_sum:max_terms=3,min_digits=1,max_digits=2", "letter_counting:min_words=3,max_words=3"),
)


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a recipe, as it is printed."""

    arguments: Sequence[str]  # after "penstock", or of python where ``beside``
    beside: int = 0  # the port of a server for the commands after it; 0: it is none
    all_cores: bool = (
        False  # a thread on each; a tiny model gains nothing from a second, and `train --local` divides them
    )

    def __str__(self) -> str:
        return f"python {shlex.join(self.arguments)} &" if self.beside else f"penstock {shlex.join(self.arguments)}"


@dataclass(frozen=True, slots=True)
class Recipe:
    steps: int  # optimizer steps, unless --steps says otherwise
    make: Callable[[RecipeOptions, Path, int], list[Command]]  # writes the files of a run's folder
    reads: frozenset[str] = frozenset({"workers"})  # options beside seed, steps, run, dir, no_train and json


def run_recipe(name: str, cli_options: RecipeOptions) -> int:
    recipe = RECIPES[name]
    gguf = cli_options.gguf.absolute() if cli_options.gguf else None
    options = replace(cli_options, dir=cli_options.dir.absolute(), gguf=gguf, run=cli_options.run or name)
    try:
        commands = _made(name, recipe, options)
        if options.no_train:
            print(*(f"next: {command}" for command in commands), sep="\n", file=sys.stderr)
            return 0
        return _run(commands, options.dir / options.run)
    except PenstockError as err:
        print(error_text(f"penstock recipe: {err}"), file=sys.stderr)
        return 1


def _made(name: str, recipe: Recipe, options: RecipeOptions) -> list[Command]:
    check_run_id(options.run)
    given = {option for option in ("workers", "dtype", "gguf", "task") if getattr(options, option) is not None}
    if unread := sorted(given - recipe.reads):
        raise ConfigError(
            f"the recipe {name} does not read --{unread[0]}; it reads "
            f"{', '.join(f'--{option}' for option in sorted(recipe.reads))}, --seed, --steps, --run and --dir"
        )
    folder = options.dir / options.run
    if (folder / "run.toml").exists():
        raise ConfigError(
            f"{folder} has a run already; give another name with --run NAME, or resume it: penstock train "
            f"{folder / 'run.toml'} --local"
        )
    commands = recipe.make(options, folder, options.steps or recipe.steps)
    print(f"run file: {folder / 'run.toml'}", file=sys.stderr)
    return commands


def _run(commands: Sequence[Command], folder: Path) -> int:
    servers: list[Child] = []
    try:
        for command in commands:
            print(f"$ {command}", file=sys.stderr, flush=True)
            if command.beside:
                python = [sys.executable, *command.arguments]
                servers.append(Child("teacher", python, log=folder / "logs" / "teacher.log"))
                _start(servers[-1], command.beside)
                continue
            bound = parent_death.command_words(os.getpid(), signal.SIGTERM)  # Ctrl-C reaches it from the terminal
            line = [*bound, *launch.module("penstock", *command.arguments)]
            threads = {"OMP_NUM_THREADS": str(os.cpu_count() if command.all_cores else 1)}
            environ = os.environ if command.arguments[0] == "train" else threads | os.environ
            if code := subprocess.run(line, env=environ, check=False).returncode:
                return exit_status(code)
        return 0
    finally:
        for server in servers:
            server.stop()


def _start(server: Child, port: int) -> None:
    server.start()
    give_up = time.monotonic() + _TEACHER_DEADLINE_S
    while server.alive and time.monotonic() < give_up:
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    server.stop()
    raise DeployError(f"the teacher does not listen on port {port}; its log ends with\n{server.log_tail()}")


def _json(options: RecipeOptions) -> list[str]:
    return ["--json"] if options.json else []


# ---- recipes of a tiny model -----------------------------------------------------------------------------------------


def _tiny(task: QuickstartTask) -> Callable[[RecipeOptions, Path, int], list[Command]]:
    """Return how the recipe of a task like those of `penstock quickstart` is made."""

    def make(options: RecipeOptions, folder: Path, steps: int) -> list[Command]:
        start = _write_tiny(task, options, folder, steps)
        return [start, _train(options, folder, 2), _chat(options, task.question)]

    return make


def _write_tiny(task: QuickstartTask, options: RecipeOptions, folder: Path, steps: int) -> Command:
    train, sft = steps * task.groups_per_step, task.sft_steps * task.sft_batch
    task.write_data(folder / "data", seed=options.seed, num_sft=sft, num_train=train, num_eval=task.num_eval)
    write_model(folder / "start", seed=options.seed, shape=task.shape)
    run = quickstart.Options(
        options.seed, steps, options.workers or 2, options.run, folder, as_json=False, kill=False, engine="embedded", task=task
    )  # fmt: skip
    (folder / "run.toml").write_text(quickstart.run_file_text(run, folder / "run.toml"))
    return Command(["sft", str(folder / "run.toml"), f"model.path={folder / 'start'}"])


def _distillation(options: RecipeOptions, folder: Path, steps: int) -> list[Command]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    task = replace(
        SORT,
        lr=3e-4,
        algorithm=(
            'name = "on_policy_distillation"    # the reward is computed and reported, and changes nothing\n'
            "distill_clip = 2            # nats: a teacher that is sure of its answer would outweigh all other tokens"
        ),
        sections=f'\n[teacher]\nurl = "http://127.0.0.1:{port}"      # a larger model that sorts; see docs/distillation.md\n',
    )
    warm_up = _write_tiny(task, options, folder, steps)
    write_model(folder / "teacher-start", seed=options.seed, shape=TEACHER_SHAPE)
    run_file, teacher = str(folder / "run.toml"), folder / "teacher"
    task.write_data(
        folder / "teacher-data", seed=options.seed + 1, num_sft=TEACHER_STEPS * SORT.sft_batch, num_train=1, num_eval=1
    )
    learn = [
        f"model.path={folder / 'teacher-start'}",
        f"sft.data={folder / 'teacher-data' / 'sft.jsonl'}",
        f"sft.output={teacher}",
    ]
    serve = ["-P", "-m", "penstock.rollout_service.embedded_engine", "--model-path", str(teacher), "--port", str(port)]
    return [
        Command(["sft", run_file, *learn, f"sft.steps={TEACHER_STEPS}", f"run.id={options.run}-teacher"]),
        warm_up,
        Command(serve, beside=port),
        _train(options, folder, 1),
        _chat(options, task.question),
    ]


def _train(options: RecipeOptions, folder: Path, workers: int) -> Command:
    number = str(options.workers or workers)
    return Command(["train", str(folder / "run.toml"), "--local", "--workers", number, *_json(options)])


def _chat(options: RecipeOptions, question: str) -> Command:
    return Command(["chat", options.run, f"run.dir={options.dir}", "--prompt", question])


# ---- recipes of a pretrained model -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Problems:
    learns: str
    system_prompt: str
    max_prompt_tokens: int
    max_new_tokens: int
    reward: str  # the section, as TOML
    question: str
    data: str = ""  # lines of the section [data]
    sections: str = ""  # of the run file, beside those of every recipe


def sums(*, held_out: bool) -> list[tuple[int, int]]:
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    return [pair for pair in pairs if (zlib.crc32(sum_question(*pair).encode()) % 10 == 0) == held_out]


def sum_question(a: int, b: int) -> str:
    return f"{a}+{b}="


def write_sums(folder: Path, *, seed: int, num_eval: int) -> list[tuple[int, int]]:
    """Write ``sft.jsonl``, ``train.jsonl`` and ``eval.jsonl``; return the sums to train on, in order.

    The held-out sums are the same for every seed, so that runs can be compared.
    """
    seen, unseen = sums(held_out=False), sums(held_out=True)
    random.Random(seed).shuffle(seen)  # noqa: S311 - data, not secrets
    random.Random(_EVAL_SEED).shuffle(unseen)  # noqa: S311 - the same
    examples = (chat_row(sum_question(a, b), str(a + b)) for a in range(10) for b in range(10))
    write_files(folder, sft=examples, train=map(_prompt, seen), held_out=map(_prompt, unseen[:num_eval]))
    return seen


def _prompt(pair: tuple[int, int]) -> Row:
    return prompt_row(sum_question(*pair), "exact_match", str(sum(pair)))


def _smollm2(options: RecipeOptions, folder: Path, steps: int) -> list[Command]:
    if options.task is None:
        write_sums(folder / "data", seed=options.seed, num_eval=HELD_OUT)
        problems = _SUMS
    else:
        problems = _gym_problems(options, folder, steps, [[options.task]], f"the task {options.task} of reasoning-gym")
    return _pretrained(options, folder, steps, problems)


def _curriculum(options: RecipeOptions, folder: Path, steps: int) -> list[Command]:
    problems = _gym_problems(options, folder, steps, _EASY_TO_HARD, "tasks of reasoning-gym, from easy to hard")
    return _pretrained(
        options, folder, steps, replace(problems, data="shuffle = false             # from easy to hard\n")
    )


def _pretrained(options: RecipeOptions, folder: Path, steps: int, problems: Problems) -> list[Command]:
    warm_up = _write_pretrained(options, folder, steps, problems)
    return [warm_up, _train(options, folder, 1), _chat(options, problems.question)]


def _dpo(options: RecipeOptions, folder: Path, steps: int) -> list[Command]:
    """Write pairs of the right sum and a wrong one, and the commands that evaluate before and after."""
    data = folder / "data"
    seen = write_sums(data, seed=options.seed, num_eval=HELD_OUT)
    rng = random.Random(f"{options.seed} pairs")  # noqa: S311 - data, not secrets
    write_rows(data / "pairs.jsonl", (_pair(pair, rng) for pair in seen[: steps * DPO_BATCH]))
    problems = replace(
        _SUMS,
        learns="which of two answers to a sum is preferred",
        sections=(
            f'\n[dpo]\ndata = "{data / "pairs.jsonl"}"\nsteps = {steps}\nbatch_size = {DPO_BATCH}\nlr = {LR}\nwarmup_steps = 5\n'
            f'output = "{folder / "dpo"}"\n'
        ),
    )
    warm_up = _write_pretrained(options, folder, steps, problems)
    run_file = str(folder / "run.toml")
    evaluate = ["--data", str(data / "eval.jsonl"), *_json(options)]
    before, after = (
        Command(["eval", str(folder / model), run_file, *evaluate], all_cores=True) for model in ("sft", "dpo")
    )
    return [warm_up, before, Command(["dpo", run_file], all_cores=True), after]


def _pair(pair: tuple[int, int], rng: random.Random) -> Row:
    right = sum(pair)
    wrong = right + rng.choice((-10, -2, -1, 1, 2, 10))  # a wrong carry or a wrong last digit
    return {**prompt_row(sum_question(*pair), "exact_match"), "chosen": str(right), "rejected": str(wrong)}


def _write_pretrained(options: RecipeOptions, folder: Path, steps: int, problems: Problems) -> Command:
    dtype = fast_dtype(Path("/proc/cpuinfo").read_text()) if options.dtype in {None, "auto"} else options.dtype
    model = options.gguf or fetch_model(options.dir / "models")
    run_file = folder / "run.toml"
    run_file.write_text(
        _RUN_FILE.read_text(encoding="utf-8").format(
            options=replace(options, dtype=dtype, steps=steps),
            problems=problems,
            folder=folder,
            groups_per_step=GROUPS_PER_STEP,
            micro_batch_tokens=MICRO_BATCH_TOKENS,
            lr=LR,
            warmup_steps=min(10, steps // 2),
            eval_every=max(1, steps // 6),
            sft_steps=SFT_STEPS,
            sft_batch=SFT_BATCH,
            sft_lr=SFT_LR,
        )
    )
    return Command(["sft", str(run_file), f"model.path={model}"], all_cores=True)


_SUMS = Problems(
    learns="to add two-digit numbers",
    system_prompt=SUMS_SYSTEM_PROMPT,
    max_prompt_tokens=64,
    max_new_tokens=SUMS_MAX_NEW_TOKENS,
    reward='name = "exact_match"',
    question=sum_question(*sums(held_out=True)[0]),
)


def _gym_problems(
    options: RecipeOptions, folder: Path, steps: int, stages: Sequence[Sequence[str]], learns: str
) -> Problems:
    written = reasoning_gym_tasks.write_data(
        folder / "data",
        [[reasoning_gym_tasks.parse_task(name) for name in stage] for stage in stages],
        seed=options.seed,
        num_train=steps * GROUPS_PER_STEP,
        num_eval=HELD_OUT,
        num_warm_up=SFT_STEPS * SFT_BATCH,
    )
    # A token has at least one character; the template and the system prompt have few.
    max_prompt_tokens = written.longest_question + TEMPLATE_TOKENS
    max_new_tokens = written.longest_answer + SPARE_TOKENS
    if max_prompt_tokens + max_new_tokens > MICRO_BATCH_TOKENS:
        raise ConfigError(
            f"--task {options.task}: a question has up to {written.longest_question} characters and an answer "
            f"{written.longest_answer}, more than this recipe's {MICRO_BATCH_TOKENS} tokens; "
            "choose options with shorter ones"
        )
    reward = reasoning_gym_tasks.REWARD
    return Problems(
        learns=learns,
        system_prompt=reasoning_gym_tasks.SYSTEM_PROMPT,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        reward=f'name = "{reward}"\nsuccess = {{ "{reward}" = 1.0 }}      # its scores are 0 to 1',
        question=written.question,
    )


_PRETRAINED = frozenset({"dtype", "gguf"})
RECIPES = {
    "smollm2": Recipe(120, _smollm2, _PRETRAINED | {"workers", "task"}),
    "curriculum": Recipe(90, _curriculum, _PRETRAINED | {"workers"}),
    "tools": Recipe(TOOLS.steps, _tiny(TOOLS)),
    "lake": Recipe(LAKE.steps, _tiny(LAKE)),
    "dpo": Recipe(60, _dpo, _PRETRAINED),
    "distillation": Recipe(120, _distillation),
}


if __name__ == "__main__":
    from penstock.console.cli.main import run_verb

    run_verb("recipe")
