"""Install the wheel alone in an empty environment and run the quickstart there: ``make wheel-test``.

The dependencies are those of the environment that runs this, so nothing is downloaded. The working directory is
full of modules named like Penstock's and all installed ones; none of them may be imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from tests.packaging.conftest import ROOT, HostileFolder
from tests.packaging.test_wheel import build

STEPS = 20


def install(base: Path) -> Path:
    """Make an environment below ``base`` with the wheel in it; returns its folder of programs."""
    (base / "wheel").mkdir()
    wheel = Path(str(build(ROOT, base / "wheel").filename))
    venv.create(base / "venv", with_pip=False, symlinks=True)
    (site_packages,) = (base / "venv" / "lib").glob("python*/site-packages")
    python = str(base / "venv" / "bin" / "python")
    command = [sys.executable, "-P", "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--disable-pip-version-check", str(wheel)], check=True, cwd=base)
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site_packages / "dependencies.pth").write_text("\n".join(others) + "\n")  # behind the wheel
    return Path(python).parent


def main() -> None:
    """Build, install, run; exits with an error when anything is not as it should be."""
    with tempfile.TemporaryDirectory(prefix="penstock-wheel-") as name:
        base = Path(name)
        programs = install(base)
        folder = HostileFolder(base / "here", base / "imported")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PENSTOCK_"))}
        environ["PATH"] = os.pathsep.join((str(programs), str(Path(sys.executable).parent), environ["PATH"]))
        where = subprocess.run(
            [str(programs / "python"), "-P", "-c", "import penstock; print(penstock.__file__)"],
            cwd=folder.path, env=environ, capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
        assert Path(where).is_relative_to(base / "venv"), where
        done = subprocess.run(
            [str(programs / "penstock"), "quickstart", "--steps", str(STEPS), "--dir", str(base / "runs"), "--json"],
            cwd=folder.path, env=environ, stdout=subprocess.PIPE, text=True, timeout=900, check=False,
        )  # fmt: skip
        assert folder.imported() == "", folder.imported()
        assert done.returncode == 0, f"penstock quickstart ended with {done.returncode}"
        result = json.loads(done.stdout.splitlines()[-1])
        assert result["steps"] == STEPS, result
        print(f"{where}: {STEPS} steps in {result['wall_s']:.0f} s, nothing imported from the working directory")


if __name__ == "__main__":
    main()
