"""Asynchronous reinforcement learning of language models: services that communicate only through NATS and S3.

The public interface is what ``__all__`` names, the `penstock` command, the run file, and the wire and storage formats
of `penstock.protocol`. What a kind of extension implements is public in its own module (``docs/extending.md`` lists it);
every other module is private and may change in any release.

The packages below this name are links to the folders at the top of the repository. Names are resolved when they are
used, so that ``import penstock`` imports nothing else.
"""

import functools
import importlib
from typing import Any

__version__ = "0.1.0"


@functools.cache
def _modules() -> dict[str, str]:
    """Return the module of each public name, as ``__init__.pyi`` has them."""
    import ast  # noqa: PLC0415  # `import penstock` imports as little as it can
    from pathlib import Path  # noqa: PLC0415

    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    return {
        alias.name: node.module or "" for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }


def __getattr__(name: str) -> Any:
    """Import the module of a public name; raises AttributeError for any other name."""
    if name.startswith("__") and name != "__all__":  # what Python and its tools ask every module for
        raise AttributeError(name)
    everything = sorted(("__version__", *_modules()))
    if name not in _modules() and name != "__all__":
        raise AttributeError(f"module 'penstock' has no attribute {name!r}; public are {', '.join(everything)}")
    value = everything if name == "__all__" else getattr(importlib.import_module(_modules()[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_modules()})
