"""Every setting is read by a service: none is accepted and then forgotten."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from penstock.console.tools import explain_settings
from penstock.protocol.config.setting_description import ANY_NAME
from penstock.rollout_service.engines.sglang.kind import SglangSettings
from penstock.rollout_service.engines.vllm.kind import VllmSettings

ROOT = Path(__file__).parents[2]
_PACKAGES = (
    "protocol",
    "serving",
    "trainer",
    "fine_tuning",
    "rollout_service",
    "agents",
    "reward_service",
    "console/tracking",
    "deploy",
    "forensics",
)
_CHECKS = ("field_validator", "model_validator")  # a setting that only these read is checked, and has no effect


def names_read(tree: ast.AST) -> Iterator[str]:
    """Yield every attribute that code reads, outside the checks of a settings class, and every keyword-only parameter."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            if any(isinstance(one, ast.Call) and getattr(one.func, "id", "") in _CHECKS for one in node.decorator_list):
                continue
            yield from (argument.arg for argument in node.args.kwonlyargs)  # an option of a part of the algorithm
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        yield from names_read(node)


def unread(keys: Collection[str], read: Collection[str]) -> list[str]:
    """Return the keys whose last word no code reads; tables of the user's own names are read as a whole."""
    return [key for key in keys if ANY_NAME not in key and key.rpartition(".")[2] not in read]


def test_every_setting_is_read() -> None:
    """By its name, somewhere outside the validators; and a setting that nothing reads is found."""
    files = [file for package in _PACKAGES for file in (ROOT / package).rglob("*.py")]
    read = {name for file in files for name in names_read(ast.parse(file.read_text(encoding="utf-8")))}
    flags = {name for kind in (SglangSettings, VllmSettings) for name in kind.model_fields if kind.flag_of(name)}
    assert unread(explain_settings.load_reference().settings, read | flags) == []
    assert unread(["trainer.steps", "trainer.forgotten_setting"], read) == ["trainer.forgotten_setting"]


def test_a_validator_is_no_reader() -> None:
    checked = "class A:\n    @model_validator(mode='after')\n    def f(self):\n        return self.steps\n"
    assert set(names_read(ast.parse(checked))) == set()
    assert set(names_read(ast.parse(checked.replace("model_validator(mode='after')", "property")))) == {"steps"}


def test_the_seed_has_the_readers_that_its_description_names() -> None:
    """Order, mini-batches, samples and episodes, first values and dropout; another reader has to be named there."""
    readers = {
        str(file.relative_to(ROOT))
        for package in _PACKAGES
        for file in (ROOT / package).rglob("*.py")
        if re.search(r"\b(settings\.run\.seed|self\.run\.seed|first_seed)\b", file.read_text(encoding="utf-8"))
    }
    assert readers == {
        "trainer/assemble.py",  # of evaluations
        "trainer/data/data_order.py",
        "trainer/groups/group_source.py",
        "trainer/learner/learner.py",
        "trainer/settings.py",
        "trainer/learner/planning.py",
        "trainer/learner/trainable.py",  # adapters' first values
        "fine_tuning/session.py",
    }
    described = explain_settings.load_reference().settings["run.seed"].description
    for what in (
        "order of the prompts and examples",
        "mini-batches",
        "adapters' first values",
        "dropout",
        "completion and episode",
    ):
        assert what in described
