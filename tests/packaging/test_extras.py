"""Each extra of the wheel installs what its service imports: here every other package is hidden from it."""

from __future__ import annotations

import functools
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.conftest import ROOT

SERVICES = {
    "": ["console.cli.main", "client", "console.tools.weights", "console.registry.versions"],
    "console": ["console.web.app", "console.web.serve"],
    "engine": ["rollout_service.embedded_engine.run_engine", "rollout_service.embedded_engine.http.app"],
    "reward": ["reward_service.service", "reward_service.hosting.served_reward", "reward_service.hosting.chat_rewards"],
    "reward-model": ["reward_model.served_model", "reward_service.hosting.served_reward"],
    "rollout": ["rollout_service.__main__", "agents.hosting.serve", "agents.proxy.server"],
    "trainer": ["trainer.__main__", "trainer.assemble", "fine_tuning.__main__"],
}  # fmt: skip

_owners = functools.cache(metadata.packages_distributions)
PROGRAM = """
import importlib, importlib.machinery, sys

class Visible(importlib.machinery.PathFinder):
    hidden = frozenset(sys.argv[1].split(","))
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in cls.hidden else super().find_spec(name, path, target)

sys.meta_path[:] = [Visible if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
for module in sys.argv[2:]:
    importlib.import_module(f"penstock.{module}")
"""


def required(extra: str) -> set[str]:
    """Return the names of the distributions that an installation with an extra has, as far as they are installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found, waiting = set[str](), [*project["dependencies"], *project["optional-dependencies"].get(extra, [])]
    while waiting:
        wanted = Requirement(waiting.pop())
        extras = wanted.extras or {""}
        if wanted.marker is not None and not any(wanted.marker.evaluate({"extra": name}) for name in extras):
            continue
        if canonicalize_name(wanted.name) in found or not any(metadata.distributions(name=wanted.name)):
            continue
        found.add(canonicalize_name(wanted.name))
        for text in metadata.requires(wanted.name) or ():
            one = Requirement(text)
            if one.marker is None or any(one.marker.evaluate({"extra": name}) for name in extras):
                waiting.append(str(one).partition(";")[0])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("extra", SERVICES)
def test_an_extra_has_what_its_service_imports(extra: str) -> None:
    present = required(extra)
    hidden = {
        module
        for module, owners in _owners().items()
        if module != "penstock" and not present & {canonicalize_name(owner) for owner in owners}
    }
    assert {"pytest", "schemathesis"} <= hidden
    child = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, ",".join(sorted(hidden)), *SERVICES[extra]],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
