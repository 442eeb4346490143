"""The public interface: nothing is removed from it or changed without this list.

A change that is meant changes the list, and has an entry in CHANGELOG.md. The failing test prints the new lines.
"""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from typing import Any

import penstock
from tests.packaging.conftest import ROOT

# Public name -> kind and signature, then its public members likewise.
INTERFACE: dict[str, list[str]] = {
    "ConfigError": ["class(PenstockError)"],
    "Extension": [
        "dataclass(Generic) (name: 'str', value: 'Kind', digest: 'str' = '') -> None",
        "digest",
        "name",
        "value",
    ],
    "PenstockError": ["class(Exception)"],
    "Registry": [
        "class(Generic) (kind: 'str', expected: 'type[Kind]', *, package: 'str', group: 'str') -> 'None'",
        "built_in",
        "find(self, name: 'str') -> 'Extension[Kind]'",
        "names(self) -> 'tuple[str, ...]'",
    ],
    "__version__": ["str"],
}


def describe(value: Any) -> list[str]:
    """Return kind and signature of a public object, and of each public member of a class of ours."""
    if not inspect.isclass(value):
        return [_signature("function", value)] if inspect.isroutine(value) else [type(value).__name__]
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    kind = "dataclass" if dataclasses.is_dataclass(value) else "class"
    lines = [f"{kind}({bases}) {'' if issubclass(value, Exception) else inspect.signature(value)}".strip()]
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
    return f"{name}{inspect.signature(function)}"


def test_the_public_interface_is_the_list():
    """Names, kinds, signatures and members are those that users were given."""
    found = {name: describe(getattr(penstock, name)) for name in sorted(penstock.__all__)}
    shown = "\n".join(f"    {name!r}: {lines!r}," for name, lines in found.items() if INTERFACE.get(name) != lines)
    gone = sorted(set(INTERFACE) - set(found))
    assert found == INTERFACE, f"removed: {gone}; new or changed:\n{shown}"


def test_import_penstock_is_light():
    """``import penstock`` imports no other module of ours and no library; its names need no torch."""
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
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


def test_every_public_name_is_documented():
    """docs/extending.md names each."""
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    assert [name for name in penstock.__all__ if name not in text] == []
