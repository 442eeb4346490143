"""Asynchronous reinforcement learning of language models: services that communicate only through NATS and S3.

The public interface is what ``__all__`` names, the `penstock` command, the run file, and the wire and storage formats
of `penstock.protocol`. Every other module is private: it may change in any release. ``docs/extending.md`` lists what
extensions implement.

The packages below this name are links to the folders at the top of the repository. Names are resolved when they are
used, so that ``import penstock`` imports nothing else.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.protocol.errors import ConfigError as ConfigError
    from penstock.protocol.errors import PenstockError as PenstockError
    from penstock.protocol.extensions import Extension as Extension
    from penstock.protocol.extensions import Registry as Registry

__version__ = "0.1.0"

# Public name -> module that defines it. tests/packaging/test_public_interface.py has each with its signature.
_MODULES = {
    "ConfigError": "penstock.protocol.errors",
    "Extension": "penstock.protocol.extensions",
    "PenstockError": "penstock.protocol.errors",
    "Registry": "penstock.protocol.extensions",
}
__all__ = ["ConfigError", "Extension", "PenstockError", "Registry", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the module of a public name; raises AttributeError for any other name."""
    if name not in _MODULES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}; public are {', '.join(__all__)}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
