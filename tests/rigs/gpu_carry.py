"""What `make gpu-check` needs on a machine with its own Python, torch and transformers, and no network: `make gpu-carry OUT=folder`.

    python -m tests.rigs.gpu_carry OUT                                  # OUT/tree and OUT/wheels.txt
    python -m tests.rigs.gpu_carry OUT --wheels --python 3.12 --there installed.txt --without-run

``--there`` is a file with the names of what the machine has (`pip list --format=freeze` there); without it torch with what that requires, and what
comes with transformers. ``--without-run`` leaves out what only the last part of the check needs: the servers of NATS and S3. Nothing above
64 MiB is written: what is largest is named. On that machine: `sh OUT/gpu-check.sh`.
"""

from __future__ import annotations

import argparse
import ast
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.lines import ROOT, tracked

MOST_BYTES = 64 * 2**20
WITH_TRANSFORMERS = {
    "transformers", "tokenizers", "safetensors", "huggingface-hub", "hf-xet", "numpy", "regex", "pyyaml",
}  # fmt: skip
_CHECK = "tests/rigs/gpu_check.py"
_EXTRAS, _EXTRAS_OF_RUN = ("trainer",), ("engine", "reward", "rollout", "local")
_SCRIPT = """\
#!/bin/sh
# Runs the check in an environment that adds the carried wheels to this machine's packages; arguments are the check's, $OUT its folder.
set -e
here=$(cd "$(dirname "$0")" && pwd)
python3 -m venv --system-site-packages "$here/venv"
"$here/venv/bin/python" -m pip install -q --no-index --no-deps --find-links "$here/wheels" -r "$here/wheels.txt"
"$here/venv/bin/python" -c "import pathlib, site, sys; pathlib.Path(site.getsitepackages()[0], 'penstock.pth').write_text(sys.argv[1])" "$here/tree/src"
cd "$here/tree" && exec "$here/venv/bin/python" -m tests.rigs.gpu_check "$@"
"""


def files() -> list[Path]:
    """Return the files of the packages, relative to the root, and the check with what it imports beside them."""
    links = [path for path in (ROOT / "src" / "penstock").iterdir() if path.is_symlink()]
    packages = {str(link.resolve().relative_to(ROOT)) for link in links}
    chosen = [path for path in tracked("") if path.parts[0] in packages and not path.name.endswith((".md", ".png"))]
    return sorted({*chosen, *_source(), Path("pyproject.toml"), *_beside(Path(_CHECK))})


def _source() -> list[Path]:
    return [
        path.relative_to(ROOT) for path in (ROOT / "src" / "penstock").iterdir() if path.is_symlink() or path.is_file()
    ]


def _beside(module: Path, seen: frozenset[Path] = frozenset()) -> set[Path]:
    """Return a module of tests/ or benchmarks/ with its data, those of them that it imports, and theirs."""
    near = (module.with_name("__init__.py"), module.with_suffix(".json"))
    found = {module, *(file for file in near if (ROOT / file).is_file())}
    for node in ast.walk(ast.parse((ROOT / module).read_text())):
        names = (
            [node.module or "", *(f"{node.module}.{one.name}" for one in node.names)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        for name in names:
            file = Path(*name.split(".")).with_suffix(".py")
            if file.parts[0] in ("tests", "benchmarks") and (ROOT / file).is_file() and file not in seen | found:
                found |= _beside(file, seen | found)
    return found


def required(requirements: Iterable[str]) -> set[str]:
    """Return the names of installed distributions that these requirements lead to."""
    found, waiting = set[str](), [(text, "") for text in requirements]
    while waiting:
        text, extra = waiting.pop()
        wanted = Requirement(text)
        name = canonicalize_name(wanted.name)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        if name in found or not any(metadata.distributions(name=name)):
            continue
        found.add(name)
        waiting += [(inner, one) for inner in metadata.requires(name) or () for one in wanted.extras or {""}]
    return found


def wheels(*, there: Iterable[str] = (), with_run: bool = True) -> list[str]:
    """Return what must be installed besides what is ``there``, as NAME==VERSION."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (*_EXTRAS, *(_EXTRAS_OF_RUN if with_run else ()))
    wanted = [*project["dependencies"], *(text for extra in extras for text in project["optional-dependencies"][extra])]
    present = {canonicalize_name(name) for name in there} or WITH_TRANSFORMERS | required(["torch"])
    direct = [
        text for text in wanted if canonicalize_name(Requirement(text).name) not in present | {"torch", "transformers"}
    ]
    return sorted(f"{name}=={metadata.version(name)}" for name in required(direct) - present)


def carry(out: Path, *, there: Iterable[str] = (), with_run: bool = True) -> None:
    """Copy the files, and write the list of wheels and the script."""
    for path in files():
        (out / "tree" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, out / "tree" / path, follow_symlinks=False)
    (out / "wheels.txt").write_text("\n".join(wheels(there=there, with_run=with_run)) + "\n")
    (out / "gpu-check.sh").write_text(_SCRIPT)


def fetch(out: Path, python: str) -> None:
    """Download each wheel for the machine's Python, or build it where a release has none; raises CalledProcessError."""
    pip, folder = [sys.executable, "-m", "pip"], str(out / "wheels")
    platforms = [word for name in ("manylinux2014_x86_64", "manylinux_2_28_x86_64") for word in ("--platform", name)]
    for wheel in (out / "wheels.txt").read_text().split():
        download = [*pip, "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version", python, *platforms]
        if subprocess.run([*download, "-d", folder, wheel], check=False, capture_output=True).returncode:
            subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", folder, wheel], check=True)


def largest(out: Path) -> tuple[int, str]:
    """Return the bytes in all, and the names of the largest files."""
    sizes = {path: path.lstat().st_size for path in out.rglob("*") if path.is_file() and not path.is_symlink()}
    most = sorted(sizes, key=lambda path: -sizes[path])[:5]
    return sum(sizes.values()), ", ".join(f"{path.name} {sizes[path] / 2**20:.1f} MiB" for path in most)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--there", type=Path, help="file with the names of what the machine has installed")
    parser.add_argument("--without-run", action="store_true", help="leave out what only the part `run` needs")
    parser.add_argument("--wheels", action="store_true", help="download the wheels too")
    parser.add_argument("--python", default="3.12", help="version of the machine's Python")
    options = parser.parse_args()
    there = [line.partition("==")[0] for line in options.there.read_text().split()] if options.there else ()
    carry(options.out, there=there, with_run=not options.without_run)
    if options.wheels:
        fetch(options.out, options.python)
    num_bytes, names = largest(options.out)
    print(f"{options.out}: {num_bytes / 2**20:.1f} MiB; the largest: {names}")
    if num_bytes > MOST_BYTES:
        print("gpu-carry: more than 64 MiB; give --there what the machine has, or --without-run", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
