"""`verifiers`: tasks, harnesses and rewards of the library verifiers; each episode is a program in a Python that has it installed.

Its harness talks to the token-exact proxy as to any model. The program is `verifiers_runner.py`, which ends as every program does (`program.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Self

from pydantic import Field, JsonValue

from penstock.agents.environments.episode_environment import PlayOptions
from penstock.agents.environments.program import Program, ProgramOptions
from penstock.agents.environments.shared_options import ProcessOptions
from penstock.protocol.config.environment_settings import EnvironmentDefinition

_RUNNER = Path(__file__).with_name("verifiers_runner.py")


class VerifiersOptions(ProcessOptions, PlayOptions):
    """What verifiers plays, and with which interpreter."""

    python: str = Field(
        min_length=1, description="An interpreter that has verifiers 0.4; it needs nothing of Penstock."
    )
    config: dict[str, JsonValue] = Field(
        description="The block [env] of verifiers: taskset.id, and what else differs from its defaults."
    )
    folder: str = Field(
        ".",
        description="Where it starts, relative to the worker's working folder; tasksets are imported from there too.",
    )
    version: str = Field("", max_length=200, description="Recorded with each episode; raise it when the tasks change.")


class Verifiers(Program):
    name = "verifiers"
    options = VerifiersOptions

    def defined(self, name: str, definition: EnvironmentDefinition) -> Self:
        other = super().defined(name, definition)
        chosen: VerifiersOptions = other.chosen
        folder = str(Path(chosen.folder).absolute())
        command = [chosen.python, str(_RUNNER), json.dumps(chosen.config)]
        kept = {name: getattr(chosen, name) for name in ("folder", "pass_variables", "version")}
        variables = {"PYTHONPATH": folder, **chosen.variables}
        other.chosen = ProgramOptions.model_validate({"command": command, "variables": variables, **kept})
        return other


VERIFIERS = Verifiers()
