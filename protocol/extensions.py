"""Extensions by name: built in, by import path, or by entry point of an installed package.

A run file names an extension in one of the four ways of docs/extending.md: ``ppo_clip`` (built in: a file of a package
of Penstock, or of a package in it), ``my_pkg.losses:tilted``, ``my_losses.py:tilted`` and ``tilted``, an entry point in
the group of its kind. An attribute that is a class stands for an instance of it, made without arguments. What comes
from outside Penstock carries a digest of its source, which a run records: replay reports when it changed. The working
directory is searched for the module that was named, after everything that is installed, and for nothing else.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar

from penstock.protocol.errors import ConfigError

Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class Extension(Generic[Kind]):
    name: str  # as the run file writes it
    value: Kind
    digest: str = ""  # of its source, 16 hex digits; empty for what is built in


class Registry(Generic[Kind]):
    def __init__(self, kind: str, expected: type[Kind], *, package: str, group: str, second_package: str = "") -> None:
        """Describe a kind of extension; nothing is imported yet.

        Args:
            kind: What messages call it, such as ``"loss"``.
            expected: The class of every extension of this kind.
            package: Package whose modules, and those of its packages, hold the built-in ones: every instance of
                ``expected`` at the top level of a module is registered under its attribute ``name``.
            group: Entry point group of installed packages.
            second_package: Another package of built-in ones, above the package that makes the registry; empty: none.
        """
        self.kind = kind
        self._expected = expected
        self._packages = tuple(filter(None, (package, second_package)))
        self._group = group
        self._loaded: dict[tuple[str, Path], Extension[Kind]] = {}  # a module is imported once, so is its digest read

    @cached_property
    def built_in(self) -> dict[str, Kind]:
        extensions: dict[str, Kind] = {}
        for module in (module for package in self._packages for module in _modules(package)):
            for value in vars(module).values():
                if not isinstance(value, self._expected):
                    continue
                name = str(getattr(value, "name"))  # noqa: B009 - `expected` promises the attribute, not its type
                if extensions.setdefault(name, value) is not value:
                    raise TypeError(f"two {self.kind} extensions are named {name!r}; rename that in {module.__name__}")
        return dict(sorted(extensions.items()))

    def names(self) -> tuple[str, ...]:
        return tuple(sorted({*self.built_in, *(point.name for point in metadata.entry_points(group=self._group))}))

    def find(self, name: str) -> Extension[Kind]:
        """Return the extension that a run file names.

        Raises ConfigError when there is none, when its module cannot be imported, or when it is not of the expected
        class; the message names what was expected and the nearest known name.
        """
        if ":" not in name and name in self.built_in:
            return Extension(name, self.built_in[name])
        place = (name, Path.cwd())  # a file's name is relative to the working directory
        if place not in self._loaded:
            self._loaded[place] = self._find_outside(name)
        return self._loaded[place]

    def _find_outside(self, name: str) -> Extension[Kind]:
        if ":" in name:
            module_name, _, attribute = name.rpartition(":")
            return self._load(name, module_name, attribute)
        for point in metadata.entry_points(group=self._group, name=name):
            return self._load(name, point.module, point.attr)
        near = difflib.get_close_matches(name, self.names(), n=1, cutoff=0.6)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(self.names())}"
        raise ConfigError(f"unknown {self.kind} {name!r}; {hint}; your own is module:attribute or file.py:attribute")

    def _load(self, name: str, module_name: str, attribute: str) -> Extension[Kind]:
        module, value = _imported(module_name, attribute, f"{self.kind} {name!r}")
        if isinstance(value, type) and issubclass(value, self._expected):
            try:
                value = value()
            except TypeError as err:
                raise ConfigError(f"{self.kind} {name!r}: {value.__name__}() cannot be made: {err}") from None
        if not isinstance(value, self._expected):
            raise ConfigError(
                f"{self.kind} {name!r}: expected an instance of {self._expected.__module__}.{self._expected.__name__}, "
                f"got {type(value).__name__}; build one in {module.__file__}"
            )
        return Extension(name, value, source_digest(module))


def load_attribute(reference: str, what: str) -> object:
    """Return an attribute of a module or file that somebody else wrote: ``module:attribute`` or ``file.py:attribute``.

    Raises ConfigError that begins with ``what`` and the reference.
    """
    module_name, _, attribute = reference.rpartition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{what} {reference!r}: expected module:attribute or file.py:attribute")
    return _imported(module_name, attribute, f"{what} {reference!r}")[1]


def source_digest(module: ModuleType) -> str:
    """Return 16 hex digits that change with the source of a module, or of the whole package that holds it."""
    top = sys.modules.get(module.__name__.partition(".")[0], module)
    folders = [Path(folder) for folder in getattr(top, "__path__", ())]
    files = sorted(file for folder in folders for file in folder.rglob("*.py")) or [Path(module.__file__ or "")]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0".encode() + (file.read_bytes() if file.is_file() else b""))
    return digest.hexdigest()[:16]


def _modules(package: str) -> Iterator[ModuleType]:
    parent = importlib.import_module(package)
    yield parent
    for info in pkgutil.walk_packages(parent.__path__, f"{package}."):
        yield importlib.import_module(info.name)


def _imported(name: str, attribute: str, what: str) -> tuple[ModuleType, object]:
    """Return a module and one of its attributes; raises ConfigError that begins with ``what``."""
    try:
        module = _from_file(Path(name)) if name.endswith(".py") else _from_module(name)
    except ConfigError as err:
        raise ConfigError(f"{what}: {err}") from None
    except Exception as err:
        raise ConfigError(f"{what}: importing {name} failed: {type(err).__name__}: {err}") from err
    if not hasattr(module, attribute):
        raise ConfigError(f"{what}: {module.__file__} has no attribute {attribute!r}")
    return module, getattr(module, attribute)


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"no such file: {path.absolute()}")
    name = f"penstock_extension_{hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickled classes look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _from_module(name: str) -> ModuleType:
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.append(here)  # last, so that it hides nothing that is installed
    try:
        return importlib.import_module(name)
    finally:
        if added:
            sys.path.remove(here)
