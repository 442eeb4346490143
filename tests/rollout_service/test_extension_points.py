"""A new engine and a new environment: one file each, in the packages or in the user's own folder, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.protocol.config.run_file import load
from penstock.protocol.errors import ConfigError
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.engines.engine_kind import ENGINES, EngineSite, create_engine
from penstock.rollout_service.environments.environment import load_environments
from penstock.rollout_service.settings import RolloutSettings

ROOT = Path(__file__).parents[2]
ENGINE = '''
"""An engine whose HTTP API is SGLang's, with one option."""

from penstock.protocol.config.connection import Section
from penstock.rollout_service.engines.engine_kind import EngineKind
from penstock.rollout_service.engines.sglang.client import SglangClient


class Options(Section):
    """Its options."""

    lanes: int = 1


TINY = EngineKind("tiny", SglangClient, options=Options, update_modes=("drain", "abort"))
'''
ENVIRONMENT = '''
"""An environment that answers nothing."""

from penstock.rollout_service.environments.environment import Environment


class Silent(Environment):
    name = "silent"

    async def rollout(self, tasks, sampler):
        return [[] for _ in tasks]


SILENT = Silent()
'''
BUILT_IN = {
    "calculator", "frozen_lake", "gem", "guess_number", "gymnasium", "harbor", "http", "lookup", "mcp", "nemo_gym", "openenv", "program",
    "single_turn", "sokoban", "tools", "trl", "verifiers",
}  # fmt: skip
ATTACHED = ("run.id=demo", "worker.engine_url=http://127.0.0.1:1")


@pytest.fixture
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with both as the user's own modules."""
    (tmp_path / "own_engine.py").write_text(ENGINE)
    (tmp_path / "own_environment.py").write_text(ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("own_engine", "own_environment"):
        sys.modules.pop(name, None)


def settings(*overrides: str) -> RolloutSettings:
    return load(RolloutSettings, overrides=[*ATTACHED, *overrides]).settings


@pytest.mark.parametrize("reference", ["own_engine:TINY", "own_engine.py:TINY"])
def test_an_engine_of_the_user_is_found_by_module_or_file(own_files: Path, reference: str) -> None:
    """Its options are checked by its own class, and the worker builds it like a built-in one."""
    loaded = settings(f"worker.engine={reference}", "worker.engine_options={lanes = 3}")
    assert loaded.engine_options.model_dump() == {"lanes": 3}
    site = EngineSite(["http://a:1", "http://b:2"], "", own_files, 10.0, 10.0, {})
    assert type(create_engine(loaded.worker.kind, loaded.engine_options, site)).__name__ == "EnginePool"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["worker.engine=own_engine:TINY", "worker.engine_options={lanes = 'two'}"],
            r"engine_options\.lanes: Input should be",
        ),
        (
            ["worker.engine=own_engine:TINY", "worker.engine_options={speed = 2}"],
            r"engine_options\.speed: Extra inputs",
        ),
        (["worker.engine=own_engine:TINY", "worker.update_mode=in_place"], "use one of drain, abort"),
        (["worker.engine=own_engine:OTHER"], "has no attribute 'OTHER'"),
        (["worker.engine=sgland-url"], "did you mean 'sglang-url'"),
        (["worker.engine=sglang-url", "worker.environments=['own_engine:TINY']"], "expected an instance of"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(own_files: Path, overrides: list[str], words: str) -> None:
    """When the run file is read, with the setting's name."""
    with pytest.raises(ConfigError, match=words):
        settings(*overrides)


def test_the_options_of_an_engine_with_a_section_are_in_the_section() -> None:
    with pytest.raises(ConfigError, match=r"options of engine 'vllm' are in \[vllm\]"):
        load(RolloutSettings, overrides=["run.id=demo", "worker.engine=vllm", "worker.engine_options={dtype = 'auto'}"])


def test_every_built_in_engine_is_found() -> None:
    """Each package of engines registers its kinds; those with a section find their options there."""
    assert {"embedded", "sglang", "sglang-url", "vllm", "vllm-url"} <= set(ENGINES.names())
    for name in ("embedded", "sglang", "vllm"):
        loaded = load(RolloutSettings, overrides=["run.id=demo", f"worker.engine={name}"]).settings
        kind = loaded.worker.kind
        assert loaded.engine_options is getattr(loaded, kind.section)
        assert kind.launches is not None
        [launch] = kind.launches(loaded.engine_options, {})
        assert "/cache/v7" in launch.command(Path("/cache/v7"), PolicyVersion(7), Path("/cache/port"))


def test_an_environment_of_the_user_is_found_only_where_the_run_file_names_it(own_files: Path) -> None:
    """A task's text alone never has code loaded."""
    assert set(load_environments(())) == BUILT_IN
    loaded = settings("worker.engine=sglang-url", "worker.environments=['own_environment.py:SILENT']")
    assert set(load_environments(loaded.worker.environments)) == {*BUILT_IN, "silent"}


def test_two_environments_of_one_name_are_refused(own_files: Path) -> None:
    (own_files / "own_environment.py").write_text(ENVIRONMENT.replace('"silent"', '"single_turn"'))
    with pytest.raises(ConfigError, match=r"own_environment.py:SILENT.*rename it"):
        load_environments(("own_environment.py:SILENT",))
