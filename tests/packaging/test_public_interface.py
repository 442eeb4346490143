"""The public interface: nothing is removed from it or changed without this list.

A change that is meant changes tests/data/public_interface.txt, and has an entry in CHANGELOG.md.
``python -m tests.packaging.test_public_interface`` writes the list.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
from typing import Any

import penstock
from tests.packaging.conftest import ROOT

LIST = ROOT / "tests" / "data" / "public_interface.txt"


def describe(value: Any) -> list[str]:
    """Return kind and signature of a public object, and of each public member of a Penstock class."""
    if not inspect.isclass(value):
        return [_signature("function", value)] if inspect.isroutine(value) else [type(value).__name__]
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    kind = "dataclass" if dataclasses.is_dataclass(value) else "class"
    signature = "" if issubclass(value, Exception) else str(inspect.signature(value))
    # typing caches Annotated types, and Gt(0) equals Gt(0.0): either may be shown
    signature = re.sub(r"(?<=[=(])(-?[0-9]+)[.]0(?=[),])", r"\1", signature)
    lines = [f"{kind}({bases}) {_without_addresses(signature)}".strip()]
    for name in sorted(name for name in dir(value) if not name.startswith("_")):
        member = inspect.getattr_static(value, name)
        if (owner := _owner(value, name)) is None or not owner.__module__.startswith("penstock."):
            continue
        if inspect.isfunction(member) or isinstance(member, staticmethod | classmethod):
            lines.append(_signature(name, getattr(value, name)))
        else:
            lines.append(name)
    return lines


def _owner(cls: type, name: str) -> type | None:
    return next((base for base in cls.__mro__ if name in vars(base)), None)


def _signature(name: str, function: Any) -> str:
    return _without_addresses(f"{name}{inspect.signature(function)}")


def _without_addresses(text: str) -> str:
    """Return a signature without the addresses of functions that are defaults, which vary."""
    return re.sub(r" at 0x[0-9a-f]+>", ">", text)


def listing() -> list[str]:
    """Return a line for each public name with its kind and signature, and an indented one for each of its public members."""
    lines = []
    for name in sorted(penstock.__all__):
        first, *members = describe(getattr(penstock, name))
        lines += [f"{name}: {first}", *(f"    {member}" for member in members)]
    return lines


def test_the_public_interface_is_the_list():
    """Names, kinds, signatures and members are those that users were given."""
    assert listing() == LIST.read_text(encoding="utf-8").splitlines()


def test_import_penstock_is_light():
    code = (
        "import sys; before = set(sys.modules); import penstock\n"
        "more = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert not [name for name in sys.modules if name.startswith('penstock.')]\n"
        "assert more - set(sys.stdlib_module_names) == {'penstock'}, more\n"
        "assert {*penstock.__all__} <= set(dir(penstock))\n"
        "[getattr(penstock, name) for name in penstock.__all__]\n"
        "assert 'torch' not in sys.modules\n"
        "try: penstock.nothing\n"
        "except AttributeError as err: assert 'public are' in str(err)\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=300)


def test_every_public_name_is_documented():
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    assert [name for name in penstock.__all__ if name not in text] == []


if __name__ == "__main__":
    LIST.write_text("".join(f"{line}\n" for line in listing()), encoding="utf-8")
