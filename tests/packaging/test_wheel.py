"""The wheel installs one complete package named penstock and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

import penstock
from tests.packaging.conftest import OURS, ROOT

_BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "src", ".gitignore", *OURS[1:])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the wheel is built from, with a secret in the folder where `make_secrets` writes."""
    copy = tmp_path_factory.mktemp("source")
    for name in _BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "secrets")
            )
        else:
            shutil.copy(ROOT / name, copy / name)
    secrets = copy / "deploy" / "secrets"
    secrets.mkdir()
    (secrets / "nats_trainer").write_text("secret")
    return copy


def build(source: Path, folder: Path) -> zipfile.ZipFile:
    """Build the wheel without the network, and open it."""
    command = [sys.executable, "-P", "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    command += ["--disable-pip-version-check", "--wheel-dir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel)


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return build(source, tmp_path_factory.mktemp("wheel"))


def _expected(source: Path) -> set[str]:
    files = {f"penstock/{path.name}" for path in (source / "src" / "penstock").iterdir() if path.is_file()}
    for name in OURS[1:]:
        inside = [path for path in (source / name).rglob("*") if path.is_file() and "secrets" not in path.parts]
        files |= {f"penstock/{path.relative_to(source)}" for path in inside}
    return files


def test_only_penstock_is_installed(wheel: zipfile.ZipFile):
    """Nothing else lands in site-packages: no `trainer`, no `protocol`, no `tests`."""
    version = penstock.__version__
    assert {name.split("/")[0] for name in wheel.namelist()} == {"penstock", f"penstock-{version}.dist-info"}


def test_the_wheel_holds_every_file_of_the_packages_and_no_secret(wheel: zipfile.ZipFile, source: Path):
    """Modules, py.typed, the stubs for SGLang, nats.conf and compose.yaml are in it; deploy/secrets is not."""
    held = {name for name in wheel.namelist() if not name.startswith("penstock-")}
    assert held == _expected(source)
    assert held >= {
        "penstock/py.typed",
        "penstock/__main__.py",
        "penstock/deploy/nats.conf",
        "penstock/deploy/compose.yaml",
        "penstock/deploy/sglang_cpu/lock.txt",
        "penstock/deploy/sglang_cpu/stubs/triton/__init__.py",
    }
    assert not [name for name in held if "secrets/" in name or "/tests/" in name.replace("inside/tests", "")]


def test_an_archive_without_gitignore_holds_no_secret(source: Path, tmp_path: Path):
    copy = tmp_path / "source"
    shutil.copytree(source, copy, symlinks=True, ignore=shutil.ignore_patterns(".gitignore"))
    (tmp_path / "wheel").mkdir()
    assert not [name for name in build(copy, tmp_path / "wheel").namelist() if "secrets/" in name]


def test_the_metadata_name_version_command_and_license(wheel: zipfile.ZipFile):
    info = f"penstock-{penstock.__version__}.dist-info"
    metadata = message_from_string(wheel.read(f"{info}/METADATA").decode())
    assert (metadata["Name"], metadata["Version"]) == ("penstock", penstock.__version__)
    assert wheel.read(f"{info}/entry_points.txt").decode().split() == [
        *("[console_scripts]", "penstock", "=", "penstock.console.cli.main:main")
    ]
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
